//! What an agent needs of a host: runc and CRIU work there as on a real one.

use super::{Scratch, config, output};
use serde_json::{Value, json};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Stdio;
use verbatim_lab::Lab;

/// A container of the same name starts on two hosts at once; one of them is then moved to the third.
pub fn runc_and_criu_work_in_a_host() {
    let lab = Scratch::up(config("container"));
    let bundle = tempfile::tempdir().unwrap();
    make_bundle(bundle.path());
    let images = bundle.path().join("images");
    let [bundle, images] = [bundle.path(), &images].map(|path| path.to_str().unwrap());

    for host in ["src", "dst"] {
        runc_detached(&lab, host, &["run", "--detach", "--bundle", bundle, "sleeper"]);
    }
    runc(&lab, "dst", &["delete", "--force", "sleeper"]);
    assert_eq!(runc(&lab, "src", &["list", "--quiet"]).trim(), "sleeper");
    assert_eq!(runc(&lab, "dst", &["list", "--quiet"]).trim(), "");

    runc(&lab, "src", &["checkpoint", "--image-path", images, "sleeper"]);
    // CRIU keeps what it found out about the kernel only if /run is a tmpfs.
    assert!(lab.host_path("src", "/run/criu.kdat").unwrap().exists());
    runc_detached(
        &lab,
        "peer",
        &[
            "restore",
            "--detach",
            "--bundle",
            bundle,
            "--image-path",
            images,
            "sleeper",
        ],
    );
    assert_eq!(
        runc(&lab, "peer", &["exec", "sleeper", "cat", "/proc/1/comm"]).trim(),
        "sleep"
    );
    // It is left running: it has to go with its host.
}

fn runc(lab: &Lab, host: &str, args: &[&str]) -> String {
    let argv: Vec<&str> = ["env", path(), "runc"]
        .into_iter()
        .chain(args.iter().copied())
        .collect();
    let (status, text) = output(lab, host, &argv);
    assert!(status.success(), "runc {args:?} on {host}: {text}");
    text
}

/// For what leaves a container behind: that holds on to the stdio, which may be neither a pipe nor a file of this test.
fn runc_detached(lab: &Lab, host: &str, args: &[&str]) {
    let mut command = lab.command(host, "env").unwrap();
    command.args([path(), "runc"]).args(args);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    assert!(command.status().unwrap().success(), "runc {args:?} on {host}");
}

/// PATH with the CRIU that setup.sh may have put aside.
fn path() -> &'static str {
    "PATH=/opt/verbatim/criu/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
}

/// A container that sleeps, with the machine's programs.
fn make_bundle(bundle: &Path) {
    let rootfs = bundle.join("rootfs");
    for folder in ["usr", "proc", "dev"] {
        std::fs::create_dir_all(rootfs.join(folder)).unwrap();
    }
    for folder in ["bin", "sbin", "lib", "lib64"] {
        symlink(format!("usr/{folder}"), rootfs.join(folder)).unwrap();
    }
    // CRIU's default lock needs iptables, and nothing here needs a lock.
    let options = bundle.join("criu.conf");
    std::fs::write(&options, "network-lock skip\n").unwrap();
    std::fs::write(bundle.join("config.json"), spec(&options).to_string()).unwrap();
}

fn spec(criu_options: &Path) -> Value {
    json!({
        "ociVersion": "1.0.2",
        "root": { "path": "rootfs" },
        "process": {
            "args": ["sleep", "1000"],
            "cwd": "/",
            "env": ["PATH=/usr/bin:/bin"],
            "user": { "uid": 0, "gid": 0 },
        },
        "mounts": [
            { "destination": "/usr", "type": "bind", "source": "/usr", "options": ["bind", "ro"] },
            { "destination": "/proc", "type": "proc", "source": "proc" },
            { "destination": "/dev", "type": "tmpfs", "source": "tmpfs" },
        ],
        "linux": { "namespaces": [
            { "type": "pid" }, { "type": "mount" }, { "type": "uts" }, { "type": "ipc" }, { "type": "network" },
        ]},
        "annotations": { "org.criu.config": criu_options },
    })
}
