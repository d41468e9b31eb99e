//! What can go wrong with a virtual machine.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// The result of an operation on a virtual machine.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation on a virtual machine failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Taps, bridges and namespaces need privileges.
    #[error("a virtual machine's network needs root: run it as root or with sudo")]
    NotRoot,
    /// Something is not installed.
    #[error("{what} is missing: run `./setup.sh --vm`")]
    NotInstalled {
        /// A program or a file.
        what: String,
    },
    /// A kernel module that the image needs is not among the kernel's.
    #[error(
        "kernel {release} has no module {module}: run `./setup.sh --vm`, or name another kernel by VERBATIM_VM_KERNEL"
    )]
    NoModule {
        /// The kernel's release.
        release: String,
        /// The module.
        module: String,
    },
    /// The request contradicts itself.
    #[error("{0}")]
    Config(String),
    /// `up` with a name that is taken.
    #[error("machine {name} is up already (pid {pid}): use it, or end it with `testbed down {name}`")]
    Exists {
        /// The machine.
        name: String,
        /// Its QEMU.
        pid: u32,
    },
    /// There is no machine of that name.
    #[error(
        "there is no machine {name}: start it with `testbed up {name}`; `testbed list` shows what there is"
    )]
    NoMachine {
        /// The machine asked for.
        name: String,
    },
    /// The machine's QEMU has ended.
    #[error("machine {name} has ended{}", console_end(console))]
    Ended {
        /// The machine.
        name: String,
        /// The last lines of its console.
        console: String,
    },
    /// Its kernel has died of a fault of QEMU's.
    #[error(
        "machine {name} has ended by a fault of QEMU's before version 8.1 (with several emulated processors, one ran an \
         instruction that another had replaced): start it again, or give it one processor{}",
        console_end(console)
    )]
    Emulator {
        /// The machine.
        name: String,
        /// The last lines of its console.
        console: String,
    },
    /// It did not come up in time.
    #[error("machine {name} did not answer within {limit:?}{}", console_end(console))]
    NotReady {
        /// The machine.
        name: String,
        /// How long it was waited for.
        limit: Duration,
        /// The last lines of its console.
        console: String,
    },
    /// All of its command channels are in use.
    #[error("machine {name} runs {ports} commands already, which is all it can")]
    Busy {
        /// The machine.
        name: String,
        /// How many channels it has.
        ports: usize,
    },
    /// The machine could not start the command.
    #[error("machine {name} cannot run {program}: {reason}")]
    NotStarted {
        /// The machine.
        name: String,
        /// The program.
        program: String,
        /// Why, as the machine says it.
        reason: String,
    },
    /// A command took too long, and was killed.
    #[error("`{what}` did not end within {limit:?} and was killed")]
    Timeout {
        /// The command line.
        what: String,
        /// Its time limit.
        limit: Duration,
    },
    /// A command of this machine failed.
    #[error("`{command}` failed: {output}")]
    Command {
        /// The command line.
        command: String,
        /// What it wrote to standard error.
        output: String,
    },
    /// The lab whose network was asked for.
    #[error(transparent)]
    Lab(#[from] verbatim_lab::Error),
    /// A file or a system call.
    #[error("cannot {what}")]
    Io {
        /// What was to be done.
        what: String,
        /// What the kernel said.
        source: io::Error,
    },
}

impl Error {
    /// Turns an error of the kernel into one that says what was to be done.
    pub(crate) fn io<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Self {
        let what = what.into();
        move |source| Self::Io {
            what,
            source: source.into(),
        }
    }

    /// As [`Self::io`], for something done to a file.
    pub(crate) fn file<E: Into<io::Error>>(verb: &str, path: impl Into<PathBuf>) -> impl FnOnce(E) -> Self {
        Self::io(format!("{verb} {}", path.into().display()))
    }
}

fn console_end(console: &str) -> String {
    if console.is_empty() {
        "; its console is empty".to_owned()
    } else {
        format!("; the end of its console:\n{console}")
    }
}
