//! Messages between the kernel and the server of one file (`linux/fuse.h`, version 7).

/// Lengths of the headers of requests and of answers.
const REQUEST_HEADER: usize = 40;
const ANSWER_HEADER: usize = 16;

/// The number of the file: the root.
pub const ROOT: u64 = 1;

const VERSION: (u32, u32) = (7, 40);

/// Features that the kernel offers, and that may be asked for (`FUSE_ASYNC_READ` and so on).
const ASYNC_READ: u64 = 1;
const BIG_WRITES: u64 = 1 << 5;
const ASYNC_DIO: u64 = 1 << 15;
const MAX_PAGES: u64 = 1 << 22;
const INIT_EXT: u64 = 1 << 30;
const HAS_RESEND: u64 = 1 << 39;

/// Limit of background requests, and the number from which on the kernel throttles them.
const MAX_BACKGROUND: u16 = 16;
const CONGESTED: u16 = 12;

/// A bit in the number of a resent request (`FUSE_UNIQUE_RESEND`).
const IS_AGAIN: u64 = 1 << 63;

/// `FUSE_NOTIFY_RESEND`.
const NOTIFY_RESEND: i32 = 7;

/// `FOPEN_DIRECT_IO`, `FOPEN_PARALLEL_DIRECT_WRITES`.
const OPENED: u32 = 1 | 1 << 6;

/// Lifetime of the kernel's attributes of the file: forever, since a volume that grows makes the kernel ask.
const FOREVER_SECONDS: u64 = 365 * 24 * 60 * 60;

/// The numbers of requests.
mod code {
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const DESTROY: u32 = 38;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
}

/// A request.
#[derive(Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// Its number; the answer has the same.
    pub unique: u64,
    /// The operation.
    pub op: Op<'a>,
}

impl Request<'_> {
    /// Whether an earlier process has read it and not answered.
    pub fn is_again(&self) -> bool {
        self.unique & IS_AGAIN != 0
    }
}

/// The operation of a request.
#[derive(Debug, PartialEq, Eq)]
pub enum Op<'a> {
    /// The first request.
    Init(Offer),
    /// Length and kind of the file.
    Attributes,
    /// Open the file.
    Open,
    /// Read from the file.
    Read {
        /// The first byte.
        offset: u64,
        /// The number of bytes; the file may end before.
        length: u64,
    },
    /// Write to the file.
    Write {
        /// The first byte.
        offset: u64,
        /// The bytes.
        data: &'a [u8],
    },
    /// Make acknowledged writes durable.
    Sync,
    /// Write zeros.
    Zero {
        /// The first byte.
        offset: u64,
        /// The number of bytes.
        length: u64,
        /// The room of the bytes may be given back (`FALLOC_FL_PUNCH_HOLE`).
        may_free: bool,
    },
    /// The size of the blocks.
    FileSystem,
    /// An operation with an empty answer.
    Nothing,
    /// An operation without an answer.
    Silent,
    /// An operation that the kernel can do without (`ENOSYS`).
    Unknown,
    /// A variant that is not supported; others of its kind are.
    Refused,
    /// The request is cut off.
    Damaged,
}

/// Abilities of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offer {
    major: u32,
    max_readahead: u32,
    flags: u64,
}

impl Offer {
    /// Whether the kernel resends requests that a process has read and not answered: Linux 6.9 and later.
    pub fn resends(&self) -> bool {
        self.flags & HAS_RESEND != 0
    }

    /// Whether the version is a known one.
    pub fn is_known(&self) -> bool {
        self.major == VERSION.0
    }

    /// The answer to the kernel. With fewer features the kernel sends smaller requests, one after the other.
    pub fn answer(&self, max_write: u32) -> Vec<u8> {
        let wanted = ASYNC_READ | BIG_WRITES | ASYNC_DIO | MAX_PAGES | INIT_EXT;
        let flags = wanted & self.flags;
        let mut body = Body::default();
        body.u32(VERSION.0).u32(VERSION.1).u32(self.max_readahead);
        body.u32(flags as u32).u16(MAX_BACKGROUND).u16(CONGESTED);
        // The granularity of times: one nanosecond.
        body.u32(max_write).u32(1);
        body.u16((max_write / 4096) as u16)
            .u16(0)
            .u32((flags >> 32) as u32);
        body.zeros(28)
    }
}

/// Numbers in the kernel's bytes.
#[derive(Clone, Copy)]
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn u32(self, at: usize) -> Option<u32> {
        let bytes = self.0.get(at..at + 4)?;
        Some(u32::from_ne_bytes(bytes.try_into().ok()?))
    }

    fn u64(self, at: usize) -> Option<u64> {
        let bytes = self.0.get(at..at + 8)?;
        Some(u64::from_ne_bytes(bytes.try_into().ok()?))
    }

    fn op(self, code: u32) -> Option<Op<'a>> {
        Some(match code {
            code::INIT => Op::Init(Offer {
                major: self.u32(0)?,
                max_readahead: self.u32(8)?,
                // Older kernels do not send the second half.
                flags: u64::from(self.u32(12)?) | u64::from(self.u32(16).unwrap_or(0)) << 32,
            }),
            code::GETATTR => Op::Attributes,
            code::OPEN => Op::Open,
            code::READ => Op::Read {
                offset: self.u64(8)?,
                length: self.u32(16)?.into(),
            },
            code::WRITE => Op::Write {
                offset: self.u64(8)?,
                data: self.0.get(40..40 + self.u32(16)? as usize)?,
            },
            code::FSYNC => Op::Sync,
            code::FALLOCATE => {
                let mode = self.u32(24)? as i32 & !libc::FALLOC_FL_KEEP_SIZE;
                let may_free = match mode {
                    libc::FALLOC_FL_PUNCH_HOLE => true,
                    libc::FALLOC_FL_ZERO_RANGE => false,
                    _ => return Some(Op::Refused),
                };
                Op::Zero {
                    offset: self.u64(8)?,
                    length: self.u64(16)?,
                    may_free,
                }
            }
            code::STATFS => Op::FileSystem,
            code::RELEASE | code::FLUSH | code::DESTROY => Op::Nothing,
            code::FORGET | code::BATCH_FORGET => Op::Silent,
            _ => Op::Unknown,
        })
    }
}

/// Parses the bytes of one read; `None` without a number to answer to.
pub fn parse(bytes: &[u8]) -> Option<Request<'_>> {
    let header = Fields(bytes);
    let (length, code, unique) = (header.u32(0)?, header.u32(4)?, header.u64(8)?);
    let body = bytes.get(REQUEST_HEADER..length as usize);
    let op = body.and_then(|body| Fields(body).op(code)).unwrap_or(Op::Damaged);
    Some(Request { unique, op })
}

/// The header of an answer.
pub fn header(unique: u64, errno: i32, body: usize) -> [u8; ANSWER_HEADER] {
    let mut header = [0; ANSWER_HEADER];
    header[..4].copy_from_slice(&((ANSWER_HEADER + body) as u32).to_ne_bytes());
    header[4..8].copy_from_slice(&(-errno).to_ne_bytes());
    header[8..].copy_from_slice(&unique.to_ne_bytes());
    header
}

/// A notification that makes the kernel resend all requests that were read and not answered.
pub fn resend() -> [u8; ANSWER_HEADER] {
    // A notification has no number, and its kind is in the error field.
    header(0, -NOTIFY_RESEND, 0)
}

#[derive(Default)]
struct Body(Vec<u8>);

impl Body {
    fn u16(&mut self, value: u16) -> &mut Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    fn u32(&mut self, value: u32) -> &mut Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    fn u64(&mut self, value: u64) -> &mut Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    fn zeros(&mut self, count: usize) -> Vec<u8> {
        self.0.resize(self.0.len() + count, 0);
        std::mem::take(&mut self.0)
    }
}

/// Attributes of a file of this length.
pub fn attributes(length: u64) -> Vec<u8> {
    let mut body = Body::default();
    body.u64(FOREVER_SECONDS).u32(0).u32(0);
    body.u64(ROOT).u64(length).u64(length / 512);
    // The times of the file.
    body.u64(0).u64(0).u64(0).u32(0).u32(0).u32(0);
    body.u32(libc::S_IFREG | 0o600).u32(1).u32(0).u32(0).u32(0);
    body.u32(4096);
    body.zeros(4)
}

/// The answer to OPEN: without a cache in the kernel.
pub fn opened() -> Vec<u8> {
    let mut body = Body::default();
    body.u64(0).u32(OPENED);
    body.zeros(4)
}

/// The answer to a write of this length.
pub fn written(length: u32) -> Vec<u8> {
    let mut body = Body::default();
    body.u32(length);
    body.zeros(4)
}

/// A file system whose blocks have 512 bytes: a loop device takes no discards without a block size.
pub fn file_system() -> Vec<u8> {
    let mut body = Body::default();
    for _ in 0..5 {
        body.u64(0);
    }
    body.u32(512).u32(255);
    body.zeros(32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(code: u32, unique: u64, body: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(((REQUEST_HEADER + body.len()) as u32).to_ne_bytes());
        bytes.extend(code.to_ne_bytes());
        bytes.extend(unique.to_ne_bytes());
        bytes.resize(REQUEST_HEADER, 0);
        bytes.extend(body);
        bytes
    }

    #[test]
    fn a_write_is_read_and_whatever_is_cut_off_is_damaged() {
        let mut body = vec![0; 40];
        body[8..16].copy_from_slice(&4096u64.to_ne_bytes());
        body[16..20].copy_from_slice(&3u32.to_ne_bytes());
        body.extend(b"abc");
        let bytes = request(code::WRITE, IS_AGAIN | 8, &body);
        let whole = parse(&bytes).expect("a request");
        assert!(whole.is_again());
        let wanted = Op::Write {
            offset: 4096,
            data: b"abc",
        };
        assert_eq!(whole.op, wanted);
        for length in REQUEST_HEADER..bytes.len() {
            assert_eq!(parse(&bytes[..length]).expect("it has a number").op, Op::Damaged);
        }
        assert_eq!(parse(&bytes[..12]), None);
        let short = request(code::WRITE, 8, &body[..42]);
        assert_eq!(parse(&short).expect("it has a number").op, Op::Damaged);
    }

    #[test]
    fn an_old_kernel_offers_nothing_that_it_does_not_say() {
        let mut body = Vec::new();
        for number in [7u32, 23, 1 << 17, u32::MAX] {
            body.extend(number.to_ne_bytes());
        }
        let bytes = request(code::INIT, 2, &body);
        let Op::Init(offer) = parse(&bytes).expect("a request").op else {
            panic!("it is the first")
        };
        assert!(offer.is_known() && !offer.resends());
        assert_eq!(offer.answer(1 << 20).len(), 64);
        body.extend([0xff; 48]);
        let bytes = request(code::INIT, 2, &body);
        let Op::Init(offer) = parse(&bytes).expect("a request").op else {
            panic!("it is the first")
        };
        assert!(offer.resends());
    }

    #[test]
    fn answers_have_the_kernels_lengths() {
        assert_eq!(attributes(5).len(), 104);
        assert_eq!(
            (opened().len(), written(1).len(), file_system().len()),
            (16, 8, 80)
        );
        assert_eq!(resend()[4..8], 7i32.to_ne_bytes());
        assert_eq!(header(9, libc::EIO, 8)[..8], [24, 0, 0, 0, 251, 255, 255, 255]);
    }
}
