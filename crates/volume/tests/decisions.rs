//! Decisions are not forgotten, and need no room: copies that are deleted, sidecars that cannot be read,
//! folders that are full or read-only, and operators.

mod support;

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use support::client::Client;
use support::frozen::Disk;
use support::small::Small;
use support::{Lab, PATIENCE, until};
use verbatim_volume::control::{Order, Outcome, Row, order_now};

const MIB: u64 = 1 << 20;

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

fn give(lab: &Lab, host: usize, order: &Order) -> Result<Vec<Row>, String> {
    match order_now(&lab.path(host, "run/volumes.sock"), order, PATIENCE) {
        Ok(Outcome::Volumes(rows)) => Ok(rows),
        Ok(other) => Err(format!("{other:?}")),
        Err(error) => Err(format!("{error:#}")),
    }
}

fn settle(lab: &Lab, host: usize, by: u64, is_committed: bool) -> Result<String, String> {
    let order = Order::Settle {
        name: "db".to_owned(),
        by,
        is_committed,
    };
    let mut rows = give(lab, host, &order)?;
    assert_eq!(rows.len(), 1, "the answer is a row");
    Ok(rows.remove(0).role)
}

/// Copies the volume for a session, and holds it.
fn hold(lab: &Lab, by: u64) {
    let name = "db".to_owned();
    let follow = Order::Follow {
        name: name.clone(),
        to: "b".to_owned(),
        by,
        bytes_per_second: None,
    };
    give(lab, 0, &follow).expect("it is copied");
    let mirrored = Order::Mirrored {
        name: name.clone(),
        by,
    };
    give(lab, 0, &mirrored).expect("it has everything");
    give(lab, 0, &Order::Hold { name, by }).expect("it is held");
}

/// Bytes that are not zero, so that they take room.
fn noise(seed: u64, bytes: u64) -> Vec<u8> {
    let mut noise = vec![0; bytes as usize];
    StdRng::seed_from_u64(seed).fill(noise.as_mut_slice());
    noise
}

fn client(lab: &Lab, host: usize, volume: &str) -> Client {
    Client::connect(&lab.socket(host, volume)).expect("it is served")
}

fn write(lab: &Lab, host: usize, volume: &str, offset: u64, data: &[u8]) {
    let mut client = client(lab, host, volume);
    client.write(offset, data, false).expect("written");
    client.flush().expect("flushed");
}

fn read(lab: &Lab, host: usize, volume: &str, offset: u64, bytes: u64) -> Vec<u8> {
    let mut data = vec![0; bytes as usize];
    client(lab, host, volume).read(offset, &mut data).expect("read");
    data
}

fn text(path: &std::path::Path) -> String {
    path.to_str().expect("text").to_owned()
}

fn trouble(lab: &Lab, host: usize, volume: &str) -> String {
    let status = lab.status(host, volume).unwrap_or_default();
    status["trouble"].as_str().unwrap_or_default().to_owned()
}

/// A volume on the first host whose data are not in the state folder.
fn volume_elsewhere(lab: &Lab, name: &str, bytes: u64) -> PathBuf {
    let data = lab.path(0, &format!("{name}.img"));
    let size = bytes.to_string();
    lab.order(0, &["create", name, "--size", &size, "--data", &text(&data)]);
    lab.order(0, &["attach", name]);
    data
}

#[test]
fn a_host_remembers_what_it_committed_when_its_copy_was_deleted() {
    // The copy comes there again before the first source asks, or does not.
    for comes_again in [true, false] {
        let mut lab = Lab::without_daemons();
        lab.start(0, Some("Answered"));
        lab.start(1, None);
        lab.start(2, None);
        lab.volume("db", "8M");
        write(&lab, 0, "db", 0, &noise(1, 8 * MIB));
        // The first source is killed when it has the answer, and has not written it.
        refused(&lab, 0, &["migrate", "db", "--to", "b"]);
        lab.kill(0);
        assert_eq!(lab.role(1, "db"), "serving", "{}", lab.logs());
        write(&lab, 1, "db", 0, &[0x77; 4096]);
        lab.order(1, &["migrate", "db", "--to", "c"]);
        lab.order(1, &["delete", "db"]);
        assert_eq!(lab.role(1, "db"), "none");
        let coming = comes_again.then(|| {
            let args = ["migrate", "db", "--to", "b", "--max-bandwidth", "1"];
            let moving = lab.command(2, &args).spawn().expect("it runs");
            until("it comes again", || lab.role(1, "db") == "incoming");
            moving
        });
        lab.start(0, None);
        until("the first source hears of it", || {
            let role = lab.role(0, "db");
            assert!(role != "serving", "two copies serve\n{}", lab.logs());
            role == "moved"
        });
        if let Some(mut moving) = coming {
            lab.try_order(2, &["cancel", "db"]);
            moving.wait().expect("it ends");
        }
        until("the last one serves", || lab.role(2, "db") == "serving");
        assert_eq!(read(&lab, 2, "db", 0, 4096), [0x77; 4096]);
    }
}

#[test]
fn a_copy_that_is_not_known_takes_no_order_and_others_are_served() {
    let mut lab = Lab::new();
    lab.volume("db", "4M");
    lab.volume("other", "4M");
    write(&lab, 0, "db", 0, &[7; 4096]);
    let sidecar = lab.path(0, "state/db/sidecar.json");
    lab.kill(0);
    let good = std::fs::read(&sidecar).expect("it is there");
    std::fs::write(&sidecar, "{\"id\":").expect("written");
    lab.start(0, None);
    assert_eq!(lab.role(0, "db"), "unknown", "{}", lab.logs());
    assert!(trouble(&lab, 0, "db").contains("is damaged"));
    assert!(lab.order(0, &["list"]).contains("is damaged"));
    write(&lab, 0, "other", 0, &[8; 4096]);
    for args in [
        &["attach", "db"][..],
        &["detach", "db"],
        &["delete", "db"],
        &["create", "db", "--size", "1M"],
        &["resize", "db", "--size", "8M"],
        &["migrate", "db", "--to", "b"],
        &["resolve", "db", "--keep", "source", "--force"],
    ] {
        let said = refused(&lab, 0, args);
        assert!(said.contains("it is not known"), "{args:?}: {said}");
    }
    for is_committed in [false, true] {
        let said = settle(&lab, 0, 5, is_committed).expect_err("it is not known");
        assert!(said.contains("it is not known"), "{said}");
    }
    // The host does not take another host's copy, either.
    lab.volume_at(1, "db", "4M");
    let said = refused(&lab, 1, &["migrate", "db", "--to", "a"]);
    assert!(said.contains("it is not known"), "{said}");
    // The daemon tries again by itself.
    std::fs::write(&sidecar, good).expect("written");
    until("it is known again", || lab.role(0, "db") == "serving");
    until("it is served", || lab.socket(0, "db").exists());
    assert_eq!(read(&lab, 0, "db", 0, 4096), [7; 4096]);
    assert_eq!(trouble(&lab, 0, "db"), "");
}

/// A folder without others in it. Each file is there at once: a daemon may be looking.
fn copy_folder(from: &std::path::Path, to: &std::path::Path) {
    let names = |folder: &std::path::Path| -> Vec<_> {
        let entries = std::fs::read_dir(folder).expect("it is there");
        entries
            .map(|entry| entry.expect("an entry").file_name())
            .collect()
    };
    std::fs::create_dir_all(to).expect("made");
    let wanted = names(from);
    for name in &wanted {
        let beside = to.with_extension("beside");
        std::fs::copy(from.join(name), &beside).expect("copied");
        std::fs::rename(&beside, to.join(name)).expect("renamed");
    }
    for name in names(to).iter().filter(|name| !wanted.contains(name)) {
        std::fs::remove_file(to.join(name)).expect("removed");
    }
}

/// Whether the file system of this file keeps extended attributes. Reports it if not.
fn keeps_attributes(file: &std::path::Path) -> bool {
    let set = rustix::fs::setxattr(file, "user.test", b"1", rustix::fs::XattrFlags::empty());
    if set.is_err() {
        eprintln!("skipped: the file system keeps no extended attributes");
        return false;
    }
    rustix::fs::removexattr(file, "user.test").is_ok()
}

#[test]
fn a_state_folder_that_comes_from_a_backup_decides_nothing_until_an_operator_says_so() {
    let mut lab = Lab::new();
    let data = volume_elsewhere(&lab, "db", 4 * MIB);
    if !keeps_attributes(&data) {
        return;
    }
    write(&lab, 0, "db", 0, &[7; 4096]);
    let folder = lab.path(0, "state/db");
    let (backup, newer) = (lab.path(0, "backup"), lab.path(0, "newer"));
    copy_folder(&folder, &backup);
    lab.order(0, &["migrate", "db", "--to", "b"]);
    write(&lab, 1, "db", 0, &[8; 4096]);
    let put_back = |lab: &mut Lab| {
        lab.kill(0);
        copy_folder(&folder, &newer);
        copy_folder(&backup, &folder);
        lab.start(0, None);
        assert_eq!(lab.role(0, "db"), "unknown", "two copies serve\n{}", lab.logs());
    };
    put_back(&mut lab);
    let said = trouble(&lab, 0, "db");
    assert!(
        said.contains("comes from a backup") && said.contains("verbatim volume accept db"),
        "{said}"
    );
    for args in [
        &["attach", "db"][..],
        &["delete", "db"],
        &["migrate", "db", "--to", "b"],
    ] {
        let said = refused(&lab, 0, args);
        assert!(said.contains("it is not known"), "{args:?}: {said}");
    }
    assert!(Client::connect(&lab.socket(0, "db")).is_err(), "it is served");
    // The newer folder is known at once, and moves on as before.
    copy_folder(&newer, &folder);
    until("it is known again", || lab.role(0, "db") == "moved");
    lab.order(1, &["migrate", "db", "--to", "a"]);
    assert_eq!(read(&lab, 0, "db", 0, 4096), [8; 4096]);
    lab.order(0, &["migrate", "db", "--to", "b"]);

    // The other copy is lost, and this one is the best one left.
    put_back(&mut lab);
    lab.order(1, &["detach", "db"]);
    lab.order(1, &["delete", "db"]);
    lab.order(0, &["accept", "db"]);
    for _ in 0..2 {
        assert_eq!(lab.role(0, "db"), "serving", "{}", lab.logs());
        assert_eq!(trouble(&lab, 0, "db"), "");
        assert_eq!(read(&lab, 0, "db", 0, 4096), [8; 4096], "what its data have");
        lab.kill(0);
        lab.start(0, None);
    }
    let said = refused(&lab, 0, &["accept", "db"]);
    assert!(said.contains("nothing to accept"), "{said}");
    assert_eq!(lab.status(0, "db").expect("listed")["generation"], 3);
}

#[test]
fn data_that_come_late_say_that_the_sidecar_comes_from_a_backup() {
    let mut lab = Lab::new();
    let data = volume_elsewhere(&lab, "db", 4 * MIB);
    if !keeps_attributes(&data) {
        return;
    }
    let (folder, backup) = (lab.path(0, "state/db"), lab.path(0, "backup"));
    copy_folder(&folder, &backup);
    lab.order(0, &["migrate", "db", "--to", "b"]);
    lab.kill(0);
    copy_folder(&backup, &folder);
    let away = data.with_extension("away");
    std::fs::rename(&data, &away).expect("renamed");
    lab.start(0, None);
    let waits = |lab: &Lab| lab.status(0, "db").expect("listed")["waits"].clone();
    assert!(
        waits(&lab)
            .as_str()
            .expect("text")
            .contains("its data are missing"),
        "{}",
        waits(&lab)
    );
    std::fs::rename(&away, &data).expect("renamed");
    until("the data say so", || lab.role(0, "db") == "unknown");
    assert!(trouble(&lab, 0, "db").contains("comes from a backup"));
    assert!(Client::connect(&lab.socket(0, "db")).is_err(), "it is served");
}

#[test]
fn a_source_is_not_told_anything_by_a_destination_that_does_not_know() {
    let mut lab = Lab::without_daemons();
    lab.start(0, None);
    lab.start(1, Some("Committed"));
    lab.volume("db", "4M");
    write(&lab, 0, "db", 0, &[7; 4096]);
    let mut moving = lab
        .command(0, &["migrate", "db", "--to", "b"])
        .spawn()
        .expect("it runs");
    until("the destination is ended", || lab.has_ended(1));
    lab.kill(1);
    let sidecar = lab.path(1, "state/db/sidecar.json");
    let good = std::fs::read(&sidecar).expect("it is there");
    std::fs::write(&sidecar, "").expect("written");
    lab.start(1, None);
    until("it was asked", || {
        std::fs::read_to_string(lab.path(0, "log"))
            .is_ok_and(|log| log.contains("it is not known what the copy"))
    });
    assert_eq!(lab.role(0, "db"), "deciding");
    std::fs::write(&sidecar, good).expect("written");
    until("it serves there", || lab.role(1, "db") == "serving");
    assert!(moving.wait().expect("it ends").success());
    assert_eq!(lab.role(0, "db"), "moved");
}

#[test]
fn a_folder_that_is_full_or_read_only_takes_no_volume_away() {
    let mut lab = Lab::without_daemons();
    let Some(small) = Small::mount(lab.path(0, "state"), "2m") else {
        return;
    };
    lab.start(0, None);
    lab.start(1, None);
    for name in ["db", "other"] {
        volume_elsewhere(&lab, name, 4 * MIB);
    }
    lab.kill(0);
    small.fill(0);
    lab.start(0, None);
    for name in ["db", "other"] {
        assert_eq!(lab.role(0, name), "serving", "{}", lab.logs());
        write(&lab, 0, name, 0, &[7; 4096]);
    }
    // Decisions of the volume need no room, and neither do these orders.
    lab.order(0, &["detach", "other"]);
    lab.order(0, &["attach", "other"]);
    lab.order(0, &["migrate", "other", "--to", "b"]);
    assert_eq!(
        (lab.role(0, "other"), lab.role(1, "other")),
        ("moved".into(), "serving".into())
    );

    // The files of an earlier release: the volume is served, but a move whose decision could not be written
    // is refused in time.
    lab.kill(0);
    std::fs::remove_file(lab.path(0, "state/db/sidecar.spare")).expect("it was there");
    small.fill(0);
    lab.start(0, None);
    assert_eq!(lab.role(0, "db"), "serving", "{}", lab.logs());
    let said = refused(&lab, 0, &["migrate", "db", "--to", "b"]);
    assert!(said.contains("No space left"), "{said}");
    write(&lab, 0, "db", 0, &[8; 4096]);

    lab.kill(0);
    small.be_read_only(true);
    lab.start(0, None);
    assert_eq!(lab.role(0, "db"), "serving", "{}", lab.logs());
    write(&lab, 0, "db", 0, &[9; 4096]);
    let said = refused(&lab, 0, &["migrate", "db", "--to", "b"]);
    assert!(said.contains("Read-only"), "{said}");
    small.be_read_only(false);
    small.clear();
    lab.order(0, &["migrate", "db", "--to", "b"]);
    assert_eq!(read(&lab, 1, "db", 0, 4096), [9; 4096]);
    lab.kill(0);
}

#[test]
fn a_commit_needs_no_room() {
    let mut lab = Lab::without_daemons();
    let Some(small) = Small::mount(lab.path(1, "state"), "2m") else {
        return;
    };
    lab.start(0, None);
    lab.start(1, None);
    lab.volume("db", "4M");
    write(&lab, 0, "db", 0, &noise(2, 4 * MIB));
    lab.order(1, &["place", "db", "--data", &text(&lab.path(1, "db.img"))]);
    let args = ["migrate", "db", "--to", "b", "--max-bandwidth", "1"];
    let mut moving = lab.command(0, &args).spawn().expect("it runs");
    until("it comes", || lab.role(1, "db") == "incoming");
    small.fill(0);
    assert!(moving.wait().expect("it ends").success(), "{}", lab.logs());
    assert_eq!(
        (lab.role(0, "db"), lab.role(1, "db")),
        ("moved".into(), "serving".into())
    );
    assert!(read(&lab, 1, "db", 0, 4 * MIB) == noise(2, 4 * MIB), "it differs");

    // Without room for the decision from the beginning, the order is refused before anything begins.
    lab.volume("late", "1M");
    let said = refused(&lab, 0, &["migrate", "late", "--to", "b"]);
    assert!(said.contains("No space left"), "{said}");
    assert_eq!(
        (lab.role(0, "late"), lab.role(1, "late")),
        ("serving".into(), "none".into())
    );
    lab.kill(1);
}

#[test]
fn a_commit_that_cannot_be_written_down_is_said_once_and_made_when_it_can() {
    let mut lab = Lab::without_daemons();
    let Some(small) = Small::mount(lab.path(1, "state"), "2m") else {
        return;
    };
    lab.start(0, None);
    lab.start(1, None);
    lab.volume("db", "4M");
    write(&lab, 0, "db", 0, &noise(2, 4 * MIB));
    lab.order(1, &["place", "db", "--data", &text(&lab.path(1, "db.img"))]);
    let args = ["migrate", "db", "--to", "b", "--max-bandwidth", "1"];
    let mut moving = lab.command(0, &args).spawn().expect("it runs");
    until("it comes", || lab.role(1, "db") == "incoming");
    std::fs::remove_file(lab.path(1, "state/db/sidecar.spare")).expect("it was there");
    small.fill(0);
    let said = |host: usize| lab.log(host).matches("sidecar.spare aside").count();
    until("the source waits", || said(0) > 0);
    // Meanwhile it asks, again and again.
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!((said(0), said(1)), (1, 1), "{}", lab.logs());
    assert_eq!(
        (lab.role(0, "db"), lab.role(1, "db")),
        ("deciding".into(), "incoming".into())
    );
    small.clear();
    assert!(moving.wait().expect("it ends").success(), "{}", lab.logs());
    assert!(read(&lab, 1, "db", 0, 4 * MIB) == noise(2, 4 * MIB), "it differs");
    lab.kill(1);
}

#[test]
fn what_a_session_decides_needs_no_room_and_is_not_lost_where_the_copy_is_not_known() {
    let mut lab = Lab::without_daemons();
    let Some(here) = Small::mount(lab.path(0, "state"), "2m") else {
        return;
    };
    let there = Small::mount(lab.path(1, "state"), "2m").expect("as the other");
    lab.start(0, None);
    lab.start(1, None);
    volume_elsewhere(&lab, "db", 4 * MIB);
    lab.order(1, &["place", "db", "--data", &text(&lab.path(1, "db.img"))]);
    hold(&lab, 7);
    here.fill(0);
    there.fill(0);
    for host in [0, 1] {
        lab.kill(host);
        let sidecar = lab.path(host, "state/db/sidecar.json");
        let good = std::fs::read(&sidecar).expect("it is there");
        // The bytes are replaced in place, since there is no room for more.
        let mut bad = good.clone();
        bad[0] = b'!';
        std::fs::write(&sidecar, bad).expect("written");
        lab.start(host, None);
        let said = settle(&lab, host, 7, true).expect_err("it is not known");
        assert!(said.contains("it is not known"), "{said}");
        std::fs::write(&sidecar, good).expect("written");
        until("it is known", || ["held", "ready"][host] == lab.role(host, "db"));
        assert_eq!(lab.status(host, "db").expect("listed")["by"], 7);
        let role = settle(&lab, host, 7, true).expect("it hears it");
        assert_eq!(role, ["moved", "serving"][host]);
    }
    assert_eq!(settle(&lab, 1, 7, true).as_deref(), Ok("serving"), "told again");
    let nothing = Order::Settle {
        name: "never".to_owned(),
        by: 7,
        is_committed: false,
    };
    let rows = give(&lab, 0, &nothing).expect("it has nothing to do with that");
    assert_eq!(rows[0].role, "none");
    lab.order(1, &["attach", "db"]);
    write(&lab, 1, "db", 0, &[7; 4096]);
    lab.kill(0);
    lab.kill(1);
}

#[test]
fn an_operator_gets_copies_out_of_a_session_that_nobody_knows_any_more() {
    for (keep, roles) in [
        ("source", ["serving", "incomplete"]),
        ("destination", ["moved", "serving"]),
    ] {
        let mut lab = Lab::new();
        lab.volume("db", "4M");
        write(&lab, 0, "db", 0, &[7; 4096]);
        hold(&lab, 0xab);
        for host in [0, 1] {
            // The daemon is restarted.
            lab.kill(host);
            lab.start(host, None);
            let said = refused(&lab, host, &["resolve", "db", "--keep", keep]);
            assert!(said.contains("00000000000000ab"), "{said}");
            assert_eq!(lab.role(host, "db"), ["held", "ready"][host]);
            lab.order(host, &["resolve", "db", "--keep", keep, "--force"]);
            assert_eq!(lab.role(host, "db"), roles[host], "{}", lab.logs());
        }
        let serves = usize::from(keep == "destination");
        lab.order(serves, &["attach", "db"]);
        assert_eq!(read(&lab, serves, "db", 0, 4096), [7; 4096]);
    }
}

#[test]
fn an_operator_who_keeps_a_source_hears_that_its_session_was_committed() {
    let mut lab = Lab::new();
    lab.volume("db", "4M");
    write(&lab, 0, "db", 0, &[7; 4096]);
    let by = 0xab;
    hold(&lab, by);
    lab.order(0, &["resolve", "db", "--keep", "source", "--force"]);
    assert_eq!(
        (lab.role(0, "db"), lab.role(1, "db")),
        ("serving".into(), "ready".into())
    );
    // The other host waits for its agent and gives no answer.
    let said = refused(&lab, 0, &["migrate", "db", "--to", "b"]);
    assert!(said.contains("has not said yet"), "{said}");
    settle(&lab, 1, by, true).expect("it was promised");
    assert_eq!(lab.role(1, "db"), "serving");
    for _ in 0..2 {
        until("it is told", || trouble(&lab, 0, "db").contains("there are two"));
        // The next daemon reports it, too.
        lab.kill(0);
        lab.start(0, None);
    }
    lab.order(1, &["delete", "db"]);
    lab.order(0, &["migrate", "db", "--to", "b"]);
    assert_eq!(trouble(&lab, 0, "db"), "");
}

/// Whether it says that, and the daemon after it, too.
fn is_said(lab: &mut Lab, host: usize, what: &str) {
    for _ in 0..2 {
        until("it is told", || trouble(lab, host, "db").contains(what));
        lab.kill(host);
        lab.start(host, None);
    }
    until("it is told", || trouble(lab, host, "db").contains(what));
}

#[test]
fn an_operator_who_keeps_a_destination_hears_that_its_session_was_rolled_back() {
    let mut lab = Lab::new();
    lab.volume("db", "4M");
    write(&lab, 0, "db", 0, &[7; 4096]);
    let by = 0xab;
    hold(&lab, by);
    lab.order(1, &["resolve", "db", "--keep", "destination", "--force"]);
    assert_eq!(
        (lab.role(0, "db"), lab.role(1, "db")),
        ("held".into(), "serving".into())
    );
    // The source waits for its agent: that is no answer.
    assert_eq!(trouble(&lab, 1, "db"), "");
    settle(&lab, 0, by, false).expect("it was held");
    assert_eq!(lab.role(0, "db"), "serving");
    is_said(&mut lab, 1, "there are two");
    lab.order(1, &["delete", "db"]);
    // It was younger than the one that is right.
    let said = refused(&lab, 0, &["migrate", "db", "--to", "b"]);
    assert!(said.contains("makes this host forget the other"), "{said}");
    lab.order(1, &["delete", "db"]);
    lab.order(0, &["migrate", "db", "--to", "b"]);
    assert_eq!(read(&lab, 1, "db", 0, 4096), [7; 4096]);
    assert_eq!(
        (trouble(&lab, 0, "db"), trouble(&lab, 1, "db")),
        (String::new(), String::new())
    );
}

#[test]
fn a_commit_is_not_taken_for_delivered_by_a_copy_that_an_operator_has_given_up() {
    let mut lab = Lab::new();
    lab.volume("db", "4M");
    write(&lab, 0, "db", 0, &[7; 4096]);
    let by = 0xab;
    hold(&lab, by);
    lab.order(1, &["resolve", "db", "--keep", "source", "--force"]);
    assert_eq!(lab.role(1, "db"), "incomplete");
    // The source's agent is away: the source waits, and gives the destination no answer.
    for _ in 0..2 {
        let said = settle(&lab, 1, by, true).expect_err("it has nothing to serve");
        for part in [
            "00000000000000ab",
            "no copy serves",
            "at a has all",
            "verbatim volume revive db --force",
            "verbatim volume delete db",
        ] {
            assert!(said.contains(part), "{part}: {said}");
        }
        let shown = trouble(&lab, 1, "db");
        assert!(
            shown.contains("no copy serves") && said.contains(&shown),
            "{shown}"
        );
        lab.kill(1);
        lab.start(1, None);
    }
    // The way out, as it says.
    settle(&lab, 0, by, true).expect("it waited");
    lab.order(0, &["revive", "db", "--force"]);
    settle(&lab, 1, by, true).expect_err("it has not come yet");
    lab.order(1, &["delete", "db"]);
    assert_eq!(settle(&lab, 1, by, true).as_deref(), Ok("none"));
    lab.order(0, &["attach", "db"]);
    assert_eq!(read(&lab, 0, "db", 0, 4096), [7; 4096]);
}

#[test]
fn a_copy_is_not_committed_in_a_file_that_was_deleted_while_it_came() {
    let lab = Lab::new();
    lab.volume("db", "4M");
    write(&lab, 0, "db", 0, &noise(2, 4 * MIB));
    lab.order(1, &["place", "db", "--data", &text(&lab.path(1, "db.img"))]);
    let args = ["migrate", "db", "--to", "b", "--max-bandwidth", "1"];
    let moving = lab
        .command(0, &args)
        .stderr(Stdio::piped())
        .spawn()
        .expect("it runs");
    until("it comes", || lab.role(1, "db") == "incoming");
    std::fs::remove_file(lab.path(1, "db.img")).expect("it is there");
    let moved = moving.wait_with_output().expect("it ends");
    assert!(!moved.status.success(), "{}", lab.logs());
    assert_eq!(
        (lab.role(0, "db"), lab.role(1, "db")),
        ("serving".into(), "incomplete".into())
    );
    assert!(
        lab.log(1).contains("was deleted while it was filled"),
        "{}",
        lab.log(1)
    );
    assert!(read(&lab, 0, "db", 0, 4 * MIB) == noise(2, 4 * MIB), "it differs");
    // The way out, as it says.
    lab.order(1, &["delete", "db"]);
    lab.order(0, &["migrate", "db", "--to", "b"]);
    assert!(read(&lab, 1, "db", 0, 4 * MIB) == noise(2, 4 * MIB), "it differs");
}

#[test]
fn an_operator_who_has_no_copy_serve_hears_of_it_and_has_one_served_again() {
    // At which host the word was said, and what the session was in truth.
    for (host, keep, is_committed) in [(0, "destination", false), (1, "source", true)] {
        let mut lab = Lab::new();
        lab.volume("db", "4M");
        write(&lab, 0, "db", 0, &[7; 4096]);
        let by = 0xab;
        hold(&lab, by);
        lab.order(host, &["resolve", "db", "--keep", keep, "--force"]);
        let other = 1 - host;
        assert_eq!(trouble(&lab, host, "db"), "", "the other one waits");
        settle(&lab, other, by, is_committed).expect("it waited");
        let roles = ("moved".to_owned(), "incomplete".to_owned());
        assert_eq!((lab.role(0, "db"), lab.role(1, "db")), roles);
        is_said(&mut lab, host, "no copy serves");
        assert!(trouble(&lab, host, "db").contains("verbatim volume revive db --force"));
        let said = refused(&lab, 0, &["revive", "db"]);
        assert!(said.contains("what was written since is lacking"), "{said}");
        let said = refused(&lab, 1, &["revive", "db", "--force"]);
        assert!(said.contains("none that was complete"), "{said}");
        lab.order(0, &["revive", "db", "--force"]);
        lab.order(0, &["attach", "db"]);
        assert_eq!(read(&lab, 0, "db", 0, 4096), [7; 4096]);
        // The other one has nothing against it, so it moves on as ever.
        until("it moves", || {
            lab.try_order(0, &["migrate", "db", "--to", "b"]).status.success()
        });
        assert_eq!(read(&lab, 1, "db", 0, 4096), [7; 4096]);
        assert_eq!(
            (trouble(&lab, 0, "db"), trouble(&lab, 1, "db")),
            (String::new(), String::new())
        );
    }
}

#[test]
fn an_operator_who_says_that_a_volume_has_moved_hears_whether_it_has() {
    for (dies_at, has_moved) in [("Committed", true), ("Committing", false)] {
        let mut lab = Lab::without_daemons();
        lab.start(0, None);
        lab.start(1, Some(dies_at));
        lab.volume("db", "4M");
        write(&lab, 0, "db", 0, &[7; 4096]);
        let mut moving = lab
            .command(0, &["migrate", "db", "--to", "b"])
            .spawn()
            .expect("it runs");
        until("the destination is ended", || lab.has_ended(1));
        lab.kill(1);
        lab.order(0, &["resolve", "db", "--keep", "destination", "--force"]);
        moving.wait().expect("it ends");
        assert_eq!(lab.role(0, "db"), "moved");
        let asks = |lab: &Lab| {
            let sidecar = std::fs::read_to_string(lab.path(0, "state/db/sidecar.json"));
            sidecar.expect("it is there").contains("overruled")
        };
        assert!(asks(&lab), "nobody asks");
        lab.start(1, None);
        if has_moved {
            until("it is confirmed", || !asks(&lab));
            assert_eq!(trouble(&lab, 0, "db"), "");
            continue;
        }
        is_said(&mut lab, 0, "no copy serves");
        lab.order(0, &["revive", "db", "--force"]);
        lab.order(0, &["attach", "db"]);
        assert_eq!(trouble(&lab, 0, "db"), "");
        assert_eq!(read(&lab, 0, "db", 0, 4096), [7; 4096]);
        until("it moves", || {
            lab.try_order(0, &["migrate", "db", "--to", "b"]).status.success()
        });
    }
}

#[test]
fn a_copy_that_has_moved_is_served_again_only_by_a_word_which_may_be_wrong() {
    for is_lost in [true, false] {
        let mut lab = Lab::new();
        lab.volume("db", "4M");
        write(&lab, 0, "db", 0, &[7; 4096]);
        lab.order(0, &["migrate", "db", "--to", "b"]);
        write(&lab, 1, "db", 0, &[8; 4096]);
        lab.kill(1);
        let said = refused(&lab, 0, &["revive", "db"]);
        assert!(said.contains("has moved to b"), "{said}");
        assert_eq!(lab.role(0, "db"), "moved");
        lab.order(0, &["revive", "db", "--force"]);
        lab.order(0, &["attach", "db"]);
        let status = lab.status(0, "db").expect("listed");
        assert_eq!(
            (&status["role"], &status["generation"]),
            (&"serving".into(), &3.into())
        );
        assert_eq!(read(&lab, 0, "db", 0, 4096), [7; 4096]);
        let said = refused(&lab, 0, &["migrate", "db", "--to", "b"]);
        assert!(said.contains("has not said yet"), "{said}");
        if is_lost {
            std::fs::remove_dir_all(lab.path(1, "state")).expect("its disks are new");
        }
        lab.start(1, None);
        if is_lost {
            // It knows nothing, and would take the volume: so it has none.
            until("it moves", || {
                lab.try_order(0, &["migrate", "db", "--to", "b"]).status.success()
            });
            assert_eq!(read(&lab, 1, "db", 0, 4096), [7; 4096]);
        } else {
            is_said(&mut lab, 0, "there are two");
            assert_eq!(read(&lab, 1, "db", 0, 4096), [8; 4096]);
        }
    }
}

#[test]
fn a_size_is_told_when_it_is_durable_and_what_is_written_behind_the_old_one_stays() {
    let mut lab = Lab::without_daemons();
    let Some(small) = Small::mount(lab.path(0, "state"), "2m") else {
        return;
    };
    lab.start(0, Some("Grown"));
    let data = volume_elsewhere(&lab, "db", 4 * MIB);
    small.fill(0);
    refused(&lab, 0, &["resize", "db", "--size", "8M"]);
    lab.kill(0);
    lab.start(0, None);
    assert_eq!(client(&lab, 0, "db").size, 8 * MIB, "{}", lab.logs());
    write(&lab, 0, "db", 7 * MIB, &[5; 4096]);

    // An order that cannot be recorded is refused, and changes nothing.
    std::fs::remove_file(lab.path(0, "state/db/sidecar.spare")).expect("it was there");
    small.fill(0);
    let said = refused(&lab, 0, &["resize", "db", "--size", "16M"]);
    assert!(said.contains("No space left"), "{said}");
    assert_eq!(client(&lab, 0, "db").size, 8 * MIB);
    assert_eq!(lab.role(0, "db"), "serving");
    small.clear();
    lab.order(0, &["resize", "db", "--size", "16M"]);
    write(&lab, 0, "db", 15 * MIB, &[6; 4096]);
    lab.kill(0);
    lab.start(0, None);
    assert_eq!(data.metadata().expect("it is there").len(), 16 * MIB);
    assert_eq!(read(&lab, 0, "db", 7 * MIB, 4096), [5; 4096]);
    assert_eq!(read(&lab, 0, "db", 15 * MIB, 4096), [6; 4096]);
    lab.kill(0);
}

#[test]
fn a_copy_that_finds_no_room_gives_back_what_it_took() {
    let mut lab = Lab::without_daemons();
    let Some(small) = Small::mount(lab.path(1, "state"), "24m") else {
        return;
    };
    lab.start(0, None);
    lab.start(1, None);
    lab.volume_at(1, "own", "4M");
    lab.volume("db", "16M");
    let data = noise(3, 12 * MIB);
    write(&lab, 0, "db", 0, &data);

    // There is no room from the beginning.
    small.fill(8 * MIB);
    let check = Order::Check {
        name: "db".to_owned(),
        to: "b".to_owned(),
    };
    let checked = || give(&lab, 0, &check).expect("an answer").remove(0).trouble;
    let said = checked().expect("there is no room");
    assert!(said.contains("there is no room for it on b"), "{said}");
    let said = refused(&lab, 0, &["migrate", "db", "--to", "b"]);
    assert!(said.contains("there is no room for it on b"), "{said}");
    assert_eq!(
        (lab.role(0, "db"), lab.role(1, "db")),
        ("serving".into(), "none".into())
    );
    small.clear();
    assert_eq!(checked(), None);

    // Another file takes the room meanwhile.
    let args = ["migrate", "db", "--to", "b", "--max-bandwidth", "1"];
    let moving = lab
        .command(0, &args)
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("it runs");
    let copy = lab.path(1, "state/db/data");
    until("some has come", || {
        copy.metadata()
            .is_ok_and(|metadata| metadata.blocks() * 512 > MIB)
    });
    small.fill(2 * MIB);
    let output = moving.wait_with_output().expect("it ends");
    assert!(!output.status.success());
    let said = String::from_utf8(output.stderr).expect("text");
    assert!(said.contains("the disk of b: it is full"), "{said}");
    assert_eq!(lab.role(0, "db"), "serving");
    until("it is given back", || lab.role(1, "db") == "incomplete");
    until("all of it", || {
        copy.metadata().is_ok_and(|metadata| metadata.blocks() == 0)
    });
    // Other volumes have room for their data and their decisions.
    write(&lab, 1, "own", 0, &noise(4, MIB));
    lab.order(1, &["detach", "own"]);
    let said = refused(&lab, 0, &["migrate", "db", "--to", "b"]);
    assert!(said.contains("there is no room for it on b"), "{said}");

    // Also while the disk is full.
    small.fill(0);
    lab.kill(1);
    lab.start(1, None);
    assert_eq!(lab.role(1, "own"), "serving", "{}", lab.logs());
    lab.order(1, &["delete", "db"]);
    assert_eq!(lab.role(1, "db"), "none");
    small.clear();
    lab.order(0, &["migrate", "db", "--to", "b"]);
    assert!(read(&lab, 1, "db", 0, 12 * MIB) == data, "it differs");
    lab.kill(1);
}

#[test]
fn an_answer_that_comes_after_an_operators_is_told_to_everybody_who_looks() {
    for (dies_at, is_contradiction) in [("Committed", true), ("Committing", false)] {
        let mut lab = Lab::without_daemons();
        lab.start(0, None);
        lab.start(1, Some(dies_at));
        lab.volume("db", "4M");
        write(&lab, 0, "db", 0, &[7; 4096]);
        let mut moving = lab
            .command(0, &["migrate", "db", "--to", "b"])
            .spawn()
            .expect("it runs");
        until("the destination is ended", || lab.has_ended(1));
        lab.kill(1);
        assert_eq!(lab.role(0, "db"), "deciding");
        lab.order(0, &["resolve", "db", "--keep", "source", "--force"]);
        moving.wait().expect("it ends");
        let status = lab.status(0, "db").expect("listed");
        assert_eq!(
            (&status["role"], &status["generation"]),
            (&"serving".into(), &3.into())
        );
        assert_eq!(read(&lab, 0, "db", 0, 4096), [7; 4096]);
        let said = refused(&lab, 0, &["migrate", "db", "--to", "b"]);
        assert!(said.contains("has not said yet"), "{said}");
        lab.start(1, None);
        if is_contradiction {
            for _ in 0..2 {
                until("it is told", || trouble(&lab, 0, "db").contains("there are two"));
                assert!(lab.order(0, &["list"]).contains("there are two"));
                assert_eq!(lab.role(0, "db"), "serving");
                // The next daemon reports it, too.
                lab.kill(0);
                lab.start(0, None);
            }
            until("it is told", || trouble(&lab, 0, "db").contains("there are two"));
            // When the other copy is gone, the volume moves there again.
            lab.order(1, &["detach", "db"]);
            lab.order(1, &["delete", "db"]);
            lab.order(0, &["migrate", "db", "--to", "b"]);
        } else {
            until("it may move again", || {
                lab.try_order(0, &["migrate", "db", "--to", "b"]).status.success()
            });
        }
        let status = lab.status(1, "db").expect("listed");
        assert_eq!(
            (&status["role"], &status["generation"]),
            (&"serving".into(), &4.into())
        );
        assert_eq!(trouble(&lab, 0, "db"), "");
    }
}

#[test]
fn a_detach_that_ran_into_its_limit_leaves_a_volume_that_is_served_again() {
    let lab = Lab::new();
    let Some(mut disk) = Disk::new(64) else {
        return;
    };
    lab.order(
        0,
        &["create", "db", "--size", "8M", "--data", &disk.file("db.img")],
    );
    lab.order(0, &["attach", "db"]);
    lab.volume("other", "4M");
    write(&lab, 0, "db", 0, &[7; 4096]);
    disk.hang();
    let socket = lab.socket(0, "db");
    let writing = std::thread::spawn(move || {
        let mut client = Client::connect(&socket).expect("it is served");
        // The write gets no answer: its connection ends.
        let _ = client.write(4096, &[8; 4096], true);
    });
    until("it hangs", || {
        // A request in flight makes this order fail, which otherwise changes nothing.
        let output = lab.try_order(0, &["resize", "db", "--size", "8M"]);
        String::from_utf8_lossy(&output.stderr).contains("in use")
    });
    let mut detaching = lab.command(0, &["detach", "db"]).spawn().expect("it runs");
    until("it waits", || lab.role(0, "db") == "busy");
    // No other volume waits.
    write(&lab, 0, "other", 0, &[9; 4096]);
    assert_eq!(lab.role(0, "other"), "serving");
    assert!(!detaching.wait().expect("it ends").success());
    let said = refused(&lab, 0, &["attach", "db"]);
    assert!(said.contains("have not come back"), "{said}");
    disk.go_on();
    until("it is attached", || {
        lab.try_order(0, &["attach", "db"]).status.success()
    });
    assert_eq!(read(&lab, 0, "db", 0, 4096), [7; 4096]);
    write(&lab, 0, "db", 4096, &[10; 4096]);
    writing.join().expect("it ends");
    lab.order(0, &["detach", "db"]);
    lab.order(0, &["delete", "db"]);
}
