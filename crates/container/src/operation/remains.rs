//! What is left of an operation that comes to nothing, and how it is cleaned up.

use std::io;
use std::path::PathBuf;

use tokio::io::unix::AsyncFd;
use verbatim_seqpacket::Socket;

use super::Runner;
use crate::cgroup::Cgroup;
use crate::error::Error;
use crate::gate::{Kind, Report};
use crate::marker::{self, Marker};
use crate::name::ContainerName;
use crate::runc::Runc;
use crate::watch::Raw;

/// What an operation leaves that comes to nothing.
pub(super) struct Remains {
    pub runc: Runc,
    pub kind: Kind,
    pub name: ContainerName,
    pub work: PathBuf,
    pub child: Runner,
    /// Its other end is closed when the proxy has ended.
    pub gate: Option<AsyncFd<Raw<Socket>>>,
    /// Where tasks of a dump may be frozen that are to go on.
    pub frozen: Option<Cgroup>,
    /// Tasks of a restore that were released are not to be killed.
    pub leaves_released: bool,
}

impl Remains {
    /// Tells the proxy that nothing comes of it; its end can still be waited for.
    pub fn give_up(&self) {
        if let Some(gate) = &self.gate {
            // It fails where the proxy is gone.
            let _ = rustix::net::shutdown(&gate.get_ref().0, rustix::net::Shutdown::Write);
        }
    }

    /// Waits for runc and the proxy, lets the tasks of a dump go on and removes what a restore may have left.
    pub async fn clean_up(mut self) -> Result<(), Error> {
        self.give_up();
        let ended = self.child.wait().await;
        if let Some(gate) = &self.gate {
            // A runc that was killed ends before the proxy, which thaws. No thaw may come later, when the tasks are held again.
            await_close(gate)
                .await
                .map_err(|source| Error::file("wait for the proxy of", &self.work, source))?;
        }
        super::hold::thaw(&self.name, self.frozen).await?;
        ended.map_err(|source| self.runc.start_error(source))?;
        match self.kind {
            Kind::Dump | Kind::PreDump => Ok(()),
            Kind::Restore => {
                let marker = marker::read(&self.work)
                    .map_err(|source| Error::file("read the restore's marker in", &self.work, source))?;
                let cgroup = match marker {
                    Marker::Released(_) if self.leaves_released => return Ok(()),
                    Marker::Released(cgroup) | Marker::Unreleased(cgroup) => Some(cgroup),
                    Marker::None => None,
                };
                // Those that a CRIU has left which was killed runc does not know.
                super::kill(&self.name, cgroup).await?;
                self.runc.delete(&self.name, true).await
            }
        }
    }
}

/// Waits until the other end of a gate is closed, whatever it says before.
async fn await_close(gate: &AsyncFd<Raw<Socket>>) -> io::Result<()> {
    loop {
        let mut ready = gate.readable().await?;
        match gate.get_ref().0.recv::<Report>() {
            Ok(_) => {}
            Err(verbatim_seqpacket::Error::WouldBlock) => ready.clear_ready(),
            Err(_) => return Ok(()),
        }
    }
}
