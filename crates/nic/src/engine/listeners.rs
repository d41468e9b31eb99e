//! The instances' listeners: sockets that are all a container sees of the RNIC, one for each.
//!
//! Nobody else needs to hold such a socket: if this process dies, the kernel refuses who connects, and cuts off who waits to be
//! accepted.

use std::collections::HashMap;
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SocketType, sockopt};
use verbatim_device::control::{MAX_INSTANCE_NAME, Reply};
use verbatim_seqpacket::Listener;

use super::Nic;
use crate::error::Refused;
use crate::poller::Token;

/// Names in one answer: a message has room for more of the longest.
const NAMES_PER_ANSWER: usize = 128;

/// The listeners by their numbers, which are never given again.
#[derive(Debug, Default)]
pub struct Listeners {
    known: HashMap<u32, OfInstance>,
    next: u32,
}

#[derive(Debug)]
struct OfInstance {
    instance: String,
    listener: Listener,
}

impl Listeners {
    pub fn get(&self, id: u32) -> Option<&Listener> {
        Some(&self.known.get(&id)?.listener)
    }

    /// The instance of a listener.
    pub fn instance(&self, id: u32) -> Option<&str> {
        Some(&self.known.get(&id)?.instance)
    }

    fn of(&self, instance: &str) -> Option<u32> {
        let mut known = self.known.iter();
        known
            .find(|(_, known)| known.instance == instance)
            .map(|(id, _)| *id)
    }
}

impl Nic {
    /// Accepts programs of an instance at a socket, in the place of an earlier one.
    pub(super) fn add_listener(&mut self, instance: String, fds: Vec<OwnedFd>) -> Result<Reply, Refused> {
        if instance.len() > MAX_INSTANCE_NAME {
            return Err(Refused::invalid(format!(
                "an instance's name has at most {MAX_INSTANCE_NAME} bytes"
            )));
        }
        let Ok([fd]) = <[OwnedFd; 1]>::try_from(fds) else {
            return Err(Refused::invalid("add listener takes one descriptor"));
        };
        let listens = sockopt::socket_domain(&fd) == Ok(AddressFamily::UNIX)
            && sockopt::socket_type(&fd) == Ok(SocketType::SEQPACKET)
            && sockopt::socket_acceptconn(&fd) == Ok(true);
        if !listens {
            let message = "the descriptor is no listening unix socket of type SOCK_SEQPACKET";
            return Err(Refused::invalid(message));
        }
        let listener = Listener::from_fd(fd);
        listener
            .set_nonblocking(true)
            .and_then(|()| listener.pass_credentials())
            .map_err(|error| Refused::new(error.errno(), error.to_string()))?;
        let earlier = self.listeners.of(&instance);
        let id = self.listeners.next;
        let watched = self.poller.add(&listener, Token::Listener(id));
        watched.map_err(|error| Refused::new(libc::ENOMEM, error.to_string()))?;
        self.listeners.next += 1;
        self.listeners.known.insert(id, OfInstance { instance, listener });
        if let Some(earlier) = earlier {
            // Who has found the earlier one and waits there is a program of the same instance.
            self.accept(Token::Listener(earlier));
            self.forget_listener(earlier);
        }
        Ok(Reply::Done)
    }

    /// The instance is gone, or elsewhere.
    pub(super) fn remove_listener(&mut self, instance: &str) -> Reply {
        if let Some(id) = self.listeners.of(instance) {
            self.forget_listener(id);
        }
        Reply::Done
    }

    /// Which instances have one, in order, from behind this name on.
    pub(super) fn query_listeners(&self, after: Option<&str>) -> Reply {
        let names = self.listeners.known.values().map(|known| known.instance.as_str());
        let mut names: Vec<&str> = names
            .filter(|name| after.is_none_or(|after| *name > after))
            .collect();
        names.sort_unstable();
        Reply::Listeners {
            more: names.len() > NAMES_PER_ANSWER,
            instances: names
                .iter()
                .take(NAMES_PER_ANSWER)
                .map(ToString::to_string)
                .collect(),
        }
    }

    /// An instance's listener is over.
    pub(super) fn forget_listener(&mut self, id: u32) {
        if let Some(OfInstance { listener, .. }) = self.listeners.known.remove(&id) {
            self.poller.remove(&listener);
        }
    }
}
