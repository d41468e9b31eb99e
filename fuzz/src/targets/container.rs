//! What users, runc and CRIU hand to the container layer.

use verbatim_container::fuzzing;

pub fn criu_messages(message: &[u8]) {
    fuzzing::criu_messages(message);
}

pub fn bundle_config(text: &[u8]) {
    fuzzing::bundle_config(&String::from_utf8_lossy(text));
}

/// A request to dump with some options, and a notification (`images/rpc.proto`).
pub fn criu_seeds() -> Vec<Vec<u8>> {
    let request = [
        0x08, 0x01, 0x12, 0x09, 0x08, 0x05, 0x48, 0x04, 0x88, 0x01, 0x06, 0x10, 0x07,
    ];
    let mut notify = vec![0x08, 0x06, 0x10, 0x01, 0x2a, 0x0e, 0x0a, 0x09];
    notify.extend(b"post-dump");
    notify.extend([0x10, 0x2a, 0xfa]);
    notify.push(0x01);
    vec![request.to_vec(), notify, vec![0x12, 0x00], vec![0x0d, 1, 2, 3, 4]]
}

/// A bundle as an engine makes it, and one of the wrong kinds.
pub fn bundle_seeds() -> Vec<Vec<u8>> {
    let usual = r#"{"ociVersion": "1.0.2", "root": {"path": "rootfs", "readonly": true}, "hostname": "x",
        "process": {"terminal": false, "args": ["serve", "-v"], "env": ["A=b"], "cwd": "/",
                    "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 9, "soft": 9}]},
        "mounts": [{"destination": "/dev", "type": "tmpfs"}, {"destination": "/data", "type": "bind"}],
        "linux": {"maskedPaths": ["/proc/kcore"], "resources": {"memory": {"limit": 1}, "devices": []},
                  "namespaces": [{"type": "network"}]}}"#;
    let odd = r#"{"root": {"path": "r"}, "process": {"args": ["a"], "env": 1, "rlimits": {}},
        "mounts": "none", "linux": {"resources": 5}}"#;
    let odder = r#"{"root": {"path": "r"}, "process": {"args": ["a"]}, "mounts": [1, null], "linux": []}"#;
    [usual, odd, odder].map(|text| text.as_bytes().to_vec()).to_vec()
}
