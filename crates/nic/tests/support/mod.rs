//! A program without the guest library: the least that it takes to use the software RNIC, for tests and examples.
#![allow(dead_code, unused_imports, reason = "each user takes its part")]

pub mod chance;
pub mod cm;
pub mod objects;
pub mod peers;
pub mod program;
pub mod server;

pub use objects::{Channel, Events, Srq, Ud};
pub use peers::PeerAgent;
pub use program::{Memory, Program, Qp, Queue};
pub use server::Server;

use std::time::{Duration, Instant};

use verbatim_device::control::QpType;

/// Longer than anything takes; a test that waits so long has failed.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Yields until `ready` gives something.
///
/// # Panics
/// If it takes longer than [`PATIENCE`].
pub fn wait_for<T>(what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = ready() {
            return value;
        }
        assert!(start.elapsed() < PATIENCE, "waited too long for {what}");
        std::thread::yield_now();
    }
}

/// Whether the address sanitizer is here (`fuzz/sanitize`): it looks for leaks in a process of its own, which no RNIC in a jail makes.
pub fn is_sanitized() -> bool {
    std::env::var_os("ASAN_OPTIONS").is_some()
}

/// A program with one queue pair.
pub struct End {
    pub program: Program,
    pub queue: Queue,
    pub qp: Qp,
}

impl End {
    pub fn new(server: &Server) -> Self {
        let program = Program::connect(&server.socket(), "test");
        let queue = program.cq(256);
        let qp = program.qp(&queue, program::CAP);
        Self { program, queue, qp }
    }

    /// With another kind of queue pair.
    pub fn of_type(server: &Server, qp_type: QpType) -> Self {
        let program = Program::connect(&server.socket(), "test");
        let queue = program.cq(256);
        let qp = program.qp_with(&queue, program::CAP, qp_type, None);
        Self { program, queue, qp }
    }
}

/// Two programs at two RNICs, connected.
pub fn pair(a: &Server, b: &Server) -> (End, End) {
    let (left, right) = (End::new(a), End::new(b));
    left.program.connect_qp(&left.qp, b.address, right.qp.qpn);
    right.program.connect_qp(&right.qp, a.address, left.qp.qpn);
    (left, right)
}
