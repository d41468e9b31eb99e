//! Files that are made durable while power may fail at any moment: each promise is reported when its system
//! call has returned.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};

use crate::process::tell;

/// Files that are replaced by newer ones.
const REPLACED: u64 = 6;
/// Files that live for a while.
const LIVING: usize = 40;

/// Pause between two files.
const PAUSE: Duration = Duration::from_millis(25);

/// A promise about a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Promise {
    /// The file has this version, or a later one.
    Has { name: String, version: u64 },
    /// The file is about to be deleted: it may exist or not.
    Leaves { name: String },
    /// The file does not exist.
    Gone { name: String },
}

/// The last promises, by name.
pub type Promises = BTreeMap<String, Promise>;

/// Notes the promises that a process has reported.
pub fn note(promises: &mut Promises, lines: &[String]) {
    for line in lines {
        let promise: Promise = serde_json::from_str(line).expect("a promise");
        let (Promise::Has { name, .. } | Promise::Leaves { name } | Promise::Gone { name }) = &promise;
        promises.insert(name.clone(), promise.clone());
    }
}

/// A file identifies itself: by its version, its length, bytes that follow from both, and their fingerprint.
fn content(name: &str, version: u64, length: usize) -> Vec<u8> {
    let seed = *blake3::hash(format!("{name} {version}").as_bytes()).as_bytes();
    let mut data = vec![0; length];
    StdRng::from_seed(seed).fill(data.as_mut_slice());
    let mut whole = version.to_le_bytes().to_vec();
    whole.extend((length as u64).to_le_bytes());
    whole.extend(data);
    let hash = blake3::hash(&whole);
    whole.extend(hash.as_bytes());
    whole
}

/// The version of a complete file.
fn version_of(name: &str, found: &[u8]) -> Option<u64> {
    let version = u64::from_le_bytes(found.get(..8)?.try_into().ok()?);
    let length = u64::from_le_bytes(found.get(8..16)?.try_into().ok()?);
    // The length may be one that was never written.
    let length = usize::try_from(length)
        .ok()
        .filter(|&length| length < found.len())?;
    (found == content(name, version, length)).then_some(version)
}

/// Makes files until the input ends, or the disk fails.
pub fn make(folder: &Path, generation: u64, seed: u64, is_over: &AtomicBool) {
    let mut maker = Maker {
        random: StdRng::seed_from_u64(seed),
        version: generation << 32,
        living: Vec::new(),
    };
    if maker.tidy(folder).is_err() {
        return;
    }
    while !is_over.load(Ordering::Relaxed) {
        // An error means that the device has gone, which is expected.
        if maker.one(folder).is_err() {
            return;
        }
        // A copy takes the room that tenants leave.
        std::thread::sleep(PAUSE);
    }
}

struct Maker {
    random: StdRng,
    version: u64,
    living: Vec<String>,
}

impl Maker {
    /// Deletes the files of earlier makers, except those that are replaced.
    fn tidy(&mut self, folder: &Path) -> io::Result<()> {
        for entry in fs::read_dir(folder)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if name == "lost+found" || (name.starts_with("replaced") && !name.ends_with(".new")) {
                continue;
            }
            // The other names have no promise.
            if name.starts_with("new-") || (name.starts_with("linked-") && !name.ends_with(".first")) {
                tell(&Promise::Leaves { name: name.clone() });
            }
            fs::remove_file(folder.join(&name))?;
        }
        File::open(folder)?.sync_all()
    }

    fn one(&mut self, folder: &Path) -> io::Result<()> {
        self.version += 1;
        let version = self.version;
        let length = match self.random.random_range(0..4) {
            0 => self.random.random_range(0..200),
            1 => self.random.random_range(0..200_000),
            _ => self.random.random_range(0..20_000),
        };
        match self.random.random_range(0..10) {
            // A file takes the place of an older one.
            0..4 => {
                let name = format!("replaced-{}", self.random.random_range(0..REPLACED));
                let new = folder.join(format!("{name}.new"));
                let mut file = File::create(&new)?;
                file.write_all(&content(&name, version, length))?;
                file.sync_all()?;
                fs::rename(&new, folder.join(&name))?;
                File::open(folder)?.sync_all()?;
                tell(&Promise::Has { name, version });
            }
            // A new file, by several writes; the last one makes all of them durable.
            4..8 => {
                let name = format!("new-{version:x}");
                let data = content(&name, version, length);
                let mut file = File::create(folder.join(&name))?;
                for part in data.chunks(7000) {
                    file.write_all(part)?;
                }
                file.sync_data()?;
                File::open(folder)?.sync_all()?;
                self.living.push(name.clone());
                tell(&Promise::Has { name, version });
            }
            // A file gets a second name, in a folder of its own, and loses the first.
            8 => {
                let name = format!("linked-{version:x}");
                let first = folder.join(format!("{name}.first"));
                let mut file = File::create(&first)?;
                file.write_all(&content(&name, version, length))?;
                file.sync_all()?;
                fs::hard_link(&first, folder.join(&name))?;
                fs::remove_file(&first)?;
                File::open(folder)?.sync_all()?;
                self.living.push(name.clone());
                tell(&Promise::Has { name, version });
            }
            // A file that is neither durable nor promised.
            _ => {
                let name = format!("loose-{}", version % 8);
                fs::write(folder.join(name), content("loose", version, length))?;
            }
        }
        if self.living.len() > LIVING {
            let name = self.living.remove(self.random.random_range(0..LIVING));
            tell(&Promise::Leaves { name: name.clone() });
            fs::remove_file(folder.join(&name))?;
            File::open(folder)?.sync_all()?;
            tell(&Promise::Gone { name });
        }
        Ok(())
    }
}

/// Checks that every promise was kept.
pub fn check(folder: &Path, promises: &Path) {
    let promises: Promises = serde_json::from_slice(&fs::read(promises).expect("promises")).expect("JSON");
    let mut broken = Vec::new();
    for (name, promise) in &promises {
        let mut found = Vec::new();
        let is_there = match File::open(folder.join(name)) {
            Ok(mut file) => {
                file.read_to_end(&mut found).expect("it can be read");
                true
            }
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::NotFound, "{name}: {error}");
                false
            }
        };
        let version = version_of(name, &found);
        let is_kept = match promise {
            Promise::Has {
                version: promised, ..
            } => version.is_some_and(|version| version >= *promised),
            Promise::Leaves { .. } => !is_there || version.is_some(),
            Promise::Gone { .. } => !is_there,
        };
        if !is_kept {
            let length = found.len();
            broken.push(format!(
                "{promise:x?}: there {is_there}, version {version:x?}, {length} bytes"
            ));
        }
    }
    assert!(
        broken.is_empty(),
        "{} of {} promises are broken: {broken:#?}",
        broken.len(),
        promises.len()
    );
}
