//! Addresses of instances that have left and ended elsewhere: they are given again when no other is free.
//!
//! No message says that an instance has ended elsewhere. So the hosts are asked which instances they have, and only when none of
//! this host's addresses is free. A host that does not answer, or is of a release that does not say, may have any: then all stay taken.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, bail};
use futures_util::future::try_join_all;

use crate::agent::Agent;
use crate::instances::{State, recovery};
use crate::proto::{GidsReply, GidsRequest};
use crate::session::told;

/// How long a host may take to answer.
const LIMIT: Duration = Duration::from_secs(5);

/// What is on its way between two hosts is seen at one of them the second time.
const ROUNDS: usize = 2;

impl Agent {
    /// Names of the instances that are here, or are being made or cleared here.
    pub fn instance_names(self: &std::sync::Arc<Self>) -> BTreeSet<String> {
        let known = self.instances.all().into_iter();
        let here = known.filter(|instance| !matches!(instance.state(), State::MovedTo(_)));
        let mut names: BTreeSet<_> = here.map(|instance| instance.name().to_owned()).collect();
        let unsettled = recovery::unsettled(self).into_iter();
        names.extend(unsettled.map(|expected| expected.record.name.to_string()));
        names.extend(self.instances.reserved_names());
        names
    }

    /// Gives addresses back that went away with instances which no host has any more. An error says which host may have some.
    pub async fn vacate(self: &std::sync::Arc<Self>) -> anyhow::Result<()> {
        let mut gone = self.instances.away.names();
        for _ in 0..ROUNDS {
            let had = self.instance_names();
            gone.retain(|name| !had.contains(name));
            let hosts = self.peers.directory().all().iter();
            let others = hosts.filter(|host| host.name != self.name());
            let asked = try_join_all(others.map(|host| self.instances_of(&host.name))).await?;
            gone.retain(|name| !asked.iter().any(|names| names.contains(name)));
        }
        for name in gone {
            if let Some(instance) = self.instances.get(&name)
                && matches!(instance.state(), State::MovedTo(_))
            {
                self.instances.remove(&instance);
            }
            self.instances.away.ended(&name)?;
        }
        Ok(())
    }

    async fn instances_of(&self, host: &str) -> anyhow::Result<Vec<String>> {
        let asked = tokio::time::timeout(LIMIT, async {
            let mut client = self.peers.connect(host).await?;
            let request = GidsRequest { instances: true };
            told(host, "tell its instances", client.gids(request).await)
        });
        let GidsReply {
            instances,
            names_instances,
            ..
        } = asked
            .await
            .with_context(|| format!("{host} does not tell its instances within {} s", LIMIT.as_secs()))??;
        if !names_instances {
            bail!("the agent of {host} does not tell its instances; upgrade it");
        }
        Ok(instances)
    }
}
