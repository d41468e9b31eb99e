//! As `src/ring.rs`, of the same sources.

#[path = "../../src/ring/completion.rs"]
pub mod completion;
#[path = "../../src/ring/doorbell.rs"]
pub mod doorbell;
#[path = "../../src/ring/index.rs"]
mod index;
#[path = "../../src/ring/testing.rs"]
pub mod testing;
#[path = "../../src/ring/work.rs"]
pub mod work;

pub use index::BadIndex;
