//! What asking for numbers and keys costs: regions and queue pairs made over the RNIC's own control socket, by turns with numbers that
//! it gives and with numbers that are asked for.

use std::path::Path;
use std::time::Instant;

use anyhow::bail;
use serde::{Deserialize, Serialize};
use verbatim_device::control::{
    Access, Backing, QpCap, QpType, Reply, Request, SOCKET_NAME, Segment, VERSION,
};
use verbatim_seqpacket::Socket;

/// Where the software RNIC of a lab's host listens.
const RUNTIME: &str = "/run/verbatim";
const REGION_BYTES: u64 = 4096;
/// Far from what this host's RNIC gives.
const FIRST_QPN: u32 = 0x0060_0000;
const FIRST_KEY: u32 = 0x6000_0000;
/// The lowest byte of a key is no part of what tells keys apart.
const KEY_STEP: u32 = 0x100;

pub const OBJECTS: [&str; 2] = ["QP", "MR"];

/// Microseconds of one object in one round.
#[derive(Debug, Serialize, Deserialize)]
pub struct Asked {
    pub object: String,
    pub asked: bool,
    pub us: f64,
}

/// Prints an [`Asked`] for each kind, each way and each round.
pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    let [count, rounds] = arguments else {
        bail!("object-numbers wants a count and a number of rounds");
    };
    let (count, rounds): (u32, u32) = (count.parse()?, rounds.parse()?);
    let rnic = Rnic::open(Path::new(RUNTIME))?;
    // The first round pays for what the RNIC keeps.
    for round in 0..=rounds {
        for asked in [false, true] {
            for object in OBJECTS {
                let us = rnic.make(object, count, asked)?;
                let object = object.to_owned();
                if round > 0 {
                    println!("{}", serde_json::to_string(&Asked { object, asked, us })?);
                }
            }
        }
    }
    Ok(())
}

/// A context, with what a queue pair needs.
struct Rnic {
    connection: Socket,
    pd: u32,
    cq: u32,
    memory: Vec<u8>,
}

impl Rnic {
    fn open(runtime: &Path) -> anyhow::Result<Self> {
        let connection = Socket::connect(&runtime.join(SOCKET_NAME))?;
        let open = Request::OpenContext {
            version: VERSION,
            name: "bench".to_owned(),
        };
        call(&connection, &open)?;
        let Reply::Pd { pd } = call(&connection, &Request::AllocPd)? else {
            bail!("the RNIC gives no protection domain");
        };
        let create = Request::CreateCq {
            entries: 16,
            channel: None,
            event: None,
        };
        let Reply::Cq { cq, .. } = call(&connection, &create)? else {
            bail!("the RNIC gives no completion queue");
        };
        Ok(Self {
            connection,
            pd,
            cq,
            memory: vec![1; 2 * REGION_BYTES as usize],
        })
    }

    /// Microseconds of one of `count`; they are destroyed afterwards.
    fn make(&self, object: &str, count: u32, asked: bool) -> anyhow::Result<f64> {
        let mut made = Vec::new();
        let start = Instant::now();
        for place in 0..count {
            made.push(match object {
                "QP" => self.queue_pair(asked.then_some(FIRST_QPN + place))?,
                _ => self.region(asked.then_some(FIRST_KEY + place * KEY_STEP))?,
            });
        }
        let us = start.elapsed().as_secs_f64() * 1e6 / f64::from(count);
        for undo in made {
            call(&self.connection, &undo)?;
        }
        Ok(us)
    }

    /// Makes one; what destroys it.
    fn queue_pair(&self, qpn: Option<u32>) -> anyhow::Result<Request> {
        let create = Request::CreateQp {
            pd: self.pd,
            send_cq: self.cq,
            recv_cq: self.cq,
            qp_type: QpType::Rc,
            cap: QpCap {
                max_send_wr: 16,
                max_recv_wr: 16,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            srq: None,
            qpn,
        };
        match call(&self.connection, &create)? {
            Reply::Qp { qpn: given, .. } if qpn.is_none_or(|qpn| qpn == given) => {
                Ok(Request::DestroyQp { qpn: given })
            }
            other => bail!("asked for queue pair {qpn:?}, the RNIC answers {other:?}"),
        }
    }

    fn region(&self, key: Option<u32>) -> anyhow::Result<Request> {
        let address = (self.memory.as_ptr() as u64).next_multiple_of(REGION_BYTES);
        let register = Request::RegMr {
            pd: self.pd,
            address,
            length: REGION_BYTES,
            iova: address,
            access: Access::LOCAL_WRITE,
            segments: vec![Segment {
                address,
                length: REGION_BYTES,
                backing: Backing::Process,
            }],
            key,
        };
        match call(&self.connection, &register)? {
            Reply::Mr { lkey, .. } if key.is_none_or(|key| key == lkey) => Ok(Request::DeregMr { lkey }),
            other => bail!("asked for key {key:?}, the RNIC answers {other:?}"),
        }
    }
}

fn call(connection: &Socket, request: &Request) -> anyhow::Result<Reply> {
    let received = connection.call(request, &[])?;
    match received.message {
        Reply::Error { errno, message } => bail!("the RNIC refuses: {message} (errno {errno})"),
        reply => Ok(reply),
    }
}
