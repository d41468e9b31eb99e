//! How a schedule is carried out in a lab, and how all is made whole again.

use std::fmt;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use rustix::process::Signal;
use verbatim_lab::ServiceState;

use super::processes;
use super::schedule::{Disk, Fault, Moment, Schedule, Side, Strike, Way, side_of};
use super::tally::Struck;
use crate::lab::TestLab;
use crate::running::{Finished, Running};
use crate::wait::{eventually, patience};

/// What is ordered in a host takes no longer.
const LIMIT: Duration = Duration::from_secs(30);
/// Whoever waits for a point, or for a program to kill, waits no longer, since the move may never get there.
const APPEARS: Duration = Duration::from_secs(6);
/// A disk that is full has so much left, in KiB: a mount cannot be made smaller than what it holds.
const LEFT: u32 = 16;
/// How large a host's state disk is.
const STATE_SIZE: &str = "64m";
const STATE: &str = "/run/verbatim-state";

/// The hosts of a move, by their sides.
#[derive(Debug, Clone, Copy)]
pub struct Hosts {
    /// Where the instance is.
    pub source: &'static str,
    /// Where it goes.
    pub destination: &'static str,
    /// Where the other end of its connections is.
    pub partner: &'static str,
}

impl Hosts {
    fn of(&self, side: Side) -> &'static str {
        match side {
            Side::Source => self.source,
            Side::Destination => self.destination,
            Side::Partner => self.partner,
        }
    }

    fn all(&self) -> [&'static str; 3] {
        [self.source, self.destination, self.partner]
    }
}

/// What happened in a move, with times from its beginning.
pub struct Story {
    begun: Instant,
    lines: Mutex<Vec<(Duration, String)>>,
}

impl Default for Story {
    fn default() -> Self {
        Self {
            begun: Instant::now(),
            lines: Mutex::default(),
        }
    }
}

impl Story {
    /// Adds a line, of now.
    pub fn tell(&self, line: impl Into<String>) {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.push((self.begun.elapsed(), line.into()));
    }
}

impl fmt::Display for Story {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner).clone();
        lines.sort();
        for (after, line) in lines {
            write!(f, "\n  {:8.3} s  {line}", after.as_secs_f64())?;
        }
        Ok(())
    }
}

/// Gives each host a state disk of its own that can be full: in a lab it is a folder of the machine's. Before instances are started.
pub fn prepare(lab: &TestLab, hosts: &[&str]) -> anyhow::Result<()> {
    for host in hosts {
        lab.lab().kill(host, "agent")?;
        let size = format!("size={STATE_SIZE},mode=0700");
        run(lab, host, &["mount", "-t", "tmpfs", "-o", &size, "tmpfs", STATE])?;
        lab.lab().start(host, "agent")?;
    }
    Ok(())
}

fn run(lab: &TestLab, host: &str, argv: &[&str]) -> anyhow::Result<Finished> {
    lab.start_plain(host, argv)?.succeed(patience(LIMIT))
}

/// Takes all space of a disk, or gives it back.
fn fill(lab: &TestLab, host: &str, disk: Disk, full: bool) -> anyhow::Result<()> {
    let (mount, size) = match disk {
        Disk::Runtime => ("/run", "50%"),
        Disk::State => (STATE, STATE_SIZE),
    };
    let size = match full {
        true => format!("$(( $(df -k --output=used {mount} | tail -n 1) + {LEFT} ))k"),
        false => size.to_owned(),
    };
    run(
        lab,
        host,
        &["sh", "-c", &format!("mount -o remount,size={size} {mount}")],
    )?;
    Ok(())
}

/// Cuts a host's link. What comes is dropped before anybody sees it, what goes after all have.
fn cut(lab: &TestLab, host: &str, way: Way) -> anyhow::Result<()> {
    let mut rules = "add table netdev cut;".to_owned();
    for (name, hook) in [(Way::In, "ingress"), (Way::Out, "egress")] {
        if way == name || way == Way::Both {
            rules.push_str(&format!(
                " add chain netdev cut {hook} {{ type filter hook {hook} device \"uplink\" priority 0; policy drop; }};"
            ));
        }
    }
    run(lab, host, &["nft", &rules])?;
    Ok(())
}

fn mend(lab: &TestLab, host: &str) -> anyhow::Result<()> {
    // Adding it first makes deleting what is not there no error.
    run(
        lab,
        host,
        &["nft", "add table netdev cut; delete table netdev cut"],
    )?;
    Ok(())
}

/// Starts an agent unless one runs.
fn start_agent(lab: &TestLab, host: &str) -> anyhow::Result<bool> {
    let status = lab.lab().status()?;
    let agent = status.host(host).and_then(|host| host.service("agent"));
    match agent.map(|agent| &agent.state) {
        Some(ServiceState::Exited { .. } | ServiceState::Waiting) => {
            lab.lab().start(host, "agent").map(|()| true)
        }
        _ => return Ok(false),
    }
    .with_context(|| format!("cannot start the agent of {host}"))
}

/// Makes all whole again, whatever a strike has left: links, disks, agents that are stopped or not there.
pub fn heal(lab: &TestLab, hosts: &Hosts) -> anyhow::Result<()> {
    for host in hosts.all() {
        mend(lab, host)?;
        fill(lab, host, Disk::Runtime, false)?;
        fill(lab, host, Disk::State, false)?;
        if let Some(agent) = processes::agent(lab, host)? {
            agent.signal(Signal::CONT)?;
        }
    }
    for host in hosts.all() {
        start_agent(lab, host)?;
    }
    Ok(())
}

/// Whether the move has come to the point where it is held, and who has still to strike there.
#[derive(Default)]
struct Held {
    state: Mutex<HeldState>,
    changed: Condvar,
}

#[derive(Default)]
struct HeldState {
    /// When it was reached, or nobody waits for it any more.
    since: Option<Instant>,
    /// It was reached.
    reached: bool,
    to_come: usize,
    moved: bool,
}

impl Held {
    fn change(&self, change: impl FnOnce(&mut HeldState)) {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }

    fn wait_for<T>(&self, limit: Duration, found: impl Fn(&HeldState) -> Option<T>) -> Option<T> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self
            .changed
            .wait_timeout_while(state, limit, |state| found(state).is_none());
        found(&waited.unwrap_or_else(PoisonError::into_inner).0)
    }
}

/// A move under way.
struct Move<'a> {
    lab: &'a TestLab,
    instance: &'a str,
    hosts: Hosts,
    story: &'a Story,
    held: Held,
    struck: Mutex<Vec<Struck>>,
}

/// Moves an instance while its schedule strikes. Returns how the command ended, what has struck, and when the command ended (in
/// milliseconds since 1970). Afterwards some of the hosts may still need [`heal`].
pub fn struck_move(
    lab: &TestLab,
    instance: &str,
    hosts: Hosts,
    schedule: &Schedule,
    limit: Duration,
    story: &Story,
) -> anyhow::Result<(Finished, Vec<Struck>, u64)> {
    let held = schedule
        .strikes
        .iter()
        .filter(|strike| matches!(strike.moment, Moment::Held(_)));
    let one = Move {
        lab,
        instance,
        hosts,
        story,
        held: Held::default(),
        struck: Mutex::default(),
    };
    one.held.change(|state| state.to_come = held.count());
    let reached = match &schedule.held_at {
        Some(point) => {
            let host = hosts.of(side_of(*point));
            let reached = lab.path(host, "/run/verbatim/faults.reached")?;
            let _ = std::fs::remove_file(&reached);
            lab.order_faults(host, &format!("{} hang\n", point.name()))?;
            Some((host, reached, point.name()))
        }
        None => None,
    };
    story.tell(format!(
        "the move from {} to {} begins",
        hosts.source, hosts.destination
    ));
    let begun = Instant::now();
    let arguments = [
        "migrate",
        instance,
        "--to",
        hosts.destination,
        "--json",
        "--method",
        schedule.method,
        "--memory-transport",
        schedule.memory_transport,
    ];
    let migrate = lab.verbatim(&arguments)?;
    let finished = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| one.waits(migrate, limit));
        let striking: Vec<_> = schedule
            .strikes
            .iter()
            .map(|strike| scope.spawn(|| one.strike(strike, begun)))
            .collect();
        if let Some((host, reached, name)) = reached {
            let there = eventually(name, APPEARS, || {
                let over = one
                    .held
                    .wait_for(Duration::ZERO, |state| state.moved.then_some(()));
                let text = std::fs::read_to_string(&reached).unwrap_or_default();
                Ok((text.contains(name) || over.is_some()).then_some(text.contains(name)))
            });
            match there {
                Ok(true) => story.tell(format!("{host} is held at {name}")),
                _ => story.tell(format!("{host} does not come to {name}")),
            }
            one.held.change(|state| {
                state.since = Some(Instant::now());
                state.reached = matches!(there, Ok(true));
            });
            one.held
                .wait_for(patience(LIMIT), |state| (state.to_come == 0).then_some(()));
            let _ = lab.order_faults(host, "");
            story.tell(format!("{host} is let go"));
        }
        for strike in striking {
            if strike.join().is_err() {
                story.tell("a strike panicked");
            }
        }
        waiting
            .join()
            .unwrap_or_else(|_| anyhow::bail!("the wait for the move panicked"))
    });
    let (finished, end) = finished?;
    Ok((
        finished,
        one.struck.into_inner().unwrap_or_else(PoisonError::into_inner),
        end,
    ))
}

fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

impl Move<'_> {
    fn waits(&self, migrate: Running, limit: Duration) -> anyhow::Result<(Finished, u64)> {
        let finished = migrate.wait(limit);
        self.held.change(|state| state.moved = true);
        let end = unix_ms();
        let finished = finished?;
        self.story
            .tell(format!("the command ends with status {}", finished.code));
        Ok((finished, end))
    }

    fn strike(&self, strike: &Strike, begun: Instant) {
        let (at, at_point) = match strike.moment {
            Moment::Clock(after) => (begun + after, false),
            Moment::Held(after) => {
                let there = |state: &HeldState| Some((state.since?, state.reached));
                let there = self.held.wait_for(patience(LIMIT), there);
                let (since, reached) = there.unwrap_or_else(|| (Instant::now(), false));
                (since + after, reached)
            }
        };
        std::thread::sleep(at.saturating_duration_since(Instant::now()));
        let done = self.begin(strike.fault);
        let kind = strike.fault.kind();
        match &done {
            Ok(true) => {
                self.story.tell(kind.clone());
                let mut struck = self.struck.lock().unwrap_or_else(PoisonError::into_inner);
                struck.push(Struck {
                    kind: kind.clone(),
                    unix_ms: unix_ms(),
                    at_point,
                });
            }
            Ok(false) => self.story.tell(format!("{kind}: nobody there")),
            Err(error) => self.story.tell(format!("{kind}: {error:#}")),
        }
        if matches!(strike.moment, Moment::Held(_)) {
            self.held.change(|state| state.to_come -= 1);
        }
        let takes_nothing = matches!(strike.fault, Fault::KillTool(..) | Fault::Cancel);
        if takes_nothing || !matches!(done, Ok(true)) {
            return;
        }
        std::thread::sleep(strike.lasts);
        match self.end(strike.fault) {
            Ok(true) => self.story.tell(format!("{kind}: over")),
            Ok(false) => {}
            Err(error) => self.story.tell(format!("{kind}: not over: {error:#}")),
        }
    }

    /// Strikes; whether there was somebody to strike.
    fn begin(&self, fault: Fault) -> anyhow::Result<bool> {
        let Self { lab, hosts, .. } = self;
        match fault {
            Fault::KillAgent(side) => {
                let Some(agent) = processes::agent(lab, hosts.of(side))? else {
                    return Ok(false);
                };
                agent.signal(Signal::KILL)
            }
            Fault::StopAgent(side) => {
                let Some(agent) = processes::agent(lab, hosts.of(side))? else {
                    return Ok(false);
                };
                agent.signal(Signal::STOP)
            }
            Fault::KillTool(side, tool) => {
                let found = eventually("a program to kill", APPEARS, || {
                    let found = processes::tool(lab, hosts.of(side), tool)?;
                    let over = self
                        .held
                        .wait_for(Duration::ZERO, |state| state.moved.then_some(()));
                    Ok((found.is_some() || over.is_some()).then_some(found))
                });
                found
                    .ok()
                    .flatten()
                    .map_or(Ok(false), |tool| tool.signal(Signal::KILL))
            }
            Fault::Cut(side, way) => cut(lab, hosts.of(side), way).map(|()| true),
            Fault::Fill(side, disk) => fill(lab, hosts.of(side), disk, true).map(|()| true),
            Fault::Cancel => {
                let cancel = lab.verbatim(&["cancel", self.instance])?.wait(patience(LIMIT))?;
                let said = cancel.stderr.trim().lines().last().unwrap_or_default().to_owned();
                self.story.tell(format!("cancel: status {} {said}", cancel.code));
                Ok(cancel.code == 0)
            }
        }
    }

    /// Gives back what a strike took; whether there was anything to give back.
    fn end(&self, fault: Fault) -> anyhow::Result<bool> {
        let Self { lab, hosts, .. } = self;
        match fault {
            Fault::KillAgent(side) => start_agent(lab, hosts.of(side)),
            Fault::StopAgent(side) => {
                let agent = processes::agent(lab, hosts.of(side))?;
                agent.map_or(Ok(false), |agent| agent.signal(Signal::CONT))
            }
            Fault::Cut(side, _) => mend(lab, hosts.of(side)).map(|()| true),
            Fault::Fill(side, disk) => fill(lab, hosts.of(side), disk, false).map(|()| true),
            Fault::KillTool(..) | Fault::Cancel => Ok(false),
        }
    }
}
