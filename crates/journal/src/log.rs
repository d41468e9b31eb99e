//! The log.

use std::io;

use crate::replay::{Chain, Segments};
use crate::segment::{self, Before, Place, Segment};
use crate::storage::{Storage, StorageFile};
use crate::{AppendError, Durability, Error, MAX_RECORD, MAX_SEGMENT, Replayed, frame};

/// Records that wait for the next sync are kept in memory too, up to about so many bytes. Then they are synced.
const MAX_UNSYNCED: u64 = 1 << 20;

/// An append-only log of records. The [crate]'s page has the format.
#[derive(Debug)]
pub struct Log<S: Storage> {
    storage: S,
    head: Head<S::File>,
    /// The number of the next segment.
    next: u32,
    /// Records that were accepted behind `head.durable`.
    unsynced: Vec<Vec<u8>>,
    /// The last segment must not be written to any more, whatever is in it: its end is uncertain, or a crash may find another
    /// segment that hides what is appended to it.
    pub(crate) given_up: bool,
    /// The bytes in the segments before the last one.
    bytes_before: u64,
    /// Segments are no longer than this.
    pub(crate) max_segment: u64,
}

/// The segment that is written to.
#[derive(Debug)]
struct Head<F> {
    file: F,
    end: Place,
    /// Up to here everything is on the disk.
    durable: Place,
    /// Space is reserved up to this offset.
    reserved: u64,
}

impl<S: Storage> Log<S> {
    /// Opens the log, or begins one in an empty folder. Everything that is replayed is on the disk when this returns, and will be
    /// replayed again.
    pub fn open(mut storage: S) -> Result<(Self, Replayed), Error> {
        storage.lock().map_err(|source| match source.kind() {
            io::ErrorKind::WouldBlock => Error::InUse,
            _ => io_error("lock the journal")(source),
        })?;
        let names = storage.names().map_err(io_error("list the journal's segments"))?;
        let numbers: Vec<_> = names.iter().filter_map(|name| segment::number(name)).collect();
        let highest = numbers.iter().map(|(number, _)| *number).max().unwrap_or(0);
        let mut segments = Segments::new();
        for &(number, kind) in &numbers {
            match kind {
                "log" => drop(segments.insert(number, read(&mut storage, number)?)),
                // It never got its name. If it stays, the next one who opens the log tries again.
                "new" => drop(storage.remove(&segment::new_name(number))),
                _ => {}
            }
        }
        // The names that are seen may be in the cache only.
        storage.sync().map_err(io_error("sync the journal's folder"))?;

        let chain = Chain::new(&segments);
        let last_bad = segments.iter().rev().find(|(_, segment)| segment.is_none());
        let last_bad = last_bad.map(|(number, _)| *number);
        let head = chain.head.and_then(|number| segments.get(&number)?.as_ref());
        let next = highest.checked_add(1).ok_or_else(no_number);
        let next = next.map_err(io_error("number the journal's segments"))?;
        let mut log = match head {
            Some(head) => Self::resume(storage, head, next, last_bad, chain.bytes_before),
            None => {
                // Behind segments that nobody can read, the log does not begin anew as if there was nothing.
                let before = last_bad.map_or(Before::Nothing, |segment| {
                    let (offset, crc) = (0, 0);
                    Before::Place(Place { segment, offset, crc })
                });
                Self::begin_first(storage, before, &[], next, 0)
            }
        }?;
        if let (Some(base), None) = (chain.base, chain.replayed.damage) {
            log.remove_before(base);
        }
        Ok((log, chain.replayed))
    }

    /// Goes on in the last segment if it is in order, else in a new one.
    fn resume(
        mut storage: S,
        head: &Segment,
        next: u32,
        last_bad: Option<u32>,
        bytes_before: u64,
    ) -> Result<Self, Error> {
        let end = head.end();
        let is_damaged = !head.damages.is_empty() || last_bad.is_some_and(|number| number > head.number);
        if !is_damaged && let Ok(file) = settle(&mut storage, head) {
            return Ok(Self {
                storage,
                head: Head {
                    file,
                    end,
                    durable: end,
                    reserved: 0,
                },
                next,
                unsynced: Vec::new(),
                given_up: false,
                bytes_before,
                max_segment: MAX_SEGMENT,
            });
        }
        let durable = head.place(head.durable);
        let records: Vec<_> = head
            .records(durable.offset, u64::MAX)
            .map(<[u8]>::to_vec)
            .collect();
        let bytes_before = bytes_before + durable.offset;
        Self::begin_first(storage, Before::Place(durable), &records, next, bytes_before)
    }

    fn begin_first(
        mut storage: S,
        before: Before,
        records: &[Vec<u8>],
        number: u32,
        bytes_before: u64,
    ) -> Result<Self, Error> {
        let begun = begin(&mut storage, number, before, records, &mut false);
        let (file, end) = begun.map_err(io_error("begin a segment of the journal"))?;
        Ok(Self {
            storage,
            head: Head {
                file,
                end,
                durable: end,
                reserved: 0,
            },
            next: number.saturating_add(1),
            unsynced: Vec::new(),
            given_up: false,
            bytes_before,
            max_segment: MAX_SEGMENT,
        })
    }

    /// Appends a record of at most [`MAX_RECORD`] bytes.
    ///
    /// A record that was accepted with [`Durability::Later`] does not get lost by the failure of one after it.
    pub fn append(&mut self, record: &[u8], durability: Durability) -> Result<(), AppendError> {
        if record.len() > MAX_RECORD {
            let text = format!("it has {} bytes, and {MAX_RECORD} are the most", record.len());
            return Err(AppendError::NotWritten(invalid(text)));
        }
        let bytes = (frame::HEADER + record.len()) as u64;
        self.make_room(bytes).map_err(AppendError::NotWritten)?;

        let mut frame = Vec::with_capacity(bytes as usize);
        let Head { end, durable, .. } = self.head;
        let crc = frame::write(
            &mut frame,
            end.segment,
            end.offset,
            durable.offset,
            end.crc,
            record,
        );
        if let Err(error) = self.head.file.write_at(&frame, end.offset) {
            return Err(self.take_back(error));
        }
        let offset = end.offset + bytes;
        let synced = durability == Durability::Synced || offset - durable.offset > MAX_UNSYNCED;
        if synced && let Err(error) = self.head.file.sync() {
            self.given_up = true;
            return Err(self.give_up(error));
        }
        self.head.end = Place { offset, crc, ..end };
        if synced {
            self.head.durable = self.head.end;
            self.unsynced.clear();
        } else {
            self.unsynced.push(record.to_vec());
        }
        Ok(())
    }

    /// Sets space aside for records to come, each of which takes [`RECORD_OVERHEAD`](crate::RECORD_OVERHEAD) bytes beside its own.
    /// Appends that fit in do not fail because the disk is full, on file systems that write in place (ext4, XFS, tmpfs).
    ///
    /// An append that fails for another reason, or [`Log::rewrite`], may lose the space to others: [`Log::reserved`] says how
    /// much is left. So does opening the log anew.
    pub fn reserve(&mut self, bytes: u64) -> Result<(), Error> {
        let doing = "reserve space for the journal";
        if bytes > self.max_segment - segment::EMPTY {
            return Err(io_error(doing)(invalid(format!(
                "{bytes} bytes are more than a segment has"
            ))));
        }
        self.make_room(bytes).map_err(io_error(doing))?;
        if self.reserved() < bytes {
            let end = self.head.end.offset;
            self.head.file.reserve(end, bytes).map_err(io_error(doing))?;
            self.head.reserved = end + bytes;
        }
        Ok(())
    }

    /// The bytes that are set aside for records to come.
    pub fn reserved(&self) -> u64 {
        self.head.reserved.saturating_sub(self.head.end.offset)
    }

    /// Puts other records in place of all that there are, whose segments are then removed.
    ///
    /// Unless this returns `Ok`, a crash before the next append that returns `Ok` may leave either the old records or the new
    /// ones, and after that append the old ones stay.
    pub fn rewrite(&mut self, records: impl Iterator<Item = Vec<u8>>) -> Result<(), Error> {
        let doing = "write the journal anew";
        let records: Vec<_> = records.collect();
        if records.iter().any(|record| record.len() > MAX_RECORD) {
            let text = format!("a record has more than {MAX_RECORD} bytes");
            return Err(io_error(doing)(invalid(text)));
        }
        self.begin(Before::Nothing, &records).map_err(io_error(doing))?;
        self.bytes_before = 0;
        self.remove_before(self.head.end.segment);
        Ok(())
    }

    /// How many bytes the log has on the disk.
    pub fn bytes(&self) -> u64 {
        self.bytes_before + self.head.end.offset
    }

    /// Sees to a segment that so many bytes can be appended to.
    fn make_room(&mut self, bytes: u64) -> io::Result<()> {
        if !self.given_up && self.head.end.offset + bytes <= self.max_segment {
            return Ok(());
        }
        self.go_on()
    }

    /// Removes what an append has written that failed.
    fn take_back(&mut self, error: io::Error) -> AppendError {
        let end = self.head.end;
        let reserved = self.reserved();
        let file = &mut self.head.file;
        if file.truncate(end.offset).and_then(|()| file.sync()).is_err() {
            self.given_up = true;
            return self.give_up(error);
        }
        self.head.durable = end;
        self.unsynced.clear();
        // Truncating has freed what was reserved.
        self.head.reserved = 0;
        self.reserve_again(reserved);
        AppendError::NotWritten(error)
    }

    /// Goes on in a new segment after a failure, which is what is reported.
    fn give_up(&mut self, error: io::Error) -> AppendError {
        match self.go_on() {
            Ok(()) => AppendError::NotWritten(error),
            Err(_) => AppendError::Unknown(error),
        }
    }

    /// Goes on in a new segment from where everything is on the disk.
    fn go_on(&mut self) -> io::Result<()> {
        let durable = self.head.durable;
        let records = std::mem::take(&mut self.unsynced);
        let begun = self.begin(Before::Place(durable), &records);
        match begun {
            Ok(()) => self.bytes_before += durable.offset,
            Err(_) => self.unsynced = records,
        }
        begun
    }

    fn begin(&mut self, before: Before, records: &[Vec<u8>]) -> io::Result<()> {
        let number = self.next;
        self.next = number.checked_add(1).ok_or_else(no_number)?;
        let (file, end) = begin(&mut self.storage, number, before, records, &mut self.given_up)?;
        let reserved = self.reserved();
        self.given_up = false;
        self.unsynced.clear();
        self.head = Head {
            file,
            end,
            durable: end,
            reserved: 0,
        };
        self.reserve_again(reserved);
        Ok(())
    }

    fn reserve_again(&mut self, bytes: u64) {
        let end = self.head.end.offset;
        if bytes > 0 && self.head.file.reserve(end, bytes).is_ok() {
            self.head.reserved = end + bytes;
        }
    }

    /// Removes the segments before the first one of the log, but keeps damaged ones under another name. What cannot be removed is
    /// in nobody's way, and tried again when the log is opened.
    fn remove_before(&mut self, base: u32) {
        let Ok(mut segments) = read_all(&mut self.storage) else {
            return;
        };
        segments.retain(|number, _| *number < base);
        let damaged = Chain::new(&segments).damaged;
        for (number, segment) in segments {
            let name = segment::name(number);
            let _ = match segment.is_none() || damaged.contains(&number) {
                true => self.storage.rename(&name, &segment::damaged_name(number)),
                false => self.storage.remove(&name),
            };
        }
    }
}

/// Cuts off the torn end of a segment, and puts all of its records on the disk.
///
/// Their pages may be called clean after a failed sync of another process. Being written again, they are dirty for certain.
fn settle<S: Storage>(storage: &mut S, segment: &Segment) -> io::Result<S::File> {
    let mut file = storage.open(&segment::name(segment.number))?;
    let end = segment.end().offset;
    if segment.bytes.len() as u64 > end {
        file.truncate(end)?;
    }
    if segment.durable < end {
        let unproven = &segment.bytes[segment.durable as usize..end as usize];
        file.write_at(unproven, segment.durable)?;
    }
    // Also if there was nothing to do: a record may have been cut off in the cache only.
    file.sync()?;
    Ok(file)
}

/// Makes a new segment, which has its name, and is on the disk with it, when this returns.
///
/// `may_be_found` is set when a crash may find it.
fn begin<S: Storage>(
    storage: &mut S,
    number: u32,
    before: Before,
    records: &[Vec<u8>],
    may_be_found: &mut bool,
) -> io::Result<(S::File, Place)> {
    let records = records.iter().map(Vec::as_slice);
    let (bytes, crc) = segment::build(number, before, records)
        .ok_or_else(|| invalid(format!("the records need more than {MAX_SEGMENT} bytes")))?;
    let new_name = segment::new_name(number);
    let mut write = || {
        let mut file = storage.create(&new_name)?;
        file.write_at(&bytes, 0)?;
        file.sync()?;
        Ok(file)
    };
    let file = write().inspect_err(|_: &io::Error| drop(storage.remove(&new_name)))?;
    *may_be_found = true;
    storage.rename(&new_name, &segment::name(number))?;
    storage.sync()?;
    let end = Place {
        segment: number,
        offset: bytes.len() as u64,
        crc,
    };
    Ok((file, end))
}

fn read_all<S: Storage>(storage: &mut S) -> Result<Segments, Error> {
    let names = storage.names().map_err(io_error("list the journal's segments"))?;
    let numbers = names.iter().filter_map(|name| segment::number(name));
    let numbers = numbers.filter(|(_, kind)| *kind == "log");
    numbers
        .map(|(number, _)| Ok((number, read(storage, number)?)))
        .collect()
}

fn read<S: Storage>(storage: &mut S, number: u32) -> Result<Option<Segment>, Error> {
    let file = storage.open(&segment::name(number));
    let bytes = file.and_then(|mut file| file.read(MAX_SEGMENT));
    Segment::parse(number, bytes.map_err(io_error("read a segment of the journal"))?)
}

fn io_error(doing: &'static str) -> impl Fn(io::Error) -> Error {
    move |source| Error::Io { doing, source }
}

fn invalid(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

fn no_number() -> io::Error {
    io::Error::other("there are no numbers left for its segments")
}
