//! Which seeds have been walked, and ended well, so that runs add up: `walked.txt` beside `Cargo.toml`.
//!
//! A line is the digest of the sources, the world's name, and a range of seeds. With other sources a walk is another walk: lines
//! with another digest count for nothing, and go when one is added.

use std::fmt;
use std::ops::Range;

/// The digest of the sources of `verbatim-session` and of this crate, without tests that have files of their own.
pub const DIGEST: &str = env!("SOURCES_DIGEST");

/// The lines of the file that count.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Walked {
    digest: String,
    lines: Vec<(String, Range<u64>)>,
}

/// The range that `FIRST..END` stands for.
pub fn range(text: &str) -> Result<Range<u64>, String> {
    let (first, end) = text.split_once("..").ok_or("a range is FIRST..END")?;
    let number = |text: &str| {
        text.parse::<u64>()
            .map_err(|error| format!("{text:?} is no number: {error}"))
    };
    Ok(number(first)?..number(end)?)
}

impl Walked {
    /// What the file says of the sources with this digest.
    pub fn read(text: &str, digest: &str) -> Result<Self, String> {
        let mut lines = Vec::new();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let [of, world, seeds] = line.split_whitespace().collect::<Vec<_>>()[..] else {
                return Err(format!("{line:?} is not DIGEST WORLD FIRST..END"));
            };
            let seeds = range(seeds)?;
            if of == digest {
                lines.push((world.to_owned(), seeds));
            }
        }
        let digest = digest.to_owned();
        Ok(Self { digest, lines })
    }

    /// What of a world's `seeds` has not been walked.
    pub fn left(&self, world: &str, seeds: Range<u64>) -> Vec<Range<u64>> {
        let mut left = vec![seeds];
        for (_, walked) in self.lines.iter().filter(|(of, _)| of == world) {
            left = left
                .into_iter()
                .flat_map(|left| {
                    let before = left.start..left.end.min(walked.start);
                    let behind = left.start.max(walked.end)..left.end;
                    [before, behind]
                })
                .filter(|left| !left.is_empty())
                .collect();
        }
        left
    }

    /// These have been walked, too.
    pub fn add(&mut self, world: &str, seeds: Range<u64>) {
        self.lines.push((world.to_owned(), seeds));
        self.lines
            .sort_by(|one, other| (&one.0, one.1.start).cmp(&(&other.0, other.1.start)));
        self.lines.dedup_by(|next, before| {
            let touches = next.0 == before.0 && next.1.start <= before.1.end;
            if touches {
                before.1.end = before.1.end.max(next.1.end);
            }
            touches
        });
    }

    /// How many seeds of a world have been walked.
    pub fn count(&self, world: &str) -> u64 {
        let of_world = self.lines.iter().filter(|(of, _)| of == world);
        of_world.map(|(_, seeds)| seeds.end - seeds.start).sum()
    }
}

impl fmt::Display for Walked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "# Seeds that were walked and ended well: digest of the sources, world, seeds."
        )?;
        for (world, seeds) in &self.lines {
            writeln!(f, "{} {world} {}..{}", self.digest, seeds.start, seeds.end)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
