//! Three hosts on the loopback interface, each with an RNIC in a process of its own, and what memory servers and swap disks they have.

use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use verbatim_certificates::Authority;
use verbatim_swap::control::{Sockets, order_now};
use verbatim_swap::disk::{Order, Status};

/// So long anything may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

pub const PROGRAM: &str = env!("CARGO_BIN_EXE_verbatim");

/// The hosts' names; a host is its index. The first has the disk.
pub const NAMES: [&str; 3] = ["a", "b", "c"];

/// Processes end with it.
pub struct Lab {
    folder: tempfile::TempDir,
    pub port: u16,
    addresses: [Ipv4Addr; 3],
    pub nics: [Option<Child>; 3],
    pub servers: [Option<Child>; 3],
    disk: Option<Child>,
    /// Disks that go from host to host.
    moving: [Option<Child>; 3],
}

pub fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).expect("it is there");
}

pub fn end(child: &mut Option<Child>) {
    if let Some(mut child) = child.take() {
        // It may have ended itself.
        let _ = child.kill();
        child.wait().expect("it ends");
    }
}

/// Waits until that is so.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < end, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

impl Lab {
    /// RNICs run on all hosts, and nothing else.
    pub fn new() -> Self {
        static LABS: AtomicU8 = AtomicU8::new(1);
        let number = LABS.fetch_add(1, Ordering::Relaxed);
        // Addresses that no other test has, and a port that is free on the first.
        let pid = std::process::id().to_le_bytes();
        let second = 128 | (pid[1] & 63);
        let addresses = [0, 1, 2]
            .map(|host| Ipv4Addr::new(127, second, pid[0], number.wrapping_mul(4).wrapping_add(host)));
        let listener = TcpListener::bind((addresses[0], 0)).expect("a port");
        let port = listener.local_addr().expect("bound").port();
        // Memory that is registered must be on tmpfs.
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder");
        let authority = Authority::new("test").expect("an authority");
        let entry = |host: usize| serde_json::json!({ "name": NAMES[host], "address": addresses[host] });
        let list = Value::Array(vec![entry(0), entry(1), entry(2)]).to_string();
        for (host, name) in NAMES.into_iter().enumerate() {
            let tls = folder.path().join(name).join("config/tls");
            std::fs::create_dir_all(&tls).expect("a folder");
            std::fs::create_dir_all(folder.path().join(name).join("run/mem")).expect("a folder");
            let identity = authority
                .issue(name, addresses[host].into())
                .expect("a certificate");
            for (name, text) in [
                ("ca.pem", authority.certificate()),
                ("cert.pem", identity.certificate.as_str()),
                ("key.pem", identity.key.as_str()),
            ] {
                std::fs::write(tls.join(name), text).expect("written");
            }
            std::fs::write(folder.path().join(name).join("config/hosts.json"), &list).expect("written");
        }
        let mut lab = Self {
            folder,
            port,
            addresses,
            nics: [None, None, None],
            servers: [None, None, None],
            disk: None,
            moving: [None, None, None],
        };
        for host in 0..3 {
            lab.start_nic(host);
        }
        lab
    }

    /// A path of that host.
    pub fn path(&self, host: usize, name: &str) -> PathBuf {
        self.folder.path().join(NAMES[host]).join(name)
    }

    fn log(&self, host: usize) -> std::fs::File {
        let path = self.path(host, "log");
        std::fs::File::options()
            .append(true)
            .create(true)
            .open(path)
            .expect("a log")
    }

    /// What the processes have said.
    pub fn logs(&self) -> String {
        let read = |host, name| std::fs::read_to_string(self.path(host, name)).unwrap_or_default();
        let disk = read(0, "run/swap/disk.log");
        (0..3)
            .map(|host| format!("--- {}\n{}", NAMES[host], read(host, "log")))
            .collect::<String>()
            + &disk
    }

    pub fn start_nic(&mut self, host: usize) {
        assert!(self.nics[host].is_none(), "it runs already");
        let socket = self.path(host, "run/nic.sock");
        let _ = std::fs::remove_file(&socket);
        let child = Command::new(PROGRAM)
            .args([
                "nic",
                "--only-address",
                "--nice",
                "0",
                "--address",
                &self.addresses[host].to_string(),
            ])
            .arg("--runtime-dir")
            .arg(self.path(host, "run"))
            .stderr(self.log(host))
            .stdout(self.log(host))
            .stdin(Stdio::null())
            .spawn();
        self.nics[host] = Some(child.expect("it starts"));
        until("an RNIC answers", || socket.exists());
    }

    fn host_arguments(&self, host: usize, command: &mut Command) {
        command
            .arg("--runtime-dir")
            .arg(self.path(host, "run"))
            .arg("--config-dir")
            .arg(self.path(host, "config"))
            .args(["--port", &self.port.to_string()]);
    }

    pub fn start_server(&mut self, host: usize, size: &str) {
        assert!(self.servers[host].is_none(), "it runs already");
        let socket = self.path(host, "run/memory.sock");
        let _ = std::fs::remove_file(&socket);
        let mut command = Command::new(PROGRAM);
        command.args([
            "memory",
            "serve",
            "--size",
            size,
            "--name",
            NAMES[host],
            "--grace",
            "5",
        ]);
        self.host_arguments(host, &mut command);
        let child = command
            .stderr(self.log(host))
            .stdout(self.log(host))
            .stdin(Stdio::null())
            .spawn();
        self.servers[host] = Some(child.expect("it starts"));
        until("a memory server answers", || socket.exists());
    }

    /// How attaching ends.
    pub fn try_attach(&self, size: &str, more: &[&str]) -> Output {
        let mut command = Command::new(PROGRAM);
        command.args(["swap", "attach", "b", size, "--name", "disk", "--own-name", "a"]);
        command.args(more).arg("--state-dir").arg(self.path(0, "state"));
        self.host_arguments(0, &mut command);
        command.output().expect("it runs")
    }

    /// A disk of b's memory in a process that is this one's child.
    pub fn attach(&mut self, size: &str, more: &[&str]) -> PathBuf {
        assert!(self.disk.is_none(), "it runs already");
        let mut command = Command::new(PROGRAM);
        command.args([
            "swap",
            "attach",
            "b",
            size,
            "--name",
            "disk",
            "--own-name",
            "a",
            "--foreground",
        ]);
        command.args(more).arg("--state-dir").arg(self.path(0, "state"));
        self.host_arguments(0, &mut command);
        let child = command
            .stderr(self.log(0))
            .stdout(self.log(0))
            .stdin(Stdio::null())
            .spawn();
        self.disk = Some(child.expect("it starts"));
        let socket = self.path(0, "run/swap/disk.sock");
        let control = self.path(0, "run/swap/disk.control");
        until("the disk is there", || {
            let ended = self
                .disk
                .as_mut()
                .expect("it was started")
                .try_wait()
                .expect("ours");
            if ended.is_some() {
                panic!("the disk's process has ended: {}", self.logs());
            }
            socket.exists() && control.exists()
        });
        socket
    }

    /// A disk of b's memory on that host, called `guest`; one that comes there in a session if `more` says so. Where clients find it.
    pub fn start_moving(&mut self, host: usize, size: &str, more: &[&str]) -> PathBuf {
        assert!(self.moving[host].is_none(), "it runs already");
        let mut command = Command::new(PROGRAM);
        command.args(["swap", "attach", "b", size, "--name", "guest", "--foreground"]);
        command.args(["--own-name", NAMES[host]]);
        command
            .args(more)
            .arg("--state-dir")
            .arg(self.path(host, "state"));
        self.host_arguments(host, &mut command);
        let child = command
            .stderr(self.log(host))
            .stdout(self.log(host))
            .stdin(Stdio::null())
            .spawn();
        let sockets = ["run/swap/guest.sock", "run/swap/guest.control"].map(|name| self.path(host, name));
        for socket in &sockets {
            let _ = std::fs::remove_file(socket);
        }
        self.moving[host] = Some(child.expect("it starts"));
        until("the disk is there", || {
            let ended = self.moving[host].as_mut().expect("started").try_wait();
            assert!(
                ended.expect("ours").is_none(),
                "the disk's process has ended: {}",
                self.logs()
            );
            sockets.iter().all(|socket| socket.exists())
        });
        let [socket, _] = sockets;
        socket
    }

    /// The disk's process on that host is killed.
    pub fn end_moving(&mut self, host: usize) {
        end(&mut self.moving[host]);
    }

    /// An order to it, and what it answers.
    pub fn order(&self, host: usize, order: &Order) -> Result<Status, String> {
        let sockets = Sockets::new(&self.path(host, "run"), "guest");
        order_now(&sockets, order, PATIENCE).map_err(|error| format!("{error:#}"))
    }

    /// The same, of an order that has to be obeyed.
    pub fn must(&self, host: usize, order: &Order) -> Status {
        let said = self.order(host, order);
        said.unwrap_or_else(|why| panic!("{order:?} on {}: {why}\n{}", NAMES[host], self.logs()))
    }

    /// A command of that host, and how it ends.
    pub fn try_order(&self, host: usize, args: &[&str]) -> Output {
        let mut command = Command::new(PROGRAM);
        command
            .args(args)
            .arg("--runtime-dir")
            .arg(self.path(host, "run"));
        command.output().expect("it runs")
    }

    /// A command's JSON.
    pub fn ask(&self, host: usize, args: &[&str]) -> Value {
        let output = self.try_order(host, args);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{args:?}: {errors}\n{}", self.logs());
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    /// The disk.
    pub fn status(&self) -> Value {
        self.ask(0, &["swap", "status", "disk", "--json"])
    }

    /// How a copy of the disk stands.
    pub fn state(&self, copy: usize) -> String {
        self.status()["copies"][copy]["state"]
            .as_str()
            .expect("a state")
            .to_owned()
    }

    /// How much memory the disk's process has.
    pub fn resident_kib(&self) -> u64 {
        let pid = self.status()["pid"].as_u64().expect("a number");
        let text = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
        let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let number = line.and_then(|rest| rest.split_whitespace().next());
        number.expect("a size").parse().expect("a number")
    }

    /// The disk's process has ended by itself.
    pub fn wait_for_disk(&mut self) {
        let mut disk = self.disk.take().expect("it was attached");
        assert!(disk.wait().expect("it ends").success(), "{}", self.logs());
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.logs());
        }
        end(&mut self.disk);
        self.moving.iter_mut().for_each(end);
        self.servers.iter_mut().for_each(end);
        self.nics.iter_mut().for_each(end);
    }
}
