//! Starting a supervisor, from the side of whoever brings up the lab.

use crate::SUPERVISOR;
use crate::config::LabConfig;
use crate::error::{Error, Result};
use crate::process::{ProcessId, poll_readable};
use crate::protocol::{self, Outcome, Request, Response};
use crate::state::StateDir;
use crate::status::ServiceState;
use rustix::process::Signal;
use std::fs::File;
use std::io::BufReader;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

/// How long a supervisor that has been told to end may take.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// Starts the supervisor of a lab and waits until every host is ready. On an error the supervisor has ended.
pub(crate) fn start(dir: &StateDir, config: &LabConfig) -> Result<()> {
    dir.save_config(config)?;
    let log = File::create(dir.supervisor_log()).map_err(Error::io("make the supervisor's log"))?;
    let mut supervisor = Command::new(&config.program)
        .arg0(SUPERVISOR)
        .arg(dir.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .map_err(Error::io(format!(
            "start the lab's supervisor {}",
            config.program.display()
        )))?;
    let pipe = supervisor.stdout.take().expect("stdout is piped");

    let reason = if poll_readable(&pipe, config.ready_timeout)? {
        match outcome(pipe) {
            Outcome::Ready => return Ok(()),
            Outcome::Failed { reason } => reason,
        }
    } else {
        let late = unready(dir).unwrap_or_else(|| "the supervisor does not answer".to_owned());
        format!("not ready after {:?}: {late}", config.ready_timeout)
    };
    end(&mut supervisor)?;
    Err(Error::Start {
        name: config.name.clone(),
        reason,
        log: dir.log_tails(config),
    })
}

fn outcome(pipe: ChildStdout) -> Outcome {
    protocol::receive(BufReader::new(pipe)).unwrap_or_else(|_| Outcome::Failed {
        reason: "its supervisor ended without a word; does the program's main begin with verbatim_lab::run_role()?"
            .to_owned(),
    })
}

/// Which services are not ready.
fn unready(dir: &StateDir) -> Option<String> {
    let response = protocol::ask(&dir.control_socket(), &Request::Status, Duration::from_secs(1)).ok()?;
    let Response::Status(status) = response else {
        return None;
    };
    let late = status.hosts.iter().flat_map(|host| {
        let services = host
            .services
            .iter()
            .filter(|service| !matches!(service.state, ServiceState::Running { .. }));
        services.map(|service| format!("{} on {} is {}", service.name, host.name, word(&service.state)))
    });
    Some(late.collect::<Vec<_>>().join(", "))
}

fn word(state: &ServiceState) -> String {
    match state {
        ServiceState::Waiting => "waiting for the one before it".to_owned(),
        ServiceState::Starting { .. } => "started, but its sockets do not accept connections".to_owned(),
        ServiceState::Running { .. } => "running".to_owned(),
        ServiceState::Exited { how } => format!("ended ({how})"),
    }
}

/// Ends the supervisor, which ends its hosts.
fn end(supervisor: &mut Child) -> Result<()> {
    if let Ok(process) = ProcessId::of(supervisor.id()) {
        process.kill(Signal::TERM)?;
        if !process.wait(END_TIMEOUT)? {
            process.kill(Signal::KILL)?;
        }
    }
    supervisor
        .wait()
        .map_err(Error::io("wait for the lab's supervisor"))?;
    Ok(())
}
