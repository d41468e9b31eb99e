//! How long a daemon waits for 4 KiB of another host's memory when it sleeps meanwhile: a one-sided READ by an RNIC that is a process of its own,
//! one by an RNIC that is a thread of the daemon, and a request and its answer over TCP.
//!
//! All on loopback addresses, by turns in one run. Nobody polls: client and server sleep until there is something.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use rustix::event::EventfdFlags;
use serde::{Deserialize, Serialize};
use verbatim_e2e::Tools;
use verbatim_far::{Connection, Device, End, Exposed, Options};
use verbatim_nic::{Nic, NicConfig, Port};

use crate::context::Context;
use crate::migrrdma::write;
use crate::summary::Summary;

const BYTES: usize = 4096;
const READS: usize = 5000;
const LIMIT: Duration = Duration::from_secs(30);
const READY: &str = "is ready";

/// How the memory is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Way {
    RnicProcess,
    RnicThread,
    Tcp,
}

impl Way {
    const ALL: [Self; 3] = [Self::RnicProcess, Self::RnicThread, Self::Tcp];

    fn name(self) -> &'static str {
        match self {
            Self::RnicProcess => "READ, the RNIC is a process",
            Self::RnicThread => "READ, the RNIC is a thread",
            Self::Tcp => "TCP",
        }
    }
}

#[derive(Debug, Serialize)]
struct Report {
    context: Context,
    unit: &'static str,
    bytes: usize,
    reads: usize,
    rows: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    way: Way,
    /// Of the rounds' medians.
    median: Summary,
    /// Of the rounds' 99th percentiles.
    p99: Summary,
}

/// What a server tells its client.
#[derive(Debug, Serialize, Deserialize)]
struct Offer {
    end: End,
    exposed: Exposed,
}

/// Measures, prints and writes.
pub fn run(tools: &Tools, rounds: u32, out: &Path) -> anyhow::Result<()> {
    let context = Context::now();
    println!(
        "4 KiB of another host's memory, the client sleeps meanwhile; µs, {rounds} rounds of {READS} by turns"
    );
    let mut times: Vec<(Vec<f64>, Vec<f64>)> = vec![Default::default(); Way::ALL.len()];
    for _ in 0..rounds {
        for (way, (medians, tails)) in Way::ALL.into_iter().zip(&mut times) {
            let mut round = measure(tools, way).with_context(|| way.name().to_owned())?;
            round.sort_by(f64::total_cmp);
            medians.push(round[round.len() / 2]);
            tails.push(round[round.len() * 99 / 100]);
        }
    }
    let rows = Way::ALL
        .into_iter()
        .zip(times)
        .map(|(way, (medians, tails))| Row {
            way,
            median: Summary::of(medians),
            p99: Summary::of(tails),
        });
    let rows: Vec<_> = rows.collect();
    println!("{:<30} {:>10} {:>10} {:>10}", "", "median", "99 %", "of TCP's");
    let tcp = rows
        .iter()
        .find(|row| row.way == Way::Tcp)
        .map_or(1.0, |row| row.median.median);
    for row in &rows {
        println!(
            "{:<30} {:>10.1} {:>10.1} {:>10.2}",
            row.way.name(),
            row.median.median,
            row.p99.median,
            row.median.median / tcp
        );
    }
    let report = Report {
        context,
        unit: "µs",
        bytes: BYTES,
        reads: READS,
        rows,
    };
    write(&report, out)
}

/// One round: the time of each READ in µs.
fn measure(tools: &Tools, way: Way) -> anyhow::Result<Vec<f64>> {
    let hosts = [Host::new(tools, way)?, Host::new(tools, way)?];
    let mut server = hosts[1].part("far-server")?;
    let offer = server.line()?;
    let mut client = hosts[0].part("far-client")?;
    client.tell(&offer)?;
    if way != Way::Tcp {
        server.tell(&client.line()?)?;
        ensure!(server.line()? == READY, "the server is not ready");
        client.tell(READY)?;
    }
    let times = client.line()?;
    Ok(serde_json::from_str(&times)?)
}

/// A loopback address, with an RNIC where that is a process of its own.
struct Host {
    way: Way,
    address: Ipv4Addr,
    runtime: PathBuf,
    rnic: Option<Child>,
}

impl Host {
    fn new(tools: &Tools, way: Way) -> anyhow::Result<Self> {
        let random = std::fs::File::open("/dev/urandom").and_then(|mut random| {
            let mut bytes = [0; 4];
            random.read_exact(&mut bytes)?;
            Ok(u32::from_ne_bytes(bytes))
        });
        let address = Ipv4Addr::from(0x7F00_0000 | random? >> 8 | 2);
        let runtime = PathBuf::from(format!("/dev/shm/verbatim-far-{}-{address}", std::process::id()));
        std::fs::create_dir_all(runtime.join("mem"))?;
        let mut host = Self {
            way,
            address,
            runtime,
            rnic: None,
        };
        if way == Way::RnicProcess {
            let rnic = Command::new(&tools.verbatim)
                .args([
                    "nic",
                    "-v",
                    "--address",
                    &address.to_string(),
                    "--only-address",
                    "--runtime-dir",
                ])
                .arg(&host.runtime)
                .stderr(Stdio::piped())
                .spawn()?;
            let rnic = host.rnic.insert(rnic);
            let mut lines = BufReader::new(rnic.stderr.take().context("its errors are piped")?).lines();
            let ready = lines.any(|line| line.is_ok_and(|line| line.contains(READY)));
            ensure!(ready, "the RNIC ended before it was ready");
            // It goes on to write there.
            std::thread::spawn(move || lines.for_each(drop));
        }
        Ok(host)
    }

    /// Starts this program again as one side.
    fn part(&self, part: &str) -> anyhow::Result<Part> {
        let embedded = (self.way == Way::RnicThread).then_some("embedded");
        let argument = match self.way {
            Way::Tcp => "tcp",
            _ => embedded.unwrap_or("process"),
        };
        let mut child = Command::new(std::env::current_exe()?)
            .args([part, argument, &self.address.to_string()])
            .arg(&self.runtime)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let input = child.stdin.take().context("its input is piped")?;
        let output = BufReader::new(child.stdout.take().context("its output is piped")?);
        Ok(Part { child, input, output })
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Some(rnic) = &mut self.rnic {
            let _ = rnic.kill();
            let _ = rnic.wait();
        }
        let _ = std::fs::remove_dir_all(&self.runtime);
    }
}

/// One side, which says and is told lines.
struct Part {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Part {
    fn line(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        ensure!(self.output.read_line(&mut line)? > 0, "one side has ended early");
        Ok(line.trim().to_owned())
    }

    fn tell(&mut self, line: &str) -> anyhow::Result<()> {
        Ok(writeln!(self.input, "{line}")?)
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn told() -> anyhow::Result<String> {
    let mut line = String::new();
    ensure!(
        std::io::stdin().read_line(&mut line)? > 0,
        "nobody is there any more"
    );
    Ok(line.trim().to_owned())
}

/// An RNIC in a thread of this process.
struct Embedded {
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl Embedded {
    fn start(address: Ipv4Addr, runtime: &Path) -> anyhow::Result<Self> {
        let mut config = NicConfig::new(runtime);
        config.port = Port::Address(address.into());
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?;
        let stopped = stop.try_clone()?;
        let (ready, started) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let mut nic = match Nic::new(config) {
                Ok(nic) => nic,
                Err(error) => {
                    _ = ready.send(Err(error));
                    return;
                }
            };
            _ = ready.send(Ok(()));
            if let Err(error) = nic.run(&stopped) {
                eprintln!("the RNIC has ended: {error}");
            }
        });
        started.recv().context("the RNIC's thread has ended")??;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Embedded {
    fn drop(&mut self) {
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        _ = self.thread.take().map(JoinHandle::join);
    }
}

/// The arguments of one side.
struct Side {
    tcp: bool,
    address: Ipv4Addr,
    device: Option<Device>,
    _embedded: Option<Embedded>,
}

impl Side {
    fn of(arguments: &[String]) -> anyhow::Result<Self> {
        let [way, address, runtime] = arguments else {
            bail!("WAY ADDRESS RUNTIME are needed");
        };
        let (address, runtime) = (address.parse()?, Path::new(runtime));
        let embedded = (way == "embedded").then(|| Embedded::start(address, runtime));
        let embedded = embedded.transpose()?;
        let tcp = way == "tcp";
        let device = (!tcp).then(|| Device::open(runtime)).transpose()?;
        Ok(Self {
            tcp,
            address,
            device,
            _embedded: embedded,
        })
    }

    fn connection(&self) -> anyhow::Result<Connection> {
        let device = self.device.as_ref().context("there is no RNIC")?;
        Ok(device.connection(Options::default())?)
    }
}

/// The side whose memory is read; it ends with its input.
pub fn serve(arguments: &[String]) -> anyhow::Result<()> {
    let side = Side::of(arguments)?;
    if side.tcp {
        let listener = TcpListener::bind((side.address, 0))?;
        println!("{}", listener.local_addr()?);
        let (mut stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        let (mut request, memory) = ([0; 16], vec![7; BYTES]);
        while stream.read_exact(&mut request).is_ok() {
            stream.write_all(&memory)?;
        }
        return Ok(());
    }
    let mut connection = side.connection()?;
    let buffer = connection.buffer(BYTES)?;
    buffer.write(0, &[7; BYTES])?;
    let offer = Offer {
        end: connection.end(),
        exposed: buffer.exposed(),
    };
    println!("{}", serde_json::to_string(&offer)?);
    connection.connect(&serde_json::from_str(&told()?)?)?;
    println!("{READY}");
    // Until nobody needs it any more.
    _ = told();
    Ok(())
}

/// The side that reads, and says how long each took.
pub fn read(arguments: &[String]) -> anyhow::Result<()> {
    let side = Side::of(arguments)?;
    let offer = told()?;
    let mut memory = vec![0; BYTES];
    let times = if side.tcp {
        let mut stream = TcpStream::connect(offer.parse::<std::net::SocketAddr>()?)?;
        stream.set_nodelay(true)?;
        times(|| {
            stream.write_all(&[0; 16])?;
            Ok(stream.read_exact(&mut memory)?)
        })?
    } else {
        let offer: Offer = serde_json::from_str(&offer)?;
        let mut connection = side.connection()?;
        let buffer = connection.buffer(BYTES)?;
        println!("{}", serde_json::to_string(&connection.end())?);
        ensure!(told()? == READY, "the server is not ready");
        connection.connect(&offer.end)?;
        let times = times(|| {
            let deadline = Some(Instant::now() + LIMIT);
            let read = connection.read((&buffer, 0), (&offer.exposed, 0), BYTES as u64, deadline)?;
            Ok(connection.wait(read, deadline)?)
        })?;
        buffer.read(0, &mut memory)?;
        times
    };
    ensure!(memory == [7; BYTES], "what was read is not what is there");
    println!("{}", serde_json::to_string(&times)?);
    Ok(())
}

/// In µs, after some that do not count.
fn times(mut once: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<Vec<f64>> {
    for _ in 0..READS / 10 {
        once()?;
    }
    let mut times = Vec::with_capacity(READS);
    for _ in 0..READS {
        let begun = Instant::now();
        once()?;
        times.push(begun.elapsed().as_secs_f64() * 1e6);
    }
    Ok(times)
}
