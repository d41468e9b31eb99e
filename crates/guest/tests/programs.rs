//! Unmodified programs of the distribution, between two software RNICs on this machine.

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

#[test]
fn ibv_rc_pingpong_plays() {
    let Some(program) = installed("ibv_rc_pingpong") else {
        return;
    };
    for api in [&[][..], &["-N"][..]] {
        let arguments = [&["-g", "0", "-c", "-n", "500", "-s", "16384"], api].concat();
        let outputs = pair().play(&program, &arguments);
        for output in outputs {
            assert!(output.contains("500 iters in"), "{output}");
        }
    }
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

/// What we lack, a program is told, and ends with its own message.
#[test]
fn what_is_not_there_is_refused_and_nobody_crashes() {
    for (name, arguments) in [
        ("ibv_rc_pingpong", &["-g", "0", "-e"][..]),
        ("ibv_ud_pingpong", &["-g", "0"]),
        ("ibv_srq_pingpong", &["-g", "0"]),
        ("ib_send_bw", &["-c", "UD"]),
        ("ib_atomic_bw", &["-n", "10"]),
        ("ib_write_bw", &["-R"]),
    ] {
        let Some(program) = installed(name) else { return };
        let statuses = pair().play_badly(&program, arguments);
        assert_eq!(statuses, [Some(1), Some(1)], "{name} {arguments:?}");
    }
}
