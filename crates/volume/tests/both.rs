//! Storage that both hosts see: a volume does not move onto itself.

mod support;

use std::path::Path;

use support::client::Client;
use support::devices::{Loop, can_have_devices};
use support::{Lab, until};

const SIZE: u64 = 8 << 20;

/// The first host serves the volume from this place.
fn serves(lab: &Lab, data: &Path) {
    let (size, data) = (SIZE.to_string(), data.to_str().expect("text"));
    lab.order(0, &["create", "db", "--size", &size, "--data", data]);
    lab.order(0, &["attach", "db"]);
}

fn client(lab: &Lab) -> Client {
    let socket = lab.socket(0, "db");
    let mut client = None;
    until("it is served", || {
        client = Client::connect(&socket).ok();
        client.is_some()
    });
    client.expect("it is connected")
}

/// A move to a place that is the same file or device is refused, by both names, and nothing is written.
fn is_refused(lab: &Lab, here: &Path, there: &Path) {
    let written = vec![7; 4096];
    let mut client = client(lab);
    client.write(0, &written, true).expect("written");
    let there = there.to_str().expect("text");
    lab.order(1, &["place", "db", "--data", there]);
    let output = lab.try_order(0, &["migrate", "db", "--to", "b"]);
    let said = String::from_utf8(output.stderr).expect("text");
    assert!(
        !output.status.success(),
        "it has moved onto itself\n{}",
        lab.logs()
    );
    assert!(said.contains("onto the volume itself"), "{said}");
    assert!(
        said.contains(there) && said.contains(here.to_str().expect("text")),
        "{said}"
    );
    assert_eq!(
        (lab.role(0, "db"), lab.role(1, "db")),
        ("serving".into(), "placed".into())
    );
    let mut read = vec![0; 4096];
    client.read(0, &mut read).expect("read");
    assert!(read == written, "something was written");
    client.write(4096, &written, true).expect("it is served");
}

fn in_a_file(lab: &Lab) -> std::path::PathBuf {
    let file = lab.path(0, "shared.img");
    std::fs::File::create_new(&file)
        .and_then(|file| file.set_len(SIZE))
        .expect("a file");
    file
}

#[test]
fn two_devices_on_the_same_storage_are_one() {
    if !can_have_devices() {
        return;
    }
    let lab = Lab::new();
    let file = in_a_file(&lab);
    let (one, other) = (Loop::over(&file), Loop::over(&file));
    serves(&lab, Path::new(&one.device));
    is_refused(&lab, Path::new(&one.device), Path::new(&other.device));
    lab.order(1, &["delete", "db"]);
    let spare = lab.path(1, "spare.img");
    let spare_text = spare.to_str().expect("text");
    lab.order(1, &["place", "db", "--data", spare_text]);
    lab.order(0, &["migrate", "db", "--to", "b"]);
    assert_eq!(lab.role(1, "db"), "serving");
    // The word about the name can be said where a copy is.
    let said = refused(&lab, 0, &["place", "db", "--data", &one.device]);
    assert!(said.contains("there is a copy"), "{said}");
    lab.order(0, &["place", "db", "--data", &one.device, "--unnamed"]);
    lab.order(1, &["migrate", "db", "--to", "a"]);
    assert_eq!(lab.role(0, "db"), "serving");
}

fn refused(lab: &Lab, host: usize, words: &[&str]) -> String {
    let output = lab.try_order(host, words);
    let said = String::from_utf8(output.stderr).expect("text");
    assert!(!output.status.success(), "{said}\n{}", lab.logs());
    said
}

#[test]
fn a_file_by_another_path_is_the_same_file() {
    let lab = Lab::new();
    let file = lab.path(0, "shared.img");
    serves(&lab, &file);
    let link = lab.path(1, "linked.img");
    std::fs::hard_link(&file, &link).expect("linked");
    is_refused(&lab, &file, &link);
}

#[test]
fn a_device_on_the_file_of_the_source_is_that_file() {
    if !can_have_devices() {
        return;
    }
    let lab = Lab::new();
    let file = lab.path(0, "shared.img");
    serves(&lab, &file);
    let disk = Loop::over(&file);
    is_refused(&lab, &file, Path::new(&disk.device));
}
