//! The state of a disk, and the orders of commands.

use serde::{Deserialize, Serialize};
use verbatim_lease::Copy;

use super::servers::Standing;
use super::{Disk, Order};
use crate::block::PAGE_BYTES;
use crate::link::Wanted;

/// The state of a copy, for display.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyStatus {
    /// server or file.
    pub kind: String,
    /// The server's host, or the file's path.
    pub place: String,
    /// up, suspended, leaving, down, or adopted: the lease is still another host's.
    pub state: String,
    /// The reason, if it is not up; the last error of a file.
    pub reason: Option<String>,
    /// Bytes with the last written content.
    pub bytes: u64,
    /// Number of times that it was given up.
    pub failures: u64,
}

/// The state of a disk, for display.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The name.
    pub name: String,
    /// The disk's process.
    pub pid: u32,
    /// The clients' address.
    pub uri: String,
    /// serving; held or moved, on its way to another host; arriving or ready, on its way to this one.
    #[serde(default = "serving")]
    pub role: String,
    /// The other host, if the role has one that is known here.
    #[serde(default)]
    pub other_host: Option<String>,
    /// The instance that the disk belongs to; `None` if it was attached by hand.
    #[serde(default)]
    pub instance: Option<String>,
    /// Its block device of this machine, if it has one.
    pub device: Option<std::path::PathBuf>,
    /// The length.
    pub bytes: u64,
    /// Bytes that were written and not discarded since.
    pub used_bytes: u64,
    /// Bytes that no copy has: they read as errors.
    pub lost_bytes: u64,
    /// Connected clients, without the kernel for the device.
    pub clients: usize,
    /// Requests since it was attached.
    pub requests: Totals,
    /// The server, and its stand-in.
    pub copies: Vec<CopyStatus>,
}

fn serving() -> String {
    "serving".to_owned()
}

/// Requests that were answered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// READs.
    pub reads: u64,
    /// WRITEs.
    pub writes: u64,
    /// Discards and zeros.
    pub zeros: u64,
    /// Requests that were answered with an error.
    pub failed: u64,
}

impl Disk {
    /// The answer, and whether the order was the end. `None`: the answer comes later.
    pub(super) fn order(&mut self, order: &Order) -> Option<(Result<Status, String>, bool)> {
        let clients = self.users();
        Some(match order {
            Order::Follow { .. } | Order::Mirrored { .. } | Order::Hold { .. } | Order::Settle { .. } => {
                return self.order_of_move(order).map(|said| (said, false));
            }
            Order::Status => (Ok(self.status()), false),
            Order::Detach { force: false } if self.settings.instance.is_some() => {
                let why = format!(
                    "it is in use by the instance {}; it ends with that",
                    self.settings.instance.as_deref().unwrap_or_default()
                );
                (Err(why), false)
            }
            Order::Detach { force: false } if clients > 0 => {
                let why = format!(
                    "{clients} clients use it; swapoff first, or --force, which loses what they have there"
                );
                (Err(why), false)
            }
            Order::Detach { .. } => {
                let status = self.status();
                // A held disk may be another host's by now.
                let word = match self.is_gone() || self.is_held() {
                    true => Wanted::Abandon,
                    false => Wanted::Goodbye,
                };
                for server in self.servers.iter().flatten() {
                    server.want(word.clone());
                }
                (Ok(status), true)
            }
        })
    }

    fn users(&self) -> usize {
        let clients = self.clients.iter().flatten();
        clients.filter(|client| !client.is_kernel()).count()
    }

    pub(super) fn status(&self) -> Status {
        let counts = self.engine.counts();
        let of = |copy| match copy {
            Copy::First => counts.both + counts.first_only,
            Copy::Second => counts.both + counts.second_only,
        };
        let mut copies = Vec::new();
        for copy in Copy::BOTH {
            let bytes = of(copy) * PAGE_BYTES;
            if let Some(server) = &self.servers[copy.index()] {
                let state = match &server.standing {
                    Standing::Up(_) if server.is_leaving => "leaving",
                    Standing::Up(_) if !server.is_ours => "adopted",
                    Standing::Up(_) => "up",
                    Standing::Suspended(_) => "suspended",
                    Standing::Down => "down",
                };
                copies.push(CopyStatus {
                    kind: "server".to_owned(),
                    place: server.host.clone(),
                    state: state.to_owned(),
                    reason: (!server.why.is_empty()).then(|| server.why.clone()),
                    bytes,
                    failures: server.failures,
                });
            } else if let (Copy::Second, Some(file)) = (copy, &self.file) {
                copies.push(CopyStatus {
                    kind: "file".to_owned(),
                    place: file.path.clone(),
                    state: "up".to_owned(),
                    reason: file
                        .error
                        .map(|errno| std::io::Error::from_raw_os_error(errno).to_string()),
                    bytes,
                    failures: 0,
                });
            }
        }
        let is_quiet = self.engine.is_idle();
        Status {
            name: self.settings.name.clone(),
            pid: std::process::id(),
            uri: self.settings.uri.clone().unwrap_or_default(),
            role: self.role().to_owned(),
            other_host: self.other_host(),
            instance: self.settings.instance.clone(),
            device: None,
            bytes: self.settings.bytes,
            used_bytes: self.settings.bytes - counts.zero * PAGE_BYTES,
            // Pages that are being written count as nowhere for the moment.
            lost_bytes: if is_quiet { counts.neither * PAGE_BYTES } else { 0 },
            clients: self.users(),
            requests: self.counts,
            copies,
        }
    }
}
