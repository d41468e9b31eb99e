//! A disk whose flush fails once, and succeeds later: Linux marks the pages that it could not write as clean,
//! and keeps them for an unknown time.

mod support;

use std::path::Path;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use support::client::Client;
use support::devices::{Thin, can_have_devices};
use support::files::Files;
use support::pinned::Pinned;
use support::{Lab, PATIENCE, until};
use verbatim_volume::control::{Order, Outcome, order_now};

const MIB: u64 = 1 << 20;

/// Size of the volume.
const SIZE: u64 = 32 * MIB;

/// Bytes written to the volume; the disk has room for fewer.
const WRITTEN: u64 = 24 * MIB;
const ROOM: &str = "12m";
const MORE_ROOM: &str = "200m";

fn noise(seed: u64) -> Vec<u8> {
    let mut noise = vec![0; WRITTEN as usize];
    StdRng::seed_from_u64(seed).fill(noise.as_mut_slice());
    noise
}

fn connect(lab: &Lab, host: usize) -> Client {
    let socket = lab.socket(host, "db");
    let mut client = None;
    until("it is served", || {
        client = Client::connect(&socket).ok();
        client.is_some()
    });
    client.expect("it is connected")
}

fn write(client: &mut Client, data: &[u8]) -> std::io::Result<()> {
    for (offset, part) in (0..).step_by(MIB as usize).zip(data.chunks(MIB as usize)) {
        client.write(offset, part, false)?;
    }
    Ok(())
}

fn read(client: &mut Client) -> Vec<u8> {
    let mut data = vec![0; WRITTEN as usize];
    for (offset, part) in (0..).step_by(MIB as usize).zip(data.chunks_mut(MIB as usize)) {
        client.read(offset, part).expect("it is read");
    }
    data
}

fn is_suspect(lab: &Lab, host: usize) -> bool {
    let status = lab.status(host, "db").expect("it is listed");
    status["suspect"].as_bool().expect("it says so")
}

fn errno(result: std::io::Result<()>) -> Option<i32> {
    result.err().and_then(|error| error.raw_os_error())
}

/// Runs a command that must be refused; returns its error.
fn refused(lab: &Lab, host: usize, args: &[&str]) -> String {
    let output = lab.try_order(host, args);
    assert!(
        !output.status.success(),
        "{args:?} is not refused\n{}",
        lab.logs()
    );
    String::from_utf8(output.stderr).expect("text")
}

/// The obstacle to a move that a host's daemon reports.
fn obstacle(lab: &Lab, host: usize, to: &str) -> Option<String> {
    let order = Order::Check {
        name: "db".to_owned(),
        to: to.to_owned(),
    };
    match order_now(&lab.path(host, "run/volumes.sock"), &order, PATIENCE) {
        Ok(Outcome::Volumes(rows)) => rows.into_iter().find_map(|row| row.trouble),
        other => panic!("{other:?}"),
    }
}

/// The second host has a thin disk for the arriving copy.
fn with_thin_destination() -> Option<(Lab, Thin, Vec<u8>)> {
    if !can_have_devices() {
        return None;
    }
    let lab = Lab::new();
    let thin = Thin::new(lab.path(1, "thin"), SIZE, ROOM);
    lab.volume("db", &SIZE.to_string());
    let data = noise(1);
    let mut client = connect(&lab, 0);
    write(&mut client, &data).expect("written");
    client.flush().expect("flushed");
    lab.order(1, &["place", "db", "--data", &thin.disk.device]);
    Some((lab, thin, data))
}

/// The first host has the volume on a thin disk, and a flush has failed.
fn with_thin_source() -> Option<(Lab, Thin, Vec<u8>)> {
    if !can_have_devices() {
        return None;
    }
    let lab = Lab::new();
    let thin = Thin::new(lab.path(0, "thin"), SIZE, ROOM);
    let device = &thin.disk.device;
    lab.order(
        0,
        &["create", "db", "--size", &SIZE.to_string(), "--data", device],
    );
    lab.order(0, &["attach", "db"]);
    let data = noise(2);
    let mut client = connect(&lab, 0);
    write(&mut client, &data).expect("the page cache takes it");
    assert_eq!(errno(client.flush()), Some(libc::EIO), "there is no room");
    assert!(is_suspect(&lab, 0));
    Some((lab, thin, data))
}

fn a_retry(is_killed: bool) {
    let Some((mut lab, thin, data)) = with_thin_destination() else {
        return;
    };
    refused(&lab, 0, &["migrate", "db", "--to", "b"]);
    assert_eq!(lab.role(0, "db"), "serving");
    assert!(is_suspect(&lab, 1), "{}", lab.logs());
    thin.room.resize(MORE_ROOM);
    if is_killed {
        lab.kill(1);
        lab.start(1, None);
        assert!(
            is_suspect(&lab, 1),
            "the next daemon does not know\n{}",
            lab.logs()
        );
    }
    lab.order(0, &["migrate", "db", "--to", "b"]);
    assert!(!is_suspect(&lab, 1), "all of it was written again");
    thin.disk.forget();
    let mut client = connect(&lab, 1);
    assert!(read(&mut client) == data, "what was flushed at a is lost at b");
    client.flush().expect("flushed");
}

#[test]
fn a_retry_after_a_failed_flush_compares_nothing_with_the_page_cache() {
    a_retry(false);
}

#[test]
fn nor_does_the_next_daemon() {
    a_retry(true);
}

#[test]
fn a_volume_whose_flush_has_failed_is_read_and_not_written_and_is_saved_by_a_rescue() {
    let Some((lab, thin, data)) = with_thin_source() else {
        return;
    };
    let _pinned = Pinned::of(Path::new(&thin.disk.device), WRITTEN as usize);
    thin.room.resize(MORE_ROOM);
    // Neither room nor another connection makes the copy sound again.
    for step in 0..2 {
        if step > 0 {
            lab.order(0, &["detach", "db"]);
            lab.order(0, &["attach", "db"]);
        }
        let mut client = connect(&lab, 0);
        assert_eq!(errno(client.flush()), Some(libc::EIO), "step {step}");
        assert_eq!(
            errno(client.write(0, &[1; 512], false)),
            Some(libc::EIO),
            "step {step}"
        );
        assert_eq!(errno(client.zero(0, 4096)), Some(libc::EIO), "step {step}");
        assert!(
            read(&mut client) == data,
            "step {step}: the page cache was dropped"
        );
        assert!(is_suspect(&lab, 0));
    }
    let listed = lab.order(0, &["list"]);
    assert!(listed.contains("serving, suspect"), "{listed}");
    let said = refused(&lab, 0, &["migrate", "db", "--to", "b"]);
    assert!(said.contains("--rescue"), "{said}");
    // An agent asks this before it moves the volume's instance, and shows the answer (`verbatim check`).
    let said = obstacle(&lab, 0, "b").expect("something stands in the way");
    assert!(
        said.contains("has failed") && said.contains("--rescue") && said.contains("accept"),
        "{said}"
    );

    lab.order(0, &["migrate", "db", "--to", "b", "--rescue"]);
    assert_eq!(
        (lab.role(0, "db"), lab.role(1, "db")),
        ("moved".into(), "serving".into())
    );
    assert!(!is_suspect(&lab, 1));
    assert_eq!(obstacle(&lab, 1, "a"), None, "that one moves as any");
    assert!(is_suspect(&lab, 0), "its old copy is no better than before");
    let mut client = connect(&lab, 1);
    assert!(read(&mut client) == data, "not all of it was saved");
    client.flush().expect("flushed");

    // On the way back all data are written again, though the page cache there has the same.
    lab.order(1, &["migrate", "db", "--to", "a"]);
    assert!(!is_suspect(&lab, 0));
    thin.disk.forget();
    let mut client = connect(&lab, 0);
    assert!(read(&mut client) == data, "what b had flushed is lost at a");
    client.write(0, &[1; 512], true).expect("written");
}

/// The page cache of a block device goes with its last descriptor: then only the disk's data are left.
#[test]
fn a_volume_whose_flush_has_failed_is_not_written_by_the_next_daemon_either() {
    let Some((mut lab, thin, _)) = with_thin_source() else {
        return;
    };
    thin.room.resize(MORE_ROOM);
    lab.kill(0);
    lab.start(0, None);
    assert!(is_suspect(&lab, 0));
    let mut client = connect(&lab, 0);
    assert_eq!(errno(client.flush()), Some(libc::EIO));
    assert_eq!(errno(client.write(0, &[1; 512], false)), Some(libc::EIO));
    client.read(0, &mut [0; 512]).expect("it is read");
    lab.order(0, &["accept", "db"]);
    lab.kill(0);
    lab.start(0, None);
    assert!(!is_suspect(&lab, 0));
    connect(&lab, 0).write(0, &[1; 512], true).expect("written");
}

/// The first host has the volume in a fully allocated file.
fn with_files(die_at: Option<&str>) -> Option<(Lab, Files)> {
    let mut lab = Lab::without_daemons();
    let files = Files::new(&lab, 2 * SIZE)?;
    lab.start(0, die_at);
    let data = files.data();
    let data = data.to_str().expect("text");
    let size = SIZE.to_string();
    lab.order(
        0,
        &["create", "db", "--size", &size, "--data", data, "--preallocate"],
    );
    lab.order(0, &["attach", "db"]);
    Some((lab, files))
}

#[test]
fn a_daemon_that_is_killed_between_a_flush_that_failed_and_its_note_leaves_a_suspect_copy() {
    let Some((mut lab, files)) = with_files(Some("FlushFailed")) else {
        return;
    };
    files.fill();
    let data = noise(3);
    let mut client = connect(&lab, 0);
    write(&mut client, &data).expect("the page cache takes it");
    let _pinned = Pinned::of(&files.data(), WRITTEN as usize);
    assert!(client.flush().is_err(), "there is no room");
    until("the daemon is ended", || lab.has_ended(0));
    lab.kill(0);
    files.make_room();
    // The kernel has reported the failure to the dead process alone.
    lab.start(0, None);
    for step in 0..2 {
        assert!(is_suspect(&lab, 0), "step {step}: nobody knows\n{}", lab.logs());
        let mut client = connect(&lab, 0);
        assert_eq!(errno(client.flush()), Some(libc::EIO), "step {step}");
        assert!(
            read(&mut client) == data,
            "step {step}: the page cache was dropped"
        );
        lab.kill(0);
        lab.start(0, None);
    }
    lab.order(0, &["accept", "db"]);
    assert!(!is_suspect(&lab, 0));
    lab.kill(0);
}

/// The first host has the volume on a thin disk without enough room for what is then written.
fn with_thin(die_at: Option<&str>, room: &str) -> Option<(Lab, Thin)> {
    if !can_have_devices() {
        return None;
    }
    let mut lab = Lab::without_daemons();
    let thin = Thin::new(lab.path(0, "thin"), SIZE, room);
    lab.start(0, die_at);
    let (size, device) = (SIZE.to_string(), thin.disk.device.clone());
    lab.order(0, &["create", "db", "--size", &size, "--data", &device]);
    lab.order(0, &["attach", "db"]);
    Some((lab, thin))
}

#[test]
fn the_same_of_a_device_leaves_a_suspect_copy_too() {
    let Some((mut lab, thin)) = with_thin(Some("FlushFailed"), ROOM) else {
        return;
    };
    let mut client = connect(&lab, 0);
    write(&mut client, &noise(5)).expect("the page cache takes it");
    assert!(client.flush().is_err(), "there is no room");
    until("the daemon is ended", || lab.has_ended(0));
    lab.kill(0);
    thin.room.resize(MORE_ROOM);
    lab.start(0, None);
    let listed = lab.order(0, &["list"]);
    assert!(
        listed.contains("while it flushed") && listed.contains("accept"),
        "{listed}"
    );
    for step in 0..2 {
        assert!(is_suspect(&lab, 0), "step {step}: nobody knows\n{}", lab.logs());
        assert_eq!(errno(connect(&lab, 0).flush()), Some(libc::EIO), "step {step}");
        lab.kill(0);
        lab.start(0, None);
    }
    lab.order(0, &["accept", "db"]);
    assert!(!is_suspect(&lab, 0));
    // What was accepted is not held against the copy again.
    cut_off(&mut lab);
    assert!(!is_suspect(&lab, 0), "{}", lab.logs());
}

/// Kills the first host's daemon as if a flush were in flight, and starts another one.
fn cut_off(lab: &mut Lab) {
    lab.kill(0);
    has_cut_off(lab);
    lab.start(0, None);
}

/// Leaves the note of a process that was killed before it handled a flush's result.
fn has_cut_off(lab: &Lab) {
    let note = lab.path(0, "run/volumes/db.flushing");
    let mut said = std::fs::read(&note).expect("it is there");
    assert_eq!(said[40], b'0', "none is under way");
    said[40] = b'1';
    std::fs::write(&note, said).expect("written");
}

/// Ends the keeper of the volume's pages.
fn end_pages(lab: &Lab) {
    for path in lab.keepers_of(0, "pages") {
        verbatim_keeper::Keeper::find(&path).expect("it runs").end();
    }
}

#[test]
fn a_device_whose_flush_went_well_is_compared_by_its_keeper_and_is_suspect_without_one() {
    let Some((mut lab, _thin)) = with_thin(None, MORE_ROOM) else {
        return;
    };
    let data = noise(6);
    let mut client = connect(&lab, 0);
    write(&mut client, &data).expect("written");
    client.flush().expect("flushed");
    for _ in 0..2 {
        cut_off(&mut lab);
        assert!(!is_suspect(&lab, 0), "{}", lab.logs());
        let mut client = connect(&lab, 0);
        assert!(read(&mut client) == data, "it differs");
        client.write(0, &data[..4096], true).expect("written");
    }
    assert!(lab.logs().contains("compared with the disk"), "{}", lab.logs());
    // One that was told to end leaves nothing in doubt, and frees the device.
    lab.end(0);
    assert!(lab.keepers_of(0, "pages").is_empty());
    lab.start(0, None);
    assert!(!is_suspect(&lab, 0), "{}", lab.logs());
    // Whoever kills the keeper, too, leaves nothing that says whether the flush went well.
    end_pages(&lab);
    cut_off(&mut lab);
    assert!(is_suspect(&lab, 0), "{}", lab.logs());
    let listed = lab.order(0, &["list"]);
    assert!(listed.contains("has dropped the device's pages"), "{listed}");
    assert!(read(&mut connect(&lab, 0)) == data, "it is read");
    lab.order(0, &["accept", "db"]);
    assert!(!is_suspect(&lab, 0));
    lab.order(0, &["detach", "db"]);
    lab.order(0, &["delete", "db"]);
    assert!(lab.keepers_of(0, "pages").is_empty());
}

#[test]
fn a_daemon_that_is_killed_in_a_flush_that_went_well_leaves_a_copy_as_any() {
    let Some((mut lab, _files)) = with_files(None) else {
        return;
    };
    let data = noise(4);
    let mut client = connect(&lab, 0);
    write(&mut client, &data).expect("written");
    client.flush().expect("flushed");
    cut_off(&mut lab);
    assert!(lab.logs().contains("compared with the disk"), "{}", lab.logs());
    for _ in 0..2 {
        assert!(!is_suspect(&lab, 0), "{}", lab.logs());
        let mut client = connect(&lab, 0);
        assert!(read(&mut client) == data, "it differs");
        client.write(0, &data[..4096], true).expect("written");
        lab.kill(0);
        lab.start(0, None);
    }
    lab.kill(0);
}

#[test]
fn an_operator_who_accepts_it_has_all_of_it_written_once_more() {
    let Some((mut lab, thin, data)) = with_thin_source() else {
        return;
    };
    let pinned = Pinned::of(Path::new(&thin.disk.device), WRITTEN as usize);
    let said = refused(&lab, 0, &["accept", "db"]);
    assert!(said.contains("stays suspect"), "{said}");
    assert!(is_suspect(&lab, 0));
    // The pages would go with the daemon.
    let said = refused(&lab, 0, &["stop"]);
    assert!(
        said.contains("db is suspect") && said.contains("--force"),
        "{said}"
    );
    // No daemon does not change that.
    lab.kill(0);
    let said = refused(&lab, 0, &["stop"]);
    assert!(
        said.contains("only current data of db") && said.contains("--force"),
        "{said}"
    );
    assert_eq!(lab.keepers_of(0, "pages").len(), 1);
    lab.start(0, None);
    thin.room.resize(MORE_ROOM);
    lab.order(0, &["accept", "db"]);
    assert!(!is_suspect(&lab, 0));
    drop(pinned);
    thin.disk.forget();
    let mut client = connect(&lab, 0);
    assert!(read(&mut client) == data, "part of it is not on the disk");
    client.write(0, &[1; 512], true).expect("written");
    let said = refused(&lab, 0, &["accept", "db"]);
    assert!(said.contains("nothing to accept"), "{said}");
}

#[test]
fn a_copy_whose_flush_has_failed_is_not_sound_by_another_name() {
    let Some((lab, thin, _)) = with_thin_source() else {
        return;
    };
    let device = &thin.disk.device;
    let pinned = Pinned::of(Path::new(device), WRITTEN as usize);
    lab.order(0, &["detach", "db"]);
    lab.order(0, &["delete", "db"]);
    let size = SIZE.to_string();
    let create = ["create", "other", "--size", &size, "--data", device];
    let said = refused(&lab, 0, &create);
    assert!(said.contains("a flush of it has failed"), "{said}");
    assert_eq!(lab.role(0, "other"), "none");
    drop(pinned);
    thin.disk.forget();
    lab.order(0, &create);
}
