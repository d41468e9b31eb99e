//! The identity of a copy's data: they are made once, and nothing is mistaken for them, or put in their
//! place.

mod support;

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustix::fs::{FlockOperation, XattrFlags};
use support::client::Client;
use support::devices::{Loop, can_have_devices};
use support::{Lab, until};
use verbatim_volume::control::{Order, Outcome, Row, order_now};

const SIZE: u64 = 8 << 20;
const MARK: &str = "user.verbatim.volume";

fn noise(bytes: u64) -> Vec<u8> {
    let mut noise = vec![0; bytes as usize];
    StdRng::seed_from_u64(bytes).fill(noise.as_mut_slice());
    noise
}

/// Runs a command that must be refused; returns its error.
fn refused(lab: &Lab, host: usize, args: &[&str]) -> String {
    let output = lab.try_order(host, args);
    assert!(
        !output.status.success(),
        "{args:?} is not refused\n{}",
        lab.logs()
    );
    String::from_utf8(output.stderr).expect("text")
}

/// The reason why the volume is not served.
fn waits(lab: &Lab, host: usize) -> Option<String> {
    let status = lab.status(host, "db").expect("it is listed");
    status["waits"].as_str().map(str::to_owned)
}

/// Waits until the volume is not served, for this reason.
fn waits_for(lab: &Lab, host: usize, what: &str) {
    let mut why = None;
    until(&format!("it waits for {what}"), || {
        why = waits(lab, host);
        why.as_ref().is_some_and(|why| why.contains(what))
    });
    assert_eq!(lab.role(host, "db"), "serving", "its role is what it was");
    let said = refused(lab, host, &["attach", "db"]);
    assert!(said.contains(what), "{said}");
    let listed = lab.order(host, &["list"]);
    assert!(listed.contains("waits for it"), "{listed}");
    Client::connect(&lab.socket(host, "db"))
        .map(drop)
        .expect_err("it is served");
}

fn connect(lab: &Lab, host: usize) -> Client {
    let socket = lab.socket(host, "db");
    let mut client = None;
    until("it is served", || {
        client = Client::connect(&socket).ok();
        client.is_some()
    });
    client.expect("it is connected")
}

fn served(lab: &Lab, host: usize) -> Vec<u8> {
    let mut client = connect(lab, host);
    let mut data = vec![0; client.size as usize];
    client.read(0, &mut data).expect("it is read");
    data
}

/// Makes a volume with data at this path, attached on the first host; returns its content.
fn volume(lab: &Lab, path: &Path) -> Vec<u8> {
    let path = path.to_str().expect("text");
    lab.order(0, &["create", "db", "--size", &SIZE.to_string(), "--data", path]);
    lab.order(0, &["attach", "db"]);
    let data = noise(SIZE);
    connect(lab, 0).write(0, &data, true).expect("written");
    data
}

fn restart(lab: &mut Lab, meanwhile: impl FnOnce()) {
    lab.kill(0);
    // A socket that is left would be taken for one of the next daemon.
    let _ = fs::remove_file(lab.socket(0, "db"));
    meanwhile();
    lab.start(0, None);
}

#[test]
fn data_that_are_missing_are_waited_for_and_never_made() {
    let mut lab = Lab::new();
    let (mount, away) = (lab.path(0, "disk2"), lab.path(0, "away"));
    fs::create_dir(&mount).expect("a folder");
    let data = volume(&lab, &mount.join("db.img"));
    restart(&mut lab, || {
        fs::rename(&mount, &away).expect("renamed");
        fs::create_dir(&mount).expect("a folder");
    });
    waits_for(&lab, 0, "missing");
    assert_eq!(
        fs::read_dir(&mount).expect("a folder").count(),
        0,
        "something was made"
    );
    refused(&lab, 0, &["migrate", "db", "--to", "b"]);
    refused(&lab, 0, &["resize", "db", "--size", "64M"]);
    fs::remove_dir(&mount).expect("it is empty");
    fs::rename(&away, &mount).expect("renamed");
    assert!(served(&lab, 0) == data, "it is served by itself, with its data");
    assert_eq!(waits(&lab, 0), None);
    assert!(lab.logs().contains("is served again"), "{}", lab.logs());
}

#[test]
fn another_file_is_not_taken_for_the_data_but_one_that_was_put_back_is() {
    let mut lab = Lab::new();
    let path = lab.path(0, "db.img");
    let data = volume(&lab, &path);
    let saved = lab.path(0, "saved");
    restart(&mut lab, || {
        fs::rename(&path, &saved).expect("renamed");
        fs::write(&path, vec![0; SIZE as usize]).expect("written");
    });
    waits_for(&lab, 0, "is not what the volume had");
    assert!(
        fs::read(&path)
            .expect("it is there")
            .iter()
            .all(|&byte| byte == 0)
    );

    // A backup that was made with the file's attributes.
    let mut mark = [0; 64];
    let old = fs::File::open(&saved).expect("opened");
    if let Ok(length) = rustix::fs::fgetxattr(&old, MARK, &mut mark) {
        let new = fs::File::options().write(true).open(&path).expect("opened");
        fs::write(&path, &data).expect("written");
        rustix::fs::fsetxattr(&new, MARK, &mark[..length], XattrFlags::empty()).expect("marked");
        assert!(served(&lab, 0) == data);
        assert!(lab.logs().contains("put back"), "{}", lab.logs());
    }

    // A backup without them.
    let mut other = data.clone();
    other[0] ^= 1;
    restart(&mut lab, || {
        fs::remove_file(&path).expect("removed");
        fs::write(&path, &other).expect("written");
    });
    waits_for(&lab, 0, "verbatim volume accept db");
    lab.order(0, &["accept", "db"]);
    assert!(served(&lab, 0) == other, "an operator's word");
    restart(&mut lab, || {});
    assert!(served(&lab, 0) == other, "it is noted");
}

#[test]
fn data_that_are_shorter_are_not_served_and_stay_as_they_are() {
    let mut lab = Lab::new();
    let path = lab.path(0, "db.img");
    let data = volume(&lab, &path);
    let file = fs::File::options().write(true).open(&path).expect("opened");
    restart(&mut lab, || file.set_len(SIZE / 2).expect("cut"));
    waits_for(&lab, 0, "part of its data is missing");
    refused(&lab, 0, &["accept", "db"]);
    assert_eq!(
        path.metadata().expect("there").len(),
        SIZE / 2,
        "it was made longer"
    );
    // A longer file is harmless: a resize may have been cut off.
    restart(&mut lab, || file.set_len(2 * SIZE).expect("longer"));
    let now = served(&lab, 0);
    assert!(now[..SIZE as usize / 2] == data[..SIZE as usize / 2]);
    assert_eq!(
        (now.len() as u64, path.metadata().expect("there").len()),
        (SIZE, 2 * SIZE)
    );
}

/// A name among the devices, which is removed on drop.
struct Name(PathBuf);

impl Name {
    fn of(lab: &Lab) -> Self {
        let unique = lab.peer_address(0).replace([':', '.'], "-");
        Self(PathBuf::from(format!("/dev/verbatim-test-{unique}")))
    }

    fn leads_to(&self, device: &str) {
        self.is_gone();
        std::os::unix::fs::symlink(device, &self.0).expect("a link");
    }

    fn is_gone(&self) {
        // There may be no such name.
        let _ = fs::remove_file(&self.0);
    }
}

impl Drop for Name {
    fn drop(&mut self) {
        self.is_gone();
    }
}

#[test]
fn a_device_that_comes_late_is_waited_for_and_another_one_is_not_taken() {
    if !can_have_devices() {
        return;
    }
    let mut lab = Lab::new();
    let disk = |name: &str| {
        let file = lab.path(0, name);
        fs::write(&file, vec![0; SIZE as usize]).expect("written");
        Loop::over(&file)
    };
    let (right, wrong) = (disk("right"), disk("wrong"));
    let name = Name::of(&lab);
    let path = name.0.to_str().expect("text");
    for order in [
        &["create", "db", "--size", "1M", "--data", path][..],
        &["place", "db", "--data", path],
    ] {
        let said = refused(&lab, 0, order);
        assert!(said.contains("no file is made among devices"), "{said}");
    }
    name.leads_to(&right.device);
    let data = volume(&lab, &name.0);
    restart(&mut lab, || name.is_gone());
    waits_for(&lab, 0, "missing");
    assert!(name.0.symlink_metadata().is_err(), "a file was made in its place");
    name.leads_to(&wrong.device);
    waits_for(&lab, 0, "it is another device");
    name.leads_to(&right.device);
    assert!(served(&lab, 0) == data);
    let kind = name.0.metadata().expect("there").file_type();
    assert!(kind.is_block_device());
}

#[test]
fn a_file_that_is_there_is_only_taken_when_somebody_says_so() {
    let lab = Lab::new();
    let path = lab.path(0, "old.img");
    let mut data = noise(SIZE);
    // The magic number of ext4.
    data[1080..1082].copy_from_slice(&[0x53, 0xef]);
    fs::write(&path, &data).expect("written");
    let shown = path.to_str().expect("text");
    for size in [SIZE / 2, SIZE, 2 * SIZE] {
        let said = refused(
            &lab,
            0,
            &["create", "db", "--size", &size.to_string(), "--data", shown],
        );
        for word in ["--adopt", "ext4", &SIZE.to_string()] {
            assert!(said.contains(word), "{said}");
        }
    }
    let adopt = |size: u64| {
        let size = size.to_string();
        lab.try_order(0, &["create", "db", "--size", &size, "--data", shown, "--adopt"])
    };
    assert!(!adopt(SIZE + 1).status.success(), "it is too short");
    assert!(fs::read(&path).expect("there") == data, "it was changed");
    let half = SIZE / 2;
    assert!(adopt(half).status.success());
    lab.order(0, &["attach", "db"]);
    assert!(served(&lab, 0) == data[..half as usize]);
    assert!(fs::read(&path).expect("there") == data, "it was cut");
    let none = lab.path(0, "none.img");
    let none = none.to_str().expect("text");
    let said = refused(
        &lab,
        0,
        &["create", "new", "--size", "1M", "--data", none, "--adopt"],
    );
    assert!(said.contains(&format!("there is no {none}")), "{said}");
}

#[test]
fn what_somebody_else_has_is_neither_taken_nor_served() {
    let mut lab = Lab::new();
    let path = lab.path(0, "db.img");
    let data = volume(&lab, &path);
    let shown = path.to_str().expect("text");
    let size = SIZE.to_string();
    let take = ["create", "theirs", "--size", &size, "--data", shown, "--adopt"];
    let said = refused(&lab, 1, &take);
    assert!(said.contains("in use by another daemon"), "{said}");
    lab.order(1, &["place", "theirs", "--data", shown]);
    lab.order(0, &["create", "theirs", "--size", &size]);
    let said = refused(&lab, 0, &["migrate", "theirs", "--to", "b"]);
    assert!(said.contains("in use by another daemon"), "{said}");
    assert!(served(&lab, 0) == data);

    // The lock of another program.
    let file = fs::File::options()
        .read(true)
        .write(true)
        .open(&path)
        .expect("opened");
    restart(&mut lab, || {
        rustix::fs::fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive).expect("it is free");
    });
    waits_for(&lab, 0, "in use by somebody else");
    drop(file);
    assert!(served(&lab, 0) == data);

    // The data of a copy that has moved away are not claimed.
    lab.order(0, &["migrate", "db", "--to", "b"]);
    let file = fs::File::options()
        .read(true)
        .write(true)
        .open(&path)
        .expect("opened");
    until("it is free", || {
        rustix::fs::fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
    });
}

#[test]
fn what_an_older_daemon_has_made_is_noted_when_it_is_opened() {
    let mut lab = Lab::new();
    let path = lab.path(0, "db.img");
    let data = volume(&lab, &path);
    let noted = lab.path(0, "state/db/data.json");
    restart(&mut lab, || {
        for name in ["data.json", "data.sound"] {
            fs::remove_file(lab_path(&noted, name)).expect("it is there");
        }
    });
    assert!(served(&lab, 0) == data);
    assert!(noted.exists());
    assert!(
        lab.logs().contains("was not noted by an older daemon"),
        "{}",
        lab.logs()
    );
    let saved = lab.path(0, "saved");
    restart(&mut lab, || {
        fs::rename(&path, saved).expect("renamed");
        fs::write(&path, &data).expect("written");
    });
    waits_for(&lab, 0, "it is another file");
}

fn lab_path(beside: &Path, name: &str) -> PathBuf {
    beside.with_file_name(name)
}

/// The folder and everything in it.
fn all(folder: &Path) -> Vec<PathBuf> {
    let mut found = vec![folder.to_owned()];
    for entry in fs::read_dir(folder).expect("a folder").flatten() {
        match entry.file_type().expect("known").is_dir() {
            true => found.extend(all(&entry.path())),
            false => found.push(entry.path()),
        }
    }
    found
}

fn are_private(lab: &Lab, host: usize, more: &[PathBuf]) {
    let folders = [lab.path(host, "state"), lab.path(host, "run/volumes")];
    let mut found: Vec<_> = folders.iter().flat_map(|folder| all(folder)).collect();
    found.extend_from_slice(more);
    assert!(found.len() > 5, "{found:?}");
    for path in found {
        let mode = path.symlink_metadata().expect("it is there").mode();
        assert_eq!(
            mode & 0o077,
            0,
            "{} may be read by others: {mode:o}",
            path.display()
        );
    }
}

#[test]
fn nobody_but_its_owner_reads_a_volume() {
    let mut lab = Lab::new();
    let (path, place) = (lab.path(0, "db.img"), lab.path(1, "place.img"));
    fs::write(&place, "").expect("written");
    volume(&lab, &path);
    lab.volume("other", "4M");
    are_private(&lab, 0, std::slice::from_ref(&path));
    lab.order(1, &["place", "db", "--data", place.to_str().expect("text")]);
    for name in ["db", "other"] {
        lab.order(0, &["migrate", name, "--to", "b"]);
    }
    are_private(&lab, 1, &[place]);

    // The permissions of an older daemon.
    lab.order(1, &["migrate", "db", "--to", "a"]);
    let files = all(&lab.path(0, "state"));
    restart(&mut lab, || {
        for file in files.iter().chain([&path]) {
            let mode = if file.is_dir() { 0o755 } else { 0o644 };
            fs::set_permissions(file, fs::Permissions::from_mode(mode)).expect("changed");
        }
    });
    drop(connect(&lab, 0));
    are_private(&lab, 0, &[path]);
}

#[test]
fn remains_of_a_volume_are_not_written_over() {
    let lab = Lab::new();
    let remains = lab.path(1, "state/db/data");
    fs::create_dir(lab.path(1, "state/db")).expect("a folder");
    fs::write(&remains, "something").expect("written");
    let said = refused(&lab, 1, &["create", "db", "--size", "1M"]);
    assert!(said.contains("remains of a volume"), "{said}");
    lab.volume("db", "1M");
    let said = refused(&lab, 0, &["migrate", "db", "--to", "b"]);
    assert!(said.contains("remains of a volume"), "{said}");
    assert_eq!(lab.role(0, "db"), "serving");
    assert_eq!(fs::read(&remains).expect("there"), b"something");
    fs::remove_file(&remains).expect("removed");
    lab.order(0, &["migrate", "db", "--to", "b"]);
}

#[test]
fn a_volume_that_has_all_its_room_keeps_it_when_it_moves() {
    let lab = Lab::new();
    lab.order(0, &["create", "db", "--size", &SIZE.to_string(), "--preallocate"]);
    lab.order(0, &["attach", "db"]);
    let room = |host: usize| {
        let file = lab.path(host, "state/db/data").metadata();
        file.expect("it is there").blocks() * 512
    };
    assert!(room(0) >= SIZE);
    connect(&lab, 0).write(0, &noise(1 << 20), true).expect("written");
    for (from, to, name) in [(0, 1, "b"), (1, 0, "a"), (0, 1, "b")] {
        lab.order(from, &["migrate", "db", "--to", name]);
        assert!(room(to) >= SIZE, "at {name} it has {} bytes", room(to));
    }
    // A range that a client discards stays unallocated.
    connect(&lab, 1).trim(4 << 20, 2 << 20).expect("given back");
    assert!(room(1) < SIZE);
    lab.order(0, &["create", "thin", "--size", &SIZE.to_string()]);
    lab.order(0, &["migrate", "thin", "--to", "b"]);
    let thin = lab.path(1, "state/thin/data").metadata().expect("it is there");
    assert!(thin.blocks() * 512 < SIZE / 2, "one without room has got it");
}

/// Lends the volume to an instance, or takes it back; returns its row.
fn lent(lab: &Lab, is_given: bool) -> Option<Row> {
    let (name, holder) = ("db".to_owned(), Some("vm".to_owned()));
    let order = match is_given {
        true => Order::Attach {
            name,
            device: false,
            vhost_user: false,
            holder,
            by: None,
            socket: Some(lab.path(0, "lent")),
            read_only: false,
        },
        false => Order::Detach { name, holder },
    };
    let said = order_now(&lab.path(0, "run/volumes.sock"), &order, Duration::from_secs(60));
    match said.expect("an answer") {
        Outcome::Volumes(mut rows) => rows.pop(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_volume_is_new_until_something_was_written_to_it() {
    let lab = Lab::new();
    lab.order(0, &["create", "db", "--size", &SIZE.to_string()]);
    lab.order(0, &["migrate", "db", "--to", "b"]);
    lab.order(1, &["migrate", "db", "--to", "a"]);
    assert_eq!(lent(&lab, true).expect("a row").fresh, Some(true));
    let mut client = Client::connect(&lab.path(0, "lent")).expect("it is served");
    client.write(0, &[7; 512], true).expect("written");
    drop(client);
    // A list says what it was when it was lent, and looks at no disk: that may hang.
    assert_eq!(lab.status(0, "db").expect("listed")["fresh"], true);
    lent(&lab, false);
    assert_eq!(lent(&lab, true).expect("a row").fresh, Some(false));
}
