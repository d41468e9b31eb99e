//! A volume that moves in a session of the agents, which the test plays: both daemons obey, after a kill at
//! any step.

mod support;

use support::tenant::{BLOCK, Tenant};
use support::{Lab, PATIENCE, until};
use verbatim_volume::control::{Order, Outcome, order_now};
use verbatim_volume::faults::Point;

const SIZE: u64 = (4 << 20) + BLOCK as u64;

fn give(lab: &Lab, host: usize, order: &Order) -> Result<(), String> {
    match order_now(&lab.path(host, "run/volumes.sock"), order, PATIENCE) {
        Ok(Outcome::Volumes(_)) => Ok(()),
        Ok(other) => Err(format!("{other:?}")),
        Err(error) => Err(format!("{error:#}")),
    }
}

fn follow(lab: &Lab, by: u64) -> Result<(), String> {
    let name = "db".to_owned();
    let order = Order::Follow {
        name: name.clone(),
        to: "b".to_owned(),
        by,
        bytes_per_second: None,
    };
    give(lab, 0, &order)?;
    give(lab, 0, &Order::Mirrored { name, by })
}

fn hold(lab: &Lab, by: u64) -> Result<(), String> {
    let name = "db".to_owned();
    give(lab, 0, &Order::Hold { name, by })
}

/// Tells a host's daemon the decision of the session. The daemon may be a later one by now.
fn settle(lab: &mut Lab, host: usize, by: u64, is_committed: bool) {
    let order = Order::Settle {
        name: "db".to_owned(),
        by,
        is_committed,
    };
    if lab.has_ended(host) {
        lab.kill(host);
        lab.start(host, None);
    }
    if give(lab, host, &order).is_err() {
        // The daemon was killed by the order.
        lab.kill(host);
        lab.start(host, None);
        give(lab, host, &order).expect("it hears it now");
    }
}

fn roles(lab: &Lab) -> [String; 2] {
    [lab.role(0, "db"), lab.role(1, "db")]
}

fn tenant(lab: &Lab, seed: u64) -> Tenant {
    let sockets = [lab.socket(0, "db"), lab.socket(1, "db")];
    let tenant = Tenant::start(sockets, SIZE / BLOCK as u64, 3, seed);
    until("the tenant works", || tenant.done() > 100);
    tenant
}

#[test]
fn nobody_serves_until_the_session_is_decided_and_then_one_does() {
    for (by, is_committed) in [(u64::MAX, false), (1 << 63, true)] {
        let mut lab = Lab::new();
        lab.volume("db", &SIZE.to_string());
        let running = tenant(&lab, by);
        follow(&lab, by).expect("it is copied");
        assert!(hold(&lab, by + 1).is_err(), "another session");
        hold(&lab, by).expect("it is held");
        for _ in 0..2 {
            assert_eq!(roles(&lab), ["held", "ready"], "{}", lab.logs());
            for host in [0, 1] {
                assert!(!lab.try_order(host, &["attach", "db"]).status.success());
                assert!(!lab.try_order(host, &["delete", "db"]).status.success());
                let order = Order::Settle {
                    name: "db".to_owned(),
                    by: 5,
                    is_committed: true,
                };
                give(&lab, host, &order).expect("it has nothing to do with that");
                // A later daemon knows as much.
                lab.kill(host);
                lab.start(host, None);
            }
        }
        // In any order, and more than once.
        for host in [1, 0, 1, 0] {
            settle(&mut lab, host, by, is_committed);
        }
        let serves = usize::from(is_committed);
        let expected = [["serving", "incomplete"], ["moved", "serving"]][serves];
        assert_eq!(roles(&lab), expected);
        lab.order(serves, &["attach", "db"]);
        let before = running.done();
        until("the tenant goes on", || running.done() > before + 100);
        running.stop().check(&lab.data(serves, "db"));
        let status = lab.status(serves, "db").expect("it is there");
        assert_eq!(status["generation"], 1 + u64::from(is_committed));
    }
}

#[test]
fn a_daemon_that_dies_at_any_step_does_what_the_session_did() {
    let source = [
        Point::Offering,
        Point::Mirrored,
        Point::Held,
        Point::Deciding,
        Point::Answered,
        Point::Moved,
    ];
    let destination = [Point::Question, Point::Committing, Point::Committed];
    let steps = source.map(|point| (0, point)).into_iter();
    for (dies, point) in steps.chain(destination.map(|point| (1, point))) {
        let mut lab = Lab::without_daemons();
        for host in [0, 1] {
            let at = (host == dies).then(|| format!("{point:?}"));
            lab.start(host, at.as_deref());
        }
        lab.volume("db", &SIZE.to_string());
        let running = tenant(&lab, 3);
        let by = 77;
        let reached = follow(&lab, by).and_then(|()| hold(&lab, by));
        let is_committed = reached.is_ok();
        assert_eq!(is_committed, point == Point::Moved, "{point:?}: {reached:?}");
        for host in [0, 1] {
            settle(&mut lab, host, by, is_committed);
        }
        let serves = usize::from(is_committed);
        assert_eq!(lab.role(serves, "db"), "serving", "{point:?}\n{}", lab.logs());
        assert_ne!(lab.role(1 - serves, "db"), "serving", "{point:?}");
        lab.order(serves, &["attach", "db"]);
        let before = running.done();
        until("the tenant goes on", || running.done() > before + 100);
        running.stop().check(&lab.data(serves, "db"));
        if !is_committed {
            // The rest of the attempt is not in the way of the next one.
            follow(&lab, by + 1).expect("it is copied");
            hold(&lab, by + 1).expect("it is held");
            for host in [0, 1] {
                settle(&mut lab, host, by + 1, true);
            }
            assert_eq!(roles(&lab), ["moved", "serving"], "{point:?}");
        }
    }
}
