//! Programs whose waits the guest library does not reach: those that make system calls by themselves.
//!
//! What was interrupted by a freeze goes on where the program waits by the C library that the guest library stands before. An
//! executable that is linked statically has no such library, and one written in Go does not ask it.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use crate::check::processes_of;

/// Headers lie at the beginning of every executable; the note of Go does, too.
const LOOKED_AT: u64 = 64 << 10;

const MAGIC: &[u8] = b"\x7fELF\x02\x01";
const PT_INTERP: u32 = 3;
const PT_NOTE: u32 = 4;
/// The name in Go's note of its build, with what ends it.
const GO: &[u8] = b"Go\0\0";

/// Processes of the container with this first process whose waits may end early when they move, in words for an operator.
pub fn unreached(init_pid: i32) -> io::Result<Vec<String>> {
    let processes = processes_of(init_pid)?.into_iter();
    let words = processes.filter_map(|(pid, process)| {
        let kind = match kind_of(&Path::new("/proc").join(pid.to_string()).join("exe"))? {
            Kind::Static => "linked statically",
            Kind::Go => "written in Go",
        };
        Some(format!(
            "process {pid} ({}) is {kind}: system calls in which it sleeps may end early with EINTR when it moves, since the guest library \
             does not stand before them",
            process.command
        ))
    });
    Ok(words.collect())
}

#[derive(Debug, PartialEq, Eq)]
enum Kind {
    Static,
    Go,
}

fn kind_of(executable: &Path) -> Option<Kind> {
    let mut start = Vec::new();
    File::open(executable)
        .ok()?
        .take(LOOKED_AT)
        .read_to_end(&mut start)
        .ok()?;
    // The loader, started with the program as its argument, is as it must be.
    let is_loader = std::fs::read_link(executable).is_ok_and(|path| {
        path.file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with("ld-"))
    });
    kind(&start).filter(|kind| *kind != Kind::Static || !is_loader)
}

/// By its program headers (elf(5), 64 bits, little-endian); `None`: neither, or it cannot be told.
fn kind(start: &[u8]) -> Option<Kind> {
    if !start.starts_with(MAGIC) {
        return None;
    }
    let number = |at: usize, bytes: usize| -> Option<usize> {
        let bytes = start.get(at..at.checked_add(bytes)?)?;
        let value = bytes
            .iter()
            .rev()
            .fold(0, |value, byte| value << 8 | u64::from(*byte));
        usize::try_from(value).ok()
    };
    let (table, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
    let mut kinds = Vec::new();
    for index in 0..count {
        let header = table.checked_add(index.checked_mul(size)?)?;
        let kind = number(header, 4)? as u32;
        if kind == PT_NOTE {
            let (at, bytes) = (
                number(header.checked_add(8)?, 8)?,
                number(header.checked_add(32)?, 8)?,
            );
            let notes = start.get(at..at.saturating_add(bytes).min(start.len()));
            if notes.is_some_and(|notes| names(notes).any(|name| name == GO)) {
                return Some(Kind::Go);
            }
        }
        kinds.push(kind);
    }
    (!kinds.contains(&PT_INTERP)).then_some(Kind::Static)
}

/// The names of notes: each has the lengths of its name and of what it says, a type, and both of them in whole words.
fn names(mut notes: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let length = |at: usize| {
            let bytes = notes.get(at..at + 4)?;
            usize::try_from(u32::from_le_bytes(bytes.try_into().ok()?)).ok()
        };
        let (name, said) = (length(0)?, length(4)?);
        let found = notes.get(12..12_usize.checked_add(name)?)?;
        let whole = name.next_multiple_of(4).checked_add(said.next_multiple_of(4))?;
        notes = notes.get(whole.checked_add(12)?..).unwrap_or_default();
        Some(found)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An executable with these program headers: kind, and for a note the name in it.
    fn executable(headers: &[(u32, &[u8])]) -> Vec<u8> {
        let mut file = vec![0; 64 + 56 * headers.len()];
        file[..MAGIC.len()].copy_from_slice(MAGIC);
        file[32] = 64;
        file[54] = 56;
        file[56] = headers.len() as u8;
        for (index, (kind, name)) in headers.iter().enumerate() {
            let (at, note) = (64 + 56 * index, file.len());
            file[at..at + 4].copy_from_slice(&kind.to_le_bytes());
            file[at + 8..at + 16].copy_from_slice(&(note as u64).to_le_bytes());
            file[at + 32..at + 40].copy_from_slice(&(12 + name.len() as u64).to_le_bytes());
            file.extend((name.len() as u32).to_le_bytes());
            file.extend([0; 8]);
            file.extend(*name);
        }
        file
    }

    #[test]
    fn who_is_not_reached_is_told_by_the_executable() {
        const LOAD: (u32, &[u8]) = (1, b"");
        const INTERP: (u32, &[u8]) = (PT_INTERP, b"");
        assert_eq!(kind(&executable(&[LOAD, INTERP, (PT_NOTE, b"GNU\0")])), None);
        assert_eq!(
            kind(&executable(&[LOAD, (PT_NOTE, b"GNU\0")])),
            Some(Kind::Static)
        );
        assert_eq!(kind(&executable(&[INTERP, (PT_NOTE, GO)])), Some(Kind::Go));
        assert_eq!(kind(&executable(&[LOAD, (PT_NOTE, GO)])), Some(Kind::Go));
        assert_eq!(kind(b"#!/bin/sh\n"), None);
        let both = [
            &[4, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0, 0][..],
            b"GNU\0idn\0",
            &[4, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0],
            GO,
        ]
        .concat();
        assert_eq!(names(&both).collect::<Vec<_>>(), [b"GNU\0", GO]);
    }

    #[test]
    fn headers_that_lie_are_no_ones() {
        let whole = executable(&[(1, b""), (PT_NOTE, b"Go")]);
        for length in 0..whole.len() {
            let _ = kind(&whole[..length]);
        }
        for at in MAGIC.len()..whole.len() {
            let mut broken = whole.clone();
            broken[at] = 0xff;
            let _ = kind(&broken);
        }
    }

    #[test]
    fn this_program_has_a_loader() {
        assert_eq!(kind_of(Path::new("/proc/self/exe")), None);
    }
}
