//! The road map: what a process has made, told to its agent (MigrRDMA §3.2).
//!
//! The objects are the record; nothing is kept beside them. A version counts every change, so that the agent can see
//! whether what it was told still holds.

use std::sync::Arc;

use verbatim_channel::{CM_VERSION, ContextRecord, MadeAgain, RoadMap, SegmentRecord};
use verbatim_seqpacket::MAX_FDS;

use crate::context::Context;
use crate::described;
use crate::dump;
use crate::error::VerbsError;
use crate::process::Process;
use crate::session;

/// Everything that `process` has made, told in this version of the contract.
pub fn describe(process: &Process, contract: u32) -> Result<RoadMap, VerbsError> {
    // Read first: a change while the rest is read makes the answer look old, never new.
    let version = process.road_map_version();
    let contexts = process.contexts();
    let mut blockers: Vec<_> = blocker_of_old_agent(process, contract).into_iter().collect();
    if contexts.len() > MAX_FDS {
        blockers.push(format!(
            "{} opened devices; at most {MAX_FDS} can be moved",
            contexts.len()
        ));
    }
    let contexts = contexts
        .iter()
        .map(|context| describe_context(context, &mut blockers))
        .collect::<Result<_, _>>()?;
    Ok(RoadMap {
        pid: std::process::id(),
        version,
        contexts,
        blockers,
    })
}

fn describe_context(context: &Context, blockers: &mut Vec<String>) -> Result<ContextRecord, VerbsError> {
    blockers.extend(blockers_of(context));
    if context.is_dead() {
        // Nobody can be asked, and nothing will be moved.
        return Ok(ContextRecord {
            id: context.id(),
            ..ContextRecord::default()
        });
    }
    let mut record = described::objects(context);
    let live: Vec<_> = context.objects.lock().qps.values().cloned().collect();
    let mut qps = Vec::with_capacity(live.len());
    for qp in live {
        match described::queue_pair(&qp) {
            Ok(record) => qps.push(record),
            // Destroyed since it was listed: the version shows that this road map is old.
            Err(_) if !context.objects.lock().qps.contains_key(&qp.number()) => {}
            Err(error) => return Err(error),
        }
    }
    blockers.extend(
        qps.iter()
            .find(|qp| qp.paused)
            .map(|qp| session::paused(qp.physical_qpn)),
    );
    record.qps = qps;
    Ok(record)
}

/// What `process` uses that cannot be moved, in words for an operator.
pub fn blockers(process: &Process, contract: u32) -> Vec<String> {
    let contexts = process.contexts();
    let of_contexts = contexts.iter().flat_map(|context| blockers_of(context));
    let of_cm = blocker_of_old_agent(process, contract);
    of_cm.into_iter().chain(of_contexts).collect()
}

/// What an agent of an earlier release does not move.
fn blocker_of_old_agent(process: &Process, contract: u32) -> Option<String> {
    let blocker = (contract < CM_VERSION).then(|| blocker_of_cm(process));
    Some(format!(
        "{}: those cannot be moved by the agent's release; upgrade it",
        blocker.flatten()?
    ))
}

/// A process with ids of rdma_cm has a context for them, which whoever speaks of its devices only does not know.
pub fn blocker_of_cm(process: &Process) -> Option<String> {
    let is_open = process.cm.lock().is_open();
    is_open.then(|| "the program has connections by rdma_cm".to_owned())
}

/// The contexts that the process makes again where it moves to.
pub fn made_again(process: &Process) -> Vec<MadeAgain> {
    let contexts = process.contexts();
    let of_context = |context: &Arc<Context>| {
        let by = context.device().ok()?.made_again()?;
        Some(MadeAgain {
            id: context.id(),
            device: by.name,
            driver: by.driver,
        })
    };
    contexts.iter().filter_map(of_context).collect()
}

/// What an agent of an earlier release does not know how to move.
pub fn too_new(process: &Process) -> Vec<String> {
    let made_again = made_again(process);
    let devices = made_again.iter().map(|context| &context.device);
    let text = |device| {
        format!(
            "its device {device} is driven by the system's libibverbs, and the agent of this host cannot move that: upgrade the agent"
        )
    };
    devices.map(text).collect()
}

/// Those of one device. None of these objects is in the road map yet.
fn blockers_of(context: &Context) -> Vec<String> {
    if context.is_dead() {
        return vec![format!("the RNIC of opened device {} is gone", context.id())];
    }
    let device = context.device().ok();
    let memory = device
        .as_ref()
        .filter(|device| device.checks_memory())
        .and_then(|_| blocker_of_memory(context));
    let device = device.and_then(|device| device.blocker());
    let stands = context.standing.lock().is_some().then(dump::blocker);
    device.into_iter().chain(memory).chain(stands).collect()
}

/// What an RNIC that pins pages writes to memory that is not in the file of adopted memory, nobody sees who copies it.
fn blocker_of_memory(context: &Context) -> Option<String> {
    let objects = context.objects.lock();
    let of_process = |segment: &SegmentRecord| segment.offset.is_none() && segment.length > 0;
    let mut segments = objects.mrs.values().flat_map(|mr| mr.describe().segments);
    let SegmentRecord { address, length, .. } = segments.find(of_process)?;
    let device = &context.device_attr().name;
    Some(format!(
        "its registered memory at {address:#x}, of {length} bytes, cannot be moved into a file (mapped files, huge pages and stacks cannot), \
         and what {device} writes there would not be seen while it is copied"
    ))
}
