//! Processes of this test: work on a mounted file system must not run in the process that serves its device.
//!
//! Each is this program again, with one test that does nothing by itself. It takes its task from an
//! environment variable, reports its work on its standard output, a line of JSON each, and ends when its
//! standard input does.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::operations::OPERATIONS;
use crate::work::{Outcome, Work};
use rand::Rng;

const TASK: &str = "VERBATIM_FILESYSTEM_TASK";

/// Pause between two operations of a process.
const PAUSE: Duration = Duration::from_millis(10);

#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Task {
    /// Random operations, until the input ends; then the process notes the expected content of the files.
    Operate {
        folder: PathBuf,
        is_xfs: bool,
        seed: u64,
        notes: PathBuf,
    },
    /// Compares the files with the notes.
    Verify { notes: PathBuf },
    /// Makes files durable, and reports each of them (`crash.rs`).
    Promise {
        folder: PathBuf,
        generation: u64,
        seed: u64,
    },
    /// Checks that the reported files are durable.
    Keep { folder: PathBuf, promises: PathBuf },
}

/// The expected state of a file.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Note {
    path: PathBuf,
    length: u64,
    hash: String,
    mode: u32,
    links: u64,
    attributes: BTreeMap<String, Vec<u8>>,
}

/// Number of runs of each operation, and of runs without support.
pub type Counts = BTreeMap<String, (u64, u64)>;

/// A process, which is killed on drop.
pub struct Process {
    child: Child,
    input: Option<ChildStdin>,
    reading: Option<JoinHandle<Vec<String>>>,
}

impl Process {
    pub fn start(task: &Task) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("a path"))
            .args(["--exact", "a_process_of_the_others", "--ignored", "--nocapture"])
            .env(TASK, serde_json::to_string(task).expect("JSON"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts");
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().expect("it is piped"));
        let reading = std::thread::spawn(move || {
            // A line that was cut off does not count.
            let lines = output.lines().map_while(Result::ok);
            lines
                .filter(|line| line.starts_with('{') && line.ends_with('}'))
                .collect()
        });
        Self {
            child,
            input,
            reading: Some(reading),
        }
    }

    /// Whether the process has ended by itself, which it must not.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("it is ours").is_some()
    }

    /// Ends the process properly; returns its output.
    pub fn stop(mut self) -> Vec<String> {
        drop(self.input.take());
        let status = self.child.wait().expect("it ends");
        assert!(
            status.success(),
            "a process that works on files has failed (above): {status}"
        );
        self.reading.take().expect("it is read").join().expect("no panic")
    }

    /// Kills the process, or waits for its end; returns its output.
    pub fn kill(mut self) -> Vec<String> {
        let _ = self.child.kill();
        self.child.wait().expect("it ends");
        self.reading.take().expect("it is read").join().expect("no panic")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Writes a line, and flushes it.
pub fn tell(line: &impl Serialize) {
    let mut line = serde_json::to_string(line).expect("JSON");
    line.push('\n');
    let mut output = std::io::stdout().lock();
    output
        .write_all(line.as_bytes())
        .and_then(|()| output.flush())
        .expect("somebody reads");
}

/// A flag that is set when the input ends.
fn end() -> Arc<AtomicBool> {
    let is_over = Arc::new(AtomicBool::new(false));
    let setting = is_over.clone();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        setting.store(true, Ordering::Relaxed);
    });
    is_over
}

/// Runs the task of this process, if it has one.
pub fn run_task() {
    let Ok(task) = std::env::var(TASK) else {
        return;
    };
    match serde_json::from_str(&task).expect("a task") {
        Task::Operate {
            folder,
            is_xfs,
            seed,
            notes,
        } => operate(folder, is_xfs, seed, &notes),
        Task::Verify { notes } => verify(&notes),
        Task::Promise {
            folder,
            generation,
            seed,
        } => crate::promises::make(&folder, generation, seed, &end()),
        Task::Keep { folder, promises } => crate::promises::check(&folder, &promises),
    }
}

fn operate(folder: PathBuf, is_xfs: bool, seed: u64, notes: &Path) {
    let is_over = end();
    let mut counts = Counts::new();
    let mut work = Work::new(folder, is_xfs, seed).expect("files are made");
    while !is_over.load(Ordering::Relaxed) {
        let (name, operation) = OPERATIONS[work.random.random_range(0..OPERATIONS.len())];
        let outcome = operation(&mut work);
        let outcome = outcome.unwrap_or_else(|error| panic!("seed {seed}: {name}: {error}"));
        let count = counts.entry(name.to_owned()).or_default();
        match outcome {
            Outcome::Done => count.0 += 1,
            Outcome::NotHere => count.1 += 1,
        }
        // A copy takes the room that tenants leave.
        std::thread::sleep(PAUSE);
        if work.random.random_bool(0.1) {
            work.check(&format!("seed {seed}: after {name}"))
                .expect("they can be read");
        }
    }
    work.check("at the end").expect("they can be read");
    let noted: Vec<Note> = work.subjects.iter().map(|subject| note(&subject.path)).collect();
    for (subject, note) in work.subjects.iter().zip(&noted) {
        assert_eq!(
            note.hash,
            blake3::hash(&subject.content).to_string(),
            "by its name"
        );
    }
    fs::write(notes, serde_json::to_vec(&noted).expect("JSON")).expect("written");
    tell(&counts);
}

fn note(path: &Path) -> Note {
    let content = fs::read(path).expect("it is there");
    let file = fs::File::open(path).expect("it is there");
    let metadata = file.metadata().expect("it is there");
    let mut attributes = BTreeMap::new();
    for number in 0..3 {
        let name = format!("user.verbatim.{number}");
        let mut value = vec![0; 65_536];
        if let Ok(length) = rustix::fs::fgetxattr(&file, name.as_str(), &mut value) {
            attributes.insert(name, value[..length].to_vec());
        }
    }
    Note {
        path: path.to_owned(),
        length: metadata.len(),
        hash: blake3::hash(&content).to_string(),
        mode: metadata.mode(),
        links: metadata.nlink(),
        attributes,
    }
}

fn verify(notes: &Path) {
    let noted: Vec<Note> = serde_json::from_slice(&fs::read(notes).expect("notes")).expect("JSON");
    assert!(!noted.is_empty(), "nothing was noted");
    for wanted in noted {
        assert_eq!(note(&wanted.path), wanted, "after it was mounted again");
    }
}
