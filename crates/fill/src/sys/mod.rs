//! Everything unsafe: the memory that guardian and worker share, userfaultfd, descriptors at fixed numbers, processes.

pub mod descriptors;
pub mod process;
pub mod region;
pub mod uffd;
pub mod window;
