//! A volume as the disk of Linux by vhost-user-blk: its driver, its file system and fio find all that they wrote while the volume's daemon is killed
//! and while the disk grows; and so does another machine on the host to which the volume has moved.
//!
//! What QEMU alone shows (`crates/volume/tests/vhost_user.rs`) is not repeated: this is about the driver that guests have.
//!
//! It needs a kernel that not every machine has, so plain `cargo test` only lists it; `make volume-test` runs it.

use std::path::{Path, PathBuf};
use std::process::{Child, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context, ensure};
use libtest_mimic::{Arguments, Failed, Trial};
use serde_json::Value;
use verbatim_e2e::eventually;
use verbatim_testbed::{Command, Network, Vm, VmConfig};

const HOSTS: [&str; 2] = ["a", "b"];
/// How long anything may take on an emulated processor.
const LIMIT: Duration = Duration::from_secs(180);
const MIB: u64 = 1 << 20;
const SIZE: u64 = 192 * MIB;
/// In the end.
const GROWN: u64 = 320 * MIB;

/// It writes at random, and reads everything back with its checksums; past the guest's page cache.
const FIO: &str = "fio --name=disk --filename=/run/disk/fio --size=48M --rw=randwrite --bs=4k --direct=1 --ioengine=libaio --iodepth=16 \
                   --fsync=64 --verify=crc32c --verify_fatal=1 --time_based --runtime=40 --output-format=terse";

fn main() -> ExitCode {
    verbatim_testbed::run_role();
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let run = || run().map_err(|error| Failed::from(format!("{error:#}")));
    let trial = Trial::test("linux_has_a_volume_that_grows_and_moves", run).with_ignored_flag(true);
    libtest_mimic::run(&arguments, vec![trial]).exit_code()
}

fn run() -> anyhow::Result<()> {
    let mut site = Site::up()?;
    site.order("a", &["create", "db", "--size", &SIZE.to_string()])?;
    let network = Network::new()?;
    let guest = site.guest("a", &network)?;
    guest.shell(
        "modprobe ext4; mkfs.ext4 -q /dev/vda; mkdir -p /run/disk; mount -o discard /dev/vda /run/disk",
    )?;
    std::thread::scope(|scope| {
        let fio = scope.spawn(|| guest.shell(FIO));
        let mut trouble = || -> anyhow::Result<()> {
            guest.until("fio has begun", "test -s /run/disk/fio")?;
            // What was under way is carried out by the next one.
            site.kill("a");
            site.start("a")?;
            site.order("a", &["resize", "db", "--size", &GROWN.to_string()])?;
            guest.until(
                "the guest sees its disk grow",
                &format!("test $(blockdev --getsize64 /dev/vda) = {GROWN}"),
            )?;
            guest.shell("resize2fs /dev/vda")?;
            ensure!(!fio.is_finished(), "fio had ended before its disk grew");
            site.kill("a");
            site.start("a")
        };
        let troubled = trouble();
        let said = fio.join().expect("it does not panic")?;
        troubled?;
        // Terse: the fifth field is the first error.
        let error = said
            .lines()
            .find_map(|line| line.split(';').nth(4).map(str::to_owned));
        ensure!(error.as_deref() == Some("0"), "{said}");
        Ok(())
    })
    .with_context(|| guest.console())?;
    // More than there was room for, and room that is given back.
    guest.shell(&format!(
        "head -c {} /dev/urandom >/run/disk/large; rm /run/disk/fio; fstrim /run/disk",
        SIZE / 2 + 64 * MIB
    ))?;
    let sum = guest.shell("sha256sum </run/disk/large; umount /run/disk")?;
    drop(guest);

    site.order("a", &["migrate", "db", "--to", "b"])?;
    let guest = site.guest("b", &network)?;
    guest.shell("modprobe ext4; e2fsck -fn /dev/vda; mkdir -p /run/disk; mount /dev/vda /run/disk")?;
    let moved = guest.shell("sha256sum </run/disk/large")?;
    ensure!(moved == sum, "{moved} was {sum}");
    guest.shell(&format!("test $(blockdev --getsize64 /dev/vda) = {GROWN}"))?;
    Ok(())
}

/// A machine with the disk.
struct Guest(Vm);

impl Guest {
    /// What a script there writes that ends well.
    fn shell(&self, script: &str) -> anyhow::Result<String> {
        let ended = self.0.run(&Command::new(["sh", "-ec", script]), LIMIT)?;
        let errors = String::from_utf8_lossy(&ended.stderr);
        let said = String::from_utf8(ended.stdout)?;
        ensure!(
            ended.code == 0,
            "{script:?} ends with {}: {said}{errors}",
            ended.code
        );
        Ok(said)
    }

    fn until(&self, what: &str, script: &str) -> anyhow::Result<()> {
        eventually(what, LIMIT, || {
            let ended = self.0.run(&Command::new(["sh", "-c", script]), LIMIT)?;
            Ok((ended.code == 0).then_some(()))
        })
    }

    fn console(&self) -> String {
        let bytes = std::fs::read(self.0.record().console()).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// Two hosts with volumes; their daemons end with it.
struct Site {
    folder: tempfile::TempDir,
    verbatim: PathBuf,
    daemons: [Option<Child>; 2],
}

impl Site {
    fn up() -> anyhow::Result<Self> {
        let own = std::env::current_exe()?;
        let built = own
            .parent()
            .and_then(Path::parent)
            .context("a test is in target/PROFILE/deps")?;
        let mut site = Self {
            folder: tempfile::tempdir_in("/var/tmp")?,
            verbatim: built.join("verbatim"),
            daemons: [None, None],
        };
        // Addresses of the loopback interface that no other run has.
        let pid = std::process::id().to_le_bytes();
        let address = |host: u8| format!("127.{}.{}.{host}", 32 | (pid[1] & 31), pid[0]);
        let names = (1..)
            .zip(HOSTS)
            .map(|(host, name)| format!("{name}={}", address(host)));
        let hosts = site.folder.path().join("hosts");
        said(
            std::process::Command::new(&site.verbatim)
                .arg("hosts")
                .arg(hosts)
                .args(names),
        )?;
        for host in HOSTS {
            site.start(host)?;
        }
        Ok(site)
    }

    fn runtime(&self, host: &str) -> PathBuf {
        self.folder.path().join(host).join("run")
    }

    fn daemon(&mut self, host: &str) -> &mut Option<Child> {
        &mut self.daemons[usize::from(host == HOSTS[1])]
    }

    fn start(&mut self, host: &str) -> anyhow::Result<()> {
        let socket = self.runtime(host).join("volumes.sock");
        std::fs::create_dir_all(self.runtime(host))?;
        // That of one that was killed would be taken for the new one's.
        let _ = std::fs::remove_file(&socket);
        let path = self.folder.path().join("log");
        let log = std::fs::File::options().append(true).create(true).open(path)?;
        let child = std::process::Command::new(&self.verbatim)
            .args(["volume", "daemon", "--name", host, "--runtime-dir"])
            .arg(self.runtime(host))
            .arg("--state-dir")
            .arg(self.folder.path().join(host).join("state"))
            .arg("--config-dir")
            .arg(self.folder.path().join("hosts").join(host))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        *self.daemon(host) = Some(child);
        eventually("a daemon takes orders", LIMIT, || {
            Ok(socket.exists().then_some(()))
        })
    }

    fn kill(&mut self, host: &str) {
        if let Some(mut child) = self.daemon(host).take() {
            // It may have ended itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    fn order(&self, host: &str, words: &[&str]) -> anyhow::Result<Value> {
        let mut command = std::process::Command::new(&self.verbatim);
        command
            .arg("volume")
            .args(words)
            .args(["--json", "--runtime-dir"])
            .arg(self.runtime(host));
        let text = said(&mut command)?;
        serde_json::from_str(&text).with_context(|| text.clone())
    }

    /// A machine whose disk the volume is, with two processors and so two queues.
    fn guest(&self, host: &str, network: &Network) -> anyhow::Result<Guest> {
        let attached = self.order(host, &["attach", "db", "--vhost-user"])?;
        let socket = attached[0]["vhost_user"]["socket"]
            .as_str()
            .context("it has a socket")?;
        let config = VmConfig {
            memory_mib: 512,
            vhost_user: vec![socket.into()],
            ..VmConfig::new(format!("disk-{}", std::process::id()))
        };
        let guest = Guest(Vm::boot(&config, network)?);
        guest.shell("modprobe virtio_blk")?;
        guest.until("the guest has its disk", "test -b /dev/vda")?;
        Ok(guest)
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        for host in HOSTS {
            self.kill(host);
        }
    }
}

/// What a command writes that ends well.
fn said(command: &mut std::process::Command) -> anyhow::Result<String> {
    let output = command.output()?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {errors}");
    Ok(String::from_utf8(output.stdout)?)
}
