//! How busy this host's RNIC is with what others send and receive.
//!
//! The software RNIC counts for itself and for each queue pair. RNICs of hardware are not asked: there nothing is known of others.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use verbatim_device::control::{Reply, Request};
use verbatim_seqpacket::Socket;

use crate::standby;

/// How often the RNIC is asked, at most.
const EVERY: Duration = Duration::from_millis(100);

/// How soon after the first answer, so that something is known early.
const FIRST: Duration = Duration::from_millis(5);

/// How long it may take to answer.
const ANSWER: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 200_000_000,
};

/// For so long an RNIC that did not answer is not asked.
const SILENT: Duration = Duration::from_secs(5);

/// What the RNIC counts at its sockets has headers and acknowledgements, what it counts of a queue pair has none: of own traffic, one
/// part in so many is taken for that.
const HEADERS: u64 = 32;

/// All that the RNIC sends and receives, but for one queue pair's.
#[derive(Debug)]
pub struct Others {
    nic: PathBuf,
    socket: Option<Socket>,
    own: Option<u32>,
    last: Option<(Instant, Sample)>,
    bytes_per_second: Option<u64>,
    silent_until: Option<Instant>,
}

/// Bytes so far, sent and received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sample {
    all: u64,
    own: u64,
}

impl Others {
    /// At the RNIC with this control socket.
    pub fn new(nic: PathBuf) -> Self {
        Self {
            nic,
            socket: None,
            own: None,
            last: None,
            bytes_per_second: None,
            silent_until: None,
        }
    }

    /// The traffic of this queue pair, which has just been made, is not others'.
    pub fn without(&mut self, qpn: u32) {
        self.own = Some(qpn);
    }

    /// What they have sent and received in each second of late; 0 if that is not known. It blocks as long as the RNIC takes to
    /// answer, once in a while, but not for one that hangs.
    pub fn bytes_per_second(&mut self) -> u64 {
        let now = Instant::now();
        let elapsed = self.last.map(|(at, _)| now.saturating_duration_since(at));
        let known = self.bytes_per_second.unwrap_or(0);
        let least = match self.bytes_per_second {
            None => FIRST,
            Some(_) => EVERY,
        };
        let is_silent = self.silent_until.is_some_and(|until| now < until);
        if is_silent || elapsed.is_some_and(|elapsed| elapsed < least) {
            return known;
        }
        // Without an answer it is asked anew later, on another connection, and nothing is known of others meanwhile.
        let Some(sample) = self.ask() else {
            self.socket = None;
            self.bytes_per_second = None;
            self.silent_until = Some(now + SILENT);
            return 0;
        };
        let before = self.last.replace((now, sample));
        if let (Some((_, before)), Some(elapsed)) = (before, elapsed) {
            self.bytes_per_second = Some(rate(before, sample, elapsed));
        }
        self.bytes_per_second.unwrap_or(0)
    }

    fn ask(&mut self) -> Option<Sample> {
        let socket = match self.socket.take() {
            Some(socket) => socket,
            None => standby::connect(&self.nic).ok()?,
        };
        let from_qpn = self.own.unwrap_or(u32::MAX);
        socket.send(&Request::QueryStatistics { from_qpn }, &[]).ok()?;
        let answers = rustix::event::poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&ANSWER));
        if !answers.is_ok_and(|count| count > 0) {
            return None;
        }
        let reply = socket.recv::<Reply>().ok()?.message;
        self.socket = Some(socket);
        let Reply::Statistics { device, qps, .. } = reply else {
            return None;
        };
        let own = qps.first().filter(|qp| Some(qp.qpn) == self.own);
        Some(Sample {
            all: bytes(&device),
            own: own.map_or(0, |qp| bytes(&qp.counters)),
        })
    }
}

fn bytes(counters: &[(String, u64)]) -> u64 {
    let both = counters
        .iter()
        .filter(|(name, _)| name == "sent_bytes" || name == "rcvd_bytes");
    both.map(|(_, value)| value).sum()
}

fn rate(before: Sample, now: Sample, elapsed: Duration) -> u64 {
    let own = now.own.saturating_sub(before.own);
    let all = now.all.saturating_sub(before.all);
    let others = all.saturating_sub(own + own / HEADERS);
    (others as f64 / elapsed.as_secs_f64().max(1e-3)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_traffic_with_its_headers_is_nobody_elses() {
        let before = Sample { all: 100, own: 50 };
        let sample = |all: u64, own: u64| Sample {
            all: 100 + all,
            own: 50 + own,
        };
        let second = Duration::from_secs(1);
        assert_eq!(rate(before, sample(1_020_000, 1_000_000), second), 0);
        assert_eq!(rate(before, sample(5_000_000, 0), second / 2), 10_000_000);
        // An RNIC that was restarted counts anew.
        assert_eq!(rate(sample(9, 9), before, second), 0);
    }

    #[test]
    fn an_rnic_that_hangs_holds_nobody_up_for_long() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("nic.sock");
        let _hangs = verbatim_seqpacket::Listener::bind(&path).unwrap();
        let mut others = Others::new(path);
        let begun = Instant::now();
        for _ in 0..1000 {
            assert_eq!(others.bytes_per_second(), 0);
        }
        assert!(begun.elapsed() < SILENT, "it was asked once");
    }

    #[test]
    fn without_an_rnic_nothing_is_known() {
        let mut others = Others::new("/nowhere/nic.sock".into());
        assert_eq!(others.bytes_per_second(), 0);
        others.without(7);
        assert_eq!(others.bytes_per_second(), 0);
    }
}
