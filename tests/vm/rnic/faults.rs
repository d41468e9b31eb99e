//! A failure at each named point of a migration (`verbatim_agent::faults::Point`), in each way that makes sense there, under a check
//! that runs all the time. Each point is a case of its own.
//!
//! After each failure the server runs on exactly one host, and its data flow; the migration that comes next succeeds. At the end
//! the check has found nothing lost, repeated or reordered.

use std::time::Duration;

use anyhow::{Context, bail, ensure};
use verbatim_agent::faults::{Point, Time};
use verbatim_e2e::{Action, eventually};

use crate::machines::{HOSTS, Machines, SHORT, words};
use crate::run::{CHECK, Check, MOVE_LIMIT, flows};

/// Points that such a migration does not pass: it does not pause, and this one drains; nothing is brought later, as to a virtual machine.
const NOT_PASSED: &[Point] = &[
    Point::Hello,
    Point::SourcePause,
    Point::SourceStop,
    Point::DestinationBring,
    Point::PartnerStop,
    Point::PartnerSettle,
];

/// The points.
pub fn points() -> impl Iterator<Item = Point> {
    Point::ALL
        .iter()
        .copied()
        .filter(|point| !NOT_PASSED.contains(point))
}

/// The actions that make sense there. An RNIC of the kernel's does not die by itself.
fn actions(point: Point) -> Vec<Action> {
    let mut actions = vec![Action::Exit, Action::Hang];
    if point.time() != Time::AtCommit {
        actions.push(Action::Fail);
    }
    actions
}

/// Runs a point's failures; an error comes with what agents and kernels have said.
pub fn run(machines: &Machines, point: Point) -> anyhow::Result<()> {
    machines.clear()?;
    let mut site = Site::new(machines)?;
    for action in actions(point) {
        let attempt = site.case(point, action);
        attempt.map_err(|error| {
            error.context(format!("{} {}{}", point.name(), action.name(), machines.told()))
        })?;
    }
    site.migrate_well()?;
    site.check.end(machines)
}

struct Site<'a> {
    machines: &'a Machines,
    check: Check,
    /// The host that the server is on, and the one that it goes to.
    here: &'static str,
    there: &'static str,
}

impl<'a> Site<'a> {
    fn new(machines: &'a Machines) -> anyhow::Result<Self> {
        let [here, partner, there] = HOSTS;
        Ok(Self {
            machines,
            check: Check::start(machines, here, partner, CHECK)?,
            here,
            there,
        })
    }

    fn host_of(&self, point: Point) -> anyhow::Result<&'static str> {
        match point.name().split('-').next() {
            Some("source") => Ok(self.here),
            Some("destination") => Ok(self.there),
            Some("partner") => Ok(HOSTS[1]),
            _ => bail!("{} is at no host", point.name()),
        }
    }

    fn case(&mut self, point: Point, action: Action) -> anyhow::Result<()> {
        let (machines, here, there) = (self.machines, self.here, self.there);
        let host = self.host_of(point)?;
        machines.order_faults(host, &format!("{} {}\n", point.name(), action.name()))?;
        // The destination has been asked to commit: what it does now counts, and it goes on when it is let go.
        let asked = [Point::DestinationCommit, Point::DestinationCommitted].contains(&point);
        let before = point.time() == Time::BeforeCommit && !(asked && action == Action::Hang);
        let told = std::thread::scope(|scope| {
            let migrate = scope
                .spawn(|| machines.verbatim_ended(here, &["migrate", "server", "--to", there], MOVE_LIMIT));
            machines.reached(host, point.name())?;
            match action {
                Action::Fail if before => {}
                Action::Fail => machines.order_faults(host, "")?,
                Action::Exit => {
                    machines.order_faults(host, "")?;
                    machines.start_agent(host)?;
                    self.check.agent_replaced(host);
                }
                Action::Hang => {
                    if before {
                        machines.verbatim(here, &["cancel", "server"], SHORT)?;
                    }
                    machines.order_faults(host, "")?;
                }
                Action::KillNic | Action::Damage => bail!("{} is not told here", action.name()),
            }
            migrate.join().expect("it does not panic")
        })?;
        machines.order_faults(host, "")?;
        // A source's agent that died before the destination was asked rolls back; asked, the destination's word counts.
        let moved = match point.time() {
            Time::BeforeCommit => !before,
            Time::AtCommit => !(point == Point::SourceAsk && action == Action::Exit),
            Time::AfterCommit => true,
        };
        let noticed = told.code != 0;
        let agent_died = host == here && action == Action::Exit;
        ensure!(
            noticed == (!moved || agent_died),
            "status {}: {}",
            told.code,
            words(&told)
        );
        if moved {
            std::mem::swap(&mut self.here, &mut self.there);
        }
        self.settled()
    }

    /// One without a failure.
    fn migrate_well(&mut self) -> anyhow::Result<()> {
        let to = self.there;
        self.machines
            .verbatim(self.here, &["migrate", "server", "--to", to], MOVE_LIMIT)
            .context("the migration after all failures")?;
        std::mem::swap(&mut self.here, &mut self.there);
        self.settled()
    }

    /// The server runs where it should and nowhere else, its data flow, and no session is open.
    fn settled(&self) -> anyhow::Result<()> {
        let machines = self.machines;
        eventually("a server that runs", MOVE_LIMIT, || {
            let mut running = Vec::new();
            for host in HOSTS {
                let rows = machines.rows(host)?;
                let runs = |name: &str, state: &str| name == "server" && state == "running";
                running.extend(
                    rows.iter()
                        .filter(|row| runs(&row.name, &row.state))
                        .map(|_| host),
                );
            }
            ensure!(running.len() <= 1, "the server runs twice: {running:?}");
            match running[..] {
                [host] if host == self.here => Ok(Some(())),
                [host] => bail!("the server is on {host} and not on {}", self.here),
                _ => Ok(None),
            }
        })?;
        flows(machines, HOSTS[1])?;
        eventually("no session", Duration::from_secs(60), || {
            for host in HOSTS {
                if machines.verbatim(host, &["sessions", "--json"], SHORT)?.trim() != "[]" {
                    return Ok(None);
                }
            }
            Ok(Some(()))
        })
    }
}
