//! A copy that serves and has lost its data for good: an operator deletes it by force. Nothing else is deleted
//! by that, and this host gives the same answers as before.

mod support;

use std::fs;
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use support::client::Client;
use support::orders::*;
use support::{Lab, until};
use verbatim_volume::control::Order;

/// What becomes of the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Loss {
    Missing,
    Cut,
    Replaced,
}

const LOSSES: [Loss; 3] = [Loss::Missing, Loss::Cut, Loss::Replaced];

impl Loss {
    /// The data are lost.
    fn strikes(self, data: &Path) {
        match self {
            Self::Missing => fs::remove_file(data).expect("it was there"),
            Self::Cut => {
                let file = fs::File::options().write(true).open(data).expect("opened");
                file.set_len(MIB).expect("cut");
            }
            Self::Replaced => {
                fs::remove_file(data).expect("it was there");
                fs::write(data, noise(3, 4 * MIB)).expect("written");
            }
        }
    }

    /// What the daemon says of them.
    fn said(self) -> &'static str {
        match self {
            Self::Missing => "its data are missing",
            Self::Cut => "part of its data is missing",
            Self::Replaced => "is not what the volume had",
        }
    }
}

/// The host's daemon is started again, and the data are lost meanwhile.
fn lose(lab: &mut Lab, host: usize, data: &Path, loss: Loss) {
    lab.kill(host);
    loss.strikes(data);
    lab.start(host, None);
    until("it waits for its data", || {
        let status = lab.status(host, "db").expect("it is listed");
        status["waits"]
            .as_str()
            .is_some_and(|why| why.contains(loss.said()))
    });
}

/// The volume has moved from the first host to the second one, where its data are at the returned path.
fn moved(lab: &Lab, is_elsewhere: bool) -> PathBuf {
    lab.volume("db", &(4 * MIB).to_string());
    write(lab, 0, "db", 0, &[7; 4096]);
    let elsewhere = lab.path(1, "db.img");
    if is_elsewhere {
        lab.order(1, &["place", "db", "--data", &text(&elsewhere)]);
    }
    lab.order(0, &["migrate", "db", "--to", "b"]);
    write(lab, 1, "db", 0, &[8; 4096]);
    match is_elsewhere {
        true => elsewhere,
        false => lab.path(1, "state/db/data"),
    }
}

#[test]
fn a_copy_whose_data_are_gone_for_good_is_deleted_by_force_and_the_volume_moves_back() {
    for (loss, is_elsewhere) in LOSSES.into_iter().flat_map(|loss| [(loss, true), (loss, false)]) {
        let mut lab = Lab::new();
        let data = moved(&lab, is_elsewhere);
        lose(&mut lab, 1, &data, loss);
        let there = fs::read(&data).ok();
        let said = refused(&lab, 1, &["delete", "db", "--force"]);
        assert!(said.contains("is attached"), "{said}");
        lab.order(1, &["detach", "db"]);
        let said = refused(&lab, 1, &["delete", "db"]);
        for word in [
            loss.said(),
            "verbatim volume delete db --force",
            "verbatim volume revive db --force",
        ] {
            assert!(said.contains(word), "{loss:?}: {said}");
        }
        assert_eq!(lab.role(1, "db"), "serving");
        lab.order(1, &["delete", "db", "--force"]);
        assert_eq!(lab.role(1, "db"), "none");
        match is_elsewhere {
            true => assert_eq!(fs::read(&data).ok(), there, "{loss:?}: it was touched"),
            false => assert!(!lab.path(1, "state/db").exists(), "{loss:?}: it is left behind"),
        }

        // The copy that stayed behind is served again, hears that there was a later one, and moves there.
        lab.order(0, &["revive", "db", "--force"]);
        until("it hears of the later one", || {
            trouble(&lab, 0, "db").contains("there are two")
        });
        lab.order(0, &["resolve", "db", "--keep", "source", "--force"]);
        assert_eq!(trouble(&lab, 0, "db"), "");
        lab.order(0, &["migrate", "db", "--to", "b"]);
        lab.order(1, &["attach", "db"]);
        assert_eq!(read(&lab, 1, "db", 0, 4096), [7; 4096]);
        assert_eq!(
            (lab.role(0, "db"), lab.role(1, "db")),
            ("moved".into(), "serving".into())
        );
        if is_elsewhere {
            assert_eq!(fs::read(&data).ok(), there, "{loss:?}: it was touched");
        }
    }
}

/// The source was killed before it could write down what it had heard.
#[test]
fn a_source_that_asks_late_hears_of_the_commit_and_so_does_an_agent() {
    let mut lab = Lab::without_daemons();
    lab.start(0, Some("Answered"));
    lab.start(1, None);
    let data = lab.path(1, "db.img");
    lab.order(1, &["place", "db", "--data", &text(&data)]);
    lab.volume("db", &(4 * MIB).to_string());
    write(&lab, 0, "db", 0, &[7; 4096]);
    refused(&lab, 0, &["migrate", "db", "--to", "b"]);
    lab.kill(0);
    assert_eq!(lab.role(1, "db"), "serving", "{}", lab.logs());
    lose(&mut lab, 1, &data, Loss::Missing);
    lab.order(1, &["detach", "db"]);
    lab.order(1, &["delete", "db", "--force"]);
    assert_eq!(settle(&lab, 1, 5, true), Ok("gone".to_owned()));
    lab.start(0, None);
    until("it hears that it has moved", || {
        let role = lab.role(0, "db");
        assert!(
            role != "serving",
            "an older copy serves by itself\n{}",
            lab.logs()
        );
        role == "moved"
    });
}

#[test]
fn a_volume_that_never_moved_frees_its_name() {
    let mut lab = Lab::new();
    let data = volume_elsewhere(&lab, "db", 4 * MIB);
    lose(&mut lab, 0, &data, Loss::Missing);
    lab.order(0, &["detach", "db"]);
    refused(&lab, 0, &["delete", "db"]);
    let size = (4 * MIB).to_string();
    let said = refused(&lab, 0, &["create", "db", "--size", &size]);
    assert!(said.contains("there is a volume db already"), "{said}");
    lab.order(0, &["delete", "db", "--force"]);
    lab.volume("db", &size);
    write(&lab, 0, "db", 0, &[7; 4096]);
    lab.kill(0);
    lab.start(0, None);
    assert_eq!(read(&lab, 0, "db", 0, 4096), [7; 4096]);
}

#[test]
fn force_deletes_nothing_that_is_there_or_is_not_decided() {
    let mut lab = Lab::new();
    let data = volume_elsewhere(&lab, "db", 4 * MIB);
    write(&lab, 0, "db", 0, &[7; 4096]);
    let said = refused(&lab, 0, &["delete", "db", "--force"]);
    assert!(said.contains("is attached"), "{said}");

    // Another program has the data.
    lab.order(0, &["detach", "db"]);
    let file = fs::File::options()
        .read(true)
        .write(true)
        .open(&data)
        .expect("opened");
    lab.kill(0);
    rustix::fs::fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive).expect("it is free");
    lab.start(0, None);
    let said = refused(&lab, 0, &["delete", "db", "--force"]);
    assert!(
        said.contains("in use by somebody else") && said.contains("`--force` is for data"),
        "{said}"
    );
    drop(file);
    until("it is served again", || {
        lab.status(0, "db").expect("it is listed")["waits"].is_null()
    });

    // The data may be there, and nobody can look.
    let folder = lab.path(0, "link");
    lab.kill(0);
    let beside = data.with_extension("beside");
    fs::rename(&data, &beside).expect("renamed");
    std::os::unix::fs::symlink(&folder, &data).expect("a link");
    std::os::unix::fs::symlink(&data, &folder).expect("a link");
    lab.start(0, None);
    let said = refused(&lab, 0, &["delete", "db", "--force"]);
    assert!(said.contains("cannot be opened"), "{said}");
    for link in [&data, &folder] {
        fs::remove_file(link).expect("it was there");
    }
    fs::rename(&beside, &data).expect("renamed");
    until("it is served again", || {
        lab.status(0, "db").expect("it is listed")["waits"].is_null()
    });

    // A session is not decided.
    lab.order(0, &["attach", "db"]);
    hold(&lab, 5);
    lab.kill(0);
    fs::rename(&data, &beside).expect("renamed");
    lab.start(0, None);
    lab.order(0, &["detach", "db"]);
    for host in [0, 1] {
        refused(&lab, host, &["delete", "db", "--force"]);
        assert_eq!(lab.role(host, "db"), ["held", "ready"][host]);
    }
    fs::rename(&beside, &data).expect("renamed");
    settle(&lab, 0, 5, false).expect("it is held");
    settle(&lab, 1, 5, false).expect("it is ready");

    // It is there, and detached: it goes, and its file stays.
    until("it is served again", || {
        lab.status(0, "db").expect("it is listed")["waits"].is_null()
    });
    lab.order(0, &["delete", "db", "--force"]);
    assert_eq!(lab.role(0, "db"), "none");
    assert_eq!(fs::read(&data).expect("it is there")[..4096], [7; 4096]);
    Client::connect(&lab.socket(0, "db"))
        .map(drop)
        .expect_err("it is served");
}

#[test]
fn an_order_of_an_earlier_release_is_understood_and_one_to_it_is_as_before() {
    let delete = |force| Order::Delete {
        name: "db".to_owned(),
        force,
    };
    let old = r#"{"delete":{"name":"db"}}"#;
    assert_eq!(
        serde_json::from_str::<Order>(old).expect("an order"),
        delete(false)
    );
    assert_eq!(serde_json::to_string(&delete(false)).expect("text"), old);
    let new = serde_json::to_string(&delete(true)).expect("text");
    assert_eq!(
        serde_json::from_str::<Order>(&new).expect("an order"),
        delete(true)
    );
}
