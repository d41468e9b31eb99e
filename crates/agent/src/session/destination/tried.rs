//! Contexts that the instance's processes will make again here: tried before the decision, since nothing can be refused after it.

use std::collections::HashMap;
use std::path::Path;

use anyhow::{Context, bail};
use rustix::fs::OFlags;
use verbatim_channel::{MEMORY_DIR, MadeAgain, RoadMap};

use super::Destination;
use crate::memory::beneath;
use crate::proto::ProcessLimits;
use crate::trial::{self, Limits, Tried};

impl Destination {
    /// Has the objects of these contexts made and destroyed again, while the program still runs where it is. An error names what cannot be
    /// made.
    pub(super) async fn try_made_again(
        &self,
        road_maps: &[RoadMap],
        made_again: &[(u32, MadeAgain)],
        limits: &[ProcessLimits],
    ) -> anyhow::Result<()> {
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
            for (pid, tried) in &all {
                let path = Path::new(MEMORY_DIR).join(pid.to_string());
                let memory = beneath::open(&folder, &path, OFlags::RDWR)?;
                if let Err(error) = trial::run(&config, of, tried, memory.as_ref()) {
                    bail!("process {pid} would lose its RNIC here: {error:#}");
                }
            }
            anyhow::Ok(())
        });
        outcome.await.context("trying objects panicked")?
    }
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
