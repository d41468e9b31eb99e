//! What is known of a machine on this host: a folder per machine.
//!
//! ```text
//! /run/verbatim-testbed/NAME/     (or $VERBATIM_TESTBED_DIR/NAME/)
//!     vm.json                     the process, the addresses
//!     console.log                 what the kernel wrote
//!     qemu.log                    what QEMU wrote
//!     port.N, port.N.lock         the command channels
//! ```

use crate::error::{Error, Result};
use crate::network::Address;
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};
use verbatim_lab::ProcessId;

const VARIABLE: &str = "VERBATIM_TESTBED_DIR";
const DEFAULT: &str = "/run/verbatim-testbed";
/// How much of a console an error shows, in lines.
const CONSOLE_LINES: usize = 15;

/// A machine, as another process can find it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct VmRecord {
    /// Its name.
    pub name: String,
    /// Its QEMU.
    pub process: ProcessId,
    /// The process that it ends with; none if it goes on until it is told to end.
    pub owner: Option<ProcessId>,
    /// The address of its `eth0`, if it has one.
    pub address: Option<Address>,
    /// The kernel's release.
    pub release: String,
    /// Its folder.
    #[serde(skip)]
    pub(crate) dir: PathBuf,
}

impl VmRecord {
    /// Whether its QEMU runs.
    pub fn is_alive(&self) -> bool {
        self.process.is_alive()
    }

    /// What its kernel has written to the console.
    pub fn console(&self) -> PathBuf {
        self.dir.join("console.log")
    }

    pub(crate) fn socket(&self, port: usize) -> PathBuf {
        self.dir.join(format!("port.{port}"))
    }

    pub(crate) fn lock(&self, port: usize) -> PathBuf {
        self.dir.join(format!("port.{port}.lock"))
    }

    /// The error that says so.
    pub(crate) fn ended(&self) -> Error {
        let (name, console) = (self.name.clone(), self.console_end());
        let text = fs::read(self.console()).unwrap_or_default();
        match ran_a_breakpoint(&String::from_utf8_lossy(&text)) {
            true => Error::Emulator { name, console },
            false => Error::Ended { name, console },
        }
    }

    /// The last lines of QEMU's log and of the console, for an error.
    pub(crate) fn console_end(&self) -> String {
        let logs = [self.dir.join("qemu.log"), self.console()];
        let text: String = logs
            .iter()
            .filter_map(|path| fs::read(path).ok())
            .map(|bytes| String::from_utf8_lossy(&bytes).replace('\r', ""))
            .collect();
        let lines: Vec<_> = text.lines().filter(|line| !line.trim().is_empty()).collect();
        lines[lines.len().saturating_sub(CONSOLE_LINES)..].join("\n")
    }

    pub(crate) fn save(&self) -> Result<()> {
        let path = self.dir.join("vm.json");
        let text = serde_json::to_vec_pretty(self).expect("a record is plain data");
        fs::write(&path, text).map_err(Error::file("write", path))
    }
}

/// The machines of this host.
#[derive(Clone, Debug)]
pub struct Names {
    root: PathBuf,
}

impl Default for Names {
    fn default() -> Self {
        Self {
            root: std::env::var_os(VARIABLE).map_or_else(|| PathBuf::from(DEFAULT), PathBuf::from),
        }
    }
}

impl Names {
    /// The machine of that name, which must be up.
    pub fn open(&self, name: &str) -> Result<VmRecord> {
        check_name(name)?;
        let gone = || Error::NoMachine {
            name: name.to_owned(),
        };
        let record = self.read(&self.root.join(name)).ok_or_else(gone)?;
        if record.is_alive() {
            Ok(record)
        } else {
            Err(record.ended())
        }
    }

    /// All machines, those that have ended too.
    pub fn list(&self) -> Vec<VmRecord> {
        let entries = fs::read_dir(&self.root).into_iter().flatten().flatten();
        let mut records: Vec<_> = entries.filter_map(|entry| self.read(&entry.path())).collect();
        records.sort_by(|a, b| a.name.cmp(&b.name));
        records
    }

    /// Ends a machine and forgets it; nothing happens if there is none.
    pub fn down(&self, name: &str) -> Result<bool> {
        check_name(name)?;
        let dir = self.root.join(name);
        let found = self.read(&dir);
        if let Some(record) = &found {
            record.process.kill(rustix::process::Signal::KILL)?;
            record.process.wait(std::time::Duration::from_secs(10))?;
        }
        remove(&dir)?;
        Ok(found.is_some())
    }

    /// An empty folder for a new machine. A machine of that name that has ended is forgotten, and so are those whose
    /// owner was killed, and which nobody else clears away.
    pub(crate) fn create(&self, name: &str) -> Result<PathBuf> {
        check_name(name)?;
        for record in self.list() {
            if !record.is_alive() && record.owner.is_some_and(|owner| !owner.is_alive()) {
                remove(&record.dir)?;
            }
        }
        let dir = self.root.join(name);
        if let Some(record) = self.read(&dir).filter(VmRecord::is_alive) {
            return Err(Error::Exists {
                name: record.name,
                pid: record.process.pid,
            });
        }
        remove(&dir)?;
        fs::create_dir_all(&self.root).map_err(Error::file("make", &self.root))?;
        // Not `create_dir_all`: of two that want this name at once, one fails.
        fs::create_dir(&dir).map_err(Error::file("make", &dir))?;
        Ok(dir)
    }

    fn read(&self, dir: &Path) -> Option<VmRecord> {
        let text = fs::read(dir.join("vm.json")).ok()?;
        let record: VmRecord = serde_json::from_slice(&text).ok()?;
        Some(VmRecord {
            dir: dir.to_owned(),
            ..record
        })
    }
}

/// Whether the first thing that the kernel on this console died of was a breakpoint that it had put into its own code, and taken out again. A
/// processor does not see such a breakpoint later; QEMU's translator before version 8.1 shows it to one of several, seldom.
fn ran_a_breakpoint(console: &str) -> bool {
    console.lines().any(|line| line.contains("int3: 0000 [#1]"))
}

/// Removes a machine's folder, if there is one.
pub(crate) fn remove(dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::file("remove", dir)(error)),
        _ => Ok(()),
    }
}

/// A name that may be part of a path, a host name and an option of QEMU.
fn check_name(name: &str) -> Result<()> {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
    if (1..=32).contains(&name.len()) && name.chars().all(plain) && !name.starts_with('-') {
        Ok(())
    } else {
        Err(Error::Config(format!(
            "{name:?} is no machine's name: use 1 to 32 letters, digits and '-'"
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_that_is_not_there_is_named_with_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let names = Names {
            root: dir.path().to_owned(),
        };
        let error = names.open("a").unwrap_err().to_string();
        assert!(error.contains("testbed up a"), "{error}");
        assert!(!names.down("a").unwrap());
        assert!(names.list().is_empty());
        for name in ["", "..", "a/b", "-a", "a,b"] {
            assert!(names.create(name).is_err(), "{name:?} was taken");
        }
    }

    #[test]
    fn a_dead_machine_makes_room_and_a_living_one_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let names = Names {
            root: dir.path().to_owned(),
        };
        let mut record = VmRecord {
            name: "a".to_owned(),
            process: ProcessId::of(std::process::id()).unwrap(),
            owner: None,
            address: None,
            release: "6.12".to_owned(),
            dir: names.create("a").unwrap(),
        };
        record.save().unwrap();
        assert!(names.open("a").is_ok());
        assert!(matches!(names.create("a"), Err(Error::Exists { .. })));
        // The same pid, but a process that started at another time.
        record.process.start_time += 1;
        record.save().unwrap();
        assert!(matches!(names.open("a"), Err(Error::Ended { .. })));
        let oops =
            "[    1.758991] Oops: int3: 0000 [#1] PREEMPT SMP NOPTI\r\n[    1.759011] CPU: 0 PID: 0\r\n";
        fs::write(record.console(), oops).unwrap();
        let error = names.open("a").unwrap_err();
        assert!(matches!(error, Error::Emulator { .. }), "{error}");
        fs::write(
            record.console(),
            oops.replace("int3: 0000", "general protection fault: 0000"),
        )
        .unwrap();
        assert!(matches!(names.open("a"), Err(Error::Ended { .. })));
        assert!(names.create("a").is_ok());
    }

    #[test]
    fn what_a_killed_owner_left_is_cleared_and_a_detached_machines_console_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let names = Names {
            root: dir.path().to_owned(),
        };
        let dead = ProcessId {
            start_time: u64::MAX,
            ..ProcessId::of(std::process::id()).unwrap()
        };
        for (name, owner) in [("owned", Some(dead)), ("detached", None)] {
            let record = VmRecord {
                name: name.to_owned(),
                process: dead,
                owner,
                address: None,
                release: "6.12".to_owned(),
                dir: names.create(name).unwrap(),
            };
            record.save().unwrap();
        }
        names.create("another").unwrap();
        let left: Vec<_> = names.list().into_iter().map(|record| record.name).collect();
        assert_eq!(left, ["detached"]);
    }
}
