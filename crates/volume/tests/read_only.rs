//! A suspect copy in a file whose file system is read-only: clients read it, it is rescued, and it is accepted
//! when it can be written again.

mod support;

use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::FlockOperation;
use support::client::Client;
use support::devices::run;
use support::files::Files;
use support::orders::{MIB, noise, refused, text};
use support::pinned::Pinned;
use support::{Lab, until};

/// Size of the volume.
const SIZE: u64 = 32 * MIB;

/// Bytes written to it.
const WRITTEN: u64 = 24 * MIB;

fn connect(lab: &Lab, host: usize) -> Client {
    let socket = lab.socket(host, "db");
    let mut client = None;
    until("it is served", || {
        client = Client::connect(&socket).ok();
        client.is_some()
    });
    client.expect("it is connected")
}

fn read(client: &mut Client) -> Vec<u8> {
    let mut data = vec![0; WRITTEN as usize];
    for (offset, part) in (0..).step_by(MIB as usize).zip(data.chunks_mut(MIB as usize)) {
        client.read(offset, part).expect("it is read");
    }
    data
}

fn write(client: &mut Client, data: &[u8]) {
    for (offset, part) in (0..).step_by(MIB as usize).zip(data.chunks(MIB as usize)) {
        client
            .write(offset, part, false)
            .expect("the page cache takes it");
    }
}

fn is_suspect(lab: &Lab, host: usize) -> bool {
    let status = lab.status(host, "db").expect("it is listed");
    status["suspect"].as_bool().expect("it says so")
}

fn errno(result: std::io::Result<()>) -> Option<i32> {
    result.err().and_then(|error| error.raw_os_error())
}

/// A folder in which a file system is mounted once more: it can be read-only here alone.
struct Again(PathBuf);

impl Again {
    fn mount(file_system: &Path, at: PathBuf) -> Self {
        std::fs::create_dir_all(&at).expect("a folder");
        run(Command::new("mount").arg("--bind").arg(file_system).arg(&at));
        Self(at)
    }

    fn be_read_only(&self, is_read_only: bool) {
        let how = if is_read_only {
            "remount,bind,ro"
        } else {
            "remount,bind,rw"
        };
        run(Command::new("mount").args(["-o", how]).arg(&self.0));
    }
}

impl Drop for Again {
    fn drop(&mut self) {
        run(Command::new("umount").arg("--lazy").arg(&self.0));
    }
}

/// The first host has the volume in a file, and a flush of it has failed. Its file system was read-only when
/// the daemon was started again.
struct Story {
    data: Vec<u8>,
    /// Its file, where that can be written.
    file: PathBuf,
    // Fields in the order of their drop.
    _pinned: Pinned,
    seen: Again,
    _files: Files,
    lab: Lab,
}

impl Story {
    /// The data are outside of the state folder, or both are on the file system.
    fn begin(is_elsewhere: bool) -> Option<Self> {
        let mut lab = Lab::without_daemons();
        let files = Files::new(&lab, 2 * SIZE)?;
        let folder = if is_elsewhere { "seen" } else { "state" };
        let seen = Again::mount(&files.mounted, lab.path(0, folder));
        lab.start(0, None);
        lab.start(1, None);
        let (size, path) = (SIZE.to_string(), text(&seen.0.join("db.img")));
        let mut create = vec!["create", "db", "--size", &size, "--preallocate"];
        let name = match is_elsewhere {
            true => {
                create.extend(["--data", &path]);
                "db.img"
            }
            false => "db/data",
        };
        lab.order(0, &create);
        lab.order(0, &["attach", "db"]);
        files.fill();
        let file = files.mounted.join(name);
        let data = noise(5, WRITTEN);
        let mut client = connect(&lab, 0);
        write(&mut client, &data);
        let pinned = Pinned::of(&file, WRITTEN as usize);
        assert!(client.flush().is_err(), "there is no room");
        drop(client);
        lab.kill(0);
        files.make_room();
        seen.be_read_only(true);
        lab.start(0, None);
        Some(Self {
            data,
            file,
            _pinned: pinned,
            seen,
            _files: files,
            lab,
        })
    }

    /// Its clients read it, and do nothing else.
    fn is_only_read(&self) -> Client {
        assert!(is_suspect(&self.lab, 0), "{}", self.lab.logs());
        let mut client = connect(&self.lab, 0);
        assert_eq!(errno(client.flush()), Some(libc::EIO));
        assert_eq!(errno(client.write(0, &[1; 512], false)), Some(libc::EIO));
        assert_eq!(errno(client.zero(0, 4096)), Some(libc::EIO));
        assert_eq!(errno(client.trim(0, 4096)), Some(libc::EIO));
        assert!(read(&mut client) == self.data, "the page cache was dropped");
        client
    }

    fn waits(&self) -> String {
        let status = self.lab.status(0, "db").expect("it is listed");
        status["waits"].as_str().unwrap_or_default().to_owned()
    }
}

#[test]
fn a_suspect_copy_in_a_file_is_read_and_rescued_while_its_file_system_is_read_only() {
    let Some(story) = Story::begin(true) else {
        return;
    };
    drop(story.is_only_read());
    let lab = &story.lab;
    lab.order(0, &["detach", "db"]);
    lab.order(0, &["attach", "db"]);
    drop(story.is_only_read());
    let said = refused(lab, 0, &["resize", "db", "--size", "64M"]);
    assert!(said.contains("cannot grow"), "{said}");
    lab.order(0, &["migrate", "db", "--to", "b", "--rescue"]);
    assert_eq!(
        (lab.role(0, "db"), lab.role(1, "db")),
        ("moved".into(), "serving".into())
    );
    assert!(!is_suspect(lab, 1));
    assert!(
        read(&mut connect(lab, 1)) == story.data,
        "not all of it was saved"
    );
    // The old copy is written again when that is possible.
    let said = refused(lab, 1, &["migrate", "db", "--to", "a"]);
    assert!(said.contains("its file system is read-only"), "{said}");
    story.seen.be_read_only(false);
    lab.order(1, &["migrate", "db", "--to", "a"]);
    assert!(!is_suspect(lab, 0));
    let mut client = connect(lab, 0);
    assert!(read(&mut client) == story.data, "it differs");
    client.write(0, &[1; 512], true).expect("written");
}

#[test]
fn a_suspect_copy_in_a_file_is_accepted_when_its_file_system_is_writable_again() {
    let Some(mut story) = Story::begin(true) else {
        return;
    };
    let mut client = story.is_only_read();
    let said = refused(&story.lab, 0, &["accept", "db"]);
    for word in ["stays suspect", "read-only", "remount,rw", "--rescue"] {
        assert!(said.contains(word), "{said}");
    }
    // Nobody else gets the file, by the place where it can be written.
    let other = std::fs::File::options()
        .read(true)
        .write(true)
        .open(&story.file)
        .expect("it is writable there");
    let lock = |how| rustix::fs::fcntl_lock(&other, how);
    lock(FlockOperation::NonBlockingLockExclusive).expect_err("the daemon has it");
    story.seen.be_read_only(false);
    // What is served is not what would be found after a restart.
    let aside = story.file.with_extension("aside");
    std::fs::rename(&story.file, &aside).expect("renamed");
    std::fs::write(&story.file, "another file").expect("written");
    let said = refused(&story.lab, 0, &["accept", "db"]);
    assert!(
        said.contains("stays suspect") && said.contains("another file"),
        "{said}"
    );
    assert!(is_suspect(&story.lab, 0));
    std::fs::rename(&aside, &story.file).expect("renamed");
    story.lab.order(0, &["accept", "db"]);
    assert!(!is_suspect(&story.lab, 0));
    client.write(0, &[1; 512], true).expect("written");
    story.data[..512].fill(1);
    assert!(read(&mut client) == story.data, "part of it is gone");
    lock(FlockOperation::NonBlockingLockExclusive).expect_err("the daemon has it still");
    drop(client);

    // A sound copy is served when it can be written, and before that it is waited for.
    story.lab.kill(0);
    story.seen.be_read_only(true);
    story.lab.start(0, None);
    assert!(
        story.waits().contains("its file system is read-only"),
        "{}",
        story.waits()
    );
    assert!(
        Client::connect(&story.lab.socket(0, "db")).is_err(),
        "it is served"
    );
    story.seen.be_read_only(false);
    assert!(read(&mut connect(&story.lab, 0)) == story.data, "it differs");
}

#[test]
fn a_suspect_copy_that_others_have_open_is_not_read_beside_them() {
    let Some(mut story) = Story::begin(true) else {
        return;
    };
    story.lab.kill(0);
    let other = std::fs::File::open(&story.file).expect("it is there");
    rustix::fs::fcntl_lock(&other, FlockOperation::NonBlockingLockShared).expect("it is free");
    story.lab.start(0, None);
    assert!(
        story.waits().contains("in use by somebody else"),
        "{}",
        story.waits()
    );
    drop(other);
    drop(story.is_only_read());
}

/// No decision can be written down then, and so it is read and does not move.
#[test]
fn a_suspect_copy_in_the_state_folder_is_read_while_that_is_read_only() {
    let Some(story) = Story::begin(false) else {
        return;
    };
    let mut client = story.is_only_read();
    let lab = &story.lab;
    let said = refused(lab, 0, &["migrate", "db", "--to", "b", "--rescue"]);
    assert!(said.contains("Read-only file system"), "{said}");
    let said = refused(lab, 0, &["accept", "db"]);
    assert!(said.contains("remount,rw"), "{said}");
    assert!(read(&mut client) == story.data, "it differs");
    story.seen.be_read_only(false);
    lab.order(0, &["migrate", "db", "--to", "b", "--rescue"]);
    assert!(
        read(&mut connect(lab, 1)) == story.data,
        "not all of it was saved"
    );
}
