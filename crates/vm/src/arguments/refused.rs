//! Options that a user must not give, or that cannot move.

/// Options that a user must not give, with the reason.
pub(super) const OURS: &[(&str, &str)] = &[
    (
        "-incoming",
        "a virtual machine that arrives is started by a migration",
    ),
    ("-S", "it is started at once"),
    ("-qmp", "the agent has QEMU's QMP socket"),
    ("-qmp-pretty", "the agent has QEMU's QMP socket"),
    ("-daemonize", "the agent is QEMU's parent"),
    ("-mem-path", "its RAM is a file of the agent's"),
    ("-mem-prealloc", "its RAM is a file of the agent's"),
    (
        "-snapshot",
        "what it writes to its disks would be lost with the process",
    ),
    (
        "-loadvm",
        "start it without, and load the snapshot in its monitor",
    ),
    ("-numa", "one piece of RAM can move, and no more"),
];

/// The reason why data written to this disk would not go along.
pub(super) fn lost(value: &str) -> Option<&'static str> {
    if value.split(',').any(|part| part == "snapshot=on") {
        Some("written data would be lost with the process (`snapshot=on`)")
    } else if value.contains("fat:") && value.contains("rw:") {
        Some("QEMU does not move a folder that it shows as a disk and writes to; make an image in its place")
    } else {
        None
    }
}

/// The reason why a device with this value cannot move.
pub(super) fn immovable(value: &str) -> Option<&'static str> {
    let kind = value.split(',').next().unwrap_or_default();
    let kind = kind.split_once('=').map_or(kind, |(_, name)| name);
    if kind.starts_with("memory-backend-") {
        Some("one piece of RAM can move, and the agent makes it")
    } else if kind.starts_with("vfio-") {
        Some("the state of a device of the host's cannot move")
    } else if is_vhost_user_disk(kind) {
        Some(
            "another process would write to the RAM, and nobody would see it. If the disk is a volume, start the virtual machine with \
             `--volume NAME` in its place: then it moves along",
        )
    } else if kind.starts_with("vhost-user") || kind == "vhost-vdpa" {
        Some("another process would write to the RAM, and nobody would see it")
    } else if kind.contains("dimm") || kind.starts_with("virtio-mem") || kind.starts_with("virtio-pmem") {
        Some("one piece of RAM can move, and no more")
    } else {
        None
    }
}

/// Whether devices of this kind are disks that another process serves out of the RAM.
pub fn is_vhost_user_disk(kind: &str) -> bool {
    kind.starts_with("vhost-user-blk")
}
