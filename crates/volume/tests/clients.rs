//! Clients of other projects: libnbd's, and QEMU's if it is installed.

mod support;

use std::process::Command;

use support::{Lab, find};

/// Runs a program, and returns its output. Its Python, if it has one, is the distribution's.
fn run(program: &str, args: &[&str]) -> String {
    let output = Command::new(program)
        .args(args)
        .env("PATH", "/usr/bin:/bin")
        .output()
        .expect("it runs");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {args:?}: {errors}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Whether a program is installed; reports it if not.
fn has(program: &str) -> bool {
    let is_there = find(program).is_some();
    if !is_there {
        eprintln!("skipped: there is no {program}; `make setup` installs libnbd's programs");
    }
    is_there
}

#[test]
fn libnbd_sees_what_is_offered_and_copies_images() {
    if !has("nbdinfo") || !has("nbdcopy") {
        return;
    }
    let lab = Lab::new();
    lab.order(0, &["create", "db", "--size", "5M"]);
    let uri = lab.order(0, &["attach", "db"]);
    let info = run("nbdinfo", &["--json", &uri]);
    let info: serde_json::Value = serde_json::from_str(&info).expect("JSON");
    let export = &info["exports"][0];
    assert_eq!(
        (&export["export-name"], &export["export-size"]),
        (&"db".into(), &(5 << 20).into())
    );
    for can in ["can_flush", "can_fua", "can_trim", "can_zero", "can_multi_conn"] {
        assert_eq!(export[can], true, "{can}");
    }
    let image = lab.path(0, "image");
    let content: Vec<u8> = (0..5u32 << 20)
        .map(|place| (place.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    std::fs::write(&image, &content).expect("written");
    run("nbdcopy", &[image.to_str().expect("text"), &uri]);
    lab.order(0, &["migrate", "db", "--to", "b"]);
    let back = lab.path(1, "image");
    // The same socket path leads nowhere now; the other host has its own.
    let uri = lab.order(1, &["attach", "db"]);
    run("nbdcopy", &[&uri, back.to_str().expect("text")]);
    assert!(
        std::fs::read(back).expect("it is there") == content,
        "the images differ"
    );

    // The same by TLS, and not without a certificate.
    let uri = lab.tls_uri(1, "db");
    assert_eq!(run("nbdinfo", &["--size", &uri]).trim(), (5 << 20).to_string());
    let (plain, _) = uri.split_once('?').expect("a query");
    let bare = Command::new("nbdinfo").arg(plain).output().expect("it runs");
    assert!(!bare.status.success(), "a client without a certificate is served");
    let plain = plain.replace("nbds", "nbd");
    let bare = Command::new("nbdinfo").arg(plain).output().expect("it runs");
    assert!(!bare.status.success(), "a client without TLS is served");
}

/// Actions of libnbd's shell: several requests at once, errors, zeros.
const SHELL: &str = r#"
assert h.get_size() == 1 << 20
h.pwrite(b"x" * 1000, 500)
assert h.pread(1002, 499) == b"\0" + b"x" * 1000 + b"\0"
h.zero(100, 600); h.trim(100, 1000)
assert h.pread(1002, 499) == b"\0" + b"x" * 100 + b"\0" * 100 + b"x" * 300 + b"\0" * 100 + b"x" * 400 + b"\0"
h.flush(); h.pwrite(b"y", 0, nbd.CMD_FLAG_FUA)
h.set_strict_mode(0)
for bad in (lambda: h.pread(512, (1 << 20) - 511), lambda: h.pwrite(b"z" * 512, 1 << 20), lambda: h.cache(1, 0)):
    try:
        bad()
        raise SystemExit("it was taken")
    except nbd.Error as error:
        assert error.errnum in (22, 28, 95), error
cookies = []
for i in range(200):
    cookies.append(h.aio_pwrite(nbd.Buffer.from_bytearray(bytearray([i]) * 4096), i * 4096))
for cookie in cookies:
    while not h.aio_command_completed(cookie): h.poll(-1)
for i in range(200):
    assert h.pread(4096, i * 4096) == bytes([i]) * 4096
"#;

#[test]
fn libnbds_shell_gets_right_answers_and_errors() {
    if !has("nbdsh") {
        return;
    }
    let lab = Lab::new();
    lab.order(0, &["create", "db", "--size", "1M"]);
    let uri = lab.order(0, &["attach", "db"]);
    run("nbdsh", &["-u", &uri, "-c", SHELL]);
}

#[test]
fn qemu_reads_what_qemu_wrote() {
    if find("qemu-io").is_none() {
        eprintln!("skipped: there is no qemu-io");
        return;
    }
    let lab = Lab::new();
    lab.order(0, &["create", "db", "--size", "8M"]);
    let uri = lab.order(0, &["attach", "db"]);
    let wrote = [
        "-c",
        "write -P 3 0 4M",
        "-c",
        "write -z 1M 1M",
        "-c",
        "discard 2M 64k",
        "-c",
        "write -f -P 7 3M 512",
        "-c",
        "flush",
    ];
    run("qemu-io", &[&["-f", "raw"], wrote.as_slice(), &[&uri]].concat());
    lab.order(0, &["migrate", "db", "--to", "b"]);
    let uri = lab.order(1, &["attach", "db"]);
    let read = [
        "-c",
        "read -P 3 0 1M",
        "-c",
        "read -P 0 1M 1M",
        "-c",
        "read -P 0 2M 64k",
        "-c",
        "read -P 7 3M 512",
    ];
    let said = run("qemu-io", &[&["-f", "raw"], read.as_slice(), &[&uri]].concat());
    assert!(!said.contains("failed"), "{said}");
}

#[test]
fn a_volume_grows_while_nobody_uses_it() {
    let lab = Lab::new();
    lab.volume("db", "1M");
    lab.order(0, &["resize", "db", "--size", "3M"]);
    let client = support::client::Client::connect(&lab.socket(0, "db")).expect("it is served");
    assert_eq!(client.size, 3 << 20);
    assert!(
        !lab.try_order(0, &["resize", "db", "--size", "1M"])
            .status
            .success(),
        "it shrinks"
    );
    assert!(
        !lab.try_order(0, &["create", "db", "--size", "1M"])
            .status
            .success(),
        "it is made twice"
    );
    assert!(
        !lab.try_order(0, &["delete", "db"]).status.success(),
        "it is attached"
    );
    lab.order(0, &["detach", "db"]);
    lab.order(0, &["delete", "db"]);
    assert_eq!(lab.role(0, "db"), "none");
}
