//! The software RNIC: a connection for the control path, an arena of shared memory for the queues.

#[cfg(test)]
mod cost;
mod map;
mod rings;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use verbatim_channel::SegmentRecord;
use verbatim_device::control::{
    Backing, DeviceAttr, PortAttr, QpAttr, QpAttrMask, Reply, Request, SOCKET_NAME, Segment, VERSION,
};
use verbatim_seqpacket::{Received, Socket};

use self::map::Arena;
use self::rings::{SoftCompletions, SoftRecvs, SoftSends};
use super::{CompletionRing, CqPlace, Device, Parked, PhysicalMrInit, PhysicalQpInit, QpEnds, QpPlace};
use crate::error::VerbsError;
use crate::fork;

/// An opened context.
#[derive(Debug)]
pub struct SoftDevice {
    /// One request, one answer.
    connection: Mutex<Socket>,
    /// A child of this process shall not hold the connection.
    _held: fork::Held,
    arena: Arc<Arena>,
    device_attr: DeviceAttr,
    port_attr: PortAttr,
}

/// Opens a new context at the RNIC of this runtime folder.
pub fn open(runtime: &Path) -> Result<Arc<dyn Device>, VerbsError> {
    let connection = Socket::connect(&runtime.join(SOCKET_NAME)).map_err(no_answer("open_device"))?;
    let request = Request::OpenContext {
        version: VERSION,
        name: program_name(),
    };
    Ok(Arc::new(SoftDevice::start(connection, "open_device", &request)?))
}

/// The program's name, for the RNIC's statistics.
pub fn program_name() -> String {
    let path = std::env::current_exe().unwrap_or_default();
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

fn no_answer(verb: &'static str) -> impl Fn(verbatim_seqpacket::Error) -> VerbsError {
    move |source| VerbsError::Channel {
        verb,
        peer: "software RNIC",
        source,
    }
}

fn call(
    connection: &Socket,
    verb: &'static str,
    request: &Request,
    fds: &[BorrowedFd<'_>],
) -> Result<Received<Reply>, VerbsError> {
    let received = connection.call(request, fds).map_err(no_answer(verb))?;
    match received.message {
        Reply::Error { errno, message } => Err(VerbsError::Refused { verb, errno, message }),
        _ => Ok(received),
    }
}

fn wrong<T>(verb: &'static str, reply: Reply) -> Result<T, VerbsError> {
    Err(VerbsError::WrongReply {
        verb,
        reply: Box::new(reply),
    })
}

impl SoftDevice {
    fn start(connection: Socket, verb: &'static str, request: &Request) -> Result<Self, VerbsError> {
        let received = call(&connection, verb, request, &[])?;
        let Reply::Context {
            device,
            port,
            arena_bytes,
        } = received.message
        else {
            return wrong(verb, received.message);
        };
        let fds: Result<[OwnedFd; 2], _> = received.fds.try_into();
        let [memory, doorbell] = fds.map_err(|fds| {
            VerbsError::Invalid(format!("the RNIC sent {} descriptors in place of two", fds.len()))
        })?;
        let arena = Arena::map(&memory, arena_bytes, doorbell)
            .map_err(|source| VerbsError::Os { call: "mmap", source })?;
        Ok(Self {
            _held: fork::hold_fd(connection.as_fd()),
            connection: Mutex::new(connection),
            arena: Arc::new(arena),
            device_attr: device,
            port_attr: port,
        })
    }

    fn call(&self, verb: &'static str, request: &Request) -> Result<Reply, VerbsError> {
        self.call_with(verb, request, &[])
    }

    fn call_with(
        &self,
        verb: &'static str,
        request: &Request,
        fds: &[BorrowedFd<'_>],
    ) -> Result<Reply, VerbsError> {
        Ok(call(&self.connection.lock(), verb, request, fds)?.message)
    }

    fn call_done(&self, verb: &'static str, request: &Request) -> Result<(), VerbsError> {
        match self.call(verb, request)? {
            Reply::Done => Ok(()),
            reply => wrong(verb, reply),
        }
    }
}

impl Device for SoftDevice {
    fn attributes(&self) -> (&DeviceAttr, &PortAttr) {
        (&self.device_attr, &self.port_attr)
    }

    fn alloc_pd(&self) -> Result<u32, VerbsError> {
        match self.call("alloc_pd", &Request::AllocPd)? {
            Reply::Pd { pd } => Ok(pd),
            reply => wrong("alloc_pd", reply),
        }
    }

    fn dealloc_pd(&self, pd: u32) -> Result<(), VerbsError> {
        self.call_done("dealloc_pd", &Request::DeallocPd { pd })
    }

    fn reg_mr(&self, init: &PhysicalMrInit<'_>) -> Result<(u32, u32), VerbsError> {
        let request = Request::RegMr {
            pd: init.pd,
            address: init.address,
            length: init.length,
            iova: init.iova,
            access: init.access,
            segments: init.segments.iter().map(segment).collect(),
        };
        let file: Vec<_> = init.file.iter().map(|file| file.as_fd()).collect();
        match self.call_with("reg_mr", &request, &file)? {
            Reply::Mr { lkey, rkey } => Ok((lkey, rkey)),
            reply => wrong("reg_mr", reply),
        }
    }

    fn dereg_mr(&self, lkey: u32) -> Result<(), VerbsError> {
        self.call_done("dereg_mr", &Request::DeregMr { lkey })
    }

    fn create_cq(&self, entries: u32) -> Result<CqPlace, VerbsError> {
        match self.call(
            "create_cq",
            &Request::CreateCq {
                entries,
                channel: None,
            },
        )? {
            Reply::Cq { cq, entries, offset } => Ok(CqPlace { cq, entries, offset }),
            reply => wrong("create_cq", reply),
        }
    }

    fn destroy_cq(&self, cq: u32) -> Result<(), VerbsError> {
        self.call_done("destroy_cq", &Request::DestroyCq { cq })
    }

    fn create_qp(&self, init: &PhysicalQpInit) -> Result<QpPlace, VerbsError> {
        let request = Request::CreateQp {
            pd: init.pd,
            send_cq: init.send_cq,
            recv_cq: init.recv_cq,
            qp_type: init.qp_type,
            cap: init.cap,
            srq: None,
        };
        match self.call("create_qp", &request)? {
            Reply::Qp {
                qpn,
                cap,
                slot,
                offset,
            } => Ok(QpPlace {
                qpn,
                cap,
                slot,
                offset,
            }),
            reply => wrong("create_qp", reply),
        }
    }

    fn modify_qp(&self, qpn: u32, mask: QpAttrMask, attr: &QpAttr) -> Result<(), VerbsError> {
        let request = Request::ModifyQp {
            qpn,
            mask,
            attr: *attr,
        };
        self.call_done("modify_qp", &request)
    }

    fn query_qp(&self, qpn: u32) -> Result<QpAttr, VerbsError> {
        match self.call("query_qp", &Request::QueryQp { qpn })? {
            Reply::QpAttr { attr, .. } => Ok(attr),
            reply => wrong("query_qp", reply),
        }
    }

    fn destroy_qp(&self, qpn: u32) -> Result<(), VerbsError> {
        self.call_done("destroy_qp", &Request::DestroyQp { qpn })
    }

    fn qp_ends(&self, place: &QpPlace) -> Result<QpEnds, VerbsError> {
        let (send, recv) = self.arena.qp_ends(place).ok_or_else(|| outside(place.offset))?;
        Ok(QpEnds {
            send: Box::new(SoftSends::new(self.arena.clone(), send, place.slot)),
            recv: Box::new(SoftRecvs::new(self.arena.clone(), recv)),
        })
    }

    fn cq_end(&self, place: &CqPlace) -> Result<Box<dyn CompletionRing>, VerbsError> {
        let end = self.arena.cq_end(place).ok_or_else(|| outside(place.offset))?;
        Ok(Box::new(SoftCompletions::new(self.arena.clone(), end)))
    }

    fn park(self: Arc<Self>) -> Result<Parked, VerbsError> {
        let held = |object: &str, users: usize| VerbsError::Busy {
            object: object.to_owned(),
            users,
        };
        let device =
            Arc::try_unwrap(self).map_err(|device| held("the device", Arc::strong_count(&device)))?;
        device.call_done("park_context", &Request::ParkContext)?;
        let Self {
            connection, arena, ..
        } = device;
        // Unmapped here and now, or not parked: the caller freezes the process next.
        Arc::try_unwrap(arena).map_err(|arena| held("the RNIC's memory", Arc::strong_count(&arena)))?;
        Ok(Parked {
            connection: connection.into_inner().into_fd(),
            reopen: Box::new(attach),
        })
    }
}

/// Opens a connection that was parked, or prepared by an agent.
pub fn attach(connection: OwnedFd) -> Result<Arc<dyn Device>, VerbsError> {
    let request = Request::AttachContext { version: VERSION };
    let device = SoftDevice::start(Socket::from_fd(connection), "attach_context", &request)?;
    Ok(Arc::new(device))
}

fn outside(offset: u64) -> VerbsError {
    VerbsError::Invalid(format!(
        "the RNIC put a queue at {offset:#x}, outside of its memory"
    ))
}

fn segment(record: &SegmentRecord) -> Segment {
    Segment {
        address: record.address,
        length: record.length,
        backing: match record.offset {
            Some(offset) => Backing::File { fd_index: 0, offset },
            None => Backing::Process,
        },
    }
}
