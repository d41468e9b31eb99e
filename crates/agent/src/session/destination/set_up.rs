//! Pre-setup: contexts stand ready before their processes are here (MigrRDMA §3.2).

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use anyhow::Context;
use rustix::fs::OFlags;
use verbatim_channel::{ContextRecord, Endpoint, MEMORY_DIR, MadeAgain, MovedEndpoint, RoadMap};
use verbatim_device::control::QpType;
use verbatim_device::gids::counterpart;
use verbatim_session::Phase;

use super::Destination;
use crate::beneath;
use crate::faults::Point;
use crate::gids::gid_of;
use crate::instances::filling;
use crate::proto::{NewQp, PreSetupReply, PreSetupRequest};
use crate::session::made_again::{MadeRecord, ToMake};
use crate::session::{decode, encode};
use crate::standby::{Numbers, StandbyContext, Taken};

impl Destination {
    /// Makes the standby contexts.
    pub async fn pre_setup(&mut self, request: &PreSetupRequest) -> anyhow::Result<PreSetupReply> {
        self.begin(Phase::Prepare, "PreSetup", Point::DestinationPreSetup)
            .await?;
        let road_maps: Vec<RoadMap> = decode(&request.road_maps)?;
        match request.fill {
            true => self.expect_private()?,
            // Of an attempt that has given it up.
            false => {
                self.fills = false;
                filling::forget(&self.paths)?;
            }
        }
        let made_again = match request.made_again.is_empty() {
            true => Vec::new(),
            false => decode::<Vec<(u32, MadeAgain)>>(&request.made_again)?,
        };
        self.try_made_again(&road_maps, &made_again, &request.limits)
            .await?;
        if !request.made_ahead {
            self.ahead.clear();
        }
        let made_again: HashSet<_> = made_again.into_iter().map(|(pid, made)| (pid, made.id)).collect();
        let is_made_again = move |pid: u32, id: u32| made_again.contains(&(pid, id));
        self.to_make = ToMake::default();
        for road_map in &road_maps {
            let contexts = road_map.contexts.iter();
            let made = contexts.filter(|context| is_made_again(road_map.pid, context.id));
            let records = made.map(|context| MadeRecord::new(road_map.pid, context));
            self.to_make.records.extend(records);
        }
        let home = self.home()?;
        let (nic, name) = (self.agent.config.nic_socket(), home.record.name.to_string());
        let folder = home.paths.folder.clone();
        // Also a process without any context waits at the gate, and is to be claimed.
        let mut keys: BTreeMap<u32, Vec<_>> = road_maps.iter().map(|map| (map.pid, Vec::new())).collect();
        let numbers = match request.keep_numbers {
            true => Numbers::Kept,
            false => Numbers::New,
        };
        let needs = request.cm.clone();
        let built = tokio::task::spawn_blocking(move || {
            let (mut contexts, mut moved) = (Vec::new(), Vec::new());
            for road_map in &road_maps {
                let path = Path::new(MEMORY_DIR).join(road_map.pid.to_string());
                // Missing is right if nothing is adopted; if something is, the RNIC's request fails and says so.
                let memory = beneath::open(&folder, &path, OFlags::RDWR)?;
                for record in &road_map.contexts {
                    if is_made_again(road_map.pid, record.id) {
                        continue;
                    }
                    let context = StandbyContext::build(&nic, &name, record, memory.as_ref(), numbers)?;
                    moved.extend(moved_datagrams(record, &context));
                    contexts.push((road_map.pid, context));
                }
                for cm in needs.iter().filter(|cm| cm.pid == road_map.pid) {
                    // It comes last, as in what the process gives away.
                    let from = gid_of(cm.from.clone())?;
                    let context = StandbyContext::build_cm(&nic, &name, &cm.needs, from)?;
                    contexts.push((road_map.pid, context));
                }
            }
            anyhow::Ok((contexts, moved))
        });
        let built = built.await.context("making standby contexts panicked")?;
        (self.contexts, self.moved) = match built {
            Err(error) if error.is::<Taken>() => {
                return Ok(PreSetupReply {
                    taken: format!("on {}, {error}", self.agent.name()),
                    ..PreSetupReply::default()
                });
            }
            built => built?,
        };
        let mut qps = Vec::new();
        for (pid, context) in &self.contexts {
            keys.entry(*pid).or_default().extend_from_slice(context.keys());
            qps.extend(context.qps().iter().map(|qp| NewQp {
                pid: *pid,
                qpn: qp.qpn,
                physical_qpn: qp.physical_qpn,
                sq_psn: qp.sq_psn,
                gid: Vec::new(),
            }));
        }
        self.keys = keys.into_iter().collect();
        Ok(PreSetupReply {
            qps,
            keys: encode(&self.keys),
            taken: String::new(),
        })
    }
}

/// The datagram queue pairs of a context: under each GID that programs know, and by which they are reached here.
fn moved_datagrams(record: &ContextRecord, standby: &StandbyContext) -> Vec<MovedEndpoint> {
    let datagram = |qpn| {
        let found = record.qps.iter().find(|qp| qp.qpn == qpn);
        found.is_some_and(|qp| qp.qp_type == QpType::Ud)
    };
    let here = standby.gids();
    let ways: Vec<_> = record
        .gids
        .iter()
        .filter_map(|known| Some((*known, here[counterpart(&record.gids, *known, here)?])))
        .collect();
    let qps = standby.qps().iter().filter(|qp| datagram(qp.qpn));
    let moved = qps.flat_map(|qp| {
        ways.iter().map(|(known, now)| MovedEndpoint {
            known: Endpoint {
                gid: *known,
                qpn: qp.qpn,
            },
            now: Endpoint {
                gid: *now,
                qpn: qp.physical_qpn,
            },
            moves: record.moves + 1,
        })
    });
    moved.collect()
}
