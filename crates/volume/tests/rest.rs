//! The rest of a copy that did not come to its end: what is kept of it, for how long, and what the next attempt takes from it.

mod support;

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use support::orders::*;
use support::{Lab, until};
use verbatim_mirror::decision::{SessionId, VolumeId};
use verbatim_volume::Hosts;
use verbatim_volume::wire::{self, Hello, Purpose, ToSource, VERSION};

const SIZE: u64 = 8 * MIB;

/// A volume with content, and a slow move of which a part has come; the command is still running.
fn a_part_has_come(lab: &Lab) -> std::process::Child {
    let mut moving = lab.command(0, &["migrate", "db", "--to", "b", "--max-bandwidth", "1"]);
    let moving = moving
        .stderr(std::process::Stdio::null())
        .spawn()
        .expect("it runs");
    until("a part has come", || allocated(lab) > MIB);
    moving
}

fn allocated(lab: &Lab) -> u64 {
    let data = lab.path(1, "state/db/data");
    data.metadata().map_or(0, |metadata| metadata.blocks() * 512)
}

fn is_given_back(lab: &Lab) {
    until("the room is given back", || {
        assert_eq!(lab.role(0, "db"), "serving");
        lab.role(1, "db") == "incomplete" && allocated(lab) == 0
    });
}

/// The volume moves, and has all of its content there.
fn moves(lab: &Lab, content: &[u8]) {
    lab.order(0, &["migrate", "db", "--to", "b"]);
    assert!(read(lab, 1, "db", 0, SIZE) == content, "it differs");
}

#[test]
fn a_move_that_is_cancelled_gives_back_the_room_of_its_copy() {
    let lab = Lab::new();
    lab.volume("db", &SIZE.to_string());
    let content = noise(1, SIZE);
    write(&lab, 0, "db", 0, &content);
    let mut moving = a_part_has_come(&lab);
    lab.order(0, &["cancel", "db"]);
    assert!(!moving.wait().expect("it ends").success());
    is_given_back(&lab);
    moves(&lab, &content);
    // An older copy keeps what it has: the next attempt compares it.
    lab.order(1, &["migrate", "db", "--to", "a"]);
    let changed = noise(2, SIZE);
    write(&lab, 0, "db", 0, &changed);
    let mut moving = lab.command(0, &["migrate", "db", "--to", "b", "--max-bandwidth", "1"]);
    let mut moving = moving
        .stderr(std::process::Stdio::null())
        .spawn()
        .expect("it runs");
    until("it comes", || lab.role(1, "db") == "incoming");
    lab.order(0, &["cancel", "db"]);
    assert!(!moving.wait().expect("it ends").success());
    until("the other host has heard it", || {
        lab.role(1, "db") == "incomplete"
    });
    moves(&lab, &changed);
}

#[test]
fn the_rest_of_a_copy_whose_source_does_not_come_back_is_given_back_after_a_while() {
    let mut lab = Lab::without_daemons();
    lab.start(0, None);
    lab.options = vec!["--keep-incomplete".into(), "1".into()];
    lab.start(1, None);
    lab.volume("db", &SIZE.to_string());
    let content = noise(3, SIZE);
    write(&lab, 0, "db", 0, &content);
    let mut moving = a_part_has_come(&lab);
    lab.kill(0);
    moving.wait().expect("it ends");
    until("the room is given back", || {
        lab.role(1, "db") == "incomplete" && allocated(&lab) == 0
    });
    lab.start(0, None);
    moves(&lab, &content);

    // By default it is kept, and the next daemon there knows of it, too.
    lab.order(1, &["migrate", "db", "--to", "a"]);
    lab.order(1, &["delete", "db"]);
    lab.kill(1);
    lab.options.clear();
    lab.start(1, None);
    let mut moving = a_part_has_come(&lab);
    lab.kill(0);
    moving.wait().expect("it ends");
    lab.kill(1);
    lab.start(1, None);
    assert_eq!(lab.role(1, "db"), "incoming");
    assert!(allocated(&lab) > MIB);
    lab.kill(1);
    lab.options = vec!["--keep-incomplete".into(), "1".into()];
    lab.start(1, None);
    until("the room is given back", || {
        lab.role(1, "db") == "incomplete" && allocated(&lab) == 0
    });
    lab.start(0, None);
    moves(&lab, &content);
}

/// Offers the second host a volume; returns the number of the attempt there.
fn offer(config: &Path, port: u16) -> u128 {
    let hosts = Hosts::load(config).expect("a list");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let mut stream = hosts.connect("b", port).await.expect("it listens");
        let hello = Hello {
            version: VERSION,
            name: "db".to_owned(),
            id: VolumeId(1),
            session: SessionId(1),
            base: 1,
            purpose: Purpose::Fill {
                length: 4096,
                from: "a".to_owned(),
                attached: false,
                rdma: None,
                link: 1,
            },
        };
        wire::send(&mut stream, &hello).await.expect("sent");
        match wire::receive::<ToSource>(&mut stream).await.expect("an answer") {
            (ToSource::Welcome { incarnation, .. }, _) => incarnation,
            other => panic!("{other:?}"),
        }
    })
}

/// A source that connects again relies on what was acknowledged to it, unless the attempt there is another one.
#[test]
fn a_copy_that_was_deleted_meanwhile_is_not_taken_for_the_one_that_was_filled() {
    let lab = Lab::new();
    let (config, port) = (lab.path(0, "config"), lab.port());
    let first = offer(&config, port);
    assert_eq!(offer(&config, port), first, "nothing has happened");
    until("the connection has ended", || {
        lab.try_order(1, &["delete", "db"]).status.success()
    });
    assert_ne!(offer(&config, port), first);
}
