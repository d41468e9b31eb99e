//! A second loss while the disk gets over a first one: servers, the disk's own RNIC, and the file.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use verbatim_swap::disk::Order;

use crate::client::Client;
use crate::lab::{Lab, end, signal, until};
use crate::moves::{prepare, settled};
use crate::{PAGE, content};

/// Pages that the tests use.
const FEW: u64 = 16;

fn write(client: &mut Client, page: u64, version: u64) {
    let data = content(page, version);
    client
        .write(page * PAGE as u64, &data, false)
        .expect("it is written");
}

/// Whether the page is read as this version; an error is a different answer.
fn is_read(client: &mut Client, page: u64, version: u64) -> bool {
    let mut data = vec![1; PAGE];
    match client.read(page * PAGE as u64, &mut data) {
        Ok(()) => {
            assert!(data == content(page, version), "page {page} has other content");
            true
        }
        Err(_) => false,
    }
}

fn bytes(lab: &Lab, copy: usize) -> u64 {
    lab.status()["copies"][copy]["bytes"].as_u64().expect("a number")
}

#[test]
fn what_two_servers_take_along_is_an_error_until_it_is_written_again() {
    let mut lab = Lab::new();
    lab.start_server(1, "4M");
    lab.start_server(2, "4M");
    let socket = lab.attach("1M", &["--backup", "mirror=c"]);
    let mut client = Client::connect(&socket).expect("it is served");
    write(&mut client, 0, 7);
    write(&mut client, 1, 7);
    until("both have it", || bytes(&lab, 0) == bytes(&lab, 1));
    end(&mut lab.servers[1]);
    end(&mut lab.servers[2]);
    until("both are missed", || {
        lab.state(0) == "down" && lab.state(1) == "down"
    });
    assert!(!is_read(&mut client, 0, 7), "what is lost is read");
    assert!(
        client.write(0, &content(0, 8), false).is_err(),
        "it is written nowhere"
    );
    assert!(is_read(&mut client, 2, 0), "nobody ever wrote this page");
    lab.start_server(1, "4M");
    until("one is back", || lab.state(0) == "up");
    assert!(!is_read(&mut client, 0, 7), "new memory is read");
    write(&mut client, 0, 8);
    lab.start_server(2, "4M");
    until("it is filled", || {
        lab.state(1) == "up" && bytes(&lab, 1) == PAGE as u64
    });
    end(&mut lab.servers[1]);
    until("it is missed again", || lab.state(0) == "down");
    assert!(is_read(&mut client, 0, 8));
    assert!(!is_read(&mut client, 1, 7), "what is lost is read");
    assert_eq!(lab.status()["lost_bytes"], PAGE);
}

#[test]
fn a_server_that_was_cut_off_has_its_pages_again() {
    let mut lab = Lab::new();
    lab.start_server(1, "4M");
    let socket = lab.attach("1M", &["--backup", "none", "--deadline", "300"]);
    let mut client = Client::connect(&socket).expect("it is served");
    (0..FEW).for_each(|page| write(&mut client, page, 3));
    // Nothing answers that runs on that host.
    let all = |lab: &Lab, word| {
        for child in [&lab.servers[1], &lab.nics[1]] {
            signal(child.as_ref().expect("it runs"), word);
        }
    };
    all(&lab, Signal::STOP);
    assert!(!is_read(&mut client, 0, 3), "what is out of reach is read");
    until("it is given up", || lab.state(0) == "down");
    assert!(client.write(0, &content(0, 4), false).is_err());
    all(&lab, Signal::CONT);
    until("it is back", || lab.state(0) == "up");
    for page in 0..FEW {
        assert!(is_read(&mut client, page, 3), "page {page}");
    }
    assert_eq!(lab.status()["lost_bytes"], 0);
}

#[test]
fn a_file_that_cannot_be_read_keeps_no_other_page_from_a_server_that_is_back() {
    let mut lab = Lab::new();
    lab.start_server(1, "4M");
    let path = lab.path(0, "swap.img");
    std::fs::write(&path, [0xff; PAGE]).expect("written");
    let socket = lab.attach("1M", &["--backup", &format!("file={}", path.display())]);
    let mut client = Client::connect(&socket).expect("it is served");
    (0..FEW).for_each(|page| write(&mut client, page, 1));
    until("both have it", || bytes(&lab, 0) == bytes(&lab, 1));
    let file = std::fs::File::options().write(true).open(&path);
    file.and_then(|file| file.set_len(0)).expect("it is cut");
    for page in 0..FEW {
        assert!(is_read(&mut client, page, 1), "the server has page {page}");
    }
    end(&mut lab.servers[1]);
    until("it is missed", || lab.state(0) == "down");
    assert!(!is_read(&mut client, 5, 1), "no copy can read this page");
    let status = lab.status();
    let reason = status["copies"][1]["reason"].as_str().unwrap_or_default();
    assert!(reason.contains("Input/output error"), "{status}");
    write(&mut client, 0, 2);
    assert!(is_read(&mut client, 0, 2), "the file takes pages still");
    lab.start_server(1, "4M");
    until("it has what the file can read", || bytes(&lab, 0) == PAGE as u64);
    assert!(!is_read(&mut client, 5, 1), "new memory is read");
    write(&mut client, 5, 2);
    end(&mut lab.servers[1]);
    until("it is missed again", || lab.state(0) == "down");
    assert!(is_read(&mut client, 0, 2) && is_read(&mut client, 5, 2));
}

const MIRROR: [&str; 4] = ["--backup", "mirror=a", "--deadline", "300"];

/// A disk of b's and a's memory that is held at a, and ready at c; its clients there.
fn held(lab: &mut Lab) -> PathBuf {
    lab.start_server(1, "64M");
    lab.start_server(0, "64M");
    let socket = lab.start_moving(0, "8M", &MIRROR);
    let mut client = Client::connect(&socket).expect("it is served");
    (0..FEW).for_each(|page| write(&mut client, page, 1));
    let socket = prepare(lab, (0, 2), 1, &MIRROR, &|_| ());
    lab.must(0, &Order::Hold { by: 1 });
    socket
}

fn is_state(lab: &Lab, copy: usize, state: &str) -> bool {
    lab.must(2, &Order::Status).copies[copy].state == state
}

fn reads_all(socket: &Path, version: u64) {
    let mut client = Client::connect(socket).expect("it is served");
    for page in 0..FEW {
        assert!(is_read(&mut client, page, version), "page {page}");
    }
}

/// The new owner hears that before the lease is its own.
#[test]
fn a_server_that_is_told_to_end_before_the_commit_is_left_at_once() {
    let mut lab = Lab::new();
    let socket = held(&mut lab);
    let mut server = lab.servers[1].take().expect("it runs");
    signal(&server, Signal::TERM);
    until("it is heard", || is_state(&lab, 0, "leaving"));
    lab.must(2, &settled(1, true));
    let since = Instant::now();
    assert!(server.wait().expect("it ends").success());
    let took = since.elapsed();
    assert!(took < Duration::from_secs(30), "it has waited for {took:?}");
    reads_all(&socket, 1);
}
