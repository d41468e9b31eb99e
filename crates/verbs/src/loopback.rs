//! A program that talks to itself through an RNIC: what `verbatim check --self-test` moves.
//!
//! It uses the C interface of the libibverbs that the program has (the guest library, preloaded), by the code by which the backend
//! `rdma-core` uses the system's: a context, a protection domain, a region, a completion queue with a channel, two reliable
//! connections that are connected to each other, of which one has a shared receive queue, and a queue pair for datagrams with the address of
//! its own port.
//!
//! It never asks for a number or a key again: those that it was given at the start are what it sends with, and what completions must name.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use verbatim_device::control::{Access, QpAttr, QpCap, QpState, QpType, SrqAttr};
use verbatim_device::layout::{Cqe, SEND_SIGNALED, SendWqe, Sge};
use verbatim_device::ring::Body;
use verbatim_device::transitions::steps;

use crate::backend::{
    CompletionRing, Device, EventChannel, PhysicalMemory, PhysicalMrInit, PhysicalQpInit, QpEnds, QpPlace,
    RecvRing, Refused, rdma_core,
};
use crate::error::VerbsError;
use crate::trial::memory::Mapped;
use crate::work::{RECV_BIT, SendOpcode};

/// Bytes of a message, a packet and a bit at the smallest MTU that is usual.
const MESSAGE: usize = 1500;
/// Bytes of a datagram, which has to fit in a packet.
const DATAGRAM: usize = 200;
/// Bytes before a datagram that was received.
const GRH: usize = 40;
/// Each buffer has a page of its own: what the SEND reads, where it lands, the same of the WRITE, and of the datagram.
const BUFFERS: [usize; 6] = [0, 4096, 8192, 12_288, 16_384, 20_480];
const ALL: usize = 24_576;
/// Of the queue pair for datagrams.
const QKEY: u32 = 0x1111_2222;
/// How long an operation on an idle RNIC may take.
const LIMIT: Duration = Duration::from_secs(20);
const ENTRIES: u32 = 32;
const CAP: QpCap = QpCap {
    max_send_wr: 4,
    max_recv_wr: 4,
    max_send_sge: 1,
    max_recv_sge: 1,
    max_inline_data: 0,
};

/// Why a round failed, in words for an operator.
#[derive(Debug, thiserror::Error)]
pub enum RoundError {
    /// A verb was refused.
    #[error("{what}: {error}")]
    Verb {
        /// What was to be done.
        what: &'static str,
        /// The library's words.
        error: VerbsError,
    },
    /// A request failed.
    #[error("request {wr_id:#x} of queue pair {qpn:#x} completed with status {status}")]
    Status {
        /// Its number.
        wr_id: u64,
        /// Whose it was.
        qpn: u32,
        /// `enum ibv_wc_status`.
        status: u32,
    },
    /// A completion that nothing was posted for.
    #[error("there is a completion of request {wr_id:#x} of queue pair {qpn:#x}, which has posted none such")]
    Unknown {
        /// Its number.
        wr_id: u64,
        /// Whose it is said to be.
        qpn: u32,
    },
    /// A datagram is told to be of somebody else, or of another length.
    #[error("the datagram is said to be of queue pair {qpn:#x} and {bytes} bytes long")]
    Datagram {
        /// The sender.
        qpn: u32,
        /// With the room for its address.
        bytes: u32,
    },
    /// Nothing came.
    #[error("{what} did not come in time")]
    Late {
        /// What was waited for.
        what: &'static str,
    },
    /// Something else came.
    #[error("byte {at} of what the {what} brought is not what was sent")]
    Content {
        /// Which operation.
        what: &'static str,
        /// Where.
        at: usize,
    },
}

/// Adds what was to be done.
fn verb<T>(what: &'static str, result: Result<T, VerbsError>) -> Result<T, RoundError> {
    result.map_err(|error| RoundError::Verb { what, error })
}

/// Of a request that the library did not take.
fn refused(what: &'static str, refused: Refused) -> RoundError {
    let errno = refused.errno;
    let message = std::io::Error::from_raw_os_error(errno).to_string();
    let error = VerbsError::Refused {
        verb: what,
        errno,
        message,
    };
    RoundError::Verb { what, error }
}

/// The program.
pub struct Loopback {
    /// Two connected ones, and one for datagrams.
    ends: [QpEnds; 3],
    numbers: [u32; 3],
    /// Of the second.
    shared: Box<dyn RecvRing>,
    completions: Box<dyn CompletionRing>,
    channel: Arc<dyn EventChannel>,
    memory: Mapped,
    keys: (u32, u32),
    /// The address of the port itself.
    own: u32,
    rounds: u64,
    /// How long an operation may take.
    limit: Duration,
    _device: Arc<dyn Device>,
}

impl Loopback {
    /// Opens the device of that name, and makes everything.
    pub fn open(device: &str) -> Result<Self, RoundError> {
        let device = verb("opening the device", rdma_core::open_as_program(device))?;
        Self::on(device, LIMIT)
    }

    /// Makes everything on a device.
    pub(crate) fn on(device: Arc<dyn Device>, limit: Duration) -> Result<Self, RoundError> {
        let pd = verb("ibv_alloc_pd", device.alloc_pd())?;
        let memory = verb("memory", Mapped::private(ALL))?;
        let init = PhysicalMrInit {
            pd,
            access: Access::LOCAL_WRITE | Access::REMOTE_WRITE,
            memory: PhysicalMemory {
                address: memory.address(),
                length: ALL as u64,
                iova: memory.address(),
                segments: &[],
                file: None,
            },
        };
        let keys = verb("ibv_reg_mr", device.reg_mr(&init))?;
        let channel = verb("ibv_create_comp_channel", device.create_comp_channel())?;
        let events = Some((channel.number(), 0));
        let cq = verb("ibv_create_cq", device.create_cq(ENTRIES, events))?;
        let attr = SrqAttr {
            max_wr: 4,
            max_sge: 1,
            ..SrqAttr::default()
        };
        let srq = verb("ibv_create_srq", device.create_srq(pd, &attr))?;
        let make = |qp_type, srq| {
            let init = PhysicalQpInit {
                pd,
                send_cq: cq.cq,
                recv_cq: cq.cq,
                srq,
                qp_type,
                cap: CAP,
            };
            verb("ibv_create_qp", device.create_qp(&init))
        };
        let places = [
            make(QpType::Rc, None)?,
            make(QpType::Rc, Some(srq.srq))?,
            make(QpType::Ud, None)?,
        ];
        let [first, second, datagrams] = &places;
        connect(&*device, first, QpType::Rc, second.qpn)?;
        connect(&*device, second, QpType::Rc, first.qpn)?;
        connect(&*device, datagrams, QpType::Ud, 0)?;
        let own = rdma_core::way_to_itself(device.attributes().1);
        let ends = |place| verb("a queue pair", device.qp_ends(place));
        Ok(Self {
            ends: [ends(first)?, ends(second)?, ends(datagrams)?],
            numbers: [first.qpn, second.qpn, datagrams.qpn],
            shared: verb("a shared receive queue", device.srq_end(&srq))?,
            completions: verb("a completion queue", device.cq_end(&cq))?,
            channel,
            memory,
            keys,
            own: verb("ibv_create_ah", device.create_ah(pd, &own))?,
            rounds: 0,
            limit,
            _device: device,
        })
    }

    /// What the program was given, for a log.
    pub fn given(&self) -> String {
        let ([first, second, datagrams], (lkey, rkey)) = (self.numbers, self.keys);
        format!(
            "queue pairs {first:#x} and {second:#x} (RC), {datagrams:#x} (UD), keys {lkey:#x} and {rkey:#x}"
        )
    }

    /// A SEND to the one queue pair, of which a completion event tells, a WRITE to the other, and a datagram; all are looked at.
    pub fn round(&mut self) -> Result<(), RoundError> {
        let round = self.rounds;
        self.rounds += 1;
        let byte = move |buffer: usize| move |at: usize| (round as usize * 31 + at * 7 + buffer) as u8;
        let [sent, received, written, landed, told, heard] = BUFFERS;
        for (from, to, bytes) in [
            (sent, received, MESSAGE),
            (written, landed, MESSAGE),
            (told, heard, DATAGRAM + GRH),
        ] {
            self.memory.set(from, bytes, byte(from));
            self.memory.set(to, bytes, |_| 0);
        }
        self.completions.arm(false);
        let (base, (lkey, rkey)) = (self.memory.address(), self.keys);
        let sge = |at, bytes: usize| Sge {
            address: base + at as u64,
            length: bytes as u32,
            lkey,
        };
        self.shared.push(round | RECV_BIT, &[sge(received, MESSAGE)]);
        let posted = self.shared.publish();
        posted.map_err(|error| refused("ibv_post_srq_recv", error))?;
        let recv = &mut self.ends[2].recv;
        recv.push(round | RECV_BIT, &[sge(heard, DATAGRAM + GRH)]);
        recv.publish().map_err(|error| refused("ibv_post_recv", error))?;
        let (datagrams, own) = (self.numbers[2], self.own);
        let mut post = |end: usize, opcode: SendOpcode, from: Sge| {
            let wqe = SendWqe {
                wr_id: round,
                opcode: opcode as u8,
                flags: SEND_SIGNALED,
                remote_address: base + landed as u64,
                rkey,
                remote_qpn: datagrams,
                remote_qkey: QKEY,
                ah: own,
                ..SendWqe::default()
            };
            let send = &mut self.ends[end].send;
            send.push(&wqe, Body::Sges(&[from]));
            send.publish().map_err(|error| refused("ibv_post_send", error))
        };
        post(0, SendOpcode::Send, sge(sent, MESSAGE))?;
        post(1, SendOpcode::Write, sge(written, MESSAGE))?;
        post(2, SendOpcode::Send, sge(told, DATAGRAM))?;
        self.event()?;
        self.completed(round)?;
        for (what, from, to, bytes) in [
            ("SEND", sent, received, MESSAGE),
            ("WRITE", written, landed, MESSAGE),
            ("datagram", told, heard + GRH, DATAGRAM),
        ] {
            if let Some(at) = self.memory.differs(to, bytes, byte(from)) {
                return Err(RoundError::Content { what, at });
            }
        }
        Ok(())
    }

    /// Waits for the event that was asked for.
    fn event(&self) -> Result<(), RoundError> {
        let begun = Instant::now();
        let mut fds = [PollFd::from_borrowed_fd(self.channel.fd(), PollFlags::IN)];
        loop {
            let left = self.limit.saturating_sub(begun.elapsed());
            let limit = Timespec::try_from(left).expect("some seconds");
            match poll(&mut fds, Some(&limit)) {
                Ok(0) => {
                    return Err(RoundError::Late {
                        what: "a completion event",
                    });
                }
                Ok(_) => return verb("ibv_get_cq_event", self.channel.next()).map(drop),
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return verb("poll", Err(VerbsError::os("poll", errno))),
            }
        }
    }

    /// Takes the completions of a round, each once.
    fn completed(&mut self, round: u64) -> Result<(), RoundError> {
        let begun = Instant::now();
        let [first, second, datagrams] = self.numbers;
        let recv = round | RECV_BIT;
        let mut awaited = vec![
            (round, first),
            (recv, second),
            (round, second),
            (round, datagrams),
            (recv, datagrams),
        ];
        while !awaited.is_empty() {
            let Some(cqe) = self.completions.pop() else {
                if begun.elapsed() > self.limit {
                    return Err(RoundError::Late { what: "a completion" });
                }
                std::thread::yield_now();
                continue;
            };
            let Cqe { wr_id, qpn, .. } = cqe;
            if cqe.status != 0 {
                let status = cqe.status;
                return Err(RoundError::Status { wr_id, qpn, status });
            }
            let Some(at) = awaited.iter().position(|one| *one == (wr_id, qpn)) else {
                return Err(RoundError::Unknown { wr_id, qpn });
            };
            awaited.swap_remove(at);
            let as_sent = cqe.src_qpn == datagrams && cqe.byte_len as usize == DATAGRAM + GRH;
            if (wr_id, qpn) == (recv, datagrams) && !as_sent {
                return Err(RoundError::Datagram {
                    qpn: cqe.src_qpn,
                    bytes: cqe.byte_len,
                });
            }
        }
        Ok(())
    }
}

/// Takes a queue pair to RTS, by the way to the port itself.
fn connect(device: &dyn Device, place: &QpPlace, qp_type: QpType, dest_qpn: u32) -> Result<(), RoundError> {
    let port = device.attributes().1;
    let attr = QpAttr {
        path_mtu: port.active_mtu,
        dest_qpn,
        access: Access::REMOTE_WRITE,
        av: rdma_core::way_to_itself(port),
        port_num: 1,
        qkey: QKEY,
        max_rd_atomic: 1,
        max_dest_rd_atomic: 1,
        min_rnr_timer: 12,
        timeout: 18,
        retry_cnt: 7,
        rnr_retry: 7,
        ..QpAttr::default()
    };
    for (state, mask) in steps(qp_type, QpState::Rts).into_iter().flatten() {
        let step = QpAttr { state, ..attr };
        verb("ibv_modify_qp", device.modify_qp(place.qpn, mask, &step))?;
    }
    Ok(())
}
