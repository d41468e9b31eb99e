//! A client of a volume that follows it from host to host: requests that one daemon did not carry out go to
//! the one that serves now.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, Weak};
use std::time::{Duration, Instant};

use crate::disk::Backend;
use crate::support::PATIENCE;
use crate::support::client::Client;

/// The longest part of a request for zeros.
const ZERO_BYTES: u64 = 1 << 30;

/// The client's connections, to either of two daemons.
pub struct Follower {
    sockets: [PathBuf; 2],
    idle: Mutex<Vec<Client>>,
    /// All that are open.
    open: Mutex<Vec<Weak<UnixStream>>>,
    is_gone: AtomicBool,
    /// Requests that were answered.
    pub done: AtomicU64,
    /// Connections that were made.
    pub connections: AtomicU64,
    troubles: Mutex<Vec<String>>,
}

impl Follower {
    pub fn new(sockets: [PathBuf; 2]) -> Self {
        Self {
            sockets,
            idle: Mutex::default(),
            open: Mutex::default(),
            is_gone: AtomicBool::new(false),
            done: AtomicU64::new(0),
            connections: AtomicU64::new(0),
            troubles: Mutex::default(),
        }
    }

    /// The device goes away: every request fails from now on, those among them that a daemon holds while it decides.
    pub fn go(&self) {
        self.is_gone.store(true, Ordering::SeqCst);
        let open = self.open.lock().expect("no panic");
        for connection in open.iter().filter_map(Weak::upgrade) {
            // The daemon may have closed it.
            let _ = connection.shutdown(Shutdown::Both);
        }
    }

    /// Errors of the volume that a file system would have got.
    pub fn troubles(&self) -> Vec<String> {
        self.troubles.lock().expect("no panic").clone()
    }

    fn trouble(&self, text: String) -> io::Error {
        if !self.is_gone.load(Ordering::SeqCst) {
            self.troubles.lock().expect("no panic").push(text);
        }
        io::Error::from_raw_os_error(libc::EIO)
    }

    fn connect(&self) -> io::Result<Client> {
        let end = Instant::now() + PATIENCE;
        loop {
            if self.is_gone.load(Ordering::SeqCst) {
                return Err(io::Error::from_raw_os_error(libc::EIO));
            }
            if let Some(client) = self.sockets.iter().find_map(|path| Client::connect(path).ok()) {
                self.connections.fetch_add(1, Ordering::Relaxed);
                let mut open = self.open.lock().expect("no panic");
                open.retain(|connection| connection.strong_count() > 0);
                open.push(client.connection());
                drop(open);
                match self.is_gone.load(Ordering::SeqCst) {
                    // It went in between.
                    true => continue,
                    false => return Ok(client),
                }
            }
            if Instant::now() > end {
                return Err(self.trouble("nobody serves the volume".into()));
            }
            // Nothing tells when a socket is there.
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn ask(&self, what: &str, mut request: impl FnMut(&mut Client) -> io::Result<()>) -> io::Result<()> {
        loop {
            let idle = self.idle.lock().expect("no panic").pop();
            let mut client = match idle {
                Some(client) => client,
                None => self.connect()?,
            };
            match request(&mut client) {
                _ if self.is_gone.load(Ordering::SeqCst) => {
                    return Err(io::Error::from_raw_os_error(libc::EIO));
                }
                Ok(()) => {
                    self.idle.lock().expect("no panic").push(client);
                    self.done.fetch_add(1, Ordering::Relaxed);
                    return Ok(());
                }
                Err(error) => match error.raw_os_error() {
                    Some(libc::EIO | libc::EINVAL | libc::ENOSPC | libc::EPERM | libc::ENOMEM) => {
                        return Err(self.trouble(format!("{what}: {error}")));
                    }
                    // The answer never came.
                    Some(libc::EAGAIN) => return Err(self.trouble(format!("{what}: no answer"))),
                    // The volume has moved, or its daemon has gone.
                    _ => {}
                },
            }
        }
    }
}

impl Backend for Follower {
    fn read(&self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.ask("read", |client| client.read(offset, data))
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.ask("write", |client| client.write(offset, data, false))
    }

    fn zero(&self, offset: u64, length: u64, may_free: bool) -> io::Result<()> {
        let mut at = offset;
        while at < offset + length {
            let part = (offset + length - at).min(ZERO_BYTES) as u32;
            self.ask("zero", |client| match may_free {
                true => client.trim(at, part),
                false => client.zero(at, part),
            })?;
            at += u64::from(part);
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        self.ask("flush", Client::flush)
    }
}
