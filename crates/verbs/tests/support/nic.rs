//! An RNIC in a thread of the test, in the runtime folder of a program.

use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::mpsc;
use std::thread::JoinHandle;

use rustix::event::EventfdFlags;
use verbatim_nic::{NicConfig, Port};

pub struct Nic {
    pub address: Ipv4Addr,
    pub runtime: tempfile::TempDir,
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl Nic {
    /// Starts one on a loopback address; it answers when this returns.
    pub fn start(address: [u8; 4]) -> Self {
        // Memory that is to be adopted must be on tmpfs.
        let runtime = tempfile::tempdir_in("/dev/shm").expect("a folder on tmpfs");
        std::fs::create_dir(runtime.path().join(verbatim_channel::MEMORY_DIR)).expect("a folder");
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
            stop,
            thread: Some(thread),
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
        rustix::io::write(&self.stop, &1u64.to_ne_bytes()).expect("an eventfd takes a write");
        let ended = self.thread.take().expect("it is joined once").join();
        assert!(ended.is_ok() || std::thread::panicking(), "the RNIC panicked");
    }
}
