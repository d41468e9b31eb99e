//! Which of two programs of librdmacm is first: a server listens before its client asks.
//!
//! Nothing tells from outside when a program listens by rdma_cm, and a client that is too early is rejected. To start it again does not
//! help everywhere: of several connections some may come in time, which the next client then lacks; and perftest's server listens
//! twice, for one client, which may be too early the second time. So a library is preloaded (`tests/shims/in_turn.c`).

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};

use crate::instance::Instance;
use crate::lab::TestLab;
use crate::running::{Finished, Running, told};
use crate::shim::Shim;
use crate::wait::{eventually, patience};

/// How long a client may take, its waiting included.
const LIMIT: Duration = Duration::from_secs(60);

/// What a server gets to end after its client.
const GRACE: Duration = Duration::from_secs(10);

/// How long a server may take until it listens.
const LISTENS_WITHIN: Duration = Duration::from_secs(20);

/// Where an instance has its turns, in a `/tmp` of its own.
const INSIDE: &str = "/tmp";

const FOLDER: &str = "VERBATIM_TURNS";
const LISTENS: &str = "VERBATIM_LISTENS";

/// A host, and what runs there.
pub type Side<'a> = (&'a str, &'a [&'a str]);

/// The turns of a server and its client. The library goes with it: a program that has it moves only as long as this is there.
pub struct Turns {
    shim: Shim,
    listens: u32,
}

impl Turns {
    /// Of a server that listens so often for a client.
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
        // Both sides' words, whoever failed; a server whose client has failed may wait for ever.
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

    /// Waits until a server in an instance has listened so often.
    pub fn listens(server: &Instance<'_>, turn: u32) -> anyhow::Result<()> {
        let said = turn_of(server, turn)?;
        let listens = eventually(
            &format!("that {} listens", server.name()),
            patience(LISTENS_WITHIN),
            || Ok(said.exists().then_some(())),
        );
        listens.with_context(|| server.output().unwrap_or_default())
    }

    /// Lets a client in an instance ask for its connections, each when the server listens for it.
    pub fn take(&self, server: &Instance<'_>, client: &Instance<'_>) -> anyhow::Result<()> {
        for turn in 1..=self.listens {
            Self::listens(server, turn)?;
            std::fs::write(turn_of(client, turn)?, "")?;
        }
        Ok(())
    }
}

/// The file that says it, inside an instance.
fn turn_of(instance: &Instance<'_>, turn: u32) -> anyhow::Result<PathBuf> {
    instance.path(&format!("{INSIDE}/listens-{turn}"))
}
