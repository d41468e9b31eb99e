//! Obstacles to a move.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::arguments::is_vhost_user_disk;
use crate::error::{Error, Result};
use crate::locks::{Images, keeper};
use crate::machine::Machine;
use crate::ram::other_users;

/// A block node, by `query-named-block-nodes`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct BlockNode {
    #[serde(default)]
    node_name: String,
    #[serde(default)]
    drv: String,
    cache: Cache,
}

/// A device, by `qom-list`, or a property beside them.
#[derive(Debug, Deserialize)]
struct Device {
    /// The name; without one of its own, `device[0]`.
    name: String,
    /// For a device `child<virtio-blk-pci>`.
    #[serde(rename = "type")]
    kind: String,
}

#[derive(Debug, Deserialize)]
struct Cache {
    direct: bool,
}

impl Machine {
    /// An error with all obstacles to a move, if there are any.
    pub async fn may_move(&self) -> Result<()> {
        let mut reasons = Vec::new();
        let status = self.status().await?.status;
        if !["running", "paused"].contains(&status.as_str()) {
            reasons.push(format!(
                "it is in the state `{status}`, and would have to be `running` or `paused`"
            ));
        }
        let migration = self.migration().await?;
        let under_way = [
            "setup",
            "active",
            "pre-switchover",
            "device",
            "postcopy-active",
            "postcopy-paused",
            "colo",
        ];
        if let Some(status) = migration
            .status
            .filter(|status| under_way.contains(&status.as_str()))
        {
            reasons.push(format!(
                "a migration of its own is under way ({status}): end it with `migrate_cancel` in its monitor"
            ));
        }
        reasons.extend(
            migration
                .blocked_reasons
                .into_iter()
                .map(|reason| format!("QEMU: {reason}")),
        );
        let jobs: Vec<Value> = self.qmp().ask("query-jobs", json!({})).await?;
        for job in jobs {
            let (kind, id) = (&job["type"], &job["id"]);
            reasons.push(format!(
                "a job is under way: {kind} {id}; wait for its end, or cancel it"
            ));
        }
        reasons.extend(descriptors(self.pid())?);
        let others = other_users(self.ram(), self.pid())?;
        if !others.is_empty() {
            reasons.extend(vhost_user_disks(&self.devices().await?));
        }
        reasons.extend(others);
        let nodes = self.block_nodes().await?;
        reasons.extend(nodes.iter().filter_map(|node| keeper(&node.node_name, &node.drv)));
        reasons.extend(Images::strangers(self.pid())?);
        reasons.extend(self.unseen_disks(&nodes)?);
        if let Some(domain) = self.qmp().domain() {
            reasons.extend(domain.obstacles().await?);
        }
        match reasons.is_empty() {
            true => Ok(()),
            false => Err(Error::Unmovable(reasons)),
        }
    }

    /// Devices that `-device` names, or that were added since.
    async fn devices(&self) -> Result<Vec<Device>> {
        let mut devices = Vec::new();
        for folder in ["/machine/peripheral", "/machine/peripheral-anon"] {
            let some: Vec<Device> = self.qmp().ask("qom-list", json!({ "path": folder })).await?;
            devices.extend(some);
        }
        Ok(devices)
    }

    async fn block_nodes(&self) -> Result<Vec<BlockNode>> {
        let flat = json!({"flat": true});
        self.qmp().ask("query-named-block-nodes", flat).await
    }

    /// Disks whose reads go to the RAM directly without a waiting thread: their data may land after the look
    /// at the RAM that was to find them. Threads that wait are waited for ([`crate::Rounds::round`]).
    fn unseen_disks(&self, nodes: &[BlockNode]) -> Result<Option<String>> {
        let Some(direct) = nodes.iter().find(|node| node.cache.direct) else {
            return Ok(None);
        };
        let path = format!("/proc/{}/cmdline", self.pid());
        let line = std::fs::read(&path).map_err(Error::io(format!("read {path}")))?;
        let line = String::from_utf8_lossy(&line);
        let asynchronous = ["aio=native", "aio=io_uring", "\"native\"", "\"io_uring\""];
        // The rings of io_setup exist once one was used.
        let has_rings = verbatim_tracking::names_mapping(self.pid(), "/[aio]")?;
        let is_asynchronous = has_rings || asynchronous.iter().any(|word| line.contains(word));
        Ok(is_asynchronous.then(|| {
            format!(
                "the disk {} is read directly (cache.direct=on) and asynchronously (aio=native or aio=io_uring), which the kernel does not \
                 track: start it with aio=threads",
                direct.node_name
            )
        }))
    }
}

/// Disks by vhost-user-blk, for which another process maps the RAM.
fn vhost_user_disks(devices: &[Device]) -> Vec<String> {
    let kind = |device: &Device| device.kind.strip_prefix("child<").is_some_and(is_vhost_user_disk);
    let disks = devices.iter().filter(|device| kind(device));
    disks.map(|device| vhost_user_disk(&device.name)).collect()
}

/// The reason why a machine with this disk by vhost-user-blk cannot move.
pub(crate) fn vhost_user_disk(name: &str) -> String {
    format!(
        "the disk {name} is attached by vhost-user-blk, whose server writes to the RAM: if it is a volume, start the virtual machine with \
         `--volume NAME` in its place"
    )
}

/// QEMU's open descriptors that cannot move.
fn descriptors(pid: u32) -> Result<Vec<String>> {
    let folder = format!("/proc/{pid}/fd");
    let mut reasons = Vec::new();
    for entry in std::fs::read_dir(&folder)
        .map_err(Error::io(format!("read {folder}")))?
        .flatten()
    {
        let target = std::fs::read_link(entry.path()).unwrap_or_default();
        if target.starts_with("/dev/vfio") || target == Path::new("anon_inode:[vfio-device]") {
            reasons.push("it has a device of the host's (VFIO), whose state cannot move".to_owned());
            break;
        }
        // It exists until all memory has come (`PostCopy`), or QEMU is about to use it itself.
        if target == Path::new("anon_inode:[userfaultfd]") {
            reasons.push(
                "not all of its memory has come from where it was (post-copy): wait until it has".to_owned(),
            );
        }
    }
    Ok(reasons)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_by_vhost_user_is_named_with_what_moves_instead_and_no_other_device_is() {
        let devices = json!([
            {"name": "type", "type": "string"},
            {"name": "db", "type": "child<vhost-user-blk-pci>"},
            {"name": "card", "type": "child<vhost-user-net>"},
            {"name": "device[0]", "type": "child<virtio-blk-pci>"},
        ]);
        let devices: Vec<Device> = serde_json::from_value(devices).unwrap();
        let found = vhost_user_disks(&devices);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(
            found[0].contains("the disk db is") && found[0].contains("`--volume NAME`"),
            "{found:?}"
        );
        assert!(vhost_user_disks(&devices[2..]).is_empty());
    }
}
