//! RNICs in threads, each on a loopback address of its own; or, where [`DEVICE`] names one, an RNIC that the kernel drives, which is
//! both hosts' then.

use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::mpsc;
use std::thread::JoinHandle;

use rustix::event::EventfdFlags;
use verbatim_far::{Connection, Device, Options, Which};
use verbatim_nic::{NicConfig, NicError, Port};

/// Names an RNIC of the kernel's.
const DEVICE: &str = "VERBATIM_FAR_DEVICE";

/// Whether the RNICs serve connections in the background behind others: those of the kernel's have no classes.
pub fn has_classes() -> bool {
    std::env::var_os(DEVICE).is_none()
}

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
    _nics: Vec<Nic>,
    _folder: Option<tempfile::TempDir>,
}

impl Nics {
    pub fn start() -> Self {
        if let Ok(name) = std::env::var(DEVICE) {
            return Self::of_the_kernel(name);
        }
        let nics = [Nic::start(), Nic::start()];
        let devices =
            [&nics[0], &nics[1]].map(|nic| Device::open(nic.path()).expect("it has just been started"));
        Self {
            devices,
            _nics: nics.into(),
            _folder: None,
        }
    }

    fn of_the_kernel(name: String) -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder on tmpfs");
        std::fs::create_dir(folder.path().join("mem")).expect("a folder");
        let which = Which {
            runtime: folder.path().to_owned(),
            name: Some(name),
            address: None,
        };
        let open = || Device::choose(&which).expect("the device can be opened");
        Self {
            devices: [open(), open()],
            _nics: Vec::new(),
            _folder: Some(folder),
        }
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
