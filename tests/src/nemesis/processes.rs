//! The processes of a lab's host, found by its PID namespace and its cgroups, never by name across the machine.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use anyhow::Context;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::schedule::Tool;
use crate::lab::TestLab;

/// A process that stays this one, also when it has ended.
pub struct Process {
    pidfd: OwnedFd,
    /// How the machine numbers it.
    pub pid: i32,
}

impl Process {
    /// Whether the signal has reached it: not if it has ended.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<bool> {
        match pidfd_send_signal(&self.pidfd, signal) {
            Ok(()) => Ok(true),
            Err(Errno::SRCH) => Ok(false),
            Err(errno) => Err(errno).with_context(|| format!("cannot send {signal:?} to {}", self.pid)),
        }
    }
}

/// All processes of the machine; those that end meanwhile are left out by whoever looks at them.
fn all() -> anyhow::Result<Vec<i32>> {
    let entries = fs::read_dir("/proc").context("cannot list /proc")?;
    Ok(entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect())
}

fn about(pid: i32, what: &str) -> PathBuf {
    Path::new("/proc").join(pid.to_string()).join(what)
}

/// Its numbers in the PID namespaces from this one inwards.
fn numbers(pid: i32) -> Option<Vec<i32>> {
    let status = fs::read_to_string(about(pid, "status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    line.split_whitespace()
        .map(|number| number.parse().ok())
        .collect()
}

/// The first process of the host's own PID namespace that `wanted` says yes to. It is held by its descriptor before it is looked at,
/// so that it cannot be replaced by another one in between.
fn find(lab: &TestLab, host: &str, wanted: impl Fn(i32) -> bool) -> anyhow::Result<Option<Process>> {
    let status = lab.lab().status()?;
    let first = status
        .host(host)
        .with_context(|| format!("there is no host {host}"))?
        .pid;
    let namespace = fs::read_link(format!("/proc/{first}/ns/pid"))?;
    for pid in all()? {
        let Some(number) = Pid::from_raw(pid) else {
            continue;
        };
        let Ok(pidfd) = pidfd_open(number, PidfdFlags::empty()) else {
            continue;
        };
        let is_there = fs::read_link(about(pid, "ns/pid")).is_ok_and(|other| other == namespace);
        if is_there && wanted(pid) {
            return Ok(Some(Process { pidfd, pid }));
        }
    }
    Ok(None)
}

/// A host's agent, if it runs.
pub fn agent(lab: &TestLab, host: &str) -> anyhow::Result<Option<Process>> {
    let Ok(number) = lab.service_pid(host, "agent") else {
        return Ok(None);
    };
    find(lab, host, |pid| {
        numbers(pid).and_then(|numbers| numbers.last().copied()) == i32::try_from(number).ok()
    })
}

/// A host's CRIU, proxy or runc, if one runs.
pub fn tool(lab: &TestLab, host: &str, tool: Tool) -> anyhow::Result<Option<Process>> {
    let verbatim = lab.tools().verbatim.file_name().map(ToOwned::to_owned);
    find(lab, host, |pid| {
        let argv = fs::read(about(pid, "cmdline")).unwrap_or_default();
        let argv: Vec<_> = argv.split(|byte| *byte == 0).collect();
        let name = argv
            .first()
            .map(|first| String::from_utf8_lossy(first).into_owned());
        let name = name.as_deref().and_then(|name| name.rsplit('/').next());
        let program = fs::read_link(about(pid, "exe")).unwrap_or_default();
        let is_verbatim = program.file_name().map(ToOwned::to_owned) == verbatim;
        match tool {
            // By the program that is mapped: a loader may have been started to run it, and it gives itself other arguments when it has
            // its request (setproctitle).
            Tool::Criu => {
                let maps = fs::read_to_string(about(pid, "maps")).unwrap_or_default();
                maps.lines().any(|line| line.ends_with("/criu"))
            }
            Tool::Proxy => name == Some("criu") && is_verbatim,
            Tool::Runc => name == Some("runc"),
        }
    })
}

/// The first processes of an instance's containers on a host, as the machine numbers them, dead ones left out: by the cgroup, and by
/// being number 1 of a PID namespace within the host's.
pub fn copies(lab: &TestLab, host: &str, instance: &str) -> anyhow::Result<Vec<i32>> {
    let group = format!("/verbatim/{}/{host}/", lab.name());
    let is_copy = |pid: &i32| {
        let cgroups = fs::read_to_string(about(*pid, "cgroup")).unwrap_or_default();
        let is_member = cgroups.lines().any(|line| {
            line.contains(&group) && line.rsplit('/').next().is_some_and(|last| last == instance)
        });
        let stat = fs::read_to_string(about(*pid, "stat")).unwrap_or_default();
        let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
        let is_first = numbers(*pid).is_some_and(|numbers| numbers.len() > 2 && numbers.last() == Some(&1));
        is_member && is_first && !matches!(state, None | Some('Z' | 'X'))
    };
    Ok(all()?.into_iter().filter(is_copy).collect())
}
