//! An RNIC that dies and is started again while containers run: their programs can open the device again. While there is no RNIC
//! they are told so, at once.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, ensure};
use verbatim_e2e::{Instance, TestLab, eventually, left_behind};

use crate::Test;

const LIMIT: Duration = Duration::from_secs(60);

/// What `timeout` kills a program after that waits for an RNIC which is not there, and how that shows.
const PATIENCE_S: u32 = 20;
const KILLED: i32 = 137;

/// Longer than a look takes on a busy machine, and far shorter than [`PATIENCE_S`].
const AT_ONCE: Duration = Duration::from_secs(5);

/// Looks in a row without a failure, after one that has succeeded.
const SOME: usize = 5;

/// All of them.
pub fn tests() -> Vec<Test> {
    vec![
        Test::new(
            "rnic_again::containers_open_it_again",
            &["src"],
            containers_open_it_again,
        ),
        Test::new(
            "rnic_again::an_agent_starts_before_it",
            &["src"],
            an_agent_starts_before_it,
        ),
        Test::new(
            "rnic_again::an_agent_alone_is_not_noticed",
            &["src"],
            an_agent_alone_is_not_noticed,
        ),
    ]
}

/// A container whose program opens the device again and again.
struct Looker<'a> {
    instance: Instance<'a>,
    /// What it writes, which no agent is needed to read.
    output: PathBuf,
}

/// Once: the status of `ibv_devinfo`, how long it took, and what it said.
#[derive(Debug)]
struct Look {
    status: i32,
    took: Duration,
    said: String,
}

impl<'a> Looker<'a> {
    fn start(lab: &'a TestLab) -> anyhow::Result<Self> {
        let script = format!(
            "while :; do
                begin=$(date +%s%N)
                # The shell says on standard error that one was killed.
                {{ said=$(timeout -s KILL {PATIENCE_S} ibv_devinfo 2>&1); status=$?; }} 2>/dev/null
                echo $status $((($(date +%s%N) - begin) / 1000000)) $said
                sleep 0.02
            done"
        );
        let looker = Self {
            instance: lab.instance("src", "looker", &["sh", "-c", &script])?,
            output: lab.path("src", "/run/verbatim/instances/looker/stdout")?,
        };
        looker.sees(true)?;
        Ok(looker)
    }

    /// All looks so far.
    fn looks(&self) -> anyhow::Result<Vec<Look>> {
        let output = std::fs::read_to_string(&self.output)?;
        // The last line may not be complete yet.
        let lines = output.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        let look = |line: &str| -> anyhow::Result<Look> {
            let mut words = line.split_whitespace();
            let mut word = || words.next().context("a line that is too short");
            Ok(Look {
                status: word()?.parse()?,
                took: Duration::from_millis(word()?.parse()?),
                said: words.collect::<Vec<_>>().join(" "),
            })
        };
        lines
            .map(|line| look(line).with_context(|| line.to_owned()))
            .collect()
    }

    /// Waits until some looks in a row succeed, or fail; none that were made meanwhile may have taken long.
    fn sees(&self, device: bool) -> anyhow::Result<()> {
        let before = self.looks()?.len();
        let what = format!(
            "a container that {} its device",
            if device { "opens" } else { "cannot open" }
        );
        let looks = eventually(&what, LIMIT, || {
            let looks = self.looks()?.split_off(before);
            let such = |look: &&Look| (look.status == 0) == device;
            Ok((looks.iter().rev().take_while(such).count() >= SOME).then_some(looks))
        })
        .with_context(|| format!("{:?}", self.looks()))?;
        let mut in_between = 0;
        for look in looks {
            ensure!(
                look.status != KILLED && look.took < AT_ONCE,
                "it has waited: {look:?}"
            );
            // The RNIC died after this one had found it, and before it had opened it.
            let found_it = look.status != 0 && look.said.contains("Failed to open device");
            in_between += usize::from(found_it);
            let says_why = found_it || look.said.contains("No IB devices found");
            ensure!(look.status == 0 || says_why, "{look:?}");
        }
        ensure!(
            in_between <= 1,
            "{in_between} looks have found an RNIC that was dead"
        );
        Ok(())
    }

    /// It ends, and nothing is left of it.
    fn end(self, lab: &TestLab) -> anyhow::Result<()> {
        let name = self.instance.name();
        lab.ask(&["stop", name])?;
        eventually("a host without leftovers", LIMIT, || {
            Ok(left_behind(lab, "src", name)?.is_empty().then_some(()))
        })
        .with_context(|| format!("{:?}", left_behind(lab, "src", name)))
    }
}

fn containers_open_it_again(lab: &TestLab) -> anyhow::Result<()> {
    let looker = Looker::start(lab)?;
    for _ in 0..3 {
        lab.lab().kill("src", "nic")?;
        looker.sees(false)?;
        lab.lab().start("src", "nic")?;
        looker.sees(true)?;
    }
    // A new one at the same time.
    lab.lab().kill("src", "nic")?;
    let refused = lab.refused(&["run", "--host", "src", "--name", "early", "--", "true"])?;
    ensure!(refused.contains("cannot reach the software RNIC"), "{refused}");
    lab.lab().start("src", "nic")?;
    lab.instance("src", "late", &["ibv_devinfo"])?.succeed(LIMIT)?;
    lab.ask(&["stop", "late"])?;
    looker.sees(true)?;
    looker.end(lab)
}

fn an_agent_starts_before_it(lab: &TestLab) -> anyhow::Result<()> {
    let looker = Looker::start(lab)?;
    lab.lab().kill("src", "agent")?;
    lab.lab().kill("src", "nic")?;
    looker.sees(false)?;
    lab.lab().start("src", "agent")?;
    // The instance is the new agent's although there is no RNIC.
    ensure!(looker.instance.row()?.state == "running");
    looker.sees(false)?;
    lab.lab().start("src", "nic")?;
    looker.sees(true)?;
    // The same again, with the agent after the RNIC.
    lab.lab().kill("src", "agent")?;
    lab.lab().kill("src", "nic")?;
    lab.lab().start("src", "nic")?;
    looker.sees(false)?;
    lab.lab().start("src", "agent")?;
    looker.sees(true)?;
    looker.end(lab)
}

fn an_agent_alone_is_not_noticed(lab: &TestLab) -> anyhow::Result<()> {
    let looker = Looker::start(lab)?;
    let before = looker.looks()?.len();
    for _ in 0..3 {
        lab.lab().kill("src", "agent")?;
        lab.lab().start("src", "agent")?;
        looker.sees(true)?;
    }
    for look in looker.looks()?.split_off(before) {
        ensure!(look.status == 0 && look.took < AT_ONCE, "{look:?}");
    }
    looker.end(lab)
}
