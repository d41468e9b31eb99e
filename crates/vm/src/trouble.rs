//! Troubles of a guest: failed disks, and states in which it does not run.

use serde::Deserialize;
use serde_json::json;

use crate::error::Result;
use crate::machine::Machine;

/// States of QEMU in which a guest cannot go on by itself, and their meaning.
const STATES: [(&str, &str); 5] = [
    ("io-error", "stopped because a disk failed"),
    ("guest-panicked", "the guest has panicked"),
    ("internal-error", "QEMU has stopped it after an error of its own"),
    ("shutdown", "the guest has shut down"),
    ("watchdog", "stopped by its watchdog"),
];

/// A disk, by `query-block`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Block {
    #[serde(default)]
    device: String,
    #[serde(default)]
    qdev: Option<String>,
    #[serde(default)]
    io_status: Option<String>,
    #[serde(default)]
    inserted: Option<Inserted>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Inserted {
    #[serde(default)]
    node_name: Option<String>,
}

/// Counters of a disk, by `query-blockstats`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Counted {
    #[serde(default)]
    device: String,
    #[serde(default)]
    qdev: Option<String>,
    #[serde(default)]
    node_name: Option<String>,
    stats: Stats,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Stats {
    failed_rd_operations: u64,
    failed_wr_operations: u64,
    failed_flush_operations: u64,
    failed_unmap_operations: u64,
}

impl Machine {
    /// The troubles of its guest, in words; empty if there are none. Failed requests are counted since QEMU
    /// was started.
    pub async fn troubles(&self) -> Result<Vec<String>> {
        let status = self.status().await?;
        let state = STATES.iter().find(|(name, _)| *name == status.status);
        let mut troubles: Vec<_> = state.map(|(_, means)| (*means).to_owned()).into_iter().collect();
        // A disk's failure that stops a guest stays in the disk's status when the guest goes on (`cont`), if
        // the disk is one of `-blockdev`.
        if !status.running {
            let disks: Vec<Block> = self.qmp().ask("query-block", json!({})).await?;
            troubles.extend(disks.iter().filter_map(stopped));
        }
        let counted: Vec<Counted> = self.qmp().ask("query-blockstats", json!({})).await?;
        troubles.extend(counted.iter().filter_map(failed));
        Ok(troubles)
    }
}

/// A disk by the name that its user gave it.
fn named<'a>(device: &'a str, qdev: Option<&'a str>, node: Option<&'a str>) -> &'a str {
    let of_path = |qdev: &'a str| {
        let path = qdev.strip_prefix("/machine/peripheral/").unwrap_or(qdev);
        path.strip_suffix("/virtio-backend").unwrap_or(path)
    };
    let given = |name: &&str| !name.is_empty();
    let qdev = qdev.map(of_path).filter(given);
    Some(device)
        .filter(given)
        .or(node.filter(given))
        .or(qdev)
        .unwrap_or("without a name")
}

fn stopped(disk: &Block) -> Option<String> {
    let why = match disk.io_status.as_deref()? {
        "nospace" => "its storage is full",
        "failed" => "a request has failed",
        _ => return None,
    };
    let node = disk
        .inserted
        .as_ref()
        .and_then(|inserted| inserted.node_name.as_deref());
    let name = named(&disk.device, disk.qdev.as_deref(), node);
    Some(format!("the disk {name}: {why}"))
}

fn failed(counted: &Counted) -> Option<String> {
    let stats = &counted.stats;
    let kinds = [
        (stats.failed_rd_operations, "reads"),
        (stats.failed_wr_operations, "writes"),
        (stats.failed_flush_operations, "flushes"),
        (stats.failed_unmap_operations, "discards"),
    ];
    let words: Vec<_> = kinds
        .into_iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, kind)| format!("{count} {kind}"))
        .collect();
    let name = named(
        &counted.device,
        counted.qdev.as_deref(),
        counted.node_name.as_deref(),
    );
    (!words.is_empty()).then(|| format!("the disk {name} has failed: {}", words.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_has_failed_is_named_with_what_has_failed() {
        let counted = json!([
            {"device": "", "qdev": "/machine/peripheral-anon/device[0]/virtio-backend", "node-name": "verbatim-disk0",
             "stats": {"failed_rd_operations": 0, "failed_wr_operations": 3, "failed_flush_operations": 1, "wr_bytes": 5}},
            {"device": "ide0-cd0", "stats": {"rd_operations": 7}},
            {"device": "", "qdev": "/machine/peripheral/db/virtio-backend", "stats": {"failed_rd_operations": 1}},
        ]);
        let counted: Vec<Counted> = serde_json::from_value(counted).unwrap();
        let said: Vec<_> = counted.iter().filter_map(failed).collect();
        assert_eq!(
            said,
            [
                "the disk verbatim-disk0 has failed: 3 writes, 1 flushes",
                "the disk db has failed: 1 reads"
            ]
        );
        let disks = json!([
            {"device": "disk", "io-status": "nospace", "locked": false},
            {"device": "a", "io-status": "ok"},
            {"device": "b"},
            {"device": "", "qdev": "/machine/peripheral-anon/device[0]/virtio-backend", "io-status": "failed",
             "inserted": {"node-name": "verbatim-disk0", "ro": false}},
        ]);
        let disks: Vec<Block> = serde_json::from_value(disks).unwrap();
        let said: Vec<_> = disks.iter().filter_map(stopped).collect();
        assert_eq!(
            said,
            [
                "the disk disk: its storage is full",
                "the disk verbatim-disk0: a request has failed"
            ]
        );
    }
}
