//! Volumes as disks of a virtual machine: syntax of a request, and the disks on QEMU's command line.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use verbatim_vm::{Arguments, NbdDisk};

use super::disks::SOCKET;
use super::{Disks, Mounted};

/// Folder in QEMU's container for the folders of the volumes' sockets. The same on all hosts, like the
/// command line.
const INSIDE: &str = "/run/volumes";

/// A volume that is to be a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    volume: String,
    writable: bool,
    /// Properties of the device, each `name=value`.
    properties: Vec<String>,
}

impl Disk {
    fn folder(&self) -> PathBuf {
        Path::new(INSIDE).join(&self.volume)
    }
}

/// Reads `NAME`, or `NAME:OPTION,OPTION…`.
fn parse_one(text: &str) -> anyhow::Result<Disk> {
    let (volume, options) = match text.split_once(':') {
        Some((volume, options)) => (volume, options.split(',').collect()),
        None => (text, Vec::new()),
    };
    ensure!(!volume.is_empty(), "{text:?} names no volume");
    let mut disk = Disk {
        volume: volume.to_owned(),
        writable: true,
        properties: Vec::new(),
    };
    for option in options {
        match option {
            "ro" => disk.writable = false,
            "rw" => disk.writable = true,
            property if property.contains('=') => disk.properties.push(property.to_owned()),
            _ => bail!(
                "{text:?} is not a volume and options of a virtual machine's disk, such as db, db:ro or db:bootindex=1; \
                 where it is mounted is for the guest to say"
            ),
        }
    }
    Ok(disk)
}

/// Reads a request for disks.
pub fn parse(texts: &[String]) -> anyhow::Result<Vec<Disk>> {
    let mut all: Vec<Disk> = Vec::new();
    for text in texts {
        let one = parse_one(text)?;
        if all.iter().any(|other| other.volume == one.volume) {
            bail!("the volume {} is named twice", one.volume);
        }
        all.push(one);
    }
    Ok(all)
}

/// The virtual machine with these disks, and their entries for its record. `disks` are those of its instance.
pub fn with(arguments: Arguments, all: &[Disk], disks: &Disks) -> anyhow::Result<(Arguments, Vec<Mounted>)> {
    if all.is_empty() {
        return Ok((arguments, Vec::new()));
    }
    if let Some(lack) = disks.lacking() {
        bail!("{lack}");
    }
    let rows = disks.all()?;
    let (mut arguments, mut volumes) = (arguments, Vec::new());
    for disk in all {
        let name = &disk.volume;
        let row = rows.iter().find(|row| row.name == *name);
        let row =
            row.with_context(|| format!("there is no volume {name} here; `verbatim volume list` shows all"))?;
        arguments = arguments.with_disk(&NbdDisk {
            export: name,
            socket: &disk.folder().join(SOCKET),
            bytes: row.length_bytes,
            writable: disk.writable,
            properties: &disk.properties,
        })?;
        volumes.push(Mounted {
            volume: name.clone(),
            inside: disk.folder(),
            writable: disk.writable,
        });
    }
    Ok((arguments, volumes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_are_read_and_nonsense_is_refused() {
        let parsed = |texts: &[&str]| {
            let texts: Vec<String> = texts.iter().map(|text| (*text).to_owned()).collect();
            parse(&texts).map_err(|error| error.to_string())
        };
        let disk = |volume: &str, writable, properties: &[&str]| Disk {
            volume: volume.into(),
            writable,
            properties: properties.iter().map(|text| (*text).to_owned()).collect(),
        };
        assert_eq!(
            parsed(&["db", "log:ro", "x:bootindex=1,rw,serial=a"]),
            Ok(vec![
                disk("db", true, &[]),
                disk("log", false, &[]),
                disk("x", true, &["bootindex=1", "serial=a"]),
            ])
        );
        for bad in ["db:/srv", "db:/srv:ro", "db:"] {
            assert!(parsed(&[bad]).unwrap_err().contains("such as"), "{bad}");
        }
        assert!(parsed(&[":ro"]).is_err());
        assert!(parsed(&["db", "db:ro"]).unwrap_err().contains("twice"));
    }

    #[test]
    fn without_a_daemon_it_is_said_so() {
        let folder = tempfile::tempdir().unwrap();
        let disks = Disks::new(folder.path(), "vm");
        let qemu = || Arguments::parse(&["qemu"]).unwrap();
        assert_eq!(with(qemu(), &[], &disks).unwrap(), (qemu(), Vec::new()));
        let error = with(qemu(), &parse(&["db".to_owned()]).unwrap(), &disks).unwrap_err();
        assert!(error.to_string().contains("no volume daemon answers"), "{error}");
    }
}
