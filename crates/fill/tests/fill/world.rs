//! Folders with images and a cache, and the helpers.

use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use verbatim_fill::{Config, Filler, Phase};

use crate::criu::{self, LAZY, PRESENT};
use crate::task::{PAGE, check, content};

pub fn seed() -> u64 {
    let seed = std::env::var("VERBATIM_FILL_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(rand::random);
    println!("VERBATIM_FILL_SEED={seed}");
    seed
}

pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// Folders, and the helpers.
pub struct World {
    pub folder: tempfile::TempDir,
    pub config: Config,
}

impl World {
    pub fn new() -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = |name: &str| folder.path().join(name);
        for name in ["images", "cache", "work"] {
            std::fs::create_dir(path(name)).unwrap();
        }
        let config = Config {
            images: path("images"),
            cache: path("cache"),
            work: path("work"),
            control: path("control"),
            log: path("log"),
        };
        Self { folder, config }
    }

    pub fn start(&self) -> Filler {
        let program = std::env::current_exe().unwrap();
        Filler::start(&program, &self.config).unwrap()
    }

    /// Every page of the ranges for which `lazy` says so is left for later, and in the cache.
    pub fn dump(&self, vpid: u32, ranges: &[(u64, u64)], lazy: impl Fn(u64) -> bool) {
        let file = std::fs::File::create(self.cache(vpid)).unwrap();
        let (mut runs, mut mappings) = (Vec::new(), Vec::new());
        for (start, bytes) in ranges {
            mappings.push((*start, start + bytes, 0));
            for at in (*start..start + bytes).step_by(PAGE as usize) {
                if lazy(at) {
                    runs.push((at, 1, LAZY));
                    file.write_all_at(&content(at), at).unwrap();
                } else if at % (7 * PAGE) == 0 {
                    // In the images: CRIU fills it. Here it is zeros.
                    runs.push((at, 1, LAZY | PRESENT));
                }
            }
        }
        criu::write_task(&self.config.images, vpid, &runs, &mappings);
    }

    pub fn cache(&self, vpid: u32) -> PathBuf {
        self.config.cache.join(vpid.to_string())
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }
}

pub fn end(world: &World, filler: Filler) {
    if let Err(error) = filler.wait(&Phase::Filled, soon()) {
        panic!("{error}; {:?}\n{}", filler.status(), world.log());
    }
    let status = filler.status().unwrap();
    assert_eq!((status.pages_left, status.unplaced), (0, 0), "{status:?}");
    let control = filler.control().to_owned();
    filler.end().unwrap();
    assert!(Filler::find(&control).unwrap().is_none());
}

pub const MIB: u64 = 1 << 20;

/// Most pages, not all.
pub fn most(at: u64) -> bool {
    at / PAGE % 11 != 3
}

pub fn is_right_everywhere(start: u64, bytes: u64) -> bool {
    (start..start + bytes)
        .step_by(PAGE as usize)
        .all(|at| check(at, most(at).then_some(at)))
}
