//! Domains of libvirt: each host has a libvirt of its own, which starts QEMU and keeps its monitor, and a domain moves between them.
//!
//! The guest is that of the other virtual machines (`machines`), and what it says goes to one file for both hosts. So that it is 1, 2, 3, … shows that
//! no copy ran beside another, whatever libvirt and the agents believe.

mod disks;
mod forwards;
mod kept;

use std::time::Duration;

use anyhow::{Context, ensure};
use verbatim_e2e::{Action, Instance, ROLLED_BACK, Running, TestLab, eventually, left_behind};

use crate::Test;
use crate::faults::{self, Subject};
use crate::machines::devices::{Loop, NODE, put_in};
use crate::machines::{blockers, counted, program};

const HOSTS: &[&str] = &["src", "dst"];
/// As for other virtual machines.
const THREE: &[&str] = &["src", "dst", "peer"];
const LIMIT: Duration = Duration::from_secs(60);
/// libvirt starts no QEMU before it has asked it for all that it can do.
const START: Duration = Duration::from_secs(120);
const NAME: &str = "guest";
const URI: &str = "qemu:///system";

/// A libvirt in a host. Its files are the host's own: what it writes elsewhere than to `/run` lies in `/run`, too. Its sockets (`$0`) are where another host's libvirt reaches them,
/// which takes it for another machine's by its number (`$1`). A later start is one with its host: what is to start with that does.
const DAEMON: &str = "set -e
mount --make-rprivate /
mkdir -p $0
rm -f $0/qemu/autostarted
ln -sfn $0 /run/libvirt
for folder in /etc/libvirt /var/lib/libvirt /var/cache/libvirt /var/log/libvirt; do
    mkdir -p $folder /run/own$folder
    mount --bind /run/own$folder $folder
done
mkdir -p /run/own/ram
cat >/etc/libvirt/qemu.conf <<'END'
security_driver = \"none\"
user = \"root\"
group = \"root\"
cgroup_controllers = []
namespaces = []
stdio_handler = \"file\"
memory_backing_dir = \"/run/own/ram\"
END
printf 'auth_unix_rw = \"none\"\nhost_uuid = \"%s\"\n' $1 >/etc/libvirt/libvirtd.conf
exec libvirtd --pid-file /run/own/pid";

/// As a high-availability manager: it starts the domain again where that has crashed, or its QEMU has failed. It says all that it hears of it.
const MANAGER: &str = "stdbuf -oL virsh --quiet --connect $0 event --domain $1 --event lifecycle --loop | while read -r heard; do
    echo $heard
    case $heard in *Crashed*|*Failed*) virsh --quiet --connect $0 start $1 ;; esac
done";

/// Something before, at and after the commit, at either host.
const SHORT: &[(&str, Action)] = &[
    ("source-pre-copy", Action::Exit),
    ("source-transfer", Action::Exit),
    ("source-ask", Action::Exit),
    ("destination-prepare-restore", Action::Exit),
    ("destination-restore", Action::Hang),
    ("destination-committed", Action::Exit),
    ("destination-running", Action::Exit),
];

/// All of them: they need libvirt, which few machines have.
pub fn tests() -> Vec<Test> {
    let tests = [
        Test::new("machines::libvirt", HOSTS, moves).injecting_faults(),
        Test::new("machines::libvirt_own_means", HOSTS, own_means).injecting_faults(),
        Test::new("machines::libvirt_left", HOSTS, left),
        Test::new("machines::libvirt_block_device", HOSTS, block_device),
        Test::new("machines::libvirt_faults", THREE, |lab| {
            let site = Site::start(lab)?;
            site.ask("src", &["create", &site.description(NAME, BACKING)?])?;
            site.counts_on()?;
            attach(lab, NAME)?;
            faults::some(lab, Box::new(site), SHORT)
        })
        .injecting_faults(),
        Test::new("machines::libvirt_kept", THREE, kept::faults).injecting_faults(),
        Test::new("machines::libvirt_attached_means", HOSTS, kept::attached_means).injecting_faults(),
        Test::new("machines::libvirt_disks", HOSTS, disks::changed),
        Test::new("machines::libvirt_disks_meanwhile", HOSTS, disks::meanwhile).injecting_faults(),
        Test::new("machines::libvirt_forwards", HOSTS, forwards::of_the_line),
        Test::new("machines::libvirt_passt", HOSTS, forwards::of_passt),
    ];
    tests.map(|test| test.only_on_demand(true)).into()
}

/// The guest's pages are full: a snapshot without its RAM has a few hundred KiB.
const LEAST_SAVED: u64 = 4 << 20;

/// RAM that can move.
const BACKING: &str = "<memoryBacking><source type='file'/><access mode='shared'/></memoryBacking>";

/// Hosts with a libvirt each, and where they write to.
struct Site<'a> {
    lab: &'a TestLab,
    folder: tempfile::TempDir,
    daemons: Vec<Running>,
}

impl Drop for Site<'_> {
    fn drop(&mut self) {
        // What they have started ends with the hosts.
        for daemon in &self.daemons {
            let _ = daemon.signal(rustix::process::Signal::TERM);
        }
    }
}

impl<'a> Site<'a> {
    fn start(lab: &'a TestLab) -> anyhow::Result<Self> {
        let folder = tempfile::TempDir::new_in("/var/tmp")?;
        let mut site = Self {
            lab,
            folder,
            daemons: Vec::new(),
        };
        site.make_disk("disk")?;
        for number in 0..HOSTS.len() {
            let daemon = site.daemon(number)?;
            site.daemons.push(daemon);
        }
        for host in HOSTS {
            site.is_reached(host)?;
        }
        Ok(site)
    }

    fn make_disk(&self, name: &str) -> anyhow::Result<()> {
        let made = std::process::Command::new("qemu-img")
            .args(["create", "-q", "-f", "qcow2"])
            .arg(self.folder.path().join(name))
            .arg("16M")
            .status()?;
        ensure!(made.success(), "qemu-img: {made}");
        Ok(())
    }

    /// Starts that of a host.
    fn daemon(&self, number: usize) -> anyhow::Result<Running> {
        let host = HOSTS[number];
        let sockets = self.folder.path().join(host);
        let sockets = sockets.to_str().context("a path in UTF-8")?;
        let uuid = format!("7b1f2c3a-0000-4000-8000-00000000000{number}");
        let daemon = ["unshare", "--mount", "sh", "-c", DAEMON, sockets, uuid.as_str()];
        self.lab.start_plain(host, &daemon)
    }

    fn is_reached(&self, host: &str) -> anyhow::Result<()> {
        eventually("libvirt", LIMIT, || {
            Ok(self.virsh(host, &["uri"])?.0.then_some(()))
        })
    }

    /// libvirt of a host on which no domain runs, as if that host had been started anew.
    fn starts_anew(&mut self, number: usize) -> anyhow::Result<()> {
        let daemon = self.daemons.remove(number);
        daemon.signal(rustix::process::Signal::TERM)?;
        daemon.wait(LIMIT)?;
        let daemon = self.daemon(number)?;
        self.daemons.insert(number, daemon);
        self.is_reached(HOSTS[number])
    }

    /// What virsh says on a host, and whether it could do it.
    fn virsh(&self, host: &str, words: &[&str]) -> anyhow::Result<(bool, String)> {
        let virsh = ["virsh", "--quiet", "--connect", URI];
        let said = self
            .lab
            .start_plain(host, &[&virsh[..], words].concat())?
            .wait(START)?;
        Ok((said.code == 0, format!("{}{}", said.stdout, said.stderr)))
    }

    fn ask(&self, host: &str, words: &[&str]) -> anyhow::Result<String> {
        let (is_done, said) = self.virsh(host, words)?;
        ensure!(is_done, "virsh {words:?} on {host}: {said}");
        Ok(said.trim().to_owned())
    }

    /// How libvirt has the domain on a host: `running`, `paused`, `shut off`, or `None`.
    fn state(&self, host: &str) -> anyhow::Result<Option<String>> {
        let (is_known, said) = self.virsh(host, &["domstate", NAME])?;
        Ok(is_known.then(|| said.trim().to_owned()))
    }

    /// libvirt on a host has the domain so, or sees in a moment what has become of it.
    fn comes_to(&self, host: &str, expected: Option<&str>) -> anyhow::Result<()> {
        let what = format!("libvirt on {host} that says {expected:?}");
        eventually(&what, LIMIT, || {
            Ok((self.state(host)?.as_deref() == expected).then_some(()))
        })
    }

    /// Why a domain is in its state on a host, by libvirt: `shut off (destroyed)`.
    fn reason(&self, host: &str) -> anyhow::Result<String> {
        self.ask(host, &["domstate", "--reason", NAME])
    }

    /// What QEMU has of the guest's state in its snapshots, in bytes, for a new one: the RAM is in it.
    fn saved_bytes(&self, host: &str, name: &str) -> anyhow::Result<u64> {
        let told = |words: &str| self.ask(host, &["qemu-monitor-command", NAME, "--hmp", words]);
        let said = told(&format!("savevm {name}"))?;
        ensure!(said.is_empty(), "savevm on {host}: {said}");
        let listed = told("info snapshots")?;
        let row = listed
            .lines()
            .map(|line| line.split_ascii_whitespace().collect::<Vec<_>>())
            .find(|words| words.get(1) == Some(&name));
        let row = row.with_context(|| listed.clone())?;
        let (number, unit) = (row[2].parse::<f64>()?, row[3]);
        let units = [("B", 1.0), ("KiB", 1024.0), ("MiB", 1048576.0)];
        let bytes = units.iter().find(|(name, _)| *name == unit);
        let (_, bytes) = bytes.with_context(|| listed.clone())?;
        told(&format!("delvm {name}"))?;
        Ok((number * bytes) as u64)
    }

    /// All of libvirt's own ways to write the guest down work on a host, and have its RAM: it goes on from where it was.
    fn is_libvirts(&self, host: &str, when: &str) -> anyhow::Result<()> {
        let works = || {
            let bytes = self.saved_bytes(host, "own")?;
            ensure!(bytes > LEAST_SAVED, "savevm has {bytes} bytes");
            self.ask(host, &["managedsave", NAME])?;
            ensure!(self.reason(host)? == "shut off (saved)", "{}", self.reason(host)?);
            self.ask(host, &["start", NAME])?;
            self.counts_on()
        };
        works().with_context(|| format!("{when}, on {host}"))
    }

    /// libvirt's own migration: it has the domain on another host afterwards.
    fn migrates_itself(&self, from: &str, to: &str, when: &str) -> anyhow::Result<()> {
        let socket = self.folder.path().join(to).join("libvirt-sock");
        let there = format!("qemu+unix:///system?socket={}", socket.display());
        let stream = format!("tcp://{}", self.lab.address(to)?);
        let words = [
            "migrate",
            "--live",
            "--unsafe",
            "--persistent",
            "--undefinesource",
            NAME,
            &there,
            &stream,
        ];
        self.ask(from, &words).with_context(|| when.to_owned())?;
        self.comes_to(from, None)?;
        self.comes_to(to, Some("running"))?;
        self.counts_on()
    }

    /// A file that describes a domain.
    fn description(&self, name: &str, backing: &str) -> anyhow::Result<String> {
        let folder = self.folder.path();
        let said = folder.join(name);
        let xml = format!(
            "<domain type='qemu'><name>{name}</name><memory unit='MiB'>16</memory>{backing}<vcpu>1</vcpu>
            <os><type arch='x86_64' machine='pc'>hvm</type><kernel>{}</kernel></os>
            <devices>
              <controller type='usb' model='none'/>
              <disk type='file' device='disk'>
                <driver name='qemu' type='qcow2' cache='none' io='threads'/><source file='{}'/><target dev='vda' bus='virtio'/>
              </disk>
              <serial type='file'><source path='{}' append='on'/></serial>
            </devices></domain>",
            program()?.display(),
            folder.join("disk").display(),
            said.display(),
        );
        let path = folder.join(format!("{name}.xml"));
        std::fs::write(&path, xml)?;
        Ok(path.to_str().context("a path in UTF-8")?.to_owned())
    }

    fn count(&self) -> anyhow::Result<u32> {
        counted(&std::fs::read_to_string(self.folder.path().join(NAME))?)
    }

    fn counts_on(&self) -> anyhow::Result<()> {
        let before = self.count().unwrap_or_default();
        eventually("a guest that counts", LIMIT, || {
            Ok((self.count()? >= before + 20).then_some(()))
        })
    }

    fn stands_still(&self) -> anyhow::Result<()> {
        let before = self.count()?;
        std::thread::sleep(Duration::from_millis(100));
        ensure!(self.count()? == before, "the guest runs");
        Ok(())
    }

    fn instance(&self) -> Instance<'a> {
        self.lab.known(NAME)
    }
}

impl Subject for Site<'_> {
    fn name(&self) -> &str {
        NAME
    }

    fn connections(&self) -> u32 {
        0
    }

    fn goes_on(&self, host: &str) -> anyhow::Result<()> {
        self.counts_on()?;
        for known in HOSTS {
            // A transient domain is gone where it is not.
            self.comes_to(known, (*known == host).then_some("running"))?;
        }
        Ok(())
    }

    fn moves(&self, to: &str) -> anyhow::Result<()> {
        self.instance().moves(to).map(drop)
    }

    fn end(self: Box<Self>) -> anyhow::Result<()> {
        self.count().map(drop)
    }
}

fn attach(lab: &TestLab, name: &str) -> anyhow::Result<()> {
    attach_on(lab, "src", name)
}

fn attach_on(lab: &TestLab, host: &str, name: &str) -> anyhow::Result<()> {
    lab.ask(&["attach", name, "--libvirt", URI, "--host", host])
        .map(drop)
}

/// Changes a description: each of these words stands in it, and is replaced.
fn change(description: &str, changes: &[(&str, &str)]) -> anyhow::Result<()> {
    let mut text = std::fs::read_to_string(description)?;
    for (old, new) in changes {
        ensure!(text.contains(old), "{old} is not in {text}");
        text = text.replace(old, new);
    }
    Ok(std::fs::write(description, text)?)
}

/// A domain with a block device as its disk (`<source dev=>`) moves where the device is the same one at both hosts.
fn block_device(lab: &TestLab) -> anyhow::Result<()> {
    let site = Site::start(lab)?;
    let (disk, another) = (Loop::new()?, Loop::new()?);
    for host in HOSTS {
        put_in(lab, host, &disk)?;
    }
    let description = site.description(NAME, BACKING)?;
    let file = format!("<source file='{}/disk'/>", site.folder.path().display());
    let text = std::fs::read_to_string(&description)?
        .replace("<disk type='file'", "<disk type='block'")
        .replace("type='qcow2'", "type='raw'")
        .replace(&file, &format!("<source dev='{NODE}'/>"));
    ensure!(text.contains(NODE), "{text}");
    std::fs::write(&description, text)?;
    site.ask("src", &["create", &description])?;
    site.counts_on()?;
    attach(lab, NAME)?;
    for to in ["dst", "src"] {
        site.instance().migrate(to)?.must_be_committed()?;
        site.goes_on(to)?;
    }
    let node = lab.path("dst", NODE)?;
    std::fs::remove_file(&node)?;
    put_in(lab, "dst", &another)?;
    let why = "nothing by which two hosts could tell";
    let said = blockers(lab)?;
    ensure!(said.contains(NODE) && said.contains(why), "{said}");
    let migration = site.instance().migrate("dst")?;
    ensure!(migration.outcome == ROLLED_BACK, "{migration:?}");
    ensure!(
        migration.error.clone().unwrap_or_default().contains(why),
        "{migration:?}"
    );
    site.goes_on("src")
}

/// A domain that is defined is attached, detached, moved there and back, and is libvirt's all the time.
fn moves(lab: &TestLab) -> anyhow::Result<()> {
    let site = Site::start(lab)?;
    refused(lab, &site)?;
    site.ask("src", &["define", &site.description(NAME, BACKING)?])?;
    let off = lab.refused(&["attach", NAME, "--libvirt", URI, "--host", "src"])?;
    ensure!(
        off.contains("is shut off") && off.contains("start guest"),
        "{off}"
    );
    site.ask("src", &["start", NAME])?;
    site.ask("src", &["autostart", NAME])?;
    site.counts_on()?;
    let pid = || {
        Ok::<_, anyhow::Error>(std::fs::read_to_string(
            lab.path("src", "/run/libvirt/qemu/guest.pid")?,
        )?)
    };
    let cgroups = || {
        lab.start_plain("src", &["cat", &format!("/proc/{}/cgroup", pid()?.trim())])?
            .succeed(LIMIT)
    };
    let before = cgroups()?.stdout;
    attach(lab, NAME)?;
    ensure!(cgroups()?.stdout != before, "it is frozen with the container");
    lab.ask(&["detach", NAME])?;
    ensure!(cgroups()?.stdout == before, "{}", cgroups()?.stdout);
    ensure!(left_behind(lab, "src", NAME)?.is_empty());
    attach(lab, NAME)?;
    site.counts_on()?;
    lab.ask(&["check", NAME, "--to", "dst"])?;

    // A failure before the commit, when both QEMUs have all of it.
    lab.order_faults("src", "source-commit fail\n")?;
    let migration = site.instance().migrate("dst")?;
    lab.order_faults("src", "")?;
    ensure!(migration.outcome == ROLLED_BACK, "{migration:?}");
    site.counts_on()?;
    site.comes_to("src", Some("running"))?;
    site.comes_to("dst", None)?;

    site.instance().moves("dst")?;
    site.counts_on()?;
    site.comes_to("src", Some("shut off"))?;
    site.comes_to("dst", Some("running"))?;
    let info = |host: &str| site.ask(host, &["dominfo", NAME]);
    let is = |info: &str, key: &str, value: &str| {
        let mut lines = info.lines().filter_map(|line| line.split_once(':'));
        lines.any(|(name, said)| name == key && said.trim() == value)
    };
    let (here, there) = (info("src")?, info("dst")?);
    ensure!(is(&here, "Autostart", "disable"), "{here}");
    ensure!(
        is(&there, "Persistent", "yes") && is(&there, "Autostart", "enable"),
        "{there}"
    );
    let defined = site.ask("dst", &["dumpxml", "--inactive", NAME])?;
    ensure!(!defined.contains("-incoming"), "{defined}");

    // libvirt has it there.
    site.ask("dst", &["suspend", NAME])?;
    site.stands_still()?;
    site.instance()
        .migrate_with("src", &["--memory-transport", "rdma"])?
        .must_be_committed()?;
    site.stands_still()?;
    site.comes_to("dst", Some("shut off"))?;
    site.comes_to("src", Some("paused"))?;
    site.ask("src", &["resume", NAME])?;
    site.counts_on()?;
    site.instance().moves("dst")?;
    site.counts_on()?;

    // An agent that comes after this one knows it, and it ends by libvirt's hand.
    lab.restart("dst", "agent")?;
    eventually("an agent that knows it", LIMIT, || {
        Ok((site.instance().row()?.state == "running").then_some(()))
    })?;
    site.ask("dst", &["destroy", NAME])?;
    eventually("the end of the instance", LIMIT, || {
        Ok((site.instance().row()?.state == "exited").then_some(()))
    })?;
    lab.ask(&["stop", NAME])?;
    ensure!(left_behind(lab, "dst", NAME)?.is_empty());
    site.count().map(drop)
}

/// What libvirt does with a domain by itself works after each end of a move, and what it says of one that has left is no crash.
fn own_means(lab: &TestLab) -> anyhow::Result<()> {
    let site = Site::start(lab)?;
    let description = site.description(NAME, BACKING)?;
    // Whoever believes that it has crashed starts it again.
    let text = std::fs::read_to_string(&description)?;
    let text = text.replace("<devices>", "<on_crash>restart</on_crash><devices>");
    std::fs::write(&description, text)?;
    site.ask("src", &["define", &description])?;
    site.ask("src", &["start", NAME])?;
    site.ask("src", &["autostart", NAME])?;
    site.counts_on()?;
    site.is_libvirts("src", "before all")?;
    attach(lab, NAME)?;

    lab.order_faults("src", "source-commit fail\n")?;
    let migration = site.instance().migrate("dst")?;
    lab.order_faults("src", "")?;
    ensure!(migration.outcome == ROLLED_BACK, "{migration:?}");
    site.counts_on()?;
    let bytes = site.saved_bytes("src", "attached")?;
    ensure!(
        bytes > LEAST_SAVED,
        "savevm after a move that came to nothing has {bytes} bytes"
    );
    lab.ask(&["detach", NAME])?;
    site.is_libvirts("src", "after a move that came to nothing")?;
    site.migrates_itself("src", "dst", "after a move that came to nothing")?;
    site.migrates_itself("dst", "src", "where it has never been an instance")?;
    site.ask("src", &["autostart", NAME])?;

    attach(lab, NAME)?;
    site.instance().moves("dst")?;
    site.counts_on()?;
    site.comes_to("src", Some("shut off"))?;
    let reason = site.reason("src")?;
    ensure!(reason == "shut off (destroyed)", "{reason}");
    let bytes = site.saved_bytes("dst", "attached")?;
    ensure!(bytes > LEAST_SAVED, "savevm after a move has {bytes} bytes");
    // A libvirt that starts with its host, as one that is started anew: what is to start by itself is not what has left.
    let info = site.ask("src", &["dominfo", NAME])?;
    let autostart = info.lines().find(|line| line.starts_with("Autostart"));
    ensure!(autostart.is_some_and(|line| line.ends_with("disable")), "{info}");
    let log = lab.path("src", &format!("/run/own/var/log/libvirt/qemu/{NAME}.log"))?;
    let log = std::fs::read_to_string(log)?;
    let last = log
        .lines()
        .rev()
        .find(|line| line.contains("shutting down, reason="));
    ensure!(
        last.is_some_and(|line| line.ends_with("reason=destroyed")),
        "{log}"
    );
    lab.ask(&["detach", NAME])?;
    site.is_libvirts("dst", "after a move")?;
    site.migrates_itself("dst", "src", "after a move")?;
    ensure!(left_behind(lab, "dst", NAME)?.is_empty());
    site.count().map(drop)
}

/// What libvirt, and whoever watches it, hears of a domain that has left is that it was destroyed. Nothing starts it again: no manager, and not the start of its host.
fn left(lab: &TestLab) -> anyhow::Result<()> {
    let mut site = Site::start(lab)?;
    let described = |site: &Site<'_>, name: &str, disk: &str| -> anyhow::Result<String> {
        let description = site.description(name, BACKING)?;
        let text = std::fs::read_to_string(&description)?;
        let policies = "<on_poweroff>restart</on_poweroff><on_crash>restart</on_crash><devices>";
        let folder = site.folder.path().display();
        let text = text
            .replace("<devices>", policies)
            .replace(&format!("{folder}/disk'"), &format!("{folder}/{disk}'"));
        std::fs::write(&description, text)?;
        Ok(description)
    };
    // One that stays, by which is seen that a host's start starts what it is to start.
    site.make_disk("other-disk")?;
    let other = described(&site, "other", "other-disk")?;
    for (name, description) in [(NAME, described(&site, NAME, "disk")?), ("other", other)] {
        site.ask("src", &["define", &description])?;
        site.ask("src", &["autostart", name])?;
    }
    site.ask("src", &["start", NAME])?;
    site.counts_on()?;
    let manager = lab.start_plain("src", &["sh", "-c", MANAGER, URI, NAME])?;
    let heard = || -> anyhow::Result<Vec<String>> {
        let said = manager.stdout()?;
        Ok(said
            .lines()
            .filter(|line| line.contains("lifecycle"))
            .map(str::to_owned)
            .collect())
    };
    eventually("a manager that hears of the domain", LIMIT, || {
        site.ask("src", &["suspend", NAME])?;
        site.ask("src", &["resume", NAME])?;
        Ok(heard()?
            .iter()
            .any(|line| line.contains("Suspended"))
            .then_some(()))
    })?;

    // It does what it is there for: the QEMU of a domain is killed.
    let pid = std::fs::read_to_string(lab.path("src", "/run/libvirt/qemu/guest.pid")?)?;
    lab.start_plain("src", &["kill", "-KILL", pid.trim()])?
        .succeed(LIMIT)?;
    eventually("a domain that is started again", LIMIT, || {
        let started = heard()?.iter().any(|line| line.contains("Started"));
        Ok((started && site.state("src")?.as_deref() == Some("running")).then_some(()))
    })?;
    site.ask("src", &["destroy", NAME])?;
    std::fs::remove_file(site.folder.path().join(NAME))?;
    site.ask("src", &["start", NAME])?;
    site.counts_on()?;
    attach(lab, NAME)?;
    let before = heard()?.len();

    site.instance().moves("dst")?;
    site.counts_on()?;
    site.comes_to("src", Some("shut off"))?;
    ensure!(
        site.reason("src")? == "shut off (destroyed)",
        "{}",
        site.reason("src")?
    );
    let since = eventually("a manager that hears of the end", LIMIT, || {
        let heard = heard()?.split_off(before);
        Ok(heard.iter().any(|line| line.contains("Stopped")).then_some(heard))
    })?;
    let stopped = since.iter().filter(|line| line.contains("Stopped"));
    ensure!(
        stopped.clone().count() == 1 && stopped.clone().all(|line| line.contains("Destroyed")),
        "{since:?}"
    );
    for word in ["Crashed", "Failed", "Started"] {
        ensure!(!since.iter().any(|line| line.contains(word)), "{word}: {since:?}");
    }

    site.starts_anew(0)?;
    eventually("a domain that starts with its host", LIMIT, || {
        let said = site.ask("src", &["domstate", "other"])?;
        Ok((said == "running").then_some(()))
    })?;
    site.comes_to("src", Some("shut off"))?;
    site.comes_to("dst", Some("running"))?;
    // 1, 2, 3, ...: no other copy of it has run.
    site.counts_on()?;
    site.ask("src", &["destroy", "other"])?;
    site.instance().moves("src")?;
    site.counts_on()?;
    site.comes_to("src", Some("running"))
}

/// What cannot be attached is refused with the reason, and stays as it is.
fn refused(lab: &TestLab, site: &Site<'_>) -> anyhow::Result<()> {
    let attach = |name: &str, uri: &str| lab.refused(&["attach", name, "--libvirt", uri, "--host", "src"]);
    let said = attach("nosuch", URI)?;
    ensure!(
        said.contains("knows no domain nosuch") && said.contains("list --all"),
        "{said}"
    );
    let said = attach(NAME, "qemu:///system?socket=/run/nosuch")?;
    ensure!(
        said.contains("not reached") && said.contains("/run/nosuch"),
        "{said}"
    );
    site.ask("src", &["create", &site.description("plain", "")?])?;
    let said = attach("plain", URI)?;
    ensure!(said.contains("its RAM is no shared file"), "{said}");
    ensure!(site.ask("src", &["domstate", "plain"])? == "running");
    site.ask("src", &["destroy", "plain"])?;
    ensure!(left_behind(lab, "src", "plain")?.is_empty());
    Ok(())
}
