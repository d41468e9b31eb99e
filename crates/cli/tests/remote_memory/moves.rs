//! A disk that goes from host to host while its client writes, with processes that are killed and orders that are wrong.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use verbatim_swap::disk::Order;

use crate::client::Client;
use crate::lab::{Lab, end, until};
use crate::{PAGE, content};

const SIZE: &str = "8M";
const PAGES: u64 = (8 << 20) / PAGE as u64;

/// What a disk answers that is another host's.
const GONE: i32 = 108;

/// A client that knows what it has written, and where its disk goes next.
struct Tenant<'a> {
    client: Client,
    /// Where the disk is served next; taken when it is not served here any more.
    next: &'a Mutex<Option<PathBuf>>,
    versions: Vec<u64>,
    random: StdRng,
    moves: u32,
}

impl<'a> Tenant<'a> {
    fn new(socket: &Path, next: &'a Mutex<Option<PathBuf>>) -> Self {
        Self {
            client: Client::connect(socket).expect("it is served"),
            next,
            versions: vec![0; PAGES as usize],
            random: StdRng::seed_from_u64(1),
            moves: 0,
        }
    }

    /// Asks, at the next host if the disk is there.
    fn ask(&mut self, mut what: impl FnMut(&mut Client) -> io::Result<()>) {
        match what(&mut self.client) {
            Err(error) if error.raw_os_error() == Some(GONE) => {
                let next = self.next.lock().unwrap_or_else(PoisonError::into_inner).take();
                self.client = Client::connect(&next.expect("it goes somewhere")).expect("it is served");
                self.moves += 1;
                what(&mut self.client).expect("it is answered at the next host");
            }
            answered => answered.expect("it is answered"),
        }
    }

    fn step(&mut self) {
        let page = self.random.random_range(0..PAGES);
        match self.random.random_range(0..8) {
            0..4 => {
                // What is not carried out is asked for again, and nothing else is done meanwhile.
                self.versions[page as usize] += 1;
                let data = content(page, self.versions[page as usize]);
                self.ask(|client| client.write(page * PAGE as u64, &data, false));
            }
            4 => {
                self.ask(|client| client.trim(page * PAGE as u64, PAGE as u32));
                self.check_as(page, 0);
                let version = self.versions[page as usize] + 1;
                self.versions[page as usize] = version;
                let data = content(page, version);
                self.ask(|client| client.write(page * PAGE as u64, &data, false));
            }
            _ => self.check(page),
        }
    }

    fn check(&mut self, page: u64) {
        self.check_as(page, self.versions[page as usize]);
    }

    fn check_as(&mut self, page: u64, version: u64) {
        let mut data = vec![1; PAGE];
        self.ask(|client| client.read(page * PAGE as u64, &mut data));
        assert!(
            data == content(page, version),
            "page {page}, version {version}, begins with {:?}",
            &data[..16]
        );
    }
}

/// A tenant works while `trouble` happens; then each page is looked at. How often it went to another host.
fn work(socket: &Path, trouble: impl FnOnce(&Mutex<Option<PathBuf>>, &dyn Fn(u64))) -> u32 {
    let (stop, steps, next) = (AtomicBool::new(false), AtomicU64::new(0), Mutex::new(None));
    std::thread::scope(|scope| {
        let tenant = scope.spawn(|| {
            let mut tenant = Tenant::new(socket, &next);
            while !stop.load(Ordering::Relaxed) {
                tenant.step();
                steps.fetch_add(1, Ordering::Relaxed);
            }
            for page in 0..PAGES {
                tenant.check(page);
            }
            tenant.moves
        });
        let go_on = |more: u64| {
            let goal = steps.load(Ordering::Relaxed) + more;
            until("requests are answered", || {
                steps.load(Ordering::Relaxed) >= goal || tenant.is_finished()
            });
        };
        go_on(500);
        // However this ends, the tenant does.
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            trouble(&next, &go_on);
            go_on(500);
        }));
        stop.store(true, Ordering::Relaxed);
        let moves = tenant
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        moves
    })
}

/// Until the source waits for the decision; what the destination is called.
pub fn prepare(
    lab: &mut Lab,
    (from, to): (usize, usize),
    by: u64,
    more: &[&str],
    go_on: &dyn Fn(u64),
) -> PathBuf {
    let name = crate::lab::NAMES[to].to_owned();
    lab.must(from, &Order::Follow { to: name, by });
    go_on(100);
    let arriving = by.to_string();
    let socket = lab.start_moving(to, SIZE, &[more, &["--arriving", &arriving]].concat());
    assert_eq!(lab.must(to, &Order::Status).role, "ready");
    lab.must(from, &Order::Mirrored { by });
    go_on(100);
    socket
}

pub fn settled(by: u64, is_committed: bool) -> Order {
    Order::Settle { by, is_committed }
}

fn moves_with(more: &[&str], servers: &[usize]) {
    let mut lab = Lab::new();
    for server in servers {
        lab.start_server(*server, "64M");
    }
    let socket = lab.start_moving(0, SIZE, more);
    let moves = work(&socket, |next, go_on| {
        for (by, way) in (1..).zip([(0, 2), (2, 0), (0, 2)]) {
            let (from, to) = way;
            let socket = prepare(&mut lab, way, by, more, go_on);
            *next.lock().expect("no panic") = Some(socket);
            lab.must(from, &Order::Hold { by });
            assert_eq!(lab.must(from, &Order::Status).role, "held");
            // A client of the destination waits, and is answered after the commit.
            lab.must(to, &settled(by, true));
            lab.must(from, &settled(by, true));
            go_on(300);
            let status = lab.must(to, &Order::Status);
            assert_eq!(
                (status.role.as_str(), status.lost_bytes),
                ("serving", 0),
                "{status:?}"
            );
            let left = lab.must(from, &Order::Status);
            assert_eq!(
                (left.role.as_str(), left.other_host.as_deref()),
                ("moved", Some(crate::lab::NAMES[to]))
            );
            lab.must(from, &Order::Detach { force: true });
            until("its process ends", || lab.order(from, &Order::Status).is_err());
            lab.end_moving(from);
        }
    });
    assert_eq!(moves, 3);
    let status = lab.must(2, &Order::Status);
    assert_eq!((status.requests.failed, status.lost_bytes), (0, 0), "{status:?}");
    for server in servers {
        let served = lab.ask(*server, &["memory", "status", "--json"]);
        let leases = served["leases"].as_array().expect("a list");
        assert_eq!((leases.len(), &leases[0]["host"]), (1, &"c".into()), "{served}");
    }
}

#[test]
fn a_disk_goes_from_host_to_host_and_its_pages_stay_where_they_are() {
    moves_with(&["--backup", "none"], &[1]);
}

#[test]
fn a_disk_with_a_file_gets_a_new_one_at_each_host() {
    moves_with(&[], &[1]);
}

#[test]
fn a_disk_of_two_servers_takes_both_leases_along() {
    moves_with(&["--backup", "mirror=c"], &[1, 2]);
}

#[test]
fn what_comes_to_nothing_leaves_the_disk_where_it_was() {
    let mut lab = Lab::new();
    lab.start_server(1, "64M");
    let more = ["--backup", "none"];
    let socket = lab.start_moving(0, SIZE, &more);
    let moves = work(&socket, |_, go_on| {
        // Before anything is held; when it is; and with a destination that was killed.
        for (by, is_held, is_killed) in [(1, false, false), (2, true, false), (3, true, true)] {
            prepare(&mut lab, (0, 2), by, &more, go_on);
            if is_held {
                lab.must(0, &Order::Hold { by });
            }
            if !is_killed {
                lab.must(2, &settled(by, false));
            }
            lab.end_moving(2);
            lab.must(0, &settled(by, false));
            assert_eq!(lab.must(0, &Order::Status).role, "serving");
            go_on(200);
        }
        // A word about another session is nobody's.
        lab.must(0, &settled(9, true));
        assert!(lab.order(0, &Order::Hold { by: 9 }).is_err());
        go_on(100);
    });
    assert_eq!(moves, 0);
    let status = lab.must(0, &Order::Status);
    assert_eq!((status.requests.failed, status.lost_bytes), (0, 0), "{status:?}");
}

#[test]
fn a_source_that_goes_on_after_the_commit_is_refused_and_harms_nothing() {
    let mut lab = Lab::new();
    lab.start_server(1, "64M");
    let more = ["--backup", "none"];
    let socket = lab.start_moving(0, SIZE, &more);
    let mut old = Client::connect(&socket).expect("it is served");
    for page in 0..64 {
        old.write(page * PAGE as u64, &content(page, 1), false)
            .expect("written");
    }
    let socket = prepare(&mut lab, (0, 2), 1, &more, &|_| ());
    let mut new = Client::connect(&socket).expect("it is welcomed");
    lab.must(0, &Order::Hold { by: 1 });
    lab.must(2, &settled(1, true));
    for page in 0..64 {
        let mut data = vec![0; PAGE];
        new.read(page * PAGE as u64, &mut data).expect("it is read");
        assert!(data == content(page, 1), "page {page}");
        new.write(page * PAGE as u64, &content(page, 2), false)
            .expect("written");
    }
    // Its agent is wrong.
    lab.must(0, &settled(1, false));
    let refused = old
        .write(0, &content(0, 3), false)
        .expect_err("it is not its own");
    assert_eq!(refused.raw_os_error(), Some(GONE), "{refused}");
    assert_eq!(lab.must(0, &Order::Status).role, "moved");
    for page in 0..64 {
        let mut data = vec![0; PAGE];
        new.read(page * PAGE as u64, &mut data).expect("it is read");
        assert!(data == content(page, 2), "page {page}");
    }
}

#[test]
fn a_source_that_dies_after_the_hold_is_not_needed() {
    let mut lab = Lab::new();
    lab.start_server(1, "64M");
    let socket = lab.start_moving(0, SIZE, &[]);
    let mut old = Client::connect(&socket).expect("it is served");
    old.write(0, &content(0, 1), false).expect("written");
    let socket = prepare(&mut lab, (0, 2), 1, &[], &|_| ());
    lab.must(0, &Order::Hold { by: 1 });
    lab.end_moving(0);
    until("the server misses it", || {
        lab.ask(1, &["memory", "status", "--json"])["leases"][0]["connected"] == false
    });
    // Longer than a lease outlives an owner whom nobody follows.
    std::thread::sleep(std::time::Duration::from_secs(6));
    lab.must(2, &settled(1, true));
    let mut new = Client::connect(&socket).expect("it is served");
    let mut data = vec![0; PAGE];
    new.read(0, &mut data).expect("it is read");
    assert!(data == content(0, 1));
}

#[test]
fn a_server_that_dies_at_the_commit_takes_its_pages_along_and_no_others_are_read_in_their_place() {
    // With a second server nothing is lost; without anything, what was there is an error.
    for (more, is_lost) in [
        (&["--backup", "mirror=c"][..], false),
        (&["--backup", "none"][..], true),
    ] {
        let mut lab = Lab::new();
        lab.start_server(1, "64M");
        lab.start_server(2, "64M");
        let socket = lab.start_moving(0, SIZE, more);
        let mut old = Client::connect(&socket).expect("it is served");
        old.write(0, &content(0, 1), false).expect("written");
        let socket = prepare(&mut lab, (0, 2), 1, more, &|_| ());
        lab.must(0, &Order::Hold { by: 1 });
        end(&mut lab.servers[1]);
        until("the destination knows", || {
            lab.must(2, &Order::Status).role == "arriving"
        });
        lab.must(2, &settled(1, true));
        lab.start_server(1, "64M");
        let mut new = Client::connect(&socket).expect("it is welcomed");
        let mut data = vec![0; PAGE];
        let read = new.read(0, &mut data);
        assert_eq!(read.is_err(), is_lost, "{more:?}: {read:?}");
        assert!(is_lost || data == content(0, 1));
        if is_lost {
            // Not even what nobody has written is known any more.
            assert!(new.read(PAGE as u64, &mut data).is_err());
        }
        until("the server is back", || {
            let status = lab.must(2, &Order::Status);
            status.copies[0].state == "up"
        });
        new.write(0, &content(0, 2), false).expect("written");
        new.read(0, &mut data).expect("it is read");
        assert!(data == content(0, 2));
    }
}
