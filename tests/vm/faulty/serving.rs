//! The disk of a copy that serves fails: reads go on, writes and flushes fail, and the written data are saved
//! to another host, or written again after a repair of the disk.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, ensure};

use crate::client::Client;
use crate::destination::{SIZE, noise, part_of_it};
use crate::disks::{Ground, Mapped, Medium, has_a_hole, whole, writes_fail};
use crate::hosts::{Hosts, VOLUME, expect_eio, expect_same, read_all, succeed, write_all};
use crate::inside::Case;

/// All cases of this file.
pub const ALL: &[Case] = &[
    ("serving::rescue", rescue),
    ("serving::accept", accept),
    ("serving::fails_midway_in_a_move", midway),
    ("serving::a_hole_cannot_be_read", hole),
    ("serving::as_a_block_device", device),
    ("serving::read_only", read_only),
    ("serving::killed_in_a_flush_that_fails", killed),
];

/// The first host serves the volume from a disk that works so far.
struct Story {
    // Fields in the order of their drop.
    hosts: Hosts,
    disk: Mapped,
    medium: Medium,
    _ground: Ground,
    data: Vec<u8>,
}

impl Story {
    fn begin() -> anyhow::Result<Self> {
        let ground = Ground::new()?;
        let medium = Medium::new(ground.path("medium"), SIZE)?;
        let disk = Mapped::new("serving", &whole(&medium)?)?;
        let hosts = Hosts::up()?;
        let size = SIZE.to_string();
        hosts.order(0, &["create", VOLUME, "--size", &size, "--data", disk.word()])?;
        hosts.order(0, &["attach", VOLUME])?;
        let data = noise(1, SIZE);
        let mut client = hosts.client(0)?;
        write_all(&mut client, &data)?;
        client.flush()?;
        expect_same("the medium after a flush", &medium.bytes()?, &data)?;
        Ok(Self {
            hosts,
            disk,
            medium,
            _ground: ground,
            data,
        })
    }

    /// A story in which half of the volume was written again, and the flush of those writes failed.
    fn failed() -> anyhow::Result<Self> {
        let mut story = Self::begin()?;
        story.disk.load(&writes_fail(&story.medium)?)?;
        let half = noise(2, SIZE / 2);
        let mut client = story.hosts.client(0)?;
        write_all(&mut client, &half)?;
        story.data[..half.len()].copy_from_slice(&half);
        expect_eio("a flush", client.flush())?;
        story.is_read_only_here(&mut client)?;
        Ok(story)
    }

    /// Checks a suspect copy's answers to its clients.
    fn is_read_only_here(&self, client: &mut Client) -> anyhow::Result<()> {
        self.hosts.expect_suspect(0, true)?;
        expect_eio("a flush", client.flush())?;
        expect_eio("a write", client.write(0, &[1; 512], false))?;
        expect_eio("a durable write", client.write(0, &[1; 512], true))?;
        expect_eio("zeros", client.zero(0, 4096))?;
        expect_eio("a discard", client.trim(0, 4096))?;
        expect_same("what is read", &read_all(client)?, &self.data)
    }
}

fn rescue() -> anyhow::Result<()> {
    let story = Story::failed()?;
    // Neither a repaired disk nor a new connection clears the mark.
    story.disk.load(&whole(&story.medium)?)?;
    story.is_read_only_here(&mut story.hosts.client(0)?)?;
    story.hosts.order(0, &["detach", VOLUME])?;
    story.hosts.order(0, &["attach", VOLUME])?;
    story.is_read_only_here(&mut story.hosts.client(0)?)?;
    let said = story.hosts.refused(0, &["migrate", VOLUME, "--to", "b"])?;
    ensure!(said.contains("--rescue"), "{said}");
    story.disk.load(&writes_fail(&story.medium)?)?;
    story.hosts.migrate(0, 1, &["--rescue"])?;
    story.hosts.expect_roles(["moved", "serving"])?;
    story.hosts.expect_suspect(1, false)?;
    expect_same("the other host's file", &story.hosts.data(1)?, &story.data)?;
    // On the way back no block there is trusted.
    story.disk.load(&whole(&story.medium)?)?;
    story.hosts.migrate(1, 0, &[])?;
    story.hosts.expect_suspect(0, false)?;
    expect_same(
        "the medium after the way back",
        &story.medium.bytes()?,
        &story.data,
    )?;
    story.hosts.client(0)?.write(0, &[1; 512], true)?;
    Ok(())
}

/// The disk of the source fails while the volume moves: the other host does not get it without an operator's
/// command.
fn midway() -> anyhow::Result<()> {
    let ground = Ground::new()?;
    let there = Medium::new(ground.path("there"), SIZE)?;
    let disk_there = Mapped::new("there", &whole(&there)?)?;
    let mut story = Story::begin()?;
    story
        .hosts
        .order(1, &["place", VOLUME, "--data", disk_there.word()])?;
    let moving = part_of_it(&story.hosts)?;
    // The rest cannot be flushed there: no commit comes before the failure.
    let held = disk_there.hold()?;
    story.disk.load(&writes_fail(&story.medium)?)?;
    let patch = noise(8, 1 << 20);
    let mut client = story.hosts.client(0)?;
    client.write(0, &patch, false)?;
    story.data[..patch.len()].copy_from_slice(&patch);
    expect_eio("a flush", client.flush())?;
    ensure!(story.hosts.role(0)? == "serving", "{}", story.hosts.logs());
    drop(held);
    let output = moving.wait_with_output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    eprintln!("{said}");
    ensure!(!output.status.success(), "it has moved: {said}");
    ensure!(story.hosts.role(1)? != "serving", "{}", story.hosts.logs());
    story.is_read_only_here(&mut client)?;
    story.hosts.migrate(0, 1, &["--rescue"])?;
    story.hosts.expect_roles(["moved", "serving"])?;
    expect_same("the other host's disk", &there.bytes()?, &story.data)
}

fn accept() -> anyhow::Result<()> {
    let story = Story::failed()?;
    let said = story.hosts.refused(0, &["accept", VOLUME])?;
    ensure!(said.contains("stays suspect"), "{said}");
    story.is_read_only_here(&mut story.hosts.client(0)?)?;
    story.disk.load(&whole(&story.medium)?)?;
    story.hosts.order(0, &["accept", VOLUME])?;
    story.hosts.expect_suspect(0, false)?;
    expect_same("the medium after that", &story.medium.bytes()?, &story.data)?;
    story.hosts.client(0)?.write(0, &[1; 512], true)?;
    story.hosts.migrate(0, 1, &[])?;
    Ok(())
}

/// A chunk that cannot be read ends a move, and nothing else.
fn hole() -> anyhow::Result<()> {
    let mut story = Story::begin()?;
    story.disk.load(&has_a_hole(&story.medium)?)?;
    story.disk.forget()?;
    let said = story.hosts.refused(0, &["migrate", VOLUME, "--to", "b"])?;
    ensure!(said.contains("is served here"), "{said}");
    ensure!(story.hosts.role(0)? == "serving", "{}", story.hosts.logs());
    let mut client = story.hosts.client(0)?;
    expect_eio(
        "a read of what cannot be read",
        client.read(SIZE / 2, &mut [0; 4096]),
    )?;
    let mut beside = [0; 4096];
    client.read(0, &mut beside)?;
    expect_same("what lies beside", &beside, &story.data[..4096])?;
    let patch = noise(3, 4096);
    client.write(0, &patch, true)?;
    story.data[..4096].copy_from_slice(&patch);
    story.disk.load(&whole(&story.medium)?)?;
    story.hosts.migrate(0, 1, &[])?;
    expect_same("the other host's file", &story.hosts.data(1)?, &story.data)
}

/// The same for a program that writes to a file, through FUSE and a loop device.
fn device() -> anyhow::Result<()> {
    let mut story = Story::begin()?;
    let path = story.hosts.order(0, &["attach", VOLUME, "--device"])?;
    let path = Path::new(path.trim());
    let file = File::options()
        .read(true)
        .write(true)
        .open(path)
        .context("its device")?;
    let patch = noise(4, 1 << 20);
    file.write_all_at(&patch, 0)?;
    file.sync_all()?;
    story.data[..patch.len()].copy_from_slice(&patch);
    expect_same("the medium after fsync", &story.medium.bytes()?, &story.data)?;
    story.disk.load(&writes_fail(&story.medium)?)?;
    // The device's own page cache takes the write; fsync reports the failure.
    file.write_all_at(&noise(5, 1 << 20), 0)?;
    let synced = file.sync_all();
    ensure!(synced.is_err(), "fsync says that it is durable");
    story.hosts.expect_suspect(0, true)?;
    let mut rest = vec![0; 1 << 20];
    file.read_exact_at(&mut rest, SIZE / 2)?;
    expect_same("the rest", &rest, &story.data[SIZE as usize / 2..][..1 << 20])?;
    drop(file);
    story.disk.load(&whole(&story.medium)?)?;
    story.hosts.order(0, &["accept", VOLUME])?;
    let file = File::options()
        .read(true)
        .write(true)
        .open(path)
        .context("its device")?;
    file.write_all_at(&patch, 0)?;
    file.sync_all()?;
    expect_same("the medium after all", &story.medium.bytes()?, &story.data)
}

/// The daemon is killed in a flush, which then fails: only the dead process hears of that. The next daemon finds it by what
/// the keeper has, and the written data are still there.
fn killed() -> anyhow::Result<()> {
    let mut story = Story::begin()?;
    let mut client = story.hosts.client(0)?;
    let held = story.disk.hold()?;
    let half = noise(9, SIZE / 2);
    write_all(&mut client, &half)?;
    story.data[..half.len()].copy_from_slice(&half);
    let flush = std::thread::spawn(move || client.flush());
    story.hosts.wait_for_flush(0)?;
    story.hosts.strike(0)?;
    story.disk.prepare(&writes_fail(&story.medium)?)?;
    drop(held);
    story.hosts.kill(0);
    let flushed = flush.join().expect("it does not panic");
    ensure!(
        flushed.is_err(),
        "a flush was answered by a daemon that was killed in it"
    );
    story.disk.load(&whole(&story.medium)?)?;
    story.hosts.start(0)?;
    story.is_read_only_here(&mut story.hosts.client(0)?)?;
    story.hosts.order(0, &["accept", VOLUME])?;
    story.hosts.expect_suspect(0, false)?;
    expect_same("the medium after that", &story.medium.bytes()?, &story.data)
}

/// A device that becomes read-only: a failed write is not reported as durable, and reads go on. They go on
/// with the next daemon, too, so that the data can be rescued, and the copy is not accepted until the device
/// takes writes.
fn read_only() -> anyhow::Result<()> {
    let mut story = Story::begin()?;
    let device = story.disk.word().to_owned();
    let set = |how: &str| succeed(Command::new("blockdev").args([how, &device]));
    set("--setro")?;
    let mut client = story.hosts.client(0)?;
    let patch = noise(6, 4096);
    let written = client.write(0, &patch, true);
    ensure!(written.is_err(), "a write that cannot be is said to be durable");
    story.is_read_only_here(&mut client)?;
    drop(client);
    story.hosts.kill(0);
    story.hosts.start(0)?;
    let mut client = story.hosts.client(0)?;
    story.is_read_only_here(&mut client)?;
    story.hosts.refused(0, &["accept", VOLUME])?;
    set("--setrw")?;
    expect_same("what is read", &read_all(&mut client)?, &story.data)?;
    story.hosts.order(0, &["accept", VOLUME])?;
    client.write(0, &patch, true)?;
    story.data[..4096].copy_from_slice(&patch);
    expect_same("the medium at last", &story.medium.bytes()?, &story.data)
}
