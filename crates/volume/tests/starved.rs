//! A copy beside programs that take all the processor time they get.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use support::tenant::{BLOCK, Tenant};
use support::{Lab, until};

const SIZE: u64 = (4 << 20) + BLOCK as u64;

/// Spinning threads for each processor. Beside them a thread with `nice` 19 gets 1/274 of a processor.
const SPINNING: usize = 4;

/// Threads that spin until they are dropped.
struct Load {
    is_over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Load {
    fn start() -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let spin = |_| {
            let is_over = is_over.clone();
            std::thread::spawn(move || while !is_over.load(Ordering::Relaxed) {})
        };
        let threads = (0..SPINNING * processors).map(spin).collect();
        Self { is_over, threads }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            thread.join().expect("it does not panic");
        }
    }
}

#[test]
fn a_copy_comes_to_its_end_beside_programs_that_take_all_processors() {
    let lab = Lab::new();
    lab.volume("db", &SIZE.to_string());
    let sockets = [lab.socket(0, "db"), lab.socket(1, "db")];
    let tenant = Tenant::start(sockets, SIZE / BLOCK as u64, 3, 1);
    until("the tenant works", || tenant.done() > 100);
    let load = Load::start();
    let is_moved = lab.ends_in_time(0, &["migrate", "db", "--to", "b"]);
    drop(load);
    assert!(is_moved, "{:?}\n{}", lab.status(0, "db"), lab.logs());
    let before = tenant.done();
    until("the tenant goes on", || tenant.done() > before + 100);
    tenant.stop().check(&lab.data(1, "db"));
}
