//! A dump that leaves private memory out of its images, and a restore that gets it from somebody else.
//!
//! CRIU keeps the pages of a lazy dump in pipes, and serves them after its `post-dump` to whoever asks (`criu/mem.c`,
//! `criu/page-xfer.c`). Nobody asks here: the destination has every page before the decision. Asked by RPC, CRIU takes no notice
//! of the address that it is given for that, and listens on all of them (`criu/cr-service.c`). So it gets a connection that is there
//! already, which only an option of its configuration file can name: one end of a pair of sockets, whose other end is ours and says
//! nothing. When that end is closed, CRIU is done with serving.
//!
//! ```text
//!  CRIU ── post-dump ──► proxy          both ways are open, as without it
//!       ◄── answer ─────               the proxy has closed its end first
//!       ── status-ready ──►            nobody needs it; CRIU finds the connection closed, and kills the tasks or lets them go
//! ```

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

/// The notification of a lazy dump that comes when CRIU serves pages (`criu/action-scripts.c`).
pub(super) const SERVING: &str = "status-ready";

/// Both ends of the connection from which CRIU serves pages, and the file that names CRIU's.
pub(super) struct PageServer {
    ours: OwnedFd,
    /// Inherited by whatever this process starts.
    theirs: OwnedFd,
    configuration: File,
}

impl PageServer {
    /// Makes the connection; CRIU inherits its end of it if it is started from now on.
    pub fn new() -> io::Result<Self> {
        let (ours, theirs) = socketpair(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )?;
        rustix::io::fcntl_setfd(&theirs, rustix::io::FdFlags::empty())?;
        let mut configuration = File::from(memfd_create("criu.conf", MemfdFlags::CLOEXEC)?);
        writeln!(configuration, "ps-socket {}", theirs.as_raw_fd())?;
        Ok(Self {
            ours,
            theirs,
            configuration,
        })
    }

    /// Where CRIU finds the configuration file, as long as this is not dropped.
    pub fn configuration(&self) -> String {
        format!(
            "/proc/{}/fd/{}",
            std::process::id(),
            self.configuration.as_raw_fd()
        )
    }

    /// CRIU has been started. What is left closes the connection when it is dropped.
    pub fn inherited(self) -> Connection {
        let Self {
            ours,
            theirs,
            configuration,
        } = self;
        drop(theirs);
        Connection {
            _ours: ours,
            _configuration: configuration,
        }
    }
}

/// Our end of the connection: CRIU serves pages until it is dropped.
pub(super) struct Connection {
    _ours: OwnedFd,
    _configuration: File,
}
