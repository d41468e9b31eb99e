//! netlink(7): requests, dumps and their attributes.

use std::io;
use std::os::fd::OwnedFd;

use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::{AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType};

/// A dump that was interrupted by changes is asked for again, so many times.
const DUMP_TRIES: usize = 8;

/// `NLM_F_DUMP_INTR` (`linux/netlink.h`).
const DUMP_INTERRUPTED: u16 = 0x10;

/// The kernel's parts make no longer datagrams.
const DATAGRAM: usize = 64 << 10;

/// A dump longer than that is refused.
const MAX_DUMP: usize = 16 << 20;

/// A message of the kernel's, without its `struct nlmsghdr`.
pub(crate) type Message = Vec<u8>;

/// A socket in the network namespace of the thread that opened it.
#[derive(Debug)]
pub(crate) struct Netlink(OwnedFd);

impl Netlink {
    /// To links, addresses, routes, rules and neighbours.
    pub fn route() -> io::Result<Self> {
        Self::open(None)
    }

    /// To the packet filter.
    pub fn netfilter() -> io::Result<Self> {
        Self::open(Some(netlink::NETFILTER))
    }

    /// To IPsec.
    pub fn xfrm() -> io::Result<Self> {
        Self::open(Some(netlink::XFRM))
    }

    fn open(protocol: Option<Protocol>) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, protocol)?;
        rustix::net::bind(&socket, &SocketAddrNetlink::new(0, 0))?;
        Ok(Self(socket))
    }

    /// All objects of a kind.
    pub fn dump(&self, kind: u16, header: &[u8]) -> io::Result<Vec<Message>> {
        for _ in 0..DUMP_TRIES {
            if let Some(messages) = self.dump_once(kind, header)? {
                return Ok(messages);
            }
        }
        Err(io::Error::other(
            "the kernel's answer is interrupted by changes again and again",
        ))
    }

    /// `None`: something changed meanwhile.
    fn dump_once(&self, kind: u16, header: &[u8]) -> io::Result<Option<Vec<Message>>> {
        let flags = (libc::NLM_F_REQUEST | libc::NLM_F_DUMP) as u16;
        rustix::net::send(&self.0, &request(kind, flags, header), SendFlags::empty())?;
        let (mut messages, mut bytes, mut is_whole) = (Vec::new(), 0, true);
        let mut buffer = vec![0; DATAGRAM];
        loop {
            let (_, length) = rustix::net::recv(&self.0, &mut buffer[..], RecvFlags::empty())?;
            bytes += length;
            if bytes > MAX_DUMP {
                return Err(io::Error::other("the kernel's answer is too long"));
            }
            let mut rest = &buffer[..length];
            while let Some((header, _)) = rest.split_first_chunk::<16>() {
                let [a, b, c, d, kind, kind_high, flags, flags_high, ..] = *header;
                let length = (u32::from_ne_bytes([a, b, c, d]) as usize).max(16);
                let body = rest.get(16..length).unwrap_or_default();
                is_whole &= u16::from_ne_bytes([flags, flags_high]) & DUMP_INTERRUPTED == 0;
                match i32::from(u16::from_ne_bytes([kind, kind_high])) {
                    libc::NLMSG_DONE => {
                        result_of(body)?;
                        return Ok(is_whole.then_some(messages));
                    }
                    libc::NLMSG_ERROR => {
                        result_of(body)?;
                        return Ok(Some(messages));
                    }
                    _ => messages.push(body.to_vec()),
                }
                rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
            }
        }
    }

    /// Has something made, changed or deleted.
    pub fn call(&self, kind: u16, flags: i32, body: &[u8]) -> io::Result<()> {
        let flags = (libc::NLM_F_REQUEST | libc::NLM_F_ACK | flags) as u16;
        rustix::net::send(&self.0, &request(kind, flags, body), SendFlags::empty())?;
        let mut answer = vec![0; DATAGRAM];
        let (_, length) = rustix::net::recv(&self.0, &mut answer[..], RecvFlags::empty())?;
        let kind = answer[..length].get(4..6).map(|kind| [kind[0], kind[1]]);
        match kind.map(u16::from_ne_bytes).map(i32::from) {
            Some(libc::NLMSG_ERROR) => result_of(&answer[16..length.max(16)]),
            _ => Err(io::Error::other("the kernel did not acknowledge a request")),
        }
    }
}

/// What an acknowledgement, or the end of a dump, says: a negative errno, or 0.
fn result_of(body: &[u8]) -> io::Result<()> {
    match word(body, 0) {
        Some(0) | None => Ok(()),
        Some(error) => Err(io::Error::from_raw_os_error((error as i32).wrapping_neg())),
    }
}

/// Whether it says that this kernel does not have what was asked for.
pub(crate) fn is_unknown(error: &io::Error) -> bool {
    let unknown = [
        libc::EOPNOTSUPP,
        libc::EAFNOSUPPORT,
        libc::EPROTONOSUPPORT,
        libc::EINVAL,
    ];
    error.raw_os_error().is_some_and(|error| unknown.contains(&error))
}

fn request(kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(16 + body.len()).expect("what is sent is bounded");
    let mut request = length.to_ne_bytes().to_vec();
    request.extend_from_slice(&kind.to_ne_bytes());
    request.extend_from_slice(&flags.to_ne_bytes());
    request.extend_from_slice(&[0; 8]);
    request.extend_from_slice(body);
    request
}

/// A number of the kernel's in a message.
pub(crate) fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_ne_bytes(bytes.try_into().expect("four bytes")))
}

/// The attributes in a part of a message, without the bits that say how they are written.
pub(crate) fn attributes(bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    const NUMBER: u16 = 0x3fff;
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let [low, high, kind, kind_high] = *rest.first_chunk::<4>()?;
        let length = usize::from(u16::from_ne_bytes([low, high]));
        let value = rest.get(4..length)?;
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((u16::from_ne_bytes([kind, kind_high]) & NUMBER, value))
    })
}

/// One of them.
pub(crate) fn attribute(bytes: &[u8], wanted: u16) -> Option<&[u8]> {
    attributes(bytes).find_map(|(kind, value)| (kind == wanted).then_some(value))
}

/// Adds an attribute to a message. What is longer than an attribute can be is cut off, and refused by the kernel.
pub(crate) fn put(message: &mut Vec<u8>, kind: u16, value: &[u8]) {
    let length = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
    message.extend_from_slice(&length.to_ne_bytes());
    message.extend_from_slice(&kind.to_ne_bytes());
    message.extend_from_slice(&value[..usize::from(length) - 4]);
    message.resize(message.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_put_is_found_again() {
        let mut message = Vec::new();
        put(&mut message, 3, b"eth0\0");
        put(&mut message, 0x8000 | 4, &7u32.to_ne_bytes());
        assert_eq!(message.len(), 12 + 8);
        let found: Vec<_> = attributes(&message).collect();
        assert_eq!(found, [(3, &b"eth0\0"[..]), (4, &7u32.to_ne_bytes()[..])]);
        assert_eq!(attribute(&message, 5), None);
    }

    #[test]
    fn attributes_that_are_cut_off_end_the_list() {
        let mut message = Vec::new();
        put(&mut message, 1, &[1; 8]);
        put(&mut message, 2, &[2; 8]);
        for length in 0..message.len() {
            let whole = attributes(&message[..length]).count();
            assert_eq!(whole, length / 12, "{length}");
        }
        // A length below that of its own header.
        assert_eq!(attributes(&[2, 0, 1, 0, 9, 9]).count(), 0);
    }
}
