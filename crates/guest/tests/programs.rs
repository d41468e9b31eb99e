//! Unmodified programs of the distribution, between two software RNICs on this machine.

#[expect(dead_code, reason = "shared with `own_programs.rs`, which uses the rest")]
mod support;

use std::process::Command;
use std::sync::{Arc, Mutex, Weak};

use support::{Host, Pair, installed, run};

/// The two hosts, shared by the tests that run at the same time; the last one to go clears them away.
fn pair() -> Arc<Pair> {
    static PAIR: Mutex<Weak<Pair>> = Mutex::new(Weak::new());
    let mut shared = PAIR.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    shared.upgrade().unwrap_or_else(|| {
        let pair = Arc::new(Pair::start());
        *shared = Arc::downgrade(&pair);
        pair
    })
}

#[test]
fn ibv_devices_lists_the_device() {
    let Some(program) = installed("ibv_devices") else {
        return;
    };
    let output = run(pair().client.prepare(Command::new(program)));
    assert!(output.contains("verbatim0"), "{output}");
}

#[test]
fn ibv_devices_lists_nothing_where_there_is_no_rnic() {
    let Some(program) = installed("ibv_devices") else {
        return;
    };
    let output = run(Host::without_rnic().prepare(Command::new(program)));
    assert!(
        output.contains("device") && !output.contains("verbatim0"),
        "{output}"
    );
}

#[test]
fn ibv_devinfo_sees_an_active_roce_port_and_its_gid() {
    let Some(program) = installed("ibv_devinfo") else {
        return;
    };
    let mut command = Command::new(program);
    command.arg("-v");
    let pair = pair();
    let output = run(pair.client.prepare(command));
    for expected in [
        "PORT_ACTIVE",
        "link_layer:\t\tEthernet",
        &format!("::ffff:{}", pair.client.address),
        "RoCE v2",
    ] {
        assert!(output.contains(expected), "no {expected:?} in\n{output}");
    }
}

/// Plays rdma-core's ping-pong of that name with the arguments of each variant.
fn pingpong(name: &str, variants: &[&[&str]]) {
    let Some(program) = installed(name) else { return };
    for variant in variants {
        let arguments = [&["-g", "0", "-n", "500", "-c"], *variant].concat();
        for output in pair().play(&program, &arguments) {
            assert!(output.contains("500 iters in"), "{name} {arguments:?}\n{output}");
        }
    }
}

/// Not `-t -e`: there it takes an event without a completion for an error, which any device may send.
#[test]
fn ibv_rc_pingpong_plays() {
    let variants = [
        &["-s", "16384"][..],
        &["-s", "16384", "-e"],
        &["-s", "16384", "-N"],
        &["-s", "16384", "-N", "-e"],
        &["-t"],
        &["-j"],
    ];
    pingpong("ibv_rc_pingpong", &variants);
}

#[test]
fn ibv_uc_pingpong_plays() {
    pingpong("ibv_uc_pingpong", &[&["-s", "16384"], &["-s", "16384", "-e"]]);
}

#[test]
fn ibv_ud_pingpong_plays() {
    pingpong("ibv_ud_pingpong", &[&["-s", "1024"], &["-s", "1024", "-e"]]);
}

#[test]
fn ibv_srq_pingpong_plays() {
    pingpong("ibv_srq_pingpong", &[&["-q", "8"], &["-q", "8", "-e"]]);
}

/// perftest uses `ibv_wr_*` only with devices that it knows by their vendor's numbers; `ibv_rc_pingpong -N` and our own C
/// programs (`own_programs.rs`) use it here.
fn perftest(program: &str, arguments: &[&str]) {
    let Some(program) = installed(program) else { return };
    let [_, client] = pair().play(&program, &[&["-F"], arguments].concat());
    assert!(client.contains("#bytes"), "{client}");
}

#[test]
fn ib_write_bw_with_one_queue_pair() {
    perftest("ib_write_bw", &["-n", "500", "-s", "65536"]);
}

#[test]
fn ib_write_bw_with_all_sizes() {
    perftest("ib_write_bw", &["-n", "20", "-a"]);
}

#[test]
fn ib_write_bw_with_many_queue_pairs() {
    perftest("ib_write_bw", &["-n", "100", "-s", "8192", "-q", "64"]);
}

#[test]
fn ib_write_bw_both_ways() {
    perftest("ib_write_bw", &["-n", "300", "-s", "16384", "-b", "-q", "4"]);
}

#[test]
fn ib_read_bw_with_one_queue_pair() {
    perftest("ib_read_bw", &["-n", "500", "-s", "65536"]);
}

#[test]
fn ib_read_bw_with_many_queue_pairs() {
    perftest("ib_read_bw", &["-n", "100", "-s", "8192", "-q", "32"]);
}

#[test]
fn ib_send_bw_with_one_queue_pair() {
    perftest("ib_send_bw", &["-n", "500", "-s", "65536"]);
}

#[test]
fn ib_send_bw_with_many_queue_pairs() {
    perftest("ib_send_bw", &["-n", "100", "-s", "4096", "-q", "16"]);
}

#[test]
fn ib_send_bw_both_ways() {
    perftest("ib_send_bw", &["-n", "300", "-s", "4096", "-b"]);
}

#[test]
fn ib_write_lat() {
    perftest("ib_write_lat", &["-n", "500", "-s", "8"]);
}

#[test]
fn ib_read_lat() {
    perftest("ib_read_lat", &["-n", "500", "-s", "8"]);
}

#[test]
fn ib_send_lat() {
    perftest("ib_send_lat", &["-n", "500", "-s", "8"]);
}

#[test]
fn datagrams_of_perftest() {
    perftest("ib_send_bw", &["-c", "UD", "-n", "500", "-s", "1024"]);
    perftest("ib_send_lat", &["-c", "UD", "-n", "500", "-s", "64", "-e"]);
}

#[test]
fn unreliable_connections_of_perftest() {
    perftest("ib_send_lat", &["-c", "UC", "-n", "500", "-s", "64"]);
    perftest("ib_write_lat", &["-c", "UC", "-n", "500", "-s", "64"]);
}

#[test]
fn atomics_of_perftest() {
    perftest("ib_atomic_bw", &["-n", "500"]);
    perftest("ib_atomic_lat", &["-n", "500", "-A", "CMP_AND_SWAP"]);
}

#[test]
fn shared_receive_queues_and_events_of_perftest() {
    perftest("ib_send_bw", &["-n", "300", "-s", "4096", "-q", "4", "--use-srq"]);
    perftest("ib_send_bw", &["-n", "300", "-s", "4096", "-e"]);
    perftest("ib_send_lat", &["-n", "300", "-s", "64", "-e"]);
}

/// What we lack, a program is told, and ends with its own message.
#[test]
fn what_is_not_there_is_refused_and_nobody_crashes() {
    for (name, arguments) in [
        ("ibv_xsrq_pingpong", &["-g", "0"][..]),
        ("ib_send_bw", &["-c", "XRC"]),
    ] {
        let Some(program) = installed(name) else { return };
        let statuses = pair().play_badly(&program, arguments);
        assert_eq!(statuses, [Some(1), Some(1)], "{name} {arguments:?}");
    }
}
