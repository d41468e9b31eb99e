//! Memory servers that hand what they have over to another one, while clients check each page.

use rustix::process::Signal;
use serde_json::Value;

use crate::lab::{Lab, end, signal, until};
use crate::{SIZE, use_it};

/// Has b hand over to that host; what its server says then.
fn hand_over(lab: &Lab, host: usize, more: &[&str]) -> Value {
    lab.ask(host, &[&["memory", "hand-over", "--json"], more].concat())
}

fn has_nothing(status: &Value) -> bool {
    status["leases"].as_array().is_some_and(Vec::is_empty) && status["leased_bytes"] == 0
}

/// Hosts of the disk's copies that are servers, and up.
fn servers(lab: &Lab) -> Vec<String> {
    let status = lab.status();
    let copies = status["copies"].as_array().expect("a list").iter();
    let up = copies.filter(|copy| copy["kind"] == "server" && copy["state"] == "up");
    up.map(|copy| copy["place"].as_str().expect("a host").to_owned())
        .collect()
}

/// There and back, and the one that was left is killed each time.
fn there_and_back(more: &[&str], other: usize, other_name: &str) {
    let mut lab = Lab::new();
    lab.start_server(1, "64M");
    lab.start_server(other, "64M");
    if more.contains(&"mirror=c") {
        lab.start_server(2, "64M");
    }
    let socket = lab.attach(SIZE, more);
    use_it(&socket, |go_on| {
        for (from, to, name) in [(1, other, other_name), (other, 1, "b")] {
            let left = hand_over(&lab, from, &["--to", name]);
            assert!(has_nothing(&left) && left["hands_over_to"] == name, "{left}");
            until("the other server is there", || {
                servers(&lab).contains(&name.to_owned())
            });
            go_on(300);
            if !more.contains(&"none") {
                until("it is filled", || {
                    let status = lab.status();
                    status["copies"][0]["bytes"] == status["copies"][1]["bytes"]
                });
            }
            end(&mut lab.servers[from]);
            go_on(300);
            lab.start_server(from, "64M");
            let leases = lab.ask(to, &["memory", "status", "--json"]);
            assert_eq!(leases["leases"][0]["host"], "a", "{leases}");
        }
    });
    let status = lab.status();
    assert_eq!(
        (&status["requests"]["failed"], &status["lost_bytes"]),
        (&0.into(), &0.into()),
        "{status}"
    );
}

#[test]
fn a_disk_with_nothing_behind_it_goes_to_another_server() {
    there_and_back(&["--backup", "none"], 2, "c");
}

#[test]
fn a_disk_with_a_file_goes_to_another_server() {
    there_and_back(&[], 2, "c");
}

#[test]
fn a_disk_of_two_servers_has_one_of_them_replaced() {
    there_and_back(&["--backup", "mirror=c"], 0, "a");
}

#[test]
fn what_cannot_leave_or_is_cancelled_stays() {
    let mut lab = Lab::new();
    lab.start_server(1, "64M");
    let socket = lab.attach(SIZE, &["--backup", "none"]);
    use_it(&socket, |go_on| {
        // There is nobody there: nothing leaves, and it is said so.
        let none = lab.try_order(1, &["memory", "hand-over", "--to", "c", "--timeout", "1"]);
        let said = String::from_utf8_lossy(&none.stderr).into_owned();
        assert!(
            !none.status.success() && said.contains("1 leases are still here"),
            "{said}"
        );
        go_on(300);
        // It comes, and has no room.
        lab.start_server(2, "4M");
        until("it is full", || {
            let status = lab.status();
            let reason = status["copies"][1]["reason"]
                .as_str()
                .unwrap_or_default()
                .to_owned();
            reason.contains("c has 4 of 4 MiB left")
        });
        go_on(300);
        let stays = hand_over(&lab, 1, &["--cancel"]);
        assert_eq!(stays["hands_over_to"], Value::Null);
        until("there is one copy", || servers(&lab) == ["b"]);
        go_on(300);
        let left = lab.status();
        assert_eq!(left["copies"].as_array().map(Vec::len), Some(1), "{left}");
    });
    let status = lab.status();
    assert_eq!(status["lost_bytes"], 0, "{status}");
    // A new one is refused while all is handed over, and not after that.
    for (host, why) in [("b", "host itself"), ("nowhere", "there is no host nowhere")] {
        let refused = lab.try_order(1, &["memory", "hand-over", "--to", host]);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(said.contains(why), "{said}");
    }
}

#[test]
fn a_server_that_dies_while_it_hands_over_has_the_file_stand_in() {
    let mut lab = Lab::new();
    lab.start_server(1, "64M");
    lab.start_server(2, "64M");
    let socket = lab.attach(SIZE, &[]);
    use_it(&socket, |go_on| {
        // The RNIC hangs, so that nothing can have left before the server dies.
        let nic = lab.nics[1].as_ref().expect("it runs");
        signal(nic, Signal::STOP);
        let hung = lab.try_order(1, &["memory", "hand-over", "--to", "c", "--timeout", "0"]);
        assert!(!hung.status.success(), "{hung:?}");
        end(&mut lab.servers[1]);
        let nic = lab.nics[1].as_ref().expect("it runs");
        signal(nic, Signal::CONT);
        until("it is given up", || lab.state(0) == "down");
        go_on(300);
        lab.start_server(1, "64M");
        until("it is back, and is left", || servers(&lab) == ["c"]);
        go_on(300);
    });
    let status = lab.status();
    assert_eq!(
        (&status["requests"]["failed"], &status["lost_bytes"]),
        (&0.into(), &0.into()),
        "{status}"
    );
}
