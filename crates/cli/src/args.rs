//! What can be typed.

mod check;
mod hosts;
mod nic;
mod pause;
mod sessions;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use verbatim_swap::command::{MemoryCommand, SwapCommand};
use verbatim_volume::command::VolumeCommand;
use verbatim_volume::transport::Wanted;

pub use check::CheckArguments;
pub use hosts::HostsArguments;
pub use nic::{CaptureArguments, NicArguments, NicCommand, NicRunArguments, StatArguments};
pub use pause::{PauseArguments, PauseTarget, ResumeArguments};
pub use sessions::{ForgetArguments, Keep, ResolveArguments, SessionCommand};

/// How long a lab's hosts may take to be ready on an ordinary machine.
pub const READY_TIMEOUT: Duration = Duration::from_secs(20);

const AFTER_HELP: &str = "\
Example, on one machine without RDMA hardware:
  verbatim lab up
  verbatim run --host src --name web -- my-rdma-program
  verbatim migrate web --to dst

Exit status: 0 done, 1 failed (or rolled back, or blocked), 2 wrong usage.";

/// Live migration of programs that use RDMA.
#[derive(Debug, Parser)]
#[command(name = "verbatim", version, after_help = AFTER_HELP, propagate_version = true)]
pub struct Arguments {
    /// The lab whose hosts are meant; on a real host, or inside a lab's host, there is none.
    #[arg(
        long,
        global = true,
        value_name = "NAME",
        default_value = "lab",
        env = "VERBATIM_LAB_NAME"
    )]
    pub lab: String,
    /// Say more on standard error; twice: everything.
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Several virtual hosts on this machine, each with its own software RNIC and agent.
    #[command(
        after_help = "Example:\n  verbatim lab up\n  verbatim lab exec src -- ibv_devinfo\n  verbatim lab down"
    )]
    Lab {
        #[command(subcommand)]
        command: LabCommand,
    },
    /// Start an instance: a runc container with the guest library, or a virtual machine of QEMU.
    #[command(
        after_help = "Examples:\n  verbatim run --host peer --name server -- ib_write_bw -d verbatim0 -D 15\n  verbatim run --name server \
                      --rnic mlx5_0 -- ib_write_bw -d mlx5_0 -D 15\n  verbatim run --host src --vm web -- -m 2G -drive file=/srv/web.qcow2,if=virtio\n  \
                      verbatim run --host src --vm web --swap host2:8G:backup=mirror=host3 -- -m 2G -drive file=/srv/web.qcow2,if=virtio\n  \
                      verbatim volume create db --size 10G && verbatim run --name db --volume db:/srv -- my-database --data /srv"
    )]
    Run(RunArguments),
    /// Take a virtual machine that QEMU runs already for an instance, so that it can be moved.
    #[command(
        after_help = "Example:\n  qemu-system-x86_64 -object memory-backend-file,id=ram,size=2G,mem-path=/dev/shm/web,share=on \\\n      -machine \
                      q35,memory-backend=ram -m 2G -qmp unix:/run/web.qmp,server=on,wait=off … &\n  verbatim attach web --qmp /run/web.qmp\n  verbatim \
                      migrate web --to dst\n  verbatim attach web --libvirt qemu:///system   # the domain web\n\nIts RAM must be one shared file in a tmpfs. The QMP socket serves one client: nobody else may have it \
                      while it is looked at or moved.\nExit status: 0 it is an instance, 1 it is what it was."
    )]
    Attach(AttachArguments),
    /// Forget a virtual machine that was attached; QEMU goes on as it is.
    #[command(after_help = "Example:\n  verbatim detach web")]
    Detach {
        /// The instance.
        name: String,
    },
    /// Add a command to an instance: it runs beside the first one, writes where that one writes, and moves along.
    #[command(
        after_help = "Example:\n  verbatim exec server -- ib_write_bw -d verbatim0 -p 18600 -D 15\n  verbatim logs server\n\nNobody waits \
                      for its end; a name that is not there is told in the instance's output.\nExit status: 0 it was started, 1 it was not."
    )]
    Exec(ExecArguments),
    /// List the instances.
    #[command(after_help = "Example:\n  verbatim ps --json")]
    Ps {
        /// A JSON array instead of a table.
        #[arg(long)]
        json: bool,
    },
    /// Print what an instance wrote to its standard output and error.
    #[command(after_help = "Example:\n  verbatim logs server --follow")]
    Logs {
        /// The instance.
        name: String,
        /// Go on until it ends, wherever it moves.
        #[arg(short, long)]
        follow: bool,
    },
    /// Wait until an instance ends, wherever it moves, and exit with its status.
    #[command(after_help = "Example:\n  verbatim wait server && echo fine")]
    Wait {
        /// The instance.
        name: String,
    },
    /// End an instance and forget it.
    #[command(after_help = "Example:\n  verbatim stop server")]
    Stop {
        /// The instance.
        name: String,
    },
    /// Move an instance to another host while it runs.
    #[command(
        after_help = "Examples:\n  verbatim migrate web --to dst --json\n  verbatim migrate web --to dst --max-blackout 200 \
                      --strict\n\nCtrl-C before the commit cancels: the \
                      instance goes on where it is. A second one leaves the command, not the migration.\nExit status: 0 committed, 1 rolled back or failed."
    )]
    Migrate(MigrateArguments),
    /// Roll back a migration that is under way, if it is not decided yet.
    #[command(
        after_help = "Example:\n  verbatim cancel web\n\nExit status: 0 the instance goes on where it was, 1 it is too late, or it is not \
                      being moved."
    )]
    Cancel {
        /// The instance.
        name: String,
        /// {"instance": ..., "host": ...} instead of a line.
        #[arg(long)]
        json: bool,
    },
    /// Hold reliable connections of an instance still, at both ends and without an error, while a link or a firewall is changed.
    #[command(
        after_help = "Examples:\n  verbatim pause web\n  verbatim pause web/0x11a2b --limit 1800\n  verbatim resume web\n\nA connection is \
                      named by the number of its queue pair: `verbatim nic stat` on the instance's host lists them. The program \
                      runs on; its requests wait. Pausing again sets a new limit. `verbatim ps` shows what is paused.\n\
                      Exit status: 0 all are paused, 1 none is."
    )]
    Pause(PauseArguments),
    /// Let paused connections go on.
    #[command(
        after_help = "Examples:\n  verbatim resume web\n  verbatim resume web/0x11a2b --json\n\nThe link must be there again: the ends \
                      look for each other for a minute.\nExit status: 0 they go on, or none was paused; 1 they stay paused."
    )]
    Resume(ResumeArguments),
    /// List the migrations that are under way, as each host that takes part sees them.
    #[command(after_help = "Example:\n  verbatim sessions --all --json")]
    Sessions {
        /// Also those that have ended.
        #[arg(long)]
        all: bool,
        /// A JSON array instead of a table.
        #[arg(long)]
        json: bool,
    },
    /// Look into one migration, or decide one whose hosts lost each other.
    #[command(after_help = "Example:\n  verbatim session show 3f2a")]
    Session {
        #[command(subcommand)]
        command: SessionCommand,
    },
    /// Name everything that would stop a migration, before anything is touched; or move a small program that has an RNIC open, to see
    /// whether that works here.
    #[command(
        after_help = "Examples:\n  verbatim check web --to dst\n  verbatim check --deep web --to dst\n  verbatim check --self-test mlx5_0\n  verbatim check --self-test rxe0 --out \
                      report.json\n\nExit status: 0 nothing stands in the way, or the program has moved and goes on; 1 something does, or it \
                      does not."
    )]
    Check(CheckArguments),
    /// Show the whole thing: move perftest and a check program between virtual hosts while they run.
    #[command(after_help = "Example:\n  verbatim demo --out out/demo")]
    Demo(DemoArguments),
    /// Run the software RNIC of this host, or look into the one that runs.
    #[command(
        after_help = "Examples:\n  verbatim nic --interface eth0\n  verbatim nic stat --watch\n  verbatim nic capture run.pcap --count 1000"
    )]
    Nic(NicArguments),
    /// Run the agent of this host.
    #[command(
        after_help = "Example:\n  verbatim agent --name host1 --bridge br0 --config-dir /etc/verbatim\n\n`verbatim hosts` makes what is \
                      in --config-dir."
    )]
    Agent(AgentArguments),
    /// Make the list of hosts and the certificates that agents on several machines need; again with more hosts: add them.
    #[command(
        after_help = "Example:\n  verbatim hosts cluster host1=10.0.0.1 host2=10.0.0.2\n  scp -r cluster/host1 \
                      root@10.0.0.1:/etc/verbatim\n  scp -r cluster/host2 root@10.0.0.2:/etc/verbatim\n\nAgents read the list when they \
                      start: where hosts are added, the others need it, too, and a restart of their agents (volume daemons read it by themselves)."
    )]
    Hosts(HostsArguments),
    /// Memory of this host that other hosts swap to.
    #[command(after_help = "Example:\n  verbatim memory serve --size 64G &\n  verbatim memory status")]
    Memory {
        #[command(subcommand)]
        command: MemoryCommand,
    },
    /// Swap disks that are another host's memory.
    #[command(
        after_help = "Example:\n  verbatim swap attach host2 8G\n  verbatim swap list\n  verbatim swap detach host2"
    )]
    Swap {
        #[command(subcommand)]
        command: SwapCommand,
    },
    /// Disks of this host that programs and virtual machines use by NBD, and that move to another host while they are used.
    #[command(
        after_help = "Example:\n  verbatim volume daemon --config-dir /etc/verbatim &\n  verbatim volume create db --size 100G\n  \
                      verbatim volume attach db\n  verbatim volume migrate db --to host2"
    )]
    Volume {
        #[command(subcommand)]
        command: VolumeCommand,
    },
}

fn host_binaries(text: &str) -> Result<(String, PathBuf), String> {
    let (host, folder) = text
        .split_once('=')
        .ok_or_else(|| format!("{text:?} is not HOST=DIR"))?;
    // A host's programs begin in another working directory.
    let folder = std::path::absolute(folder).map_err(|error| error.to_string())?;
    Ok((host.to_owned(), folder))
}

#[derive(Debug, Subcommand)]
pub enum LabCommand {
    /// Bring a lab up.
    #[command(after_help = "Example:\n  verbatim lab up --hosts a,b,c,d")]
    Up {
        /// The hosts' names.
        #[arg(long, value_delimiter = ',', default_value = "src,dst,peer")]
        hosts: Vec<String>,
        /// A folder with the `verbatim` and `libverbatim.so` that a host runs; those of this program if not given. A link to a
        /// folder is followed at each start of a service.
        #[arg(long, value_name = "HOST=DIR", value_parser = host_binaries)]
        binaries: Vec<(String, PathBuf)>,
        /// Each host has a volume daemon, too, which copies so (as `volume daemon --copy-transport`).
        #[arg(long, value_name = "TRANSPORT", num_args = 0..=1, require_equals = true, default_missing_value = "tls")]
        volumes: Option<Wanted>,
        /// How long all of them may take to be ready, in seconds; an emulated machine needs longer.
        #[arg(long, value_name = "SECONDS", default_value_t = READY_TIMEOUT.as_secs())]
        ready_timeout: u64,
    },
    /// Take a lab down, with everything in it.
    #[command(after_help = "Example:\n  verbatim lab down")]
    Down,
    /// How a lab, its hosts and their services are.
    #[command(after_help = "Example:\n  verbatim lab status --json")]
    Status {
        /// JSON instead of a table.
        #[arg(long)]
        json: bool,
    },
    /// Run a command in a host, with the guest library preloaded.
    #[command(
        after_help = "Example:\n  verbatim lab exec src -- ibv_devinfo\n\nExits with the command's status."
    )]
    Exec {
        /// The host.
        host: String,
        /// Do not preload the guest library.
        #[arg(long)]
        plain: bool,
        /// The command.
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
}

#[derive(Debug, Args)]
pub struct RunArguments {
    /// The host to start it on; this one if there is only one.
    #[arg(long)]
    pub host: Option<String>,
    /// Its name, unique among the hosts.
    #[arg(long, required_unless_present = "vm")]
    pub name: Option<String>,
    /// A virtual machine of this name: the command is QEMU's, or QEMU's arguments alone.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["name", "bundle", "rnic"])]
    pub vm: Option<String>,
    /// An OCI bundle, in the place of a command over the host's root file system.
    #[arg(long, value_name = "DIR")]
    pub bundle: Option<PathBuf>,
    /// Its address and prefix length, such as 10.77.1.5/16; picked by the host's agent if not given.
    #[arg(long, value_name = "ADDRESS/LENGTH")]
    pub address: Option<String>,
    /// A further IPv4 or IPv6 address that it may send from, such as a second one of its link. Frames with other addresses than
    /// these, its own and its link-local one are dropped at its host. May be given more than once. A bundle names them in its
    /// annotation org.verbatim.addresses, by commas.
    #[arg(long, value_name = "ADDRESS")]
    pub allow_address: Vec<std::net::IpAddr>,
    /// Environment variables.
    #[arg(short, long, value_name = "NAME=VALUE")]
    pub env: Vec<String>,
    /// An RNIC of this host's own that it may open, such as mlx5_0 or rxe0; `rdma link` lists them. It then sees these, and not the
    /// software RNIC, unless its environment says otherwise (VERBATIM_BACKEND). May be given more than once.
    #[arg(long, value_name = "DEVICE")]
    pub rnic: Vec<String>,
    /// A volume of its host (`verbatim volume`) that it has as a file system in this folder; a new volume is made one of ext4. A virtual machine
    /// has it as a virtio disk: NAME, or NAME:OPTIONS (ro, and properties of the disk such as bootindex=1, by commas). May be given more than
    /// once.
    #[arg(long, value_name = "NAME:/PATH[:ro]")]
    pub volume: Vec<String>,
    /// Memory of another host (`verbatim memory serve`) that a virtual machine has as a virtio disk, for its swap; the lease moves with it. Options,
    /// by commas: backup=file, backup=none or backup=mirror=HOST as of `verbatim swap attach`, name=NAME (swap if not given), and properties of the
    /// disk. May be given more than once.
    #[arg(long, value_name = "HOST:SIZE[:OPTIONS]", requires = "vm")]
    pub swap: Vec<String>,
    /// Limit of the instance's own files: /tmp, /dev/shm, its output, registered memory. They lie in memory,
    /// and move along. An instance that fills them takes no room from others. The default is its agent's
    /// (`verbatim agent --instance-files`).
    #[arg(long, value_name = "SIZE", value_parser = verbatim_swap::command::size)]
    pub tmp_size: Option<u64>,
    /// Allocate all of a virtual machine's RAM from the start, at each host. A host with less free memory
    /// refuses the machine.
    #[arg(long, requires = "vm")]
    pub prealloc: bool,
    /// Show the instance a path of its host, such as a file system mounted below the root, which it does not
    /// see otherwise. Read-only without :rw. The path must exist at each host that the instance moves to. May
    /// be given more than once.
    #[arg(long, value_name = "PATH[:rw]", conflicts_with = "bundle")]
    pub bind: Vec<String>,
    /// JSON instead of a line.
    #[arg(long)]
    pub json: bool,
    /// The command.
    #[arg(last = true, required_unless_present = "bundle")]
    pub command: Vec<String>,
}

#[derive(Debug, Args)]
pub struct AttachArguments {
    /// Its name, unique among the hosts; that of libvirt's domain.
    pub name: String,
    /// QEMU's QMP socket on that host.
    #[arg(long, value_name = "SOCKET", required_unless_present = "libvirt")]
    pub qmp: Option<PathBuf>,
    /// That host's libvirt, which has a domain of this name: qemu:///system.
    #[arg(long, value_name = "URI", conflicts_with = "qmp")]
    pub libvirt: Option<String>,
    /// The host that it runs on; this one if there is only one.
    #[arg(long)]
    pub host: Option<String>,
    /// An address and prefix length that are kept free for the guest, such as 10.77.1.5/16; picked by the host's agent if not given.
    #[arg(long, value_name = "ADDRESS/LENGTH")]
    pub address: Option<String>,
    /// JSON instead of a line.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct ExecArguments {
    /// The instance.
    pub name: String,
    /// Environment variables, beside those of the instance's own.
    #[arg(short, long, value_name = "NAME=VALUE")]
    pub env: Vec<String>,
    /// The command.
    #[arg(last = true, required = true)]
    pub command: Vec<String>,
}

#[derive(Debug, Args)]
pub struct MigrateArguments {
    /// The instance.
    pub name: String,
    /// The destination.
    #[arg(long, value_name = "HOST")]
    pub to: String,
    /// The report in JSON instead of a table.
    #[arg(long, conflicts_with = "json_lines")]
    pub json: bool,
    /// Everything that happens as a line of JSON with an "event": "phase", "note", "pre_copy", and "report" at the end.
    #[arg(long)]
    pub json_lines: bool,
    /// The longest service blackout, in milliseconds: memory is sent ahead in rounds until the prediction is within it.
    /// If the program writes too fast for that, the migration goes on all the same, and says so.
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_blackout: Option<u32>,
    /// Roll back rather than exceed --max-blackout.
    #[arg(long, requires = "max_blackout")]
    pub strict: bool,
    /// How long memory is sent ahead, in seconds; the round that runs then is the last.
    #[arg(long, value_name = "SECONDS", default_value = "300", value_parser = seconds)]
    pub max_precopy_time: Duration,
    /// How fast memory is sent ahead, in MiB per second, where links or processors are to be left to others. What is sent in the
    /// blackout goes as fast as can be.
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_bandwidth: Option<u32>,
    /// Of a virtual machine whose guest writes faster than rounds bring it: it runs at the destination before all of its RAM is there, and what is missing
    /// follows at once. Until then it needs both hosts: a source that is lost then is a lost virtual machine.
    #[arg(long)]
    pub post_copy: bool,
    /// Roll back rather than reset TCP connections that no process has accepted by the freeze (or that were closed with data unsent). New
    /// ones wait from shortly before the freeze on, and what has come gets half a second to be accepted.
    #[arg(long)]
    pub no_reset: bool,
    /// How memory goes while the program runs. tls: encrypted, on the agents' own connection. rdma: by one-sided RDMA, not encrypted;
    /// what arrives is compared with fingerprints that go over TLS. auto: rdma where the list of hosts says "trusted_network" of both
    /// hosts. Where RDMA cannot be, it is TLS, and the report says why.
    #[arg(long, value_name = "TRANSPORT", default_value = "tls", value_parser = ["tls", "rdma", "auto"])]
    pub memory_transport: String,
    /// Details of that, for measurements: operation=write|read|auto, run=BYTES, window=BYTES, class=user|background,
    /// zeroes=skip|send, pack=on|off, rate=adaptive|full, with commas between them.
    #[arg(
        long,
        value_name = "NAME=VALUE,...",
        default_value = "",
        hide_default_value = true
    )]
    pub memory_tuning: String,
    /// How connections are brought to a stop. wait-before-stop: requests are intercepted at both ends until nothing is in flight.
    /// pause-resume: the RNICs of both ends pause the connections in the middle of what is under way, nothing is waited for,
    /// and the partners' programs are not touched; where that cannot be, it is wait-before-stop after all, and the report
    /// says why. auto: how long takes what is under way is measured, and the method is taken by which connections are expected to
    /// stand still for the shorter time.
    #[arg(long, value_name = "METHOD", default_value = "wait-before-stop",
          value_parser = ["wait-before-stop", "pause-resume", "auto"])]
    pub method: String,
    /// How long to wait for what is in flight, in seconds. After that, connections are stopped in the middle of their
    /// requests, and what was not executed is posted again at the destination; only if that is not certain, the migration
    /// is rolled back. 0 waits for nothing.
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds_or_none)]
    pub drain_timeout: Duration,
}

#[derive(Debug, Args)]
pub struct DemoArguments {
    /// The folder for report.html and report.json.
    #[arg(long, default_value = "out/demo")]
    pub out: PathBuf,
    /// How long perftest runs, in seconds; the check program runs ten seconds longer.
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(5..=3600))]
    pub seconds: u32,
    /// Only these of the three runs.
    #[arg(long, value_name = "RUNS", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=3))]
    pub only: Vec<u32>,
}

#[derive(Debug, Args)]
pub struct AgentArguments {
    /// This host's name in hosts.json and in its certificate; its host name if not given.
    #[arg(long)]
    pub name: Option<String>,
    /// The folder of sockets and instances, in memory.
    #[arg(long, default_value = "/run/verbatim")]
    pub runtime_dir: PathBuf,
    /// The folder of hosts.json and tls/; that of the sockets if not given.
    #[arg(long, value_name = "DIR")]
    pub config_dir: Option<PathBuf>,
    /// The folder of the journal, on a disk that outlives a restart of the machine.
    #[arg(long, default_value = "/var/lib/verbatim", env = "VERBATIM_STATE_DIR")]
    pub state_dir: PathBuf,
    /// The RNIC by which this host's memory goes to other hosts where RDMA is asked for (`verbatim migrate --memory-transport`), `mlx5_0`
    /// for one; if not given, the one that has the host's address.
    #[arg(long, value_name = "DEVICE")]
    pub memory_device: Option<String>,
    /// Limit of an instance's own files (/tmp, /dev/shm, its output, registered memory) without `verbatim run
    /// --tmp-size`. The default is half of the machine's memory.
    #[arg(long, value_name = "SIZE", value_parser = verbatim_swap::command::size)]
    pub instance_files: Option<u64>,
    /// Factor by which this host's memory, less a sixteenth, may be promised to instances. 1: a virtual
    /// machine's memory is there when its guest touches it. 2: guests are expected to touch half of their
    /// memory; if they touch more, the kernel kills some of them.
    #[arg(long, value_name = "FACTOR", default_value = "1", value_parser = factor)]
    pub memory_overcommit: f64,
    /// The bridge to which instances are linked.
    #[arg(long, default_value = "br0")]
    pub bridge: String,
    /// The largest packet of an instance's link, in bytes.
    #[arg(long)]
    pub mtu: Option<u32>,
    /// Let instances send from any address. Without it frames with addresses of others, and packets to RNICs, are
    /// dropped at the host's end of an instance's link; nft(8) puts the filter there.
    #[arg(long)]
    pub no_address_filter: bool,
    /// The reliable connections of this host's software RNIC of which nothing is sent before the other end's host has
    /// confirmed that both ends name each other: `hosts` (those to hosts that the agent knows), networks (those to
    /// addresses in them, as in 10.0.0.0/8,fd00::/8), or `off`. Other RNICs than the software RNIC confirm nothing:
    /// leave out networks where there are such.
    #[arg(long, value_name = "hosts|NETWORKS|off", default_value = "hosts")]
    pub confirm_peers: verbatim_agent::ConfirmPeers,
    /// The guest library; the one beside this program if not given.
    #[arg(long)]
    pub library: Option<PathBuf>,
    /// CRIU's plugin, by which instances with RNICs of this host's own move; the one beside this program if not given.
    #[arg(long)]
    pub criu_plugin: Option<PathBuf>,
    /// The parent of the instances' cgroups.
    #[arg(long, default_value = "/verbatim", env = "VERBATIM_CGROUP_PARENT")]
    pub cgroup_parent: PathBuf,
}

fn factor(text: &str) -> Result<f64, String> {
    let factor: f64 = text.parse().map_err(|_| format!("{text:?} is not a number"))?;
    match (0.1..=100.0).contains(&factor) {
        true => Ok(factor),
        false => Err(format!("{factor} is not between 0.1 and 100")),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text
        .parse()
        .map_err(|_| format!("{text:?} is not a number of seconds"))?;
    if !(0.001..=86_400.0).contains(&seconds) {
        return Err(format!("{seconds} s is not between 0.001 and 86400"));
    }
    Ok(Duration::from_secs_f64(seconds))
}

fn seconds_or_none(text: &str) -> Result<Duration, String> {
    match text.parse() {
        Ok(0.0) => Ok(Duration::ZERO),
        _ => seconds(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn every_command(command: &clap::Command, path: &str, visit: &mut impl FnMut(&str, &clap::Command)) {
        let path = format!("{path} {}", command.get_name());
        visit(path.trim(), command);
        for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help") {
            every_command(sub, &path, visit);
        }
    }

    #[test]
    fn the_arguments_are_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn every_command_has_an_example() {
        let mut seen = 0;
        every_command(&Arguments::command(), "", &mut |path, command| {
            let help = command
                .get_after_help()
                .map(ToString::to_string)
                .unwrap_or_default();
            assert!(
                help.contains("Example") && help.contains("verbatim "),
                "{path} has no example"
            );
            seen += 1;
        });
        assert!(seen > 12, "only {seen} commands were looked at");
    }

    #[test]
    fn a_command_or_a_bundle_is_needed() {
        assert!(Arguments::try_parse_from(["verbatim", "run", "--name", "a"]).is_err());
        assert!(Arguments::try_parse_from(["verbatim", "run", "--name", "a", "--", "true"]).is_ok());
        assert!(Arguments::try_parse_from(["verbatim", "run", "--name", "a", "--bundle", "b"]).is_ok());
    }

    #[test]
    fn times_are_checked() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for bad in ["", "x", "0", "-1", "inf", "1e9"] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
    }
}
