//! Walks by seed through worlds that are tests of their crate: in pieces, on several threads, without seeds
//! that were walked with the same sources.
//!
//! | variable of the environment | |
//! | --- | --- |
//! | `VERBATIM_VOLUME_SEEDS`, `VERBATIM_LEASE_SEEDS` | FIRST..END, in place of the few seeds that every run of the tests walks |
//! | `VERBATIM_WALKED` | a file beside `Cargo.toml` of seeds that were walked with these sources. They are left out, and each piece is added once it has ended well |
//! | `VERBATIM_WALK_THREADS` | 2 |
//!
//! A walk that was interrupted therefore goes on. The file is that of [`verbatim_simulation::walked`]. Worlds
//! of one crate share it: they have one digest, over all sources of the crate and its tests.

use std::env;
use std::fs;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use verbatim_simulation::walked::{self, Walked};

/// Number of seeds after which a walk is noted.
const PIECE: u64 = 20_000;

/// The crate that has the worlds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Of {
    /// `verbatim-mirror`.
    Volumes,
    /// `verbatim-lease`.
    Leases,
}

impl Of {
    fn digest(self) -> &'static str {
        match self {
            Self::Volumes => env!("MIRROR_DIGEST"),
            Self::Leases => env!("LEASE_DIGEST"),
        }
    }

    fn seeds(self) -> &'static str {
        match self {
            Self::Volumes => "VERBATIM_VOLUME_SEEDS",
            Self::Leases => "VERBATIM_LEASE_SEEDS",
        }
    }
}

/// Seeds to be walked.
#[derive(Debug)]
pub struct Walk {
    seeds: Range<u64>,
    threads: u64,
    digest: &'static str,
    walked: Option<PathBuf>,
}

impl Walk {
    /// A walk by the seeds `few`, unless the environment has others.
    pub fn new(of: Of, few: Range<u64>) -> Self {
        let seeds = match env::var(of.seeds()) {
            Ok(text) => walked::range(&text).unwrap_or_else(|error| panic!("{}: {error}", of.seeds())),
            Err(_) => few,
        };
        let threads = match env::var("VERBATIM_WALK_THREADS") {
            Ok(text) => text.parse().expect("VERBATIM_WALK_THREADS is a number"),
            Err(_) => 2,
        };
        Self {
            seeds,
            threads,
            digest: of.digest(),
            walked: env::var_os("VERBATIM_WALKED").map(PathBuf::from),
        }
    }

    /// Walks through the world of this name. `add` combines the results of `walk`. Returns the number of
    /// seeds that were walked, and the result. `walk` panics at a violation: then the piece is not noted.
    pub fn through<T: Default + Send>(
        &self,
        world: &str,
        walk: impl Fn(u64) -> T + Sync,
        add: impl Fn(&mut T, T) + Sync,
    ) -> (u64, T) {
        let (mut count, mut all) = (0, T::default());
        for seeds in self.left(world) {
            for first in (seeds.start..seeds.end).step_by(PIECE as usize) {
                let piece = first..(first + PIECE).min(seeds.end);
                count += piece.end - piece.start;
                for part in self.piece(piece.clone(), &walk, &add) {
                    add(&mut all, part);
                }
                self.note(world, piece);
            }
        }
        if self.walked.is_some() {
            let all = self.read().count(world);
            println!("{world}: {count} seeds were walked now, {all} with these sources");
        }
        (count, all)
    }

    fn piece<T: Default + Send>(
        &self,
        piece: Range<u64>,
        walk: &(impl Fn(u64) -> T + Sync),
        add: &(impl Fn(&mut T, T) + Sync),
    ) -> Vec<T> {
        let threads = self.threads.max(1);
        let part = |number: u64| {
            let mut all = T::default();
            for seed in piece.clone().filter(|seed| seed % threads == number) {
                add(&mut all, walk(seed));
            }
            all
        };
        std::thread::scope(|scope| {
            let part = &part;
            let others: Vec<_> = (1..threads)
                .map(|number| scope.spawn(move || part(number)))
                .collect();
            let mut parts = vec![part(0)];
            for other in others {
                parts.push(
                    other
                        .join()
                        .unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                );
            }
            parts
        })
    }

    fn left(&self, world: &str) -> Vec<Range<u64>> {
        self.read().left(world, self.seeds.clone())
    }

    fn read(&self) -> Walked {
        let text = match &self.walked {
            None => String::new(),
            Some(file) => text(file),
        };
        Walked::read(&text, self.digest).unwrap_or_else(|error| panic!("{:?}: {error}", self.walked))
    }

    /// Notes a piece. The file is read again just before, and replaced atomically: other worlds of the crate
    /// may be walked at the same time.
    fn note(&self, world: &str, piece: Range<u64>) {
        let Some(file) = &self.walked else {
            return;
        };
        let mut walked = self.read();
        walked.add(world, piece);
        let new = file.with_extension(format!("new-{}", std::process::id()));
        let replaced = fs::write(&new, walked.to_string()).and_then(|()| fs::rename(&new, file));
        replaced.unwrap_or_else(|error| panic!("cannot write {}: {error}", file.display()));
    }
}

fn text(file: &Path) -> String {
    match fs::read_to_string(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        text => text.unwrap_or_else(|error| panic!("cannot read {}: {error}", file.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    fn walk(folder: &Path, seeds: Range<u64>) -> Walk {
        Walk {
            seeds,
            threads: 2,
            digest: "d",
            walked: Some(folder.join("walked.txt")),
        }
    }

    fn seen(walk: &Walk, world: &str) -> (u64, Vec<u64>) {
        let (count, mut seeds) =
            walk.through(world, |seed| vec![seed], |all: &mut Vec<_>, one| all.extend(one));
        seeds.sort_unstable();
        (count, seeds)
    }

    #[test]
    fn every_seed_is_walked_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let (count, seeds) = seen(&walk(folder.path(), 5..45_000), "a");
        assert_eq!(count, 44_995);
        assert!(seeds.into_iter().eq(5..45_000));
        let (count, seeds) = seen(&walk(folder.path(), 0..45_002), "a");
        assert_eq!((count, seeds), (7, vec![0, 1, 2, 3, 4, 45_000, 45_001]));
        let (count, _) = seen(&walk(folder.path(), 0..10), "b");
        assert_eq!(count, 10, "another world");
        let other = Walk {
            digest: "e",
            ..walk(folder.path(), 0..10)
        };
        assert_eq!(seen(&other, "a").0, 10, "other sources");
    }

    #[test]
    fn a_piece_that_ends_badly_is_not_noted_and_those_before_it_are() {
        let folder = tempfile::tempdir().expect("a folder");
        let walk = walk(folder.path(), 0..3 * PIECE);
        let bad = PIECE + 7;
        let ended = catch_unwind(AssertUnwindSafe(|| {
            walk.through("a", |seed| assert_ne!(seed, bad, "it is found"), |(), ()| {})
        }));
        assert!(ended.is_err());
        assert!(walk.left("a").into_iter().flatten().eq(PIECE..3 * PIECE));
    }
}
