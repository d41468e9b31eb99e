//! Devices that have neither a WWN nor a serial number, nor another name: they are known by a block behind the volume, or taken only by an
//! operator's word.

mod support;

use std::fs::File;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};

use support::devices::{Loop, can_have_devices};
use support::orders::*;
use support::{Lab, until};

/// In bytes.
const SIZE: u64 = 4 * MIB;
const BLOCK: u64 = 4096;

/// A device that nothing names: a loop device whose file has no name any more.
fn nameless(folder: PathBuf, bytes: u64) -> Loop {
    File::create(&folder)
        .expect("a file")
        .set_len(bytes)
        .expect("longer");
    let device = Loop::over(&folder);
    std::fs::remove_file(&folder).expect("it was there");
    device
}

fn bytes(device: &Loop) -> Vec<u8> {
    device.forget();
    std::fs::read(&device.device).expect("it is read")
}

fn link(to: &Loop, path: &Path) {
    let _ = std::fs::remove_file(path);
    symlink(&to.device, path).expect("a link");
}

#[test]
fn a_device_without_a_name_is_known_by_a_block_behind_the_volume() {
    if !can_have_devices() {
        return;
    }
    let mut lab = Lab::without_daemons();
    let (right, other) = (
        nameless(lab.path(0, "right"), SIZE + 3 * BLOCK),
        nameless(lab.path(0, "other"), SIZE + 3 * BLOCK),
    );
    let path = lab.path(0, "by-path");
    link(&right, &path);
    lab.start(0, None);
    let size = SIZE.to_string();
    lab.order(0, &["create", "db", "--size", &size, "--data", &text(&path)]);
    lab.order(0, &["attach", "db"]);
    let content = noise(1, SIZE);
    write(&lab, 0, "db", 0, &content);
    lab.kill(0);
    link(&other, &path);
    lab.start(0, None);
    let waits = lab.status(0, "db").expect("listed")["waits"].to_string();
    assert!(
        waits.contains("is not what the volume had"),
        "{waits}\n{}",
        lab.logs()
    );
    assert!(bytes(&other).iter().all(|byte| *byte == 0), "it was written to");
    link(&right, &path);
    until("it is served", || {
        lab.status(0, "db")
            .is_some_and(|status| status["waits"].is_null())
    });
    assert!(read(&lab, 0, "db", 0, SIZE) == content, "it differs");

    // It grows up to that block, and not over it.
    let most = SIZE + 2 * BLOCK;
    lab.order(0, &["resize", "db", "--size", &most.to_string()]);
    let said = refused(&lab, 0, &["resize", "db", "--size", &(most + BLOCK).to_string()]);
    assert!(said.contains("the signature by which it is known"), "{said}");
    write(&lab, 0, "db", most - BLOCK, &[9; BLOCK as usize]);
    lab.kill(0);
    lab.start(0, None);
    assert_eq!(
        read(&lab, 0, "db", most - BLOCK, BLOCK),
        [9; BLOCK as usize],
        "{}",
        lab.logs()
    );
    lab.kill(0);
}

#[test]
fn a_device_that_nothing_tells_from_others_is_taken_only_by_a_word() {
    if !can_have_devices() {
        return;
    }
    let mut lab = Lab::new();
    let whole = nameless(lab.path(0, "whole"), SIZE);
    let used = nameless(lab.path(0, "used"), SIZE + 2 * BLOCK);
    let file = File::options().write(true).open(&used.device).expect("opened");
    file.write_all_at(&[7; 512], SIZE + BLOCK).expect("written");
    file.sync_all().expect("flushed");
    drop(file);
    let size = SIZE.to_string();
    for (device, why) in [(&whole, "no room for a signature"), (&used, "is in use")] {
        let create = ["create", "db", "--size", &size, "--data", &device.device];
        let said = refused(&lab, 0, &create);
        assert!(said.contains(why) && said.contains("--unnamed"), "{said}");
        assert_eq!(lab.role(0, "db"), "none");
    }
    assert!(
        bytes(&used)[(SIZE + BLOCK) as usize..][..512] == [7; 512],
        "it was written over"
    );
    lab.order(
        0,
        &[
            "create",
            "db",
            "--size",
            &size,
            "--data",
            &whole.device,
            "--unnamed",
        ],
    );
    lab.order(0, &["attach", "db"]);
    write(&lab, 0, "db", 0, &[5; 4096]);
    lab.kill(0);
    lab.start(0, None);
    assert_eq!(read(&lab, 0, "db", 0, 4096), [5; 4096], "{}", lab.logs());

    // The length of a volume that is to come is known only when it comes.
    let there = nameless(lab.path(1, "there"), SIZE);
    lab.order(1, &["place", "db", "--data", &there.device]);
    let said = refused(&lab, 0, &["migrate", "db", "--to", "b"]);
    assert!(
        said.contains("no room for a signature") && said.contains("--unnamed"),
        "{said}"
    );
    assert_eq!(
        (lab.role(0, "db"), lab.role(1, "db")),
        ("serving".into(), "placed".into())
    );
    let used = ["place", "db", "--data", &used.device];
    let said = refused(&lab, 1, &used);
    assert!(said.contains("is in use") && said.contains("--unnamed"), "{said}");
    lab.order(1, &["place", "db", "--data", &there.device, "--unnamed"]);
    // The next daemon knows the word, too.
    lab.kill(1);
    lab.start(1, None);
    lab.order(0, &["migrate", "db", "--to", "b"]);
    assert_eq!(read(&lab, 1, "db", 0, 4096), [5; 4096]);

    // One with room for a block gets it when the volume comes.
    let roomy = nameless(lab.path(0, "roomy"), SIZE + BLOCK);
    lab.order(0, &["delete", "db"]);
    lab.order(0, &["place", "db", "--data", &roomy.device]);
    lab.order(1, &["migrate", "db", "--to", "a"]);
    assert_eq!(read(&lab, 0, "db", 0, 4096), [5; 4096]);
    assert!(bytes(&roomy)[SIZE as usize..].starts_with(b"verbatim volume signature"));
    lab.kill(0);
    lab.kill(1);
}
