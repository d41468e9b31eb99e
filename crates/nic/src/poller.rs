//! epoll(7), with typed tokens.

use std::hash::Hash;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::time::{
    ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, clock_gettime, timerfd_create,
    timerfd_settime,
};
use serde::Serialize;
use verbatim_roce::Time;

use crate::error::NicError;
use crate::outbox::Outbox;

/// Events taken from the kernel at a time.
const EVENTS: usize = 64;

const AT_ONCE: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 0,
};

/// Whose descriptor is ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Token {
    Stop,
    /// The UDP socket of an own address, by its index in the GID table.
    Port(u32),
    /// The UDP socket from which requests go out at an own address, by that index.
    Requests(u32),
    /// The UDP socket of a multicast group.
    Group(u32),
    MainListener,
    /// A listening socket that the agent added.
    Listener(u32),
    /// A control connection.
    Client(u32),
    /// The eventfd of a connection's context.
    Doorbell(u32),
    /// The socket of a completion channel.
    Channel(u32),
    /// The socket of a channel of rdma_cm.
    CmChannel(u32),
    /// The socket of a context's asynchronous events.
    Events(u32),
    /// The time that was waited for.
    Clock,
    /// Changes of the host's links.
    Links,
}

/// The time by which [`Wait::Until`] is meant: the monotonic clock.
pub fn now() -> Time {
    let time = clock_gettime(ClockId::Monotonic);
    Time::from_nanos(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

/// How long to wait for events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// Not at all.
    No,
    /// Until there is one, or until that time.
    Until(Option<Time>),
}

impl Token {
    fn encode(self) -> u64 {
        let (kind, id) = match self {
            Self::Stop => (0, 0),
            Self::Port(index) => (1, index),
            Self::MainListener => (2, 0),
            Self::Listener(id) => (3, id),
            Self::Client(id) => (4, id),
            Self::Doorbell(id) => (5, id),
            Self::Group(id) => (6, id),
            Self::Channel(id) => (7, id),
            Self::Events(id) => (8, id),
            Self::Clock => (9, 0),
            Self::CmChannel(id) => (10, id),
            Self::Requests(index) => (11, index),
            Self::Links => (12, 0),
        };
        kind << 32 | u64::from(id)
    }

    fn decode(data: u64) -> Self {
        let id = data as u32;
        match data >> 32 {
            0 => Self::Stop,
            1 => Self::Port(id),
            2 => Self::MainListener,
            3 => Self::Listener(id),
            4 => Self::Client(id),
            5 => Self::Doorbell(id),
            6 => Self::Group(id),
            7 => Self::Channel(id),
            8 => Self::Events(id),
            9 => Self::Clock,
            10 => Self::CmChannel(id),
            11 => Self::Requests(id),
            12 => Self::Links,
            kind => unreachable!("no token of kind {kind} was encoded"),
        }
    }
}

/// A timer that stays as it is set while it rings early enough.
///
/// Most sleeps end before their deadline, and the next one's is later. A timeout of epoll's own would be set and taken
/// back each time; both program the processor's timer, which takes microseconds in a virtual machine.
#[derive(Debug)]
struct Clock {
    fd: OwnedFd,
    /// When it rings.
    armed: Option<Time>,
}

impl Clock {
    fn new() -> Result<Self, NicError> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let fd = timerfd_create(TimerfdClockId::Monotonic, flags)
            .map_err(|errno| NicError::os("timerfd_create", errno))?;
        Ok(Self { fd, armed: None })
    }

    /// Does it ring at `deadline` or before?
    fn rings_by(&self, deadline: Time) -> bool {
        self.armed.is_some_and(|armed| armed <= deadline)
    }

    /// It rings at `deadline`.
    fn ring_at(&mut self, deadline: Time) -> Result<(), NicError> {
        let nanos = deadline.as_nanos();
        let value = Timespec {
            tv_sec: (nanos / 1_000_000_000) as i64,
            tv_nsec: (nanos % 1_000_000_000) as i64,
        };
        let once = Itimerspec {
            it_interval: Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            },
            it_value: value,
        };
        timerfd_settime(&self.fd, TimerfdTimerFlags::ABSTIME, &once)
            .map_err(|errno| NicError::os("timerfd_settime", errno))?;
        self.armed = Some(deadline);
        Ok(())
    }
}

#[derive(Debug)]
pub struct Poller {
    epoll: OwnedFd,
    events: Events,
    clock: Clock,
}

/// What the last wait gave and was not taken yet.
struct Events(Vec<epoll::Event>);

impl std::fmt::Debug for Events {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} events", self.0.len())
    }
}

impl Poller {
    pub fn new() -> Result<Self, NicError> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|errno| NicError::os("epoll_create1", errno))?;
        let poller = Self {
            epoll,
            events: Events(Vec::with_capacity(EVENTS)),
            clock: Clock::new()?,
        };
        poller.add_edge(&poller.clock.fd, Token::Clock)?;
        Ok(poller)
    }

    /// Watches for arrivals.
    pub fn add(&self, fd: &impl AsFd, token: Token) -> Result<(), NicError> {
        self.control(fd, token, epoll::EventFlags::IN, true)
    }

    /// Watches for events without reading them: each write to an eventfd is an edge of its own (epoll(7)). The RNIC
    /// never reads the eventfds of programs, since a program could have made its reads block.
    pub fn add_edge(&self, fd: &impl AsFd, token: Token) -> Result<(), NicError> {
        self.control(fd, token, epoll::EventFlags::IN | epoll::EventFlags::ET, true)
    }

    /// Also watches for room to send, or not any more.
    pub fn watch_room(&self, fd: &impl AsFd, token: Token, watch: bool) -> Result<(), NicError> {
        let room = if watch {
            epoll::EventFlags::OUT
        } else {
            epoll::EventFlags::empty()
        };
        self.control(fd, token, epoll::EventFlags::IN | room, false)
    }

    /// Watches for room on a socket of events, for as long as events wait for it.
    pub fn follow<T: Copy + Eq + Hash + Serialize>(&self, outbox: &mut Outbox<T>, token: Token) {
        match outbox.change_of_watch() {
            None => {}
            Some(true) => {
                if let Err(error) = self.control(outbox, token, epoll::EventFlags::OUT, true) {
                    tracing::warn!(%error, "a program's events wait until its next one");
                }
            }
            Some(false) => self.remove(outbox),
        }
    }

    fn control(
        &self,
        fd: &impl AsFd,
        token: Token,
        flags: epoll::EventFlags,
        add: bool,
    ) -> Result<(), NicError> {
        let data = epoll::EventData::new_u64(token.encode());
        let result = match add {
            true => epoll::add(&self.epoll, fd, data, flags),
            false => epoll::modify(&self.epoll, fd, data, flags),
        };
        result.map_err(|errno| NicError::os("epoll_ctl", errno))
    }

    /// Stops watching. Closing is not enough where another process has the descriptor too.
    pub fn remove(&self, fd: &impl AsFd) {
        // Not being there is what is wanted.
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Waits for events. It may end early, without any.
    pub fn wait(&mut self, wait: Wait) -> Result<(), NicError> {
        let Wait::Until(deadline) = wait else {
            return self.ask(Some(AT_ONCE));
        };
        if let Some(deadline) = deadline.filter(|deadline| !self.clock.rings_by(*deadline)) {
            // Under load something has come already. To look costs a tenth of what the timer does.
            self.ask(Some(AT_ONCE))?;
            if !self.events.0.is_empty() {
                return Ok(());
            }
            self.clock.ring_at(deadline)?;
        }
        self.ask(None)
    }

    fn ask(&mut self, timeout: Option<Timespec>) -> Result<(), NicError> {
        self.events.0.clear();
        match epoll::wait(
            &self.epoll,
            rustix::buffer::spare_capacity(&mut self.events.0),
            timeout.as_ref(),
        ) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(NicError::os("epoll_pwait2", errno)),
        }
    }

    /// The next event of the last wait: whose, and which.
    pub fn take(&mut self) -> Option<(Token, epoll::EventFlags)> {
        let epoll::Event { flags, data, .. } = self.events.0.pop()?;
        let token = Token::decode(data.u64());
        if token == Token::Clock {
            self.clock.armed = None;
        }
        Some((token, flags))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    fn at(millis: u64) -> Wait {
        Wait::Until(Some(Time::from_nanos(now().as_nanos() + millis * 1_000_000)))
    }

    #[test]
    fn the_timer_is_set_only_if_nothing_has_come() {
        let mut poller = Poller::new().unwrap();
        let bell = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        poller.add(&bell, Token::Doorbell(7)).unwrap();
        rustix::io::write(&bell, &1u64.to_ne_bytes()).unwrap();
        poller.wait(at(1)).unwrap();
        assert_eq!(poller.take().map(|(token, _)| token), Some(Token::Doorbell(7)));
        assert_eq!(poller.clock.armed, None);

        rustix::io::read(&bell, &mut [0u8; 8]).unwrap();
        poller.wait(at(1)).unwrap();
        assert!(poller.clock.armed.is_some());
        assert_eq!(poller.take().map(|(token, _)| token), Some(Token::Clock));
        assert_eq!(poller.clock.armed, None, "it has rung");

        // A later deadline leaves it as it is.
        let soon = now().as_nanos() + 1_000_000;
        poller.clock.ring_at(Time::from_nanos(soon)).unwrap();
        poller.wait(at(60_000)).unwrap();
        assert_eq!(poller.take().map(|(token, _)| token), Some(Token::Clock));
    }
}
