//! Volumes move between two daemons, their chunks by RDMA, with every kind of failure.

mod support;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::Value;
use support::client::Client;
use support::tenant::{BLOCK, Tenant};
use support::{Lab, NAMES, until};
use verbatim_volume::faults::{POINTS, Point, RDMA_POINTS};

/// In bytes; the last chunk is shorter than the others, and has no whole pages.
const SIZE: u64 = (12 << 20) + BLOCK as u64 + 512;

/// Not a test: an RNIC for the others.
#[test]
#[ignore = "run by other tests as a process of their own"]
fn an_rnic() {
    support::rnic::run();
}

/// A volume whose chunks are not zeros, and a tenant that uses it.
fn volume(lab: &Lab, seed: u64) -> Tenant {
    lab.volume("db", &SIZE.to_string());
    let mut noise = vec![0; SIZE as usize - BLOCK];
    StdRng::seed_from_u64(seed).fill(noise.as_mut_slice());
    let blocks = 256;
    let mut client = Client::connect(&lab.socket(0, "db")).expect("it is served");
    StdRng::seed_from_u64(seed).fill(&mut noise[blocks * BLOCK..]);
    for (number, part) in noise[blocks * BLOCK..].chunks(1 << 20).enumerate() {
        let offset = (blocks * BLOCK + (number << 20)) as u64;
        client.write(offset, part, false).expect("written");
    }
    let sockets = [lab.socket(0, "db"), lab.socket(1, "db")];
    let tenant = Tenant::start(sockets, blocks as u64, 3, seed);
    until("the tenant works", || tenant.done() > 200);
    tenant
}

fn settled(lab: &Lab) -> usize {
    let mut host = 0;
    until("one copy serves", || {
        let roles = [lab.role(0, "db"), lab.role(1, "db")];
        let serving: Vec<_> = (0..2).filter(|&host| roles[host] == "serving").collect();
        assert!(serving.len() < 2, "two copies serve\n{}", lab.logs());
        host = *serving.first().unwrap_or(&0);
        serving.len() == 1 && !roles.contains(&"deciding".to_owned())
    });
    host
}

fn moved(lab: &Lab, from: usize) -> Value {
    let text = lab.order(from, &["migrate", "db", "--to", NAMES[1 - from], "--json"]);
    let moved: Value = serde_json::from_str(&text).expect("JSON");
    moved["copy"].clone()
}

/// Checks that both copies are equal, byte by byte, and keep the promises to the tenant.
fn check(lab: &Lab, tenant: Tenant, host: usize, before: &[u8]) {
    let log = tenant.stop();
    let data = lab.data(host, "db");
    let own = 256 * BLOCK;
    assert!(data[own..] == before[own..], "the copy differs");
    log.check(&data);
}

#[test]
fn chunks_come_by_rdma_and_are_what_was_sent() {
    let mut lab = Lab::with_rnics();
    lab.start(0, None);
    lab.start(1, None);
    let tenant = volume(&lab, 1);
    let before = lab.data(0, "db");
    let copy = moved(&lab, 0);
    assert_eq!(copy["transport"], "rdma", "{copy}\n{}", lab.logs());
    assert_eq!(copy["sent_again"], 0);
    assert!(
        copy["rdma_bytes"].as_u64().expect("a number") > 10 << 20,
        "{copy}"
    );
    check(&lab, tenant, 1, &before);
}

#[test]
fn a_damaged_chunk_is_noticed_and_sent_again_by_tls() {
    let mut lab = Lab::with_rnics();
    lab.start(0, None);
    lab.damage = Some(5);
    lab.start(1, None);
    let tenant = volume(&lab, 2);
    let before = lab.data(0, "db");
    let copy = moved(&lab, 0);
    assert_eq!(copy["transport"], "tls", "{copy}");
    let reason = copy["reason"].as_str().expect("a reason");
    assert!(reason.contains("is not what was sent"), "{reason}");
    assert!(copy["sent_again"].as_u64().expect("a number") > 0, "{copy}");
    check(&lab, tenant, 1, &before);
}

#[test]
fn without_an_rnic_or_trust_it_is_tls_and_says_why() {
    let mut lab = Lab::without_daemons();
    lab.options = vec!["--copy-transport".into(), "auto".into()];
    lab.start(0, None);
    lab.start(1, None);
    let tenant = volume(&lab, 3);
    let before = lab.data(0, "db");
    let copy = moved(&lab, 0);
    let reason = copy["reason"].as_str().expect("a reason");
    assert!(
        copy["transport"] == "tls" && reason.contains("trusted_network"),
        "{copy}"
    );
    let text = lab.order(
        1,
        &["migrate", "db", "--to", "a", "--copy-transport", "rdma", "--json"],
    );
    let copy: Value = serde_json::from_str(&text).expect("JSON");
    let reason = copy["copy"]["reason"].as_str().expect("a reason");
    assert!(reason.contains("this host has no RNIC"), "{reason}");
    check(&lab, tenant, 0, &before);
}

#[test]
fn an_rnic_that_is_killed_in_the_middle_leaves_the_copy_to_tls() {
    for victim in 0..2 {
        let mut lab = Lab::with_rnics();
        lab.start(0, None);
        lab.start(1, None);
        let tenant = volume(&lab, 4);
        let before = lab.data(0, "db");
        let mut moving = lab.command(0, &["migrate", "db", "--to", "b", "--max-bandwidth", "8"]);
        let mut moving = moving.spawn().expect("it runs");
        let copy = |lab: &Lab| lab.status(0, "db").expect("it is there")["copy"].clone();
        until("some of it has come by RDMA", || {
            copy(&lab)["rdma_bytes"].as_u64().unwrap_or(0) > 1 << 20
        });
        lab.kill_rnic(victim);
        until("it is TLS", || copy(&lab)["transport"] == "tls");
        assert!(moving.wait().expect("it ends").success(), "{}", lab.logs());
        assert_eq!(settled(&lab), 1);
        check(&lab, tenant, 1, &before);
    }
}

#[test]
fn an_rnic_that_hangs_is_not_waited_for() {
    for victim in 0..2 {
        // From the beginning, or in the middle.
        for is_midway in [false, true] {
            let mut lab = Lab::with_rnics();
            lab.start(0, None);
            lab.start(1, None);
            let tenant = volume(&lab, 5);
            lab.volume("other", "1M");
            let before = lab.data(0, "db");
            if !is_midway {
                lab.hang_rnic(victim);
            }
            let mut moving = lab.command(0, &["migrate", "db", "--to", "b", "--max-bandwidth", "8"]);
            let mut moving = moving.spawn().expect("it runs");
            let copy = |lab: &Lab| lab.status(0, "db").expect("it is there")["copy"].clone();
            if is_midway {
                until("some of it has come by RDMA", || {
                    copy(&lab)["rdma_bytes"].as_u64().unwrap_or(0) > 1 << 20
                });
                lab.hang_rnic(victim);
            }
            // Nobody else waits for it.
            for host in 0..2 {
                lab.order(host, &["list"]);
            }
            lab.order(0, &["detach", "other"]);
            lab.order(0, &["attach", "other"]);
            until("it is TLS, or has moved", || {
                lab.role(0, "db") != "serving" || copy(&lab)["transport"] == "tls"
            });
            assert!(
                moving.wait().expect("it ends").success(),
                "{victim} {is_midway} {}",
                lab.logs()
            );
            assert_eq!(settled(&lab), 1);
            check(&lab, tenant, 1, &before);
            if !is_midway {
                let log = lab.log(0);
                let why = [
                    "the RNIC of this host has not answered",
                    "the destination: its RNIC does not answer",
                ];
                assert!(log.contains(why[victim]), "{log}");
            }
        }
    }
}

/// The side that passes a point.
fn side(point: Point) -> usize {
    match point {
        Point::Prepared
        | Point::Written
        | Point::Question
        | Point::Committing
        | Point::Committed
        | Point::Fetched => 1,
        _ => 0,
    }
}

fn killed_at(point: Point, seed: u64) {
    let mut lab = Lab::with_rnics();
    let victim = side(point);
    // A source that is killed before it sends again needs a damaged chunk.
    lab.damage = (point == Point::Again).then_some(3);
    for host in 0..2 {
        let name = format!("{point:?}");
        lab.start(host, (host == victim).then_some(name.as_str()));
    }
    let tenant = volume(&lab, seed);
    let before = lab.data(0, "db");
    let moving = lab.command(0, &["migrate", "db", "--to", "b"]).spawn();
    until(&format!("the daemon ends at {point:?}"), || lab.has_ended(victim));
    lab.kill(victim);
    lab.damage = None;
    lab.start(victim, None);
    let is_moved = moving.expect("it runs").wait().expect("it ends").success();
    let host = settled(&lab);
    assert!(!is_moved || host == 1, "{point:?}: {}", lab.logs());
    if host == 0 {
        assert_eq!(moved(&lab, 0)["transport"], "rdma", "{point:?}");
    }
    assert_eq!(settled(&lab), 1);
    check(&lab, tenant, 1, &before);
}

#[test]
fn a_daemon_that_is_killed_beside_rdma_loses_nothing() {
    for (seed, point) in (10..).zip([RDMA_POINTS.as_slice(), &[Point::ChunkSent, Point::Written]].concat()) {
        killed_at(point, seed);
    }
}

/// `make volume-test`: all points.
#[test]
#[ignore = "the steps that RDMA has no part in"]
fn a_daemon_that_is_killed_at_any_step_beside_rdma_loses_nothing() {
    for (seed, point) in (30..).zip(POINTS) {
        killed_at(point, seed);
    }
}
