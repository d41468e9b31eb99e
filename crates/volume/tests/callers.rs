//! More callers than a daemon can serve, and callers that are no hosts.

mod support;

use std::io::Read;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;

use support::client::Client;
use support::{Lab, PATIENCE, until};

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
