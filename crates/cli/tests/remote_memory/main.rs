//! Swap disks on another host's memory, in real processes that are killed and stopped while they are used.

#[path = "../../../volume/tests/support/client.rs"]
#[allow(dead_code, reason = "each test file uses a part of it")]
mod client;
mod fence;
mod hands_over;
mod lab;
mod moves;
mod second;

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use client::Client;
use lab::{Lab, end, signal, until};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustix::process::Signal;

const PAGE: usize = 4096;
const SIZE: &str = "32M";
const PAGES: u64 = (32 << 20) / PAGE as u64;

/// The longest request of these tests, in pages; more than a slot of the disk.
const MOST: u64 = 48;

const USERS: u64 = 3;

/// A page of a number that is zero, or says where it is and when it was written.
fn content(page: u64, version: u64) -> Vec<u8> {
    let mut bytes = vec![0; PAGE];
    if version > 0 {
        for word in bytes.chunks_exact_mut(16) {
            word[..8].copy_from_slice(&page.to_le_bytes());
            word[8..].copy_from_slice(&version.to_le_bytes());
        }
    }
    bytes
}

/// Somebody who knows what was promised about pages of its own, each of which it reads and writes at random.
struct User {
    client: Client,
    first: u64,
    versions: Vec<u64>,
    random: StdRng,
    longest: Duration,
}

impl User {
    fn new(socket: &Path, number: u64) -> Self {
        let pages = PAGES / USERS;
        Self {
            client: Client::connect(socket).expect("it is served"),
            first: number * pages,
            versions: vec![0; pages as usize],
            random: StdRng::seed_from_u64(number),
            longest: Duration::ZERO,
        }
    }

    fn step(&mut self) {
        let count = match self.random.random_ratio(1, 8) {
            true => self.random.random_range(1..=MOST),
            false => 1,
        };
        let at = self.random.random_range(0..self.versions.len() as u64 - count);
        let offset = (self.first + at) * PAGE as u64;
        let range = at as usize..(at + count) as usize;
        let began = Instant::now();
        match self.random.random_range(0..20) {
            0..9 => {
                let mut data = Vec::new();
                for page in range {
                    self.versions[page] += 1;
                    data.extend(content(self.first + page as u64, self.versions[page]));
                }
                self.client.write(offset, &data, false).expect("it is written");
            }
            9 => {
                self.client
                    .trim(offset, (count as usize * PAGE) as u32)
                    .expect("it is discarded");
                // Versions go on, so that what was there before is recognised.
                for page in range {
                    self.versions[page] |= 1 << 63;
                }
                for page in at..at + count {
                    self.check(page, 1);
                }
                for page in at..at + count {
                    let version = &mut self.versions[page as usize];
                    *version = (*version & !(1 << 63)) + 1;
                    let data = content(self.first + page, *version);
                    self.client
                        .write((self.first + page) * PAGE as u64, &data, false)
                        .expect("it is written");
                }
            }
            _ => self.check(at, count),
        }
        self.longest = self.longest.max(began.elapsed());
    }

    fn check(&mut self, at: u64, count: u64) {
        let mut data = vec![1; count as usize * PAGE];
        let offset = (self.first + at) * PAGE as u64;
        self.client.read(offset, &mut data).expect("it is read");
        for (page, bytes) in (at..).zip(data.chunks_exact(PAGE)) {
            let version = self.versions[page as usize];
            let wanted = content(self.first + page, if version >> 63 == 1 { 0 } else { version });
            assert!(
                bytes == wanted,
                "page {page}, version {version}, begins with {:?}",
                &bytes[..16]
            );
        }
    }

    fn check_all(&mut self) {
        let all = self.versions.len() as u64;
        for at in (0..all).step_by(MOST as usize) {
            self.check(at, MOST.min(all - at));
        }
    }
}

/// Users go on while `trouble` happens, and until some time after; then each page is looked at. The longest that anyone has waited.
fn use_it(socket: &Path, trouble: impl FnOnce(&dyn Fn(u64))) -> Duration {
    let (stop, steps) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let users: Vec<_> = (0..USERS)
            .map(|number| {
                let (stop, steps) = (&stop, &steps);
                scope.spawn(move || {
                    let mut user = User::new(socket, number);
                    while !stop.load(Ordering::Relaxed) {
                        user.step();
                        steps.fetch_add(1, Ordering::Relaxed);
                    }
                    user.check_all();
                    user.longest
                })
            })
            .collect();
        let go_on = |more: u64| {
            let goal = steps.load(Ordering::Relaxed) + more;
            until("requests are answered", || {
                steps.load(Ordering::Relaxed) >= goal || users.iter().any(|user| user.is_finished())
            });
        };
        go_on(500);
        trouble(&go_on);
        go_on(500);
        stop.store(true, Ordering::Relaxed);
        let longest = users.into_iter().map(|user| {
            user.join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        longest.max().expect("there are users")
    })
}

#[test]
fn what_is_written_is_read_and_is_at_the_server_and_in_the_file() {
    let mut lab = Lab::new();
    lab.start_server(1, "64M");
    let socket = lab.attach(SIZE, &[]);
    use_it(&socket, |go_on| go_on(2000));
    until("the file has everything", || {
        let status = lab.status();
        let of = |copy: usize| status["copies"][copy]["bytes"].as_u64().expect("a number");
        of(0) == of(1) && of(0) > 1 << 20
    });
    // All of it is locked, but not filled: addresses that are merely reserved are many GiB.
    let resident = lab.resident_kib();
    assert!(resident < 256 << 10, "{resident} KiB are resident");
    let served = lab.ask(1, &["memory", "status", "--json"]);
    assert_eq!(
        (&served["leased_bytes"], &served["leases"][0]["host"]),
        (&(32 << 20).into(), &"a".into())
    );
    // A file that has no name takes its space along.
    assert_eq!(
        std::fs::read_dir(lab.path(0, "state"))
            .expect("it is there")
            .count(),
        0
    );
    let _client = Client::connect(&socket).expect("it is served");
    until("it is counted", || lab.status()["clients"] == 1);
    let used = lab.try_order(0, &["swap", "detach", "disk"]);
    assert!(
        String::from_utf8_lossy(&used.stderr).contains("1 clients use it"),
        "{used:?}"
    );
    lab.ask(0, &["swap", "detach", "disk", "--force", "--json"]);
    lab.wait_for_disk();
    until("its lease is over", || {
        lab.ask(1, &["memory", "status", "--json"])["leased_bytes"] == 0
    });
    assert_eq!(lab.ask(0, &["swap", "list", "--json"]), serde_json::json!([]));
}

#[test]
fn a_server_that_is_killed_is_replaced_by_the_file_and_filled_again_when_it_is_back() {
    killed(&[]);
}

/// What completes makes no event while the disk looks for it: nothing may be missed when it goes to sleep, nor when it is busy.
#[test]
fn the_same_where_the_disk_looks_for_work_before_it_sleeps() {
    for microseconds in ["30", "1000000"] {
        killed(&["--spin", microseconds]);
    }
}

fn killed(options: &[&str]) {
    let mut lab = Lab::new();
    lab.start_server(1, "64M");
    let socket = lab.attach(SIZE, options);
    let longest = use_it(&socket, |go_on| {
        for _ in 0..2 {
            end(&mut lab.servers[1]);
            until("it is noticed", || lab.state(0) == "down");
            go_on(500);
            lab.start_server(1, "64M");
            until("it is back", || lab.state(0) == "up");
            go_on(500);
            until("it is filled", || {
                let status = lab.status();
                status["copies"][0]["bytes"] == status["copies"][1]["bytes"]
            });
        }
    });
    println!("the longest request: {longest:?}");
    assert!(longest < Duration::from_secs(10), "{longest:?}");
    assert_eq!(lab.status()["requests"]["failed"], 0);
}

#[test]
fn an_rnic_that_hangs_is_not_waited_for_longer_than_the_deadline_and_what_it_does_late_harms_nothing() {
    let mut lab = Lab::new();
    lab.start_server(1, "64M");
    let socket = lab.attach(SIZE, &["--deadline", "300"]);
    let longest = use_it(&socket, |go_on| {
        for _ in 0..3 {
            let nic = lab.nics[1].as_ref().expect("it runs");
            signal(nic, Signal::STOP);
            until("it is given up", || lab.state(0) == "down");
            go_on(300);
            signal(nic, Signal::CONT);
            until("it is back", || lab.state(0) == "up");
            go_on(300);
        }
    });
    println!("the longest request: {longest:?}");
    assert_eq!(lab.status()["requests"]["failed"], 0);
    assert!(longest < Duration::from_secs(10), "{longest:?}");
}

#[test]
fn an_rnic_of_the_owner_that_hangs_is_not_waited_for_by_anybody() {
    let mut lab = Lab::new();
    lab.start_server(1, "64M");
    let socket = lab.attach(SIZE, &["--deadline", "300"]);
    let longest = use_it(&socket, |go_on| {
        for _ in 0..2 {
            until("the file has everything", || {
                let status = lab.status();
                status["copies"][0]["bytes"] == status["copies"][1]["bytes"]
            });
            let nic = lab.nics[0].as_ref().expect("it runs");
            signal(nic, Signal::STOP);
            // Orders are answered, and pages are served from the file.
            until("it is given up", || lab.state(0) == "down");
            go_on(300);
            let listed = lab.ask(0, &["swap", "list", "--json"]);
            assert_eq!(listed[0]["name"], "disk", "{listed}");
            signal(nic, Signal::CONT);
            until("it is back", || lab.state(0) == "up");
            go_on(300);
        }
    });
    println!("the longest request: {longest:?}");
    assert_eq!(lab.status()["requests"]["failed"], 0);
    assert!(longest < Duration::from_secs(20), "{longest:?}");
    // Detaching works also while the RNIC hangs.
    let nic = lab.nics[0].as_ref().expect("it runs");
    signal(nic, Signal::STOP);
    lab.ask(0, &["swap", "detach", "disk", "--force", "--json"]);
    lab.wait_for_disk();
    signal(lab.nics[0].as_ref().expect("it runs"), Signal::CONT);
}

#[test]
fn a_server_process_that_hangs_is_not_noticed() {
    let mut lab = Lab::new();
    lab.start_server(1, "64M");
    let socket = lab.attach(SIZE, &["--backup", "none"]);
    use_it(&socket, |go_on| {
        let server = lab.servers[1].as_ref().expect("it runs");
        signal(server, Signal::STOP);
        go_on(1000);
        assert_eq!(lab.state(0), "up");
        signal(server, Signal::CONT);
    });
    assert_eq!(lab.status()["copies"][0]["failures"], 0);
}

#[test]
fn an_rnic_of_the_owner_that_is_killed_and_started_again_costs_nothing() {
    let mut lab = Lab::new();
    lab.start_server(1, "64M");
    let socket = lab.attach(SIZE, &[]);
    use_it(&socket, |go_on| {
        end(&mut lab.nics[0]);
        go_on(300);
        lab.start_nic(0);
        until("it is back", || lab.state(0) == "up");
    });
    assert_eq!(lab.status()["requests"]["failed"], 0);
}

#[test]
fn two_servers_stand_in_for_each_other() {
    let mut lab = Lab::new();
    lab.start_server(1, "64M");
    lab.start_server(2, "64M");
    let socket = lab.attach(SIZE, &["--backup", "mirror=c"]);
    use_it(&socket, |go_on| {
        for (copy, host) in [(0, 1), (1, 2), (0, 1)] {
            until("both have everything", || {
                let status = lab.status();
                status["copies"][0]["bytes"] == status["copies"][1]["bytes"]
            });
            end(&mut lab.servers[host]);
            until("it is noticed", || lab.state(copy) == "down");
            go_on(300);
            lab.start_server(host, "64M");
            until("it is back", || lab.state(copy) == "up");
        }
    });
    assert_eq!(lab.status()["requests"]["failed"], 0);
}

#[test]
fn a_server_that_leaves_waits_until_the_file_has_everything() {
    let mut lab = Lab::new();
    lab.start_server(1, "64M");
    let socket = lab.attach(SIZE, &[]);
    use_it(&socket, |go_on| {
        signal(lab.servers[1].as_ref().expect("it runs"), Signal::TERM);
        let mut server = lab.servers[1].take().expect("it runs");
        assert!(server.wait().expect("it ends").success());
        go_on(300);
        assert_eq!(lab.state(0), "down");
        lab.start_server(1, "64M");
        until("it is back", || lab.state(0) == "up");
    });
    assert_eq!(lab.status()["requests"]["failed"], 0);
}

#[test]
fn without_a_backup_what_a_server_takes_along_is_an_error_until_it_is_written_again() {
    let mut lab = Lab::new();
    lab.start_server(1, "64M");
    let socket = lab.attach("1M", &["--backup", "none"]);
    let mut client = Client::connect(&socket).expect("it is served");
    client.write(0, &content(0, 7), false).expect("it is written");
    end(&mut lab.servers[1]);
    until("it is noticed", || lab.state(0) == "down");
    let mut page = vec![0; PAGE];
    assert!(client.read(0, &mut page).is_err(), "what is lost is read");
    assert!(client.write(0, &page, false).is_err(), "it is written nowhere");
    // Nobody ever wrote this one.
    client.read(PAGE as u64, &mut page).expect("zeros");
    assert_eq!(page, vec![0; PAGE]);
    lab.start_server(1, "64M");
    until("it is back", || lab.state(0) == "up");
    assert!(
        client.read(0, &mut page).is_err(),
        "zeros of a new server are what was written"
    );
    assert_eq!(lab.status()["lost_bytes"], PAGE);
    client.write(0, &content(0, 8), false).expect("it is written");
    client.read(0, &mut page).expect("it is read");
    assert!(page == content(0, 8));
    assert!(
        client.write(1, &page, false).is_err(),
        "a part of a page is taken"
    );
}

#[test]
fn a_file_that_was_there_is_overwritten_and_kept() {
    let mut lab = Lab::new();
    lab.start_server(1, "4M");
    let path = lab.path(0, "swap.img");
    std::fs::write(&path, vec![0xff; 64 * PAGE]).expect("written");
    let socket = lab.attach("1M", &["--backup", &format!("file={}", path.display())]);
    let mut client = Client::connect(&socket).expect("it is served");
    client
        .write(3 * PAGE as u64, &content(3, 7), false)
        .expect("it is written");
    end(&mut lab.servers[1]);
    until("it is noticed", || lab.state(0) == "down");
    let mut pages = vec![1; 2 * PAGE];
    client.read(3 * PAGE as u64, &mut pages).expect("it is read");
    assert!(pages[..PAGE] == content(3, 7));
    assert!(
        pages[PAGE..] == content(4, 0),
        "what a file had before is not the disk's"
    );
    lab.ask(0, &["swap", "detach", "disk", "--force", "--json"]);
    lab.wait_for_disk();
    let file = std::fs::read(&path).expect("it is still there");
    assert_eq!(file.len(), 256 * PAGE);
    assert!(file[3 * PAGE..4 * PAGE] == content(3, 7));
}

#[test]
fn what_cannot_be_had_is_said_clearly() {
    let mut lab = Lab::new();
    let said = |lab: &Lab, size: &str, more: &[&str]| {
        let output = lab.try_attach(size, more);
        assert!(!output.status.success(), "{output:?}");
        String::from_utf8(output.stderr).expect("text")
    };
    let none = said(&lab, "1M", &[]);
    assert!(none.contains("does `verbatim memory serve` run there?"), "{none}");
    lab.start_server(1, "4M");
    let full = said(&lab, "5M", &[]);
    assert!(
        full.contains("b has 4 of 4 MiB left, and 5 MiB are wanted"),
        "{full}"
    );
    let nobody = said(&lab, "1M", &["--backup", "mirror=d"]);
    assert!(nobody.contains("there is no host d"), "{nobody}");
    let nowhere = said(&lab, "1M", &["--backup", "file=/nowhere/swap.img"]);
    assert!(nowhere.contains("cannot open /nowhere/swap.img"), "{nowhere}");
    let path = lab.path(0, "full.img");
    let small = said(
        &lab,
        "1000000G",
        &["--backup", &format!("file={}", path.display())],
    );
    assert!(
        small.contains("full.img cannot take 1073741824000000 bytes"),
        "{small}"
    );
    assert!(!path.exists(), "a file that is of no use stays");
    let itself = said(&lab, "1M", &["--backup", "mirror=b"]);
    assert!(itself.contains("b cannot stand in for itself"), "{itself}");
    let other = said(&lab, "1M", &["--own-name", "c"]);
    assert!(
        other.contains("cannot be used multiple times") || other.contains("certificate"),
        "{other}"
    );
    // What failed has left nothing behind.
    until("nothing is given", || {
        lab.ask(1, &["memory", "status", "--json"])["leased_bytes"] == 0
    });

    let attached = lab.try_attach("4M", &[]);
    assert!(attached.status.success(), "{attached:?}");
    let twice = said(&lab, "1M", &[]);
    assert!(twice.contains("--name"), "{twice}");
    let listed = lab.ask(0, &["swap", "list", "--json"]);
    assert_eq!(listed[0]["name"], "disk");
    lab.ask(0, &["swap", "detach", "disk", "--json"]);
    until("its lease is over", || {
        lab.ask(1, &["memory", "status", "--json"])["leased_bytes"] == 0
    });
}

#[test]
fn a_lease_whose_owner_was_killed_ends_after_its_time() {
    let mut lab = Lab::new();
    lab.start_server(1, "4M");
    assert!(lab.try_attach("4M", &[]).status.success());
    let pid = lab.status()["pid"].as_i64().expect("a number");
    let pid = rustix::process::Pid::from_raw(pid as i32).expect("no zero");
    rustix::process::kill_process(pid, Signal::KILL).expect("it is there");
    until("its owner is missed", || {
        lab.ask(1, &["memory", "status", "--json"])["leases"][0]["connected"] == false
    });
    let full = lab.try_attach("4M", &[]);
    assert!(
        String::from_utf8_lossy(&full.stderr).contains("0 of 4 MiB left"),
        "{full:?}"
    );
    until("its lease is over", || {
        lab.ask(1, &["memory", "status", "--json"])["leased_bytes"] == 0
    });
    assert!(lab.try_attach("4M", &[]).status.success());
    lab.ask(0, &["swap", "detach", "disk", "--json"]);
}
