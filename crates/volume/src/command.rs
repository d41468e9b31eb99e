//! `verbatim volume …`.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::{Args, Subcommand, ValueEnum};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustix::process::{PidfdFlags, pidfd_open};
use verbatim_mirror::decision::Keep;

use crate::callers;
use crate::control::{Order, Outcome, Row, is_nobody_there, order};
use crate::daemon::{self, Config};
use crate::device;
use crate::faults::Hook;
use crate::jail;
use crate::transport::{Carriage, Transport, Wanted};

/// Interval at which a command that waits for a move looks at its progress.
const LOOK: Duration = Duration::from_secs(5);

/// How often a command that waits for the end of the daemon looks.
const MOMENT: Duration = Duration::from_millis(10);

/// Limit for the end of a daemon that has accepted the order: longer than it waits for flushes, requests and keepers itself.
const ENDS: Duration = Duration::from_secs(90);

/// Default time for which the rest of a copy keeps its room: a day. A hundred years are as good as for ever.
const KEEP_INCOMPLETE: u64 = 24 * 60 * 60;
const LONGEST_KEPT: u64 = 100 * 365 * KEEP_INCOMPLETE;

/// The port of the daemons for each other.
const PORT: u16 = 4794;

/// The commands on volumes.
#[derive(Debug, Subcommand)]
#[allow(missing_docs, reason = "a comment at `common` would become a command's help")]
pub enum VolumeCommand {
    /// Run the daemon that serves the volumes of this host.
    #[command(
        after_help = "Example:\n  verbatim volume daemon --name host1 --config-dir /etc/verbatim\n\n`verbatim hosts` makes what is in \
                      --config-dir. Without it volumes are served, but do not move."
    )]
    Daemon(DaemonArguments),
    /// Make a volume: a file, or on a block device.
    #[command(
        after_help = "Examples:\n  verbatim volume create db --size 100G\n  verbatim volume create db --size 100G --data /dev/vg/db\n  verbatim volume create db --size 10G --data /srv/old.img --adopt"
    )]
    Create {
        /// Its name; the same on all hosts.
        name: String,
        /// Its size in bytes, or with K, M, G or T.
        #[arg(long, value_parser = size)]
        size: u64,
        /// A file or block device with the data, in place of a file of the daemon's.
        #[arg(long, value_name = "PATH")]
        data: Option<PathBuf>,
        /// Take the existing file for the volume as it is. It must have the length of --size or more; the
        /// rest is not touched.
        #[arg(long, requires = "data")]
        adopt: bool,
        /// Allocate all of it on the disk now, so that no write finds the disk full. The volume stays
        /// allocated when it moves.
        #[arg(long)]
        preallocate: bool,
        /// Also a device without a WWN, a serial number and room for a signature, or a file on a file system
        /// without extended attributes and handles: another one of that size is taken for it later.
        #[arg(long, requires = "data")]
        unnamed: bool,
        #[command(flatten)]
        common: Common,
    },
    /// Accept a volume's present data: another file than it had, or the readable data after a failed flush of
    /// its disk.
    #[command(after_help = ACCEPT_HELP)]
    Accept {
        /// The volume.
        name: String,
        #[command(flatten)]
        common: Common,
    },
    /// Choose where the data of a volume go that will move to this host: to a block device, or to a file
    /// other than the daemon's. Existing content is overwritten when the volume comes. Without a place, the
    /// data go to a file of the daemon's. `delete` removes the place.
    #[command(
        after_help = "Example:\n  verbatim volume place db --data /dev/vg/db        # on host2\n  verbatim volume migrate db --to host2             # on host1"
    )]
    Place {
        /// The volume, which is on another host.
        name: String,
        /// The file or block device; it has to be as large as the volume.
        #[arg(long, value_name = "PATH")]
        data: PathBuf,
        /// Also a device without a WWN, a serial number and room for a signature, or a file on a file system
        /// without extended attributes and handles: another one of that size is taken for it later.
        #[arg(long)]
        unnamed: bool,
        #[command(flatten)]
        common: Common,
    },
    /// Let clients connect by NBD; prints the address.
    #[command(
        after_help = "Examples:\n  verbatim volume attach db\n  qemu-system-x86_64 -m 2G -M q35 $(verbatim volume attach db --vhost-user | tail -1)\n  nbdinfo \"$(verbatim volume attach db)\"\n  mount \"$(verbatim volume attach db --device)\" /mnt"
    )]
    Attach {
        /// The volume.
        name: String,
        /// Make it a block device of this machine as well, and print the device's path. The device outlives a
        /// restart of the daemon, and goes when it is detached.
        #[arg(long)]
        device: bool,
        /// Serve it by vhost-user-blk as well, which is quicker for a virtual machine; print the socket's
        /// path, and on a second line QEMU's arguments. One virtual machine at a time. The guest's memory has
        /// to be a shared file (as on the second line); with `reconnect=1` the guest waits while there is no
        /// daemon.
        #[arg(long, conflicts_with = "device")]
        vhost_user: bool,
        #[command(flatten)]
        common: Common,
    },
    /// End the connections of clients, and take no more.
    #[command(after_help = "Example:\n  verbatim volume detach db")]
    Detach {
        /// The volume.
        name: String,
        #[command(flatten)]
        common: Common,
    },
    /// End the daemon for good. SIGTERM ends it for a restart: block devices stay, and their users wait for
    /// the next daemon. This command removes all devices and keepers. Where no daemon runs, it lets go of
    /// devices that wait for one.
    #[command(
        after_help = "Example:\n  umount /srv/db && verbatim volume stop\n\nExit status: 0 no daemon, device or keeper is left, 1 a device is in \
                      use, and nothing was done."
    )]
    Stop {
        /// Also if something uses a device: that gets I/O errors.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        common: Common,
    },
    /// List the copies of volumes on this host.
    #[command(after_help = "Example:\n  verbatim volume list --json")]
    List {
        #[command(flatten)]
        common: Common,
    },
    /// Say how a volume is, and how far its move.
    #[command(after_help = "Example:\n  verbatim volume status db")]
    Status {
        /// The volume.
        name: String,
        #[command(flatten)]
        common: Common,
    },
    /// Make a volume larger. Clients see it when they connect again, a virtual machine by vhost-user-blk at once.
    #[command(after_help = "Example:\n  verbatim volume resize db --size 200G")]
    Resize {
        /// The volume.
        name: String,
        /// Its size from now on.
        #[arg(long, value_parser = size)]
        size: u64,
        #[command(flatten)]
        common: Common,
    },
    /// Remove a copy of a volume and its data. A block device, and a file outside of the daemon's folder, stay as they are.
    #[command(after_help = DELETE_HELP)]
    Delete {
        /// The volume.
        name: String,
        /// Also a copy that serves and whose data are gone for good: missing, cut, or replaced by others. It changes nothing for other
        /// copies.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        common: Common,
    },
    /// Move a volume to another host while it is used. Clients connect there afterwards.
    #[command(
        after_help = "Example:\n  verbatim volume migrate db --to host2\n\nIt goes on if this command is ended; `verbatim volume cancel db` \
                      ends it.\nExit status: 0 it has moved, 1 it is served here as before, or the daemon was ended meanwhile: `verbatim volume status db` tells."
    )]
    Migrate {
        /// The volume.
        name: String,
        /// The destination.
        #[arg(long, value_name = "HOST")]
        to: String,
        /// How fast it is copied at most, in MiB per second. Changes that are doubled do not count.
        #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(1..1 << 20))]
        max_bandwidth: Option<u64>,
        /// How it is copied; as the daemon here was told (`daemon --copy-transport`) if not given.
        #[arg(long, value_name = "TRANSPORT")]
        copy_transport: Option<Wanted>,
        /// Save the readable data of a volume whose disk has failed a flush. The page cache here may have the
        /// only copy of some: do not restart this machine before, nor the daemon if the data are a block
        /// device.
        #[arg(long)]
        rescue: bool,
        #[command(flatten)]
        common: Common,
    },
    /// Give the move of a volume up.
    #[command(
        after_help = "Example:\n  verbatim volume cancel db\n\nExit status: 0 it stays here, 1 it is too late, or it is not being moved."
    )]
    Cancel {
        /// The volume.
        name: String,
        #[command(flatten)]
        common: Common,
    },
    /// Decide which copy of a volume stays, in the place of a destination that never says whether it has moved there.
    #[command(after_help = RESOLVE_HELP)]
    Resolve {
        /// The volume.
        name: String,
        /// Which copy stays.
        #[arg(long, value_enum)]
        keep: KeepArgument,
        /// Also where the destination does not confirm that this is right; see the consequences below.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        common: Common,
    },
    /// Serve a copy again that has moved away, because every copy that served after it is lost.
    #[command(after_help = REVIVE_HELP)]
    Revive {
        /// The volume.
        name: String,
        /// Do it: without this nothing is done, and what would be lost is said.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        common: Common,
    },
}

/// Which copy of a volume stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum KeepArgument {
    /// The one here, which waits.
    Source,
    /// The one at the destination.
    Destination,
}

const DELETE_HELP: &str = "\
Examples:
  verbatim volume detach db && verbatim volume delete db
  verbatim volume detach db && verbatim volume delete db --force   # its data are gone for good

A copy that serves is not deleted while `verbatim volume list` says that it waits for its data: a mount may be missing, or a disk may come late. If the data are
gone for good (missing, cut, or replaced by others), --force forgets the copy: its name is free, and the volume can move here again. What is at the path of
`create --data` or `place` stays as it is; a file in the daemon's own folder goes. A copy whose data are there is deleted, or not, as without --force.

This host remembers how new the copy was, so that another host that has moved the volume here, and has not heard so yet, hears the right answer. A second
`delete` ends that.

A host that had the volume before may have an older copy (`verbatim volume list` there: moved): `verbatim volume revive db --force` serves it there.

Exit status: 0 it is deleted, 1 refused.";

const ACCEPT_HELP: &str = "\
Example:
  verbatim volume accept db

If a flush of its disk has failed, `verbatim volume list` calls a volume suspect: data written since the last successful flush may be only in the page
cache of this machine. Reads go on, writes fail. Either:
  1. `verbatim volume migrate db --to HOST --rescue` sends all of it to another host. Nothing is lost that can still be read here.
  2. Or repair the disk, and run `verbatim volume accept db`: all of it is written to the disk once more, from the page cache as far as it is there, and
     flushed. If that succeeds the volume is not suspect any more. Pages that have left the page cache meanwhile come from the disk, and may be older.

If there is another file or device at the path of its data (for example a backup that was put back), the volume is not served until an operator accepts
it: `accept` notes the present file or device. Nothing is written.

If the state folder comes from a backup, the data of a volume may have seen a later sidecar than the one there: it may have moved since, so it is *unknown*, and
not served. Put the newer folder back. Or see to it that no other host has a copy that serves (`verbatim volume list` there): `accept` then takes
the one here as it is. If it is one that serves, it is younger than all others from then on.

Exit status: 0 it is the volume, 1 it is not.";

const RESOLVE_HELP: &str = "\
Example:
  verbatim volume resolve db --keep source --force

At the end of a move the source asks the destination whether it has the volume, and nobody is served here until it says so. Usually that takes care of
itself as soon as the hosts reach each other. Only if the destination will never answer (its disks are lost, or its copy was deleted), somebody must
decide, with --force:
  --keep source       the copy here serves. If the destination's does or did, what was written there is lost, or there are two.
  --keep destination  the copy here is an old one. If the destination never had it all, no copy serves: `verbatim volume revive` serves the one here again.
See to it before that the destination's daemon does not run, or `verbatim volume list` there. Without --force nothing is done that the destination has
not said. If it says later that this was wrong, so that there are two copies that serve, or none, that is an error in the log, and in `verbatim volume
list` here. Where two copies served, and the other one is deleted, and so is each that it became on further hosts, the same command for the copy that stays
(the --keep from before, with --force) ends that message for good: the host that had the other one says on that it did.

A volume that moves with its instance (held at its source, ready at its destination) waits for a session of the agents, which
`verbatim volume status --json` names (`by`). `verbatim session resolve` decides about both copies. Only if no agent knows that session any more, decide
each copy here, with the same --keep on both hosts: `--keep source` serves the held copy and gives up the ready one, `--keep destination` the other way
round. First make sure: `verbatim sessions --all` does not have the session on either host, and `verbatim ps` shows the host where the instance runs. That
host's copy must stay. Never keep both. Each host asks the other one afterwards, and says it if there are two copies that serve, or none.

Exit status: 0 decided, 1 refused.";

const REVIVE_HELP: &str = "\
Example:
  verbatim volume revive db --force

The host to which a volume has moved has lost it for good (its disks are gone), or `verbatim volume list` says that no copy serves. The copy that stayed
behind here is as it was when the volume left: what was written since is lacking. With --force it serves again, with a generation two higher, as of a volume that
`resolve --keep source` has kept. `verbatim volume attach` lets clients use it.

See to it before that no other host has a copy that serves (`verbatim volume list` there): there would be two. The host to which it had moved is asked from
then on. If it says that it has the volume, or had it, that is an error in the log, and in `verbatim volume list` here; before it answers, the volume
does not move there.

Exit status: 0 it serves, or does as soon as its data are there, 1 refused.";

/// What most of them take.
#[derive(Debug, Clone, Args)]
pub struct Common {
    /// The folder of the daemon's sockets.
    #[arg(long, default_value = "/run/verbatim")]
    pub runtime_dir: PathBuf,
    /// JSON instead of lines.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of the daemon.
#[derive(Debug, Args)]
pub struct DaemonArguments {
    /// This host's name in hosts.json and in its certificate; its host name if not given.
    #[arg(long)]
    pub name: Option<String>,
    /// The folder of the volumes, on a disk that outlives a restart of the machine.
    #[arg(long, default_value = "/var/lib/verbatim/volumes")]
    pub state_dir: PathBuf,
    /// The folder of its sockets.
    #[arg(long, default_value = "/run/verbatim")]
    pub runtime_dir: PathBuf,
    /// The folder of hosts.json and tls/.
    #[arg(long, value_name = "DIR", default_value = "/etc/verbatim")]
    pub config_dir: PathBuf,
    /// The TCP port on which the daemons of all hosts listen for each other.
    #[arg(long, default_value_t = PORT)]
    pub port: u16,
    /// Serve clients of other hosts on this TCP port: with TLS, and a certificate of the same authority.
    #[arg(long, value_name = "PORT")]
    pub nbd_port: Option<u16>,
    /// Space that arriving copies leave free on the file system of --state-dir, in bytes, or with K, M, G or
    /// T. The default is a hundredth of it, between 1M and 64M.
    #[arg(long, value_name = "BYTES", value_parser = size_or_none)]
    pub reserve: Option<u64>,
    /// How long the rest of a copy that did not come to its end keeps its room, in seconds, if its source does
    /// not say before that it has given the move up. An attempt in that time compares it.
    #[arg(long, value_name = "SECONDS", default_value_t = KEEP_INCOMPLETE)]
    pub keep_incomplete: u64,
    /// Limit of the threads that wait for the disk of one volume. They are started when needed; all volumes
    /// together have at most 32 times as many.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u8).range(2..))]
    pub threads: u8,
    /// Transport for the copies of volumes that move from here. tls: encrypted, on the daemons' own
    /// connection. rdma: chunks by one-sided RDMA, not encrypted; received data are compared with
    /// fingerprints that go over TLS. auto: rdma where the list of hosts says "trusted_network" of both
    /// hosts. Where RDMA cannot be used, it is TLS, and `verbatim volume status` says why.
    #[arg(long, value_name = "TRANSPORT", default_value = "tls")]
    pub copy_transport: Wanted,
    /// The RNIC for RDMA; by default the one that has this host's address. The software RNIC is looked for in
    /// --runtime-dir.
    #[arg(long, value_name = "DEVICE")]
    pub copy_device: Option<String>,
    /// Keep all rights of the user that starts it. Otherwise the daemon gives up what it does not need, see docs/security.md.
    #[arg(long)]
    pub no_jail: bool,
}

/// Runs the command. `hook` is for the daemon.
pub fn run(command: VolumeCommand, hook: Hook) -> anyhow::Result<ExitCode> {
    let (wanted, common) = match command {
        VolumeCommand::Daemon(arguments) => return daemon(arguments, hook),
        VolumeCommand::Create {
            name,
            size: length,
            data,
            adopt,
            preallocate,
            unnamed,
            common,
        } => {
            let data = data.map(std::path::absolute).transpose()?;
            let order = Order::Create {
                name,
                length,
                data,
                adopt,
                preallocate,
                unnamed,
            };
            (order, common)
        }
        VolumeCommand::Accept { name, common } => (Order::Accept { name }, common),
        VolumeCommand::Place {
            name,
            data,
            unnamed,
            common,
        } => {
            let data = std::path::absolute(data)?;
            (Order::Place { name, data, unnamed }, common)
        }
        VolumeCommand::Attach {
            name,
            device,
            vhost_user,
            common,
        } => {
            let order = Order::Attach {
                name,
                device,
                vhost_user,
                holder: None,
                by: None,
                socket: None,
                read_only: false,
            };
            (order, common)
        }
        VolumeCommand::Detach { name, common } => (Order::Detach { name, holder: None }, common),
        VolumeCommand::Stop { force, common } => return stop(force, &common),
        VolumeCommand::List { common } => (Order::List, common),
        VolumeCommand::Status { name, common } => return status(&name, &common),
        VolumeCommand::Resize { name, size, common } => (Order::Resize { name, length: size }, common),
        VolumeCommand::Delete { name, force, common } => (Order::Delete { name, force }, common),
        VolumeCommand::Migrate {
            name,
            to,
            max_bandwidth,
            copy_transport: transport,
            rescue,
            common,
        } => {
            let bytes_per_second = max_bandwidth.map(|mib| mib << 20);
            let order = Order::Migrate {
                name,
                to,
                bytes_per_second,
                transport,
                rescue,
            };
            (order, common)
        }
        VolumeCommand::Cancel { name, common } => (Order::Cancel { name }, common),
        VolumeCommand::Resolve {
            name,
            keep,
            force,
            common,
        } => {
            let keep = match keep {
                KeepArgument::Source => Keep::Source,
                KeepArgument::Destination => Keep::Destination,
            };
            (Order::Resolve { name, keep, force }, common)
        }
        VolumeCommand::Revive { name, force, common } => (Order::Revive { name, force }, common),
    };
    let outcome = match &wanted {
        Order::Migrate { name, .. } => with_warnings(name, &common, || give(&wanted, &common))?,
        _ => give(&wanted, &common)?,
    };
    match (&outcome, &wanted) {
        (_, _) if common.json => println!("{}", serde_json::to_string_pretty(&inner(&outcome)?)?),
        (Outcome::Volumes(rows), Order::List) => print!("{}", table(rows)),
        (Outcome::Volumes(rows), Order::Attach { device: true, .. }) => {
            for device in rows.iter().filter_map(|row| row.device.as_ref()) {
                println!("{}", device.display());
            }
        }
        (Outcome::Volumes(rows), Order::Attach { vhost_user: true, .. }) => {
            for disk in rows.iter().filter_map(|row| row.vhost_user.as_ref()) {
                println!("{}\n{}", disk.socket.display(), disk.qemu);
            }
        }
        (Outcome::Volumes(rows), Order::Attach { .. }) => {
            for uri in rows.iter().filter_map(|row| row.uri.as_ref()) {
                println!("{uri}");
            }
        }
        (Outcome::Volumes(_), _) => eprintln!("done"),
        (Outcome::Moved(moved), _) => eprintln!(
            "{}: moved to {} in {:.1} s; requests waited {:.1} ms at the end; {:.1} MiB were sent",
            moved.name,
            moved.to,
            moved.seconds,
            moved.blackout_ms,
            moved.sent_bytes as f64 / f64::from(1 << 20)
        ),
        (Outcome::Failed(why), _) => anyhow::bail!("{why}"),
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints a warning while a move makes no progress.
fn with_warnings<T>(name: &str, common: &Common, moves: impl FnOnce() -> T) -> T {
    let (ended, is_over) = std::sync::mpsc::channel::<()>();
    let (name, common) = (name.to_owned(), common.clone());
    // The thread is not joined: it ends with the command.
    std::thread::spawn(move || {
        let mut is_said = false;
        while is_over.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
            // The move itself reports a daemon that does not answer.
            let Ok(Outcome::Volumes(rows)) = give(&Order::List, &common) else {
                continue;
            };
            let row = rows.into_iter().find(|row| row.name == name);
            let stalled = row.and_then(|row| row.stalled);
            if let (false, Some(why)) = (is_said, &stalled) {
                eprintln!("{name}: {why}; `verbatim volume cancel {name}` ends it");
            }
            is_said = stalled.is_some();
        }
    });
    let moved = moves();
    drop(ended);
    moved
}

fn give(wanted: &Order, common: &Common) -> anyhow::Result<Outcome> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(order(&common.runtime_dir.join("volumes.sock"), wanted))
}

/// The content of the outcome, without the word around it: the rows, or the result of a move.
fn inner(outcome: &Outcome) -> anyhow::Result<serde_json::Value> {
    Ok(match outcome {
        Outcome::Volumes(rows) => serde_json::to_value(rows)?,
        Outcome::Moved(moved) => serde_json::to_value(moved)?,
        Outcome::Failed(why) => serde_json::to_value(why)?,
    })
}

fn stop(force: bool, common: &Common) -> anyhow::Result<ExitCode> {
    let socket = common.runtime_dir.join("volumes.sock");
    let daemon = daemon_at(&socket);
    match give(&Order::Stop { force }, common) {
        Ok(Outcome::Failed(why)) => anyhow::bail!("{why}"),
        Ok(_) => {
            // The daemon has accepted the order, and ends. Its last work is with the keepers of devices.
            match daemon {
                Some(daemon) => ends(&daemon)?,
                None => {
                    while UnixStream::connect(&socket).is_ok() {
                        std::thread::sleep(MOMENT);
                    }
                }
            }
            eprintln!("done");
        }
        Err(error) if is_nobody_there(&error) => {
            let count = daemon::end_all_waiting(&common.runtime_dir, force)?;
            eprintln!("no daemon runs; {count} devices had waited for one");
        }
        Err(error) => return Err(error),
    }
    Ok(ExitCode::SUCCESS)
}

/// Waits for the end of the daemon's process.
fn ends(daemon: &OwnedFd) -> anyhow::Result<()> {
    let limit = Timespec::try_from(ENDS)?;
    let ended = retry_on_intr(|| poll(&mut [PollFd::new(daemon, PollFlags::IN)], Some(&limit)))?;
    ensure!(
        ended > 0,
        "the daemon serves no volume any more, but its process has not ended within {} s: a disk does not answer, and devices may have users; look at the \
         daemon's log",
        ENDS.as_secs()
    );
    Ok(())
}

/// The process that listens at this socket. `None` if there is none, or none in this PID namespace.
fn daemon_at(socket: &Path) -> Option<OwnedFd> {
    let stream = UnixStream::connect(socket).ok()?;
    let daemon = rustix::net::sockopt::socket_peercred(&stream).ok()?.pid;
    pidfd_open(daemon, PidfdFlags::empty()).ok()
}

fn status(name: &str, common: &Common) -> anyhow::Result<ExitCode> {
    let rows = give(&Order::List, common)?.rows()?;
    let row = rows.iter().find(|row| row.name == name);
    let row = row.with_context(|| format!("there is no volume {name} here"))?;
    match common.json {
        true => println!("{}", serde_json::to_string_pretty(row)?),
        false => {
            print!("{}", table(std::slice::from_ref(row)));
            if let Some(migration) = &row.migration {
                println!("{migration}");
            }
            if let Some(stalled) = &row.stalled {
                println!("{stalled}");
            }
            if let Some(copy) = &row.copy {
                println!("{}", told(copy));
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn told(copy: &Carriage) -> String {
    let way = match copy.transport {
        Transport::Tls => "TLS",
        Transport::Rdma => "RDMA",
    };
    let device = copy.device.as_ref().map(|device| format!(" ({device})"));
    format!(
        "copied by {way}: {}{}; {:.1} MiB have come by RDMA",
        copy.reason,
        device.unwrap_or_default(),
        copy.rdma_bytes as f64 / f64::from(1 << 20)
    )
}

fn table(rows: &[Row]) -> String {
    let mut text = format!(
        "{:<20} {:>14} {:>4} {:<22} ATTACHED\n",
        "NAME", "BYTES", "GEN", "ROLE"
    );
    for row in rows {
        let role = match &row.other_host {
            Some(host) => format!("{} ({host})", row.role),
            None => row.role.clone(),
        };
        let role = match row.suspect {
            true => format!("{role}, suspect"),
            false => role,
        };
        let attached = row
            .uri
            .as_deref()
            .unwrap_or(if row.attached { "when served" } else { "no" });
        let data = row.data.as_ref().map(|data| format!(" (at {})", data.display()));
        let data = data.unwrap_or_default();
        let device = row.device.as_ref().map(|device| format!(" {}", device.display()));
        let device = device.unwrap_or_default();
        let vhost_user = match &row.vhost_user {
            Some(disk) if disk.connected => format!(" {} (in use)", disk.socket.display()),
            Some(disk) => format!(" {}", disk.socket.display()),
            None => String::new(),
        };
        let holder = row.holder.as_ref().map(|holder| format!(" (instance {holder})"));
        let holder = holder.unwrap_or_default();
        let waits = row.waits.as_ref().map(|why| format!("; {why}; waits for it"));
        let waits = waits.unwrap_or_default();
        text += &format!(
            "{:<20} {:>14} {:>4} {role:<22} {attached}{data}{device}{vhost_user}{holder}{waits}\n",
            row.name, row.length_bytes, row.generation
        );
        if let Some(trouble) = &row.trouble {
            text += &format!("    {}: {trouble}\n", row.name);
        }
    }
    text
}

fn daemon(arguments: DaemonArguments, hook: Hook) -> anyhow::Result<ExitCode> {
    let name = match arguments.name {
        Some(name) => name,
        None => std::fs::read_to_string("/proc/sys/kernel/hostname")
            .context("cannot read the host name")?
            .trim()
            .to_owned(),
    };
    let config = Config {
        name,
        state_dir: arguments.state_dir,
        runtime_dir: arguments.runtime_dir,
        config_dir: arguments.config_dir,
        port: arguments.port,
        nbd_port: arguments.nbd_port,
        reserve: arguments.reserve,
        keep_incomplete: Duration::from_secs(arguments.keep_incomplete.min(LONGEST_KEPT)),
        threads: arguments.threads.into(),
        copy_transport: arguments.copy_transport,
        copy_device: arguments.copy_device,
        hook,
    };
    // Before any other thread exists. Every file and socket is private to the daemon's user.
    verbatim_jail::umask::keep_private();
    device::be_io_flusher();
    callers::descriptors();
    match arguments.no_jail {
        true => tracing::warn!("the volume daemon keeps all rights of its user (--no-jail)"),
        false => jail::enter(),
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        // Orders that wait for disks, and writes of files, have one thread each.
        .max_blocking_threads(1024)
        .enable_all()
        .build()?;
    runtime.block_on(daemon::run(config))?;
    // Requests in flight were not acknowledged, or are on their way to the disk.
    runtime.shutdown_timeout(std::time::Duration::from_secs(1));
    Ok(ExitCode::SUCCESS)
}

fn size_or_none(text: &str) -> Result<u64, String> {
    match text {
        "0" => Ok(0),
        _ => size(text),
    }
}

fn size(text: &str) -> Result<u64, String> {
    let (number, shift) = match text.to_ascii_uppercase().strip_suffix(['K', 'M', 'G', 'T']) {
        Some(number) => {
            let unit = text.to_ascii_uppercase().pop().expect("it has a suffix");
            let shift = 10 * (1 + "KMGT".find(unit).expect("it is one of them"));
            (number.to_owned(), shift)
        }
        None => (text.to_owned(), 0),
    };
    let number: u64 = number.parse().map_err(|_| format!("{text:?} is no size"))?;
    let bytes = number.checked_mul(1 << shift).filter(|&bytes| bytes > 0);
    bytes.ok_or_else(|| format!("{text:?} is no size"))
}

#[cfg(test)]
mod tests {
    use super::size;

    #[test]
    fn sizes_are_read() {
        assert_eq!(size("4096"), Ok(4096));
        assert_eq!(size("3g"), Ok(3 << 30));
        for bad in ["", "G", "-1", "0", "99999999999T", "1.5G"] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }
}
