//! More callers than a daemon can serve, and callers that are no hosts.

mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;

use support::client::Client;
use support::frozen::Disk;
use support::{Lab, PATIENCE, until};
use verbatim_volume::control::Order;

#[test]
fn callers_that_do_not_say_who_they_are_are_cut_off_and_hosts_are_served() {
    let lab = Lab::new();
    lab.volume("db", "1M");
    // As many as a port accepts at a time: hosts come after them.
    let silent: Vec<_> = (0..256)
        .map(|_| TcpStream::connect(lab.peer_address(1)).expect("it listens"))
        .collect();
    lab.order(0, &["migrate", "db", "--to", "b"]);
    for mut caller in silent {
        caller.set_read_timeout(Some(PATIENCE)).expect("a socket");
        assert_eq!(caller.read(&mut [0; 16]).expect("it is cut off"), 0);
    }
}

#[test]
fn a_daemon_with_too_many_files_takes_clients_again_when_it_has_fewer() {
    let lab = Lab::new();
    lab.volume("db", "1M");
    lab.limit_files(0, 64);
    let socket = lab.socket(0, "db");
    let many: Vec<_> = (0..80)
        .map(|_| UnixStream::connect(&socket).expect("it listens"))
        .collect();
    until("it is said", || {
        lab.logs().contains("a connection could not be taken")
    });
    drop(many);
    let mut client = Client::connect(&socket).expect("it is served");
    client.write(0, &[1; 4096], true).expect("written");
}

/// Volumes on one dead disk, with as many orders about each as are taken.
#[test]
fn orders_that_wait_for_one_disk_leave_places_for_orders_about_other_volumes() {
    const VOLUMES: usize = 9;
    const ORDERS: usize = 40;
    let lab = Lab::new();
    let Some(mut disk) = Disk::new(96) else { return };
    let names: Vec<_> = (0..VOLUMES).map(|number| format!("stuck-{number}")).collect();
    for name in &names {
        lab.order(0, &["create", name, "--size", "1M", "--data", &disk.file(name)]);
    }
    lab.volume("db", "1M");
    disk.hang();
    let give = |order: &Order| {
        let mut stream = UnixStream::connect(lab.path(0, "run/volumes.sock")).expect("it listens");
        let mut line = serde_json::to_vec(order).expect("JSON");
        line.push(b'\n');
        stream.write_all(&line).expect("given");
        stream
    };
    let mut given = Vec::new();
    for name in &names {
        let (name, length) = (name.clone(), 2 << 20);
        given.push(give(&Order::Resize { name, length }));
    }
    until("all of them wait", || {
        let list = lab.order(0, &["list"]);
        list.matches("busy").count() == VOLUMES
    });
    // The others wait for the lock, or are refused.
    for name in &names {
        given.extend((1..ORDERS).map(|_| give(&Order::Sync { name: name.clone() })));
    }
    let refused = |stream: &UnixStream| {
        stream.set_nonblocking(true).expect("a socket");
        let mut line = String::new();
        let read = BufReader::new(stream).read_line(&mut line);
        read.is_ok() && line.contains("failed")
    };
    let mut waiting = given;
    let mut number = 0;
    until("many are refused", || {
        let before = waiting.len();
        waiting.retain(|stream| !refused(stream));
        number += before - waiting.len();
        number >= VOLUMES * ORDERS - VOLUMES * 32
    });
    lab.order(0, &["list"]);
    lab.order(0, &["detach", "db"]);
    lab.order(0, &["create", "new", "--size", "1M"]);
    lab.order(0, &["attach", "new"]);
    let mut client = Client::connect(&lab.socket(0, "new")).expect("it is served");
    client.write(0, &[1; 4096], true).expect("written");
    disk.go_on();
    for name in &names {
        until("it goes on", || lab.role(0, name) == "serving");
    }
}
