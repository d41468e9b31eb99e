//! Fuzz targets: what parses bytes that another party wrote, fed with bytes that nobody sane would write.
//!
//! A [`Target`] is a function of bytes that panics if something is wrong: a parser that panics itself, or a property that
//! does not hold (what was decoded and encoded again must be the same, memory beside a queue must stay as it was…).
//! There are two ways to run one:
//!
//! - [`engine`]: a fixed number of mutated inputs from a fixed seed, in a second or two, as a test (`tests/short.rs`);
//! - libFuzzer with coverage and address sanitizer, for as long as one likes (`src/main.rs`, started by `run`).
//!
//! What they found stays in `regressions/TARGET/` and is run first, in both. `docs/robustness.md` lists the parsers and
//! says which of them has which target.

pub mod engine;
pub mod targets;

pub use targets::TARGETS;

/// One thing to fuzz.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Its name, in commands and folders.
    pub name: &'static str,
    /// Takes one input.
    ///
    /// # Panics
    /// If something is wrong.
    pub run: fn(&[u8]),
    /// Inputs to start from.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Inputs of a short run: about a second's worth.
    pub short_executions: u64,
}

impl Target {
    /// The target of that name.
    pub fn named(name: &str) -> Option<&'static Self> {
        TARGETS.iter().find(|target| target.name == name)
    }

    /// What was found and fixed once: file name and content.
    pub fn regressions(&self) -> Vec<(String, Vec<u8>)> {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("regressions")
            .join(self.name);
        let Ok(entries) = std::fs::read_dir(folder) else {
            return Vec::new();
        };
        let files = entries.flatten().map(|entry| {
            let content = std::fs::read(entry.path()).expect("a regression can be read");
            (entry.file_name().to_string_lossy().into_owned(), content)
        });
        files.collect()
    }
}
