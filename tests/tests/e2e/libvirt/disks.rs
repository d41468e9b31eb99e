//! Disks that `virsh` adds, removes and takes snapshots of while the domain is an instance: the domain has its present disks wherever it is.

use anyhow::{Context, ensure};
use verbatim_e2e::{Migration, ROLLED_BACK, TestLab, eventually};

use super::{BACKING, HOSTS, LIMIT, NAME, Site, attach, change};

/// QEMU gives up a disk of this controller at once; a disk of the PCI bus needs the guest for that.
const SCSI: &str = "<controller type='scsi' model='virtio-scsi'/><controller type='usb' model='none'/>";

impl Site<'_> {
    fn file(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    fn attach_disk(&self, host: &str, name: &str, target: &str, more: &[&str]) -> anyhow::Result<()> {
        let file = self.file(name);
        let words = ["attach-disk", NAME, &file, target, "--live", "--subdriver", "qcow2"];
        self.ask(host, &[&words[..], more].concat()).map(drop)
    }

    /// The disks by libvirt on a host: target and file of each.
    fn blocks(&self, host: &str, more: &[&str]) -> anyhow::Result<Vec<(String, String)>> {
        let said = self.ask(host, &[&["domblklist", NAME][..], more].concat())?;
        let rows = said.lines().map(|line| line.split_once(char::is_whitespace));
        let rows = rows.flatten().map(|(target, file)| (target.to_owned(), file.trim().to_owned()));
        Ok(rows.collect())
    }

    /// The files of the disks in the running domain's description on a host, with those below them, in its order.
    fn chains(&self, host: &str) -> anyhow::Result<Vec<String>> {
        let xml = self.ask(host, &["dumpxml", NAME])?;
        let files = xml.lines().filter_map(|line| line.trim().strip_prefix("<source file='"));
        let inside = self.file("");
        let files = files.filter_map(|rest| rest.split('\'').next());
        Ok(files.filter(|file| file.starts_with(&inside)).map(str::to_owned).collect())
    }

    /// Has QEMU use a disk, by libvirt's name of its device.
    fn io(&self, host: &str, device: &str, command: &str) -> anyhow::Result<()> {
        let line = format!("qemu-io -d {device} \"{command}\"");
        let said = self.ask(host, &["qemu-monitor-command", NAME, "--hmp", &line])?;
        let is_done = said.contains("64 KiB") && !said.contains("verification failed");
        ensure!(is_done, "{line} on {host}: {said}");
        Ok(())
    }
}

/// Two disks that are added, snapshots of all disks without the RAM, and one that is removed.
pub(super) fn changed(lab: &TestLab) -> anyhow::Result<()> {
    let site = Site::start(lab)?;
    let description = site.description(NAME, BACKING)?;
    change(&description, &[("<controller type='usb' model='none'/>", SCSI)])?;
    site.ask("src", &["define", &description])?;
    site.ask("src", &["start", NAME])?;
    site.counts_on()?;
    attach(lab, NAME)?;
    for name in ["second", "third"] {
        site.make_disk(name)?;
    }
    site.attach_disk("src", "second", "vdb", &["--persistent"])?;
    site.attach_disk("src", "third", "sda", &["--targetbus", "scsi"])?;
    for (device, byte) in [("virtio-disk0", 1), ("virtio-disk1", 2), ("scsi0-0-0-0", 3)] {
        site.io("src", device, &format!("write -P {byte} 0 64k"))?;
    }
    let snapshot = |host: &str, name: &str| {
        site.ask(host, &["snapshot-create-as", NAME, name, "--disk-only", "--atomic"])
    };
    snapshot("src", "now")?;
    site.io("src", "virtio-disk1", "write -P 4 64k 64k")?;
    let blocks = site.blocks("src", &[])?;
    let now = [("vda", "disk.now"), ("vdb", "second.now"), ("sda", "third.now")];
    for (target, file) in now {
        let row = (target.to_owned(), site.file(file));
        ensure!(blocks.contains(&row), "{blocks:?}");
    }
    let defined = site.blocks("src", &["--inactive"])?;
    let chains = site.chains("src")?;
    ensure!(chains.len() == 6, "{chains:?}");
    let is_same = |host: &str| -> anyhow::Result<()> {
        site.goes_on_kept(host)?;
        ensure!(site.blocks(host, &[])? == blocks, "{:?}", site.blocks(host, &[])?);
        let there = site.blocks(host, &["--inactive"])?;
        ensure!(there == defined, "{there:?} was {defined:?}");
        ensure!(site.chains(host)? == chains, "{:?} was {chains:?}", site.chains(host)?);
        for (device, byte) in [("virtio-disk0", 1), ("virtio-disk1", 2), ("scsi0-0-0-0", 3)] {
            site.io(host, device, &format!("read -P {byte} 0 64k"))?;
        }
        site.io(host, "virtio-disk1", "read -P 4 64k 64k")
    };
    lab.ask(&["check", NAME, "--to", "dst"])?;
    for to in ["dst", "src", "dst"] {
        site.instance().migrate(to)?.must_be_committed()?;
        is_same(to).with_context(|| format!("on {to}"))?;
    }

    // What libvirt could do before it can do there.
    snapshot("dst", "later")?;
    ensure!(site.chains("dst")?.len() == 9, "{:?}", site.chains("dst")?);
    site.io("dst", "virtio-disk0", "write -P 5 64k 64k")?;
    site.ask("dst", &["blockcommit", NAME, "vda", "--active", "--pivot", "--wait"])?;
    site.ask("dst", &["detach-disk", NAME, "sda", "--live"])?;
    eventually("a disk that is gone", LIMIT, || {
        let blocks = site.blocks("dst", &[])?;
        Ok((blocks.iter().all(|(target, _)| target != "sda")).then_some(()))
    })?;
    let (blocks, chains) = (site.blocks("dst", &[])?, site.chains("dst")?);
    for to in ["src", "dst"] {
        site.instance().migrate(to)?.must_be_committed()?;
        site.goes_on_kept(to)?;
        ensure!(site.blocks(to, &[])? == blocks, "{:?} was {blocks:?}", site.blocks(to, &[])?);
        ensure!(site.chains(to)? == chains, "{:?} was {chains:?}", site.chains(to)?);
        site.io(to, "virtio-disk0", "read -P 5 64k 64k")?;
        site.io(to, "virtio-disk1", "read -P 4 64k 64k")?;
    }
    Ok(())
}

/// Changes by `virsh` while the domain moves: the move comes to nothing, by name, and the next one has them.
pub(super) fn meanwhile(lab: &TestLab) -> anyhow::Result<()> {
    let site = Site::start(lab)?;
    let description = site.description(NAME, BACKING)?;
    change(&description, &[("<controller type='usb' model='none'/>", SCSI)])?;
    site.ask("src", &["define", &description])?;
    site.ask("src", &["start", NAME])?;
    site.counts_on()?;
    attach(lab, NAME)?;
    site.make_disk("second")?;
    let second = site.file("second");
    let changes: [&[&str]; 5] = [
        &["snapshot-create-as", NAME, "now", "--disk-only", "--atomic"],
        &["attach-disk", NAME, &second, "sda", "--live", "--subdriver", "qcow2", "--targetbus", "scsi"],
        &["attach-interface", NAME, "user", "--mac", "52:54:00:00:00:01", "--model", "virtio", "--live"],
        &["detach-disk", NAME, "sda", "--live"],
        &["suspend", NAME],
    ];
    for words in changes {
        lab.order_faults("src", "source-pre-setup hang\n")?;
        let reached = lab.path("src", "/run/verbatim/faults.reached")?;
        let _ = std::fs::remove_file(&reached);
        let migrate = lab.verbatim(&["migrate", NAME, "--to", "dst", "--json"])?;
        eventually("the point", LIMIT, || {
            let text = std::fs::read_to_string(&reached).unwrap_or_default();
            Ok(text.contains("source-pre-setup").then_some(()))
        })?;
        site.ask("src", words)?;
        let blocks = site.blocks("src", &[])?;
        lab.order_faults("src", "")?;
        let migration = Migration::of(&migrate.wait(LIMIT)?)?;
        if words[0] == "suspend" {
            // No change of what it is: it is paused there.
            migration.must_be_committed()?;
            site.comes_to("dst", Some("paused"))?;
            site.stands_still()?;
            site.ask("dst", &["resume", NAME])?;
            return site.goes_on_kept("dst");
        }
        ensure!(migration.outcome == ROLLED_BACK, "{words:?}: {migration:?}");
        let error = migration.error.unwrap_or_default();
        ensure!(error.contains("while it was being moved"), "{words:?}: {error}");
        site.goes_on_kept("src")?;
        ensure!(site.state("dst")?.is_none_or(|state| state == "shut off"));
        for to in ["dst", "src"] {
            site.instance().migrate(to)?.must_be_committed()?;
            site.goes_on_kept(to)?;
            ensure!(site.blocks(to, &[])? == blocks, "{words:?}: {:?}", site.blocks(to, &[])?);
        }
    }
    Ok(())
}

impl Site<'_> {
    /// A domain that is defined runs on this host, and is off on the others.
    pub(super) fn goes_on_kept(&self, host: &str) -> anyhow::Result<()> {
        self.counts_on()?;
        for known in HOSTS {
            match *known == host {
                true => self.comes_to(known, Some("running"))?,
                false => eventually("a domain that is off", LIMIT, || {
                    Ok(self.state(known)?.is_none_or(|state| state == "shut off").then_some(()))
                })?,
            }
        }
        Ok(())
    }
}
