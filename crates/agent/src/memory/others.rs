//! How busy this host's RNIC is with what others send and receive.
//!
//! The software RNIC counts for itself and for each queue pair. RNICs of hardware are not asked: there nothing is known of others.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use verbatim_device::control::{Reply, Request};
use verbatim_seqpacket::Socket;

use crate::standby;

/// How often the RNIC is asked, at most.
const EVERY: Duration = Duration::from_millis(100);

/// How soon after the first answer, so that something is known early.
const FIRST: Duration = Duration::from_millis(5);

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
        }
    }

    /// The traffic of this queue pair, which has just been made, is not others'.
    pub fn without(&mut self, qpn: u32) {
        self.own = Some(qpn);
    }

    /// What they have sent and received in each second of late; 0 if that is not known. It blocks as long as the RNIC takes to
    /// answer, once in a while.
    pub fn bytes_per_second(&mut self) -> u64 {
        let now = Instant::now();
        let elapsed = self.last.map(|(at, _)| now.saturating_duration_since(at));
        let known = self.bytes_per_second.unwrap_or(0);
        let least = match self.bytes_per_second {
            None => FIRST,
            Some(_) => EVERY,
        };
        if elapsed.is_some_and(|elapsed| elapsed < least) {
            return known;
        }
        // Without an answer it is asked anew next time, on another connection.
        let Some(sample) = self.ask() else {
            self.socket = None;
            return known;
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
        let reply = socket.call::<_, Reply>(&Request::QueryStatistics { from_qpn }, &[]);
        self.socket = Some(socket);
        let Reply::Statistics { device, qps, .. } = reply.ok()?.message else {
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
    fn without_an_rnic_nothing_is_known() {
        let mut others = Others::new("/nowhere/nic.sock".into());
        assert_eq!(others.bytes_per_second(), 0);
        others.without(7);
        assert_eq!(others.bytes_per_second(), 0);
    }
}
