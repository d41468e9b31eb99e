//! A disk with a write cache: at a power failure unflushed writes are lost, all or some of them, sector by
//! sector.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Condvar, Mutex};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::disk::Backend;

const SECTOR: usize = 512;
/// The most sectors in the cache; beyond that, half of them go to the disk in no order.
const CACHED: usize = 16 << 10;

type Sector = [u8; SECTOR];

enum Power {
    On,
    /// Requests wait, and get no answer.
    Fails,
    /// All new requests fail.
    Off,
}

struct State {
    cache: HashMap<u64, Sector>,
    random: StdRng,
    power: Power,
}

pub struct Volatile {
    stable: File,
    state: Mutex<State>,
    changed: Condvar,
}

impl Volatile {
    /// The disk with this file as its stable part, of the same length.
    pub fn new(file: &Path, seed: u64) -> Self {
        let stable = File::options().read(true).write(true).open(file).expect("a disk");
        let state = State {
            cache: HashMap::new(),
            random: StdRng::seed_from_u64(seed),
            power: Power::On,
        };
        Self {
            stable,
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    /// From now on nothing reaches the disk, and no request is answered. A random part of the cached sectors
    /// has reached it.
    pub fn fail(&self) {
        let mut state = self.state.lock().expect("no panic");
        state.power = Power::Fails;
        let share = [0.0, 0.1, 0.5, 0.9][state.random.random_range(0..4)];
        let cache = std::mem::take(&mut state.cache);
        for (number, sector) in cache {
            if state.random.random_bool(share) {
                self.keep(number, &sector).expect("room");
            }
        }
    }

    /// Fails the requests that wait. The processes that made them should have been killed before.
    pub fn end(&self) {
        self.state.lock().expect("no panic").power = Power::Off;
        self.changed.notify_all();
    }

    fn keep(&self, number: u64, sector: &Sector) -> io::Result<()> {
        self.stable.write_all_at(sector, number * SECTOR as u64)
    }

    fn with<T>(&self, request: impl FnOnce(&mut State) -> io::Result<T>) -> io::Result<T> {
        let mut state = self.state.lock().expect("no panic");
        loop {
            match state.power {
                Power::On => return request(&mut state),
                Power::Fails => state = self.changed.wait(state).expect("no panic"),
                Power::Off => return Err(io::Error::from_raw_os_error(libc::EIO)),
            }
        }
    }

    fn put(&self, offset: u64, length: usize, sector: impl Fn(usize) -> Sector) -> io::Result<()> {
        self.with(|state| {
            let first = offset / SECTOR as u64;
            for index in 0..length / SECTOR {
                state.cache.insert(first + index as u64, sector(index));
            }
            if state.cache.len() > CACHED {
                let numbers: Vec<u64> = state.cache.keys().copied().collect();
                for number in numbers {
                    if state.random.random_bool(0.5) {
                        let sector = state.cache.remove(&number).expect("it is there");
                        self.keep(number, &sector)?;
                    }
                }
            }
            Ok(())
        })
    }
}

impl Backend for Volatile {
    fn read(&self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.with(|state| {
            self.stable.read_exact_at(data, offset)?;
            let first = offset / SECTOR as u64;
            for (index, part) in data.chunks_exact_mut(SECTOR).enumerate() {
                if let Some(sector) = state.cache.get(&(first + index as u64)) {
                    part.copy_from_slice(sector);
                }
            }
            Ok(())
        })
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let (parts, _) = data.as_chunks::<SECTOR>();
        self.put(offset, data.len(), |index| parts[index])
    }

    fn zero(&self, offset: u64, length: u64, _: bool) -> io::Result<()> {
        self.put(offset, length as usize, |_| [0; SECTOR])
    }

    fn flush(&self) -> io::Result<()> {
        self.with(|state| {
            let cache = std::mem::take(&mut state.cache);
            cache
                .iter()
                .try_for_each(|(number, sector)| self.keep(*number, sector))
        })
    }
}
