//! Changes of the host's links, as the kernel tells them (rtnetlink(7)).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType};

use crate::error::NicError;

/// A socket that becomes readable when some link of this network namespace changes.
#[derive(Debug)]
pub struct LinkWatch(OwnedFd);

impl LinkWatch {
    pub fn open() -> Result<Self, NicError> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)
            .map_err(|errno| NicError::os("socket", errno))?;
        let groups = libc::RTMGRP_LINK.unsigned_abs();
        rustix::net::bind(&socket, &SocketAddrNetlink::new(0, groups))
            .map_err(|errno| NicError::os("bind", errno))?;
        Ok(Self(socket))
    }

    /// Takes what has come. What was told is asked for again: reports may have been lost.
    pub fn take(&self) {
        let mut report = [0u8; 4096];
        loop {
            match rustix::net::recv(&self.0, &mut report[..], RecvFlags::empty()) {
                Ok(_) | Err(rustix::io::Errno::NOBUFS | rustix::io::Errno::INTR) => {}
                Err(_) => return,
            }
        }
    }
}

impl AsFd for LinkWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
