//! A longer link: a process between a host and its link that holds back whatever leaves.
//!
//! ```text
//!   br0 ── near ══ this process ══ far ── wire ── uplink
//!           TAP    out: held back   TAP   bridge
//!                  in: at once
//! ```
//!
//! The kernel's own way, netem, is a module that many kernels lack; TAP devices are there wherever containers and virtual machines
//! are. The kernel hands frames to a TAP device one by one and with their checksums, so that a line carries less than the link.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tun_rs::{DeviceBuilder, Layer, SyncDevice};

/// What a line says once it carries frames.
pub const READY: &str = "ready";

const NEAR: &str = "near";
const FAR: &str = "far";

/// Frames that wait in the kernel for a line that does not run at the moment.
const KERNEL_FRAMES: u32 = 20_000;
/// Frames that a line holds: 10 ms of 10 Gbit/s in frames of 1,024 bytes are 12,000.
const MOST_HELD: usize = 100_000;
/// Frames taken from one side before the other has its turn.
const FRAMES_PER_TURN: usize = 64;
/// An Ethernet header, with a VLAN tag.
const HEADER_BYTES: usize = 18;

/// Frames on their way, oldest first, and memory for more.
struct Held {
    delay: Duration,
    frames: VecDeque<(Instant, Vec<u8>)>,
    unused: Vec<Vec<u8>>,
}

impl Held {
    fn new(delay: Duration) -> Self {
        Self {
            delay,
            frames: VecDeque::new(),
            unused: Vec::new(),
        }
    }

    /// Holds a frame that came at `now`; false: the line is full, and the frame is lost.
    fn push(&mut self, now: Instant, frame: &[u8]) -> bool {
        if self.frames.len() >= MOST_HELD {
            return false;
        }
        let mut memory = self.unused.pop().unwrap_or_default();
        memory.clear();
        memory.extend_from_slice(frame);
        self.frames.push_back((now + self.delay, memory));
        true
    }

    /// Gives each frame away whose time has come.
    fn release(&mut self, now: Instant, mut send: impl FnMut(&[u8])) {
        while self.frames.front().is_some_and(|(due, _)| *due <= now) {
            let (_, frame) = self.frames.pop_front().expect("there is one");
            send(&frame);
            self.unused.push(frame);
        }
    }

    /// How long until then.
    fn wait(&self, now: Instant) -> Option<Duration> {
        let (due, _) = self.frames.front()?;
        Some(due.saturating_duration_since(now))
    }
}

/// What puts a line that is ready between a bridge and its uplink. The second bridge is a piece of wire: without addresses, and
/// deaf to ARP, in which the kernel would answer for any address of the host.
pub fn commands(bridge: &str) -> [String; 6] {
    [
        "ip link add wire type bridge stp_state 0 forward_delay 0 mcast_snooping 0".to_owned(),
        "ip link set dev wire addrgenmode none".to_owned(),
        "ip link set dev wire arp off up".to_owned(),
        "ip link set dev uplink master wire".to_owned(),
        format!("ip link set dev {FAR} master wire up"),
        format!("ip link set dev {NEAR} master {bridge} up"),
    ]
}

/// Carries frames until it is killed. Arguments: the MTU, and microseconds.
pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    let [mtu, delay] = arguments else {
        bail!("wanted: MTU MICROSECONDS");
    };
    let mtu: u16 = mtu.parse().context("not an MTU")?;
    let delay = Duration::from_micros(delay.parse().context("not a number of microseconds")?);
    let (near, far) = (tap(NEAR, mtu)?, tap(FAR, mtu)?);
    // As quick as a wire, beside programs that poll: where this is not allowed, frames are later.
    let _ = rustix::process::setpriority_process(None, -20);
    // The default would make each frame up to 50 us late.
    rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1))?;
    println!("{READY}");
    let mut held = Held::new(delay);
    let mut buffer = vec![0; HEADER_BYTES + usize::from(mtu)];
    let mut lost = 0_u64;
    loop {
        wait(&[&near, &far], held.wait(Instant::now()))?;
        let now = Instant::now();
        take(&near, &mut buffer, |frame| {
            if !held.push(now, frame) {
                lost += 1;
                if lost.is_power_of_two() {
                    eprintln!("lost {lost} frames: more than {MOST_HELD} at once");
                }
            }
        })?;
        take(&far, &mut buffer, |frame| give(&near, frame))?;
        held.release(Instant::now(), |frame| give(&far, frame));
    }
}

fn tap(name: &str, mtu: u16) -> anyhow::Result<SyncDevice> {
    let device = DeviceBuilder::new()
        .name(name)
        .layer(Layer::L2)
        .mtu(mtu)
        .tx_queue_len(KERNEL_FRAMES)
        // A port of a bridge has no use for an address; it is brought up with its bridge.
        .enable(false)
        .build_sync()
        .with_context(|| format!("cannot make the TAP device {name}"))?;
    device.set_nonblocking(true)?;
    Ok(device)
}

/// Until one of the devices has a frame, or the time is over.
fn wait(devices: &[&SyncDevice; 2], time: Option<Duration>) -> anyhow::Result<()> {
    let mut fds = devices.map(|device| PollFd::new(device, PollFlags::IN));
    let time = time.map(Timespec::try_from).transpose()?;
    match poll(&mut fds, time.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Takes the frames that a device has, up to a turn's share.
fn take(device: &SyncDevice, buffer: &mut [u8], mut frame: impl FnMut(&[u8])) -> anyhow::Result<()> {
    for _ in 0..FRAMES_PER_TURN {
        match device.recv(buffer) {
            Ok(bytes) => frame(&buffer[..bytes]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error).context("cannot read frames"),
        }
    }
    Ok(())
}

/// What a device does not take is lost, as on any link.
fn give(device: &SyncDevice, frame: &[u8]) {
    let _ = device.send(frame);
}

#[cfg(test)]
mod tests {
    use super::*;

    const DELAY: Duration = Duration::from_millis(5);

    fn released(held: &mut Held, now: Instant) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        held.release(now, |frame| frames.push(frame.to_vec()));
        frames
    }

    #[test]
    fn frames_leave_after_the_delay_and_in_their_order() {
        let (start, mut held) = (Instant::now(), Held::new(DELAY));
        assert_eq!(held.wait(start), None);
        assert!(held.push(start, b"first"));
        assert!(held.push(start + DELAY / 5, b"second"));
        assert_eq!(held.wait(start + DELAY / 5), Some(4 * DELAY / 5));
        assert!(released(&mut held, start + 4 * DELAY / 5).is_empty());
        assert_eq!(released(&mut held, start + DELAY), [b"first"]);
        assert!(held.push(start + DELAY, b"third, in the first one's memory"));
        assert_eq!(
            released(&mut held, start + 2 * DELAY),
            [&b"second"[..], b"third, in the first one's memory"]
        );
        assert_eq!(held.wait(start), None);
    }

    #[test]
    fn a_full_line_loses_the_newest() {
        let (start, mut held) = (Instant::now(), Held::new(DELAY));
        for _ in 0..MOST_HELD {
            assert!(held.push(start, b"frame"));
        }
        assert!(!held.push(start, b"one too many"));
        assert_eq!(released(&mut held, start + DELAY).len(), MOST_HELD);
        assert!(held.push(start, b"room again"));
    }
}
