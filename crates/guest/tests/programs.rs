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
    let Some(program) = installed("ibv_devices") else { return };
    let output = run(pair().client.prepare(Command::new(program)));
    assert!(output.contains("verbatim0"), "{output}");
}

#[test]
fn ibv_devices_lists_nothing_where_there_is_no_rnic() {
    let Some(program) = installed("ibv_devices") else { return };
    let output = run(Host::without_rnic().prepare(Command::new(program)));
    assert!(output.contains("device") && !output.contains("verbatim0"), "{output}");
}

#[test]
fn ibv_devinfo_sees_an_active_roce_port_and_its_gid() {
    let Some(program) = installed("ibv_devinfo") else { return };
    let mut command = Command::new(program);
    command.arg("-v");
    let pair = pair();
    let output = run(pair.client.prepare(command));
    for expected in ["PORT_ACTIVE", "link_layer:\t\tEthernet", &format!("::ffff:{}", pair.client.address), "RoCE v2"] {
        assert!(output.contains(expected), "no {expected:?} in\n{output}");
    }
}

#[test]
fn ibv_rc_pingpong_plays() {
    let Some(program) = installed("ibv_rc_pingpong") else { return };
    for api in [&[][..], &["-N"][..]] {
        let arguments = [&["-g", "0", "-c", "-n", "500", "-s", "16384"], api].concat();
        let outputs = pair().play(&program, &arguments, "-p");
        for output in outputs {
            assert!(output.contains("500 iters in"), "{output}");
        }
    }
}

/// Every message size, so that packets, segments, inline data and the ends of messages meet in all ways.
fn perftest(program: &str, arguments: &[&str]) {
    let Some(program) = installed(program) else { return };
    for api in [&[][..], &["--use_old_post_send"][..]] {
        let arguments = [&["-F"], arguments, api].concat();
        for output in pair().play(&program, &arguments, "-p") {
            assert!(output.contains("#bytes"), "{output}");
        }
    }
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
fn ib_write_lat_inline_and_not() {
    perftest("ib_write_lat", &["-n", "500", "-s", "8"]);
    perftest("ib_write_lat", &["-n", "500", "-s", "8", "-I", "64"]);
}

#[test]
fn ib_read_lat() {
    perftest("ib_read_lat", &["-n", "500", "-s", "8"]);
}

#[test]
fn ib_send_lat_inline_and_not() {
    perftest("ib_send_lat", &["-n", "500", "-s", "8"]);
    perftest("ib_send_lat", &["-n", "500", "-s", "8", "-I", "64"]);
}
