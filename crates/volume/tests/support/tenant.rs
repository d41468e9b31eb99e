//! A tenant that knows the promises to it: some threads, each with blocks of its own.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::PATIENCE;
use super::client::Client;

/// Bytes of one write.
pub const BLOCK: usize = 4096;

/// State of one block: the acknowledged stamp, and one that is not acknowledged (yet).
#[derive(Debug, Clone, Copy, Default)]
struct Block {
    acknowledged: u64,
    pending: Option<u64>,
}

struct Worker {
    sockets: [PathBuf; 2],
    first: u64,
    blocks: Vec<Block>,
    random: StdRng,
    stamp: u64,
    is_over: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    longest: Duration,
    client: Option<Client>,
}

/// All threads.
pub struct Tenant {
    threads: Vec<JoinHandle<Worker>>,
    is_over: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
}

/// The promises to the tenant at its end.
pub struct Log {
    blocks: Vec<Block>,
    /// Requests that were answered.
    pub done: u64,
    /// The longest wait for an answer, without reconnections.
    pub longest: Duration,
}

impl Tenant {
    /// Begins to use the volume at either of the sockets.
    pub fn start(sockets: [PathBuf; 2], blocks: u64, threads: u64, seed: u64) -> Self {
        let (is_over, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let each = blocks / threads;
        let threads = (0..threads).map(|number| {
            let worker = Worker {
                sockets: sockets.clone(),
                first: number * each,
                blocks: vec![Block::default(); each as usize],
                random: StdRng::seed_from_u64(seed * 100 + number),
                stamp: 0,
                is_over: is_over.clone(),
                done: done.clone(),
                longest: Duration::ZERO,
                client: None,
            };
            std::thread::spawn(move || worker.work())
        });
        Self {
            threads: threads.collect(),
            is_over: is_over.clone(),
            done: done.clone(),
        }
    }

    /// Requests that were answered so far.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Stops all threads.
    pub fn stop(self) -> Log {
        self.is_over.store(true, Ordering::Relaxed);
        let mut log = Log {
            blocks: Vec::new(),
            done: self.done.load(Ordering::Relaxed),
            longest: Duration::ZERO,
        };
        for thread in self.threads {
            let worker = thread
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            log.blocks.extend(worker.blocks);
            log.longest = log.longest.max(worker.longest);
        }
        log
    }
}

impl Log {
    /// Checks that the data keep the promises.
    pub fn check(&self, data: &[u8]) {
        for (number, (block, data)) in self.blocks.iter().zip(data.chunks_exact(BLOCK)).enumerate() {
            block.check(data, number as u64);
        }
    }
}

impl Block {
    /// The stamp of the data, which must be one of the two.
    fn check(&self, data: &[u8], number: u64) -> u64 {
        let stamp = u64::from_le_bytes(data[..8].try_into().expect("eight bytes"));
        let is_whole = data.chunks_exact(8).all(|part| part == stamp.to_le_bytes());
        assert!(is_whole, "block {number} is torn: {self:?}");
        let is_right = stamp == self.acknowledged || Some(stamp) == self.pending;
        assert!(is_right, "block {number} has {stamp:#x}, promised is {self:x?}");
        stamp
    }
}

impl Worker {
    fn work(mut self) -> Self {
        while !self.is_over.load(Ordering::Relaxed) {
            let began = Instant::now();
            if self.client.is_none() {
                self.connect();
            } else if self.one() {
                self.done.fetch_add(1, Ordering::Relaxed);
                self.longest = self.longest.max(began.elapsed());
            } else {
                self.client = None;
            }
        }
        self
    }

    /// Connects to the socket at which the volume is served.
    fn connect(&mut self) {
        let end = Instant::now() + PATIENCE;
        while self.client.is_none() && !self.is_over.load(Ordering::Relaxed) {
            self.client = self
                .sockets
                .iter()
                .find_map(|socket| Client::connect(socket).ok());
            assert!(Instant::now() < end, "nobody serves the volume");
            // Nothing tells when a socket is there.
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// One request. False if the connection is useless.
    fn one(&mut self) -> bool {
        let client = self.client.as_mut().expect("it is connected");
        let index = self.random.random_range(0..self.blocks.len());
        let block = &mut self.blocks[index];
        let number = self.first + index as u64;
        let offset = number * BLOCK as u64;
        let kind = self.random.random_range(0..20);
        if kind == 0 {
            return client.flush().is_ok();
        }
        if kind < 8 || block.pending.is_some() {
            let mut data = vec![0; BLOCK];
            if client.read(offset, &mut data).is_err() {
                return false;
            }
            // A write in flight when a connection was lost is decided by the present content.
            block.acknowledged = block.check(&data, number);
            block.pending = None;
            return true;
        }
        let stamp = match kind < 12 {
            true => 0,
            false => {
                self.stamp += 1;
                (number << 40) | self.stamp
            }
        };
        block.pending = Some(stamp);
        let done = match kind {
            8..10 => client.zero(offset, BLOCK as u32),
            10..12 => client.trim(offset, BLOCK as u32),
            _ => client.write(offset, &stamp.to_le_bytes().repeat(BLOCK / 8), kind == 19),
        };
        if done.is_ok() {
            (block.acknowledged, block.pending) = (stamp, None);
        }
        done.is_ok()
    }
}
