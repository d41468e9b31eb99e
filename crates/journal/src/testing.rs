//! A simulated disk, which crashes and fails as it is told to.
//!
//! What is written is seen at once, as in a page cache, and is on the disk when it is synced. Of what is not, a crash keeps any
//! part. Operations are counted, so that a test can let any of them fail.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::storage::{Storage, StorageFile};

/// What happens to an operation instead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// The error that it returns.
    pub error: io::ErrorKind,
    /// How much of it is done all the same, in bytes for writes and in [units](Disk::crash) for syncs. Of all others everything
    /// is done if this is not 0.
    ///
    /// What a sync of a file does not write is not dirty any more: the next sync leaves it out, and succeeds. Names stay dirty.
    pub done: usize,
}

/// A disk, of which all clones are the same one.
#[derive(Debug, Clone, Default)]
pub struct Disk(Arc<Mutex<State>>);

#[derive(Debug, Clone, Default)]
struct State {
    files: Vec<Contents>,
    /// The names that are seen, and those that a crash leaves at least.
    names: BTreeMap<String, usize>,
    names_on_disk: BTreeMap<String, usize>,
    dirty_names: Vec<NameChange>,
    operations: u64,
    faults: Vec<(Range<u64>, Fault)>,
    capacity: Option<u64>,
    boot: u64,
    mounts: u64,
    locked_by: Option<u64>,
}

#[derive(Debug, Clone, Default)]
struct Contents {
    seen: Vec<u8>,
    on_disk: Vec<u8>,
    dirty: Vec<Change>,
    reserved: u64,
}

#[derive(Debug, Clone)]
enum Change {
    Write { offset: usize, bytes: Vec<u8> },
    Truncate(usize),
}

#[derive(Debug, Clone)]
enum NameChange {
    Create(String, usize),
    Rename(String, String),
    Remove(String),
}

impl Change {
    fn units(&self) -> usize {
        match self {
            Self::Write { bytes, .. } => bytes.len(),
            Self::Truncate(_) => 1,
        }
    }

    /// Does the given units of it.
    fn apply(&self, content: &mut Vec<u8>, units: Range<usize>) {
        match self {
            _ if units.is_empty() => {}
            Self::Write { offset, bytes } => {
                let range = offset + units.start..offset + units.end;
                content.resize(content.len().max(range.end), 0);
                content[range].copy_from_slice(&bytes[units]);
            }
            Self::Truncate(length) => content.resize(*length, 0),
        }
    }
}

impl NameChange {
    fn apply(&self, names: &mut BTreeMap<String, usize>) {
        match self {
            Self::Create(name, file) => drop(names.insert(name.clone(), *file)),
            Self::Rename(from, to) => {
                if let Some(file) = names.remove(from) {
                    names.insert(to.clone(), file);
                }
            }
            Self::Remove(name) => drop(names.remove(name)),
        }
    }
}

impl Contents {
    fn change(&mut self, change: Change) {
        change.apply(&mut self.seen, 0..change.units());
        self.dirty.push(change);
    }

    fn blocks(&self) -> u64 {
        self.reserved.max(self.seen.len() as u64)
    }
}

impl State {
    /// Counts an operation; returns the fault that was ordered for it.
    fn operation(&mut self, boot: u64) -> io::Result<Option<Fault>> {
        if boot != self.boot {
            return Err(io::Error::other("this is from before the crash"));
        }
        let index = self.operations;
        self.operations += 1;
        let fault = self.faults.iter().find(|(range, _)| range.contains(&index));
        Ok(fault.map(|(_, fault)| *fault))
    }

    /// Does something at once or not at all.
    fn whole_operation(&mut self, boot: u64, act: impl FnOnce(&mut Self)) -> io::Result<()> {
        let fault = self.operation(boot)?;
        if fault.is_none_or(|fault| fault.done > 0) {
            act(self);
        }
        fault.map_or(Ok(()), |fault| Err(fault.error.into()))
    }

    fn change_names(&mut self, change: NameChange) {
        change.apply(&mut self.names);
        self.dirty_names.push(change);
    }

    fn file(&self, name: &str) -> io::Result<usize> {
        self.names
            .get(name)
            .copied()
            .ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// The bytes that are free.
    fn free(&self) -> u64 {
        let used: u64 = self.names.values().map(|file| self.files[*file].blocks()).sum();
        self.capacity
            .map_or(u64::MAX, |capacity| capacity.saturating_sub(used))
    }
}

impl Disk {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no panic under this lock")
    }

    /// Another disk with the same on it, and in the page cache.
    pub fn copy(&self) -> Self {
        Self(Arc::new(Mutex::new(self.state().clone())))
    }

    /// The folder on it, as one process has it open. To drop it is the process's death: the lock is free, the page cache stays.
    pub fn mount(&self) -> Mount {
        let mut state = self.state();
        state.mounts += 1;
        Mount {
            disk: self.clone(),
            boot: state.boot,
            number: state.mounts,
        }
    }

    /// The operations so far.
    pub fn operations(&self) -> u64 {
        self.state().operations
    }

    /// Lets operations fail from now on, the first one that was ever done being number 0.
    pub fn fail(&self, operations: Range<u64>, fault: Fault) {
        self.state().faults.push((operations, fault));
    }

    /// Lets nothing fail any more.
    pub fn heal(&self) {
        self.state().faults.clear();
    }

    /// Says how many bytes fit on it.
    pub fn set_capacity(&self, bytes: Option<u64>) {
        self.state().capacity = bytes;
    }

    /// The machine dies. Of each change that is not synced those units stay that `survives` chooses, which is called with their
    /// number: a byte each for a write, 1 for everything else.
    pub fn crash(&self, mut survives: impl FnMut(usize) -> Range<usize>) {
        let mut state = self.state();
        let state = &mut *state;
        state.boot += 1;
        state.locked_by = None;
        for change in state.dirty_names.drain(..) {
            if !survives(1).is_empty() {
                change.apply(&mut state.names_on_disk);
            }
        }
        state.names = state.names_on_disk.clone();
        for file in &mut state.files {
            for change in file.dirty.drain(..) {
                change.apply(&mut file.on_disk, survives(change.units()));
            }
            file.seen = file.on_disk.clone();
            file.reserved = 0;
        }
    }

    /// The files as they are seen.
    pub fn files(&self) -> BTreeMap<String, Vec<u8>> {
        let state = self.state();
        let names = state.names.iter();
        names
            .map(|(name, file)| (name.clone(), state.files[*file].seen.clone()))
            .collect()
    }

    /// Puts a file there, or removes it, as if it had been so for ever.
    pub fn put(&self, name: &str, content: Option<Vec<u8>>) {
        let mut state = self.state();
        let state = &mut *state;
        let Some(content) = content else {
            state.names.remove(name);
            state.names_on_disk.remove(name);
            return;
        };
        let file = state.files.len();
        state.files.push(Contents {
            seen: content.clone(),
            on_disk: content,
            ..Contents::default()
        });
        state.names.insert(name.to_owned(), file);
        state.names_on_disk.insert(name.to_owned(), file);
    }
}

/// The folder on a [`Disk`], as one process has it.
#[derive(Debug)]
pub struct Mount {
    disk: Disk,
    boot: u64,
    number: u64,
}

impl Drop for Mount {
    fn drop(&mut self) {
        let mut state = self.disk.state();
        if state.locked_by == Some(self.number) {
            state.locked_by = None;
        }
    }
}

impl Mount {
    fn handle(&self, file: usize) -> OpenFile {
        OpenFile {
            disk: self.disk.clone(),
            boot: self.boot,
            file,
        }
    }
}

impl Storage for Mount {
    type File = OpenFile;

    fn lock(&mut self) -> io::Result<()> {
        let mut state = self.disk.state();
        match state.locked_by.is_some_and(|other| other != self.number) {
            true => Err(io::ErrorKind::WouldBlock.into()),
            false => state.whole_operation(self.boot, |state| state.locked_by = Some(self.number)),
        }
    }

    fn names(&mut self) -> io::Result<Vec<String>> {
        let mut state = self.disk.state();
        state.whole_operation(self.boot, |_| {})?;
        Ok(state.names.keys().cloned().collect())
    }

    fn create(&mut self, name: &str) -> io::Result<OpenFile> {
        let mut state = self.disk.state();
        if state.file(name).is_ok() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        state.whole_operation(self.boot, |state| {
            state.files.push(Contents::default());
            state.change_names(NameChange::Create(name.to_owned(), state.files.len() - 1));
        })?;
        let file = state.file(name)?;
        drop(state);
        Ok(self.handle(file))
    }

    fn open(&mut self, name: &str) -> io::Result<OpenFile> {
        let mut state = self.disk.state();
        state.whole_operation(self.boot, |_| {})?;
        let file = state.file(name)?;
        drop(state);
        Ok(self.handle(file))
    }

    fn rename(&mut self, from: &str, to: &str) -> io::Result<()> {
        let mut state = self.disk.state();
        state.file(from)?;
        let change = NameChange::Rename(from.to_owned(), to.to_owned());
        state.whole_operation(self.boot, |state| state.change_names(change))
    }

    fn remove(&mut self, name: &str) -> io::Result<()> {
        let mut state = self.disk.state();
        state.file(name)?;
        let change = NameChange::Remove(name.to_owned());
        state.whole_operation(self.boot, |state| state.change_names(change))
    }

    fn sync(&mut self) -> io::Result<()> {
        let mut state = self.disk.state();
        let state = &mut *state;
        let fault = state.operation(self.boot)?;
        let all = state.dirty_names.len();
        let done = fault.map_or(all, |fault| fault.done.min(all));
        for change in state.dirty_names.drain(..done) {
            change.apply(&mut state.names_on_disk);
        }
        fault.map_or(Ok(()), |fault| Err(fault.error.into()))
    }
}

/// A file on a [`Disk`] that is open.
#[derive(Debug)]
pub struct OpenFile {
    disk: Disk,
    boot: u64,
    file: usize,
}

impl StorageFile for OpenFile {
    fn read(&mut self, limit: u64) -> io::Result<Vec<u8>> {
        let mut state = self.disk.state();
        state.whole_operation(self.boot, |_| {})?;
        let seen = &state.files[self.file].seen;
        Ok(seen[..seen.len().min(limit as usize)].to_vec())
    }

    fn write_at(&mut self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut state = self.disk.state();
        let fault = state.operation(self.boot)?;
        let free = state.free();
        let file = &mut state.files[self.file];
        let fits = (file.blocks().saturating_add(free)).saturating_sub(offset) as usize;
        let done = fault
            .map_or(usize::MAX, |fault| fault.done)
            .min(fits)
            .min(bytes.len());
        if done > 0 {
            file.change(Change::Write {
                offset: offset as usize,
                bytes: bytes[..done].to_vec(),
            });
        }
        match fault {
            Some(fault) => Err(fault.error.into()),
            None if done < bytes.len() => Err(io::ErrorKind::StorageFull.into()),
            None => Ok(()),
        }
    }

    fn truncate(&mut self, length: u64) -> io::Result<()> {
        let mut state = self.disk.state();
        state.whole_operation(self.boot, |state| {
            let file = &mut state.files[self.file];
            file.change(Change::Truncate(length as usize));
            file.reserved = 0;
        })
    }

    fn sync(&mut self) -> io::Result<()> {
        let mut state = self.disk.state();
        let fault = state.operation(self.boot)?;
        let Contents { on_disk, dirty, .. } = &mut state.files[self.file];
        let mut left = fault.map_or(usize::MAX, |fault| fault.done);
        dirty.retain(|change| {
            let units = left.min(change.units());
            left -= units;
            change.apply(on_disk, 0..units);
            // A length is the file system's own, which it does not forget.
            matches!(change, Change::Truncate(_)) && units == 0
        });
        fault.map_or(Ok(()), |fault| Err(fault.error.into()))
    }

    fn reserve(&mut self, offset: u64, bytes: u64) -> io::Result<()> {
        let mut state = self.disk.state();
        let wanted = (offset + bytes).saturating_sub(state.files[self.file].blocks());
        if wanted > state.free() {
            return Err(io::ErrorKind::StorageFull.into());
        }
        state.whole_operation(self.boot, |state| {
            let file = &mut state.files[self.file];
            file.reserved = file.reserved.max(offset + bytes);
        })
    }
}

/// Appends a frame to `bytes`, the content of segment `number` so far, and returns its checksum: what nobody writes must be read
/// too.
pub fn push_frame(bytes: &mut Vec<u8>, number: u32, durable: u32, previous: u32, payload: &[u8]) -> u32 {
    crate::frame::write(bytes, number, 0, u64::from(durable), previous, payload)
}
