//! Who asks.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::Ordering;
use std::time::Instant;

use rustix::net::{SocketFlags, accept_with};
use verbatim_seqpacket::{Error, Socket};

use super::Worker;
use crate::config::Config;
use crate::protocol::{Phase, Request};
use crate::source::Source;
use crate::sys::descriptors;

/// Connections.
#[derive(Debug, Default)]
pub(super) struct Control {
    clients: BTreeMap<RawFd, Client>,
}

#[derive(Debug)]
struct Client {
    socket: Socket,
    /// It is told of each phase.
    watches: bool,
}

impl Worker<'_> {
    pub(super) fn accept(&mut self) {
        let listener = descriptors::at(self.numbers.control());
        if let Ok(accepted) = accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            self.add_client(accepted);
        }
    }

    fn add_client(&mut self, accepted: OwnedFd) {
        let number = accepted.as_raw_fd();
        self.waiter.add_client(number);
        let socket = Socket::from_fd(accepted);
        self.control.clients.insert(
            number,
            Client {
                socket,
                watches: false,
            },
        );
    }

    /// Answers one request. A client that has gone, or does not read, is forgotten.
    pub(super) fn serve(&mut self, fd: RawFd) {
        let Some(client) = self.control.clients.get(&fd) else {
            return;
        };
        let request = match client.socket.recv::<Request>() {
            Ok(received) => received.message,
            Err(Error::WouldBlock) => return,
            Err(_) => {
                self.control.clients.remove(&fd);
                return;
            }
        };
        self.asked = Instant::now();
        match request {
            Request::Status => {}
            Request::Watch => {
                if let Some(client) = self.control.clients.get_mut(&fd) {
                    client.watches = true;
                }
            }
            Request::Prepare => self.prepare(),
            Request::End => {
                if self.phase() == Phase::Filled {
                    self.region.header().ending.store(1, Ordering::SeqCst);
                }
            }
            Request::GiveUp => self.region.header().ending.store(1, Ordering::SeqCst),
        }
        let status = self.status();
        let client = &self.control.clients[&fd];
        if client.socket.send(&status, &[]).is_err() {
            self.control.clients.remove(&fd);
        }
    }

    /// Maps the cache files that there are.
    fn prepare(&mut self) {
        let entries = std::fs::read_dir(&self.config.cache)
            .into_iter()
            .flatten()
            .flatten();
        let numbers: Vec<u32> = entries
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .collect();
        for vpid in numbers {
            if self.state.arrived.contains(&vpid) {
                continue;
            }
            let prepared = Source::open(&self.config.cache, vpid).and_then(|mut source| {
                let prepared = source.prepare();
                self.sources.insert(vpid, source);
                prepared.map_err(|error| error.to_string())
            });
            if let Err(error) = prepared {
                (self.say)(&format!("the cache of task {vpid} is not prepared: {error}"));
            }
        }
    }

    /// Tells watchers if the phase is another one than they know.
    pub(super) fn tell_phase(&mut self) {
        let phase = self.phase();
        if self.told.as_ref() == Some(&phase) {
            return;
        }
        (self.say)(&format!("{phase:?}, {} tasks", self.state.tasks.len()));
        if phase == Phase::Filled {
            let _ = std::fs::File::create(Config::filled_mark(&self.config.control));
        }
        self.told = Some(phase);
        let status = self.status();
        self.control
            .clients
            .retain(|_, client| !client.watches || client.socket.send(&status, &[]).is_ok());
    }
}
