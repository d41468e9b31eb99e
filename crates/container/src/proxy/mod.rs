//! The proxy that runc starts in the place of CRIU.
//!
//! runc starts `criu swrk 3`, whose third descriptor is a `SOCK_SEQPACKET` socket that speaks CRIU's RPC
//! (`images/rpc.proto`; one packet is one message). The proxy starts the real CRIU in the same way, passes the
//! messages on, and stops at two points until the agent decides (see [`gate`](crate::gate)): before CRIU does anything (it has got the
//! request of a dump and stands at `pre-dump`; it has not got that of a pre-dump or restore), and at the notification after which
//! there is no way back. So everything that is slow and does not need a frozen container (starting runc twice, its versions and
//! mounts, starting CRIU) happens before the freeze.
//!
//! ```text
//!  runc ◄── fd 3 ──► proxy ◄── socketpair ──► criu swrk 3
//!                      │
//!                      └── gate ──► agent
//! ```
//!
//! Things to know:
//! - CRIU is started when runc's request arrives, not before: for a restore runc first moves the process that it
//!   started into the container's cgroup, and the restored tasks inherit that from CRIU.
//! - A restored container's first process is CRIU's sibling (`rst_sibling`), that is our child, until we end and it
//!   goes to the agent (`PR_SET_CHILD_SUBREAPER`).
//! - CRIU opens the image directory as `/proc/PEER/fd/N`, and its peer is now us (`criu/cr-service.c`): see
//!   [`request`].

pub(crate) mod fuzzing;
mod hurry;
mod lazy;
mod relay;
mod request;
pub(crate) mod wire;

use std::ffi::OsString;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use verbatim_seqpacket::Socket;

use crate::criu::CRIU_VARIABLE;

/// The descriptor on which runc and CRIU speak.
const RPC_FD: i32 = 3;

/// What the program does when it is started under the name `criu`: see the module's page.
///
/// Without a gate, or when it is asked for anything but `swrk 3`, it becomes the real CRIU.
pub fn criu_proxy_main() -> ! {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let gate = std::env::var_os(crate::gate::GATE_VARIABLE).map(PathBuf::from);
    let is_worker = arguments.len() == 2 && arguments[0] == "swrk" && arguments[1] == "3";
    // Of its own files and sockets.
    verbatim_jail::umask::keep_private();
    let code = match gate {
        Some(gate) if is_worker => match relay::run(&gate) {
            Ok(code) => code,
            Err(error) => {
                eprintln!("verbatim: the proxy in front of CRIU failed: {error:#}");
                1
            }
        },
        _ => {
            let error = exec_criu(&arguments);
            eprintln!("verbatim: CRIU cannot be started: {error:#}");
            1
        }
    };
    std::process::exit(code)
}

/// The CRIU behind the proxy: named by whoever started runc; `PATH` would lead back to the proxy.
fn real_criu() -> anyhow::Result<PathBuf> {
    match std::env::var_os(CRIU_VARIABLE) {
        Some(path) => Ok(path.into()),
        None => anyhow::bail!("{CRIU_VARIABLE} does not name the CRIU behind the proxy"),
    }
}

/// Becomes the real CRIU; returns only if that fails.
fn exec_criu(arguments: &[OsString]) -> anyhow::Error {
    match real_criu() {
        Ok(criu) => {
            let mut command = Command::new(criu);
            // SAFETY: the closure makes one system call.
            unsafe {
                command.pre_exec(verbatim_jail::umask::given_back());
            }
            command.args(arguments).exec().into()
        }
        Err(error) => error,
    }
}

/// Becomes the real CRIU on the socket that runc made.
fn become_criu(runc: Socket) -> anyhow::Result<i32> {
    // The descriptor was inherited from runc and is not close-on-exec.
    let _stays_open = runc.into_fd();
    Err(exec_criu(&["swrk".into(), "3".into()]))
}

/// Starts the real CRIU with a socket of ours as its descriptor 3, in the network namespace that the agent has named; it inherits all
/// other descriptors from runc.
fn start_criu() -> anyhow::Result<(Child, Socket)> {
    use anyhow::Context;

    let network = match std::env::var_os(crate::gate::NETWORK_VARIABLE) {
        Some(path) => {
            Some(File::open(&path).with_context(|| format!("the network namespace {}", path.display()))?)
        }
        None => None,
    };
    let (ours, theirs) = Socket::pair()?;
    let theirs = theirs.into_fd();
    let number = theirs.as_raw_fd();
    let mut command = Command::new(real_criu()?);
    command.args(["swrk", "3"]).env_remove(crate::gate::GATE_VARIABLE);
    let enter = move || match &network {
        Some(network) => move_into_link_name_space(network.as_fd(), Some(LinkNameSpaceType::Network)),
        None => Ok(()),
    };
    // SAFETY: between fork and exec only `setns` and `dup2` are called, which are async-signal-safe; the descriptors are open in the
    // child, and `dup2` gives number 3 no close-on-exec flag.
    unsafe {
        // CRIU has the umask that runc had.
        command.pre_exec(verbatim_jail::umask::given_back());
        command.pre_exec(move || {
            enter()?;
            match libc::dup2(number, RPC_FD) {
                -1 => Err(std::io::Error::last_os_error()),
                _ => Ok(()),
            }
        });
    }
    let child = command
        .spawn()
        .with_context(|| format!("{:?}", command.get_program()))?;
    drop(theirs);
    Ok((child, ours))
}

/// runc's end of the conversation.
fn runc_socket() -> Socket {
    // SAFETY: `swrk 3` says that descriptor 3 is open and meant for us; this is called once.
    Socket::from_fd(unsafe { OwnedFd::from_raw_fd(RPC_FD) })
}
