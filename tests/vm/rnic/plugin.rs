//! CRIU and a container that has an RNIC open: with our plugin it is written down and goes on, or is restored with placeholders.
//!
//! The story is told in a machine, by what the agent does with a container (`verbatim_container`), but without an agent: that one
//! refuses a program which uses an RNIC past its guest library, as the one here does.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use verbatim_container::{
    Bundle, BundleConfig, Checkpoint, CheckpointConfig, ContainerName, Host, HostConfig, Link, Network,
    NetworkConfig, Restore, RestoreConfig, Workload,
};
use verbatim_e2e::eventually;

use crate::built;

/// How long the program may take to answer on an emulated processor.
const LIMIT: Duration = Duration::from_secs(30);

/// Where everything is, in the machine.
const FOLDER: &str = "/run/rnic";

/// The name of the memfd that stands for mappings (`crates/criu-plugin`).
const PLACEHOLDER: &str = "/memfd:verbatim-uverbs";

struct Story {
    host: Host,
    name: ContainerName,
    network: Network,
    bundle: Bundle,
}

/// The whole of it.
pub fn tell() -> anyhow::Result<()> {
    rustix::process::set_child_subreaper(Pid::from_raw(1))?;
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(async {
        let story = Story::begin().await?;
        let pid = story.start().await?;
        story.goes_on(pid).context("before any dump")?;
        story.is_refused_without_the_plugin().await?;
        story.goes_on(pid).context("after a dump that was refused")?;
        story.dump("first").await?.abort().await?;
        story.goes_on(pid).context("after a dump that was given up")?;
        let mut dumped = story.dump("second").await?;
        dumped.hold().await?;
        dumped.commit().await?;
        let pid = story.restore("second").await?;
        story.has_placeholders(pid)
    })
}

impl Story {
    async fn begin() -> anyhow::Result<Self> {
        let folder = Path::new(FOLDER);
        let name = ContainerName::new("traffic")?;
        let host = Host::open(HostConfig {
            state: folder.join("containers"),
            proxy: built("verbatim")?,
            descriptors: None,
            plugin: built("libverbatim_criu_plugin.so")?,
        })
        .await?;
        let instance = folder.join("instance");
        std::fs::create_dir_all(&instance)?;
        std::fs::copy(built("../vm-probes/traffic")?, instance.join("traffic"))?;
        std::fs::set_permissions(instance.join("traffic"), PermissionsExt::from_mode(0o755))?;
        std::fs::write(instance.join("stdout"), "")?;
        let network = NetworkConfig {
            path: folder.join("net"),
            address: "10.78.9.1".parse()?,
            prefix: 16,
            gateway: None,
            bridge: "br0".to_owned(),
            mtu: None,
            tap: false,
            further: None,
        };
        let network = Network::create(&network, Link::Attached)?;
        let bundle = BundleConfig {
            name: name.clone(),
            dir: folder.join("bundle"),
            runtime: instance,
            netns: network.path().to_owned(),
            cgroup_parent: "/rnic".into(),
            preload: None,
            rnics: vec!["rxe0".to_owned()],
            devices: Vec::new(),
            folders: Vec::new(),
        };
        let workload = Workload::Command {
            args: ["/run/verbatim/traffic", "/run/verbatim/told"]
                .map(ToOwned::to_owned)
                .to_vec(),
            env: Vec::new(),
            cwd: "/".into(),
            binds: Vec::new(),
        };
        let bundle = Bundle::create(&bundle, &workload)?;
        Ok(Self {
            host,
            name,
            network,
            bundle,
        })
    }

    fn told(&self) -> PathBuf {
        Path::new(FOLDER).join("instance/told")
    }

    async fn start(&self) -> anyhow::Result<i32> {
        let init = self.host.runc().run(&self.name, self.bundle.path()).await?;
        let ready = eventually("the program is ready", LIMIT, || {
            let told = std::fs::read_to_string(self.told()).unwrap_or_default();
            Ok(told.starts_with("ready").then_some(()))
        });
        let output = std::fs::read_to_string(Path::new(FOLDER).join("instance/stdout"))?;
        ready.with_context(|| format!("it wrote {output:?}"))?;
        Ok(init.pid())
    }

    /// What the program says now.
    fn ask(&self, pid: i32) -> anyhow::Result<String> {
        let _ = std::fs::remove_file(self.told());
        kill_process(Pid::from_raw(pid).context("a number")?, Signal::USR1)?;
        eventually("an answer of the program", LIMIT, || {
            Ok(std::fs::read_to_string(self.told()).ok())
        })
    }

    fn rounds(&self, pid: i32) -> anyhow::Result<u64> {
        let said = self.ask(pid)?;
        let rounds = said
            .strip_prefix("rounds ")
            .and_then(|number| number.trim().parse().ok());
        rounds.with_context(|| format!("the program says {said:?}"))
    }

    /// Its traffic does.
    fn goes_on(&self, pid: i32) -> anyhow::Result<()> {
        let before = self.rounds(pid)?;
        eventually("more rounds", LIMIT, || {
            Ok((self.rounds(pid)? > before).then_some(()))
        })
    }

    fn images(&self, which: &str) -> PathBuf {
        Path::new(FOLDER).join("images").join(which)
    }

    async fn prepare(&self, which: &str, rnics: bool) -> anyhow::Result<Checkpoint> {
        let config = CheckpointConfig {
            name: self.name.clone(),
            images: self.images(which),
            work: Path::new(FOLDER).join("work"),
            parent: None,
            lazy: false,
            network: Some(self.network.path().to_owned()),
            rnics,
            terminals: true,
            stop_limit: None,
        };
        Ok(Checkpoint::prepare(&self.host, config).await?)
    }

    async fn dump(&self, which: &str) -> anyhow::Result<verbatim_container::Dumped> {
        Ok(self.prepare(which, true).await?.freeze_and_dump().await?)
    }

    async fn is_refused_without_the_plugin(&self) -> anyhow::Result<()> {
        match self.prepare("without", false).await?.freeze_and_dump().await {
            Ok(_) => bail!("CRIU has written down what it cannot"),
            Err(error) => {
                let words = error.to_string();
                // The kernel gives the device's number out; the first that CRIU comes to is a mapping.
                let known = ["uverbs", "mapping", "chr "]
                    .iter()
                    .any(|word| words.contains(word));
                ensure!(known, "it was refused for another reason: {words}");
                Ok(())
            }
        }
    }

    async fn restore(&self, which: &str) -> anyhow::Result<i32> {
        let config = RestoreConfig {
            name: self.name.clone(),
            bundle: self.bundle.path().to_owned(),
            images: self.images(which),
            work: Path::new(FOLDER).join("work"),
            lazy: false,
            network: self.network.path().to_owned(),
            rnics: true,
        };
        let restored = Restore::prepare(&self.host, config).await?.restore().await?;
        let (init, runc) = restored.resume().await?.settled().await;
        runc?;
        Ok(init.pid())
    }

    fn has_placeholders(&self, pid: i32) -> anyhow::Result<()> {
        let said = self.ask(pid)?;
        ensure!(said.starts_with("placeholders"), "the program says {said:?}");
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
        ensure!(
            maps.contains(PLACEHOLDER) && !maps.contains("infiniband/uverbs"),
            "its mappings are\n{maps}"
        );
        let links = std::fs::read_dir(format!("/proc/{pid}/fd"))?.flatten();
        let targets: Vec<_> = links
            .filter_map(|link| std::fs::read_link(link.path()).ok())
            .collect();
        let eventfds = targets
            .iter()
            .filter(|target| target.ends_with("anon_inode:[eventfd]"));
        // The context, its asynchronous events, the completion channel.
        ensure!(eventfds.count() == 3, "its descriptors are {targets:?}");
        Ok(())
    }
}
