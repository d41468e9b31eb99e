//! A volume as the disk of an unmodified QEMU by vhost-user-blk. The guest, a program without an operating
//! system (`crates/vm/guest`), writes its pages there, spoils them, and reads them back.

mod support;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use support::{Lab, find, until};

/// A virtual machine, which ends on drop.
struct Machine {
    qemu: Child,
    ticks: Arc<AtomicU64>,
    reader: Option<JoinHandle<String>>,
}

impl Machine {
    fn start(lab: &Lab, guest: &Path, volume: &str) -> Self {
        let status = lab.status(0, volume).expect("it is there");
        let arguments = status["vhost_user"]["qemu"].as_str().expect("arguments");
        let arguments = arguments.replace("2G", "32M");
        let mut words: Vec<_> = arguments.split_whitespace().map(str::to_owned).collect();
        // The guest's driver uses the legacy interface.
        words.last_mut().expect("a device").push_str(",disable-modern=on");
        let mut qemu = Command::new("qemu-system-x86_64")
            .args([
                "-M",
                "q35",
                "-display",
                "none",
                "-nodefaults",
                "-serial",
                "stdio",
                "-kernel",
            ])
            .arg(guest)
            .args(words)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("QEMU starts");
        let ticks = Arc::new(AtomicU64::new(0));
        let (said, count) = (qemu.stdout.take().expect("a pipe"), ticks.clone());
        let reader = std::thread::spawn(move || {
            let mut bad = String::new();
            for line in BufReader::new(said).lines().map_while(Result::ok) {
                match line
                    .trim()
                    .strip_prefix("tick ")
                    .and_then(|number| number.parse().ok())
                {
                    Some(number) => count.store(number, Ordering::Relaxed),
                    None if line.contains("BAD") => bad = line,
                    None => {}
                }
            }
            bad
        });
        Self {
            qemu,
            ticks,
            reader: Some(reader),
        }
    }

    fn ticks(&self) -> u64 {
        self.ticks.load(Ordering::Relaxed)
    }

    /// Waits for many more requests.
    fn goes_on(&self, lab: &Lab) {
        let before = self.ticks();
        let end = std::time::Instant::now() + support::PATIENCE;
        while self.ticks() < before + 5 {
            assert!(
                std::time::Instant::now() < end,
                "the guest stands still\n{}",
                lab.logs()
            );
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }

    /// The guest's complaints, if any.
    fn end(mut self) -> String {
        self.qemu.kill().expect("it runs");
        self.qemu.wait().expect("it ends");
        self.reader
            .take()
            .expect("it reads")
            .join()
            .expect("it does not panic")
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // The machine may have ended already.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

/// The guest program; `None`, with the reason, if it cannot be built.
fn guest(folder: &Path) -> Option<std::path::PathBuf> {
    if find("qemu-system-x86_64").is_none() {
        eprintln!("skipped: there is no qemu-system-x86_64");
        return None;
    }
    let made = Command::new("make")
        .args(["-s", "-C", concat!(env!("CARGO_MANIFEST_DIR"), "/../vm/guest")])
        .arg(format!("OUT={}", folder.display()))
        .arg(folder.join("check"))
        .status()
        .expect("make runs");
    assert!(made.success(), "the guest is not built");
    Some(folder.join("check"))
}

#[test]
fn a_guest_goes_on_while_its_daemon_is_killed_and_what_it_writes_is_doubled_in_a_move() {
    let folder = tempfile::tempdir().expect("a folder");
    let Some(guest) = guest(folder.path()) else { return };
    let mut lab = Lab::new();
    lab.order(0, &["create", "db", "--size", "16M"]);
    let said = lab.order(0, &["attach", "db", "--vhost-user"]);
    let lines: Vec<_> = said.lines().collect();
    assert!(Path::new(lines[0]).exists(), "{said}");
    assert!(lines[1].contains("vhost-user-blk-pci"), "{said}");
    let machine = Machine::start(&lab, &guest, "db");
    machine.goes_on(&lab);
    assert_eq!(
        lab.status(0, "db").expect("it is there")["vhost_user"]["connected"],
        true
    );

    // Requests in flight are carried out by the next daemon, to which QEMU reconnects by itself.
    for _ in 0..3 {
        lab.kill(0);
        lab.start(0, None);
        machine.goes_on(&lab);
    }

    // The move takes longer than some ticks. Writes meanwhile go to both disks.
    let mut moving = lab
        .command(0, &["migrate", "db", "--to", "b", "--max-bandwidth", "2"])
        .spawn()
        .expect("it runs");
    machine.goes_on(&lab);
    assert!(
        moving.try_wait().expect("it is ours").is_none(),
        "it was too quick for the test"
    );
    assert!(moving.wait().expect("it ends").success(), "{}", lab.logs());
    assert_eq!(
        (lab.role(0, "db"), lab.role(1, "db")),
        ("moved".into(), "serving".into())
    );
    let bad = machine.end();
    // Requests that waited for the decision may have failed; no read returned wrong data.
    assert!(bad.is_empty() || bad.contains("BAD disk"), "{bad}");
    assert!(lab.data(0, "db") == lab.data(1, "db"), "the copies differ");
    assert!(
        lab.data(1, "db").iter().any(|&byte| byte != 0),
        "nothing was written"
    );
}

#[test]
fn one_machine_at_a_time_and_a_detach_ends_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let Some(guest) = guest(folder.path()) else { return };
    let lab = Lab::new();
    lab.order(0, &["create", "odd", "--size", "1000"]);
    assert!(
        !lab.try_order(0, &["attach", "odd", "--vhost-user"])
            .status
            .success()
    );
    lab.order(0, &["create", "db", "--size", "16M"]);
    lab.order(0, &["attach", "db", "--vhost-user"]);
    let first = Machine::start(&lab, &guest, "db");
    first.goes_on(&lab);
    let second = Machine::start(&lab, &guest, "db");
    first.goes_on(&lab);
    assert_eq!(second.ticks(), 0, "it has the disk of another");
    drop(second);
    lab.order(0, &["detach", "db"]);
    let status = lab.status(0, "db").expect("it is there");
    assert!(status["vhost_user"].is_null(), "{status}");
    drop(first);
    // The next machine is served like the first.
    lab.order(0, &["attach", "db", "--vhost-user"]);
    let third = Machine::start(&lab, &guest, "db");
    third.goes_on(&lab);
    assert_eq!(third.end(), "");
    until("nobody is connected", || {
        lab.status(0, "db").expect("it is there")["vhost_user"]["connected"] == false
    });
}
