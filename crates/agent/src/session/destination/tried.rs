//! Contexts that the instance's processes will make again here: tried before the decision, since nothing can be refused after it. What can be
//! gone on with is theirs then.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::Path;

use anyhow::{Context, bail};
use rustix::fs::OFlags;
use verbatim_channel::{MEMORY_DIR, MadeAgain, RoadMap, ahead};

use super::Destination;
use crate::beneath;
use crate::proto::ProcessLimits;
use crate::trial::{self, Ahead, Limits, Tried};

impl Destination {
    /// Has the objects of these contexts made, while the program still runs where it is. What its processes can go on with is kept, the rest
    /// is destroyed again. An error names what cannot be made.
    pub(super) async fn try_made_again(
        &mut self,
        road_maps: &[RoadMap],
        made_again: &[(u32, MadeAgain)],
        limits: &[ProcessLimits],
    ) -> anyhow::Result<()> {
        self.ahead.clear();
        if made_again.is_empty() {
            return Ok(());
        }
        let limits: Vec<_> = limits.iter().map(Limits::from).collect();
        let all = tried(road_maps, made_again, &limits);
        let home = self.home()?;
        let (config, record) = (self.agent.config.clone(), home.record.clone());
        let folder = home.paths.folder.clone();
        let outcome = tokio::task::spawn_blocking(move || {
            let of = (&record.name, &record.workload);
            let mut ahead = Vec::new();
            for (pid, tried) in &all {
                let path = Path::new(MEMORY_DIR).join(pid.to_string());
                let memory = beneath::open(&folder, &path, OFlags::RDWR)?;
                match trial::run(&config, of, tried, memory.as_ref()) {
                    Ok(made) if made.contexts.is_empty() => {}
                    Ok(made) => ahead.push((*pid, made)),
                    Err(error) => bail!("process {pid} would lose its RNIC here: {error:#}"),
                }
            }
            anyhow::Ok(ahead)
        });
        self.ahead = outcome
            .await
            .context("trying objects panicked")??
            .into_iter()
            .collect();
        if !self.ahead.is_empty() {
            // The kernel holds pages of the file: a hole would take them from it, and the RNIC would write where nobody looks.
            self.runtime.write_zeroes();
        }
        Ok(())
    }
}

/// What goes with [`verbatim_channel::Order::MakeAgain`] to a process: the terminal, and what was made ahead. Without the terminal, which older
/// libraries take for the first, nothing else goes.
pub(super) fn handed(dead: Option<OwnedFd>, ahead: Option<Ahead>) -> Vec<OwnedFd> {
    let mut fds: Vec<_> = dead.into_iter().collect();
    if let (1, Some(ahead)) = (fds.len(), ahead) {
        match ahead::pack(&ahead.contexts) {
            Ok(packed) => fds.extend(std::iter::once(packed).chain(ahead.descriptors)),
            Err(error) => tracing::warn!("what was made ahead cannot be handed over: {error}"),
        }
    }
    fds
}

/// By process, what it will make.
fn tried(road_maps: &[RoadMap], made_again: &[(u32, MadeAgain)], limits: &[Limits]) -> Vec<(u32, Tried)> {
    let devices: HashMap<_, _> = made_again
        .iter()
        .map(|(pid, made)| ((*pid, made.id), made.device.as_str()))
        .collect();
    let of_process = |road_map: &RoadMap| {
        let contexts = road_map.contexts.iter().filter_map(|context| {
            let device = devices.get(&(road_map.pid, context.id))?;
            Some(((*device).to_owned(), context.clone()))
        });
        let contexts: Vec<_> = contexts.collect();
        let limits = limits.iter().find(|limits| limits.pid == road_map.pid);
        let limits = limits.cloned();
        (!contexts.is_empty()).then_some((road_map.pid, Tried { limits, contexts }))
    };
    road_maps.iter().filter_map(of_process).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use verbatim_channel::ContextRecord;

    #[test]
    fn each_process_makes_its_own_and_nothing_else() {
        let context = |id| ContextRecord {
            id,
            ..ContextRecord::default()
        };
        let road_map = |pid, contexts| RoadMap {
            pid,
            contexts,
            ..RoadMap::default()
        };
        let made = |id, device: &str| MadeAgain {
            id,
            device: device.to_owned(),
            driver: None,
        };
        let limits = Limits {
            pid: 7,
            memlock: None,
            capabilities: 0,
        };
        let road_maps = [
            road_map(7, vec![context(0), context(1)]),
            road_map(8, vec![context(0)]),
            road_map(9, Vec::new()),
        ];
        let found = tried(
            &road_maps,
            &[(7, made(1, "mlx5_0")), (9, made(0, "mlx5_0"))],
            std::slice::from_ref(&limits),
        );
        let [(7, only)] = &found[..] else {
            panic!("{found:?}")
        };
        assert_eq!(only.limits.as_ref(), Some(&limits));
        assert_eq!(only.contexts[0].0, "mlx5_0");
        assert_eq!((only.contexts.len(), only.contexts[0].1.id), (1, 1));
    }
}
