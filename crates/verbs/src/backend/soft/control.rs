//! What is asked of the software RNIC: one request, one answer.

use std::os::fd::{BorrowedFd, OwnedFd};

use parking_lot::{Mutex, MutexGuard};
use verbatim_device::Connection;
use verbatim_device::control::{CLASS_VERSION, CM_VERSION, CmReply, CmRequest, Reply, Request};
use verbatim_seqpacket::Received;

use crate::error::VerbsError;

pub fn no_answer(verb: &'static str) -> impl Fn(verbatim_seqpacket::Error) -> VerbsError {
    move |source| VerbsError::Channel {
        verb,
        peer: "software RNIC",
        source,
    }
}

/// What all requests of rdma_cm are called.
pub const CM: &str = "rdma_cm";

pub fn call(
    connection: &Connection,
    verb: &'static str,
    request: &Request,
    fds: &[BorrowedFd<'_>],
) -> Result<Received<Reply>, VerbsError> {
    let received = connection.call(request, fds).map_err(no_answer(verb))?;
    unless_refused(verb, received)
}

pub fn unless_refused(verb: &'static str, received: Received<Reply>) -> Result<Received<Reply>, VerbsError> {
    match received.message {
        Reply::Error { errno, message } => Err(VerbsError::Refused { verb, errno, message }),
        _ => Ok(received),
    }
}

pub fn wrong<T>(verb: &'static str, reply: Reply) -> Result<T, VerbsError> {
    Err(VerbsError::WrongReply {
        verb,
        reply: Box::new(reply),
    })
}

fn is_done(verb: &'static str, reply: Reply) -> Result<(), VerbsError> {
    match reply {
        Reply::Done => Ok(()),
        reply => wrong(verb, reply),
    }
}

/// The connection of a context.
#[derive(Debug)]
pub struct Control(Mutex<Connection>);

impl Control {
    pub fn new(connection: Connection) -> Self {
        Self(Mutex::new(connection))
    }

    pub fn into_inner(self) -> Connection {
        self.0.into_inner()
    }

    /// For several requests that nobody else's come between.
    pub fn lock(&self) -> MutexGuard<'_, Connection> {
        self.0.lock()
    }

    /// Whether the RNIC has classes of queue pairs.
    pub fn check_classes(&self) -> Result<(), VerbsError> {
        check_classes(self.0.lock().version())
    }

    pub fn call_cm(
        &self,
        request: CmRequest,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(CmReply, Vec<OwnedFd>), VerbsError> {
        let connection = self.0.lock();
        check_cm(connection.version())?;
        let fds: Vec<_> = fd.into_iter().collect();
        let received = call(&connection, CM, &Request::Cm(request), &fds)?;
        match received.message {
            Reply::Cm(reply) => Ok((reply, received.fds)),
            reply => wrong(CM, reply),
        }
    }

    pub fn call(&self, verb: &'static str, request: &Request) -> Result<Reply, VerbsError> {
        self.call_with(verb, request, &[])
    }

    pub fn call_with(
        &self,
        verb: &'static str,
        request: &Request,
        fds: &[BorrowedFd<'_>],
    ) -> Result<Reply, VerbsError> {
        Ok(call(&self.0.lock(), verb, request, fds)?.message)
    }

    /// As [`Self::call`], for many requests, of which some are always under way, so that the RNIC need not be woken for each.
    /// The answers come in order; an error is the first one's, and the others are made all the same.
    pub fn call_all<T>(
        &self,
        verb: &'static str,
        requests: impl Iterator<Item = Request>,
        take: impl Fn(Reply) -> Result<T, VerbsError>,
    ) -> Result<Vec<T>, VerbsError> {
        /// Their answers fit into the socket, whose other end does not wait for room.
        const UNDER_WAY: usize = 16;
        let connection = self.0.lock();
        let mut answers = Vec::new();
        let mut under_way = 0;
        let answer = |answers: &mut Vec<_>| {
            let received = connection.recv().map_err(no_answer(verb))?;
            answers.push(match received.message {
                Reply::Error { errno, message } => Err(VerbsError::Refused { verb, errno, message }),
                reply => take(reply),
            });
            Ok::<(), VerbsError>(())
        };
        // Whatever goes wrong on this side, each request that was made has its answer taken.
        let mut result = Ok(());
        for request in requests {
            if under_way == UNDER_WAY {
                answer(&mut answers)?;
                under_way -= 1;
            }
            result = connection.send(&request, &[]).map_err(no_answer(verb));
            if result.is_err() {
                break;
            }
            under_way += 1;
        }
        for _ in 0..under_way {
            answer(&mut answers)?;
        }
        result?;
        answers.into_iter().collect()
    }

    pub fn call_all_done(
        &self,
        verb: &'static str,
        requests: impl Iterator<Item = Request>,
    ) -> Result<(), VerbsError> {
        let done = self.call_all(verb, requests, |reply| is_done(verb, reply));
        done.map(drop)
    }

    pub fn call_done(&self, verb: &'static str, request: &Request) -> Result<(), VerbsError> {
        is_done(verb, self.call(verb, request)?)
    }
}

/// Whether this version of the contract has classes of queue pairs.
fn check_classes(version: u32) -> Result<(), VerbsError> {
    match version >= CLASS_VERSION {
        true => Ok(()),
        false => Err(VerbsError::Unsupported(format!(
            "the software RNIC speaks version {version} of the device contract, and classes of queue pairs came with version \
             {CLASS_VERSION}: upgrade it"
        ))),
    }
}

/// Whether this version of the contract has connections by address and port.
fn check_cm(version: u32) -> Result<(), VerbsError> {
    match version >= CM_VERSION {
        true => Ok(()),
        false => Err(VerbsError::Unsupported(format!(
            "the software RNIC speaks version {version} of the device contract, and rdma_cm came with version {CM_VERSION}: \
             upgrade it"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_rnic_of_an_earlier_release_is_not_asked_to_connect() {
        check_cm(CM_VERSION).unwrap();
        let error = check_cm(CM_VERSION - 1).unwrap_err();
        assert_eq!(error.errno(), libc::EOPNOTSUPP);
        assert!(error.to_string().contains("upgrade it"), "{error}");
    }

    #[test]
    fn an_rnic_of_an_earlier_release_is_not_asked_for_classes() {
        check_classes(CLASS_VERSION).unwrap();
        let error = check_classes(CLASS_VERSION - 1).unwrap_err();
        assert_eq!(error.errno(), libc::EOPNOTSUPP);
        assert!(error.to_string().contains("upgrade it"), "{error}");
    }
}
