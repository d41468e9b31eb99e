//! RNICs in threads, each on a loopback address of its own.

use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::mpsc;
use std::thread::JoinHandle;

use rustix::event::EventfdFlags;
use verbatim_far::{Connection, Device, Options};
use verbatim_nic::{NicConfig, NicError, Port};

pub struct Nic {
    runtime: tempfile::TempDir,
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl Nic {
    /// It answers when this returns.
    pub fn start() -> Self {
        loop {
            // Another run of the tests may have the address.
            let address = Ipv4Addr::from(0x7F00_0000 | rand::random::<u32>() >> 8 | 2);
            if let Ok(nic) = Self::start_at(address) {
                return nic;
            }
        }
    }

    fn start_at(address: Ipv4Addr) -> Result<Self, NicError> {
        // Memory that is to be adopted must be on tmpfs.
        let runtime = tempfile::tempdir_in("/dev/shm").expect("a folder on tmpfs");
        std::fs::create_dir(runtime.path().join("mem")).expect("a folder");
        let mut config = NicConfig::new(runtime.path());
        config.port = Port::Address(address.into());
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
        let stopped = stop.try_clone().expect("a descriptor");
        let (ready, started) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let mut nic = match verbatim_nic::Nic::new(config) {
                Ok(nic) => nic,
                Err(error) => return ready.send(Err(error)).expect("the starter waits"),
            };
            ready.send(Ok(())).expect("the starter waits");
            nic.run(&stopped).expect("the RNIC runs to its end");
        });
        started.recv().expect("the thread says how it went")?;
        Ok(Self {
            runtime,
            stop,
            thread: Some(thread),
        })
    }

    pub fn path(&self) -> &Path {
        self.runtime.path()
    }
}

impl Drop for Nic {
    fn drop(&mut self) {
        rustix::io::write(&self.stop, &1u64.to_ne_bytes()).expect("an eventfd takes a write");
        let ended = self.thread.take().expect("it is joined once").join();
        assert!(ended.is_ok() || std::thread::panicking(), "the RNIC panicked");
    }
}

/// Two hosts with their daemons.
pub struct Nics {
    devices: [Device; 2],
    _nics: [Nic; 2],
}

impl Nics {
    pub fn start() -> Self {
        let nics = [Nic::start(), Nic::start()];
        let devices =
            [&nics[0], &nics[1]].map(|nic| Device::open(nic.path()).expect("it has just been started"));
        Self { devices, _nics: nics }
    }

    /// The first host's, or the second's.
    pub fn device(&self, host: usize) -> &Device {
        &self.devices[host]
    }

    pub fn unconnected(&self, options: Options) -> (Connection, Connection) {
        let [one, other] = &self.devices;
        (
            one.connection(options).expect("a connection"),
            other.connection(options).expect("a connection"),
        )
    }

    pub fn connect(&self, options: Options) -> (Connection, Connection) {
        let (mut one, mut other) = self.unconnected(options);
        one.connect(&other.end()).expect("one end");
        other.connect(&one.end()).expect("the other end");
        (one, other)
    }
}

pub fn pair(options: Options) -> (Nics, Connection, Connection) {
    let nics = Nics::start();
    let (one, other) = nics.connect(options);
    (nics, one, other)
}
