//! Disks that QEMU reaches by NBD on a Unix socket, in its command line.

use std::path::Path;

use serde_json::json;

use crate::arguments::Arguments;
use crate::error::{Error, Result};
use crate::machine::Machine;

/// Time in seconds for which QEMU holds the guest's requests back and reconnects when the disk's server has
/// ended. Then the requests fail.
const RECONNECT: u32 = 60;

/// A sector, in bytes.
const SECTOR: u64 = 512;

/// QEMU's assumption of a disk's geometry without a partition table: as many cylinders as there are, within
/// bounds. Otherwise QEMU would read the first sector when it starts.
const HEADS: u64 = 16;
const SECTORS: u64 = 63;
const CYLINDERS: (u64, u64) = (2, 16_383);

/// The most bytes of a serial number (Virtual I/O Device 1.1, §5.2.6).
const SERIAL: usize = 20;

/// A disk at an NBD server.
#[derive(Debug, Clone, Copy)]
pub struct NbdDisk<'a> {
    /// The export's name, and the disk's serial number.
    pub export: &'a str,
    /// The server's socket, as QEMU sees it.
    pub socket: &'a Path,
    /// Its size in bytes: whole sectors.
    pub bytes: u64,
    /// Whether the guest may write to it.
    pub writable: bool,
    /// Properties of the device, each `name=value` (`-device virtio-blk,help`).
    pub properties: &'a [String],
}

impl Arguments {
    /// The same with one more disk, a virtio one behind the user's. QEMU makes no request to it before the
    /// guest runs.
    pub fn with_disk(mut self, disk: &NbdDisk) -> Result<Self> {
        let mut device = String::new();
        for property in disk.properties {
            let name = property.split_once('=').map_or("", |(name, _)| name);
            if name.is_empty() || property.contains(',') {
                return Err(Error::Arguments(format!(
                    "`{property}` is no property of a disk, such as bootindex=1"
                )));
            }
            if name == "drive" {
                return Err(Error::Arguments(
                    "`drive` cannot be taken: the disk is the volume".to_owned(),
                ));
            }
            device.push_str(&format!(",{property}"));
        }
        let name = format!("verbatim-disk{}", self.disks.len() / 4);
        let path = disk.socket.display().to_string().replace(',', ",,");
        let access = if disk.writable { "" } else { ",read-only=on" };
        let cylinders = disk.bytes / (SECTOR * HEADS * SECTORS);
        let cylinders = cylinders.clamp(CYLINDERS.0, CYLINDERS.1);
        let serial: String = disk.export.chars().take(SERIAL).collect();
        self.disks.extend([
            "-blockdev".to_owned(),
            format!(
                "driver=nbd,node-name={name},server.type=unix,server.path={path},export={},reconnect-delay={RECONNECT},discard=unmap{access}",
                disk.export
            ),
            "-device".to_owned(),
            format!(
                "virtio-blk,drive={name},serial={serial},cyls={cylinders},heads={HEADS},secs={SECTORS}{device}"
            ),
        ]);
        Ok(self)
    }
}

impl Arguments {
    /// QEMU's name of a disk of [`Self::with_disk`], by the server's socket.
    pub fn node_at(&self, socket: &Path) -> Option<&str> {
        let path = format!("server.path={},", socket.display().to_string().replace(',', ",,"));
        let mut words = self.disks.iter();
        let word = words.find(|word| word.starts_with("driver=nbd,") && word.contains(&path))?;
        let (_, rest) = word.split_once("node-name=")?;
        rest.split(',').next()
    }
}

impl Machine {
    /// Tells the guest the length of a disk of [`Arguments::with_disk`] in bytes. If the disk has grown since
    /// QEMU connected, the server has ended the connection: QEMU learns the length when it reconnects for a
    /// request.
    pub async fn tell_size(&self, node: &str, bytes: u64) -> Result<()> {
        let size = || json!({"node-name": node, "size": bytes});
        match self.qmp().run("block_resize", size()).await {
            // QEMU does not know the new length yet.
            Err(Error::Refused { .. }) => {
                self.monitor(&format!("qemu-io {node} \"read 0 {SECTOR}\""))
                    .await?;
                self.qmp().run("block_resize", size()).await
            }
            told => told,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_the_same_wherever_it_is_and_is_not_looked_at_when_it_is_made() {
        let properties = ["bootindex=1".to_owned()];
        let disk = NbdDisk {
            export: "a-name-of-more-than-20",
            socket: Path::new("/run/volumes/a/nbd"),
            bytes: 1 << 30,
            writable: true,
            properties: &properties,
        };
        let other = NbdDisk {
            export: "log",
            bytes: 512,
            writable: false,
            properties: &[],
            ..disk
        };
        let plain = Arguments::parse(&["qemu", "-nographic"]).unwrap();
        let with = plain.with_disk(&disk).unwrap().with_disk(&other).unwrap();
        let expected = "-nographic \
             -blockdev driver=nbd,node-name=verbatim-disk0,server.type=unix,server.path=/run/volumes/a/nbd,export=a-name-of-more-than-20,\
             reconnect-delay=60,discard=unmap \
             -device virtio-blk,drive=verbatim-disk0,serial=a-name-of-more-than-,cyls=2080,heads=16,secs=63,bootindex=1 \
             -blockdev driver=nbd,node-name=verbatim-disk1,server.type=unix,server.path=/run/volumes/a/nbd,export=log,\
             reconnect-delay=60,discard=unmap,read-only=on \
             -device virtio-blk,drive=verbatim-disk1,serial=log,cyls=2,heads=16,secs=63";
        assert!(
            with.line().join(" ").ends_with(expected),
            "{}",
            with.line().join(" ")
        );
        let command = with.command(Path::new("/r"), Path::new("/q"), true);
        let words: Vec<_> = command.get_args().map(|word| word.to_str().unwrap()).collect();
        assert!(words.join(" ").contains(expected));
        assert!(with.files().is_empty(), "they are no files of the host's");
        // Two disks of one socket do not occur; here the first one is returned.
        assert_eq!(
            with.node_at(Path::new("/run/volumes/a/nbd")),
            Some("verbatim-disk0")
        );
        assert_eq!(with.node_at(Path::new("/run/volumes/a")), None);
        let text = serde_json::to_string(&with).unwrap();
        assert_eq!(serde_json::from_str::<Arguments>(&text).unwrap(), with);
    }

    #[test]
    fn nonsense_is_refused() {
        for property in ["", "x", "=1", "a=1,drive=x", "drive=other"] {
            let properties = [property.to_owned()];
            let disk = NbdDisk {
                export: "a",
                socket: Path::new("/s"),
                bytes: 512,
                writable: true,
                properties: &properties,
            };
            let arguments = Arguments::parse(&["qemu"]).unwrap();
            assert!(arguments.with_disk(&disk).is_err(), "{property}");
        }
    }
}
