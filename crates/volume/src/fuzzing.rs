//! Entry points of the fuzz targets (`fuzz/`) into the parsers of clients' and other hosts' bytes.

use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, duplex};
use tokio::net::UnixStream;
use tokio::runtime::{Builder, Runtime};
use verbatim_mirror::decision::{SessionId, VolumeId};

use crate::disk::Disks;
use crate::nbd::export::{Export, Exports};
use crate::nbd::local;
use crate::nbd::server::{Negotiated, Tls, negotiate, transmit};
use crate::peer::destination::Incoming;
use crate::store::Store;
use crate::vhost_user::hostile::{self, Guest, Options};
use crate::volume::Volume;
use crate::wire::{self, Hello, Purpose, Tag, ToDestination, ToSource};

/// Length of the volume in bytes.
const LENGTH: u64 = 1 << 20;

/// A volume on this machine, for clients and for a source that send anything.
pub struct Host {
    runtime: Runtime,
    volume: Arc<Volume>,
    store: Arc<Store>,
    disks: Disks,
    served: PathBuf,
    filled: PathBuf,
}

struct One<'a>(&'a Arc<Volume>);

impl Exports for One<'_> {
    fn find(&self, name: &str) -> Option<Export> {
        (name.is_empty() || name == "db").then(|| self.0.clone().into())
    }

    fn names(&self) -> Vec<String> {
        vec!["db".to_owned()]
    }
}

impl Host {
    /// A host whose files lie in this empty folder.
    ///
    /// # Panics
    /// If they cannot be made there.
    pub fn new(folder: &Path) -> Self {
        let open = |path: &Path| Store::new_file(path, LENGTH).expect("a file can be made");
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let (disks, served, filled) = (Disks::new(1), folder.join("served"), folder.join("filled"));
        Self {
            runtime: runtime.expect("threads can be started"),
            volume: Volume::new(open(&served), LENGTH, disks.clone(), crate::faults::none),
            store: Arc::new(open(&filled)),
            disks,
            served,
            filled,
        }
    }

    /// A client that sends these bytes and leaves. The server's side of the connection must end as well.
    pub fn client(&self, bytes: &[u8]) {
        self.runtime.block_on(async {
            for is_local in [true, false] {
                let (mut near, mut far) = UnixStream::pair().expect("a pair of sockets");
                let served = async move {
                    if let Ok(Negotiated::Go(export)) =
                        negotiate(&mut far, &One(&self.volume), Tls::None).await
                    {
                        let volume = export.served().await.expect("it is served");
                        // Any result is allowed.
                        let (Ok(()) | Err(_)) = match is_local {
                            true => local::transmit(far, volume, false, None).await,
                            false => transmit(far, volume, false).await,
                        };
                    }
                };
                tokio::join!(served, say(&mut near, bytes));
            }
        });
    }

    /// A virtual machine: these bytes are steps that write its memory and its front end's inflight file while
    /// the ring works. For any bytes the ring stops at the end, the file keeps its length, and the next guest
    /// is served.
    ///
    /// ```text
    ///  u8 options: event indices 1, no flush 2, file 4       u8 descriptors: their logarithm
    ///  and steps:  0 u16 place, u8 length, bytes: into its RAM     1 the same: into the file
    ///              2 u16 index of the available ring, and a kick    3 the ring is stopped, and goes on
    /// ```
    pub fn guest(&self, bytes: &[u8]) {
        let [flags, log_size, steps @ ..] = bytes else {
            return;
        };
        let options = Options {
            size: 1 << (log_size % 9),
            knows_events: flags & 1 != 0,
            is_durable: flags & 2 != 0,
            notes: flags & 4 != 0,
        };
        let mut guest = Guest::new(&self.volume, options);
        let hands = guest.hands();
        guest.start();
        let mut rest = steps;
        while let [step, low, high, after @ ..] = rest {
            let number = u16::from_le_bytes([*low, *high]);
            rest = after;
            match step % 4 {
                kind @ 0..2 => {
                    let Some((length, after)) = rest.split_first() else {
                        break;
                    };
                    let (bytes, after) = after.split_at(after.len().min(usize::from(*length)));
                    rest = after;
                    match kind {
                        0 => hands.write(number.into(), bytes),
                        _ => hands.write_notes(number.into(), bytes),
                    }
                }
                2 => {
                    hands.write(hostile::AVAILABLE + 2, &number.to_le_bytes());
                    hands.kick();
                }
                _ => {
                    guest.stop();
                    guest.start();
                }
            }
        }
        guest.stop();
        let length = std::fs::metadata(&self.served).map(|file| file.len());
        assert_eq!(length.ok(), Some(LENGTH), "the volume has another length");
        hostile::serves(&self.volume);
    }

    /// A source that sends these bytes after the welcome. For any bytes the file keeps its length.
    pub fn source(&self, bytes: &[u8]) {
        let incoming = Incoming::new(self.disks.clone(), crate::faults::none);
        self.runtime.block_on(async {
            let (mut near, far) = duplex(1 << 16);
            let welcome = ToSource::Welcome {
                incarnation: 1,
                has_old: true,
                rings: wire::Rings::None,
            };
            let filled = incoming.fill((far, 7), SessionId(1), self.store.clone(), LENGTH, welcome, None);
            let (Ok(()) | Err(_), ()) = tokio::join!(filled, say(&mut near, bytes));
        });
        incoming.close();
        let length = std::fs::metadata(&self.filled).map(|file| file.len());
        assert_eq!(length.ok(), Some(LENGTH), "the volume has another length");
    }
}

async fn say(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), bytes: &[u8]) {
    let (mut reader, mut writer) = tokio::io::split(stream);
    let sent = async {
        // The other side may have ended the connection already.
        let (Ok(()) | Err(_)) = writer.write_all(bytes).await;
        let (Ok(()) | Err(_)) = writer.shutdown().await;
    };
    let mut answers = Vec::new();
    let (Ok(_) | Err(_), ()) = tokio::join!(reader.read_to_end(&mut answers), sent);
}

/// A message of any kind between hosts: a parsed message can be written, and parses to the same.
pub fn message(bytes: &[u8]) {
    round_trip::<Hello>(bytes);
    round_trip::<ToDestination>(bytes);
    round_trip::<ToSource>(bytes);
    if let Some((lengths, _)) = bytes.split_first_chunk::<8>()
        && let Ok((message, data)) = wire::lengths_of(*lengths)
    {
        assert!(message <= wire::MAX_MESSAGE && data <= wire::MAX_DATA);
    }
}

fn round_trip<T: Serialize + DeserializeOwned + PartialEq + Debug>(bytes: &[u8]) {
    if let Ok(message) = wire::decode::<T>(bytes) {
        let frame = wire::frame(&message, 0);
        assert_eq!(
            wire::decode::<T>(&frame[8..]).ok(),
            Some(message),
            "what was read can be written"
        );
    }
}

/// Seed inputs: messages.
pub fn messages() -> Vec<Vec<u8>> {
    let hello = |purpose| Hello {
        version: wire::VERSION,
        name: "db".to_owned(),
        id: VolumeId(5),
        session: SessionId(1),
        base: 3,
        purpose,
    };
    let fill = Purpose::Fill {
        length: LENGTH,
        from: "a".to_owned(),
        attached: true,
        rdma: None,
        link: 7,
    };
    let chunks = Purpose::Chunks { link: 7 };
    let mut all: Vec<Vec<u8>> = [fill, chunks, Purpose::Decide { gives_up: true }]
        .map(|purpose| wire::frame(&hello(purpose), 0)[8..].to_vec())
        .into();
    all.extend(
        orders()
            .iter()
            .map(|(order, _)| wire::frame(order, 0)[8..].to_vec()),
    );
    let answers = [
        ToSource::Done(Tag::Chunk(9), 28),
        ToSource::Refused("no".to_owned()),
    ];
    all.extend(answers.iter().map(|answer| wire::frame(answer, 0)[8..].to_vec()));
    all
}

fn orders() -> [(ToDestination, usize); 6] {
    let (offset, length) = (4096, 8192);
    [
        (
            ToDestination::Put {
                tag: Tag::Change(1),
                offset,
            },
            512,
        ),
        (
            ToDestination::Zero {
                tag: Tag::Chunk(2),
                offset,
                length,
            },
            0,
        ),
        (
            ToDestination::Compare {
                tag: Tag::Chunk(3),
                offset,
                length,
                hash: [7; 32],
            },
            0,
        ),
        (ToDestination::Flush { tag: Tag::Flush(4) }, 0),
        (
            ToDestination::Fetch {
                tag: Tag::Chunk(5),
                offset,
                landing: wire::Landing { position: 0, length },
            },
            64,
        ),
        (ToDestination::StopFetching, 0),
    ]
}

/// Seed input: all messages of a source.
pub fn source_streams() -> Vec<Vec<u8>> {
    let stream = orders().into_iter().flat_map(|(order, data)| {
        let mut frame = wire::frame(&order, data);
        frame.resize(frame.len() + data, 0xab);
        frame
    });
    vec![stream.collect()]
}

/// Seed input: all requests of a client.
pub fn client_streams() -> Vec<Vec<u8>> {
    let option = |number: u32, data: &[u8]| {
        let head = [
            &0x4948_4156_454f_5054_u64.to_be_bytes()[..],
            &number.to_be_bytes(),
        ]
        .concat();
        [&head[..], &(data.len() as u32).to_be_bytes(), data].concat()
    };
    let request = |command: u16, offset: u64, length: u32, data: &[u8]| {
        let head = [
            &0x2560_9513_u32.to_be_bytes()[..],
            &[0, 0],
            &command.to_be_bytes(),
        ]
        .concat();
        let rest = [
            &7_u64.to_be_bytes()[..],
            &offset.to_be_bytes(),
            &length.to_be_bytes(),
            data,
        ]
        .concat();
        [head, rest].concat()
    };
    let go = [&[0, 0, 0, 2][..], b"db", &[0, 1, 0, 3]].concat();
    let whole = [
        3_u32.to_be_bytes().to_vec(),
        option(3, b""),
        option(6, &go),
        option(7, &go),
        request(1, 4096, 512, &[5; 512]),
        request(0, 4096, 512, b""),
        request(3, 0, 0, b""),
        request(4, 0, 1 << 16, b""),
        request(6, 100, 1 << 16, b""),
        request(2, 0, 0, b""),
    ];
    let old = [
        1_u32.to_be_bytes().to_vec(),
        option(1, b"db"),
        request(0, 0, 512, b""),
    ];
    vec![whole.concat(), old.concat()]
}

/// Seed inputs: guests that use every kind of request, in the queue's own descriptors and in an indirect
/// table.
pub fn guests() -> Vec<Vec<u8>> {
    let write = |at: u16, bytes: &[u8]| [&[0][..], &at.to_le_bytes(), &[bytes.len() as u8], bytes].concat();
    let descriptor = |address: u64, length: u32, flags: u16, next: u16| {
        let (address, length) = (address.to_le_bytes(), length.to_le_bytes());
        [&address[..], &length, &flags.to_le_bytes(), &next.to_le_bytes()].concat()
    };
    let (next, writable, indirect) = (1, 2, 4);
    let (heads, inner, answer) = (0x4000, 0x3000, 0x9000);
    let kinds: [(u32, u32, u16); 6] = [
        (1, 512, 0),
        (0, 4096, writable),
        (4, 0, 0),
        (8, 20, writable),
        (11, 16, 0),
        (13, 16, 0),
    ];
    let requests = |flags: u8, is_indirect: bool| {
        let mut all = vec![flags, 4];
        for (turn, (kind, length, access)) in (1u16..).zip(kinds) {
            let head = [&kind.to_le_bytes()[..], &[0; 4], &1u64.to_le_bytes()].concat();
            let run = [&2u64.to_le_bytes()[..], &4u32.to_le_bytes(), &[0; 4]].concat();
            let chain = [
                descriptor(heads, 16, next, 1),
                descriptor(0x8000, length, next | access, 2),
                descriptor(answer, 1, writable, 0),
            ]
            .concat();
            all.extend([write(heads as u16, &head), write(0x8000, &run)].concat());
            match is_indirect {
                false => all.extend(write(hostile::TABLE as u16, &chain)),
                true => {
                    all.extend(write(inner, &chain));
                    let outer = descriptor(inner.into(), chain.len() as u32, indirect, 0);
                    all.extend(write(hostile::TABLE as u16, &outer));
                }
            }
            all.extend([&[2][..], &turn.to_le_bytes()].concat());
            if turn == 3 {
                all.extend([3, 0, 0]);
            }
        }
        all
    };
    vec![requests(0, false), requests(5, true), requests(7, false)]
}
