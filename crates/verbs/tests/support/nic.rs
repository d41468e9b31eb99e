//! An RNIC in a thread of the test, or in a process of its own, in the runtime folder of a program.

use std::io::{BufRead, BufReader};
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread::JoinHandle;

use rustix::event::EventfdFlags;
use verbatim_nic::{NicConfig, Port};

pub struct Nic {
    pub address: Ipv4Addr,
    pub runtime: tempfile::TempDir,
    runs: Runs,
}

enum Runs {
    Thread(OwnedFd, Option<JoinHandle<()>>),
    Process(Child),
}

/// Where and as what an RNIC of its own process shall be.
const RUNTIME: &str = "VERBATIM_TEST_RNIC_RUNTIME";
const ADDRESS: &str = "VERBATIM_TEST_RNIC_ADDRESS";
const READY: &str = "the RNIC is ready";

fn runtime() -> tempfile::TempDir {
    // Memory that is to be adopted must be on tmpfs.
    let runtime = tempfile::tempdir_in("/dev/shm").expect("a folder on tmpfs");
    std::fs::create_dir(runtime.path().join(verbatim_channel::MEMORY_DIR)).expect("a folder");
    runtime
}

/// For an ignored test that [`Nic::start_process`] names: is the RNIC until it is killed.
pub fn be_an_rnic() {
    let Some(runtime) = std::env::var_os(RUNTIME) else {
        return;
    };
    let address: Ipv4Addr = std::env::var(ADDRESS)
        .expect("an address")
        .parse()
        .expect("an address");
    let mut config = NicConfig::new(Path::new(&runtime));
    config.port = Port::Address(address.into());
    let mut nic = verbatim_nic::Nic::new(config).expect("the RNIC starts");
    println!("{READY}");
    let never = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
    nic.run(&never).expect("the RNIC runs to its end");
}

impl Nic {
    /// Starts one in a process of its own, which runs the test `name` of this very program: that one calls
    /// [`be_an_rnic`].
    pub fn start_process(address: [u8; 4], name: &str) -> Self {
        let runtime = runtime();
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--ignored", "--exact", "--nocapture", name])
            .env(RUNTIME, runtime.path())
            .env(ADDRESS, Ipv4Addr::from(address).to_string())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this program starts again");
        let output = BufReader::new(child.stdout.take().expect("it is piped"));
        let ready = output
            .lines()
            .map_while(Result::ok)
            .any(|line| line.contains(READY));
        assert!(ready, "the RNIC ended before it was ready");
        Self {
            address: address.into(),
            runtime,
            runs: Runs::Process(child),
        }
    }

    /// Kills the process that it is in.
    pub fn kill(&mut self) {
        let Runs::Process(child) = &mut self.runs else {
            panic!("it has no process of its own")
        };
        child.kill().expect("it is ours");
        child.wait().expect("it is ours");
    }

    /// Starts one on a loopback address; it answers when this returns.
    pub fn start(address: [u8; 4]) -> Self {
        let runtime = runtime();
        let mut config = NicConfig::new(runtime.path());
        config.port = Port::Address(address.into());
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
        let stopped = stop.try_clone().expect("a descriptor");
        let (ready, started) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let mut nic = verbatim_nic::Nic::new(config).expect("the RNIC starts");
            ready.send(()).expect("the starter waits");
            nic.run(&stopped).expect("the RNIC runs to its end");
        });
        started.recv().expect("the RNIC starts");
        Self {
            address: address.into(),
            runtime,
            runs: Runs::Thread(stop, Some(thread)),
        }
    }

    pub fn path(&self) -> &Path {
        self.runtime.path()
    }

    pub fn gid(&self) -> [u8; 16] {
        self.address.to_ipv6_mapped().octets()
    }
}

impl Drop for Nic {
    fn drop(&mut self) {
        match &mut self.runs {
            Runs::Thread(stop, thread) => {
                rustix::io::write(stop, &1u64.to_ne_bytes()).expect("an eventfd takes a write");
                let ended = thread.take().expect("it is joined once").join();
                assert!(ended.is_ok() || std::thread::panicking(), "the RNIC panicked");
            }
            Runs::Process(child) => {
                // It may be dead already.
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }
}
