//! The process that holds a lab together: it owns the switch, starts the hosts, answers requests, and takes everything
//! with it when it ends.
//!
//! It has one thread and waits in one poll(2) for signals, requests, its hosts' messages and their deaths.

mod hosts;
mod launch;

pub(crate) use launch::start;

use crate::cgroup;
use crate::config::LabConfig;
use crate::error::{Error, Result};
use crate::network::{self, BRIDGE};
use crate::process::ProcessId;
use crate::protocol::{self, Outcome, Request, Response, ToHost};
use crate::state::{State, StateDir};
use crate::status::LabStatus;
use crate::sys::{self, Signals};
use hosts::Host;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs::File;
use std::io::BufReader;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

/// How long a client may take to send its request, since nothing else is served meanwhile.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);
/// How long the supervisor waits at its end for the kernel to empty the cgroups.
const CLEAR_TIMEOUT: Duration = Duration::from_secs(5);

/// The role's entry: `argv` is the lab's state directory.
pub(crate) fn main(argv: &[OsString]) -> i32 {
    let [dir] = argv else { return 2 };
    let dir = StateDir::at(dir);
    let mut outcome = match detach() {
        Ok(pipe) => Some(pipe),
        Err(error) => {
            eprintln!("supervisor: {}", error.chain());
            return 1;
        }
    };
    let mut hosts = Vec::new();
    let result = run(&dir, &mut hosts, &mut outcome);
    hosts.iter().for_each(Host::kill);
    hosts.iter_mut().for_each(Host::reap);
    if let Err(error) = cgroup::remove(dir.name(), Instant::now() + CLEAR_TIMEOUT) {
        eprintln!("supervisor: {}", error.chain());
    }
    match result {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("supervisor: {}", error.chain());
            report(
                &mut outcome,
                &Outcome::Failed {
                    reason: error.chain(),
                },
            );
            1
        }
    }
}

/// Leaves the caller's session, and takes the pipe to it from stdout, which becomes the log.
fn detach() -> Result<File> {
    rustix::process::setsid().map_err(Error::io("start a session"))?;
    let pipe = rustix::io::fcntl_dupfd_cloexec(std::io::stdout(), 3).map_err(Error::io("keep stdout"))?;
    rustix::stdio::dup2_stdout(std::io::stderr()).map_err(Error::io("turn stdout to the log"))?;
    std::env::set_current_dir("/").map_err(Error::io("change to /"))?;
    Ok(File::from(pipe))
}

/// Tells whoever brings up the lab how it went, once.
fn report(outcome: &mut Option<File>, message: &Outcome) {
    if let Some(pipe) = outcome.take() {
        // Nobody may be listening any more: the lab is there all the same, and can be taken down by name.
        let _ = protocol::send(pipe, message);
    }
}

fn run(dir: &StateDir, hosts: &mut Vec<Host>, outcome: &mut Option<File>) -> Result<()> {
    let config = dir.load_config()?;
    let signals =
        Signals::take(&[libc::SIGTERM, libc::SIGINT, libc::SIGHUP]).map_err(Error::io("take signals"))?;
    let mut state = State {
        name: config.name.clone(),
        program: config.program.clone(),
        supervisor: ProcessId::of(std::process::id())?,
        hosts: Vec::new(),
    };
    dir.save(&state)?;
    let listener = UnixListener::bind(dir.control_socket()).map_err(Error::io("listen for requests"))?;

    sys::unshare_network().map_err(Error::io("make the switch's network namespace"))?;
    hosts::write_identities(dir, &config)?;
    for index in 0..config.hosts.len() {
        let host = Host::start(dir, &config, index)?;
        state.hosts.push(host.state()?);
        hosts.push(host);
    }
    dir.save(&state)?;
    make_switch(&config, hosts)?;
    for host in hosts.iter_mut() {
        host.send(&ToHost::Begin)?;
    }
    serve(&config, hosts, &listener, &signals, outcome)
}

/// The bridge, and a cable from it to each host, whose end there is called `uplink`.
fn make_switch(config: &LabConfig, hosts: &[Host]) -> Result<()> {
    network::sysctl(network::SETTINGS)?;
    network::sysctl(&[("ipv6/conf/default/disable_ipv6", "1")])?;
    let mtu = config.mtu;
    let mut batch = format!("link set lo up\nlink add switch mtu {mtu} {BRIDGE}\nlink set switch up\n");
    for (number, host) in (1..).zip(hosts) {
        let pid = host.pid();
        let _ = writeln!(
            batch,
            "link add port{number} mtu {mtu} type veth peer name uplink mtu {mtu} netns {pid}"
        );
        let _ = writeln!(batch, "link set port{number} master switch up");
    }
    network::ip(&batch)
}

/// Serves the lab until it is told to end, or until a host fails before all are ready.
fn serve(
    config: &LabConfig,
    hosts: &mut [Host],
    listener: &UnixListener,
    signals: &Signals,
    outcome: &mut Option<File>,
) -> Result<()> {
    loop {
        let mut fds = vec![
            PollFd::new(signals, PollFlags::IN),
            PollFd::new(listener, PollFlags::IN),
        ];
        let polled: Vec<usize> = (0..hosts.len())
            .filter(|&index| hosts[index].is_running())
            .collect();
        for &index in &polled {
            fds.push(PollFd::from_borrowed_fd(hosts[index].messages(), PollFlags::IN));
            fds.push(PollFd::from_borrowed_fd(hosts[index].death(), PollFlags::IN));
        }
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(Error::io("wait for events")(errno)),
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);

        if ready[0] && signals.next().is_some() {
            return Ok(());
        }
        for (&index, events) in polled.iter().zip(ready[2..].chunks_exact(2)) {
            let host = &mut hosts[index];
            if events[0] {
                host.receive()?;
            }
            if events[1] {
                host.reap();
            }
            if let Some(reason) = host.failure().filter(|_| outcome.is_some()) {
                return Err(Error::Refused(format!("host {}: {reason}", host.name())));
            }
        }
        if outcome.is_some() && hosts.iter().all(Host::is_ready) {
            report(outcome, &Outcome::Ready);
        }
        if ready[1] {
            match listener.accept() {
                Ok((client, _)) => answer(config, hosts, client),
                Err(error) => eprintln!("supervisor: cannot accept a connection: {error}"),
            }
        }
    }
}

/// Answers one client, at once or when its host has done what it asked for.
fn answer(config: &LabConfig, hosts: &mut [Host], client: UnixStream) {
    let request = client
        .set_read_timeout(Some(REQUEST_TIMEOUT))
        .and_then(|()| protocol::receive::<Request>(BufReader::new(&client)));
    let (name, order) = match request {
        Ok(Request::Status) => {
            let status = LabStatus {
                name: config.name.clone(),
                running: true,
                supervisor: std::process::id(),
                hosts: hosts.iter().map(Host::status).collect(),
            };
            return hosts::reply(&client, &Response::Status(status));
        }
        Ok(Request::Kill { host, service }) => (host, ToHost::Kill { service }),
        Ok(Request::Start { host, service }) => (host, ToHost::Start { service }),
        Err(error) => {
            return hosts::reply(
                &client,
                &Response::Failed {
                    reason: format!("bad request: {error}"),
                },
            );
        }
    };
    match hosts.iter_mut().find(|host| host.name() == name) {
        Some(host) => host.order(&order, client),
        None => hosts::reply(
            &client,
            &Response::Failed {
                reason: format!("there is no host {name}"),
            },
        ),
    }
}
