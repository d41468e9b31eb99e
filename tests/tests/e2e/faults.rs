//! Every failure at every step: each named point of a migration (`verbatim_agent::faults::Point`) with each action that
//! makes sense there, in one lab and under one check that runs all the time.
//!
//! What is moved is a [`Subject`]: the check, or a virtual machine (`crate::machines`).
//!
//! After each case the instance runs on exactly one host, its connections work, nothing is left on the other host, no
//! session is open, and a second attempt succeeds. At the end the check has found nothing lost, repeated or reordered.
//!
//! `make test` runs [`SHORT`]; `make faults` runs the whole table, host by host.

use std::time::Duration;

use anyhow::{Context, bail, ensure};
use strum::IntoEnumIterator;
use verbatim_e2e::{
    Action, MOVED, Migration, ROLLED_BACK, Running, TestLab, Tools, Traffic, eventually, left_behind,
};

use crate::Test;
use crate::drain::Loss;
use crate::migration::Check;

const HOSTS: &[&str] = &["src", "dst", "peer"];
const LIMIT: Duration = Duration::from_secs(60);
const PARTNER: &str = "peer";

/// The check that runs meanwhile.
const OPTIONS: &[&str] = &[
    "--op",
    "mix",
    "-q",
    "4",
    "-s",
    "16384",
    "--random-size",
    "--bidirectional",
];

/// What is moved, and runs all the time.
pub trait Subject {
    /// The instance's name.
    fn name(&self) -> &str;
    /// How many connections it has while it is well.
    fn connections(&self) -> u32;
    /// What it does goes on, on this host.
    fn goes_on(&self, host: &str) -> anyhow::Result<()>;
    /// Moves it; an error if that fails.
    fn moves(&self, to: &str) -> anyhow::Result<()>;
    /// Ends it: an error if something was lost.
    fn end(self: Box<Self>) -> anyhow::Result<()>;
}

impl Subject for Check<'_> {
    fn name(&self) -> &str {
        self.client.name()
    }

    fn connections(&self) -> u32 {
        4
    }

    fn goes_on(&self, host: &str) -> anyhow::Result<()> {
        [host, PARTNER].into_iter().try_for_each(|host| self.flows(host))
    }

    fn moves(&self, to: &str) -> anyhow::Result<()> {
        self.client.moves(to).map(drop)
    }

    fn end(self: Box<Self>) -> anyhow::Result<()> {
        Check::end(*self).map(drop)
    }
}

fn check<'a>(lab: &'a TestLab) -> anyhow::Result<Box<dyn Subject + 'a>> {
    Ok(Box::new(Check::start(lab, OPTIONS)?))
}

/// Whether an action makes sense at a point.
fn is_for(action: Action, point: &Point) -> bool {
    match action {
        Action::Exit | Action::Hang => true,
        // Where nothing can be refused.
        Action::Fail => point.time != "at-commit",
        // On the other hosts, and after the commit on this one, the programs would lose their own connections; and while
        // files come, nothing needs it yet.
        Action::KillNic => {
            point.role == "destination" && point.time == "before-commit" && point.name != "destination-place"
        }
        // The tests of what is damaged order it themselves.
        Action::Damage => false,
    }
}

/// Where a failure can be ordered.
#[derive(Debug, Clone)]
pub struct Point {
    /// Its name.
    pub name: String,
    /// On which host it is.
    pub role: String,
    /// `before-commit`, `at-commit` or `after-commit`.
    pub time: String,
}

/// The selection for every day: of each host something before, at and after the commit.
const SHORT: &[(&str, Action)] = &[
    ("source-transfer", Action::Exit),
    ("source-ask", Action::Exit),
    ("source-committed", Action::Exit),
    ("source-switch", Action::Hang),
    ("destination-pre-setup", Action::KillNic),
    ("destination-committed", Action::Exit),
    ("destination-running", Action::Exit),
    ("destination-claim", Action::Fail),
    ("partner-drained", Action::Exit),
    ("partner-switch", Action::Exit),
];

/// All of them.
pub fn tests() -> Vec<Test> {
    let short = Test::new("faults::short", HOSTS, |lab| some(lab, check(lab)?, SHORT));
    let mut tests = vec![short.injecting_faults()];
    for method in [Method::WaitBeforeStop, Method::PauseResume] {
        for role in ["source", "destination", "partner"] {
            let name = format!("faults::every_{role}_{}", method.name().replace('-', "_"));
            let every = Test::new(name, &["src"], move |_| {
                let points = points();
                let passed = points
                    .iter()
                    .filter(|point| point.role == role && method.passes(&point.name));
                every(passed, method, check, is_for)
            });
            tests.push(every.only_on_demand(true));
        }
    }
    tests
}

/// How the migration that fails brings connections to a stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    WaitBeforeStop,
    PauseResume,
}

impl Method {
    fn name(self) -> &'static str {
        match self {
            Self::WaitBeforeStop => "wait-before-stop",
            Self::PauseResume => "pause-resume",
        }
    }

    /// Whether it has this step.
    fn passes(self, point: &str) -> bool {
        let only_in_a_drain = [
            "source-suspend",
            "source-drain",
            "source-stop",
            "partner-drain",
            "partner-drained",
            "partner-stop",
            "partner-settle",
        ];
        match self {
            Self::WaitBeforeStop => point != "source-pause",
            Self::PauseResume => !only_in_a_drain.contains(&point),
        }
    }
}

/// All points of a migration. What is about the greeting is tested with `verbatim check`.
pub fn points() -> Vec<Point> {
    let points = verbatim_agent::faults::Point::ALL.iter();
    // Post-copy is tested with virtual machines, and deep checks by themselves.
    let of_migration =
        points.filter(|point| !["hello", "source-deep", "destination-bring"].contains(&point.name()));
    let point = |point: &verbatim_agent::faults::Point| {
        let name = point.name();
        let role = name.split('-').next().unwrap_or_default();
        assert!(
            ["source", "destination", "partner"].contains(&role),
            "no case for {name}"
        );
        Point {
            name: name.to_owned(),
            role: role.to_owned(),
            time: point.time().name().to_owned(),
        }
    };
    of_migration.map(point).collect()
}

/// These cases, one after the other, in one lab.
pub fn some(lab: &TestLab, subject: Box<dyn Subject + '_>, cases: &[(&str, Action)]) -> anyhow::Result<()> {
    let points = points();
    let cases = cases.iter().map(|(name, action)| {
        let point = points.iter().find(|point| point.name == *name);
        Ok((
            point.with_context(|| format!("there is no point {name}"))?,
            *action,
        ))
    });
    let cases = cases.collect::<anyhow::Result<Vec<_>>>()?;
    drive(lab, Method::WaitBeforeStop, subject, &cases)
}

/// Each point in a lab of its own, so that one that fails hides no other.
pub fn every<'p>(
    points: impl Iterator<Item = &'p Point>,
    method: Method,
    start: for<'a> fn(&'a TestLab) -> anyhow::Result<Box<dyn Subject + 'a>>,
    is_for: fn(Action, &Point) -> bool,
) -> anyhow::Result<()> {
    let tools = Tools::find()?.that_fail_on_order();
    let (mut count, mut failed) = (0, Vec::new());
    for point in points {
        let actions = Action::iter().filter(|action| is_for(*action, point));
        let cases: Vec<_> = actions.map(|action| (point, action)).collect();
        count += cases.len();
        let lab = TestLab::up(&tools, HOSTS)?;
        let driven = start(&lab).and_then(|subject| drive(&lab, method, subject, &cases));
        if let Err(error) = driven {
            eprintln!("FAILED: {error:#}{}", lab.logs());
            failed.push(format!("{error:#}"));
        }
        lab.down()?;
    }
    ensure!(
        failed.is_empty(),
        "{} of {count} cases: {}",
        failed.len(),
        failed.join("\n")
    );
    ensure!(count > 10, "only {count} cases");
    Ok(())
}

fn drive(
    lab: &TestLab,
    method: Method,
    subject: Box<dyn Subject + '_>,
    cases: &[(&Point, Action)],
) -> anyhow::Result<()> {
    let mut site = Site::new(lab, method, subject)?;
    for (point, action) in cases {
        let begun = std::time::Instant::now();
        site.case(point, *action)
            .with_context(|| format!("{} {}", point.name, action.name()))?;
        eprintln!("{} {}: {:.1?}", point.name, action.name(), begun.elapsed());
    }
    site.subject.end()
}

/// The lab, what is moved, and where that is.
struct Site<'a> {
    lab: &'a TestLab,
    method: Method,
    subject: Box<dyn Subject + 'a>,
    here: &'static str,
    there: &'static str,
    /// What programs have at an RNIC that only the moved instance uses, while it is there.
    objects: [u64; 5],
}

impl<'a> Site<'a> {
    fn new(lab: &'a TestLab, method: Method, subject: Box<dyn Subject + 'a>) -> anyhow::Result<Self> {
        let objects = Traffic::of(lab, "src")?.objects();
        Ok(Self {
            lab,
            method,
            subject,
            here: "src",
            there: "dst",
            objects,
        })
    }

    fn host_of(&self, point: &Point) -> &'static str {
        match point.role.as_str() {
            "source" => self.here,
            "destination" => self.there,
            _ => PARTNER,
        }
    }

    fn case(&mut self, point: &Point, action: Action) -> anyhow::Result<()> {
        let host = self.host_of(point);
        let reached = self.lab.path(host, "/run/verbatim/faults.reached")?;
        let _ = std::fs::remove_file(&reached);
        self.lab
            .order_faults(host, &format!("{} {}\n", point.name, action.name()))?;
        // Such steps come only when a drain does not end, and is not waited for.
        let stops = point.name.ends_with("-stop") || point.name.ends_with("-settle");
        let loss = stops.then(|| Loss::of(self.lab, PARTNER, &["in", "out"], 100));
        let loss = loss.transpose()?;
        let no_drain: &[&str] = if stops { &["--drain-timeout", "0"] } else { &[] };
        let migrate = self.migrate(&[&["--method", self.method.name()], no_drain].concat())?;
        eventually("the point", LIMIT, || {
            let text = std::fs::read_to_string(&reached).unwrap_or_default();
            Ok(text.contains(&point.name).then_some(()))
        })?;
        // The destination has been asked to commit: what it does now counts, and it goes on when it is let go.
        let asked = ["destination-commit", "destination-committed"].contains(&point.name.as_str());
        let before = point.time == "before-commit" && !(asked && action == Action::Hang);
        match action {
            Action::Fail if before => {}
            Action::Fail => self.lab.order_faults(host, "")?,
            Action::Exit => {
                self.lab.order_faults(host, "")?;
                self.start_again(host, "agent")?;
            }
            Action::Hang => {
                if before {
                    // While it hangs: that no host's help is needed is what is tested.
                    self.lab.ask(&["cancel", self.subject.name()])?;
                } else {
                    let late = self.lab.refused(&["cancel", self.subject.name()])?;
                    // Once the destination has finished its part, only the source still knows of a migration.
                    let refused = ["too late", "is not being moved"];
                    ensure!(refused.iter().any(|text| late.contains(text)), "{late}");
                }
                self.lab.order_faults(host, "")?;
            }
            Action::KillNic => {
                self.lab.order_faults(host, "")?;
                self.start_again(host, "nic")?;
            }
            Action::Damage => bail!("what is damaged at {} is not told here", point.name),
        }
        let finished = migrate.wait(LIMIT)?;
        drop(loss);
        self.lab.order_faults(host, "")?;

        // A source's agent that died before the destination was asked rolls back; asked, the destination's word counts.
        let moved = match point.time.as_str() {
            "before-commit" => !before,
            "at-commit" => !(point.name == "source-ask" && action == Action::Exit),
            _ => true,
        };
        if point.role == "source" && action == Action::Exit {
            ensure!(
                finished.code == 1,
                "the command noticed nothing{}",
                finished.output()
            );
        } else {
            let report = Migration::of(&finished)?;
            let outcome = if moved { MOVED } else { ROLLED_BACK };
            ensure!(report.outcome == outcome, "{report:?}");
            ensure!(report.error.is_some() != moved, "{report:?}");
            if action == Action::Fail && before {
                let error = report.error.unwrap_or_default();
                ensure!(error.contains(&point.name), "{error}");
            }
        }
        if moved {
            std::mem::swap(&mut self.here, &mut self.there);
        }
        self.settled().context("after the failure")?;

        self.subject.moves(self.there).context("the second attempt")?;
        std::mem::swap(&mut self.here, &mut self.there);
        self.settled().context("after the second attempt")
    }

    fn migrate(&self, options: &[&str]) -> anyhow::Result<Running> {
        let name = self.subject.name();
        let arguments = ["migrate", name, "--to", self.there, "--json"];
        self.lab.verbatim(&[&arguments[..], options].concat())
    }

    /// Starts a service again that has died.
    fn start_again(&self, host: &str, service: &str) -> anyhow::Result<()> {
        self.lab.ended(host, service)?;
        Ok(self.lab.lab().start(host, service)?)
    }

    /// The instance runs where it should and nowhere else, its data flow, and nothing is left of what was tried.
    fn settled(&self) -> anyhow::Result<()> {
        eventually("an instance that runs", LIMIT, || {
            let rows = self.lab.ask(&["ps", "--json"])?.stdout;
            let rows: Vec<serde_json::Value> = serde_json::from_str(&rows)?;
            // A frozen copy is in doubt until the other host says whether the instance runs there.
            let runs =
                |row: &&serde_json::Value| row["name"] == self.subject.name() && row["state"] != "in doubt";
            let mine: Vec<_> = rows.iter().filter(runs).collect();
            let running = mine.iter().filter(|row| row["state"] == "running").count();
            ensure!(running <= 1, "the instance runs twice: {rows:?}");
            // The frozen copy that was left behind is moving until it is cleared away.
            let [row] = &mine[..] else { return Ok(None) };
            if row["state"] != "running" || row["connections"] != self.subject.connections() {
                return Ok(None);
            }
            if row["host"] != self.here {
                bail!("the instance is on {} and not on {}", row["host"], self.here);
            }
            Ok(Some(()))
        })?;
        self.subject.goes_on(self.here)?;
        let mut left = Vec::new();
        eventually("hosts without leftovers", LIMIT, || {
            left = self.leftovers()?;
            Ok(left.is_empty().then_some(()))
        })
        .with_context(|| format!("left behind: {left:?}"))
    }

    fn leftovers(&self) -> anyhow::Result<Vec<String>> {
        let mut left = left_behind(self.lab, self.there, self.subject.name())?;
        let record = format!("/run/verbatim/records/{}", self.subject.name());
        if self.lab.path(self.there, &record)?.exists() {
            left.push("a record".to_owned());
        }
        for host in HOSTS {
            for folder in ["keepers", "partners"] {
                let path = self.lab.path(host, &format!("/run/verbatim/{folder}"))?;
                let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
                left.extend(entries.map(|entry| format!("{host}: {folder}/{:?}", entry.file_name())));
            }
        }
        let there = Traffic::of(self.lab, self.there)?.objects();
        if there != [0; 5] {
            left.push(format!("at the RNIC of {}: {there:?}", self.there));
        }
        let here = Traffic::of(self.lab, self.here)?.objects();
        if here != self.objects {
            left.push(format!(
                "at the RNIC of {}: {here:?}, not {:?}",
                self.here, self.objects
            ));
        }
        let sessions = self.lab.ask(&["sessions", "--json"])?.stdout;
        if sessions.trim() != "[]" {
            left.push(sessions);
        }
        Ok(left)
    }
}
