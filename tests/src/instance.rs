//! An instance: a program in a container, wherever it is.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use serde::Deserialize;

use crate::lab::TestLab;
use crate::migration::Migration;
use crate::running::Finished;
use crate::wait::patience;

/// How long a migration may take on a slow machine, all retries and timeouts included.
const MIGRATION_LIMIT: Duration = Duration::from_secs(60);

/// A started instance. It ends with its lab.
pub struct Instance<'a> {
    lab: &'a TestLab,
    name: String,
}

/// A line of `verbatim ps --json`.
#[derive(Debug, Clone, Deserialize)]
pub struct Row {
    /// The instance's name.
    pub name: String,
    /// Where it is.
    pub host: String,
    /// Its address.
    pub address: String,
    /// `running`, `moving`, `exited`, `in doubt` or `recovering`.
    pub state: String,
    /// Its first process, as its host numbers it.
    pub pid: Option<i32>,
    /// How it ended.
    pub exit_status: Option<i32>,
    /// Connected queue pairs.
    pub connections: u32,
    /// Of them, those that an operator has paused.
    pub paused: u32,
    /// In bytes: memory that it lacks while it runs.
    pub missing_bytes: Option<u64>,
    /// The host that has it.
    pub missing_from: Option<String>,
    /// Troubles of a virtual machine that is there.
    #[serde(default)]
    pub troubles: Vec<String>,
}

impl<'a> Instance<'a> {
    /// `options` begin with the one that names it.
    pub fn run(lab: &'a TestLab, host: &str, options: &[&str], what: &[&str]) -> anyhow::Result<Self> {
        let name = options.get(1).context("an instance has a name")?;
        lab.ask(&[&["run", "--host", host], options, what].concat())?;
        Ok(Self::of(lab, name))
    }

    /// One that is there already.
    pub(crate) fn of(lab: &'a TestLab, name: &str) -> Self {
        Self {
            lab,
            name: name.to_owned(),
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How it is now.
    pub fn row(&self) -> anyhow::Result<Row> {
        let listed = self.lab.ask(&["ps", "--json"])?;
        let rows: Vec<Row> =
            serde_json::from_str(&listed.stdout).context("`verbatim ps --json` prints no JSON")?;
        let mut mine: Vec<_> = rows.into_iter().filter(|row| row.name == self.name).collect();
        // A frozen copy is in doubt until the other host says whether the instance runs there.
        if mine.len() > 1 {
            mine.retain(|row| !["in doubt", "recovering"].contains(&row.state.as_str()));
        }
        match (mine.pop(), mine.pop()) {
            (Some(row), None) => Ok(row),
            (None, _) => bail!("`verbatim ps` does not show {}", self.name),
            (Some(one), Some(other)) => {
                bail!("{} is on {} and on {} at once", self.name, one.host, other.host)
            }
        }
    }

    /// Its own address.
    pub fn address(&self) -> anyhow::Result<String> {
        Ok(self.row()?.address)
    }

    fn pid(&self, row: &Row) -> anyhow::Result<i32> {
        row.pid.with_context(|| {
            format!(
                "{} has ended with status {:?}: {}",
                self.name,
                row.exit_status,
                self.output().unwrap_or_default()
            )
        })
    }

    /// A path inside the instance, as this process reaches it.
    pub fn path(&self, path: &str) -> anyhow::Result<PathBuf> {
        let row = self.row()?;
        let pid = self.pid(&row)?;
        self.lab.path(&row.host, &format!("/proc/{pid}/root{path}"))
    }

    /// Waits until it listens on a TCP port.
    pub fn listens(&self, port: u16) -> anyhow::Result<()> {
        let row = self.row()?;
        let pid = self.pid(&row)?;
        self.lab
            .listens(&row.host, pid, port)
            .with_context(|| self.output().unwrap_or_default())
    }

    /// Moves it; whatever the outcome, it is told.
    pub fn migrate(&self, to: &str) -> anyhow::Result<Migration> {
        self.migrate_with(to, &[])
    }

    /// The same with more options.
    pub fn migrate_with(&self, to: &str, options: &[&str]) -> anyhow::Result<Migration> {
        self.migrate_within(MIGRATION_LIMIT, to, options)
    }

    /// The same where it may take longer than others: a large memory goes slowly beside traffic.
    pub fn migrate_within(&self, limit: Duration, to: &str, options: &[&str]) -> anyhow::Result<Migration> {
        let finished = self
            .lab
            .verbatim(&[&["migrate", &self.name, "--to", to, "--json"], options].concat())?
            .wait(patience(limit))?;
        Migration::of(&finished)
    }

    /// Moves it, and fails if that does.
    pub fn moves(&self, to: &str) -> anyhow::Result<Migration> {
        let migration = self.migrate(to)?;
        migration.must_be_committed()?;
        let row = self.row()?;
        if row.host != to {
            bail!("{} was moved to {to} and is on {}", self.name, row.host);
        }
        Ok(migration)
    }

    /// Asks its program to end (SIGINT).
    pub fn interrupt(&self) -> anyhow::Result<()> {
        self.signal("INT")
    }

    fn signal(&self, signal: &str) -> anyhow::Result<()> {
        let row = self.row()?;
        let pid = self.pid(&row)?;
        self.lab
            .start_plain(&row.host, &["kill", &format!("-{signal}"), &pid.to_string()])?
            .succeed(Duration::from_secs(10))?;
        Ok(())
    }

    /// Kills its program.
    pub fn kill(&self) -> anyhow::Result<()> {
        self.signal("KILL")
    }

    /// What its program has written.
    pub fn output(&self) -> anyhow::Result<String> {
        Ok(self.lab.ask(&["logs", &self.name])?.stdout)
    }

    /// Waits for its end, which must be a good one; what it has written, where `stdout` is standard error too.
    pub fn succeed(&self, limit: Duration) -> anyhow::Result<Finished> {
        let waited = self.lab.verbatim(&["wait", &self.name])?.wait(limit);
        let output = self.output()?;
        match waited {
            Ok(waited) if waited.code == 0 => Ok(Finished {
                what: self.name.clone(),
                stdout: output,
                ..waited
            }),
            Ok(waited) => bail!(
                "{} ended with status {}{}:\n{output}",
                self.name,
                waited.code,
                waited.output()
            ),
            Err(error) => Err(error.context(format!("{} wrote:\n{output}", self.name))),
        }
    }
}

/// What the two ends of a connection have written so far.
pub fn words(client: &Instance<'_>, server: &Instance<'_>) -> String {
    let words = |instance: &Instance| instance.output().unwrap_or_else(|error| format!("{error:#}"));
    format!(
        "the client wrote {:?}, the server {:?}",
        words(client),
        words(server)
    )
}
