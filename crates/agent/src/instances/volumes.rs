//! Volumes of an instance: local disks of this host's volume daemon (`docs/volumes.md`), as file systems in a container, or as disks of a virtual
//! machine.
//!
//! The daemon lends a volume to the instance alone ([`Disks`]). To a container it is a block device, whose file system the agent mounts on a folder of
//! the host ([`file_system`]), and the bundle binds that folder: so to CRIU it is an external mount, as all of a container's mounts are. In a virtual
//! machine's place the folder has a socket, by which QEMU has the volume by NBD ([`machine`]). The folder is made before the volume is asked for
//! and removed after it was given back. So whichever agent finds it knows what to give back.

mod disks;
mod file_system;
pub mod machine;

use std::io;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, bail, ensure};
use serde::{Deserialize, Serialize};
use verbatim_container::Workload;

use super::Instance;
use super::home::Paths;
use super::record::Record;
use super::swap::Swaps;

pub use disks::{Disks, SOCKET, SOCKET_NAME};

/// Where nothing of a container's own may be mounted.
const TAKEN: [&str; 4] = ["/proc", "/sys", "/dev", "/run/verbatim"];

/// Where a container has folders of its own, in which a mount point is made.
const OWN: [&str; 2] = ["/tmp", "/run"];

/// A volume, and where the container has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mounted {
    /// The volume's name, on all hosts.
    pub volume: String,
    /// The folder inside, with its file system, or with QEMU's socket.
    pub inside: PathBuf,
    /// Whether it may be written to.
    pub writable: bool,
}

/// What an instance has of its volumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Each is a file system in its container.
    FileSystem,
    /// Each is a disk of its virtual machine.
    Disk,
}

impl Form {
    /// That of an instance.
    pub fn of(record: &Record) -> Self {
        match record.machine {
            None => Self::FileSystem,
            Some(_) => Self::Disk,
        }
    }
}

/// Reads `NAME:/PATH` or `NAME:/PATH:ro`.
fn parse_one(text: &str) -> anyhow::Result<Mounted> {
    let wrong = || format!("{text:?} is not a volume and a folder, such as db:/srv or db:/srv:ro");
    let (volume, rest) = text.split_once(':').with_context(wrong)?;
    let (inside, writable) = match rest.rsplit_once(':') {
        Some((inside, "ro")) => (inside, false),
        Some((inside, "rw")) => (inside, true),
        _ => (rest, true),
    };
    let inside = Path::new(inside);
    let is_plain = inside
        .components()
        .all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    ensure!(
        !volume.is_empty() && inside.is_absolute() && is_plain && inside.parent().is_some(),
        wrong()
    );
    if let Some(taken) = TAKEN.iter().find(|taken| inside.starts_with(taken)) {
        bail!("a volume cannot be mounted in {taken}: that is the container's own");
    }
    Ok(Mounted {
        volume: volume.to_owned(),
        // Without what says nothing: slashes at its end, and double ones.
        inside: inside.components().collect(),
        writable,
    })
}

/// Reads what was asked for, for a container.
pub fn parse(texts: &[String]) -> anyhow::Result<Vec<Mounted>> {
    let mut all: Vec<Mounted> = Vec::new();
    for text in texts {
        let one = parse_one(text)?;
        for other in &all {
            if other.volume == one.volume {
                bail!("the volume {} is named twice", one.volume);
            }
            if other.inside.starts_with(&one.inside) || one.inside.starts_with(&other.inside) {
                bail!(
                    "{} and {} lie one in the other",
                    other.inside.display(),
                    one.inside.display()
                );
            }
        }
        all.push(one);
    }
    Ok(all)
}

/// Mount points that a container on this host would lack.
pub fn lacking(record: &Record) -> Vec<String> {
    // Another bundle brings its own.
    let Workload::Command { .. } = &record.workload else {
        return Vec::new();
    };
    let wanted = record.volumes.iter().map(|mounted| &mounted.inside);
    let is_lacking = |inside: &&PathBuf| {
        let is_own = OWN.iter().any(|own| inside.starts_with(own));
        !is_own && !inside.is_dir()
    };
    let words = wanted.filter(is_lacking).map(|inside| {
        format!(
            "there is no folder {} to mount a volume on; the container sees this host's own folders, so make it, or take one in /run",
            inside.display()
        )
    });
    words.collect()
}

/// Why an instance is not moved, as far as it has volumes in a way by which they do not come along: its bundle binds what somebody has mounted, or
/// the command line of its virtual machine names the daemon's socket.
pub async fn blockers_of(instance: &Instance) -> anyhow::Result<Vec<String>> {
    let (record, paths) = (instance.home.record.clone(), instance.home.paths.clone());
    let init_pid = instance.init_pid();
    tokio::task::spawn_blocking(move || blockers(&record, &paths, init_pid)).await?
}

fn blockers(record: &Record, paths: &Paths, init_pid: i32) -> anyhow::Result<Vec<String>> {
    let disks = &paths.disks;
    if record.machine.is_some() {
        return Ok(by_hand(record, disks, &paths.swaps));
    }
    let table = match std::fs::read_to_string(format!("/proc/{init_pid}/mountinfo")) {
        // It has ended.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        table => table.context("cannot read what is mounted in the container")?,
    };
    let devices = file_system::loop_devices(&table);
    if devices.is_empty() {
        return Ok(Vec::new());
    }
    let is_own = |name: &str| record.volumes.iter().any(|mounted| mounted.volume == name);
    let rows = disks.all()?;
    let strangers = rows.iter().filter(|row| {
        let device = row.device.as_deref().and_then(Path::to_str);
        !is_own(&row.name) && device.is_some_and(|device| devices.iter().any(|mounted| mounted == device))
    });
    let words = strangers.map(|row| {
        format!(
            "the volume {} is mounted in it, and is not its own: only what `verbatim run --volume` has given it moves along",
            row.name
        )
    });
    Ok(words.collect())
}

/// Volumes and swap disks that a virtual machine has by the socket for everybody. Another host has another one of that name, or none, behind the same path.
fn by_hand(record: &Record, disks: &Disks, swaps: &Swaps) -> Vec<String> {
    let Workload::Command { binds, .. } = &record.workload else {
        return Vec::new();
    };
    let names = binds.iter().filter_map(|bind| disks.served_at(&bind.path));
    let words = names.map(|volume| {
        format!(
            "its command line names the volume {volume} by the socket of this host's volume daemon, and such a disk stays here: end it, \
             `verbatim volume detach {volume}`, and start it by `verbatim run --vm {} --volume {volume} -- …` without that disk",
            record.name
        )
    });
    let swaps = binds.iter().filter_map(|bind| swaps.served_at(&bind.path));
    let swaps = swaps.map(|disk| {
        format!(
            "its command line names the swap disk {disk} by its socket on this host, and such a disk stays here: end it, `verbatim swap detach {disk}`, and \
             start it by `verbatim run --vm {} --swap HOST:SIZE -- …` without that disk",
            record.name
        )
    });
    words.chain(swaps).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(texts: &[&str]) -> Result<Vec<Mounted>, String> {
        let texts: Vec<String> = texts.iter().map(|text| (*text).to_owned()).collect();
        parse(&texts).map_err(|error| error.to_string())
    }

    #[test]
    fn volumes_are_read_and_nonsense_is_refused() {
        let mounted = |volume: &str, inside: &str, writable| Mounted {
            volume: volume.into(),
            inside: inside.into(),
            writable,
        };
        assert_eq!(
            parsed(&["db:/srv/db", "log:/mnt/:ro", "x:/a:b"]),
            Ok(vec![
                mounted("db", "/srv/db", true),
                mounted("log", "/mnt", false),
                mounted("x", "/a:b", true),
            ])
        );
        for bad in [
            "db",
            "db:",
            ":/srv",
            "db:srv",
            "db:/",
            "db:/srv/../etc",
            "db:/:ro",
        ] {
            assert!(parsed(&[bad]).unwrap_err().contains("such as"), "{bad}");
        }
        for taken in ["db:/proc", "db:/dev/shm/x", "db:/run/verbatim", "db:/sys/fs"] {
            assert!(
                parsed(&[taken]).unwrap_err().contains("the container's own"),
                "{taken}"
            );
        }
        assert!(parsed(&["db:/a", "db:/b"]).unwrap_err().contains("twice"));
        assert!(
            parsed(&["a:/a", "b:/a/b"])
                .unwrap_err()
                .contains("one in the other")
        );
    }

    #[test]
    fn a_disk_by_the_socket_for_everybody_does_not_come_along() {
        let record = serde_json::json!({
            "name": "vm",
            "workload": {"Command": {"args": [], "env": [], "cwd": "/", "binds": [
                {"path": "/run/verbatim/volumes/db.sock", "writable": true}, {"path": "/srv/disk", "writable": true},
                {"path": "/run/verbatim/swap/host2.sock", "writable": true}]}},
            "address": "10.77.1.5",
            "prefix": 16,
            "machine": verbatim_vm::Arguments::parse(&["qemu"]).unwrap(),
        });
        let record: Record = serde_json::from_value(record).unwrap();
        let paths = Paths::new(Path::new("/run/verbatim"), "vm");
        let found = by_hand(&record, &paths.disks, &paths.swaps);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("--volume db"), "{found:?}");
        assert!(found[1].contains("verbatim swap detach host2"), "{found:?}");
    }
}
