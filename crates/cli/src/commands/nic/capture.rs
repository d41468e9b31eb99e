//! `verbatim nic capture`.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, Timespec};
use verbatim_device::control::{Captured, Request};
use verbatim_seqpacket::Socket;

use super::pcap::Writer;
use crate::args::CaptureArguments;

/// How often what was captured reaches the file while little comes.
const FLUSH_INTERVAL: Duration = Duration::from_millis(200);

pub fn run(arguments: &CaptureArguments) -> anyhow::Result<ExitCode> {
    let request = Request::StartCapture {
        snap_bytes: arguments.snap,
        qpn: arguments.qp,
    };
    // The file is made first: who cannot write it need not disturb the RNIC.
    let name = arguments.file.display();
    let out: Box<dyn Write> = match arguments.file.as_os_str() == "-" {
        true => Box::new(std::io::stdout()),
        false => Box::new(File::create(&arguments.file).with_context(|| format!("cannot make {name}"))?),
    };
    let writer = Writer::new(BufWriter::new(out), arguments.snap)?;
    let (socket, _) = super::ask(&arguments.runtime_dir, &request)?;
    let until = arguments.duration.map(|duration| Instant::now() + duration);
    let most = arguments.count.unwrap_or(u64::MAX);
    let interrupt = interrupt()?;
    let (written, missed) =
        copy(&socket, &interrupt, writer, most, until).with_context(|| format!("writing {name}"))?;
    eprintln!("{written} packets captured, {missed} missed for lack of room");
    Ok(ExitCode::SUCCESS)
}

/// Becomes readable with Ctrl-C, so that the file gets its last packets whole.
fn interrupt() -> anyhow::Result<UnixStream> {
    let (readable, written) = UnixStream::pair()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    std::thread::spawn(move || {
        // Without a handler the signal ends the program, and the file is as it is.
        let _ = runtime.block_on(tokio::signal::ctrl_c());
        drop(written);
    });
    Ok(readable)
}

/// What [`wait`] came to.
#[derive(Debug, PartialEq, Eq)]
enum Waited {
    Packet,
    Nothing,
    Interrupted,
}

/// Writes packets until there are enough, time is over, Ctrl-C comes or the RNIC ends; says how many, and how many were
/// missed.
fn copy(
    socket: &Socket,
    interrupt: &UnixStream,
    mut writer: Writer<BufWriter<Box<dyn Write>>>,
    most: u64,
    until: Option<Instant>,
) -> anyhow::Result<(u64, u64)> {
    let (mut written, mut missed) = (0, 0);
    let mut unflushed = false;
    while written < most {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            break;
        }
        let pause = if unflushed { Some(FLUSH_INTERVAL) } else { None };
        match wait(socket, interrupt, [left, pause].into_iter().flatten().min())? {
            Waited::Packet => {}
            Waited::Interrupted => break,
            Waited::Nothing => {
                writer.flush()?;
                unflushed = false;
                continue;
            }
        }
        let captured = match socket.recv::<Captured>() {
            Ok(received) => received.message,
            Err(verbatim_seqpacket::Error::Closed) => break,
            Err(error) => return Err(error.into()),
        };
        missed += captured.missed;
        writer.packet(captured.time_ns, captured.length, &captured.bytes)?;
        written += 1;
        unflushed = true;
    }
    writer.flush()?;
    Ok((written, missed))
}

/// Waits for a packet or Ctrl-C, for so long or without end.
fn wait(socket: &Socket, interrupt: &UnixStream, most: Option<Duration>) -> anyhow::Result<Waited> {
    let timeout = most.map(|most| Timespec {
        tv_sec: most.as_secs() as i64,
        tv_nsec: most.subsec_nanos().into(),
    });
    let mut fds = [
        PollFd::new(interrupt, PollFlags::IN),
        PollFd::new(socket, PollFlags::IN),
    ];
    match rustix::event::poll(&mut fds, timeout.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(errno) => return Err(errno.into()),
    }
    let ready = |index: usize| !fds[index].revents().is_empty();
    Ok(match (ready(0), ready(1)) {
        (true, _) => Waited::Interrupted,
        (false, true) => Waited::Packet,
        (false, false) => Waited::Nothing,
    })
}
