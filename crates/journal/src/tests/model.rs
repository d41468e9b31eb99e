//! A log on a simulated disk beside a list of what it must and what it may replay.

use std::io;

use super::open;
use crate::testing::{Disk, Mount};
use crate::{AppendError, Damage, Durability, Log};

/// What may become of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// It is replayed for ever.
    Kept,
    /// A crash may lose it, and all those behind it.
    Later,
    /// It may be there or not.
    Unknown,
}

/// A log and what is expected of it.
#[derive(Debug)]
pub struct World {
    pub disk: Disk,
    pub log: Option<Log<Mount>>,
    pub max_segment: u64,
    records: Vec<(u32, Fate)>,
    /// What a rewriting that failed may have left instead.
    rewritten: Vec<Vec<u32>>,
    next: u32,
}

/// A record that says itself which one it is.
pub fn record(number: u32, length: usize) -> Vec<u8> {
    let rest = (0..length).map(|index| (number as usize * 31 + index) as u8);
    number.to_le_bytes().into_iter().chain(rest).collect()
}

fn number(record: &[u8]) -> u32 {
    let number = u32::from_le_bytes(*record.first_chunk().unwrap());
    assert_eq!(record, &self::record(number, record.len() - 4)[..]);
    number
}

impl World {
    /// An empty disk; the log is not opened yet.
    pub fn new(max_segment: u64) -> Self {
        Self {
            disk: Disk::new(),
            log: None,
            max_segment,
            records: Vec::new(),
            rewritten: Vec::new(),
            next: 1,
        }
    }

    /// Another one like it after the process died; it has a disk of its own.
    pub fn copy(&self) -> Self {
        Self {
            disk: self.disk.copy(),
            log: None,
            records: self.records.clone(),
            rewritten: self.rewritten.clone(),
            ..*self
        }
    }

    /// Opens the log if it is not, and checks what is replayed. A disk that fails may refuse.
    pub fn open(&mut self) {
        if self.log.is_some() {
            return;
        }
        let Ok((mut log, replayed)) = open(&self.disk) else {
            return;
        };
        log.max_segment = self.max_segment;
        self.log = Some(log);
        assert_eq!(replayed.damage, None::<Damage>);
        let numbers: Vec<_> = replayed.records.iter().map(|record| number(record)).collect();
        let may_be = self.rewritten.contains(&numbers) || is_possible(&self.records, &numbers);
        assert!(
            may_be,
            "{numbers:?} of {:?} or {:?}",
            self.records, self.rewritten
        );
        self.records = numbers.into_iter().map(|number| (number, Fate::Kept)).collect();
        self.rewritten.clear();
    }

    /// Appends another record.
    pub fn append(&mut self, length: usize, durability: Durability) {
        let Some(log) = &mut self.log else { return };
        let number = self.next;
        self.next += 1;
        let result = log.append(&record(number, length), durability);
        if let Err(AppendError::Unknown(_)) = result {
            assert!(log.given_up);
            self.records.push((number, Fate::Unknown));
        }
        self.settle();
        if result.is_ok() {
            assert!(self.log.as_ref().is_some_and(|log| !log.given_up));
            self.records.push((number, Fate::Later));
            if durability == Durability::Synced {
                self.keep_all();
            }
        }
    }

    /// Keeps every other record only, beginning with the first or the second.
    pub fn rewrite(&mut self, skip: usize) {
        let Some(log) = &mut self.log else { return };
        let known = self.records.iter().filter(|(_, fate)| *fate != Fate::Unknown);
        let kept: Vec<_> = known.skip(skip).step_by(2).map(|(number, _)| *number).collect();
        let result = log.rewrite(kept.iter().map(|number| record(*number, 5)));
        match result {
            Ok(()) => {
                self.records = kept.into_iter().map(|number| (number, Fate::Kept)).collect();
                self.rewritten.clear();
            }
            Err(_) => {
                self.rewritten.push(kept);
                self.settle();
            }
        }
    }

    /// Reserves space.
    pub fn reserve(&mut self, bytes: u64) {
        if let Some(log) = &mut self.log {
            let result = log.reserve(bytes);
            assert!(result.is_err() || log.reserved() >= bytes);
        }
        self.settle();
    }

    /// The process dies.
    pub fn kill(&mut self) {
        self.log = None;
    }

    /// Nothing is in doubt in a log that goes on.
    fn settle(&mut self) {
        if self.log.as_ref().is_some_and(|log| !log.given_up) {
            self.records.retain(|(_, fate)| *fate != Fate::Unknown);
            self.rewritten.clear();
        }
    }

    fn keep_all(&mut self) {
        for (_, fate) in &mut self.records {
            *fate = Fate::Kept;
        }
    }

    /// After all that has happened, the log can be used.
    pub fn is_in_order(&mut self) {
        self.disk.heal();
        self.disk.set_capacity(None);
        self.open();
        assert!(self.log.is_some(), "a disk without faults");
        let before = self.next;
        self.append(3, Durability::Synced);
        assert_eq!(self.records.last(), Some(&(before, Fate::Kept)));
        self.kill();
        self.disk.crash(|_| 0..0);
        self.open();
        assert_eq!(self.records.last(), Some(&(before, Fate::Kept)));
    }
}

fn is_possible(records: &[(u32, Fate)], mut replayed: &[u32]) -> bool {
    let mut has_lost = false;
    for (number, fate) in records {
        if replayed.first() == Some(number) && !has_lost {
            replayed = &replayed[1..];
            continue;
        }
        match fate {
            Fate::Kept => return false,
            Fate::Later => has_lost = true,
            Fate::Unknown => {}
        }
    }
    replayed.is_empty()
}

/// The error that disks have.
pub const BROKEN: io::ErrorKind = io::ErrorKind::Other;
