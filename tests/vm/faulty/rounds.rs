//! A tenant with a known sequence of writes: in each round it writes some blocks, and flushes. So the number
//! of the last acknowledged round determines all that was promised to it.

use std::io;

use anyhow::ensure;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::client::Client;

/// Length of a write.
pub const BLOCK: usize = 4096;

/// Writes in a round.
const WRITES: usize = 6;

/// The tenant's work on a volume of `blocks` blocks.
#[derive(Clone, Copy)]
pub struct Rounds {
    pub blocks: u64,
    pub seed: u64,
}

impl Rounds {
    /// Blocks that a round writes. Rounds count from 1.
    fn written(self, round: u64) -> impl Iterator<Item = u64> {
        let mut random = StdRng::seed_from_u64(self.seed << 32 | round);
        (0..WRITES).map(move |_| random.random_range(0..self.blocks))
    }

    fn content(self, block: u64, round: u64) -> Vec<u8> {
        let stamp = self.seed << 48 | block << 24 | round;
        stamp.to_le_bytes().repeat(BLOCK / 8)
    }

    /// Carries out one round; its flush makes the round and all earlier ones durable.
    pub fn carry_out(self, client: &mut Client, round: u64) -> io::Result<()> {
        for block in self.written(round) {
            client.write(block * BLOCK as u64, &self.content(block, round), false)?;
        }
        client.flush()
    }

    /// Checks that the data are those after the `acknowledged` round or a later one: each block has the whole
    /// content of that round or of a later one, up to `begun`.
    pub fn check(self, data: &[u8], acknowledged: u64, begun: u64) -> anyhow::Result<()> {
        ensure!(
            data.len() as u64 == self.blocks * BLOCK as u64,
            "{} bytes",
            data.len()
        );
        let mut promised = vec![0; self.blocks as usize];
        let mut later = vec![Vec::new(); self.blocks as usize];
        for round in 1..=begun {
            for block in self.written(round) {
                match round <= acknowledged {
                    true => promised[block as usize] = round,
                    false => later[block as usize].push(round),
                }
            }
        }
        for (block, data) in (0..).zip(data.chunks_exact(BLOCK)) {
            let promised = promised[block as usize];
            let first = match promised {
                0 => vec![0; BLOCK],
                round => self.content(block, round),
            };
            let is_later = || {
                later[block as usize]
                    .iter()
                    .any(|&round| data == self.content(block, round))
            };
            ensure!(
                data == first || is_later(),
                "block {block} begins with {:x?}; round {promised} is promised there (acknowledged {acknowledged}, begun {begun})",
                &data[..8]
            );
        }
        Ok(())
    }
}
