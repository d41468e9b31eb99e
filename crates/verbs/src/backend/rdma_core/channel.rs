//! Completion channels: an epoll descriptor that the program has, and in it the kernel's.
//!
//! The kernel's channel goes with its device; what the program waits on must not. So the program has the outer descriptor,
//! and [`Channel::attach`] puts another device's channel into it, while threads sleep there. Beside it in the outer one is
//! an eventfd, for events that no RNIC has made. Whether a read waits is what the program says of its own descriptor.
//!
//! Events are acknowledged to the library as soon as they are read, since the objects above count for themselves what the
//! program has not acknowledged.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicU8, AtomicU32};
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, RwLock};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::OFlags;
use rustix::io::Errno;
use verbatim_device::ring;

use super::ffi::ibv_comp_channel;
use super::live::Live;
use super::wait;
use crate::backend::EventChannel;
use crate::error::VerbsError;
use crate::held;

/// What a completion queue was asked for and no event has come of yet.
#[derive(Debug, Default)]
pub struct Armed(AtomicU8);

const SOLICITED: u8 = 1;
const ANY: u8 = 2;

impl Armed {
    /// The stronger wish stays.
    pub fn note(&self, solicited_only: bool) {
        self.0
            .fetch_max(if solicited_only { SOLICITED } else { ANY }, SeqCst);
    }

    pub fn take(&self) -> Option<ring::Armed> {
        match self.0.swap(0, SeqCst) {
            0 => None,
            SOLICITED => Some(ring::Armed::Solicited),
            _ => Some(ring::Armed::Any),
        }
    }
}

/// A channel of the kernel.
#[derive(Debug)]
pub struct Source {
    /// A child's reading would take the parent's events away. Forgotten before the descriptor goes.
    _held: held::Held,
    live: Live<ibv_comp_channel>,
    number: u32,
    /// Those that send their events here, by number, and what these say.
    cqs: Mutex<HashMap<u32, (u32, Arc<Armed>)>>,
}

impl Source {
    /// Reads of it never wait from now on.
    pub fn new(live: Live<ibv_comp_channel>, number: u32) -> Result<Self, VerbsError> {
        let fd = descriptor(&live);
        let set = rustix::fs::fcntl_getfl(fd)
            .and_then(|flags| rustix::fs::fcntl_setfl(fd, flags | OFlags::NONBLOCK));
        set.map_err(|errno| VerbsError::os("fcntl", errno))?;
        let held = held::hold_fd(fd);
        Ok(Self {
            _held: held,
            live,
            number,
            cqs: Mutex::default(),
        })
    }

    /// For the library, as long as this exists.
    pub fn pointer(&self) -> *mut ibv_comp_channel {
        pointer(&self.live)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        descriptor(&self.live)
    }

    pub fn add(&self, cq: u32, event: u32, armed: Arc<Armed>) {
        self.cqs.lock().insert(cq, (event, armed));
    }

    pub fn remove(&self, cq: u32) {
        self.cqs.lock().remove(&cq);
    }

    /// The next event, if there is one now.
    fn next(&self) -> Result<u32, Errno> {
        let library = self.live.opened().library();
        let functions = library.functions();
        let (mut cq, mut number) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the channel is alive as long as self. The queue cannot be destroyed before its event is acknowledged, which
        // is done at once.
        let number = unsafe {
            if (functions.ibv_get_cq_event)(self.pointer(), &mut cq, &mut number) != 0 {
                // The library leaves `errno` as read(2) did: EAGAIN, or EIO of an RNIC that is gone.
                return Err(Errno::from_raw_os_error(library.errno()));
            }
            (functions.ibv_ack_cq_events)(cq, 1);
            number as usize as u32
        };
        // Of a queue that is gone, nobody knows what it says: neither do the objects above.
        let cqs = self.cqs.lock();
        Ok(cqs.get(&number).map_or(0, |(event, armed)| {
            armed.take();
            *event
        }))
    }
}

fn pointer(live: &Live<ibv_comp_channel>) -> *mut ibv_comp_channel {
    let held = live.hold().expect("it is destroyed when its channel is dropped");
    held.as_ptr()
}

fn descriptor(live: &Live<ibv_comp_channel>) -> BorrowedFd<'_> {
    // SAFETY: the channel is alive, and with it its descriptor, as long as `live`.
    unsafe { BorrowedFd::borrow_raw((*pointer(live)).fd) }
}

/// Events that no RNIC made, and those taken from one that was let go.
#[derive(Debug)]
struct Injected {
    events: VecDeque<u32>,
    /// Readable while there are any.
    bell: OwnedFd,
}

impl Injected {
    fn push(&mut self, event: u32) {
        self.events.push_back(event);
        // Fails only when the counter is about to overflow, and then it is readable.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    fn pop(&mut self) -> Option<u32> {
        let event = self.events.pop_front()?;
        if self.events.is_empty() {
            let _ = rustix::io::read(&self.bell, &mut [0; 8]);
        }
        Some(event)
    }
}

/// A completion channel of the program.
#[derive(Debug)]
pub struct Channel {
    me: Weak<Self>,
    _held: [held::Held; 2],
    /// What the program waits on.
    outer: OwnedFd,
    /// None while its device is parked: then nobody reads what may be a placeholder by now.
    source: RwLock<Option<Arc<Source>>>,
    injected: Mutex<Injected>,
    /// The last that it had.
    number: AtomicU32,
}

impl Channel {
    pub fn new() -> Result<Arc<Self>, VerbsError> {
        let outer =
            epoll::create(CreateFlags::CLOEXEC).map_err(|errno| VerbsError::os("epoll_create1", errno))?;
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| VerbsError::os("eventfd", errno))?;
        watch(&outer, bell.as_fd())?;
        Ok(Arc::new_cyclic(|me| Self {
            me: me.clone(),
            _held: [held::hold_fd(outer.as_fd()), held::hold_fd(bell.as_fd())],
            outer,
            source: RwLock::new(None),
            injected: Mutex::new(Injected {
                events: VecDeque::new(),
                bell,
            }),
            number: AtomicU32::new(0),
        }))
    }

    /// For those who must not keep it.
    pub fn downgrade(&self) -> Weak<Self> {
        self.me.clone()
    }

    /// Goes on with this channel of the kernel. Who sleeps on the outer descriptor sleeps on.
    pub fn attach(&self, source: Arc<Source>) -> Result<(), VerbsError> {
        self.detach();
        let mut current = self.source.write();
        watch(&self.outer, source.fd())?;
        self.number.store(source.number, SeqCst);
        *current = Some(source);
        Ok(())
    }

    /// Lets go of the kernel's channel. What that has told and nobody has read stays here.
    pub fn detach(&self) {
        let mut current = self.source.write();
        let Some(source) = current.take() else { return };
        let mut injected = self.injected.lock();
        while let Ok(event) = source.next() {
            injected.push(event);
        }
        let _ = epoll::delete(&self.outer, source.fd());
    }

    /// The next event, if there is one now.
    fn try_next(&self) -> Result<u32, Errno> {
        if let Some(event) = self.injected.lock().pop() {
            return Ok(event);
        }
        let current = self.source.read();
        let outcome = current.as_ref().map_or(Err(Errno::AGAIN), |source| source.next());
        // What was injected for an RNIC that is gone counts before its error.
        outcome.or_else(|errno| self.injected.lock().pop().ok_or(errno))
    }

    fn is_non_blocking(&self) -> bool {
        rustix::fs::fcntl_getfl(&self.outer).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK))
    }
}

fn watch(outer: &OwnedFd, fd: BorrowedFd<'_>) -> Result<(), VerbsError> {
    epoll::add(
        outer,
        fd,
        EventData::new_u64(fd.as_raw_fd() as u64),
        EventFlags::IN,
    )
    .map_err(|errno| VerbsError::os("epoll_ctl", errno))
}

impl EventChannel for Channel {
    fn number(&self) -> u32 {
        self.number.load(SeqCst)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.outer.as_fd()
    }

    fn next(&self) -> Result<u32, VerbsError> {
        let failed = |errno| VerbsError::os("ibv_get_cq_event", errno);
        loop {
            match self.try_next() {
                Ok(event) => return Ok(event),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if !self.is_non_blocking() => {
                    wait::until_readable(self.outer.as_fd()).map_err(failed)?;
                }
                Err(errno) => return Err(failed(errno)),
            }
        }
    }

    fn inject(&self, event: u32) {
        self.injected.lock().push(event);
    }

    fn unread(&self) -> Result<Vec<u32>, VerbsError> {
        let current = self.source.read();
        let mut injected = self.injected.lock();
        while let Some(Ok(event)) = current.as_ref().map(|source| source.next()) {
            injected.push(event);
        }
        Ok(injected.events.iter().copied().collect())
    }
}
