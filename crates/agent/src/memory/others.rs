//! How busy this host's RNIC is with what others send and receive.
//!
//! The software RNIC counts for itself and for each queue pair. RNICs of hardware are not asked: there nothing is known of others.
//!
//! Memory that this agent has under way for other moves is not others' traffic: of two moves that made room for each other neither would use the link.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard};
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

/// The queue pairs by which this process has memory under way at RNICs: the socket of each, its number, and by how many it was named.
static OWN: Mutex<BTreeMap<(PathBuf, u32), usize>> = Mutex::new(BTreeMap::new());

fn all_own() -> MutexGuard<'static, BTreeMap<(PathBuf, u32), usize>> {
    OWN.lock().expect("no panic under this lock")
}

/// All that the RNIC sends and receives, but for the queue pairs by which this process has memory under way.
#[derive(Debug)]
pub struct Others {
    nic: PathBuf,
    socket: Option<Socket>,
    /// That it has named itself.
    own: Option<u32>,
    last: Option<(Instant, Sample)>,
    bytes_per_second: Option<u64>,
    silent_until: Option<Instant>,
}

impl Drop for Others {
    fn drop(&mut self) {
        self.named(None);
    }
}

/// Bytes so far, sent and received.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Sample {
    all: u64,
    /// Of each own queue pair.
    own: BTreeMap<u32, u64>,
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

    /// The traffic of this queue pair, which has just been made, is not others', to nobody in this process.
    pub fn without(&mut self, qpn: u32) {
        self.named(Some(qpn));
    }

    fn named(&mut self, qpn: Option<u32>) {
        let mut all = all_own();
        if let Some(before) = std::mem::replace(&mut self.own, qpn) {
            let key = (self.nic.clone(), before);
            if let Some(count) = all.get_mut(&key) {
                *count -= 1;
                if *count == 0 {
                    all.remove(&key);
                }
            }
        }
        if let Some(qpn) = qpn {
            *all.entry((self.nic.clone(), qpn)).or_default() += 1;
        }
    }

    /// What they have sent and received in each second of late; 0 if that is not known. It blocks as long as the RNIC takes to
    /// answer, once in a while, but not for one that hangs.
    pub fn bytes_per_second(&mut self) -> u64 {
        let now = Instant::now();
        let last = self.last.as_ref();
        let elapsed = last.map(|(at, _)| now.saturating_duration_since(*at));
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
        if let (Some((_, before)), Some(elapsed)) = (&self.last, elapsed) {
            self.bytes_per_second = Some(rate(before, &sample, elapsed));
        }
        self.last = Some((now, sample));
        self.bytes_per_second.unwrap_or(0)
    }

    fn ask(&mut self) -> Option<Sample> {
        let own: Vec<u32> = all_own()
            .keys()
            .filter(|(nic, _)| *nic == self.nic)
            .map(|(_, qpn)| *qpn)
            .collect();
        let (all, _) = self.statistics(u32::MAX)?;
        // After the whole: what passes meanwhile is not taken for others'.
        let mut sample = Sample {
            all,
            own: BTreeMap::new(),
        };
        for qpn in own {
            let (_, bytes) = self.statistics(qpn)?;
            sample.own.extend(bytes.map(|bytes| (qpn, bytes)));
        }
        Some(sample)
    }

    /// What the RNIC has sent and received, and what this queue pair has, if there is one of that number.
    fn statistics(&mut self, qpn: u32) -> Option<(u64, Option<u64>)> {
        let socket = match self.socket.take() {
            Some(socket) => socket,
            None => standby::connect(&self.nic).ok()?,
        };
        let request = Request::QueryStatistics { from_qpn: qpn };
        socket.send(&request, &[]).ok()?;
        let answers = rustix::event::poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&ANSWER));
        if !answers.is_ok_and(|count| count > 0) {
            return None;
        }
        let reply = socket.recv::<Reply>().ok()?.message;
        self.socket = Some(socket);
        let Reply::Statistics { device, qps, .. } = reply else {
            return None;
        };
        let of_qp = qps.first().filter(|qp| qp.qpn == qpn);
        Some((bytes(&device), of_qp.map(|qp| bytes(&qp.counters))))
    }
}

fn bytes(counters: &[(String, u64)]) -> u64 {
    let both = counters
        .iter()
        .filter(|(name, _)| name == "sent_bytes" || name == "rcvd_bytes");
    both.map(|(_, value)| value).sum()
}

fn rate(before: &Sample, now: &Sample, elapsed: Duration) -> u64 {
    let grown = now.own.iter().map(|(qpn, bytes)| {
        // One that was not there has sent all of it since.
        bytes.saturating_sub(before.own.get(qpn).copied().unwrap_or(0))
    });
    let own: u64 = grown.sum();
    let all = now.all.saturating_sub(before.all);
    let others = all.saturating_sub(own + own / HEADERS);
    (others as f64 / elapsed.as_secs_f64().max(1e-3)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_traffic_with_its_headers_is_nobody_elses() {
        let sample = |all: u64, own: &[(u32, u64)]| Sample {
            all: 100 + all,
            own: own.iter().copied().collect(),
        };
        let before = sample(0, &[(7, 50)]);
        let second = Duration::from_secs(1);
        assert_eq!(rate(&before, &sample(1_020_000, &[(7, 1_000_050)]), second), 0);
        assert_eq!(
            rate(&before, &sample(5_000_000, &[(7, 50)]), second / 2),
            10_000_000
        );
        // Another move of this agent's has begun.
        let both = sample(2_040_000, &[(7, 1_000_050), (9, 1_000_000)]);
        assert_eq!(rate(&before, &both, second), 0);
        // An RNIC that was restarted counts anew.
        assert_eq!(rate(&both, &before, second), 0);
    }

    #[test]
    fn a_queue_pair_is_own_as_long_as_somebody_names_it() {
        let nic = PathBuf::from("/nowhere/own.sock");
        let named = |qpn| all_own().contains_key(&(PathBuf::from("/nowhere/own.sock"), qpn));
        let (mut one, mut other) = (Others::new(nic.clone()), Others::new(nic));
        one.without(7);
        other.without(7);
        drop(one);
        assert!(named(7));
        other.without(8);
        assert!(!named(7) && named(8));
        drop(other);
        assert!(!named(8));
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
