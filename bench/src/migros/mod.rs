//! The figures of MigrOS's evaluation (§5), each a module, with the paper's numbers beside ours where it gives some.

pub mod delay_line;
pub mod images;
pub mod link;
pub mod migration_time;
pub mod objects;
pub mod transport;
