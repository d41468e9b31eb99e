//! What a daemon has given up, and what it still does.

mod support;

use support::Lab;
use support::block::obstacle;

fn status(lab: &Lab, host: usize, key: &str) -> String {
    let path = format!("/proc/{}/status", lab.process(host));
    let status = std::fs::read_to_string(path).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix(key));
    line.expect("the kernel tells it").trim().to_owned()
}

/// Volumes are made, served as a block device, and moved.
fn works(lab: &Lab) {
    lab.volume("db", "4M");
    if obstacle().is_none() {
        let device = lab.order(0, &["attach", "db", "--device"]);
        let length = std::fs::read(&device).expect("it can be read").len();
        assert_eq!(length, 4 << 20, "{}", lab.logs());
        lab.order(0, &["detach", "db"]);
    }
    lab.order(0, &["migrate", "db", "--to", "b"]);
    assert_eq!(lab.role(1, "db"), "serving");
}

#[test]
fn a_daemon_gives_up_what_it_does_not_need() {
    let lab = Lab::new();
    assert_eq!(
        (status(&lab, 0, "NoNewPrivs:"), status(&lab, 0, "Seccomp:")),
        ("1".into(), "2".into())
    );
    if rustix::process::geteuid().is_root() {
        let rights = u64::from_str_radix(&status(&lab, 0, "CapBnd:"), 16).expect("hexadecimal");
        // CAP_KILL, CAP_SETUID, CAP_NET_ADMIN, CAP_SYS_MODULE, CAP_SYS_PTRACE.
        for given_up in [5, 7, 12, 16, 19] {
            assert_eq!(rights & 1 << given_up, 0, "{rights:x} has number {given_up}");
        }
    }
    works(&lab);
}

#[test]
fn a_daemon_without_a_jail_keeps_everything() {
    let mut lab = Lab::without_daemons();
    lab.options = vec!["--no-jail".into()];
    lab.start(0, None);
    let own = std::fs::read_to_string("/proc/self/status").expect("this process");
    for key in ["CapBnd:", "CapEff:", "NoNewPrivs:", "Seccomp:"] {
        let own = own
            .lines()
            .find_map(|line| line.strip_prefix(key))
            .expect("the kernel tells it");
        assert_eq!(status(&lab, 0, key), own.trim(), "{key}");
    }
    assert!(lab.log(0).contains("--no-jail"), "{}", lab.log(0));
}
