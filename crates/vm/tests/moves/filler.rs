//! Both sides of a post-copy for tests: pages from one RAM to another, over TCP.

use std::ops::Range;
use std::path::PathBuf;
use std::process::{Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, ensure};
use rustix::process::{Signal, getpid, kill_process};
use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader, BufWriter};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use verbatim_vm::{Behind, PostCopy, Ram, Run};

/// Environment variable with the work of a filler process: the guest's process, its RAM, the record, the
/// port, and the number of the fault at which the filler dies.
pub const FILLER: &str = "FILLED";

/// Number of ranges in flight that no thread waits for.
const UNDER_WAY: usize = 4;

/// Kind of a part of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
enum Part {
    Data = 0,
    Zero = 1,
    End = 2,
}

/// Answers for a RAM, until it is dropped.
pub struct Server {
    pub port: u16,
    task: JoinHandle<()>,
}

impl Server {
    pub async fn of(behind: Behind) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let port = listener.local_addr()?.port();
        let task = tokio::spawn(async move {
            let mut clients = tokio::task::JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                let behind = behind.clone();
                // The loss of a client is part of the tests.
                clients.spawn(async move { drop(answer(&behind, client).await) });
            }
        });
        Ok(Self { port, task })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn answer(behind: &Behind, client: TcpStream) -> anyhow::Result<()> {
    client.set_nodelay(true)?;
    let (mut asked, answers) = client.into_split();
    let mut answers = BufWriter::with_capacity(1 << 20, answers);
    loop {
        let (start, end) = (asked.read_u64().await?, asked.read_u64().await?);
        send(&behind.runs(start..end)?, behind.ram(), &mut answers).await?;
        for number in [Part::End as u64, start, end] {
            answers.write_u64(number).await?;
        }
        answers.flush().await?;
    }
}

async fn send(runs: &[Run], ram: &Ram, to: &mut BufWriter<impl AsyncWrite + Unpin>) -> anyhow::Result<()> {
    let mut bytes = Vec::new();
    for run in runs {
        let (range, part) = match run {
            Run::Data(range) => (range, Part::Data),
            Run::Zero(range) => (range, Part::Zero),
        };
        for number in [part as u64, range.start, range.end] {
            to.write_u64(number).await?;
        }
        if part == Part::Data {
            bytes.resize((range.end - range.start) as usize, 0);
            ram.read(range.clone(), &mut bytes)?;
            to.write_all(&bytes).await?;
        }
    }
    Ok(())
}

/// Ranges to bring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// Only faults, forever.
    Faults,
    /// All missing ranges, until the RAM is complete.
    All,
}

/// Faults seen by a filler.
#[derive(Debug, Default)]
pub struct Faults {
    count: AtomicU64,
    /// The process dies at the fault of this number.
    last: Option<u64>,
}

impl Faults {
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    fn told(&self) -> anyhow::Result<()> {
        let before = self.count.fetch_add(1, Ordering::Relaxed);
        if self.last == Some(before + 1) {
            kill_process(getpid(), Signal::KILL)?;
        }
        Ok(())
    }
}

/// Brings missing ranges; counts faults. It may be dropped at any time.
pub async fn fill(post_copy: &PostCopy, port: u16, wanted: Wanted, faults: &Faults) -> anyhow::Result<()> {
    // Requests of an earlier filler are not in flight any more.
    post_copy.ask_again()?;
    let connection = TcpStream::connect(("127.0.0.1", port)).await?;
    connection.set_nodelay(true)?;
    let (answers, asks) = connection.into_split();
    let (came, comes) = mpsc::unbounded_channel();
    tokio::select! {
        taken = take(post_copy, answers, came) => taken.context("the source has ended"),
        asked = ask(post_copy, asks, wanted, comes, faults) => asked,
    }
}

async fn ask(
    post_copy: &PostCopy,
    mut asks: OwnedWriteHalf,
    wanted: Wanted,
    mut comes: mpsc::UnboundedReceiver<Range<u64>>,
    faults: &Faults,
) -> anyhow::Result<()> {
    let mut ahead: Vec<Range<u64>> = Vec::new();
    while wanted == Wanted::Faults || post_copy.left() > 0 {
        while wanted == Wanted::All && ahead.len() < UNDER_WAY {
            let Some(range) = post_copy.next() else { break };
            asks.write_all(&request(&range)).await?;
            ahead.push(range);
        }
        tokio::select! {
            biased;
            range = post_copy.fault() => {
                let range = range?;
                faults.told()?;
                asks.write_all(&request(&range)).await?;
            }
            Some(range) = comes.recv() => ahead.retain(|other| *other != range),
        }
    }
    Ok(())
}

fn request(range: &Range<u64>) -> [u8; 16] {
    let both = u128::from(range.start) << 64 | u128::from(range.end);
    both.to_be_bytes()
}

/// Takes answers, and reports each complete one.
async fn take(
    post_copy: &PostCopy,
    answers: OwnedReadHalf,
    came: mpsc::UnboundedSender<Range<u64>>,
) -> anyhow::Result<()> {
    let mut answers = BufReader::with_capacity(1 << 20, answers);
    let mut bytes = Vec::new();
    loop {
        match part(&mut answers, &mut bytes).await? {
            (Part::Data, range) => post_copy.fill(range.start, &bytes)?,
            (Part::Zero, range) => post_copy.fill_zeros(range)?,
            // The receiver may be gone.
            (Part::End, range) => drop(came.send(range)),
        }
    }
}

/// Brings runs from one RAM to another over TCP, as in a move while the guest runs at its source.
pub async fn bring(runs: &[Run], from: &Ram, to: &Ram) -> anyhow::Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let (sends, takes) = tokio::try_join!(TcpStream::connect(listener.local_addr()?), async {
        Ok(listener.accept().await?.0)
    })?;
    let (takes, _) = takes.into_split();
    let mut takes = BufReader::with_capacity(1 << 20, takes);
    let mut sends = BufWriter::with_capacity(1 << 20, sends);
    let send = async {
        send(runs, from, &mut sends).await?;
        Ok::<_, anyhow::Error>(sends.shutdown().await?)
    };
    let take = async {
        let mut bytes = Vec::new();
        for _ in runs {
            match part(&mut takes, &mut bytes).await? {
                (Part::Data, range) => to.write(range.start, &bytes)?,
                (_, range) => to.clear(range)?,
            }
        }
        Ok(())
    };
    tokio::try_join!(send, take)?;
    Ok(())
}

/// The next part of an answer, with its bytes.
async fn part(
    answers: &mut BufReader<OwnedReadHalf>,
    bytes: &mut Vec<u8>,
) -> anyhow::Result<(Part, Range<u64>)> {
    let part = match answers.read_u64().await? {
        0 => Part::Data,
        1 => Part::Zero,
        _ => Part::End,
    };
    let range = answers.read_u64().await?..answers.read_u64().await?;
    if part == Part::Data {
        bytes.resize((range.end - range.start) as usize, 0);
        answers.read_exact(bytes).await?;
    }
    Ok((part, range))
}

/// Runs a filler in a process of its own, which dies by SIGKILL after the fault of the given number, before
/// it sends a request for it.
pub async fn dies_at(
    pid: u32,
    ram: &Ram,
    record: PathBuf,
    port: u16,
    fault: u64,
) -> anyhow::Result<ExitStatus> {
    let what = format!(
        "{pid} {} {} {port} {fault}",
        ram.path().display(),
        record.display()
    );
    let mut command = Command::new(std::env::current_exe()?);
    command.env(FILLER, what);
    let status = tokio::task::spawn_blocking(move || command.status()).await??;
    Ok(status)
}

/// Runs the filler in that process.
pub async fn run(what: &str) -> anyhow::Result<()> {
    let words: Vec<&str> = what.split(' ').collect();
    let [pid, ram, record, port, fault] = words[..] else {
        anyhow::bail!("`{what}`");
    };
    let ram = Arc::new(Ram::open(ram.as_ref())?);
    let post_copy = PostCopy::take_over(pid.parse()?, &ram, record.as_ref())?;
    let post_copy = post_copy.context("nothing is missing")?;
    ensure!(post_copy.is_complete(), "what is missing was written down");
    let faults = Faults {
        last: Some(fault.parse()?),
        ..Faults::default()
    };
    fill(&post_copy, port.parse()?, Wanted::Faults, &faults).await
}
