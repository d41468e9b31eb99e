//! Negotiation with a client, and a connection by TLS.

use std::io;
use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader, BufWriter};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use verbatim_mirror::{Extent, Failure};

use super::export::{Export, Exports};
use super::wire::{
    self, CLIENT_NO_ZEROES, Command, FLAG_FUA, FLAG_NO_HOLE, HANDSHAKE_FLAGS, MAGIC, MAX_OPTION,
    OPTION_MAGIC, REQUEST_BYTES, Request, error, option, reply, transmission_flags,
};
use crate::room::{Held, MAX_IN_FLIGHT, MAX_KIB};
use crate::volume::{Volume, Wanted};

/// The most options of a negotiation.
const MAX_OPTIONS: usize = 64;

/// Result of a negotiation.
pub enum Negotiated {
    /// Requests follow.
    Go(Export),
    /// TLS follows, and then another negotiation.
    StartTls,
    /// No request follows.
    Ended,
}

/// State of a connection's encryption.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tls {
    /// The connection need not be encrypted.
    None,
    /// The connection must become encrypted before anything else.
    Wanted,
    /// The connection is encrypted.
    Done,
}

pub(super) fn bad(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Negotiates. After an error the connection is useless.
pub async fn negotiate<S>(stream: &mut S, exports: &dyn Exports, tls: Tls) -> io::Result<Negotiated>
where
    S: AsyncRead + AsyncWrite + Unpin + Send,
{
    if tls != Tls::Done {
        let mut hello = Vec::with_capacity(18);
        hello.extend(MAGIC.to_be_bytes());
        hello.extend(OPTION_MAGIC.to_be_bytes());
        hello.extend(HANDSHAKE_FLAGS.to_be_bytes());
        stream.write_all(&hello).await?;
        stream.flush().await?;
    }
    // After STARTTLS the flags are not sent again.
    let flags = match tls {
        Tls::Done => CLIENT_NO_ZEROES | 1,
        Tls::None | Tls::Wanted => stream.read_u32().await?,
    };
    if flags & !u32::from(HANDSHAKE_FLAGS) != 0 {
        return Err(bad("unknown flags of a client"));
    }
    for _ in 0..MAX_OPTIONS {
        let mut head = [0; 16];
        stream.read_exact(&mut head).await?;
        let (number, length) = wire::option_head(&head).ok_or_else(|| bad("no option"))?;
        if length > MAX_OPTION {
            // The option's data are not read, so the connection cannot go on.
            let answer = wire::option_reply(number, reply::TOO_BIG, b"");
            stream.write_all(&answer).await?;
            return Err(bad("an option is too long"));
        }
        let mut data = vec![0; length as usize];
        stream.read_exact(&mut data).await?;
        let mut answers = Vec::new();
        let mut end = None;
        let mut answer = |kind: u32, data: &[u8]| answers.extend(wire::option_reply(number, kind, data));
        match number {
            option::ABORT => {
                answer(reply::ACK, b"");
                end = Some(Negotiated::Ended);
            }
            option::STARTTLS if tls == Tls::Wanted && data.is_empty() => {
                answer(reply::ACK, b"");
                end = Some(Negotiated::StartTls);
            }
            option::STARTTLS if tls == Tls::Wanted => answer(reply::INVALID, b"no data belong to STARTTLS"),
            option::STARTTLS if tls == Tls::Done => answer(reply::INVALID, b"the connection has TLS already"),
            option::EXPORT_NAME if tls == Tls::Wanted => return Err(bad("TLS is required")),
            _ if tls == Tls::Wanted => answer(reply::TLS_REQD, b"TLS is required"),
            option::EXPORT_NAME => {
                let name = std::str::from_utf8(&data).map_err(|_| bad("a name is not UTF-8"))?;
                let mut export = exports.find(name).ok_or_else(|| bad("there is no such export"))?;
                answers.extend(export.tell().to_be_bytes());
                answers.extend(transmission_flags(export.is_read_only()).to_be_bytes());
                if flags & CLIENT_NO_ZEROES == 0 {
                    answers.extend([0; 124]);
                }
                end = Some(Negotiated::Go(export));
            }
            option::LIST if data.is_empty() => {
                for name in exports.names() {
                    let mut entry = (name.len() as u32).to_be_bytes().to_vec();
                    entry.extend(name.as_bytes());
                    answer(reply::SERVER, &entry);
                }
                answer(reply::ACK, b"");
            }
            option::LIST => answer(reply::INVALID, b"no data belong to LIST"),
            option::INFO | option::GO => match wire::go(&data) {
                None => answer(reply::INVALID, b"the option cannot be read"),
                Some((name, _)) => match exports.find(name) {
                    None => answer(reply::UNKNOWN, b"there is no such volume here"),
                    Some(mut export) => {
                        let info = wire::info_export(export.tell(), export.is_read_only());
                        answer(reply::INFO, &info);
                        answer(reply::INFO, &wire::info_block_size());
                        answer(reply::ACK, b"");
                        if number == option::GO {
                            end = Some(Negotiated::Go(export));
                        }
                    }
                },
            },
            _ => answer(reply::UNSUP, b""),
        }
        stream.write_all(&answers).await?;
        stream.flush().await?;
        if let Some(end) = end {
            return Ok(end);
        }
    }
    Err(bad("too many options"))
}

struct Answer {
    cookie: u64,
    result: Result<Vec<u8>, u32>,
    /// Released when the answer is sent.
    _permits: (OwnedSemaphorePermit, OwnedSemaphorePermit, Held),
}

/// Serves requests until the client leaves or the volume is no longer served.
pub async fn transmit<S>(stream: S, volume: Arc<Volume>, is_read_only: bool) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (reader, writer) = tokio::io::split(stream);
    let (sender, answers) = mpsc::unbounded_channel();
    let writing = tokio::spawn(write(writer, answers));
    let mut open = volume.open();
    let result = tokio::select! {
        result = read(BufReader::with_capacity(64 << 10, reader), (&volume, is_read_only), &sender) => result,
        _ = open.wait_for(|is_open| !is_open) => Ok(()),
    };
    // Requests in flight have senders of their own: their answers leave before the connection is closed.
    drop(sender);
    let written = writing.await.map_err(io::Error::other)?;
    result.and(written)
}

/// The meaning of a checked request for a volume of this size, and whether it is to be durable; `None` if
/// there is nothing to do.
pub(super) fn meaning(request: &Request, size: u64, data: Vec<u8>) -> Option<(Wanted, Extent, bool)> {
    let extent = match request.command {
        Command::Flush => Extent { offset: 0, length: 1 },
        _ => Extent::within(size, request.offset, request.length.into())?,
    };
    let wanted = match request.command {
        Command::Read => Wanted::Read,
        Command::Write => Wanted::Write(Arc::new(data)),
        Command::Trim => Wanted::Zero { may_free: true },
        Command::WriteZeroes => Wanted::Zero {
            may_free: request.flags & FLAG_NO_HOLE == 0,
        },
        Command::Flush | Command::Disconnect | Command::Other(_) => Wanted::Flush,
    };
    let is_durable =
        request.flags & FLAG_FUA != 0 && !matches!(request.command, Command::Read | Command::Flush);
    Some((wanted, extent, is_durable))
}

async fn read(
    mut reader: impl AsyncRead + Unpin,
    (volume, is_read_only): (&Arc<Volume>, bool),
    sender: &mpsc::UnboundedSender<Answer>,
) -> io::Result<()> {
    let (count, kib) = (
        Arc::new(Semaphore::new(MAX_IN_FLIGHT)),
        Arc::new(Semaphore::new(MAX_KIB)),
    );
    let size = volume.length();
    loop {
        let mut head = [0; REQUEST_BYTES];
        match reader.read_exact(&mut head).await {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            read => read?,
        };
        let request = Request::parse(&head).ok_or_else(|| bad("no request"))?;
        if request.command == Command::Disconnect {
            return Ok(());
        }
        if request.command == Command::Write && request.length > wire::MAX_REQUEST {
            return Err(bad("a write is too long"));
        }
        let checked = request.check(size, is_read_only);
        let kib_wanted = request.needed_kib(checked.is_ok());
        let permits = (
            count.clone().acquire_owned().await.expect("it is never closed"),
            kib.clone()
                .acquire_many_owned(kib_wanted as u32)
                .await
                .expect("it is never closed"),
            volume.room().clone().begin(kib_wanted).await,
        );
        let mut data = Vec::new();
        if request.command == Command::Write {
            data = vec![0; request.length as usize];
            reader.read_exact(&mut data).await?;
        }
        let (cookie, sender) = (request.cookie, sender.clone());
        let answer = move |result| {
            // A client that has left needs no answer.
            let _ = sender.send(Answer {
                cookie,
                result,
                _permits: permits,
            });
        };
        if let Err(error) = checked {
            answer(Err(error));
            continue;
        }
        let Some((wanted, extent, is_durable)) = meaning(&request, size, data) else {
            answer(Ok(Vec::new()));
            continue;
        };
        let reply = Box::new(move |result: Result<Vec<u8>, Failure>| answer(result.map_err(errno)));
        volume.request(wanted, extent, is_durable, reply);
    }
}

/// The protocol's number of this error.
pub(super) fn errno(failure: Failure) -> u32 {
    match failure {
        Failure::Moved => error::ESHUTDOWN,
        Failure::Disk(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => error::ENOSPC,
        Failure::Disk(libc::EPERM | libc::EROFS) => error::EPERM,
        Failure::Disk(_) => error::EIO,
    }
}

async fn write(
    writer: impl AsyncWrite + Unpin,
    mut answers: mpsc::UnboundedReceiver<Answer>,
) -> io::Result<()> {
    let mut writer = BufWriter::with_capacity(64 << 10, writer);
    while let Some(answer) = answers.recv().await {
        let (code, data) = match &answer.result {
            Ok(data) => (0, data.as_slice()),
            Err(code) => (*code, [].as_slice()),
        };
        writer.write_all(&wire::simple_reply(code, answer.cookie)).await?;
        writer.write_all(data).await?;
        if answers.is_empty() {
            writer.flush().await?;
        }
    }
    writer.flush().await?;
    writer.shutdown().await
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};
    use tokio::net::UnixStream;

    use super::*;
    use crate::disk::Disks;
    use crate::nbd::local;
    use crate::store::Store;

    struct One(Arc<Volume>);

    impl Exports for One {
        fn find(&self, name: &str) -> Option<Export> {
            (name.is_empty() || name == "db").then(|| self.0.clone().into())
        }

        fn names(&self) -> Vec<String> {
            vec!["db".into()]
        }
    }

    fn option(number: u32, data: &[u8]) -> Vec<u8> {
        let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
        bytes.extend(number.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        bytes
    }

    fn request(command: u16, offset: u64, length: u32, data: &[u8]) -> Vec<u8> {
        let mut bytes = 0x2560_9513u32.to_be_bytes().to_vec();
        bytes.extend([0, 0]);
        bytes.extend(command.to_be_bytes());
        bytes.extend(7u64.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        bytes.extend(length.to_be_bytes());
        bytes.extend(data);
        bytes
    }

    fn good() -> Vec<u8> {
        let go = [&[0, 0, 0, 2], b"db".as_slice(), &[0, 1, 0, 3]].concat();
        [
            3u32.to_be_bytes().to_vec(),
            option(option::LIST, b""),
            option(option::INFO, &go),
            option(option::GO, &go),
            request(1, 4096, 512, &[5; 512]),
            request(0, 4096, 512, b""),
            request(3, 0, 0, b""),
            request(4, 0, 1 << 16, b""),
            request(6, 100, 1 << 16, b""),
            request(2, 0, 0, b""),
        ]
        .concat()
    }

    /// Sends these bytes, and returns the number of bytes that come back until the server ends the
    /// connection.
    async fn send(exports: &One, is_local: bool, bytes: Vec<u8>) -> usize {
        let (mut near, mut far) = UnixStream::pair().expect("a pair");
        let sending = tokio::spawn(async move {
            // The server may have ended the connection already.
            let _ = near.write_all(&bytes).await;
            let _ = near.shutdown().await;
            let mut answers = Vec::new();
            let _ = near.read_to_end(&mut answers).await;
            answers.len()
        });
        if let Ok(Negotiated::Go(export)) = negotiate(&mut far, exports, Tls::None).await {
            let volume = export.served().await.expect("it is served");
            // Any result is allowed, but the connection must end.
            let _ = match is_local {
                true => local::transmit(far, volume, false, None).await,
                false => transmit(far, volume, false).await,
            };
        } else {
            drop(far);
        }
        sending.await.expect("it does not panic")
    }

    /// Bytes that no correct client sends: valid requests, changed at some places or cut off.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn hostile_bytes_end_a_connection_and_nothing_else() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Store::new_file(&folder.path().join("data"), 1 << 20).expect("made");
        let volume = Volume::new(store, 1 << 20, Disks::new(2), crate::faults::none);
        let exports = One(volume.clone());
        let whole = send(&exports, true, good()).await;
        assert_eq!(send(&exports, false, good()).await, whole, "they answer the same");
        let mut random = StdRng::seed_from_u64(1);
        for round in 0..5_000 {
            let mut bytes = good();
            for _ in 0..random.random_range(1..4) {
                let place = random.random_range(0..bytes.len());
                match random.random_range(0..4) {
                    0 => bytes[place] = random.random(),
                    1 => bytes[place] ^= 1 << random.random_range(0..8),
                    2 => bytes.truncate(place.max(1)),
                    _ => bytes[place] = [0, 0xff][random.random_range(0..2)],
                }
            }
            send(&exports, round % 2 == 0, bytes).await;
        }
        assert_eq!(
            send(&exports, true, good()).await,
            whole,
            "others are served as before"
        );
        volume.close().await;
    }
}
