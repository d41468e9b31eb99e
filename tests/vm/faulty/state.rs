//! The disk with a host's state folder fails in the middle of a move, and the disks with the data do not: no
//! decision is lost, and none is made twice.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};
use verbatim_e2e::eventually;

use crate::destination::{SIZE, noise, part_of_it};
use crate::disks::{Ground, Mapped, Medium, Mounted, all_fails, whole};
use crate::hosts::{Hosts, LIMIT, NAMES, VOLUME, expect_same, read_all, succeed, write_all};
use crate::inside::Case;

/// All cases of this file.
pub const ALL: &[Case] = &[
    ("state::the_sources_folder_fails", || folder_fails(0)),
    ("state::the_destinations_folder_fails", || folder_fails(1)),
];

const FOLDER: u64 = 24 << 20;

/// So long it is looked whether a failure is said again.
const MEANWHILE: Duration = Duration::from_secs(5);

fn folder_fails(host: usize) -> anyhow::Result<()> {
    let ground = Ground::new()?;
    let media = NAMES.map(|name| Medium::new(ground.path(name), SIZE));
    let [source, destination] = media;
    let (source, destination) = (source?, destination?);
    let from = Mapped::new("from", &whole(&source)?)?;
    let to = Mapped::new("to", &whole(&destination)?)?;
    let below = Medium::new(ground.path("folder"), FOLDER)?;
    succeed(Command::new("mkfs.ext4").args(["-q", &below.device]))?;
    let disk = Mapped::new("folder", &whole(&below)?)?;
    let mounted = Mounted::new(disk.word(), ground.path("mounted"))?;
    let states = [0, 1].map(|index| match index == host {
        true => mounted.0.join("state"),
        false => ground.path("state"),
    });
    let mut hosts = Hosts::at(states)?;
    hosts.start(0)?;
    hosts.start(1)?;
    let size = SIZE.to_string();
    hosts.order(0, &["create", VOLUME, "--size", &size, "--data", from.word()])?;
    hosts.order(0, &["attach", VOLUME])?;
    hosts.order(1, &["place", VOLUME, "--data", to.word()])?;
    let data = noise(1, SIZE);
    let mut client = hosts.client(0)?;
    write_all(&mut client, &data)?;
    client.flush()?;
    drop(client);
    let mut moving = part_of_it(&hosts)?;
    disk.load(&all_fails(&below)?)?;
    // If the destination cannot record its commit, the source waits.
    let in_doubt = eventually("it has ended, or cannot be decided", LIMIT, || {
        let has_ended = moving.try_wait()?.is_some();
        let is_in_doubt = hosts.role(0)? == "deciding" && hosts.logs().contains("waits for b");
        Ok((has_ended || is_in_doubt).then_some(!has_ended))
    })
    .with_context(|| hosts.logs())?;
    ensure!(hosts.role(1)? != "serving", "{}", hosts.logs());
    if in_doubt {
        // It asks, again and again.
        std::thread::sleep(MEANWHILE);
        hosts.expect_no_repetition()?;
    } else {
        ensure!(
            !moving.wait()?.success(),
            "it has moved, and nobody could write that down"
        );
        let mut client = hosts.client(0)?;
        expect_same("the source", &read_all(&mut client)?, &data)?;
        client.write(0, &data[..4096], true)?;
    }

    // Repaired, in the usual way of file systems.
    hosts.kill(host);
    drop(mounted);
    disk.load(&whole(&below)?)?;
    let check = Command::new("e2fsck").args(["-fy", disk.word()]).output()?;
    ensure!(check.status.code().is_some_and(|code| code < 4), "{check:?}");
    let mounted = Mounted::new(disk.word(), ground.path("mounted"))?;
    hosts.start(host)?;
    let serving =
        eventually("one host serves", LIMIT, || hosts.one_serves()).with_context(|| hosts.logs())?;
    expect_same("the volume", &read_all(&mut hosts.client(serving)?)?, &data)?;
    if serving == 0 {
        hosts.migrate(0, 1, &[])?;
    }
    hosts.expect_roles(["moved", "serving"])?;
    expect_same("the medium after the commit", &destination.bytes()?, &data)?;
    // Dropped before the disks below.
    drop(hosts);
    drop(mounted);
    Ok(())
}
