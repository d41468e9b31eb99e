//! An RNIC in a thread of the test.

use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread::JoinHandle;

use rustix::event::EventfdFlags;
use verbatim_nic::{Nic, NicConfig, NicCounters, Port, STATS_NAME, StatsReader};

pub struct Server {
    pub address: Ipv4Addr,
    folder: tempfile::TempDir,
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
    pub stats: StatsReader,
}

impl Server {
    /// Starts an RNIC on a loopback address; it answers when this returns.
    pub fn start(address: [u8; 4]) -> Self {
        Self::start_with(address, |_| {})
    }

    pub fn start_with(address: [u8; 4], adjust: impl FnOnce(&mut NicConfig)) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut config = NicConfig::new(folder.path());
        config.port = Port::Address(address.into());
        adjust(&mut config);
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
        let stopped = stop.try_clone().expect("a descriptor");
        let (ready, started) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let mut nic = Nic::new(config).expect("the RNIC starts");
            ready.send(()).expect("the starter waits");
            nic.run(&stopped).expect("the RNIC runs to its end");
        });
        started.recv().expect("the RNIC starts");
        let stats = StatsReader::open(&folder.path().join(STATS_NAME)).expect("the statistics");
        Self {
            address: address.into(),
            folder,
            stop,
            thread: Some(thread),
            stats,
        }
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join(verbatim_device::control::SOCKET_NAME)
    }

    /// Waits until the counters are so.
    pub fn wait_for(&self, what: &str, mut so: impl FnMut(&NicCounters) -> bool) {
        super::wait_for(what, || so(&self.stats.read()).then_some(()));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        rustix::io::write(&self.stop, &1u64.to_ne_bytes()).expect("an eventfd takes a write");
        let ended = self.thread.take().expect("it is joined once").join();
        assert!(ended.is_ok() || std::thread::panicking(), "the RNIC panicked");
    }
}
