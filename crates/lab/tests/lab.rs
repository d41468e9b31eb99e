//! Labs on this machine: needs root and what setup.sh installs; makes nothing but namespaces, cgroups and a state directory.

mod support;

use libtest_mimic::{Arguments, Trial};
use rustix::process::Signal;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::time::Duration;
use support::{Footprint, Scratch, config, output, signal, stand_in};
use verbatim_lab::{Error, Lab, ServiceState};

fn main() -> std::process::ExitCode {
    verbatim_lab::run_role();
    stand_in();
    let tests: &[(&str, fn())] = &[
        (
            "hosts_reach_each_other_by_name_and_address",
            hosts_reach_each_other_by_name_and_address,
        ),
        ("a_host_has_its_own_view", a_host_has_its_own_view),
        ("commands_end_as_in_the_host", commands_end_as_in_the_host),
        (
            "services_can_be_killed_and_started",
            services_can_be_killed_and_started,
        ),
        ("two_labs_do_not_meet", two_labs_do_not_meet),
        ("down_leaves_nothing", down_leaves_nothing),
        (
            "a_killed_supervisor_takes_everything_along",
            a_killed_supervisor_takes_everything_along,
        ),
        ("a_host_can_lose_its_power", a_host_can_lose_its_power),
        ("a_service_that_fails_is_named", a_service_that_fails_is_named),
        ("a_service_that_hangs_is_named", a_service_that_hangs_is_named),
        ("a_name_is_taken_once", a_name_is_taken_once),
        (
            "runc_and_criu_work_in_a_host",
            support::container::runc_and_criu_work_in_a_host,
        ),
    ];
    let trials = tests.iter().map(|&(name, test)| {
        Trial::test(name, move || {
            test();
            Ok(())
        })
    });
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit_code()
}

fn hosts_reach_each_other_by_name_and_address() {
    let lab = Scratch::up(config("reach"));
    for (from, to) in [("src", "dst"), ("dst", "10.77.0.3"), ("peer", "10.77.0.1")] {
        // 9000 bytes with headers, not to be fragmented: the whole path has the MTU.
        let ping = ["ping", "-c", "1", "-W", "5", "-M", "do", "-s", "8972", to];
        let (status, text) = output(&lab, from, &ping);
        assert!(status.success(), "{from} does not reach {to}: {text}");
    }
    let (status, text) = output(&lab, "src", &["ping", "-c", "1", "-W", "5", "fd76::10.77.0.2"]);
    assert!(status.success(), "src does not reach dst over IPv6: {text}");
    let (_, text) = output(&lab, "src", &["ip", "-o", "link", "show", "dev", "br0"]);
    assert!(text.contains("mtu 9000"), "{text}");
}

fn a_host_has_its_own_view() {
    let lab = Scratch::up(config("view"));
    let (_, name) = output(&lab, "dst", &["uname", "-n"]);
    assert_eq!(name.trim(), "dst");
    let (_, init) = output(&lab, "dst", &["cat", "/proc/1/cmdline"]);
    assert!(init.starts_with("verbatim-lab-host"), "pid 1 is {init:?}");
    let (_, links) = output(&lab, "dst", &["ls", "/sys/class/net"]);
    assert!(
        links.contains("br0") && links.contains("uplink"),
        "/sys shows the links {links:?}"
    );
    let (status, text) = output(&lab, "dst", &["test", "-c", "/dev/infiniband/uverbs0"]);
    assert!(status.success(), "the software RNIC's device is missing: {text}");
    let (status, text) = output(
        &lab,
        "dst",
        &["sh", "-c", "echo >/dev/null; ls -d /dev/fd /dev/pts/ /dev/shm/"],
    );
    assert!(
        status.success(),
        "the machine's devices are not all there: {text}"
    );

    let hosts: serde_json::Value = serde_json::from_slice(
        &std::fs::read(lab.host_path("src", "/run/verbatim/hosts.json").unwrap()).unwrap(),
    )
    .unwrap();
    assert_eq!(
        hosts[1],
        serde_json::json!({ "name": "dst", "address": "10.77.0.2", "trusted_network": true })
    );
    let tls = lab.host_path("src", "/run/verbatim/tls").unwrap();
    for file in ["ca.pem", "cert.pem"] {
        assert!(
            std::fs::read_to_string(tls.join(file))
                .unwrap()
                .starts_with("-----BEGIN CERTIFICATE-----")
        );
    }
    assert_eq!(
        std::fs::metadata(tls.join("key.pem"))
            .unwrap()
            .permissions()
            .mode()
            & 0o777,
        0o600
    );
    UnixStream::connect(lab.host_path("peer", "/run/verbatim/api.sock").unwrap())
        .expect("the agent's socket accepts");
}

fn commands_end_as_in_the_host() {
    let lab = Scratch::up(config("commands"));
    let status = lab
        .exec("src", &["sh", "-c", "exit $CODE"], &[("CODE", "7")])
        .unwrap();
    assert_eq!(status.code(), Some(7));
    assert_eq!(
        lab.exec("src", &["sh", "-c", "kill -9 $$"], &[]).unwrap().code(),
        Some(128 + 9)
    );
    assert_eq!(
        lab.exec("src", &["no-such-program"], &[]).unwrap().code(),
        Some(127)
    );
    let (_, text) = output(
        &lab,
        "src",
        &["sh", "-c", "echo $VERBATIM_HOST $VERBATIM_ADDRESS"],
    );
    assert_eq!(text.trim(), "src 10.77.0.1");

    // Nothing is blocked that a command or a service would not expect; the stand-in and pid 1 block what they take.
    let status = lab.status().unwrap();
    let ServiceState::Running { pid } = status.host("src").unwrap().service("agent").unwrap().state else {
        panic!("the agent does not run")
    };
    for process in ["self".to_owned(), pid.to_string()] {
        let status = format!("/proc/{process}/status");
        let (_, blocked) = output(&lab, "src", &["grep", "SigBlk", &status]);
        let mask = blocked.trim().strip_prefix("SigBlk:\t").unwrap_or("?");
        assert_eq!(u64::from_str_radix(mask, 16), Ok(0), "{process}: {blocked}");
    }

    // A signal to the stand-in reaches the command, which says when it is ready for it.
    let mut child = lab
        .command("src", "sh")
        .unwrap()
        .args(["-c", "trap 'exit 5' TERM; echo; while :; do sleep 0.01; done"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    support::read_line(child.stdout.as_mut().unwrap());
    signal(child.id(), Signal::TERM);
    assert_eq!(child.wait().unwrap().code(), Some(5));
    assert!(matches!(
        lab.exec("mars", &["true"], &[]),
        Err(Error::NoHost { .. })
    ));
}

fn services_can_be_killed_and_started() {
    let lab = Scratch::up(config("services"));
    let agent = |lab: &Lab| {
        lab.status()
            .unwrap()
            .host("dst")
            .unwrap()
            .service("agent")
            .unwrap()
            .state
            .clone()
    };
    let ServiceState::Running { pid: before } = agent(&lab) else {
        panic!("the agent does not run")
    };
    lab.kill("dst", "agent").unwrap();
    assert_eq!(
        agent(&lab),
        ServiceState::Exited {
            how: "signal 9".to_owned()
        }
    );
    lab.start("dst", "agent").unwrap();
    let ServiceState::Running { pid: after } = agent(&lab) else {
        panic!("the agent does not run again")
    };
    assert_ne!(before, after);
    UnixStream::connect(lab.host_path("dst", "/run/verbatim/api.sock").unwrap())
        .expect("the new agent accepts");

    let refusal = lab.start("dst", "agent").unwrap_err().to_string();
    assert!(refusal.contains("runs already"), "{refusal}");
    let refusal = lab.kill("dst", "cook").unwrap_err().to_string();
    assert!(refusal.contains("nic, agent"), "{refusal}");
}

fn two_labs_do_not_meet() {
    let (one, two) = (Scratch::up(config("one")), Scratch::up(config("two")));
    // The same names and addresses on both sides; what one has in /run the other does not see.
    assert!(one.exec("src", &["touch", "/run/mark"], &[]).unwrap().success());
    assert!(one.host_path("src", "/run/mark").unwrap().exists());
    assert!(!two.host_path("src", "/run/mark").unwrap().exists());
    assert!(Lab::names().unwrap().iter().any(|name| name == two.name()));
    one.down();
    let (status, text) = output(&two, "src", &["ping", "-c", "1", "-W", "5", "dst"]);
    assert!(status.success(), "the other lab is broken: {text}");
}

fn down_leaves_nothing() {
    let before = Footprint::take();
    let lab = Scratch::up(config("nothing"));
    assert_eq!(Footprint::take(), before, "a lab shows on the machine");
    let pid = stubborn(&lab);
    assert!(support::cgroups_of(lab.name()) > 0, "the lab has no cgroups");
    let (name, dir) = (lab.name().to_owned(), lab.state_dir().to_owned());
    lab.down();
    assert!(!support::runs(pid), "a process outlived the lab");
    assert_eq!(support::cgroups_of(&name), 0);
    assert!(!dir.exists());
    assert_eq!(Footprint::take(), before);
    assert!(matches!(Lab::open(&name), Err(Error::NoLab { .. })));
}

fn a_killed_supervisor_takes_everything_along() {
    let before = Footprint::take();
    let lab = Scratch::up(config("killed"));
    let status = lab.status().unwrap();
    let pid = stubborn(&lab);
    signal(status.supervisor, Signal::KILL);
    let hosts: Vec<u32> = status.hosts.iter().map(|host| host.pid).collect();
    for &host in &hosts {
        support::wait_for_end(host);
    }
    support::wait_for_end(pid);
    assert!(!lab.status().unwrap().running);
    assert!(matches!(lab.kill("src", "nic"), Err(Error::NotRunning { .. })));
    assert_eq!(Footprint::take(), before);

    // The name can be used again, and `down` clears what a second death leaves.
    let again = Scratch::up(config("killed"));
    signal(again.status().unwrap().supervisor, Signal::KILL);
    let name = again.name().to_owned();
    again.down();
    assert_eq!(support::cgroups_of(&name), 0);
}

fn a_host_can_lose_its_power() {
    let lab = Scratch::up(config("power"));
    let pid = stubborn(&lab);
    lab.kill_host("src").unwrap();
    assert!(!support::runs(pid));
    let status = lab.status().unwrap();
    assert!(!status.host("src").unwrap().running);
    assert!(status.host("dst").unwrap().running);
    let refusal = lab.start("src", "nic").unwrap_err().to_string();
    assert!(refusal.contains("is down"), "{refusal}");
    let (status, _) = output(&lab, "dst", &["ping", "-c", "1", "-W", "5", "peer"]);
    assert!(status.success());
}

fn a_service_that_fails_is_named() {
    let mut config = config("fails");
    config.services[1].args = vec!["stand-in".to_owned(), "fail".to_owned()];
    let error = Lab::up(config.clone()).unwrap_err().to_string();
    assert!(
        error.contains("service agent ended before it was ready (exit status 3)"),
        "{error}"
    );
    assert!(
        error.contains("the stand-in fails as told"),
        "the log is missing: {error}"
    );
    assert_eq!(support::cgroups_of(&config.name), 0);
    Lab::open(&config.name).unwrap().down().unwrap();
}

fn a_service_that_hangs_is_named() {
    let mut config = config("hangs");
    config.services[0].args = vec!["stand-in".to_owned(), "hang".to_owned()];
    config.ready_timeout = Duration::from_millis(700);
    let error = Lab::up(config.clone()).unwrap_err().to_string();
    assert!(
        error.contains("nic on peer is started, but its sockets do not accept"),
        "{error}"
    );
    assert!(
        error.contains("agent on src is waiting for the one before it"),
        "{error}"
    );
    Lab::open(&config.name).unwrap().down().unwrap();
}

fn a_name_is_taken_once() {
    let lab = Scratch::up(config("once"));
    assert!(matches!(Lab::up(config("once")), Err(Error::Exists { .. })));
    assert!(lab.status().unwrap().running);
}

/// Starts a process in `src` that ignores what can be ignored and has left its session; its pid on the machine.
fn stubborn(lab: &Lab) -> u32 {
    let script = "trap '' TERM HUP INT; echo ready > /run/stubborn; exec setsid sleep 1000";
    let mut command = lab.command("src", "sh").unwrap();
    // Its stdio must not keep this test's pipes open.
    command.args([
        "-c",
        &format!(
            "({script}) </dev/null >/dev/null 2>&1 & until [ -e /run/stubborn ]; do sleep 0.01; done; echo $!"
        ),
    ]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{:?}", output.status.signal());
    let inside = String::from_utf8(output.stdout).unwrap().trim().to_owned();
    support::outside_pid(lab, "src", inside.parse().unwrap())
}
