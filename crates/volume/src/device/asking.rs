//! Calls that wait for this very daemon: the kernel asks the front, and whoever has called goes on when the front has answered.
//!
//! Such a caller cannot be killed once the front has read the request. A thread of the daemon that waited while the daemon is killed would
//! wait for the one after it, and the dead process would stay until then, with the lock of the volumes' folder: so none would ever come. For
//! that reason a process of its own waits, which has nothing of the daemon's: this program under another name.
//!
//! ```text
//!  daemon ── mount (stdin), socket (stdout) ──► verbatim-device make ro|rw LENGTH   makes a loop device, says its path, and keeps it
//!                                               verbatim-device grow PATH LENGTH    has it follow the file
//!  daemon ◄── "done PATH" or "failed WHY" ────────    and ends when the daemon has closed the socket
//! ```

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail, ensure};
use rustix::fs::SeekFrom;
use verbatim_keeper::OWN_PROGRAM;

use super::{fuse, sys};

/// The name under which the program is such a process.
const PROGRAM_NAME: &str = "verbatim-device";

/// Loop devices that others take while we look for a free one.
const TRIES: u32 = 64;

/// So often the kernel is asked for a length that has changed: it does not take an answer that it has asked for while a write was under way.
const ASKED: u32 = 1000;

/// Makes a loop device of the file of that mount, which has to be that long; its path, and a descriptor of it.
pub fn make(mount: BorrowedFd<'_>, is_read_only: bool, length: u64) -> anyhow::Result<(PathBuf, File)> {
    let rights = if is_read_only { "ro" } else { "rw" };
    let (path, _lives) = ask(mount, &["make", rights, &length.to_string()])?;
    let path = PathBuf::from(path);
    // The process that has made it keeps it until this is open.
    let device = OpenOptions::new().read(true).write(!is_read_only).open(&path)?;
    Ok((path, device))
}

/// Has that loop device follow the file of that mount, which is that long now.
pub fn grow(mount: BorrowedFd<'_>, path: &Path, length: u64) -> anyhow::Result<()> {
    let path = path.to_str().context("its path is no text")?;
    ask(mount, &["grow", path, &length.to_string()]).map(drop)
}

/// Runs the call in a process of its own. The result: its output, and a socket. The process keeps the loop device
/// open until the socket is closed.
fn ask(mount: BorrowedFd<'_>, what: &[&str]) -> anyhow::Result<(String, UnixStream)> {
    let (own, its) = UnixStream::pair()?;
    let mut child = Command::new(OWN_PROGRAM)
        .arg0(PROGRAM_NAME)
        .args(what)
        .current_dir("/")
        .stdin(mount.try_clone_to_owned()?)
        .stdout(OwnedFd::from(its))
        .stderr(Stdio::null())
        // A signal for the daemon, such as Ctrl-C, does not reach that process.
        .process_group(0)
        .spawn()
        .context("cannot start a process that asks for it")?;
    // Reaped when it ends, which is after this.
    std::thread::Builder::new()
        .name("device".to_owned())
        .stack_size(64 << 10)
        .spawn(move || child.wait())?;
    let mut line = String::new();
    BufReader::new(&own).read_line(&mut line)?;
    match line.trim_end().split_once(' ') {
        Some(("done", said)) => Ok((said.to_owned(), own)),
        Some(("failed", why)) => bail!("{why}"),
        _ => bail!("the process that asks for it ended"),
    }
}

/// Is such a process, and does not return, if the program was started under the name [`PROGRAM_NAME`].
pub fn run_role() {
    let mut words = std::env::args();
    if words.next().is_none_or(|name| name != PROGRAM_NAME) {
        return;
    }
    let words: Vec<_> = words.collect();
    let words: Vec<_> = words.iter().map(String::as_str).collect();
    let answered = std::io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .map_err(anyhow::Error::from);
    let done = answered.and_then(|mount| carry_out(&words, &mount));
    let (said, _device) = match done {
        Ok((said, device)) => (format!("done {said}\n"), device),
        Err(error) => (format!("failed {error:#}\n").replace('\n', " ") + "\n", None),
    };
    let own = std::io::stdout()
        .as_fd()
        .try_clone_to_owned()
        .map(UnixStream::from);
    let code = match own {
        // The daemon closes it when it needs this one no more, or has ended.
        Ok(mut own) => own
            .write_all(said.as_bytes())
            .and_then(|()| own.read(&mut [0]).map(drop)),
        Err(error) => Err(error),
    };
    std::process::exit(i32::from(code.is_err()))
}

fn carry_out(words: &[&str], mount: &OwnedFd) -> anyhow::Result<(String, Option<File>)> {
    match words {
        ["make", rights, length] => {
            let is_read_only = *rights == "ro";
            // The kernel has asked nobody yet how long it is.
            ensure!(
                fuse::length(mount.as_fd())? == length.parse::<u64>()?,
                "the file does not have the volume's length"
            );
            let file = OpenOptions::new()
                .read(true)
                .write(!is_read_only)
                .custom_flags(libc::O_DIRECT)
                .open(Path::new("/proc/self/fd").join(mount.as_raw_fd().to_string()))?;
            let (path, device) = on(&file, is_read_only).context("cannot make a loop device")?;
            Ok((path.display().to_string(), Some(device)))
        }
        ["grow", path, length] => {
            let length = length.parse::<u64>()?;
            let device = File::open(path).with_context(|| format!("cannot open {path}"))?;
            for _ in 0..ASKED {
                if rustix::fs::seek(&device, SeekFrom::End(0))? == length {
                    return Ok(((*path).to_owned(), None));
                }
                fuse::length(mount.as_fd())?;
                sys::follow_the_file(&device).context("the loop device does not follow")?;
            }
            bail!("the kernel keeps to the length that it knows")
        }
        _ => bail!("nothing of that kind is known"),
    }
}

/// A loop device on that file, and its path.
fn on(file: &File, is_read_only: bool) -> std::io::Result<(PathBuf, File)> {
    let control = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/loop-control")?;
    for _ in 0..TRIES {
        let number = sys::free_loop_device(&control)?;
        let path = PathBuf::from(format!("/dev/loop{number}"));
        // Where no devtmpfs is mounted, nobody makes nodes of new devices.
        if !path.exists() {
            sys::make_node(&path, number)?;
        }
        let open = OpenOptions::new().read(true).write(!is_read_only).open(&path)?;
        match sys::configure_loop_device(&open, file, is_read_only) {
            Ok(()) => return Ok((path, open)),
            // Somebody else was quicker.
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
            Err(error) => return Err(error),
        }
    }
    Err(std::io::ErrorKind::ResourceBusy.into())
}
