//! The state folder: one from a backup, one that an earlier release has used, a full one, a read-only one, and one whose file system is not mounted.

mod support;

use support::client::Client;
use support::orders::*;
use support::small::Small;
use support::{Lab, PATIENCE, until};
use verbatim_volume::control::{Order, Outcome, order_now};

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

/// What a daemon answers to what became of a session.
fn told(lab: &Lab, host: usize, is_committed: bool) -> (String, String) {
    let order = Order::Settle {
        name: "db".to_owned(),
        by: 7,
        is_committed,
    };
    let row = give(lab, host, &order).expect("an answer").remove(0);
    (row.role, row.trouble.unwrap_or_default())
}

#[test]
fn a_daemon_whose_folder_is_not_mounted_has_not_heard_what_became_of_a_session() {
    let mut lab = Lab::new();
    lab.volume("db", "4M");
    write(&lab, 0, "db", 0, &[7; 4096]);
    hold(&lab, 7);
    let folder = |lab: &Lab, host: usize| {
        let socket = lab.path(host, "run/volumes.sock");
        let rows = order_now(&socket, &Order::StateFolder, PATIENCE).and_then(Outcome::rows);
        rows.expect("it answers")
            .remove(0)
            .state_folder
            .expect("it has one")
    };
    for host in [1, 0] {
        let mounted = folder(&lab, host);
        lab.kill(host);
        std::fs::rename(lab.path(host, "state"), lab.path(host, "unmounted")).expect("renamed");
        lab.start(host, None);
        // The agent takes that for no answer (`session/volumes.rs` there), and says it again.
        let (role, why) = told(&lab, host, true);
        assert_eq!(role, "none");
        // By that it knows that a session that was rolled back was not heard of either.
        assert_ne!(folder(&lab, host), mounted);
        assert!(why.contains("is its file system not mounted?"), "{why}");
        let log = lab.log(host);
        assert!(
            log.contains("has no volume, and a daemon on this machine had db"),
            "{log}"
        );
        lab.kill(host);
        std::fs::remove_dir_all(lab.path(host, "state")).expect("a daemon has made it");
        std::fs::rename(lab.path(host, "unmounted"), lab.path(host, "state")).expect("renamed");
        lab.start(host, None);
        assert_eq!(folder(&lab, host), mounted);
        assert_eq!(lab.role(host, "db"), ["held", "ready"][host]);
        assert_eq!(told(&lab, host, true).0, ["moved", "serving"][host]);
    }
    // A copy that was deleted is another thing: that is an answer.
    lab.order(0, &["delete", "db"]);
    assert_eq!(told(&lab, 0, true), ("gone".to_owned(), String::new()));
    lab.order(1, &["attach", "db"]);
    assert_eq!(read(&lab, 1, "db", 0, 4096), [7; 4096]);
}

/// A release that does not count how often a sidecar is written.
#[test]
fn a_state_folder_that_an_earlier_release_has_used_is_taken_for_one_from_a_backup() {
    let mut lab = Lab::new();
    let data = volume_elsewhere(&lab, "db", 4 * MIB);
    if !keeps_attributes(&data) {
        return;
    }
    write(&lab, 0, "db", 0, &[7; 4096]);
    lab.kill(0);
    let sidecar = lab.path(0, "state/db/sidecar.json");
    let written = std::fs::read(&sidecar).expect("it is there");
    let mut written: serde_json::Value = serde_json::from_slice(&written).expect("JSON");
    let number = written.as_object_mut().expect("an object").remove("number");
    assert!(
        number.is_some_and(|number| number.as_u64() > Some(0)),
        "it counts"
    );
    std::fs::write(&sidecar, written.to_string()).expect("written");
    lab.start(0, None);
    until("it is known that it is not known", || {
        lab.role(0, "db") == "unknown"
    });
    let why = trouble(&lab, 0, "db");
    assert!(why.contains("comes from a backup"), "{why}");
    assert!(why.contains("verbatim volume accept db"), "{why}");
    for args in [
        &["attach", "db"][..],
        &["migrate", "db", "--to", "b"],
        &["delete", "db"],
    ] {
        refused(&lab, 0, args);
    }
    lab.order(0, &["accept", "db"]);
    assert_eq!(read(&lab, 0, "db", 0, 4096), [7; 4096]);
    lab.order(0, &["migrate", "db", "--to", "b"]);
    assert_eq!(read(&lab, 1, "db", 0, 4096), [7; 4096]);
}
