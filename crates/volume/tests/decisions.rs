//! Decisions are not forgotten, and need no room: copies that are deleted, sidecars that cannot be read, folders that are full.

mod support;

use std::os::unix::fs::MetadataExt;
use std::process::Stdio;
use std::time::Duration;

use support::client::Client;
use support::frozen::Disk;
use support::orders::*;
use support::small::Small;
use support::{Lab, until};
use verbatim_volume::control::Order;

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
