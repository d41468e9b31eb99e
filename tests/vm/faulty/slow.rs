//! Disks that hang, are slow, or come by NBD from another program: other volumes do not wait, and the disks
//! are intact when they go on.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, ensure};
use verbatim_e2e::eventually;

use crate::destination::{SIZE, fill, noise};
use crate::disks::{Ground, Mapped, Medium, whole};
use crate::hosts::{Hosts, LIMIT, VOLUME, expect_eio, expect_same, read_all, succeed, write_all};
use crate::inside::Case;

/// All cases of this file.
pub const ALL: &[Case] = &[
    ("slow::a_disk_that_hangs", || waits(Mapped::suspend)),
    ("slow::a_disk_that_is_slow", || waits(delay)),
    ("slow::a_destination_that_hangs", destination),
    ("slow::nbdkit_delays_and_dies", nbdkit_delays),
    ("slow::nbdkit_fails_at_the_destination", nbdkit_fails),
];

/// Size of the volume on the slow disk.
const SMALL: u64 = 4 << 20;

/// Each write takes ten minutes from now on.
fn delay(disk: &Mapped) -> anyhow::Result<()> {
    let table = crate::disks::dmsetup(&["table", &disk.name])?;
    let words: Vec<_> = table.split_ascii_whitespace().collect();
    let [_, sectors, _, device, _] = words[..] else {
        anyhow::bail!("{table:?} is no linear table");
    };
    disk.load(&format!("0 {sectors} delay {device} 0 0 {device} 0 600000"))
}

/// Writes, flushes, reads, moves and moves back another volume of the same host.
fn another_goes_on(hosts: &Hosts) -> anyhow::Result<()> {
    hosts.order(0, &["create", "other", "--size", "1M"])?;
    hosts.order(0, &["attach", "other"])?;
    let mut client = hosts.client_of(0, "other")?;
    for round in 0..20u8 {
        client.write(u64::from(round) * 4096, &[round; 4096], false)?;
        client.flush()?;
    }
    hosts.order(0, &["migrate", "other", "--to", "b"])?;
    let mut client = hosts.client_of(1, "other")?;
    let mut found = [0; 4096];
    client.read(19 * 4096, &mut found)?;
    expect_same("the other volume", &found, &[19; 4096])?;
    hosts.order(1, &["migrate", "other", "--to", "a"])?;
    hosts.order(0, &["list"]).map(drop)
}

fn waits(hang: fn(&Mapped) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let ground = Ground::new()?;
    let medium = Medium::new(ground.path("medium"), SMALL)?;
    let disk = Mapped::new("slow", &whole(&medium)?)?;
    let hosts = Hosts::up()?;
    hosts.order(
        0,
        &[
            "create",
            VOLUME,
            "--size",
            &SMALL.to_string(),
            "--data",
            disk.word(),
        ],
    )?;
    hosts.order(0, &["attach", VOLUME])?;
    hang(&disk)?;
    let data = noise(1, SMALL);
    let mut client = hosts.client(0)?;
    let content = data.clone();
    let writing = std::thread::spawn(move || {
        write_all(&mut client, &content)?;
        client.flush()
    });
    another_goes_on(&hosts)?;
    ensure!(!writing.is_finished(), "a disk that hangs has answered");
    disk.load(&whole(&medium)?)?;
    writing
        .join()
        .expect("it does not panic")
        .context("the disk goes on")?;
    hosts.expect_suspect(0, false)?;
    expect_same("the medium", &medium.bytes()?, &data)
}

/// The tenant goes on while the destination's disk hangs, and so does that host.
fn destination() -> anyhow::Result<()> {
    let ground = Ground::new()?;
    let medium = Medium::new(ground.path("medium"), SMALL)?;
    let disk = Mapped::new("slow", &whole(&medium)?)?;
    let hosts = Hosts::up()?;
    let mut data = noise(1, SMALL);
    fill(&hosts, &data)?;
    hosts.order(1, &["place", VOLUME, "--data", disk.word()])?;
    disk.suspend()?;
    let mut moving = hosts.command(0, &["migrate", VOLUME, "--to", "b"]).spawn()?;
    eventually("it is being moved", LIMIT, || {
        Ok((!hosts.status(0)?["migration"].is_null()).then_some(()))
    })?;
    another_goes_on(&hosts)?;
    let patch = noise(2, 4096);
    let mut client = hosts.client(0)?;
    client.write(0, &patch, true)?;
    data[..4096].copy_from_slice(&patch);
    ensure!(
        moving.try_wait()?.is_none(),
        "the move has ended, and its disk hangs"
    );
    disk.resume()?;
    ensure!(moving.wait()?.success(), "{}", hosts.logs());
    expect_same("the medium", &medium.bytes()?, &data)
}

/// A block device of nbdkit. It is removed on drop.
struct Served {
    nbdkit: Child,
    client: Child,
    device: PathBuf,
    file: PathBuf,
}

impl Served {
    fn new(ground: &Ground, bytes: u64, filters: &[&str], parameters: &[String]) -> anyhow::Result<Self> {
        let (file, socket) = (ground.path("served"), ground.path("served.sock"));
        std::fs::File::create(&file)?.set_len(bytes)?;
        let nbdkit = Command::new("nbdkit")
            .args(["--foreground", "--unix"])
            .arg(&socket)
            .args(filters.iter().map(|filter| format!("--filter={filter}")))
            .arg("file")
            .arg(&file)
            .args(parameters)
            .stdin(Stdio::null())
            .spawn()
            .context("nbdkit")?;
        eventually("nbdkit listens", LIMIT, || Ok(socket.exists().then_some(())))?;
        let device = PathBuf::from("/dev/nbd0");
        let client = Command::new("qemu-nbd")
            // Verbose, since it goes into the background otherwise.
            .args(["--verbose", "--format=raw", "--cache=none", "--connect"])
            .arg(&device)
            .arg(format!("nbd+unix:///?socket={}", socket.display()))
            // The default folder does not exist in the machine.
            .arg(format!("--socket={}", ground.path("kernel.sock").display()))
            .stdin(Stdio::null())
            .spawn()
            .context("qemu-nbd")?;
        let mut served = Self {
            nbdkit,
            client,
            device,
            file,
        };
        let sectors = (bytes / 512).to_string();
        eventually("the device is there", LIMIT, || {
            ensure!(served.client.try_wait()?.is_none(), "qemu-nbd has ended");
            let size = std::fs::read_to_string("/sys/block/nbd0/size")?;
            Ok((size.trim() == sectors).then_some(()))
        })?;
        Ok(served)
    }

    fn word(&self) -> &str {
        self.device.to_str().unwrap_or_default()
    }

    /// Kills nbdkit: the device has no server any more.
    fn dies(&mut self) -> anyhow::Result<()> {
        self.nbdkit.kill()?;
        self.nbdkit.wait()?;
        Ok(())
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = succeed(Command::new("qemu-nbd").arg("--disconnect").arg(&self.device));
        for child in [&mut self.client, &mut self.nbdkit] {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Writes to the disk take ten minutes, and then the disk is gone.
fn nbdkit_delays() -> anyhow::Result<()> {
    let ground = Ground::new()?;
    let delay = ["delay-write=600".to_owned()];
    let mut served = Served::new(&ground, SMALL, &["delay"], &delay)?;
    let hosts = Hosts::up()?;
    hosts.order(
        0,
        &[
            "create",
            VOLUME,
            "--size",
            &SMALL.to_string(),
            "--data",
            served.word(),
            // Network block devices have no names.
            "--unnamed",
        ],
    )?;
    hosts.order(0, &["attach", VOLUME])?;
    let mut client = hosts.client(0)?;
    client.write(0, &[5; 4096], false)?;
    let flushing = std::thread::spawn(move || client.flush());
    another_goes_on(&hosts)?;
    ensure!(
        !flushing.is_finished(),
        "a write that takes ten minutes is durable"
    );
    served.dies()?;
    expect_eio(
        "a flush of a disk that is gone",
        flushing.join().expect("it does not panic"),
    )?;
    hosts.expect_suspect(0, true)?;
    let mut client = hosts.client(0)?;
    expect_eio("a write", client.write(0, &[6; 4096], false))?;
    // The page cache has the only copy, and reads are served from it.
    let mut found = [0; 4096];
    client.read(0, &mut found)?;
    expect_same("what is read", &found, &[5; 4096])?;
    Ok(())
}

/// Every write to the disk fails until the trigger file is removed.
fn nbdkit_fails() -> anyhow::Result<()> {
    let ground = Ground::new()?;
    let trigger = ground.path("trigger");
    let errors = [
        "error=EIO".to_owned(),
        "error-pwrite-rate=100%".to_owned(),
        format!("error-pwrite-file={}", trigger.display()),
    ];
    let served = Served::new(&ground, SIZE, &["error"], &errors)?;
    let hosts = Hosts::up()?;
    let data = noise(1, SIZE);
    fill(&hosts, &data)?;
    hosts.order(1, &["place", VOLUME, "--data", served.word(), "--unnamed"])?;
    let cache = std::fs::File::open(&served.device)?;
    std::fs::write(&trigger, "")?;
    let said = hosts.refused(0, &["migrate", VOLUME, "--to", "b"])?;
    ensure!(said.contains("is served here"), "{said}");
    hosts.expect_suspect(1, true)?;
    hosts.client(0)?.write(0, &data[..4096], true)?;
    std::fs::remove_file(&trigger)?;
    let moved = hosts.migrate(0, 1, &[])?;
    let copied = moved["copied_bytes"].as_u64().context("a number")?;
    ensure!(copied >= SIZE, "only {copied} bytes were written again");
    expect_same("what nbdkit has", &std::fs::read(&served.file)?, &data)?;
    drop(cache);
    expect_same("the volume there", &read_all(&mut hosts.client(1)?)?, &data)?;
    Ok(())
}
