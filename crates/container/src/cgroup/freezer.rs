//! Freezing and thawing.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{Cgroup, CgroupVersion, flag, gone_means, in_file, too_late, unexpected};

/// How often the freezer of version 1 is asked: it tells nobody. A task is frozen within microseconds unless it is in
/// the middle of a system call that cannot be interrupted.
pub(super) const ASK_AGAIN: Duration = Duration::from_micros(100);

/// The file of version 1.
const STATE: &str = "freezer.state";

impl Cgroup {
    /// Freezes all tasks, and returns when none of them executes an instruction any more; from then on none does until
    /// [`Self::thaw`], whoever lives or dies. If that is not so after `limit` they are thawed again, and it is an error.
    pub fn freeze(&self, limit: Duration) -> io::Result<()> {
        let deadline = Instant::now() + limit;
        let frozen = match self.version {
            CgroupVersion::V1 => self
                .write(STATE, "FROZEN")
                .and_then(|()| self.await_state("FROZEN", deadline)),
            CgroupVersion::V2 => self
                .write("cgroup.freeze", "1")
                .and_then(|()| self.await_event("frozen", true, deadline)),
        };
        if frozen.is_err() {
            // What was half done must not stay; the error is the one above.
            let _ = self.order_thaw();
        }
        frozen
    }

    /// Lets all tasks go on, and returns when they may; a cgroup that is not there is fine. It is an error if they are still
    /// frozen after `limit`, which is so when a cgroup above is frozen.
    pub fn thaw(&self, limit: Duration) -> io::Result<()> {
        let deadline = Instant::now() + limit;
        let thawed = self.order_thaw().and_then(|()| match self.version {
            CgroupVersion::V1 => self.await_state("THAWED", deadline),
            CgroupVersion::V2 => self.await_event("frozen", false, deadline),
        });
        gone_means(thawed, ())
    }

    /// Whether all tasks are frozen. One that is not there is not.
    pub fn is_frozen(&self) -> io::Result<bool> {
        let frozen = match self.version {
            CgroupVersion::V1 => self.state().map(|state| state == "FROZEN"),
            CgroupVersion::V2 => self.event("frozen"),
        };
        gone_means(frozen, false)
    }

    /// Orders the thaw and does not wait for it.
    pub(super) fn order_thaw(&self) -> io::Result<()> {
        match self.version {
            CgroupVersion::V1 => self.write(STATE, "THAWED"),
            CgroupVersion::V2 => self.write("cgroup.freeze", "0"),
        }
    }

    /// The state of version 1. Reading it is what makes the kernel look whether all tasks are frozen by now.
    fn state(&self) -> io::Result<String> {
        let path = self.file(STATE);
        let text = std::fs::read_to_string(&path).map_err(|error| in_file(&path, &error))?;
        match text.trim_end() {
            state @ ("THAWED" | "FREEZING" | "FROZEN") => Ok(state.to_owned()),
            _ => Err(unexpected(&path, &text)),
        }
    }

    /// Reads the state of version 1 until it is `wanted`.
    fn await_state(&self, wanted: &str, deadline: Instant) -> io::Result<()> {
        loop {
            let state = self.state()?;
            if state == wanted {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(too_late(&self.path, &format!("are {state} and not {wanted}")));
            }
            // There is nothing to wait for: version 1 has no event.
            std::thread::sleep(ASK_AGAIN);
        }
    }

    /// Waits until a key of version 2's `cgroup.events` has a value.
    pub(super) fn await_event(&self, key: &str, wanted: bool, deadline: Instant) -> io::Result<()> {
        let path = self.file("cgroup.events");
        let located = |error: io::Error| in_file(&path, &error);
        let mut file = File::open(&path).map_err(located)?;
        let mut text = String::new();
        loop {
            text.clear();
            // A change between this and the poll ends the poll: the kernel counts the changes that a file has not read.
            file.rewind().map_err(located)?;
            file.read_to_string(&mut text).map_err(located)?;
            if flag(&text, key).ok_or_else(|| unexpected(&path, &text))? == wanted {
                return Ok(());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(too_late(
                    &self.path,
                    &format!("are not at {key} {}", u8::from(wanted)),
                ));
            }
            let left = Timespec::try_from(left).map_err(io::Error::other)?;
            match poll(&mut [PollFd::new(&file, PollFlags::PRI)], Some(&left)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}
