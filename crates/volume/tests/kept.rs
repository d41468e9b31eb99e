//! Block devices outlive their daemon, at a restart and at a kill.

mod support;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use support::block::{Mounted, backing, make_file_system, obstacle};
use support::devices::run;
use support::{Lab, find, until};

const BLOCK: usize = 4096;

/// Whether a test cannot run; reports it.
fn is_skipped() -> bool {
    if let Some(obstacle) = obstacle() {
        eprintln!("skipped: {obstacle}");
        return true;
    }
    false
}

/// A host with a volume that is a block device.
fn host() -> (Lab, String) {
    let mut lab = Lab::without_daemons();
    lab.start(0, None);
    lab.order(0, &["create", "db", "--size", "64M"]);
    let device = lab.order(0, &["attach", "db", "--device"]);
    (lab, device)
}

/// A block whose address is aligned for a device.
struct Page {
    bytes: Vec<u8>,
    start: usize,
}

impl Page {
    fn new() -> Self {
        let bytes = vec![0; 2 * BLOCK];
        let start = bytes.as_ptr().align_offset(BLOCK);
        Self { bytes, start }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + BLOCK]
    }
}

/// Opens a device past the page cache.
fn direct(device: &str) -> File {
    let mut open = File::options();
    open.read(true).write(true).custom_flags(libc::O_DIRECT);
    open.open(device).expect("it is open")
}

/// A program that writes until it is told to end, or until it gets an error.
struct Writer<T> {
    count: Arc<AtomicU64>,
    is_over: Arc<AtomicBool>,
    thread: JoinHandle<Result<T, (u64, io::Error)>>,
}

impl<T: Send + 'static> Writer<T> {
    /// `write` gets numbers from 0 on.
    fn start(mut done: T, mut write: impl FnMut(&mut T, u64) -> io::Result<()> + Send + 'static) -> Self {
        let (count, is_over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (counted, ends) = (count.clone(), is_over.clone());
        let thread = std::thread::spawn(move || {
            while !ends.load(Ordering::SeqCst) {
                let number = counted.load(Ordering::SeqCst);
                write(&mut done, number).map_err(|error| (number, error))?;
                counted.store(number + 1, Ordering::SeqCst);
            }
            Ok(done)
        });
        Self {
            count,
            is_over,
            thread,
        }
    }

    /// Waits for this many more writes.
    fn writes(&self, more: u64) {
        let before = self.count.load(Ordering::SeqCst);
        until("a program writes on", || {
            self.thread.is_finished() || self.count.load(Ordering::SeqCst) >= before + more
        });
    }

    /// The result, and the number of writes.
    fn ends(self) -> Result<(T, u64), (u64, io::Error)> {
        self.is_over.store(true, Ordering::SeqCst);
        let done = self.thread.join().expect("it does not panic")?;
        Ok((done, self.count.load(Ordering::SeqCst)))
    }
}

/// Writes blocks with their numbers past the page cache, and makes each durable.
fn blocks(device: &str, blocks: u64) -> Writer<()> {
    let (file, mut page) = (direct(device), Page::new());
    Writer::start((), move |(), number| {
        page.bytes().copy_from_slice(&content(number));
        file.write_all_at(page.bytes(), number % blocks * BLOCK as u64)?;
        file.sync_data()
    })
}

fn content(number: u64) -> Vec<u8> {
    number.to_ne_bytes().repeat(BLOCK / 8)
}

/// The numbers before these words in the log, in order.
fn said(log: &str, words: &str) -> Vec<u64> {
    let before = |line: &str| {
        let (before, _) = line.split_once(words)?;
        before.trim_end().rsplit(' ').next()?.parse().ok()
    };
    log.lines().filter_map(before).collect()
}

#[test]
fn a_restart_is_not_noticed_on_a_device_and_each_request_is_carried_out_once() {
    if is_skipped() {
        return;
    }
    let (mut lab, device) = host();
    let writer = blocks(&device, 64);
    for _ in 0..4 {
        writer.writes(100);
        lab.end(0);
        lab.start(0, None);
    }
    writer.writes(100);
    let ((), written) = writer
        .ends()
        .unwrap_or_else(|error| panic!("{error:?}\n{}", lab.logs()));
    let mut page = Page::new();
    let file = direct(&device);
    for number in written - 64..written {
        file.read_exact_at(page.bytes(), number % 64 * BLOCK as u64)
            .expect("read");
        assert_eq!(page.bytes(), content(number), "{number}");
    }
    drop(file);
    lab.end(0);
    let log = lab.log(0);
    assert_eq!(said(&log, "changes and").iter().sum::<u64>(), written, "{log}");
    assert!(said(&log, "flushes,").iter().sum::<u64>() >= written, "{log}");
    assert_eq!(said(&log, "requests came again"), [0; 4], "{log}");
    assert_eq!(said(&log, "have no answer"), [0; 5], "{log}");
}

#[test]
fn a_file_system_whose_daemon_is_killed_twenty_times_has_all_that_was_synced() {
    if is_skipped() {
        return;
    }
    let (mut lab, device) = host();
    make_file_system(&device);
    let mounted = Mounted::new(&device);
    let folder = mounted.path().to_owned();
    let writer = Writer::start(BTreeMap::new(), move |synced, number| {
        let path = folder.join((number % 40).to_string());
        let temporary = folder.join("new");
        let text = content(number).repeat(4);
        let mut file = File::create(&temporary)?;
        file.write_all(&text)?;
        file.sync_all()?;
        std::fs::rename(&temporary, &path)?;
        File::open(&folder)?.sync_all()?;
        synced.insert(path, text);
        Ok(())
    });
    for _ in 0..20 {
        // A random moment.
        std::thread::sleep(Duration::from_micros(rand::random::<u64>() % 60_000));
        lab.kill(0);
        lab.start(0, None);
        assert_eq!(
            lab.status(0, "db").expect("it is there")["device"],
            device.as_str()
        );
        writer.writes(2);
    }
    let synced = match writer.ends() {
        Ok((synced, _)) => synced,
        Err(error) => panic!("{error:?}\n{}", lab.logs()),
    };
    for (path, text) in &synced {
        assert!(std::fs::read(path).expect("read") == *text, "{}", path.display());
    }
    drop(mounted);
    run(Command::new("e2fsck").args(["-f", "-n", &device]));
    let mounted = Mounted::new(&device);
    let new_path = |path: &PathBuf| mounted.path().join(path.file_name().expect("a name"));
    for (path, text) in &synced {
        assert!(
            std::fs::read(new_path(path)).expect("read") == *text,
            "{}",
            path.display()
        );
    }
    drop(mounted);
    let again = said(&lab.log(0), "requests came again");
    assert_eq!(again.len(), 20);
    assert!(again.iter().sum::<u64>() > 0, "none was under way: {again:?}");
}

/// The keepers that this process has started.
fn keepers_of(daemon: u32) -> Vec<Pid> {
    let mut keepers = Vec::new();
    for entry in std::fs::read_dir("/proc").expect("it is there").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Ok(pid) = name.parse::<i32>() else { continue };
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let status = std::fs::read_to_string(entry.path().join("status")).unwrap_or_default();
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"));
        let is_its = parent.is_some_and(|parent| parent.trim() == daemon.to_string());
        if is_its && line.starts_with(verbatim_keeper::PROGRAM_NAME.as_bytes()) {
            keepers.extend(Pid::from_raw(pid));
        }
    }
    keepers
}

#[test]
fn a_device_whose_keeper_is_killed_with_the_daemon_gives_errors_and_is_told_of() {
    if is_skipped() {
        return;
    }
    let (mut lab, device) = host();
    make_file_system(&device);
    let mounted = Mounted::new(&device);
    std::fs::write(mounted.file(), b"before").expect("written");
    File::open(mounted.file())
        .and_then(|file| file.sync_all())
        .expect("synced");

    // A killed keeper is replaced by another one.
    let [first] = keepers_of(lab.process(0))[..] else {
        panic!("not one keeper\n{}", lab.logs())
    };
    kill_process(first, Signal::KILL).expect("it is there");
    until("there is another keeper", || {
        lab.log(0).contains("there is another one")
    });
    assert!(!keepers_of(lab.process(0)).contains(&first));
    lab.kill(0);
    lab.start(0, None);
    assert_eq!(lab.order(0, &["attach", "db", "--device"]), device);
    std::fs::write(mounted.path().join("second"), b"after").expect("written");
    File::open(mounted.path().join("second"))
        .and_then(|file| file.sync_all())
        .expect("synced");

    // Keeper and daemon are killed: the device is lost.
    let path = lab.keepers(0).remove(0);
    let keeper = keeper_at(&path);
    lab.signal(0, Signal::STOP);
    kill_process(keeper, Signal::KILL).expect("it is there");
    lab.kill(0);
    let failed = std::fs::write(mounted.path().join("third"), b"late")
        .and_then(|()| File::open(mounted.path().join("third"))?.sync_all());
    assert!(failed.is_err(), "nobody has served it");
    lab.start(0, None);
    let status = lab.status(0, "db").expect("it is there");
    let trouble = status["trouble"].as_str().unwrap_or_default();
    assert!(trouble.contains(&format!("{device} is lost")), "{status}");
    assert!(status["device"].is_null(), "{status}");
    drop(mounted);
    until("the lost device goes", || backing(&device).is_none());
    let device = lab.order(0, &["attach", "db", "--device"]);
    assert!(lab.status(0, "db").expect("it is there")["trouble"].is_null());
    let mounted = Mounted::new(&device);
    assert_eq!(std::fs::read(mounted.file()).expect("read"), b"before");
    assert_eq!(
        std::fs::read(mounted.path().join("second")).expect("read"),
        b"after"
    );
}

/// The process that listens at a path.
fn keeper_at(path: &Path) -> Pid {
    let table = std::fs::read_to_string("/proc/net/unix").expect("it is there");
    let ending = path.to_string_lossy();
    let inode = table
        .lines()
        .filter(|line| line.ends_with(&*ending))
        .find_map(|line| {
            let fields: Vec<_> = line.split_whitespace().collect();
            // The socket listens (`__SO_ACCEPTCON`).
            (fields[3] == "00010000").then(|| fields[6].to_owned())
        });
    let inode = inode.expect("it listens");
    let entries = std::fs::read_dir("/proc").expect("it is there").flatten();
    let is_it = |entry: &std::fs::DirEntry| {
        let link = std::fs::read_link(entry.path().join("fd/0"));
        link.is_ok_and(|link| link.to_string_lossy() == format!("socket:[{inode}]"))
    };
    let mut entries = entries.filter(is_it);
    let name = entries.next().expect("somebody has it").file_name();
    Pid::from_raw(name.to_string_lossy().parse().expect("a process")).expect("a process")
}

#[test]
fn a_daemon_that_ends_for_good_leaves_nothing() {
    if is_skipped() {
        return;
    }
    let (mut lab, device) = host();
    make_file_system(&device);
    {
        let mounted = Mounted::new(&device);
        std::fs::write(mounted.file(), b"kept").expect("written");
        let refused = lab.try_order(0, &["stop"]);
        let why = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(
            !refused.status.success() && why.contains("in use as /dev/loop"),
            "{why}"
        );
        std::fs::write(mounted.path().join("after"), b"it goes on").expect("written");
    }
    lab.order(0, &["stop"]);
    lab.ends(0);
    assert!(backing(&device).is_none() && lab.keepers(0).is_empty());

    // No daemon runs, and a device waits.
    lab.start(0, None);
    let device = lab.order(0, &["attach", "db", "--device"]);
    let mounted = Mounted::new(&device);
    assert_eq!(std::fs::read(mounted.file()).expect("read"), b"kept");
    lab.kill(0);
    let refused = lab.try_order(0, &["stop"]);
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        !refused.status.success() && why.contains("in use as /dev/loop"),
        "{why}"
    );
    lab.order(0, &["stop", "--force"]);
    assert!(lab.keepers(0).is_empty());
    drop(mounted);
    until("the device goes", || backing(&device).is_none());
}

#[test]
fn a_device_of_a_volume_that_is_gone_is_let_go_by_the_next_daemon() {
    if is_skipped() {
        return;
    }
    let (mut lab, device) = host();
    lab.kill(0);
    assert!(backing(&device).is_some());
    std::fs::rename(lab.path(0, "state/db"), lab.path(0, "elsewhere")).expect("moved");
    lab.start(0, None);
    until("the device goes", || backing(&device).is_none());
    let log = lab.log(0);
    assert!(
        log.contains("there is no such volume any more") && log.contains(&device),
        "{log}"
    );
    assert!(lab.keepers(0).is_empty());
    lab.order(0, &["create", "db", "--size", "1M"]);
}

#[test]
fn a_device_in_use_waits_while_the_folder_of_its_volume_is_not_there() {
    if is_skipped() {
        return;
    }
    let (mut lab, device) = host();
    make_file_system(&device);
    let mounted = Mounted::new(&device);
    std::fs::write(mounted.file(), b"kept").expect("written");
    lab.kill(0);
    let (place, elsewhere) = (lab.path(0, "state/db"), lab.path(0, "elsewhere"));
    std::fs::rename(&place, &elsewhere).expect("moved");
    lab.start(0, None);
    let log = lab.log(0);
    assert!(
        log.contains("there is no such volume any more") && log.contains("put the volume's folder back"),
        "{log}"
    );
    assert!(backing(&device).is_some());
    lab.kill(0);
    std::fs::rename(&elsewhere, &place).expect("moved");
    lab.start(0, None);
    assert_eq!(std::fs::read(mounted.file()).expect("read"), b"kept");
    std::fs::write(mounted.path().join("after"), b"it goes on").expect("written");
}

#[test]
fn a_kernel_that_sends_nothing_again_fails_what_was_under_way_and_nothing_else() {
    if is_skipped() {
        return;
    }
    let mut lab = Lab::without_daemons();
    lab.environment = vec![("VERBATIM_VOLUME_NO_RESEND", "1")];
    lab.start(0, None);
    lab.order(0, &["create", "db", "--size", "64M"]);
    let device = lab.order(0, &["attach", "db", "--device"]);
    let writer = blocks(&device, 64);
    for _ in 0..4 {
        writer.writes(50);
        lab.end(0);
        lab.start(0, None);
    }
    writer.writes(50);
    let (_, written) = writer
        .ends()
        .unwrap_or_else(|error| panic!("{error:?}\n{}", lab.logs()));
    lab.end(0);
    let log = lab.log(0);
    assert_eq!(said(&log, "changes and").iter().sum::<u64>(), written, "{log}");
    lab.start(0, None);

    let mut errors = 0;
    for _ in 0..100 {
        let writer = blocks(&device, 64);
        writer.writes(1);
        lab.kill(0);
        lab.start(0, None);
        // The writer does not wait forever.
        match writer.ends() {
            Ok(_) => {}
            Err((_, error)) => {
                assert_eq!(error.raw_os_error(), Some(libc::EIO), "{error}");
                errors += 1;
                break;
            }
        }
    }
    assert_eq!(errors, 1, "none was under way");
    let writer = blocks(&device, 64);
    writer.writes(10);
    assert!(writer.ends().is_ok(), "{}", lab.logs());
}

fn length(device: &str) -> u64 {
    use std::io::Seek;
    let mut file = File::open(device).expect("it is there");
    file.seek(io::SeekFrom::End(0)).expect("it has a length")
}

/// Grows the file system to the size of its device.
fn fills(device: &str) {
    run(Command::new("e2fsck").args(["-f", "-p", device]));
    run(Command::new("resize2fs").arg(device));
}

#[test]
fn a_device_grows_with_its_volume_also_where_its_daemon_has_not_told_it() {
    if is_skipped() || find("resize2fs").is_none() {
        return;
    }
    let (mut lab, device) = host();
    make_file_system(&device);
    let mounted = Mounted::new(&device);
    std::fs::write(mounted.file(), b"kept").expect("written");
    let odd = lab.try_order(0, &["resize", "db", "--size", "100000001"]);
    let why = String::from_utf8_lossy(&odd.stderr).into_owned();
    assert!(!odd.status.success() && why.contains("whole sectors"), "{why}");
    // The volume may be busy at the moment.
    until("it grows", || {
        lab.try_order(0, &["resize", "db", "--size", "96M"])
            .status
            .success()
    });
    assert_eq!(length(&device), 96 << 20);
    assert_eq!(std::fs::read(mounted.file()).expect("read"), b"kept");
    // A container may lack the right to do this while the file system is mounted.
    drop(mounted);
    fills(&device);
    let mounted = Mounted::new(&device);
    std::fs::write(mounted.path().join("large"), vec![7; 70 << 20]).expect("there is room");
    rustix::fs::syncfs(File::open(mounted.path()).expect("it is open")).expect("written");

    // The daemon is killed when the volume has grown, before it has told anyone.
    lab.end(0);
    lab.start(0, Some("Grown"));
    until("it grows", || {
        lab.try_order(0, &["resize", "db", "--size", "128M"]);
        lab.has_ended(0)
    });
    lab.ends(0);
    assert_eq!(length(&device), 96 << 20);
    lab.start(0, None);
    until("the device has the volume's length", || {
        length(&device) == 128 << 20
    });
    drop(mounted);
    fills(&device);
    let mounted = Mounted::new(&device);
    assert_eq!(std::fs::read(mounted.file()).expect("read"), b"kept");
    drop(mounted);
    run(Command::new("e2fsck").args(["-f", "-n", &device]));
}

/// The kernel asks the daemon how long its device is. Whoever waits for that answer cannot be killed meanwhile, and must not be of the daemon.
#[test]
fn a_daemon_that_is_killed_while_its_own_device_is_asked_for_is_followed_by_another_one() {
    if is_skipped() {
        return;
    }
    let mut lab = Lab::without_daemons();
    lab.start(0, Some("Attributes"));
    lab.order(0, &["create", "db", "--size", "64M"]);
    let made = lab.try_order(0, &["attach", "db", "--device"]);
    assert!(!made.status.success(), "it was not killed");
    lab.ends(0);
    lab.start(0, None);
    let device = lab.order(0, &["attach", "db", "--device"]);
    let writer = blocks(&device, 64);
    writer.writes(10);
    // The same where it has a keeper, so that the connection outlives the daemon.
    lab.end(0);
    lab.start(0, Some("Attributes"));
    writer.writes(10);
    until("it grows", || {
        lab.try_order(0, &["resize", "db", "--size", "96M"]);
        lab.has_ended(0)
    });
    lab.ends(0);
    lab.start(0, None);
    until("the device has the volume's length", || {
        length(&device) == 96 << 20
    });
    writer.writes(10);
    writer
        .ends()
        .unwrap_or_else(|error| panic!("{error:?}\n{}", lab.logs()));
}
