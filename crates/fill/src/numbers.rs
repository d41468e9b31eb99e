//! Which descriptor has which number.

use std::sync::atomic::Ordering;

use crate::sys::region::Header;

/// Descriptors that outlive a worker, below those of the tasks.
#[derive(Debug, Clone, Copy)]
pub struct Numbers {
    /// First one of a task.
    pub base: i32,
    /// How many tasks there is room for.
    pub room: u32,
}

/// How many of them.
const FIXED: i32 = 4;

impl Numbers {
    /// Makes room for as many as possible.
    pub fn choose() -> Self {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        let hard = getrlimit(Resource::Nofile).maximum.unwrap_or(1 << 20);
        for most in [hard.clamp(1 << 16, 1 << 20), hard] {
            let limit = Some(most);
            if setrlimit(
                Resource::Nofile,
                Rlimit {
                    current: limit,
                    maximum: limit,
                },
            )
            .is_ok()
            {
                break;
            }
        }
        let most = getrlimit(Resource::Nofile)
            .current
            .unwrap_or(1 << 20)
            .clamp(64, 1 << 16) as i32;
        Self {
            base: most / 4,
            room: (most - most / 4) as u32,
        }
    }

    pub fn save(self, header: &Header) {
        header.base.store(self.base as u32, Ordering::SeqCst);
        header.room.store(self.room, Ordering::SeqCst);
    }

    pub fn load(header: &Header) -> Self {
        Self {
            base: header.base.load(Ordering::SeqCst) as i32,
            room: header.room.load(Ordering::SeqCst),
        }
    }

    /// Behind the numbers that mean nothing.
    pub fn low(self) -> i32 {
        self.base - FIXED
    }

    /// Our own listener.
    pub fn control(self) -> i32 {
        self.base - 1
    }

    /// CRIU's listener.
    pub fn listener(self) -> i32 {
        self.base - 2
    }

    /// CRIU's connection.
    pub fn criu(self) -> i32 {
        self.base - 3
    }

    /// The worker's process, for a guardian that is its child.
    pub fn worker(self) -> i32 {
        self.base - 4
    }

    /// The userfaultfd of task `index`.
    pub fn task(self, index: u32) -> i32 {
        self.base + index as i32
    }
}
