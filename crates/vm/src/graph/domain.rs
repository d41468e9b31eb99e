//! A domain of libvirt: differences between QEMU's disks and devices and libvirt's knowledge of them.
//!
//! libvirt follows the changes made through it, and starts the next QEMU from its own description. It may not
//! know changes made behind its back (`virsh qemu-monitor-command`).

use std::collections::BTreeSet;

use super::now::Now;

/// The differences. `files`: the files in libvirt's description; `aliases`: libvirt's names of devices.
pub(super) fn differences(now: &Now, files: &BTreeSet<String>, aliases: &BTreeSet<String>) -> Vec<String> {
    let mut found = Vec::new();
    for leaf in now.nodes.leaves() {
        if !files.contains(&leaf.path) {
            found.push(format!(
                "QEMU has {} open as a part of a disk, and libvirt does not know that: it was given to QEMU behind libvirt (a snapshot, a mirror, \
                 another medium); do that by `virsh`",
                leaf.path
            ));
        }
    }
    for device in now.devices.iter().filter(|device| device.is_hot) {
        if device.name().is_none_or(|name| !aliases.contains(name)) {
            found.push(format!(
                "the device {} was added behind libvirt, which does not know it: remove it, and use `virsh attach-device`",
                device.title()
            ));
        }
    }
    for export in &now.exports {
        found.push(format!(
            "the block export {export} serves a disk to others: end it first"
        ));
    }
    found
}
