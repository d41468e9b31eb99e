//! Contexts that the instance's processes make again at the destination (`crate::session::made_again`): what is said of them before.

use anyhow::{Context, bail};
use verbatim_channel::{Endpoint, MadeAgain};

use super::connections::{Connected, Connection, OtherEnd};
use super::{Process, Source};
use crate::agent::Agent;
use crate::guests::Guest;
use crate::instances::record::Record;
use crate::proto;
use crate::protocol::{MADE_AGAIN, MADE_AHEAD};
use crate::trial::Limits;

/// What speaks against moving an instance whose processes have these contexts.
pub fn blockers<'m>(
    agent: &Agent,
    record: &Record,
    all: impl IntoIterator<Item = &'m MadeAgain>,
    to: &str,
) -> Vec<String> {
    let mut blockers = Vec::new();
    for made in all {
        let device = &made.device;
        if !record.rnics.iter().any(|rnic| rnic.name == *device) {
            blockers.push(format!(
                "a process has the device {device} open, which the instance was not given: nothing says that it is there at {to}; start \
                 the instance with --rnic {device}"
            ));
        }
        if !agent.peers.can(to, MADE_AGAIN) {
            blockers.push(format!(
                "what it has on {device} is made again where it moves to, which the agent of {to} does not know: upgrade the agent there"
            ));
        }
    }
    blockers
}

/// What speaks against moving processes that have an RNIC's context which was made ahead of them.
pub fn handed_over<'g>(agent: &Agent, guests: impl Iterator<Item = &'g Guest>, to: &str) -> Option<String> {
    if agent.peers.can(to, MADE_AHEAD) {
        return None;
    }
    let was_handed = |pid| verbatim_container::handed_over(pid).is_ok_and(|found| !found.is_empty());
    let mut pids = guests.filter_map(Guest::host_pid);
    pids.find(|pid| was_handed(*pid)).map(|_| {
        format!(
            "a process has an RNIC's context that was made ahead of it when it came here, and CRIU would not restore it at {to}, whose agent does              not know that: upgrade the agent there"
        )
    })
}

impl Source {
    /// The device of one of the contexts that are made again, if there is one.
    pub(super) fn makes_again(&self) -> Option<&str> {
        let made_again = self.processes.iter().flat_map(|process| &process.made_again);
        made_again.map(|made| made.device.as_str()).next()
    }

    pub(super) fn all_made_again(&self) -> Vec<(u32, MadeAgain)> {
        let of_process = |process: &Process| {
            let pid = process.guest.pid;
            let made_again = process.made_again.iter().cloned();
            made_again.map(move |made| (pid, made)).collect::<Vec<_>>()
        };
        self.processes.iter().flat_map(of_process).collect()
    }

    /// Under which limits the processes are that make some.
    pub(super) fn limits(&self) -> anyhow::Result<Vec<proto::ProcessLimits>> {
        let makers = self
            .processes
            .iter()
            .filter(|process| !process.made_again.is_empty());
        let limits = makers.map(|process| {
            let guest = &process.guest;
            let host_pid = guest.host_pid().context("a process has ended")?;
            Ok(Limits::of(guest.pid, host_pid)?.into())
        });
        limits.collect()
    }

    pub(super) fn is_made_again(&self, pid: u32, qpn: u32) -> bool {
        let process = self.processes.iter().find(|process| process.guest.pid == pid);
        process.is_some_and(|process| process.makes_again(qpn))
    }

    /// What the destination must know of a connection that will be connected after the decision; `None` if nothing will be.
    pub(super) fn made_connection(
        &self,
        index: u32,
        connection: &Connection,
        standby: Option<&proto::Standby>,
    ) -> anyhow::Result<Option<proto::MadeConnection>> {
        let mut made = proto::MadeConnection {
            connection: index,
            pid: connection.pid,
            qpn: connection.qpn,
            connected: connection.connected != Connected::Partner,
            ..proto::MadeConnection::default()
        };
        match &connection.other_end {
            OtherEnd::Own(_) | OtherEnd::OwnUnconnected { .. } => {
                let (pid, qpn, sends) = match &connection.other_end {
                    OtherEnd::Own(other) => {
                        let other = &self.connections[*other];
                        (other.pid, other.qpn, other.sends)
                    }
                    OtherEnd::OwnUnconnected { pid, qpn } => (*pid, *qpn, false),
                    OtherEnd::Host(_) => unreachable!("the arm is for others"),
                };
                if !self.is_made_again(pid, qpn) {
                    bail!(
                        "queue pair {:#x} of process {} is connected to one of the instance's own on an RNIC of another kind, \
                         which cannot be moved",
                        connection.qpn,
                        connection.pid
                    );
                }
                (made.other_pid, made.other_qpn) = (pid, qpn);
                made.sends = connection.sends && sends;
            }
            OtherEnd::Host(host) => match standby {
                Some(standby) => {
                    let gid = connection.partner.gid;
                    let qpn = standby.physical_qpn;
                    made.partner = host.clone();
                    made.remote = Some(Endpoint { gid, qpn }.into());
                    made.sq_psn = standby.sq_psn;
                    made.sends = connection.sends && standby.sends;
                }
                None if connection.connected == Connected::Partner => return Ok(None),
                None => made.remote = Some(connection.partner.into()),
            },
        }
        Ok(Some(made))
    }
}
