//! Who hears the guests, wherever they run: a pipe with a name, which every QEMU on this machine opens as a serial line.

use std::fs::File;
use std::io::{Read, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use tempfile::TempDir;

use crate::stock::now;

/// What a guest says when it is ready, and what ends the thread that listens.
const READY: u8 = b'R';
const END: u8 = b'E';

/// How long a guest may take until it is ready: it fills its RAM before.
const READY_LIMIT: Duration = Duration::from_secs(120);

/// How long a guest that ticks may not be heard after its move.
const HEARD_LIMIT: Duration = Duration::from_secs(30);

#[derive(Default)]
struct Heard {
    /// Guests that were ready.
    ready: usize,
    /// When something was heard last, by [`now`].
    last: f64,
    /// The longest silence that has ended, in ms, since it was asked for.
    silent_ms: f64,
}

#[derive(Default)]
struct Shared {
    heard: Mutex<Heard>,
    changed: Condvar,
}

/// One process, one observer: guests that tick do so one at a time.
pub struct Observer {
    folder: TempDir,
    pipe: File,
    shared: Arc<Shared>,
    listener: Option<JoinHandle<()>>,
}

impl Observer {
    /// Where the hosts of a lab see it, too.
    pub fn start() -> anyhow::Result<Self> {
        let folder = TempDir::new_in("/var/tmp")?;
        // QEMU reads one and writes the other.
        for name in ["serial.in", "serial.out"] {
            let path = folder.path().join(name);
            mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)
                .with_context(|| format!("cannot make {}", path.display()))?;
        }
        let path = folder.path().join("serial.out");
        // Also for writing: so it does not end with a QEMU.
        let pipe = File::options().read(true).write(true).open(path)?;
        let shared = Arc::new(Shared::default());
        let listener = std::thread::spawn({
            let (pipe, shared) = (pipe.try_clone()?, Arc::clone(&shared));
            move || shared.listen(pipe)
        });
        Ok(Self {
            folder,
            pipe,
            shared,
            listener: Some(listener),
        })
    }

    /// QEMU's argument behind `-serial`.
    pub fn serial(&self) -> String {
        format!("pipe:{}", self.folder.path().join("serial").display())
    }

    /// Has `start` start guests, and waits until so many more are ready.
    pub fn ready<T>(&self, guests: usize, start: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
        let wanted = self.shared.heard().ready + guests;
        let started = start()?;
        self.wait("a guest that is ready", READY_LIMIT, |heard| {
            heard.ready >= wanted
        })?;
        Ok(started)
    }

    /// Does something to a guest that ticks; the longest time, in ms, in which it was not heard meanwhile.
    pub fn silence(&self, what: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<f64> {
        self.shared.heard().silent_ms = 0.0;
        what()?;
        let ended = now();
        self.wait("a guest that goes on", HEARD_LIMIT, |heard| heard.last > ended)?;
        Ok(self.shared.heard().silent_ms)
    }

    fn wait(&self, what: &str, limit: Duration, is_there: impl Fn(&Heard) -> bool) -> anyhow::Result<()> {
        let heard = self.shared.heard();
        let waited = self
            .shared
            .changed
            .wait_timeout_while(heard, limit, |heard| !is_there(heard));
        let (_heard, timeout) = waited.expect("no panic under this lock");
        ensure!(!timeout.timed_out(), "{what}: not within {limit:?}");
        Ok(())
    }
}

impl Shared {
    fn heard(&self) -> MutexGuard<'_, Heard> {
        self.heard.lock().expect("no panic under this lock")
    }

    fn listen(&self, mut pipe: File) {
        let (mut bytes, mut last) = ([0; 512], None::<Instant>);
        while let Ok(length) = pipe.read(&mut bytes) {
            let at = Instant::now();
            let said = &bytes[..length];
            if said.contains(&END) {
                return;
            }
            let mut heard = self.heard();
            heard.ready += said.iter().filter(|byte| **byte == READY).count();
            heard.last = now();
            if let Some(last) = last.replace(at) {
                heard.silent_ms = heard.silent_ms.max((at - last).as_secs_f64() * 1e3);
            }
            self.changed.notify_all();
        }
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        if self.pipe.write_all(&[END]).is_ok()
            && let Some(listener) = self.listener.take()
        {
            let _ = listener.join();
        }
    }
}
