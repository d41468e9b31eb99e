//! Growth of a volume is announced to the guest that has it as a disk.
//!
//! ```text
//!  verbatim volume resize ─► daemon: ends QEMU's connection, since a size is sent at its beginning alone
//!                            agent:  sees the size in the daemon's list, has QEMU reconnect, and take the size (`block_resize`)
//!                            QEMU:   the configuration of the guest's device has changed
//! ```
//!
//! QEMU cannot be asked for the size that the guest knows. So the guest is told the size once after its
//! start, its arrival or its discovery by a new agent, and then each change of size.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use verbatim_vm::Arguments;

use super::guest::Guest;
use super::{leaving, qemu, standing};
use crate::instances::volumes::SOCKET;
use crate::instances::{Instance, State};

/// Pause between two looks. A look is a request to a daemon of this host, which sends no notifications.
const LOOK: Duration = Duration::from_secs(2);

/// Longest pause while QEMU refuses a size: a disk that was removed has none.
const LONGEST: Duration = Duration::from_secs(60);

/// Last size that the guest was told of each volume.
type Told = BTreeMap<String, u64>;

/// Looks until the instance is not here any more. Does nothing for an instance without writable volumes as
/// disks: QEMU does not resize a read-only disk, and the guest learns its size when it moves or restarts.
pub fn watch(instance: &Arc<Instance>) {
    let record = &instance.home.record;
    let Some(Guest::Qemu(arguments)) = record.machine.clone() else {
        return;
    };
    if !record.volumes.iter().any(|mounted| mounted.writable) {
        return;
    }
    let instance = Arc::clone(instance);
    tokio::spawn(async move {
        let mut state = instance.watch();
        let (mut told, mut said) = (Told::new(), String::new());
        let mut pause = LOOK;
        loop {
            let ended = state.wait_for(|state| !matches!(state, State::Running | State::Moving));
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                _ = ended => return,
            }
            if let Err(error) = look(&instance, &arguments, &mut told).await {
                pause = (2 * pause).min(LONGEST);
                let error = format!("{error:#}");
                if error != said {
                    tracing::warn!(
                        instance = instance.name(),
                        error,
                        "its guest is not told yet how large its disk is; it is tried again"
                    );
                    said = error;
                }
            } else {
                pause = LOOK;
            }
        }
    });
}

async fn look(instance: &Arc<Instance>, arguments: &Arguments, told: &mut Told) -> anyhow::Result<()> {
    let (record, paths) = (&instance.home.record, &instance.home.paths);
    let disks = paths.disks.clone();
    let rows = tokio::task::spawn_blocking(move || disks.all());
    let rows = rows.await.context("asking the volume daemon panicked")??;
    for mounted in record.volumes.iter().filter(|mounted| mounted.writable) {
        let name = &mounted.volume;
        let served = |row: &&verbatim_volume::control::Row| {
            row.name == *name && row.role == "serving" && row.holder.as_deref() == Some(instance.name())
        };
        let Some(row) = rows.iter().find(served) else {
            continue;
        };
        let bytes = row.length_bytes;
        if told.get(name) == Some(&bytes) {
            continue;
        }
        // QEMU serves one connection, which a move needs.
        let is_left_alone = instance.state() == State::Running
            && leaving::ran(paths)?.is_none()
            && standing::why(paths).is_none()
            && instance.is_whole();
        if !is_left_alone {
            continue;
        }
        let node = arguments.node_at(&mounted.inside.join(SOCKET));
        let node = node.with_context(|| format!("QEMU has no disk that is the volume {name}"))?;
        let machine = qemu::connect(paths, instance.init_pid()).await?;
        let resized = machine.tell_size(node, bytes).await;
        resized.with_context(|| format!("the volume {name} of {bytes} bytes"))?;
        if let Some(before) = told.insert(name.clone(), bytes) {
            tracing::info!(
                instance = instance.name(),
                volume = name,
                before,
                bytes,
                "its guest is told that its disk has grown"
            );
        }
    }
    Ok(())
}
