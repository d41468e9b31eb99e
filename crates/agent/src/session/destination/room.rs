//! Room for an instance that comes here: memory promised, memory free now, and space in the runtime folder.

use crate::agent::Shared;
use crate::instances::Reservation;
use crate::instances::record::Record;
use crate::memory::{private, private_tmpfs};
use crate::proto::OpenRequest;

/// Room that images, and files beside the memory, need in any case.
const BESIDE: u64 = 64 << 20;

/// Memory of this host that is promised to the instance.
fn wanted(record: &Record, request: &OpenRequest) -> u64 {
    match &record.machine {
        Some(guest) => guest.ram(),
        None => request.memory_bytes,
    }
}

/// Keeps its address and its memory free, as long as its name is reserved.
pub fn claim(
    agent: &Shared,
    reservation: &Reservation,
    record: &Record,
    request: &OpenRequest,
) -> anyhow::Result<()> {
    let (room, wanted) = (agent.room()?, wanted(record, request));
    let name = record.name.as_str();
    let fits = |others: u64| room.lack(agent.name(), name, wanted, others + agent.behinds.bytes());
    let claimed = agent.instances.claim(reservation, record, wanted, fits);
    claimed.map_err(anyhow::Error::msg)
}

/// Reasons why there is not enough room.
pub fn lacking(agent: &Shared, record: &Record, request: &OpenRequest) -> Vec<String> {
    let mut lacking: Vec<_> = in_runtime_folder(agent, record, request).into_iter().collect();
    let room = match agent.room() {
        Ok(room) => room,
        Err(error) => {
            lacking.push(format!(
                "how much memory {} has is unknown: {error:#}",
                agent.name()
            ));
            return lacking;
        }
    };
    let (name, wanted) = (record.name.as_str(), wanted(record, request));
    let promised = agent.instances.promised(name) + agent.behinds.bytes();
    lacking.extend(room.lack(agent.name(), name, wanted, promised));
    // The memory that waits for the tasks, and the memory that they have taken over, never exceed it by much
    // together.
    let at_once = match record.prealloc {
        true => wanted,
        false => room.at_once(request.memory_bytes),
    };
    lacking.extend(private::lack_of_memory(at_once));
    lacking
}

fn in_runtime_folder(agent: &Shared, record: &Record, request: &OpenRequest) -> Option<String> {
    let folder = &agent.config.runtime_dir;
    // The part that lies in other file systems.
    let elsewhere = match &record.machine {
        // The RAM has its own, or lies where libvirt's configuration says.
        Some(guest) => guest.ram(),
        None if private_tmpfs::is_mounted(&folder.join("private")) => {
            request.private_bytes.saturating_add(request.files_bytes)
        }
        None => request.files_bytes,
    };
    let here = request.memory_bytes.saturating_sub(elsewhere);
    let space = match rustix::fs::statvfs(folder) {
        Ok(space) => space,
        Err(errno) => return Some(format!("the free memory there is unknown: {errno}")),
    };
    let free = space.f_bavail * space.f_frsize;
    let needed = here.saturating_add(here / 8).saturating_add(BESIDE);
    (free < needed).then(|| {
        format!(
            "{} there has {} MiB free and {} MiB are needed; enlarge that tmpfs",
            folder.display(),
            free >> 20,
            needed >> 20
        )
    })
}
