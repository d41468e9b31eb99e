//! Work in another network namespace, by a thread of its own.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Runs `work` in the network namespace of a process.
pub(crate) fn inside_of<T: Send>(pid: i32, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    inside(&File::open(format!("/proc/{pid}/ns/net"))?, work)
}

/// Runs `work` in the network namespace that is kept at a path.
pub(crate) fn inside_at<T: Send>(path: &Path, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    inside(&File::open(path)?, work)
}

/// Runs `work` in a network namespace.
pub(crate) fn inside<T: Send>(
    namespace: &File,
    work: impl FnOnce() -> io::Result<T> + Send,
) -> io::Result<T> {
    on_a_thread(|| {
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
        work()
    })
}

/// Runs `work` by a thread whose namespaces nobody else needs.
pub(crate) fn on_a_thread<T: Send>(work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    std::thread::scope(|scope| scope.spawn(work).join().expect("the work does not panic"))
}
