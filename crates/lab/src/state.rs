//! A lab's directory on the machine: who its processes are, its configuration, its logs.
//!
//! ```text
//! /run/verbatim-lab/LAB/          (or $VERBATIM_LAB_DIR/LAB/)
//!     config.json                 what was asked for
//!     state.json                  the processes
//!     control.sock                requests to the supervisor
//!     supervisor.log
//!     hosts/HOST/tls/*.pem        the host's certificate, on its way into the host
//!     hosts/HOST/SERVICE.log
//!     hosts/HOST/state/           what the host's programs keep on its disk
//! ```

use crate::config::LabConfig;
use crate::error::{Error, Result};
use crate::process::ProcessId;
use crate::status::{HostStatus, LabStatus};
use rustix::fs::{FlockOperation, Mode, OFlags, flock, fstat, open};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, ErrorKind};
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Names another place for the labs' directories.
const ROOT_VARIABLE: &str = "VERBATIM_LAB_DIR";
const DEFAULT_ROOT: &str = "/run/verbatim-lab";

/// The processes of a lab.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct State {
    pub name: String,
    /// The program that takes the lab's roles.
    pub program: PathBuf,
    pub supervisor: ProcessId,
    pub hosts: Vec<HostState>,
}

/// A host of a lab.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct HostState {
    pub name: String,
    pub address: Ipv4Addr,
    /// Its pid 1, as the machine numbers it.
    pub process: ProcessId,
}

impl State {
    /// What can be said of a lab whose supervisor cannot be asked any more.
    pub fn status_when_dead(&self) -> LabStatus {
        let hosts = self.hosts.iter().map(|host| HostStatus {
            name: host.name.clone(),
            address: host.address,
            running: host.process.is_alive(),
            pid: host.process.pid,
            services: Vec::new(),
        });
        LabStatus {
            name: self.name.clone(),
            running: false,
            supervisor: self.supervisor.pid,
            hosts: hosts.collect(),
        }
    }
}

/// The directory of one lab.
#[derive(Clone, Debug)]
pub(crate) struct StateDir {
    path: PathBuf,
}

/// Held while a lab is brought up or taken down.
#[derive(Debug)]
pub(crate) struct Lock(#[expect(dead_code, reason = "the lock goes with the descriptor")] OwnedFd);

impl StateDir {
    /// The directory of lab `name`, which has been checked to be a name.
    pub fn of(name: &str) -> Self {
        Self {
            path: default_root().join(name),
        }
    }

    /// The directory that a role was given as its argument.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// The names of all labs.
    pub fn names() -> Result<Vec<String>> {
        let root = default_root();
        let entries = match fs::read_dir(&root) {
            Ok(entries) => entries,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(Error::io(format!("list {}", root.display()))(error)),
        };
        let mut names: Vec<String> = entries
            .filter_map(|entry| entry.ok())
            .filter(|entry| entry.path().join("state.json").exists())
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect();
        names.sort();
        Ok(names)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where this lab's directory lies among those of others.
    pub fn root(&self) -> PathBuf {
        self.path.parent().map(Path::to_owned).unwrap_or_default()
    }

    /// The lab's name.
    pub fn name(&self) -> &str {
        self.path
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default()
    }

    pub fn control_socket(&self) -> PathBuf {
        self.path.join("control.sock")
    }

    pub fn supervisor_log(&self) -> PathBuf {
        self.path.join("supervisor.log")
    }

    pub fn host(&self, host: &str) -> PathBuf {
        self.path.join("hosts").join(host)
    }

    /// Makes the directory if need be, and waits for its lock.
    pub fn create_and_lock(&self) -> Result<Lock> {
        let what = || format!("lock {}", self.path.display());
        loop {
            fs::DirBuilder::new()
                .recursive(true)
                .mode(0o755)
                .create(&self.path)
                .map_err(Error::io(format!("make {}", self.path.display())))?;
            let dir = match open(&self.path, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) {
                Ok(dir) => dir,
                Err(rustix::io::Errno::NOENT) => continue,
                Err(errno) => return Err(Error::io(what())(errno)),
            };
            flock(&dir, FlockOperation::LockExclusive).map_err(Error::io(what()))?;
            // Whoever held the lock before may have removed the directory: then this lock is worth nothing.
            let locked = fstat(&dir).map_err(Error::io(what()))?;
            match fs::metadata(&self.path) {
                Ok(now) if now.ino() == locked.st_ino && now.dev() == locked.st_dev => return Ok(Lock(dir)),
                _ => {}
            }
        }
    }

    /// Removes everything in the directory.
    pub fn empty(&self) -> Result<()> {
        let what = || format!("clear {}", self.path.display());
        for entry in fs::read_dir(&self.path).map_err(Error::io(what()))? {
            let entry = entry.map_err(Error::io(what()))?;
            let kind = entry.file_type().map_err(Error::io(what()))?;
            let removed = if kind.is_dir() {
                fs::remove_dir_all(entry.path())
            } else {
                fs::remove_file(entry.path())
            };
            removed.map_err(Error::io(what()))?;
        }
        Ok(())
    }

    /// Removes the directory, and the labs' common one if it was the last.
    pub fn remove(&self) -> Result<()> {
        self.empty()?;
        fs::remove_dir(&self.path).map_err(Error::io(format!("remove {}", self.path.display())))?;
        match fs::remove_dir(self.root()) {
            Err(error) if ![ErrorKind::DirectoryNotEmpty, ErrorKind::NotFound].contains(&error.kind()) => {
                Err(Error::io(format!("remove {}", self.root().display()))(error))
            }
            _ => Ok(()),
        }
    }

    /// The lab's processes; `None` if it was never started.
    pub fn load(&self) -> Result<Option<State>> {
        match fs::read(self.path.join("state.json")) {
            Ok(text) => parse(&text, &self.path.join("state.json")).map(Some),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::io(format!("read the state of lab {}", self.name()))(error)),
        }
    }

    pub fn save(&self, state: &State) -> Result<()> {
        self.write("state.json", state)
    }

    pub fn load_config(&self) -> Result<LabConfig> {
        let path = self.path.join("config.json");
        let text = fs::read(&path).map_err(Error::io(format!("read {}", path.display())))?;
        parse(&text, &path)
    }

    pub fn save_config(&self, config: &LabConfig) -> Result<()> {
        self.write("config.json", config)
    }

    /// In one step, so that a reader sees either the old file or the new one.
    fn write(&self, name: &str, value: &impl Serialize) -> Result<()> {
        let path = self.path.join(name);
        let fresh = self.path.join(format!("{name}.new"));
        serde_json::to_vec_pretty(value)
            .map_err(io::Error::from)
            .and_then(|text| fs::write(&fresh, text))
            .and_then(|()| fs::rename(&fresh, &path))
            .map_err(Error::io(format!("write {}", path.display())))
    }

    /// The last lines of all logs, for a person who wants to know why a lab did not come up.
    pub fn log_tails(&self, config: &LabConfig) -> String {
        let services = config.hosts.iter().flat_map(|host| {
            let dir = self.host(&host.name);
            config
                .services_of(host)
                .iter()
                .map(move |service| dir.join(format!("{}.log", service.name)))
        });
        let mut text = String::new();
        for log in std::iter::once(self.supervisor_log()).chain(services) {
            let content = fs::read(&log).unwrap_or_default();
            let content = String::from_utf8_lossy(&content);
            let lines: Vec<&str> = content.lines().collect();
            if !lines.is_empty() {
                let tail = &lines[lines.len().saturating_sub(12)..];
                text.push_str(&format!("  {}:\n    {}\n", log.display(), tail.join("\n    ")));
            }
        }
        if text.is_empty() {
            format!("  (nothing in {})", self.path.display())
        } else {
            text
        }
    }
}

fn default_root() -> PathBuf {
    std::env::var_os(ROOT_VARIABLE)
        .filter(|dir| !dir.is_empty())
        .map_or(DEFAULT_ROOT.into(), PathBuf::from)
}

fn parse<T: DeserializeOwned>(text: &[u8], path: &Path) -> Result<T> {
    serde_json::from_slice(text).map_err(|error| Error::io(format!("read {}", path.display()))(error))
}
