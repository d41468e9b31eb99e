//! Virtual machines that are not any more what they were started as: disks with a snapshot or a mirror in their place, other media, devices that were added
//! and removed. What they have goes along, and what cannot is refused by its name.

use std::path::PathBuf;

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use verbatim_e2e::{ROLLED_BACK, Running, TestLab, eventually};
use verbatim_vm::Qmp;

use super::{Guest, HOSTS, LIMIT, NAME, blockers, counted, program};
use crate::Test;

/// Of a QEMU that somebody else has started.
const SOCKET: &str = "/run/guest.qmp";

/// Where an agent has that of an instance.
const INSTANCE: &str = "/run/verbatim/instances/guest/qmp";

/// All of them.
pub fn tests() -> Vec<Test> {
    vec![
        Test::new("machines::changed_disks", HOSTS, disks),
        Test::new("machines::changed_devices", HOSTS, devices),
        Test::new("machines::changed_images", HOSTS, images),
        Test::new("machines::changed_refused", HOSTS, refused),
    ]
}

/// What a QEMU has printed.
type Printed<'a> = Box<dyn Fn() -> anyhow::Result<String> + 'a>;

/// A QEMU's monitor, asked by connections of a moment: it serves one.
pub(super) struct Monitor<'a> {
    path: PathBuf,
    runtime: Runtime,
    printed: Printed<'a>,
}

impl<'a> Monitor<'a> {
    fn of(lab: &TestLab, host: &str, path: &str, printed: Printed<'a>) -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let path = lab.path(host, path)?;
        Ok(Self {
            path,
            runtime,
            printed,
        })
    }

    /// That of the instance.
    pub(super) fn at(lab: &'a TestLab, host: &str) -> anyhow::Result<Self> {
        let instance = lab.known(NAME);
        Self::of(lab, host, INSTANCE, Box::new(move || instance.output()))
    }

    pub(super) fn ask(&self, command: &'static str, arguments: Value) -> anyhow::Result<Value> {
        self.runtime.block_on(async {
            let qmp = Qmp::connect(&self.path).await?;
            Ok(qmp.ask(command, arguments).await?)
        })
    }

    pub(super) fn line(&self, line: &str) -> anyhow::Result<String> {
        let said = self.ask("human-monitor-command", json!({"command-line": line}))?;
        Ok(said.as_str().unwrap_or_default().to_owned())
    }

    /// Writes a MiB at this one, each byte of it this, and has it flushed.
    fn write(&self, disk: &str, byte: u8, mib: u32) -> anyhow::Result<()> {
        self.line(&format!("qemu-io {disk} \"write -P {byte:#x} {mib}M 1M\""))?;
        self.line(&format!("qemu-io {disk} flush")).map(drop)
    }

    /// An error unless that is there. QEMU prints what is, and its C library keeps the last 4 KiB of that back.
    fn has(&self, disk: &str, byte: u8, mib: u32) -> anyhow::Result<()> {
        let start = format!("{:08x}:", mib << 20);
        let lines = || -> anyhow::Result<Vec<String>> {
            let printed = (self.printed)()?;
            let whole = printed.split_inclusive('\n').filter(|line| line.ends_with('\n'));
            Ok(whole
                .filter(|line| line.starts_with(&start))
                .map(str::to_owned)
                .collect())
        };
        let before = lines()?.len();
        self.line(&format!("qemu-io {disk} \"read -v {mib}M 16k\""))?;
        let line = eventually("what a disk has", LIMIT, || {
            let lines = lines()?;
            Ok((lines.len() > before).then(|| lines.last().cloned()).flatten())
        })?;
        let expected = vec![format!("{byte:02x}"); 16].join(" ");
        ensure!(line.contains(&expected), "{disk} at {mib} MiB: {line}");
        Ok(())
    }

    /// What is joined to a disk or a drive of this name.
    fn backend(&self, device: &str) -> anyhow::Result<Value> {
        let all = self.ask("query-block", json!({}))?;
        let all = all.as_array().context("no list")?;
        let found = all.iter().find(|backend| backend["device"] == device);
        found.cloned().with_context(|| format!("no {device} in {all:?}"))
    }

    fn file_of(&self, device: &str) -> anyhow::Result<String> {
        let backend = self.backend(device)?;
        let image = &backend["inserted"]["image"];
        // Its root's own, or its file's.
        let name = image["filename"].as_str().unwrap_or_default();
        let inner = name
            .strip_prefix("json:")
            .and_then(|text| serde_json::from_str::<Value>(text).ok());
        let inner = inner.and_then(|root| root["file"]["filename"].as_str().map(str::to_owned));
        Ok(inner.unwrap_or_else(|| name.to_owned()))
    }

    pub(super) fn devices(&self) -> anyhow::Result<Vec<String>> {
        let listed = self.ask("qom-list", json!({"path": "/machine/peripheral"}))?;
        let listed = listed.as_array().context("no list")?.iter();
        let mut names: Vec<_> = listed
            .filter(|entry| {
                entry["type"]
                    .as_str()
                    .is_some_and(|kind| kind.starts_with("child<"))
            })
            .filter_map(|entry| entry["name"].as_str().map(str::to_owned))
            .collect();
        names.sort();
        Ok(names)
    }

    /// Waits until no job is under way, or that one is ready.
    fn job(&self, is_over: impl Fn(&[Value]) -> bool) -> anyhow::Result<()> {
        eventually("a job of QEMU's", LIMIT, || {
            let jobs = self.ask("query-block-jobs", json!({}))?;
            Ok(is_over(jobs.as_array().context("no list")?).then_some(()))
        })
    }
}

/// Images of 32 MiB on storage that both hosts reach.
struct Images(tempfile::TempDir);

impl Images {
    fn new(names: &[&str]) -> anyhow::Result<Self> {
        let images = Self(tempfile::TempDir::new_in("/var/tmp")?);
        for name in names {
            std::fs::File::create(images.0.path().join(name))?.set_len(32 << 20)?;
        }
        Ok(images)
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }
}

/// A QEMU on `src` that is attached, with more than the usual arguments. Its guest counts in a file beside the images, wherever it is.
struct Foreign {
    process: Running,
    serial: PathBuf,
}

impl Foreign {
    fn start(lab: &TestLab, images: &Images, more: &[&str]) -> anyhow::Result<Self> {
        let program = program()?;
        let socket = format!("unix:{SOCKET},server=on,wait=off");
        let serial = images.0.path().join("serial");
        std::fs::write(&serial, "")?;
        let file = format!("file,id=serial,path={},append=on", serial.display());
        let usual = [
            "qemu-system-x86_64",
            "-M",
            "pc,memory-backend=mem",
            "-object",
            "memory-backend-file,id=mem,size=16M,mem-path=/run/guest.ram,share=on",
            "-accel",
            "tcg",
            "-m",
            "16",
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-qmp",
            &socket,
            "-chardev",
            &file,
            "-serial",
            "chardev:serial",
            "-kernel",
            program.to_str().context("a path in UTF-8")?,
        ];
        let process = lab.start_plain("src", &[&usual[..], more].concat())?;
        let foreign = Self { process, serial };
        foreign
            .counts_on()
            .with_context(|| foreign.process.stderr().unwrap_or_default())?;
        Ok(foreign)
    }

    fn monitor(&self, lab: &TestLab) -> anyhow::Result<Monitor<'_>> {
        Monitor::of(lab, "src", SOCKET, Box::new(|| self.process.stdout()))
    }

    fn attach(&self, lab: &TestLab) -> anyhow::Result<()> {
        lab.ask(&["attach", NAME, "--qmp", SOCKET, "--host", "src"])
            .map(drop)
    }

    /// Waits until the guest, wherever it is, has counted on. An error if that is not 1, 2, 3, … since it was reset.
    fn counts_on(&self) -> anyhow::Result<()> {
        let count = || {
            let said = std::fs::read_to_string(&self.serial)?;
            counted(&said[said.rfind("tick 1\n").unwrap_or(0)..])
        };
        let before = count()?;
        eventually("a guest that counts", LIMIT, || {
            Ok((count()? >= before + 20).then_some(()))
        })
    }

    /// Moves there and back, and again, and looks at each place whether all is as it was.
    fn moves(
        &self,
        lab: &TestLab,
        is_right: impl Fn(&Monitor<'_>) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        is_right(&self.monitor(lab)?).context("before it moves")?;
        self.attach(lab)?;
        lab.ask(&["check", NAME, "--to", "dst"])?;
        for to in ["dst", "src", "dst"] {
            lab.known(NAME).migrate(to)?.must_be_committed()?;
            self.counts_on()?;
            is_right(&Monitor::at(lab, to)?).with_context(|| format!("on {to}"))?;
        }
        lab.ask(&["stop", NAME]).map(drop)
    }
}

/// A chain of snapshots, a mirror that was pivoted to, a medium that was changed and one that was ejected, for disks by `-drive` and by `-blockdev`.
fn disks(lab: &TestLab) -> anyhow::Result<()> {
    let images = Images::new(&["one", "two", "three", "cd1", "cd2"])?;
    let drive = |file: &str, more: &str| format!("file={},format=raw,{more}", images.path(file));
    let foreign = Foreign::start(
        lab,
        &images,
        &[
            "-drive",
            &drive("one", "if=none,id=one,aio=threads"),
            "-device",
            "virtio-blk-pci,drive=one,disable-modern=on",
            "-drive",
            &drive("two", "if=virtio"),
            "-blockdev",
            &format!(
                "driver=file,filename={},node-name=three-file",
                images.path("three")
            ),
            "-blockdev",
            "driver=raw,file=three-file,node-name=three",
            "-device",
            "virtio-blk-pci,drive=three,id=disk3",
            "-drive",
            &drive("cd1", "media=cdrom,id=cd"),
            "-cdrom",
            &images.path("cd1"),
        ],
    )?;
    let monitor = &foreign.monitor(lab)?;
    monitor.write("one", 0x11, 24)?;
    for (name, byte) in [("one-a", 0x22), ("one-b", 0x33)] {
        let snapshot = json!({"device": "one", "snapshot-file": images.path(name), "format": "qcow2"});
        monitor.ask("blockdev-snapshot-sync", snapshot)?;
        monitor.write("one", byte, if name == "one-a" { 25 } else { 24 })?;
    }
    let snapshot = json!({"node-name": "three", "snapshot-node-name": "three-now", "snapshot-file": images.path("three-a"), "format": "qcow2"});
    monitor.ask("blockdev-snapshot-sync", snapshot)?;
    let mirror =
        json!({"device": "virtio0", "target": images.path("two-b"), "format": "raw", "sync": "full"});
    monitor.ask("drive-mirror", mirror)?;
    monitor.job(|jobs| jobs.iter().any(|job| job["ready"] == true))?;
    monitor.ask("block-job-complete", json!({"device": "virtio0"}))?;
    monitor.job(<[_]>::is_empty)?;
    monitor.write("virtio0", 0x44, 3)?;
    let change = json!({"device": "cd", "filename": images.path("cd2"), "format": "raw"});
    monitor.ask("blockdev-change-medium", change)?;
    monitor.ask("eject", json!({"device": "ide1-cd0", "force": true}))?;
    let is_right = |monitor: &Monitor<'_>| {
        monitor.has("one", 0x33, 24)?;
        monitor.has("one", 0x22, 25)?;
        monitor.has("virtio0", 0x44, 3)?;
        ensure!(monitor.file_of("one")? == images.path("one-b"));
        ensure!(monitor.file_of("virtio0")? == images.path("two-b"));
        ensure!(monitor.file_of("cd")? == images.path("cd2"));
        let all = monitor.ask("query-block", json!({}))?;
        let has_three = all.as_array().context("no list")?.iter().any(|backend| {
            backend["inserted"]["node-name"] == "three-now"
                && backend["qdev"]
                    .as_str()
                    .is_some_and(|path| path.contains("disk3"))
        });
        ensure!(has_three, "{all}");
        let ejected = monitor.backend("ide1-cd0")?;
        ensure!(
            ejected["tray_open"] == true && ejected.get("inserted").is_none(),
            "{ejected}"
        );
        Ok(())
    };
    foreign.moves(lab, is_right)
}

/// A disk, a network card with its network, and a USB device that were added; a disk and a USB device that were removed.
fn devices(lab: &TestLab) -> anyhow::Result<()> {
    let images = Images::new(&["one", "two", "three"])?;
    let drive = |file: &str, more: &str| format!("file={},format=raw,{more}", images.path(file));
    let foreign = Foreign::start(
        lab,
        &images,
        &[
            "-device",
            "qemu-xhci,id=usb",
            "-device",
            "usb-tablet,id=tablet",
            "-device",
            "usb-kbd,id=keys",
            "-drive",
            &drive("one", "if=none,id=one"),
            "-device",
            "virtio-blk-pci,drive=one,id=disk1",
            "-drive",
            &drive("two", "if=virtio"),
            "-netdev",
            "user,id=net",
            "-device",
            "virtio-net-pci,netdev=net,id=card",
        ],
    )?;
    let monitor = &foreign.monitor(lab)?;
    monitor.ask("device_del", json!({"id": "tablet"}))?;
    monitor.ask("device_del", json!({"id": "disk1"}))?;
    // The guest has no part in it: QEMU takes the disk out when it is reset.
    monitor.ask("system_reset", json!({}))?;
    eventually("devices that are gone", LIMIT, || {
        Ok((monitor.devices()? == ["card", "keys", "usb"]).then_some(()))
    })?;
    eventually("a guest that counts anew", LIMIT, || {
        let said = std::fs::read_to_string(&foreign.serial)?;
        Ok((said.matches("tick 1\n").count() == 2).then_some(()))
    })?;
    foreign.counts_on()?;
    let file = json!({"driver": "raw", "node-name": "late", "file": {"driver": "file", "filename": images.path("three")}});
    monitor.ask("blockdev-add", file)?;
    monitor.ask(
        "device_add",
        json!({"driver": "virtio-blk-pci", "drive": "late", "id": "disk3", "serial": "abc"}),
    )?;
    monitor.ask("netdev_add", json!({"type": "user", "id": "net2"}))?;
    monitor.ask(
        "device_add",
        json!({"driver": "virtio-net-pci", "netdev": "net2", "id": "card2"}),
    )?;
    monitor.ask("device_add", json!({"driver": "usb-mouse", "id": "mouse"}))?;
    let places = |monitor: &Monitor<'_>| -> anyhow::Result<Vec<Value>> {
        let asked = [
            ("disk3", "addr"),
            ("card", "addr"),
            ("card2", "addr"),
            ("card2", "mac"),
            ("disk3", "serial"),
        ];
        let asked = asked.iter().map(|(device, property)| {
            monitor.ask(
                "qom-get",
                json!({"path": format!("/machine/peripheral/{device}"), "property": property}),
            )
        });
        let mut places = asked.collect::<anyhow::Result<Vec<_>>>()?;
        let usb = monitor.line("info usb")?;
        let mut ports: Vec<_> = usb
            .lines()
            .filter_map(|line| {
                Some((
                    line.split_once("Port ")?.1.split(',').next()?,
                    line.rsplit_once("ID: ")?.1.trim(),
                ))
            })
            .collect();
        ports.sort_unstable();
        places.push(json!(ports));
        Ok(places)
    };
    let expected = places(monitor)?;
    foreign.moves(lab, |monitor| {
        ensure!(monitor.devices()? == ["card", "card2", "disk3", "keys", "mouse", "usb"]);
        ensure!(
            places(monitor)? == expected,
            "{:?} was {expected:?}",
            places(monitor)?
        );
        let networks = monitor.line("info network")?;
        ensure!(networks.contains("net2: index=0,type=user"), "{networks}");
        ensure!(monitor.file_of("virtio0")? == images.path("two"));
        ensure!(
            monitor.backend("one").is_err(),
            "the disk that was removed is there again"
        );
        Ok(())
    })
}

/// A backing file of another version at the destination is refused, and one that is the same is taken.
fn images(lab: &TestLab) -> anyhow::Result<()> {
    // Each host has a `/run` of its own.
    const BASE: &str = "/run/disks/base";
    let base = |host: &str| lab.path(host, BASE);
    for (host, byte) in [("src", 0x11), ("dst", 0x22)] {
        let path = base(host)?;
        std::fs::create_dir(path.parent().context("a folder")?)?;
        std::fs::write(path, vec![byte; 32 << 20])?;
    }
    let images = Images::new(&[])?;
    let drive = format!("file={BASE},format=raw,if=none,id=one");
    let foreign = Foreign::start(
        lab,
        &images,
        &["-drive", &drive, "-device", "virtio-blk-pci,drive=one"],
    )?;
    let monitor = foreign.monitor(lab)?;
    let snapshot = json!({"device": "one", "snapshot-file": images.path("over"), "format": "qcow2"});
    monitor.ask("blockdev-snapshot-sync", snapshot)?;
    monitor.write("one", 0x77, 25)?;
    foreign.attach(lab)?;
    let said = blockers(lab)?;
    ensure!(
        said.contains(BASE) && said.contains("another file than on the source"),
        "{said}"
    );
    let migration = lab.known(NAME).migrate("dst")?;
    ensure!(migration.outcome == ROLLED_BACK, "{migration:?}");
    let error = migration.error.unwrap_or_default();
    ensure!(error.contains("another file than on the source"), "{error}");
    monitor.has("one", 0x11, 24)?;
    std::fs::remove_file(base("dst")?)?;
    let said = blockers(lab)?;
    ensure!(said.contains(BASE) && said.contains("is not there"), "{said}");
    std::fs::copy(base("src")?, base("dst")?)?;
    lab.ask(&["check", NAME, "--to", "dst"])?;
    lab.known(NAME).migrate("dst")?.must_be_committed()?;
    foreign.counts_on()?;
    let there = Monitor::at(lab, "dst")?;
    there.has("one", 0x77, 25)?;
    there.has("one", 0x11, 24)?;
    lab.ask(&["stop", NAME]).map(drop)
}

/// What cannot be had elsewhere is named before anything is sent, and the guest goes on.
fn refused(lab: &TestLab) -> anyhow::Result<()> {
    let images = Images::new(&["one"])?;
    let drive = format!("file={},format=raw,if=none,id=one", images.path("one"));
    let guest = Guest::start(lab, &["-drive", &drive, "-device", "virtio-blk-pci,drive=one"])?;
    let monitor = Monitor::at(lab, "src")?;
    let is_refused = |why: &str| -> anyhow::Result<()> {
        let said = blockers(lab)?;
        ensure!(said.contains(why), "{said}");
        let migration = guest.instance.migrate("dst")?;
        ensure!(migration.outcome == ROLLED_BACK, "{migration:?}");
        let error = migration.error.unwrap_or_default();
        ensure!(error.contains(why), "{error}");
        guest.counts_on()
    };
    monitor.ask("object-add", json!({"qom-type": "iothread", "id": "thread"}))?;
    is_refused("the object thread (iothread) was added")?;
    monitor.ask("object-del", json!({"id": "thread"}))?;
    monitor.ask("device_add", json!({"driver": "pci-testdev", "id": "test"}))?;
    is_refused("the device test (pci-testdev) was added")?;
    lab.ask(&["stop", NAME])?;
    let guest = Guest::start(lab, &["-drive", &drive, "-device", "virtio-blk-pci,drive=one"])?;
    let monitor = Monitor::at(lab, "src")?;
    let snapshot = json!({"device": "one", "snapshot-file": "/tmp/over", "format": "qcow2"});
    monitor.ask("blockdev-snapshot-sync", snapshot)?;
    let said = blockers(lab)?;
    ensure!(
        said.contains("/tmp/over") && said.contains("own container"),
        "{said}"
    );
    let migration = guest.instance.migrate("dst")?;
    ensure!(migration.outcome == ROLLED_BACK, "{migration:?}");
    // QEMU has printed that it has made the overlay, in the midst of what the guest has said.
    ensure!(guest.instance.row()?.state == "running");
    lab.ask(&["stop", NAME]).map(drop)
}
