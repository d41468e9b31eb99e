//! Numbers and formats of NBD. All of them are big-endian.

/// `NBDMAGIC`.
pub const MAGIC: u64 = 0x4e42_444d_4147_4943;
/// `IHAVEOPT`.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;

/// Flags of the handshake, of both sides: fixed newstyle, and no zeros at the end.
pub const HANDSHAKE_FLAGS: u16 = 0b11;
/// The client does without the zeros.
pub const CLIENT_NO_ZEROES: u32 = 0b10;

/// The longest option's data: a name of 4096 bytes and a list of information.
pub const MAX_OPTION: u32 = 8 << 10;
pub use crate::room::MAX_REQUEST;

/// Errors of replies.
pub mod error {
    #![allow(missing_docs, reason = "as the protocol calls them")]
    pub const EPERM: u32 = 1;
    pub const EIO: u32 = 5;
    pub const EINVAL: u32 = 22;
    pub const ENOSPC: u32 = 28;
    pub const ENOTSUP: u32 = 95;
    pub const ESHUTDOWN: u32 = 108;
}

/// Options of the negotiation.
pub mod option {
    #![allow(missing_docs, reason = "as the protocol calls them")]
    pub const EXPORT_NAME: u32 = 1;
    pub const ABORT: u32 = 2;
    pub const LIST: u32 = 3;
    pub const STARTTLS: u32 = 5;
    pub const INFO: u32 = 6;
    pub const GO: u32 = 7;
}

/// Replies to options.
pub mod reply {
    #![allow(missing_docs, reason = "as the protocol calls them")]
    pub const ACK: u32 = 1;
    pub const SERVER: u32 = 2;
    pub const INFO: u32 = 3;
    pub const UNSUP: u32 = 0x8000_0001;
    pub const INVALID: u32 = 0x8000_0003;
    pub const TLS_REQD: u32 = 0x8000_0005;
    pub const UNKNOWN: u32 = 0x8000_0006;
    pub const TOO_BIG: u32 = 0x8000_0009;
}

/// HAS_FLAGS, SEND_FLUSH, SEND_FUA, SEND_TRIM, SEND_WRITE_ZEROES, CAN_MULTI_CONN.
const TRANSMISSION_FLAGS: u16 = 1 | 1 << 2 | 1 << 3 | 1 << 5 | 1 << 6 | 1 << 8;

/// HAS_FLAGS, READ_ONLY, SEND_FLUSH, CAN_MULTI_CONN.
const READ_ONLY_FLAGS: u16 = 1 | 1 << 1 | 1 << 2 | 1 << 8;

/// Flags that tell a client the commands of an export.
pub fn transmission_flags(is_read_only: bool) -> u16 {
    match is_read_only {
        true => READ_ONLY_FLAGS,
        false => TRANSMISSION_FLAGS,
    }
}

/// Flags of a request.
pub const FLAG_FUA: u16 = 1;
/// Zeros that stay allocated.
pub const FLAG_NO_HOLE: u16 = 1 << 1;

/// The head of an option: its number and the length of its data.
pub fn option_head(bytes: &[u8; 16]) -> Option<(u32, u32)> {
    let magic = u64::from_be_bytes(bytes[..8].try_into().ok()?);
    let option = u32::from_be_bytes(bytes[8..12].try_into().ok()?);
    let length = u32::from_be_bytes(bytes[12..].try_into().ok()?);
    (magic == OPTION_MAGIC).then_some((option, length))
}

/// A reply to an option.
pub fn option_reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let mut reply = Vec::with_capacity(20 + data.len());
    reply.extend(OPTION_REPLY_MAGIC.to_be_bytes());
    reply.extend(option.to_be_bytes());
    reply.extend(kind.to_be_bytes());
    reply.extend((data.len() as u32).to_be_bytes());
    reply.extend(data);
    reply
}

/// The data of INFO and GO: the name of the export, and the wanted kinds of information.
pub fn go(data: &[u8]) -> Option<(&str, Vec<u16>)> {
    let (length, data) = data.split_first_chunk::<4>()?;
    let length = u32::from_be_bytes(*length) as usize;
    let (name, data) = data.split_at_checked(length)?;
    let (count, data) = data.split_first_chunk::<2>()?;
    let count = usize::from(u16::from_be_bytes(*count));
    if data.len() != 2 * count {
        return None;
    }
    let kinds = data
        .chunks_exact(2)
        .map(|kind| u16::from_be_bytes([kind[0], kind[1]]));
    Some((std::str::from_utf8(name).ok()?, kinds.collect()))
}

/// NBD_INFO_EXPORT.
pub fn info_export(length: u64, is_read_only: bool) -> Vec<u8> {
    let mut info = vec![0, 0];
    info.extend(length.to_be_bytes());
    info.extend(transmission_flags(is_read_only).to_be_bytes());
    info
}

/// NBD_INFO_BLOCK_SIZE: any, 4 KiB preferred, [`MAX_REQUEST`].
pub fn info_block_size() -> Vec<u8> {
    let mut info = vec![0, 3];
    info.extend(1u32.to_be_bytes());
    info.extend(4096u32.to_be_bytes());
    info.extend(MAX_REQUEST.to_be_bytes());
    info
}

/// The command of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// The answer has data.
    Read,
    /// Data follow the request.
    Write,
    /// The client leaves.
    Disconnect,
    /// Make acknowledged writes durable.
    Flush,
    /// The data are no longer needed.
    Trim,
    /// Write zeros.
    WriteZeroes,
    /// An unknown command, without data.
    Other(u16),
}

/// The head of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// The command.
    pub command: Command,
    /// The flags.
    pub flags: u16,
    /// The client's name of the request.
    pub cookie: u64,
    /// The first byte.
    pub offset: u64,
    /// The number of bytes.
    pub length: u32,
}

/// The length of the head of a request.
pub const REQUEST_BYTES: usize = 28;

impl Request {
    /// `None` if these bytes are no request: then the beginning of the next one is unknown.
    pub fn parse(bytes: &[u8; REQUEST_BYTES]) -> Option<Self> {
        if u32::from_be_bytes(bytes[..4].try_into().ok()?) != REQUEST_MAGIC {
            return None;
        }
        let command = match u16::from_be_bytes([bytes[6], bytes[7]]) {
            0 => Command::Read,
            1 => Command::Write,
            2 => Command::Disconnect,
            3 => Command::Flush,
            4 => Command::Trim,
            6 => Command::WriteZeroes,
            other => Command::Other(other),
        };
        Some(Self {
            command,
            flags: u16::from_be_bytes([bytes[4], bytes[5]]),
            cookie: u64::from_be_bytes(bytes[8..16].try_into().ok()?),
            offset: u64::from_be_bytes(bytes[16..24].try_into().ok()?),
            length: u32::from_be_bytes(bytes[24..].try_into().ok()?),
        })
    }

    /// KiB that the data of this request need while it is in flight. The data of a READ need them only if it
    /// is carried out; data that follow a request need them anyway.
    pub fn needed_kib(&self, is_carried_out: bool) -> usize {
        let needs = match self.command {
            Command::Read => is_carried_out,
            Command::Write => true,
            _ => false,
        };
        match needs {
            true => self.length.div_ceil(1024) as usize,
            false => 0,
        }
    }

    /// Checks it for an export of `size` bytes; the error is sent back. Flags that were not offered are
    /// refused, such as FAST_ZERO.
    pub fn check(&self, size: u64, is_read_only: bool) -> Result<(), u32> {
        let allowed = match self.command {
            Command::Read | Command::Flush | Command::Disconnect => FLAG_FUA,
            Command::Write | Command::Trim => FLAG_FUA,
            Command::WriteZeroes => FLAG_FUA | FLAG_NO_HOLE,
            Command::Other(_) => return Err(error::EINVAL),
        };
        if self.flags & !allowed != 0 {
            return Err(error::EINVAL);
        }
        let changes = matches!(
            self.command,
            Command::Write | Command::Trim | Command::WriteZeroes
        );
        if is_read_only && changes {
            return Err(error::EPERM);
        }
        let is_within = self
            .offset
            .checked_add(self.length.into())
            .is_some_and(|end| end <= size);
        match self.command {
            Command::Flush | Command::Disconnect => Ok(()),
            Command::Read if self.length > MAX_REQUEST => Err(error::EINVAL),
            Command::Read if !is_within => Err(error::EINVAL),
            _ if !is_within => Err(error::ENOSPC),
            _ => Ok(()),
        }
    }
}

/// The head of a reply; the data of a successful READ follow.
pub fn simple_reply(error: u32, cookie: u64) -> [u8; 16] {
    let mut reply = [0; 16];
    reply[..4].copy_from_slice(&REPLY_MAGIC.to_be_bytes());
    reply[4..8].copy_from_slice(&error.to_be_bytes());
    reply[8..].copy_from_slice(&cookie.to_be_bytes());
    reply
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(command: u16, offset: u64, length: u32) -> Request {
        let mut bytes = [0; REQUEST_BYTES];
        bytes[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        bytes[6..8].copy_from_slice(&command.to_be_bytes());
        bytes[16..24].copy_from_slice(&offset.to_be_bytes());
        bytes[24..].copy_from_slice(&length.to_be_bytes());
        Request::parse(&bytes).expect("the magic is right")
    }

    #[test]
    fn what_is_out_of_bounds_is_refused() {
        assert_eq!(request(0, 0, 512).check(512, false), Ok(()));
        assert_eq!(request(0, 1, 512).check(512, false), Err(error::EINVAL));
        assert_eq!(request(1, u64::MAX, 2).check(512, false), Err(error::ENOSPC));
        assert_eq!(request(6, 0, u32::MAX).check(1 << 40, false), Ok(()));
        assert_eq!(
            request(0, 0, MAX_REQUEST + 1).check(1 << 40, false),
            Err(error::EINVAL)
        );
        assert_eq!(request(5, 0, 0).check(512, false), Err(error::EINVAL));
        assert_eq!(Request::parse(&[0; REQUEST_BYTES]), None);
    }

    #[test]
    fn what_was_not_offered_is_refused() {
        let with = |command, flags| Request {
            flags,
            ..request(command, 0, 512)
        };
        // FAST_ZERO, and DF without structured replies.
        assert_eq!(with(6, 1 << 4).check(512, false), Err(error::EINVAL));
        assert_eq!(with(0, 1 << 2).check(512, false), Err(error::EINVAL));
        for command in [0, 1, 3, 4, 6] {
            for flag in 5..16 {
                assert_eq!(with(command, 1 << flag).check(512, false), Err(error::EINVAL));
            }
            assert_eq!(with(command, FLAG_FUA).check(512, false), Ok(()));
        }
        assert_eq!(with(6, FLAG_NO_HOLE).check(512, false), Ok(()));
        for (command, result) in [
            (0, Ok(())),
            (1, Err(error::EPERM)),
            (3, Ok(())),
            (4, Err(error::EPERM)),
            (6, Err(error::EPERM)),
        ] {
            assert_eq!(with(command, 0).check(512, true), result, "{command}");
        }
    }

    #[test]
    fn a_go_is_read_and_a_damaged_one_is_not() {
        let good = [0, 0, 0, 1, b'a', 0, 1, 0, 3];
        assert_eq!(go(&good), Some(("a", vec![3])));
        for end in 0..good.len() {
            assert_eq!(go(&good[..end]), None, "{end}");
        }
        assert_eq!(go(&[0xff; 9]), None);
    }
}
