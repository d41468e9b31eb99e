//! Two hosts on the loopback interface, each with a daemon; and a third one, if it is started.

#![allow(dead_code, reason = "each test file uses a part")]

pub mod block;
pub mod client;
pub mod devices;
pub mod files;
pub mod frozen;
pub mod orders;
#[allow(unsafe_code, reason = "pages are locked")]
pub mod pinned;
pub mod rnic;
pub mod small;
#[allow(unsafe_code, reason = "no library asks these of a socket")]
pub mod sockets;
pub mod tenant;
pub mod tls;

use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit};
use serde_json::Value;
use verbatim_certificates::Authority;

/// Limit for anything on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

const PROGRAM: &str = env!("CARGO_BIN_EXE_verbatim-volume-with-faults");

/// The hosts. Their daemons end on drop.
pub struct Lab {
    folder: tempfile::TempDir,
    port: u16,
    daemons: [Option<Child>; 3],
    /// Options of daemons that are started from now on.
    pub options: Vec<String>,
    pub damage: Option<u64>,
    /// Limit of a daemon's open files, if there is one.
    pub files: Option<u64>,
    /// Environment of daemons that are started from now on.
    pub environment: Vec<(&'static str, &'static str)>,
    pub authority: Authority,
    rnics: [Option<rnic::Rnic>; 2],
}

/// The hosts' names; a host is its index.
pub const NAMES: [&str; 3] = ["a", "b", "c"];

impl Lab {
    /// The first two daemons run.
    pub fn new() -> Self {
        let mut lab = Self::without_daemons();
        lab.start(0, None);
        lab.start(1, None);
        lab
    }

    /// No daemon runs yet.
    pub fn without_daemons() -> Self {
        static LABS: AtomicU8 = AtomicU8::new(1);
        let number = LABS.fetch_add(1, Ordering::Relaxed);
        // Addresses of this test alone, and a port that is free on the first.
        let pid = std::process::id().to_le_bytes();
        let address = |host: u8| {
            Ipv4Addr::new(
                127,
                64 | (pid[1] & 63),
                pid[0],
                number.wrapping_mul(3).wrapping_add(host),
            )
        };
        let port = TcpListener::bind((address(0), 0))
            .expect("a port")
            .local_addr()
            .expect("bound")
            .port();
        let folder = tempfile::tempdir().expect("a folder");
        let authority = Authority::new("test").expect("an authority");
        let entry =
            |host: u8| serde_json::json!({ "name": NAMES[usize::from(host)], "address": address(host) });
        let list = Value::Array(vec![entry(0), entry(1), entry(2)]).to_string();
        for (host, name) in (0..).zip(NAMES) {
            let tls = folder.path().join(name).join("config/tls");
            std::fs::create_dir_all(&tls).expect("a folder");
            let identity = authority
                .issue(name, address(host).into())
                .expect("a certificate");
            // The second names are the ones that libnbd and QEMU use.
            for (names, text) in [
                (["ca.pem", "ca-cert.pem"], authority.certificate()),
                (["cert.pem", "client-cert.pem"], identity.certificate.as_str()),
                (["key.pem", "client-key.pem"], identity.key.as_str()),
            ] {
                for name in names {
                    std::fs::write(tls.join(name), text).expect("written");
                }
            }
            std::fs::write(folder.path().join(name).join("config/hosts.json"), &list).expect("written");
        }
        Self {
            folder,
            port,
            daemons: [None, None, None],
            options: Vec::new(),
            damage: None,
            files: None,
            environment: Vec::new(),
            authority,
            rnics: [None, None],
        }
    }

    /// An RNIC on each host; no daemon runs yet, and daemons copy by RDMA.
    pub fn with_rnics() -> Self {
        let mut lab = Self::without_daemons();
        let list = std::fs::read_to_string(lab.path(0, "config/hosts.json")).expect("it is there");
        let list: Value = serde_json::from_str(&list).expect("a list");
        for host in 0..2 {
            let address = list[host]["address"].as_str().expect("an address");
            lab.rnics[host] = Some(rnic::Rnic::start(&lab.path(host, "run"), address));
        }
        lab.options = vec!["--copy-transport".into(), "rdma".into()];
        lab
    }

    /// Kills this host's RNIC.
    pub fn kill_rnic(&mut self, host: usize) {
        drop(self.rnics[host].take().expect("it runs"));
    }

    /// Makes this host's RNIC hang.
    pub fn hang_rnic(&self, host: usize) {
        self.rnics[host].as_ref().expect("it runs").hang();
    }

    /// A path of this host.
    pub fn path(&self, host: usize, name: &str) -> PathBuf {
        self.folder.path().join(NAMES[host]).join(name)
    }

    fn address(&self, host: usize) -> String {
        let list = std::fs::read_to_string(self.path(host, "config/hosts.json")).expect("it is there");
        let list: Value = serde_json::from_str(&list).expect("a list");
        list[host]["address"].as_str().expect("an address").to_owned()
    }

    /// The address of this host's daemon for daemons of other hosts.
    pub fn peer_address(&self, host: usize) -> String {
        format!("{}:{}", self.address(host), self.port)
    }

    /// The address of clients that use TLS.
    pub fn tls_uri(&self, host: usize, volume: &str) -> String {
        let address = self.address(host);
        let tls = self.path(1 - host, "config/tls");
        format!(
            "nbds://{address}:{}/{volume}?tls-certificates={}",
            self.nbd_port(),
            tls.display()
        )
    }

    /// The address of this host's daemon for clients that use TLS.
    pub fn nbd_address(&self, host: usize) -> String {
        format!("{}:{}", self.address(host), self.nbd_port())
    }

    /// The port of the daemons for each other.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Number of files that this host's daemon has open.
    pub fn open_files(&self, host: usize) -> usize {
        let folder = format!("/proc/{}/fd", self.pid(host).as_raw_nonzero());
        std::fs::read_dir(folder).expect("it runs").count()
    }

    fn nbd_port(&self) -> u16 {
        self.port ^ 1
    }

    /// Starts this host's daemon, which kills itself at this point, and waits until it takes orders.
    pub fn start(&mut self, host: usize, die_at: Option<&str>) {
        assert!(self.daemons[host].is_none(), "it runs already");
        let socket = self.path(host, "run/volumes.sock");
        // A socket that is left over would be taken for the new one.
        let _ = std::fs::remove_file(&socket);
        let path = self.path(host, "log");
        let log = std::fs::File::options()
            .append(true)
            .create(true)
            .open(path)
            .expect("a log");
        let mut command = match self.files {
            None => Command::new(PROGRAM),
            // `prlimit` becomes the program.
            Some(files) => {
                let mut command = Command::new("prlimit");
                command.arg(format!("--nofile={files}:{files}")).arg(PROGRAM);
                command
            }
        };
        command
            .args([
                "daemon",
                "--name",
                NAMES[host],
                "--port",
                &self.port.to_string(),
                "--threads",
                "4",
            ])
            .args(["--nbd-port", &self.nbd_port().to_string()])
            .args(&self.options)
            .arg("--state-dir")
            .arg(self.path(host, "state"))
            .arg("--runtime-dir")
            .arg(self.path(host, "run"))
            .arg("--config-dir")
            .arg(self.path(host, "config"))
            .env_remove("VERBATIM_VOLUME_DIE_AT")
            .stderr(log.try_clone().expect("a log"))
            .stdout(log)
            .stdin(Stdio::null());
        command.env_remove("VERBATIM_VOLUME_DAMAGE");
        command.envs(self.environment.iter().copied());
        if let Some(number) = self.damage {
            command.env("VERBATIM_VOLUME_DAMAGE", number.to_string());
        }
        if let Some(point) = die_at {
            command.env("VERBATIM_VOLUME_DIE_AT", point);
        }
        self.daemons[host] = Some(command.spawn().expect("it starts"));
        // The socket exists a moment before the daemon listens on it.
        until("a daemon takes orders", || UnixStream::connect(&socket).is_ok());
    }

    fn pid(&self, host: usize) -> Pid {
        Pid::from_child(self.daemons[host].as_ref().expect("it runs"))
    }

    /// Sends a signal to this host's daemon.
    pub fn signal(&self, host: usize, signal: Signal) {
        kill_process(self.pid(host), signal).expect("it is there");
    }

    /// Limits the open files of this host's daemon.
    pub fn limit_files(&self, host: usize, files: u64) {
        let limit = Rlimit {
            current: Some(files),
            maximum: Some(files),
        };
        prlimit(Some(self.pid(host)), Resource::Nofile, limit).expect("it is there");
    }

    /// Kills this host's daemon.
    pub fn kill(&mut self, host: usize) {
        if let Some(mut child) = self.daemons[host].take() {
            // The daemon may have ended itself.
            let _ = child.kill();
            child.wait().expect("it ends");
        }
    }

    /// Ends this host's daemon as an operator does for a restart, and waits for it.
    pub fn end(&mut self, host: usize) {
        self.signal(host, Signal::TERM);
        let mut child = self.daemons[host].take().expect("it runs");
        let mut status = None;
        until("a daemon that was told to end ends", || {
            status = child.try_wait().expect("it is ours");
            status.is_some()
        });
        assert!(status.is_some_and(|status| status.success()), "{}", self.logs());
    }

    /// Waits for the end of this host's daemon.
    pub fn ends(&mut self, host: usize) {
        until("a daemon ends", || self.has_ended(host));
        self.daemons[host] = None;
    }

    /// The process of this host's daemon.
    pub fn process(&self, host: usize) -> u32 {
        self.pid(host).as_raw_nonzero().get() as u32
    }

    /// Paths of the keepers of this host's devices.
    pub fn keepers(&self, host: usize) -> Vec<PathBuf> {
        self.keepers_of(host, "keeper")
    }

    /// Paths of this host's keepers, of devices (`keeper`) or of pages (`pages`).
    pub fn keepers_of(&self, host: usize, of: &str) -> Vec<PathBuf> {
        let Ok(entries) = std::fs::read_dir(self.path(host, "run/volumes")) else {
            return Vec::new();
        };
        let paths = entries.map(|entry| entry.expect("it is read").path());
        paths
            .filter(|path| path.extension().is_some_and(|kind| kind == of))
            .collect()
    }

    /// The log of a host's daemons.
    pub fn log(&self, host: usize) -> String {
        std::fs::read_to_string(self.path(host, "log")).unwrap_or_default()
    }

    /// Whether this host's daemon has ended.
    pub fn has_ended(&mut self, host: usize) -> bool {
        let child = self.daemons[host].as_mut().expect("it was started");
        child.try_wait().expect("it is ours").is_some()
    }

    /// A command, not started yet.
    pub fn command(&self, host: usize, args: &[&str]) -> Command {
        let mut command = Command::new(PROGRAM);
        command
            .args(args)
            .arg("--runtime-dir")
            .arg(self.path(host, "run"));
        command
    }

    /// Runs a command, and returns its result.
    pub fn try_order(&self, host: usize, args: &[&str]) -> Output {
        self.command(host, args).output().expect("it runs")
    }

    /// Whether a command succeeds before [`PATIENCE`] ends; then it is ended.
    pub fn ends_in_time(&self, host: usize, args: &[&str]) -> bool {
        let mut child = self.command(host, args).spawn().expect("it runs");
        let end = Instant::now() + PATIENCE;
        loop {
            match child.try_wait().expect("it is ours") {
                Some(status) => return status.success(),
                None if Instant::now() > end => {
                    child.kill().expect("it is ours");
                    child.wait().expect("it ends");
                    return false;
                }
                None => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    /// Runs a command that must succeed; returns its output.
    pub fn order(&self, host: usize, args: &[&str]) -> String {
        let output = self.try_order(host, args);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success(),
            "{} {args:?}: {errors}\n{}",
            NAMES[host],
            self.logs()
        );
        String::from_utf8(output.stdout).expect("text").trim().to_owned()
    }

    /// A volume as a host sees it.
    pub fn status(&self, host: usize, volume: &str) -> Option<Value> {
        let output = self.try_order(host, &["status", volume, "--json"]);
        output
            .status
            .success()
            .then(|| serde_json::from_slice(&output.stdout).expect("JSON"))
    }

    /// The role of a copy on a host.
    pub fn role(&self, host: usize, volume: &str) -> String {
        let status = self.status(host, volume);
        status.map_or("none".into(), |status| {
            status["role"].as_str().expect("a role").to_owned()
        })
    }

    /// A volume that is attached on the first host.
    pub fn volume(&self, name: &str, size: &str) {
        self.volume_at(0, name, size);
    }

    /// A volume that is attached on this host.
    pub fn volume_at(&self, host: usize, name: &str, size: &str) {
        self.order(host, &["create", name, "--size", size]);
        self.order(host, &["attach", name]);
    }

    /// The socket for clients.
    pub fn socket(&self, host: usize, volume: &str) -> PathBuf {
        self.path(host, "run/volumes").join(format!("{volume}.sock"))
    }

    /// The data of a copy.
    pub fn data(&self, host: usize, volume: &str) -> Vec<u8> {
        std::fs::read(self.path(host, "state").join(volume).join("data")).expect("it is there")
    }

    /// The logs of all daemons.
    pub fn logs(&self) -> String {
        let log = |host| std::fs::read_to_string(self.path(host, "log")).unwrap_or_default();
        format!("--- a\n{}--- b\n{}--- c\n{}", log(0), log(1), log(2))
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        for host in 0..NAMES.len() {
            self.kill(host);
            // No daemon follows for the keepers.
            for path in ["keeper", "pages"]
                .iter()
                .flat_map(|of| self.keepers_of(host, of))
            {
                if let Some(keeper) = verbatim_keeper::Keeper::find_within(&path, PATIENCE) {
                    keeper.end();
                }
            }
        }
    }
}

/// Waits until `is_so` holds.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < end, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The path of a program, if it is installed.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|folder| folder.join(program))
        .find(|path| path.exists())
}
