//! The negotiation of an NBD connection. A swap disk offers less than a volume: whole pages, and no flush,
//! since nothing of it outlives its process.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use verbatim_volume::nbd::wire::{
    CLIENT_NO_ZEROES, HANDSHAKE_FLAGS, MAGIC, MAX_OPTION, OPTION_MAGIC, go, option, option_head,
    option_reply, reply,
};

use crate::block::PAGE_BYTES;

/// Limit for a client's negotiation.
const LIMIT: Duration = Duration::from_secs(10);

/// The most options.
const MAX_OPTIONS: usize = 64;

/// The longest READ or WRITE.
pub const MAX_REQUEST: u32 = 4 << 20;

/// HAS_FLAGS, SEND_TRIM, SEND_WRITE_ZEROES, CAN_MULTI_CONN.
const TRANSMISSION_FLAGS: u16 = 1 | 1 << 5 | 1 << 6 | 1 << 8;

const INFO_EXPORT: [u8; 2] = [0, 0];
const INFO_BLOCK_SIZE: [u8; 2] = [0, 3];

fn bad(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Negotiates; returns whether requests follow. If `export` is empty, the disk has any name. The stream does
/// not block afterwards.
pub fn negotiate(stream: &mut UnixStream, export: &str, bytes: u64) -> io::Result<bool> {
    stream.set_read_timeout(Some(LIMIT))?;
    stream.set_write_timeout(Some(LIMIT))?;
    let mut hello = MAGIC.to_be_bytes().to_vec();
    hello.extend(OPTION_MAGIC.to_be_bytes());
    hello.extend(HANDSHAKE_FLAGS.to_be_bytes());
    stream.write_all(&hello)?;
    let mut flags = [0; 4];
    stream.read_exact(&mut flags)?;
    let flags = u32::from_be_bytes(flags);
    if flags & !u32::from(HANDSHAKE_FLAGS) != 0 {
        return Err(bad("unknown flags of a client"));
    }
    let is_it = |name: &str| name.is_empty() || export.is_empty() || name == export;
    for _ in 0..MAX_OPTIONS {
        let mut head = [0; 16];
        stream.read_exact(&mut head)?;
        let (number, length) = option_head(&head).ok_or_else(|| bad("no option"))?;
        if length > MAX_OPTION {
            stream.write_all(&option_reply(number, reply::TOO_BIG, b""))?;
            return Err(bad("an option is too long"));
        }
        let mut data = vec![0; length as usize];
        stream.read_exact(&mut data)?;
        let mut answers = Vec::new();
        let mut answer = |kind, data: &[u8]| answers.extend(option_reply(number, kind, data));
        let mut end = None;
        match number {
            option::ABORT => {
                answer(reply::ACK, b"");
                end = Some(false);
            }
            option::EXPORT_NAME => {
                if !std::str::from_utf8(&data).is_ok_and(is_it) {
                    return Err(bad("there is no such export"));
                }
                answers.extend(bytes.to_be_bytes());
                answers.extend(TRANSMISSION_FLAGS.to_be_bytes());
                if flags & CLIENT_NO_ZEROES == 0 {
                    answers.extend([0; 124]);
                }
                end = Some(true);
            }
            option::LIST if data.is_empty() => {
                let mut entry = (export.len() as u32).to_be_bytes().to_vec();
                entry.extend(export.as_bytes());
                answer(reply::SERVER, &entry);
                answer(reply::ACK, b"");
            }
            option::INFO | option::GO => match go(&data) {
                None => answer(reply::INVALID, b"the option cannot be read"),
                Some((name, _)) if !is_it(name) => answer(reply::UNKNOWN, b"there is no such disk here"),
                Some(_) => {
                    let mut info = INFO_EXPORT.to_vec();
                    info.extend(bytes.to_be_bytes());
                    info.extend(TRANSMISSION_FLAGS.to_be_bytes());
                    answer(reply::INFO, &info);
                    let mut info = INFO_BLOCK_SIZE.to_vec();
                    for size in [PAGE_BYTES as u32, PAGE_BYTES as u32, MAX_REQUEST] {
                        info.extend(size.to_be_bytes());
                    }
                    answer(reply::INFO, &info);
                    answer(reply::ACK, b"");
                    end = (number == option::GO).then_some(true);
                }
            },
            _ => answer(reply::UNSUP, b""),
        }
        stream.write_all(&answers)?;
        if let Some(end) = end {
            stream.set_nonblocking(true)?;
            return Ok(end);
        }
    }
    Err(bad("too many options"))
}
