//! One reliable connection, and what is in flight on it.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use verbatim_verbs::{
    Access, AddressVector, Body, CompChannel, Cq, Qp, QpAttr, QpAttrMask, QpCap, QpClass, QpInit, QpState,
    QpType, SEND_SIGNALED, SendOpcode, SendWr, Sge, UdAddress, VerbsError, WC_SUCCESS, Wc,
};

use crate::buffer::{Buffer, Domain, Exposed};
use crate::error::{Error, status};
use crate::lent::Lent;
use crate::opened::Opened;
use crate::window::Window;

/// 4.096 µs × 2^17 without an answer, half a second, before packets are sent again, and so often: an RNIC that gets no processor for
/// some time is not gone.
const TIMEOUT: u8 = 17;
const RETRIES: u8 = 7;

/// A PSN has 24 bits.
const PSN_MASK: u32 = (1 << 24) - 1;

/// One end of a connection, for the other one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct End {
    /// The RNIC's GID, network byte order.
    pub gid: [u8; 16],
    /// The queue pair.
    pub qpn: u32,
    /// The first PSN that it sends.
    pub psn: u32,
    /// The largest packet that its link takes (`enum ibv_mtu`).
    pub mtu: u8,
    /// How many READs it serves at a time.
    pub reads: u8,
}

/// How a connection is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Whose work goes first. In the background, answers wait like requests: both ends should be of one class. Where an RNIC has no
    /// classes, it is served as all others are ([`Connection::yields`]).
    pub class: QpClass,
    /// The most bytes in flight; a request that is longer goes alone.
    pub window_bytes: u64,
    /// The most requests in flight.
    pub window_requests: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            class: QpClass::User,
            window_bytes: 4 << 20,
            window_requests: 64,
        }
    }
}

/// The number of a request that was posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(u64);

/// Ends the waiting of a connection, from any thread.
#[derive(Debug, Clone)]
pub struct Canceller(Arc<Cancel>);

#[derive(Debug)]
struct Cancel {
    is_set: AtomicBool,
    event: OwnedFd,
}

impl Canceller {
    /// Whoever waits for the connection gets [`Error::Cancelled`], now and later.
    pub fn cancel(&self) {
        self.0.is_set.store(true, Ordering::SeqCst);
        // An eventfd takes a write unless its count is about to overflow: then it is readable, too.
        let _ = rustix::io::write(&self.0.event, &1u64.to_ne_bytes());
    }
}

/// A reliable connection to another daemon.
#[derive(Debug)]
pub struct Connection {
    // Dropped in this order: first the queue pair goes, and what is in flight with it, then memory that it could reach.
    queue: Queue,
    window: Window,
    /// What those in flight read or write, oldest first.
    in_use: VecDeque<(&'static str, Arc<Buffer>)>,
    domain: Arc<Domain>,
    psn: u32,
    yields: bool,
    /// The next completion makes an event.
    is_armed: bool,
    /// The first request that failed: which, how long, and why. All behind it are lost.
    failed: Option<(&'static str, u64, &'static str)>,
    cancel: Arc<Cancel>,
}

#[derive(Debug)]
struct Queue {
    qp: Arc<Qp>,
    cq: Arc<Cq>,
    channel: Arc<CompChannel>,
}

impl Queue {
    /// Whether the RNIC serves it behind programs from now on. Where it has no classes, it never does.
    fn set_class(&self, class: QpClass) -> Result<bool, Error> {
        match self.qp.set_class(class) {
            Ok(()) => Ok(class == QpClass::Background),
            Err(VerbsError::Unsupported(_)) => Ok(false),
            Err(error) => Err(Error::verbs("the connection's class cannot be changed")(error)),
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // Of an RNIC that is gone nothing is left to destroy.
        let _ = self.qp.destroy();
        let _ = self.cq.destroy();
        let _ = self.channel.destroy();
    }
}

impl Connection {
    pub(crate) fn new(opened: Arc<Opened>, options: Options) -> Result<Self, Error> {
        let failed = || Error::verbs("a connection cannot be made");
        let domain = Domain::new(opened)?;
        let context = domain.context();
        let channel = context.create_comp_channel().map_err(failed())?;
        rustix::io::ioctl_fionbio(channel.fd(), true).map_err(Error::os("ioctl(FIONBIO)"))?;
        let cq = context.create_cq(options.window_requests.max(1) + 1, Some(&channel));
        let cq = cq.map_err(failed())?;
        let cap = QpCap {
            max_send_wr: options.window_requests.max(1),
            max_recv_wr: 1,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let init = QpInit {
            send_cq: Arc::clone(&cq),
            recv_cq: Arc::clone(&cq),
            qp_type: QpType::Rc,
            cap,
            signal_all: true,
            srq: None,
        };
        let qp = domain.pd().create_qp(&init).map_err(failed())?;
        let queue = Queue { qp, cq, channel };
        let yields = match options.class {
            // As it was made.
            QpClass::User => false,
            QpClass::Background => queue.set_class(QpClass::Background)?,
        };
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        Ok(Self {
            queue,
            window: Window::new(options.window_bytes, options.window_requests),
            in_use: VecDeque::new(),
            domain,
            psn: rand::random::<u32>() & PSN_MASK,
            yields,
            is_armed: false,
            failed: None,
            cancel: Arc::new(Cancel {
                is_set: AtomicBool::new(false),
                event: event.map_err(Error::os("eventfd"))?,
            }),
        })
    }

    /// For the other side.
    pub fn end(&self) -> End {
        let context = self.queue.qp.context();
        End {
            gid: context.gid(self.domain.gid_index().into()).unwrap_or_default(),
            qpn: self.queue.qp.number(),
            psn: self.psn,
            mtu: context.port_attr().active_mtu,
            reads: context.device_attr().max_qp_rd_atom,
        }
    }

    /// Whether the RNIC serves it behind programs. Of a connection in the background this is false where the RNIC has no classes:
    /// hardware, or a software RNIC of an earlier release. There whoever uses it must keep to a pace.
    pub fn yields(&self) -> bool {
        self.yields
    }

    /// Makes it one of another class, also while it is connected. The other side's end keeps its own.
    pub fn set_class(&mut self, class: QpClass) -> Result<(), Error> {
        self.yields = self.queue.set_class(class)?;
        Ok(())
    }

    /// Memory that the other side may read and write, and that requests of this one go from and to.
    pub fn buffer(&self, length: usize) -> Result<Arc<Buffer>, Error> {
        Buffer::register(&self.domain, length)
    }

    /// As [`Self::buffer`], of memory that is there from the beginning and is never swapped out, in huge pages where the kernel has
    /// some for files without a name. An error if there is not so much memory. For much of it this takes less time, too.
    pub fn locked_buffer(&self, length: usize) -> Result<Arc<Buffer>, Error> {
        Buffer::register_locked(&self.domain, length)
    }

    /// The memory of another connection's buffer, as a buffer of this one. Whoever wants that nothing of the other connection lands in
    /// it any more drops that first.
    pub fn share(&self, buffer: &Buffer) -> Result<Arc<Buffer>, Error> {
        buffer.share(&self.domain)
    }

    /// The first `length` bytes of a file of a tmpfs, or of a memfd, which the other side may read from now on. It must not become
    /// shorter. Whoever wants that nobody reads it any more drops the connection first.
    pub fn lend(&self, file: OwnedFd, length: u64) -> Result<Lent, Error> {
        Lent::register(&self.domain, file, length)
    }

    /// Connects it with the other side's end. Both sides must have done so before the first request.
    pub fn connect(&mut self, remote: &End) -> Result<(), Error> {
        let own = self.end();
        let attr = |state| QpAttr {
            state,
            port_num: 1,
            access: Access::REMOTE_WRITE | Access::REMOTE_READ,
            path_mtu: own.mtu.min(remote.mtu),
            dest_qpn: remote.qpn,
            rq_psn: remote.psn & PSN_MASK,
            sq_psn: own.psn,
            av: AddressVector {
                dgid: remote.gid,
                sgid_index: self.domain.gid_index(),
                port_num: 1,
                hop_limit: 64,
                ..AddressVector::default()
            },
            max_rd_atomic: remote.reads.min(own.reads),
            max_dest_rd_atomic: own.reads,
            min_rnr_timer: 1,
            timeout: TIMEOUT,
            retry_cnt: RETRIES,
            rnr_retry: RETRIES,
            ..QpAttr::default()
        };
        for (state, mask) in steps() {
            let changed = self.queue.qp.modify(mask, &attr(state));
            changed.map_err(Error::verbs("the connection cannot be established"))?;
        }
        Ok(())
    }

    /// Posts a WRITE of `length` bytes of `local` to `remote`; it waits, until `deadline`, for room in the window only. The bytes must not
    /// change before the request is done.
    pub fn write(
        &mut self,
        (local, offset): (&Arc<Buffer>, u64),
        (remote, remote_offset): (&Exposed, u64),
        length: u64,
        deadline: Option<Instant>,
    ) -> Result<Ticket, Error> {
        let request = (SendOpcode::Write, "a WRITE");
        self.post(
            request,
            (local, offset),
            (remote, remote_offset),
            length,
            deadline,
        )
    }

    /// Posts a READ of `length` bytes of `remote` into `local`, as [`Self::write`]. The bytes are there when the request is done.
    pub fn read(
        &mut self,
        (local, offset): (&Arc<Buffer>, u64),
        (remote, remote_offset): (&Exposed, u64),
        length: u64,
        deadline: Option<Instant>,
    ) -> Result<Ticket, Error> {
        let request = (SendOpcode::Read, "a READ");
        self.post(
            request,
            (local, offset),
            (remote, remote_offset),
            length,
            deadline,
        )
    }

    fn post(
        &mut self,
        (opcode, name): (SendOpcode, &'static str),
        (local, offset): (&Arc<Buffer>, u64),
        (remote, remote_offset): (&Exposed, u64),
        length: u64,
        deadline: Option<Instant>,
    ) -> Result<Ticket, Error> {
        local.check(offset, length)?;
        remote.check(remote_offset, length)?;
        let most = self.queue.qp.context().port_attr().max_msg_bytes;
        let message = u32::try_from(length).ok().filter(|bytes| *bytes <= most);
        let message = message.ok_or(Error::TooLong { length, most })?;
        self.wait_until(deadline, |connection| connection.window.has_room(length))?;
        let sges = [Sge {
            address: local.exposed().address + offset,
            length: message,
            lkey: local.lkey(),
        }];
        let request = SendWr {
            wr_id: self.window.count() + 1,
            opcode,
            flags: SEND_SIGNALED,
            imm: 0,
            remote_address: remote.address + remote_offset,
            rkey: remote.rkey,
            compare_add: 0,
            swap: 0,
            ud: UdAddress::default(),
            body: Body::Sges(&sges),
        };
        self.queue
            .qp
            .post_send([request])
            .map_err(|(_, error)| Error::Os {
                call: "ibv_post_send",
                source: std::io::Error::from_raw_os_error(error.errno()),
            })?;
        self.in_use.push_back((name, Arc::clone(local)));
        Ok(Ticket(self.window.posted(length)))
    }

    /// Waits until the request is done, and with it all before it.
    pub fn wait(&mut self, ticket: Ticket, deadline: Option<Instant>) -> Result<(), Error> {
        self.wait_until(deadline, |connection| connection.window.done() >= ticket.0)
    }

    /// Waits until all are done.
    pub fn wait_for_all(&mut self, deadline: Option<Instant>) -> Result<(), Error> {
        self.wait(Ticket(self.window.count()), deadline)
    }

    /// Whether the request is done; never waits.
    pub fn is_done(&mut self, ticket: Ticket) -> Result<bool, Error> {
        self.poll()?;
        Ok(self.window.done() >= ticket.0)
    }

    /// Whether a request of that length is posted without waiting.
    pub fn has_room(&self, length: u64) -> bool {
        self.window.has_room(length)
    }

    /// Readable when requests may have completed since [`Self::progress`]; for who waits for other things, too.
    pub fn events(&self) -> BorrowedFd<'_> {
        self.queue.channel.fd()
    }

    /// Takes what has completed, and asks for an event at what completes from here on; never waits. The number of the last request that
    /// is done.
    pub fn progress(&mut self) -> Result<Ticket, Error> {
        self.take_events();
        self.poll()?;
        self.arm();
        // What has completed between the two makes no event.
        self.poll()?;
        Ok(Ticket(self.window.done()))
    }

    /// Takes what has completed, and asks for no event: for who looks again all the time, and calls [`Self::progress`] before it sleeps.
    pub fn look(&mut self) -> Result<Ticket, Error> {
        // It is made once, and then not before it is asked for again.
        if self.is_armed {
            self.take_events();
        }
        self.poll()?;
        Ok(Ticket(self.window.done()))
    }

    /// Bytes of all requests that are done, as far as was looked.
    pub fn done_bytes(&self) -> u64 {
        self.window.done_bytes()
    }

    /// For other threads.
    pub fn canceller(&self) -> Canceller {
        Canceller(Arc::clone(&self.cancel))
    }

    fn wait_until(
        &mut self,
        deadline: Option<Instant>,
        reached: impl Fn(&Self) -> bool,
    ) -> Result<(), Error> {
        loop {
            if self.cancel.is_set.load(Ordering::SeqCst) {
                return Err(Error::Cancelled);
            }
            self.poll()?;
            if reached(self) {
                return Ok(());
            }
            // Whatever completes from here on makes an event; what has completed since the look is found by another.
            self.arm();
            if self.poll()? > 0 {
                continue;
            }
            self.sleep(deadline)?;
        }
    }

    /// Until there is an event, or it is cancelled.
    fn sleep(&mut self, deadline: Option<Instant>) -> Result<(), Error> {
        let late = Error::Late {
            done: self.window.done(),
            posted: self.window.count(),
        };
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return Err(late);
        }
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        let mut fds = [
            PollFd::from_borrowed_fd(self.queue.channel.fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.cancel.event.as_fd(), PollFlags::IN),
        ];
        match rustix::event::poll(&mut fds, left.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(Error::os("poll")(errno)),
        }
        self.take_events();
        Ok(())
    }

    fn arm(&mut self) {
        self.queue.cq.arm(false);
        self.is_armed = true;
    }

    /// Each is of this queue, and there may be none.
    fn take_events(&mut self) {
        while self.queue.channel.get_event().is_ok() {
            self.queue.cq.ack_events(1);
            self.is_armed = false;
        }
    }

    /// Takes what has completed; how many.
    fn poll(&mut self) -> Result<usize, Error> {
        if let Some((request, bytes, status)) = self.failed {
            return Err(Error::Failed {
                request,
                bytes,
                status,
            });
        }
        let mut completions = [Wc::default(); 16];
        let mut all = 0;
        loop {
            let taken = self.queue.cq.poll(&mut completions);
            for completion in &completions[..taken] {
                let request = self.in_use.front().map_or("a request", |(name, _)| *name);
                if completion.status != WC_SUCCESS {
                    let bytes = self.window.oldest().unwrap_or(0);
                    self.failed = Some((request, bytes, status(completion.status)));
                    return self.poll();
                }
                self.window.completed();
                self.in_use.pop_front();
            }
            all += taken;
            if taken < completions.len() {
                return Ok(all);
            }
        }
    }
}

/// From RESET to RTS.
fn steps() -> [(QpState, QpAttrMask); 3] {
    use QpAttrMask as Mask;
    [
        (
            QpState::Init,
            Mask::STATE | Mask::PKEY_INDEX | Mask::PORT | Mask::ACCESS_FLAGS,
        ),
        (
            QpState::Rtr,
            Mask::STATE
                | Mask::AV
                | Mask::PATH_MTU
                | Mask::DEST_QPN
                | Mask::RQ_PSN
                | Mask::MAX_DEST_RD_ATOMIC
                | Mask::MIN_RNR_TIMER,
        ),
        (
            QpState::Rts,
            Mask::STATE
                | Mask::TIMEOUT
                | Mask::RETRY_CNT
                | Mask::RNR_RETRY
                | Mask::SQ_PSN
                | Mask::MAX_QP_RD_ATOMIC,
        ),
    ]
}
