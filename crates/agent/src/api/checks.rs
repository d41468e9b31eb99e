//! A dry run: everything that would stop a migration, before anything is touched.

use std::sync::Arc;

use anyhow::Context;
use verbatim_container::NeededFile;
use verbatim_session::Role;

use crate::agent::Shared;
use crate::instances::filling::{self, Missing};
use crate::instances::machine::{self, qemu};
use crate::instances::recovery;
use crate::instances::storage::{Witnesses, devices, images};
use crate::instances::{Instance, State, network, volumes};
use crate::memory::{convergence, private, shared};
use crate::mtu;
use crate::peers::reason;
use crate::proto::{CheckReply, DeepCheck, OpenRequest};
use crate::protocol::{
    FILE_ATTRIBUTES, FILL, IMAGES, MACHINE_FITS, MACHINE_SWAP, MACHINE_VOLUMES, NETWORK_STATE, TERMINALS,
    VOLUMES_MOVE,
};
use crate::report::milliseconds;
use crate::session::deep::expected_pause;
use crate::session::open_files;
use crate::session::rnics;
use crate::session::source::{self, Tried};
use crate::session::volumes::obstacle;

/// Less shared memory makes no blackout longer that anybody would notice.
const TOLD_BYTES: u64 = 4 << 20;

/// Everything that stands in the way of moving `name` to `destination`, and how its private memory would go, in words for an
/// operator. `deep`: if nothing does, the dump is tried.
pub async fn check(agent: &Shared, name: &str, destination: &str, deep: bool) -> anyhow::Result<CheckReply> {
    let instance = recovery::find(agent, name)?;
    let (mut blockers, mut notes) = (Vec::new(), Vec::new());
    let missing = filling::missing(&instance).await;
    let is_whole = missing.is_none();
    if let Some(Missing { bytes, from }) = missing {
        let mib = bytes.div_ceil(1 << 20);
        notes.push(match from {
            Some(host) => format!(
                "{mib} MiB of the memory of {name} are still on {host} and come from there; a migration waits for that"
            ),
            None => format!(
                "{name} is still being given {mib} MiB of the memory that it had at its last place; a migration waits for that"
            ),
        });
    }
    match instance.state() {
        State::Running => {}
        State::Moving => blockers.push(format!(
            "{name} is being moved already; wait until that has ended"
        )),
        State::Exited(status) => blockers.push(format!("{name} has ended with status {status}")),
        State::MovedTo(host) => blockers.push(format!("{name} lives on {host}; ask the agent there")),
    }
    if destination == agent.name() {
        blockers.push(format!("{name} is on {destination} already"));
    }

    for known in agent.journal.sessions() {
        let is_own = known.told.instance.as_deref() == Some(name) && known.role != Role::Partner;
        if is_own && known.part.standing.is_after_decision() {
            let session = known.session;
            notes.push(format!(
                "an earlier move of {name}, session {session:016x}, is not finished: not all partners have taken its new connections; \
                 see `verbatim session show {session:016x}`"
            ));
        }
    }

    // Here: what the program uses, and what CRIU will refuse.
    match source::blockers(agent, name, destination).await {
        Ok(found) => blockers.extend(found),
        Err(error) => blockers.push(format!("the program's verbs objects are unknown: {error:#}")),
    }
    let (init, record) = (instance.init_pid(), &instance.home.record);
    match instance.home.filtered_addresses() {
        Ok(filtered) => notes.extend(filtered.iter().map(|address| {
            format!("nothing leaves {name} with its address {address}, here or on {destination}: `verbatim run --allow-address {address}` lets it")
        })),
        Err(error) => notes.push(format!("the addresses that {name} gave itself are not known: {error}")),
    }
    let network = match network::reader().await {
        Ok(reader) => network::look(&instance, &reader).await,
        Err(error) => Err(error),
    };
    let network = match network {
        Ok(found) => found,
        Err(error) => {
            blockers.push(format!(
                "the network namespace of {name} cannot be looked at: {error:#}"
            ));
            None
        }
    };
    if let Some(found) = &network {
        blockers.extend(found.obstacles.iter().cloned());
        notes.extend(found.notes.iter().cloned());
    }
    let mut needs = String::new();
    let has_rnics = !record.rnics.is_empty();
    let mut carried = None;
    if record.machine.is_some() {
        // Before it is whole QEMU says nothing but that, and may not answer at all.
        if instance.state() == State::Running && is_whole {
            let looked = qemu::looked_at(agent, &instance).await;
            blockers.extend(looked.blockers);
            notes.extend(looked.notes);
            needs = looked.needs;
            carried = looked.carried;
        }
        notes.push("the guest's RAM goes ahead, tracked from outside (userfaultfd)".to_owned());
    } else {
        blockers.extend(source::obstacles::of_tasks(agent, &instance).await);
        notes.extend(source::obstacles::notes_of_tasks(agent, &instance).await);
        let policies = tokio::task::spawn_blocking(move || verbatim_container::memory_policies(init));
        notes.extend(policies.await?.unwrap_or_default());
        let unreached = tokio::task::spawn_blocking(move || verbatim_container::unreached_waits(init));
        // Who cannot be looked at stands in the way, which is said above.
        notes.extend(unreached.await?.unwrap_or_default());
    }

    match volumes::blockers_of(&instance).await {
        Ok(found) => blockers.extend(found),
        Err(error) => blockers.push(format!("whether it has volumes is not known: {error:#}")),
    }
    match rnics::strangers(agent, name, init) {
        Ok(found) => blockers.extend(found),
        Err(error) => blockers.push(format!("who has an RNIC open is not known: {error}")),
    }
    notes.extend(rnics::notes(record, init));
    for mounted in &record.volumes {
        let volume = &mounted.volume;
        notes.push(format!(
            "the volume {volume} is copied to {destination} first, and moves along"
        ));
        match obstacle(agent, volume, destination).await {
            Ok(found) => blockers.extend(found.map(|why| format!("the volume {volume}: {why}"))),
            Err(error) => notes.push(format!(
                "whether {destination} has room for the volume {volume} is not known: {error:#}"
            )),
        }
    }

    if !record.swap.is_empty() {
        let (swaps, disks) = (instance.home.paths.swaps.clone(), record.swap.clone());
        blockers.extend(tokio::task::spawn_blocking(move || swaps.blockers(&disks)).await?);
    }
    for disk in &record.swap {
        notes.push(format!(
            "the swap disk {} stays in memory of {}; its lease goes to {destination} at the commit",
            disk.name, disk.host
        ));
    }

    let private_bytes = match &record.machine {
        Some(guest) => guest.ram(),
        None => private::bytes_of_tree(init),
    };
    let shared_bytes = match &record.machine {
        Some(_) => 0,
        None => tokio::task::spawn_blocking(move || shared::bytes_of_tree(init)).await?,
    };
    let has_soft_dirty = agent.tools.tracks_memory().await.is_ok();
    // The destination, and what it was asked, for another question.
    let mut asked = None;
    // There: the agent, its version, the name, the address, room, the RNIC. CRIU is checked when an agent starts.
    match agent.peers.connect(destination).await {
        Ok(mut peer) => {
            let (as_now, files) = match &carried {
                Some(carried) => (machine::as_carried(record, carried), carried.files.clone()),
                None => (record.clone(), Vec::new()),
            };
            let witnesses = Witnesses::make(&as_now, &files);
            blockers.extend(witnesses.untried().iter().cloned());
            let can_compare = agent.peers.can(destination, IMAGES);
            let (to, can_fill) = (destination.to_owned(), agent.peers.can(destination, FILL));
            let mut beside_images = 0;
            if record.machine.is_none() {
                let looked = tokio::task::spawn_blocking(move || {
                    source::goes_beside_images(init, &to, can_fill, has_soft_dirty)
                });
                if looked.await? {
                    beside_images = private_bytes;
                }
                blockers.extend(private::lack_of_room(
                    &agent.config.runtime_dir,
                    private_bytes - beside_images + shared_bytes,
                ));
            }
            let files_bytes = adopted_bytes(agent, name).await;
            let mut request = OpenRequest {
                session: 0,
                source: agent.name().to_owned(),
                instance: serde_json::to_string(&as_now)?,
                memory_bytes: files_bytes + private_bytes + shared_bytes,
                protocol: agent.peers.spoken(destination),
                witnesses: witnesses.paths(),
                private_bytes: beside_images,
                devices: devices::of(&as_now)?,
                post_copy: false,
                files_bytes,
                machine: needs,
                images: if can_compare {
                    images::of(&files, &witnesses)
                } else {
                    Vec::new()
                },
                link_mtu: network::link_mtu(network.as_ref()),
                path_mtu: match has_rnics {
                    true => 0,
                    false => path_mtu(agent, name).await,
                },
                huge_pages: source::huge_pages(&instance).await?,
                open_files: Vec::new(),
            };
            if record.machine.is_none() && !agent.peers.can(destination, TERMINALS) {
                let open = tokio::task::spawn_blocking(move || verbatim_container::with_terminals(init));
                blockers.extend(open.await?.unwrap_or_default().into_iter().map(|(pid, command)| {
                    format!(
                        "process {pid} ({command}) has a terminal, and the agent of {destination} does not know terminals; upgrade it"
                    )
                }));
            }
            let can = agent.peers.can(destination, NETWORK_STATE);
            let unknown = network
                .as_ref()
                .and_then(|found| network::unknown(&instance, found, destination, can));
            blockers.extend(unknown);
            let unknown = agent
                .peers
                .must_know(destination, &agent.guests.of_instance(name));
            blockers.extend(unknown.err().map(|error| format!("{error:#}")));
            blockers.extend(rnics::blockers(agent, record, destination));
            blockers.extend(source::machine_unknown(agent, record, destination));
            if record.machine.is_some() && !agent.peers.can(destination, MACHINE_FITS) {
                notes.push(format!(
                    "the agent of {destination} does not compare processors, types of machines and TPMs: upgrade it, \
                     or check yourself that QEMU there has the same"
                ));
            }
            if let Some(carried) = &carried {
                blockers.extend(source::uncompared(agent, record, carried, destination));
            }
            if let Err(error) = source::look_into_images(&mut peer, &mut request).await {
                blockers.push(format!("{error:#}"));
            }
            if !record.volumes.is_empty() && !agent.peers.can(destination, VOLUMES_MOVE) {
                blockers.push(format!(
                    "the agent of {destination} does not know volumes that move along; upgrade it"
                ));
            }
            let has_disks = record.machine.is_some() && !record.volumes.is_empty();
            if has_disks && !agent.peers.can(destination, MACHINE_VOLUMES) {
                blockers.push(format!(
                    "the agent of {destination} does not know volumes of virtual machines; upgrade it"
                ));
            }
            if !record.swap.is_empty() && !agent.peers.can(destination, MACHINE_SWAP) {
                blockers.push(format!(
                    "the agent of {destination} does not know swap disks of virtual machines; upgrade it"
                ));
            }
            asked = Some((peer.clone(), request.clone()));
            match peer.check_instance(request).await {
                Ok(reply) => {
                    let reply = reply.into_inner();
                    if has_rnics {
                        let (lacks, differs) = rnics::compare(&reply, destination);
                        blockers.extend(lacks);
                        notes.extend(differs);
                    }
                    blockers.extend(reply.blockers);
                    notes.extend(reply.notes);
                }
                Err(status) => blockers.push(format!("{destination} cannot say: {}", reason(&status))),
            }
            if record.machine.is_none() {
                let to = destination.to_owned();
                let note = tokio::task::spawn_blocking(move || {
                    source::private_note(init, &to, can_fill, has_soft_dirty)
                });
                notes.push(note.await?);
            }
            if record.machine.is_none() && !agent.peers.can(destination, FILE_ATTRIBUTES) {
                notes.push(format!(
                    "the agent of {destination} does not give files in /tmp and /dev/shm their hard links, times and extended \
                     attributes: upgrade it, or they are lost"
                ));
            }
            if shared_bytes >= TOLD_BYTES {
                notes.push(format!(
                    "{} MiB of shared memory without a file (System V, memfd, shared anonymous memory, files that have no name any \
                     more) go with CRIU's images: {name} stands still for about {} ms for them",
                    shared_bytes >> 20,
                    convergence::time_of_shared(shared_bytes).as_millis()
                ));
            }
            notes.push(source::transport_note(agent, destination));
        }
        Err(error) => blockers.push(format!("{error:#}")),
    }
    let expected_pause = expected_pause(agent, &instance).await;
    let deep = match deep {
        false => None,
        true if !blockers.is_empty() => Some(DeepCheck {
            not_tried: "what stands in the way is known without it".to_owned(),
            ..DeepCheck::default()
        }),
        true => {
            let (deep, files) = try_dump(agent, &instance, destination, &mut blockers).await?;
            if let Some((mut peer, mut request)) = asked.filter(|_| !files.is_empty()) {
                request.open_files = open_files::write(&files, record);
                match peer.check_instance(request).await {
                    Ok(reply) => blockers.extend(reply.into_inner().blockers),
                    Err(status) => blockers.push(format!("{destination} cannot say: {}", reason(&status))),
                }
            }
            if !blockers.is_empty() {
                agent.deep_checks.forget(name);
            }
            Some(deep)
        }
    };
    Ok(CheckReply {
        blockers,
        notes,
        expected_pause_ms: expected_pause.map_or(0.0, milliseconds),
        deep,
    })
}

/// Has CRIU write the instance down, without memory, and let it go on: how it went, and which files the instance needs at its next host. What
/// CRIU refuses is a blocker.
async fn try_dump(
    agent: &Shared,
    instance: &Arc<Instance>,
    destination: &str,
    blockers: &mut Vec<String>,
) -> anyhow::Result<(DeepCheck, Vec<NeededFile>)> {
    // Not cut off in the middle when the command line goes away.
    let tried = tokio::spawn(source::check(
        Arc::clone(agent),
        Arc::clone(instance),
        destination.to_owned(),
    ));
    let (tried, stood) = tried.await.context("the deep check panicked")??;
    let mut deep = DeepCheck {
        pause_ms: milliseconds(stood.service),
        communication_pause_ms: milliseconds(stood.communication),
        ..DeepCheck::default()
    };
    let mut needed = Vec::new();
    match tried {
        Tried::Fine(files) => needed = files,
        Tried::Refused { why, log } => {
            blockers.push(why);
            deep.log = log.display().to_string();
        }
        Tried::Prevented(why) => deep.not_tried = why,
    }
    Ok((deep, needed))
}

async fn adopted_bytes(agent: &Shared, name: &str) -> u64 {
    let described = source::describe(agent, name).await.unwrap_or_default();
    described
        .iter()
        .map(|(_, road_map)| source::memory_bytes(road_map))
        .sum()
}

async fn path_mtu(agent: &Shared, name: &str) -> u32 {
    let described = source::describe(agent, name).await.unwrap_or_default();
    mtu::of_queue_pairs(described.iter().map(|(_, road_map)| road_map))
}
