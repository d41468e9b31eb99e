//! An RNIC in a thread of the test.

use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::Command;
use std::sync::mpsc;
use std::thread::JoinHandle;

use rustix::event::EventfdFlags;
use rustix::thread::{UnshareFlags, unshare_unsafe};
use verbatim_nic::{Nic, NicConfig, NicCounters, Port, STATS_NAME, StatsReader};

pub struct Server {
    pub address: IpAddr,
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
        Self::start_at(address.into(), adjust)
    }

    pub fn start_at(address: IpAddr, adjust: impl FnOnce(&mut NicConfig)) -> Self {
        Self::start_in(address, &[], adjust)
    }

    /// In a network namespace of its own, after these commands (where there are some).
    pub fn start_in(
        address: IpAddr,
        commands: &'static [&'static str],
        adjust: impl FnOnce(&mut NicConfig),
    ) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut config = NicConfig::new(folder.path());
        config.port = Port::Address(address);
        adjust(&mut config);
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
        let stopped = stop.try_clone().expect("a descriptor");
        let (ready, started) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            if !commands.is_empty() {
                // SAFETY: the file table stays shared; only this thread changes its network.
                unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.expect("a network namespace");
            }
            for command in commands {
                let done = Command::new("sh")
                    .args(["-ec", command])
                    .status()
                    .expect("a shell");
                assert!(done.success(), "{command}: {done}");
            }
            let mut nic = Nic::new(config).expect("the RNIC starts");
            // As in the shipped program: a call that the list lacks fails here. Where there is no filter there is nothing to see.
            if !super::is_sanitized() {
                let _ = verbatim_nic::calls().keep();
            }
            ready.send(()).expect("the starter waits");
            nic.run(&stopped).expect("the RNIC runs to its end");
        });
        started.recv().expect("the RNIC starts");
        let stats = StatsReader::open(&folder.path().join(STATS_NAME)).expect("the statistics");
        Self {
            address,
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
        let patience = std::time::Instant::now() + super::PATIENCE;
        while !so(&self.stats.read()) {
            let late = std::time::Instant::now() > patience;
            assert!(!late, "waited too long for {what}: {:?}", self.stats.read());
            std::thread::yield_now();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        rustix::io::write(&self.stop, &1u64.to_ne_bytes()).expect("an eventfd takes a write");
        let ended = self.thread.take().expect("it is joined once").join();
        assert!(ended.is_ok() || std::thread::panicking(), "the RNIC panicked");
    }
}
