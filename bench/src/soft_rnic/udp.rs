//! A UDP ping-pong. Where its two ends poll, it is the least that a message between the two hosts takes.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use verbatim_e2e::{TestLab, eventually};

use crate::programs;

/// What the echo says once it listens.
const READY: &str = "ready";

/// The port of the echo.
const PORT: u16 = 5555;

/// The longest message.
const MOST_BYTES: usize = 65_507;

/// An answer that takes longer was lost.
const PATIENCE: Duration = Duration::from_secs(1);

/// The longest measurement.
const LIMIT: Duration = Duration::from_secs(60);

/// How the ends wait for a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waiting {
    /// They ask all the time.
    Polling,
    /// They leave the processors to others.
    Sleeping,
}

impl Waiting {
    const ALL: [Self; 2] = [Self::Polling, Self::Sleeping];

    fn name(self) -> &'static str {
        match self {
            Self::Polling => "polling",
            Self::Sleeping => "sleeping",
        }
    }

    fn of(name: &str) -> anyhow::Result<Self> {
        let found = Self::ALL.into_iter().find(|waiting| waiting.name() == name);
        found.with_context(|| format!("{name} is neither polling nor sleeping"))
    }

    fn bind(self, port: u16) -> anyhow::Result<UdpSocket> {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port))?;
        match self {
            Self::Polling => socket.set_nonblocking(true)?,
            Self::Sleeping => socket.set_read_timeout(Some(PATIENCE))?,
        }
        Ok(socket)
    }
}

/// The median of half a round trip between two hosts.
pub fn half_round_trip_us(
    lab: &TestLab,
    [from, to]: [&str; 2],
    waiting: Waiting,
    bytes: u64,
    messages: u32,
) -> anyhow::Result<f64> {
    let this = programs::this()?;
    let waiting = waiting.name();
    let echo = lab.start_plain(to, &[&this, "udp-echo", waiting])?;
    eventually("the echo", LIMIT, || {
        Ok(echo.stdout()?.contains(READY).then_some(()))
    })?;
    let (bytes, messages, address) = (bytes.to_string(), messages.to_string(), lab.address(to)?);
    let ping = lab
        .start_plain(from, &[&this, "udp-ping", waiting, &address, &bytes, &messages])?
        .succeed(LIMIT)?;
    ping.stdout.trim().parse().context("no number of the ping-pong")
}

/// Sends back whatever comes, for as long as something comes at least every ten seconds.
pub fn echo(arguments: &[String]) -> anyhow::Result<()> {
    let [waiting] = arguments else {
        bail!("wanted: polling or sleeping");
    };
    let socket = Waiting::of(waiting)?.bind(PORT)?;
    println!("{READY}");
    let mut buffer = vec![0; MOST_BYTES];
    let mut last = Instant::now();
    loop {
        match socket.recv_from(&mut buffer) {
            Ok((bytes, from)) => {
                socket.send_to(&buffer[..bytes], from)?;
                last = Instant::now();
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if last.elapsed() > Duration::from_secs(10) {
                    return Ok(());
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Prints the median of half a round trip in microseconds.
pub fn ping(arguments: &[String]) -> anyhow::Result<()> {
    let [waiting, address, bytes, count] = arguments else {
        bail!("wanted: polling or sleeping, ADDRESS BYTES COUNT");
    };
    let address: Ipv4Addr = address.parse().context("not an address")?;
    let (bytes, count): (usize, usize) = (bytes.parse()?, count.parse()?);
    let socket = Waiting::of(waiting)?.bind(0)?;
    socket.connect(SocketAddr::from((address, PORT)))?;
    let message = vec![7; bytes.clamp(1, MOST_BYTES)];
    let mut answer = vec![0; MOST_BYTES];
    let mut halves = Vec::with_capacity(count);
    while halves.len() < count {
        let start = Instant::now();
        socket.send(&message)?;
        loop {
            match socket.recv(&mut answer) {
                Ok(_) => break,
                Err(error) if error.kind() == ErrorKind::WouldBlock && start.elapsed() < PATIENCE => {}
                Err(error) => return Err(error).context("no answer"),
            }
        }
        halves.push(start.elapsed().as_secs_f64() * 1e6 / 2.0);
    }
    halves.sort_by(f64::total_cmp);
    println!("{:.3}", halves[halves.len() / 2]);
    Ok(())
}
