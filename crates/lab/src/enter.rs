//! Running a command in a host: a helper process enters the host's namespaces and stands in for the command outside.

use crate::error::{Error, Result};
use crate::host::{FOREIGN_VARIABLES, environment};
use crate::state::StateDir;
use crate::sys::{Signals, unblock_signals};
use crate::{cgroup, process};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use rustix::thread::{ThreadNameSpaceType, move_into_thread_name_spaces};
use std::ffi::OsString;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::Command;

/// Exit status if the command could not be started, as `nsenter` and shells have it.
const CANNOT_START: i32 = 127;

/// The role's entry: `argv` is the lab's state directory, the host's name, and the command line.
pub(crate) fn main(argv: &[OsString]) -> i32 {
    let [dir, host, program, args @ ..] = argv else {
        return 2;
    };
    match run(&StateDir::at(dir), &host.to_string_lossy(), program, args) {
        Ok(status) => status,
        Err(error) => {
            eprintln!(
                "cannot run {} in host {}: {}",
                program.display(),
                host.display(),
                error.chain()
            );
            CANNOT_START
        }
    }
}

fn run(dir: &StateDir, host: &str, program: &OsString, args: &[OsString]) -> Result<i32> {
    let gone = || Error::NotRunning {
        name: dir.name().to_owned(),
    };
    let config = dir.load_config()?;
    let state = dir.load()?.ok_or_else(gone)?;
    let index = state
        .hosts
        .iter()
        .position(|known| known.name == host)
        .ok_or_else(gone)?;
    let directory = std::env::current_dir().ok();

    enter(state.hosts[index].process, &config.name, host)?;
    if let Some(directory) = directory {
        // A mount namespace is entered at its root; the machine's folders are the host's too, but for a few.
        let _ = std::env::set_current_dir(directory);
    }
    let signals = Signals::take(&[libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGCHLD])
        .map_err(Error::io("take signals"))?;
    let mut command = Command::new(program);
    command.args(args).envs(environment(&config, index));
    for variable in FOREIGN_VARIABLES {
        command.env_remove(variable);
    }
    // SAFETY: prctl(2) is a plain system call, which may be made between fork and exec; so is what unblocks signals.
    unsafe {
        command.pre_exec(|| {
            unblock_signals()?;
            Ok(rustix::process::set_parent_process_death_signal(Some(
                Signal::KILL,
            ))?)
        });
    }
    let mut child = command
        .spawn()
        .map_err(Error::io(format!("start {}", program.display())))?;
    loop {
        if let Some(status) = child.try_wait().map_err(Error::io("wait for the command"))? {
            return Ok(status
                .code()
                .unwrap_or_else(|| 128 + status.signal().unwrap_or(0)));
        }
        match poll(&mut [PollFd::new(&signals, PollFlags::IN)], None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(Error::io("wait for the command")(errno)),
        }
        while let Some(signal) = signals.next() {
            let forward = Signal::from_named_raw(signal).filter(|&signal| signal != Signal::CHILD);
            if let (Some(signal), Some(pid)) = (forward, Pid::from_raw(child.id().cast_signed())) {
                // It is not reaped yet, so the pid is still the child's.
                let _ = rustix::process::kill_process(pid, signal);
            }
        }
    }
}

/// Enters a host's cgroup and namespaces; its pid namespace from the next child on.
fn enter(init: process::ProcessId, lab: &str, host: &str) -> Result<()> {
    let what = || format!("enter host {host}");
    let pid =
        Pid::from_raw(init.pid.cast_signed()).ok_or_else(|| Error::Config("pid 0 is no host".to_owned()))?;
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(Error::io(what()))?;
    if !init.is_alive() {
        return Err(Error::Refused(format!("host {host} is down")));
    }
    // While the machine's cgroup mounts are in sight.
    cgroup::join(lab, host)?;
    let namespaces = ThreadNameSpaceType::NETWORK
        | ThreadNameSpaceType::MOUNT
        | ThreadNameSpaceType::PROCESS_ID
        | ThreadNameSpaceType::HOST_NAME_AND_NIS_DOMAIN_NAME
        | ThreadNameSpaceType::INTER_PROCESS_COMMUNICATION;
    move_into_thread_name_spaces(std::os::fd::AsFd::as_fd(&pidfd), namespaces).map_err(Error::io(what()))?;
    // Died in between, its namespaces would be empty shells.
    pidfd_send_signal(&pidfd, Signal::CONT).map_err(Error::io(what()))
}
