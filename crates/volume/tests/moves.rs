//! Volumes move between two daemons while they are used, with every kind of failure.

mod support;

use std::process::Child;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustix::process::Signal;
use support::small::Small;
use support::tenant::{BLOCK, Tenant};
use support::{Lab, NAMES, PATIENCE, until};
use verbatim_volume::faults::{POINTS, Point};

/// In bytes; the last chunk is shorter than the others.
const SIZE: u64 = (12 << 20) + BLOCK as u64;

fn tenant(lab: &Lab, volume: &str, seed: u64) -> Tenant {
    let tenant = Tenant::start(
        [lab.socket(0, volume), lab.socket(1, volume)],
        SIZE / BLOCK as u64,
        3,
        seed,
    );
    until("the tenant works", || tenant.done() > 200);
    tenant
}

/// Waits until one copy serves, and no copy is in doubt. Returns its host.
fn settled(lab: &Lab, volume: &str) -> usize {
    let mut host = 0;
    until("one copy serves", || {
        let roles = [lab.role(0, volume), lab.role(1, volume)];
        let serving: Vec<_> = (0..2).filter(|&host| roles[host] == "serving").collect();
        assert!(serving.len() < 2, "two copies serve\n{}", lab.logs());
        host = *serving.first().unwrap_or(&0);
        serving.len() == 1 && !roles.contains(&"deciding".to_owned())
    });
    host
}

fn create(lab: &Lab, volume: &str) {
    lab.volume(volume, &SIZE.to_string());
}

#[test]
fn a_volume_moves_there_and_back_and_only_the_difference_comes_back() {
    let lab = Lab::new();
    create(&lab, "db");
    let running = tenant(&lab, "db", 1);
    lab.order(0, &["migrate", "db", "--to", "b"]);
    assert_eq!(
        (lab.role(0, "db"), lab.role(1, "db")),
        ("moved".into(), "serving".into())
    );
    let before = running.done();
    until("the tenant goes on there", || running.done() > before + 200);
    running.stop().check(&lab.data(1, "db"));

    // Data without a short form.
    let mut client = support::client::Client::connect(&lab.socket(1, "db")).expect("it is served");
    let mut noise = vec![0; 4 << 20];
    StdRng::seed_from_u64(1).fill(noise.as_mut_slice());
    client.write(4 << 20, &noise, true).expect("written");
    lab.order(1, &["migrate", "db", "--to", "a"]);
    let mut client = support::client::Client::connect(&lab.socket(0, "db")).expect("it is served");
    client.write(0, &noise[..BLOCK], false).expect("written");
    let moved = lab.order(0, &["migrate", "db", "--to", "b", "--json"]);
    let moved: serde_json::Value = serde_json::from_str(&moved).expect("JSON");
    assert_eq!(moved["generation"], 4);
    assert!(
        moved["sent_bytes"].as_u64().expect("a number") < 1 << 20,
        "not the difference only: {moved}"
    );
    assert!(lab.data(0, "db") == lab.data(1, "db"), "the copies differ");
}

/// The side that passes a point.
fn side(point: Point) -> usize {
    match point {
        Point::Prepared | Point::Written | Point::Question | Point::Committing | Point::Committed => 1,
        _ => 0,
    }
}

#[test]
fn a_daemon_that_is_killed_at_any_step_loses_nothing() {
    for (seed, point) in (10..).zip(POINTS) {
        let mut lab = Lab::without_daemons();
        let victim = side(point);
        lab.start(0, None);
        create(&lab, "db");
        lab.kill(0);
        for host in 0..2 {
            let name = format!("{point:?}");
            lab.start(host, (host == victim).then_some(name.as_str()));
        }
        let running = tenant(&lab, "db", seed);
        let mut moving = lab
            .command(0, &["migrate", "db", "--to", "b"])
            .spawn()
            .expect("it runs");
        until(&format!("the daemon ends at {point:?}"), || lab.has_ended(victim));
        lab.kill(victim);
        lab.start(victim, None);
        let host = settled(&lab, "db");
        // A source that lives goes on by itself. A killed one has given the attempt up, unless it was
        // decided.
        let status = moving.wait().expect("it ends");
        let host = if status.success() {
            settled(&lab, "db")
        } else {
            host
        };
        let is_decided = matches!(point, Point::Committed | Point::Answered | Point::Moved);
        assert!(
            !is_decided || host == 1,
            "{point:?}: the commit is forgotten\n{}",
            lab.logs()
        );
        let before = running.done();
        until("the tenant goes on", || running.done() > before + 100);
        // The volume can be moved again, from any host.
        lab.order(host, &["migrate", "db", "--to", NAMES[1 - host]]);
        assert_eq!(settled(&lab, "db"), 1 - host);
        let before = running.done();
        until("the tenant goes on", || running.done() > before + 100);
        running.stop().check(&lab.data(1 - host, "db"));
    }
}

#[test]
fn a_destination_that_is_silent_or_gone_does_not_stop_the_tenant() {
    let mut lab = Lab::new();
    create(&lab, "db");
    let running = tenant(&lab, "db", 2);
    let mut moving = lab
        .command(0, &["migrate", "db", "--to", "b", "--max-bandwidth", "8"])
        .spawn()
        .expect("it runs");
    let copied = |lab: &Lab| {
        let status = lab.status(0, "db").expect("it is there");
        status["migration"]["copied_bytes"].as_u64().unwrap_or(0)
    };
    until("some of it is copied", || copied(&lab) > 1 << 20);
    let stop = Duration::from_secs(3);
    lab.signal(1, Signal::STOP);
    let (began, before) = (Instant::now(), running.done());
    while began.elapsed() < stop {
        std::thread::sleep(Duration::from_millis(50));
    }
    let done = running.done() - before;
    lab.signal(1, Signal::CONT);
    assert!(
        done > 100,
        "the tenant got {done} answers in {stop:?}\n{}",
        lab.logs()
    );
    until("it goes on", || {
        copied(&lab) > 3 << 20 || moving.try_wait().expect("ours").is_some()
    });
    // Now the destination is gone for a while.
    lab.kill(1);
    let before = running.done();
    until("the tenant goes on", || running.done() > before + 500);
    lab.start(1, None);
    assert!(moving.wait().expect("it ends").success(), "{}", lab.logs());
    assert_eq!(settled(&lab, "db"), 1);
    let log = running.stop();
    log.check(&lab.data(1, "db"));
    assert!(log.longest < stop, "a request has waited {:?}", log.longest);
}

#[test]
fn a_move_can_be_cancelled_and_begun_again() {
    let lab = Lab::new();
    create(&lab, "db");
    let running = tenant(&lab, "db", 3);
    let moving = lab
        .command(0, &["migrate", "db", "--to", "b", "--max-bandwidth", "1"])
        .spawn();
    let mut moving = moving.expect("it runs");
    until("it is under way", || lab.role(1, "db") == "incoming");
    for order in [
        ["delete", "db"].as_slice(),
        &["migrate", "db", "--to", "b"],
        &["resize", "db", "--size", "1G"],
    ] {
        assert!(
            !lab.try_order(0, order).status.success(),
            "{order:?} while it moves"
        );
    }
    lab.order(0, &["cancel", "db"]);
    assert!(!moving.wait().expect("it ends").success());
    assert!(
        !lab.try_order(1, &["attach", "db"]).status.success(),
        "half a copy is not served"
    );
    // The rest of an attempt can be removed, as soon as no host fills it.
    until("it is removed", || {
        lab.try_order(1, &["delete", "db"]).status.success()
    });
    assert_eq!(lab.role(1, "db"), "none");
    lab.order(0, &["migrate", "db", "--to", "b"]);
    assert_eq!(settled(&lab, "db"), 1);
    running.stop().check(&lab.data(1, "db"));
    assert!(
        !lab.try_order(0, &["attach", "db"]).status.success(),
        "an old copy is not served"
    );
    lab.order(0, &["delete", "db"]);
    assert_eq!(lab.role(0, "db"), "none");
}

#[test]
fn many_volumes_move_at_once() {
    let lab = Lab::new();
    let names: Vec<_> = (0..5).map(|number| format!("db{number}")).collect();
    let running: Vec<_> = (30..)
        .zip(&names)
        .map(|(seed, name)| {
            create(&lab, name);
            tenant(&lab, name, seed)
        })
        .collect();
    let moving: Vec<_> = names
        .iter()
        .map(|name| {
            lab.command(0, &["migrate", name, "--to", "b"])
                .spawn()
                .expect("it runs")
        })
        .collect();
    for mut moving in moving {
        assert!(moving.wait().expect("it ends").success(), "{}", lab.logs());
    }
    for (running, name) in running.into_iter().zip(&names) {
        assert_eq!(settled(&lab, name), 1);
        running.stop().check(&lab.data(1, name));
    }
}

/// A volume whose destination was asked, and is gone before or after its commit.
fn undecided(seed: u64, point: Point) -> (Lab, Tenant, Child) {
    let mut lab = Lab::without_daemons();
    lab.start(0, None);
    create(&lab, "db");
    lab.start(1, Some(&format!("{point:?}")));
    let running = tenant(&lab, "db", seed);
    let moving = lab.command(0, &["migrate", "db", "--to", "b"]).spawn();
    until("the destination ends", || lab.has_ended(1));
    lab.kill(1);
    assert_eq!(lab.role(0, "db"), "deciding");
    (lab, running, moving.expect("it runs"))
}

#[test]
fn an_operator_decides_for_a_destination_that_is_lost() {
    let (mut lab, running, mut moving) = undecided(50, Point::Question);
    let resolve = |lab: &Lab, rest: &[&str]| {
        let output = lab.try_order(0, &[&["resolve", "db"], rest].concat());
        (
            output.status.success(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        )
    };
    let (is_done, why) = resolve(&lab, &["--keep", "source"]);
    assert!(!is_done && why.contains("--force"), "{why}");
    assert_eq!(lab.role(0, "db"), "deciding");
    assert!(resolve(&lab, &["--keep", "source", "--force"]).0);
    assert!(!moving.wait().expect("it ends").success(), "it has not moved");
    let before = running.done();
    until("the tenant goes on", || running.done() > before + 100);
    // The destination's copy does not count when the host is back.
    lab.start(1, None);
    let (is_done, why) = resolve(&lab, &["--keep", "destination", "--force"]);
    assert!(!is_done && why.contains("does not wait"), "{why}");
    // The destination is asked first, since it might have committed.
    until("it moves", || {
        lab.try_order(0, &["migrate", "db", "--to", "b"]).status.success()
    });
    assert_eq!(settled(&lab, "db"), 1);
    running.stop().check(&lab.data(1, "db"));

    let (mut lab, running, mut moving) = undecided(51, Point::Committed);
    assert!(resolve(&lab, &["--keep", "destination", "--force"]).0);
    assert!(moving.wait().expect("it ends").success(), "it has moved");
    assert_eq!(lab.role(0, "db"), "moved");
    lab.start(1, None);
    assert_eq!(settled(&lab, "db"), 1);
    let before = running.done();
    until("the tenant goes on", || running.done() > before + 100);
    running.stop().check(&lab.data(1, "db"));
}

#[test]
fn a_source_whose_destination_has_forgotten_the_volume_waits_for_an_operator() {
    let mut lab = Lab::without_daemons();
    lab.start(1, None);
    lab.start(0, None);
    create(&lab, "db");
    let mut client = support::client::Client::connect(&lab.socket(0, "db")).expect("it is served");
    client.write(0, &[7; BLOCK], false).expect("written");
    lab.kill(0);
    lab.start(0, Some(&format!("{:?}", Point::Answered)));
    assert!(!lab.try_order(0, &["migrate", "db", "--to", "b"]).status.success());
    lab.kill(0);
    lab.order(1, &["detach", "db"]);
    lab.order(1, &["delete", "db"]);
    // The tombstone is deleted, too.
    lab.order(1, &["delete", "db"]);
    lab.start(0, None);
    until("it is said", || {
        lab.logs().contains("there is no copy of it there")
    });
    assert_eq!(lab.role(0, "db"), "deciding");
    lab.order(0, &["resolve", "db", "--keep", "source", "--force"]);
    let mut client = support::client::Client::connect(&lab.socket(0, "db")).expect("it is served");
    let mut read = [0; BLOCK];
    client.read(0, &mut read).expect("read");
    assert_eq!(read, [7; BLOCK]);
    assert_eq!(lab.logs().matches("there is no copy of it there").count(), 1);
    until("it moves", || {
        lab.try_order(0, &["migrate", "db", "--to", "b"]).status.success()
    });
    assert_eq!(settled(&lab, "db"), 1);
}

#[test]
fn a_destination_whose_disk_is_full_ends_the_move_and_not_the_tenant() {
    let mut lab = Lab::without_daemons();
    let Some(_small) = Small::mount(lab.path(1, "state"), "4m") else {
        return;
    };
    lab.start(0, None);
    lab.start(1, None);
    create(&lab, "db");
    let mut client = support::client::Client::connect(&lab.socket(0, "db")).expect("it is served");
    client.write(0, &vec![5; 8 << 20], false).expect("written");
    let running = tenant_of_the_rest(&lab);
    let output = lab.try_order(0, &["migrate", "db", "--to", "b"]);
    assert!(!output.status.success());
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(errors.contains("there is no room for it on b"), "{errors}");
    let before = running.done();
    until("the tenant goes on", || running.done() > before + 100);
    assert_eq!(lab.role(0, "db"), "serving");
    drop(running.stop());
    lab.kill(1);
}

/// A tenant with a volume of its own: data of other clients are not blocks of a tenant.
fn tenant_of_the_rest(lab: &Lab) -> Tenant {
    lab.volume("other", &SIZE.to_string());
    tenant(lab, "other", 4)
}

/// `make volume-test`: VERBATIM_VOLUME_MOVES (200) moves, while both daemons are killed and stopped at any time.
#[test]
#[ignore = "takes minutes"]
fn moves_in_a_row_with_faults() {
    let moves = std::env::var("VERBATIM_VOLUME_MOVES").map_or(200, |text| text.parse().expect("a number"));
    let seed = std::env::var("VERBATIM_VOLUME_SEED").map_or(1, |text| text.parse().expect("a number"));
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let mut lab = Lab::new();
    create(&lab, "db");
    let running = tenant(&lab, "db", seed);
    let (mut host, mut done, mut tried) = (0, 0, 0);
    let end = Instant::now() + PATIENCE * (moves + 1);
    while done < moves {
        assert!(Instant::now() < end, "{done} moves only");
        tried += 1;
        let mut moving = lab
            .command(host, &["migrate", "db", "--to", NAMES[1 - host]])
            .spawn()
            .expect("it runs");
        if random.random_bool(0.6) {
            let victim = random.random_range(0..2);
            std::thread::sleep(Duration::from_micros(random.random_range(0..400_000)));
            match random.random_bool(0.7) {
                true => {
                    lab.kill(victim);
                    lab.start(victim, None);
                }
                false => {
                    lab.signal(victim, Signal::STOP);
                    std::thread::sleep(Duration::from_millis(random.random_range(1..600)));
                    lab.signal(victim, Signal::CONT);
                }
            }
        }
        moving.wait().expect("it ends");
        let now = settled(&lab, "db");
        done += u32::from(now != host);
        host = now;
    }
    let log = running.stop();
    log.check(&lab.data(host, "db"));
    println!(
        "{done} moves of {tried}; {} requests, the longest waited {:?}",
        log.done, log.longest
    );
}
