//! Pid 1 of a host: makes the namespaces it was born into a host, then starts the services, reaps orphans and reports.
//!
//! It has one thread. It ends when the supervisor does: that closes their socket, and PR_SET_PDEATHSIG makes sure.

mod cores;
mod filesystem;
mod services;

use crate::config::LabConfig;
use crate::error::{Error, Result};
use crate::network::{self, BRIDGE};
use crate::protocol::{self, FromHost, Lines, ToHost};
use crate::state::StateDir;
use crate::sys::Signals;
use crate::{cgroup, config};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Signal, WaitOptions};
use services::Services;
use std::ffi::OsString;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// The runtime directory of a host, as on a real one.
const RUNTIME_DIR: &str = "/run/verbatim";

/// Where a host's programs keep what must outlive them: `hosts/HOST/state` of the lab's directory.
const STATE_DIR: &str = "/run/verbatim-state";

/// The role's entry: `argv` is the lab's state directory and the host's index; stdin is the socket to the supervisor.
pub(crate) fn main(argv: &[OsString]) -> i32 {
    let [dir, index] = argv else { return 2 };
    let Some(index) = index.to_str().and_then(|index| index.parse().ok()) else {
        return 2;
    };
    let supervisor = match std::io::stdin().as_fd().try_clone_to_owned() {
        Ok(fd) => UnixStream::from(fd),
        Err(error) => {
            eprintln!("host {index}: {error}");
            return 1;
        }
    };
    match run(&StateDir::at(dir), index, &supervisor) {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("host {index}: {}", error.chain());
            let _ = protocol::send(
                &supervisor,
                &FromHost::Failed {
                    reason: error.chain(),
                },
            );
            1
        }
    }
}

fn run(dir: &StateDir, index: usize, supervisor: &UnixStream) -> Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(Error::io("tie the host to its supervisor"))?;
    // SIGTERM and SIGINT end no pid 1 that does not want to; SIGCHLD is needed to reap.
    let signals = Signals::take(&[libc::SIGCHLD]).map_err(Error::io("take signals"))?;
    let config = dir.load_config()?;
    let host = config
        .hosts
        .get(index)
        .ok_or_else(|| Error::Config(format!("there is no host number {index}")))?;
    let host_dir = dir.host(&host.name);

    rustix::system::sethostname(host.name.as_bytes()).map_err(Error::io("set the host name"))?;
    cgroup::join(&config.name, &host.name)?;
    network::sysctl(network::SETTINGS)?;
    let services = Services::new(&config, index, &host_dir)?;
    filesystem::prepare(&config, &host_dir)?;
    Init {
        config: &config,
        index,
        supervisor,
        signals,
        services,
        lines: Lines::default(),
    }
    .serve()
}

/// How many numbers an RNIC can be given for its host (`verbatim nic --host-number`).
const HOST_NUMBERS: usize = 120;

/// What the environment of everything in a host tells about it.
pub(crate) type Environment = [(&'static str, String); 8];

/// The environment of the host at `index`.
pub(crate) fn environment(config: &LabConfig, index: usize) -> Environment {
    let name = &config.hosts[index].name;
    [
        ("VERBATIM_LAB", config.name.clone()),
        ("VERBATIM_HOST", name.clone()),
        ("VERBATIM_ADDRESS", config.address(index).to_string()),
        ("VERBATIM_STATE_DIR", STATE_DIR.to_owned()),
        ("VERBATIM_CGROUP_PARENT", cgroup::parent(&config.name, name)),
        (
            "VERBATIM_NIC_CPU",
            cores::of_host(index, config.hosts.len()).to_string(),
        ),
        // Preferred, it would take the cores from the other hosts' programs, too.
        ("VERBATIM_NIC_NICE", "0".to_owned()),
        ("VERBATIM_HOST_NUMBER", (index % HOST_NUMBERS).to_string()),
    ]
}

/// Variables that name places which exist on the machine but not in a host.
pub(crate) const FOREIGN_VARIABLES: [&str; 3] =
    ["XDG_RUNTIME_DIR", "NOTIFY_SOCKET", "DBUS_SESSION_BUS_ADDRESS"];

struct Init<'a> {
    config: &'a LabConfig,
    index: usize,
    supervisor: &'a UnixStream,
    signals: Signals,
    services: Services,
    lines: Lines,
}

impl Init<'_> {
    /// Serves until the supervisor is gone.
    fn serve(&mut self) -> Result<()> {
        self.supervisor
            .set_nonblocking(true)
            .map_err(Error::io("set up the socket to the supervisor"))?;
        loop {
            for message in self.services.advance()? {
                self.tell(&message)?;
            }
            let timeout = self.services.retry_after().map(timespec);
            let mut fds = [
                PollFd::new(&self.signals, PollFlags::IN),
                PollFd::new(self.supervisor, PollFlags::IN),
                PollFd::from_borrowed_fd(self.services.socket_events(), PollFlags::IN),
            ];
            match poll(&mut fds, timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(Error::io("wait for events")(errno)),
            }
            let said = !fds[1].revents().is_empty();
            while self.signals.next().is_some() {}
            self.services.drain_socket_events();
            self.reap();
            if said && !self.listen()? {
                return Ok(());
            }
        }
    }

    fn tell(&self, message: &FromHost) -> Result<()> {
        protocol::send(self.supervisor, message).map_err(Error::io("talk to the supervisor"))
    }

    /// Takes in what the supervisor has said; `false` if it is gone.
    fn listen(&mut self) -> Result<bool> {
        let what = "understand the supervisor";
        let open = self.lines.fill(self.supervisor).map_err(Error::io(what))?;
        while let Some(message) = self.lines.next().map_err(Error::io(what))? {
            match message {
                ToHost::Begin => {
                    self.configure_network()?;
                    self.services.start_all();
                }
                ToHost::Kill { service } => self.services.kill(&service),
                ToHost::Start { service } => self.services.start(&service),
            }
        }
        Ok(open)
    }

    /// `br0` carries the host's addresses; the uplink is one of its ports, instances get others.
    fn configure_network(&self) -> Result<()> {
        let LabConfig {
            mtu,
            subnet: config::Subnet { prefix, .. },
            ..
        } = self.config;
        let address = self.config.address(self.index);
        let mac = network::bridge_mac(address);
        let (ipv6, link_local) = (network::ipv6(address), network::link_local(address));
        network::sysctl(&[("ipv6/conf/uplink/disable_ipv6", "1")])?;
        network::ip(&format!(
            "link set lo up\n\
             link add br0 address {mac} mtu {mtu} {BRIDGE}\n\
             link set dev br0 addrgenmode none\n\
             link set uplink master br0 up\n\
             address add {address}/{prefix} brd + dev br0\n\
             address add {ipv6}/64 dev br0 nodad\n\
             address add {link_local}/64 dev br0 nodad\n\
             link set br0 up\n"
        ))
    }

    /// Reaps whatever has ended: services, and orphans that fell to pid 1.
    fn reap(&mut self) {
        while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
            self.services
                .ended(pid.as_raw_nonzero().get().cast_unsigned(), status);
        }
    }
}

fn timespec(duration: Duration) -> Timespec {
    Timespec::try_from(duration).expect("a retry interval is short")
}
