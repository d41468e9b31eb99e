//! Operators decide in the place of a host or an agent that gives no answer, and hear whether they were right.

mod support;

use support::orders::*;
use support::{Lab, until};

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

/// The host that has committed goes on to say so when its copy is deleted: only an operator knows that none is left.
#[test]
fn an_operator_who_has_deleted_one_of_two_copies_ends_the_message_about_them() {
    // The host with the copy that stays, by the word that kept it.
    for (here, keep, other) in [(0, "source", "destination"), (1, "destination", "source")] {
        let mut lab = Lab::new();
        lab.volume("db", "4M");
        write(&lab, 0, "db", 0, &[7; 4096]);
        hold(&lab, 0xab);
        lab.order(here, &["resolve", "db", "--keep", keep, "--force"]);
        let there = 1 - here;
        settle(&lab, there, 0xab, here == 0).expect("it waited");
        is_said(&mut lab, here, "there are two");
        lab.try_order(there, &["detach", "db"]);
        lab.order(there, &["delete", "db"]);
        if here == 0 {
            // It is still said: the copy may have moved on before it was deleted.
            is_said(&mut lab, here, "there are two");
        }
        let said = refused(&lab, here, &["resolve", "db", "--keep", keep]);
        assert!(said.contains("Only if no copy serves but the one here"), "{said}");
        let said = refused(&lab, here, &["resolve", "db", "--keep", other, "--force"]);
        assert!(said.contains("detach and delete the one here"), "{said}");
        assert!(trouble(&lab, here, "db").contains("there are two"));
        lab.order(here, &["resolve", "db", "--keep", keep, "--force"]);
        assert_eq!(trouble(&lab, here, "db"), "");
        let asks = || {
            let sidecar = std::fs::read_to_string(lab.path(here, "state/db/sidecar.json"));
            sidecar.expect("it is there").contains("overruled")
        };
        assert!(!asks(), "the next daemon would ask again");
        lab.kill(here);
        lab.start(here, None);
        assert_eq!(
            (lab.role(here, "db"), trouble(&lab, here, "db")),
            ("serving".into(), String::new())
        );
        lab.order(here, &["attach", "db"]);
        assert_eq!(read(&lab, here, "db", 0, 4096), [7; 4096]);
    }
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
    assert_eq!(settle(&lab, 1, by, true).as_deref(), Ok("gone"));
    lab.order(0, &["attach", "db"]);
    assert_eq!(read(&lab, 0, "db", 0, 4096), [7; 4096]);
}
