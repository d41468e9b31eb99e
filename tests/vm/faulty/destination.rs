//! The disk at the destination of a move fails: the move ends with the reason, the source serves, and the
//! leftovers of the failed attempt are never trusted. After a repair the next attempt makes the disk equal to
//! the source, byte by byte.

use std::fs::File;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, ensure};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use verbatim_e2e::eventually;

use crate::disks::{Ground, Mapped, Medium, all_fails, has_a_hole, whole, writes_fail, writes_vanish};
use crate::hosts::{Hosts, LIMIT, VOLUME, expect_same, read_all, succeed, write_all};
use crate::inside::Case;

/// Size of the volume in bytes.
pub const SIZE: u64 = 16 << 20;

/// All cases of this file.
pub const ALL: &[Case] = &[
    ("destination::writes_fail", || {
        fails(writes_fail, When::Before, Next::Same)
    }),
    ("destination::everything_fails_midway", || {
        fails(all_fails, When::Midway, Next::Same)
    }),
    ("destination::a_hole_and_another_daemon", || {
        fails(has_a_hole, When::Before, Next::Another)
    }),
    ("destination::writes_vanish", vanish),
    ("destination::read_only", read_only),
];

/// Content that differs for each seed.
pub fn noise(seed: u64, bytes: u64) -> Vec<u8> {
    let mut noise = vec![0; bytes as usize];
    StdRng::seed_from_u64(seed).fill(noise.as_mut_slice());
    noise
}

/// The first host serves the volume, which is to move to a disk of the second host. The disk works so far.
pub struct Story {
    // Fields in the order of their drop.
    pub hosts: Hosts,
    cache: File,
    pub disk: Mapped,
    pub medium: Medium,
    _ground: Ground,
    pub data: Vec<u8>,
}

impl Story {
    pub fn begin() -> anyhow::Result<Self> {
        let ground = Ground::new()?;
        let medium = Medium::new(ground.path("medium"), SIZE)?;
        let disk = Mapped::new("destination", &whole(&medium)?)?;
        let hosts = Hosts::up()?;
        let data = noise(1, SIZE);
        fill(&hosts, &data)?;
        hosts.order(1, &["place", VOLUME, "--data", disk.word()])?;
        Ok(Self {
            cache: disk.keep_cache()?,
            hosts,
            disk,
            medium,
            _ground: ground,
            data,
        })
    }

    /// The source still serves, and takes writes.
    pub fn source_serves(&mut self) -> anyhow::Result<()> {
        let hosts = &self.hosts;
        ensure!(hosts.role(0)? == "serving", "{}", hosts.logs());
        let mut client = hosts.client(0)?;
        let patch = noise(7, 4096);
        client.write(SIZE / 4, &patch, false)?;
        client.flush()?;
        self.data[SIZE as usize / 4..][..4096].copy_from_slice(&patch);
        expect_same("the source", &read_all(&mut client)?, &self.data)
    }

    /// Moves the volume to the disk, which works again. At least `must_be_written` bytes must be copied.
    pub fn ends_whole(self, must_be_written: u64) -> anyhow::Result<()> {
        let moved = self.hosts.migrate(0, 1, &[])?;
        // The commit comes after a flush, so the test needs no flush of its own.
        expect_same("the medium after the commit", &self.medium.bytes()?, &self.data)?;
        self.hosts.expect_roles(["moved", "serving"])?;
        self.hosts.expect_suspect(1, false)?;
        let copied = moved["copied_bytes"].as_u64().context("a number")?;
        ensure!(
            copied >= must_be_written,
            "only {copied} bytes were written again"
        );
        drop(self.cache);
        self.disk.forget()?;
        let mut client = self.hosts.client(1)?;
        expect_same(
            "the volume past the page cache",
            &read_all(&mut client)?,
            &self.data,
        )?;
        client.write(0, &[1; 512], true)?;
        Ok(())
    }
}

/// Creates the volume at the first host with durable content.
pub fn fill(hosts: &Hosts, data: &[u8]) -> anyhow::Result<()> {
    hosts.order(0, &["create", VOLUME, "--size", &data.len().to_string()])?;
    hosts.order(0, &["attach", VOLUME])?;
    let mut client = hosts.client(0)?;
    write_all(&mut client, data)?;
    client.flush()?;
    Ok(())
}

/// Starts a slow move, and waits until the destination has a part of the volume.
pub fn part_of_it(hosts: &Hosts) -> anyhow::Result<Child> {
    let slow = ["migrate", VOLUME, "--to", "b", "--max-bandwidth", "1"];
    let mut command = hosts.command(0, &slow);
    let mut moving = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    eventually("a part of it has come", LIMIT, || {
        ensure!(moving.try_wait()?.is_none(), "the move has ended already");
        let status = hosts.status(0)?;
        let copied = status["migration"]["copied_bytes"].as_u64();
        Ok(copied.is_some_and(|copied| copied >= SIZE / 16).then_some(()))
    })
    .with_context(|| hosts.logs())?;
    Ok(moving)
}

/// Time of the disk's failure.
#[derive(Clone, Copy, PartialEq, Eq)]
enum When {
    Before,
    /// After a part of the volume has arrived.
    Midway,
}

/// The daemon at the destination of the next attempt.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Next {
    Same,
    Another,
}

fn fails(broken: fn(&Medium) -> anyhow::Result<String>, when: When, next: Next) -> anyhow::Result<()> {
    let mut story = Story::begin()?;
    let broken = broken(&story.medium)?;
    if when == When::Midway {
        let moving = part_of_it(&story.hosts)?;
        story.disk.load(&broken)?;
        let output = moving.wait_with_output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        eprintln!("{said}");
        ensure!(
            !output.status.success() && said.contains("is served here"),
            "{said}"
        );
    } else {
        story.disk.load(&broken)?;
        let said = story.hosts.refused(0, &["migrate", VOLUME, "--to", "b"])?;
        ensure!(said.contains("is served here"), "{said}");
    }
    story.source_serves()?;
    story.hosts.expect_suspect(1, true)?;
    let said = story.hosts.refused(0, &["migrate", VOLUME, "--to", "b"])?;
    ensure!(said.contains("is served here"), "the second attempt: {said}");
    story.source_serves()?;
    story.hosts.expect_suspect(1, true)?;
    if next == Next::Another {
        story.hosts.kill(1);
        story.hosts.start(1)?;
        story.hosts.expect_suspect(1, true)?;
    }
    story.disk.load(&whole(&story.medium)?)?;
    // The page cache at the destination has much of the volume. None of it is trusted.
    story.ends_whole(SIZE)
}

/// A disk that has lost acknowledged writes without an error: the page cache has them all, clean and up to
/// date. The next attempt reads the disk, and nothing else.
fn vanish() -> anyhow::Result<()> {
    let mut story = Story::begin()?;
    story.disk.load(&writes_vanish(&story.medium)?)?;
    let mut moving = part_of_it(&story.hosts)?;
    // As far as anything reports, the blocks that have arrived are on the disk now.
    succeed(&mut Command::new("sync"))?;
    story.hosts.order(0, &["cancel", VOLUME])?;
    ensure!(!moving.wait()?.success(), "it has moved");
    story.source_serves()?;
    let lost = story.medium.bytes()?.iter().all(|&byte| byte == 0);
    ensure!(lost, "the disk has something, and was to forget all");
    story.disk.load(&whole(&story.medium)?)?;
    story.ends_whole(SIZE)
}

/// A read-only device: no write succeeds, and the device is unchanged.
fn read_only() -> anyhow::Result<()> {
    let mut story = Story::begin()?;
    let device = story.disk.word().to_owned();
    let set = |how: &str| succeed(Command::new("blockdev").args([how, &device]));
    set("--setro")?;
    let said = story.hosts.refused(0, &["migrate", VOLUME, "--to", "b"])?;
    ensure!(said.contains("read-only"), "it does not say why: {said}");
    story.source_serves()?;
    let is_untouched = story.medium.bytes()?.iter().all(|&byte| byte == 0);
    ensure!(is_untouched, "something was written");
    set("--setrw")?;
    story.ends_whole(SIZE)
}
