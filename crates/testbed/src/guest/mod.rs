//! Pid 1 of a machine: finds the root, starts the agent, reaps what others leave behind.
//!
//! It has one thread. Whatever goes wrong is written to the console, and then it ends, which the kernel answers with a
//! panic and QEMU with its end: a machine that cannot come up does not hang.

mod agent;
mod root;

use crate::error::{Error, Result};
use rustix::io::Errno;
use rustix::process::{Pid, WaitOptions, wait};

/// What the agent and what it starts find in their environment.
const ENVIRONMENT: [(&str, &str); 4] = [
    (
        "PATH",
        "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    ),
    ("HOME", "/root"),
    ("LANG", "C.UTF-8"),
    ("TERM", "dumb"),
];

/// Takes the role of pid 1 if this process is that of a machine, and never returns from it; returns at once if not.
///
/// Call it first in `main` of a program that [`crate::Image::of`] puts into an image.
pub fn run_role() {
    // The kernel calls the program of an initial RAM disk by this name.
    if std::process::id() != 1 || std::env::args_os().next().is_none_or(|name| name != "/init") {
        return;
    }
    if let Err(error) = main() {
        let reason = std::error::Error::source(&error).map(|source| format!(": {source}"));
        eprintln!("testbed: {error}{}", reason.unwrap_or_default());
    }
    std::process::exit(1)
}

fn main() -> Result<()> {
    root::enter()?;
    for (name, value) in ENVIRONMENT {
        // SAFETY: this process has one thread, so nobody reads the environment meanwhile.
        unsafe { std::env::set_var(name, value) };
    }
    // SAFETY: this process has one thread, so the child finds no lock that another one holds.
    let agent = match unsafe { libc::fork() } {
        0 => {
            let Err(error) = agent::main();
            eprintln!("testbed: the agent ends: {error}");
            std::process::exit(1)
        }
        pid => {
            Pid::from_raw(pid).ok_or_else(|| Error::io("start the agent")(std::io::Error::last_os_error()))?
        }
    };
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((pid, _))) if pid == agent => {
                return Err(Error::Config("the agent has ended".to_owned()));
            }
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(Error::io("wait for processes")(errno)),
        }
    }
}
