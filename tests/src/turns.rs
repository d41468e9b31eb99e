//! The order of two programs of librdmacm: a server listens before its client connects.
//!
//! It cannot be seen from outside when a program listens by rdma_cm, and a client that is too early is
//! rejected. Starting the client again does not always help. Of its connections some may be in time, and then
//! the next client lacks them. And perftest's server listens twice for one client, which may be too early the
//! second time. So a library is preloaded into both (`tests/shims/in_turn.c`).

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};

use crate::instance::Instance;
use crate::lab::TestLab;
use crate::running::{Finished, Running, told};
use crate::shim::Shim;
use crate::wait::{eventually, patience};

/// Limit for a client, with its wait.
const LIMIT: Duration = Duration::from_secs(60);

/// Limit for a server to end after its client.
const GRACE: Duration = Duration::from_secs(10);

/// Limit for a server to listen.
const LISTENS_WITHIN: Duration = Duration::from_secs(20);

/// Folder of the turns inside an instance, in its own `/tmp`.
const INSIDE: &str = "/tmp";

const FOLDER: &str = "VERBATIM_TURNS";
const LISTENS: &str = "VERBATIM_LISTENS";

/// A host, and the program that runs there.
pub type Side<'a> = (&'a str, &'a [&'a str]);

/// The turns of a server and its client. The library is removed with this: a program that has it moves only
/// while this exists.
pub struct Turns {
    shim: Shim,
    listens: u32,
}

impl Turns {
    /// For a server that listens that many times for a client.
    pub fn of(listens: u32) -> anyhow::Result<Self> {
        let shim = Shim::build("in_turn")?;
        let folder = shim.folder().display().to_string();
        let shim = shim.with(FOLDER, folder).with(LISTENS, listens.to_string());
        Ok(Self { shim, listens })
    }

    /// Starts one of them in a host.
    pub fn start(&self, lab: &TestLab, host: &str, argv: &[&str]) -> anyhow::Result<Running> {
        lab.start_preloaded(host, argv, Some(&self.shim))
    }

    /// Runs the server and the client, each in its host. Both must end well.
    pub fn meet(
        self,
        lab: &TestLab,
        server: Side<'_>,
        client: Side<'_>,
    ) -> anyhow::Result<(Finished, Finished)> {
        let server = self.start(lab, server.0, server.1)?;
        let client = self.start(lab, client.0, client.1)?.wait(patience(LIMIT));
        // An error shows the output of both; a server may wait for ever after its client has failed.
        match (client, server.wait(patience(GRACE))) {
            (Ok(client), Ok(server)) if client.code == 0 && server.code == 0 => Ok((client, server)),
            (client, server) => bail!("{}\n{}", told(client), told(server)),
        }
    }

    /// Starts one of them in an instance. A client then waits for [`Self::take`].
    pub fn instance<'a>(
        &self,
        lab: &'a TestLab,
        host: &str,
        name: &str,
        argv: &[&str],
    ) -> anyhow::Result<Instance<'a>> {
        let settings = [
            format!("LD_PRELOAD={}", self.shim.path().display()),
            format!("{FOLDER}={INSIDE}"),
            format!("{LISTENS}={}", self.listens),
        ];
        let settings = settings.iter().flat_map(|setting| ["--env", setting]);
        let options: Vec<_> = ["--name", name]
            .into_iter()
            .chain(settings)
            .chain(["--"])
            .collect();
        Instance::run(lab, host, &options, argv)
    }

    /// Waits until a server in an instance has listened for that turn.
    pub fn listens(server: &Instance<'_>, turn: u32) -> anyhow::Result<()> {
        let said = turn_of(server, turn)?;
        let listens = eventually(
            &format!("that {} listens", server.name()),
            patience(LISTENS_WITHIN),
            || Ok(said.exists().then_some(())),
        );
        listens.with_context(|| server.output().unwrap_or_default())
    }

    /// Lets a client in an instance connect, each time after the server has listened for it.
    pub fn take(&self, server: &Instance<'_>, client: &Instance<'_>) -> anyhow::Result<()> {
        for turn in 1..=self.listens {
            Self::listens(server, turn)?;
            std::fs::write(turn_of(client, turn)?, "")?;
        }
        Ok(())
    }
}

/// The file of a turn inside an instance, made when the server listens.
fn turn_of(instance: &Instance<'_>, turn: u32) -> anyhow::Result<PathBuf> {
    instance.path(&format!("{INSIDE}/listens-{turn}"))
}
