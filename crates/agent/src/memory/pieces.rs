//! What a part's content is, piece by piece, as far as it can be true.

use std::io;
use std::ops::Range;

use verbatim_bulk::PAGE_BYTES;

use super::parts::MOST_PIECES;
use crate::proto::FilePart;

/// One piece of a file.
#[derive(Debug, PartialEq, Eq)]
pub enum PieceOf<'a> {
    /// These bytes, at this offset.
    Data(u64, &'a [u8]),
    /// Zeroes.
    Zeroes(Range<u64>),
}

/// The pieces of a part, whose content may have landed in place of coming with it.
pub fn of<'a>(part: &'a FilePart, landed: Option<&'a [u8]>) -> io::Result<Vec<PieceOf<'a>>> {
    if part.landed.is_some() != landed.is_some() {
        return Err(wrong("names content that nobody has looked for"));
    }
    if part.pieces.len() > MOST_PIECES {
        return Err(wrong("has too many pieces"));
    }
    let mut rest = landed.unwrap_or(&part.data);
    if part.pieces.is_empty() {
        return match landed {
            Some(_) => Err(wrong("has content without a place")),
            None => Ok(vec![PieceOf::Data(part.offset, rest)]),
        };
    }
    let mut pieces = Vec::with_capacity(part.pieces.len());
    for piece in &part.pieces {
        let end = piece.offset.checked_add(piece.length);
        let end = end.filter(|end| piece.length > 0 && i64::try_from(*end).is_ok());
        let end = end.ok_or_else(|| wrong("has a piece that is in no file"))?;
        if piece.zeroes {
            pieces.push(PieceOf::Zeroes(piece.offset..end));
            continue;
        }
        let length = usize::try_from(piece.length)
            .ok()
            .filter(|length| *length <= rest.len());
        let length = length.ok_or_else(|| wrong("has less content than it says"))?;
        pieces.push(PieceOf::Data(piece.offset, &rest[..length]));
        // In a ring the next one begins a page.
        let taken = match landed {
            Some(_) => length.next_multiple_of(PAGE_BYTES).min(rest.len()),
            None => length,
        };
        rest = &rest[taken..];
    }
    match rest.is_empty() {
        true => Ok(pieces),
        false => Err(wrong("has more content than it says")),
    }
}

fn wrong(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("a part {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::{Landed, Piece};

    fn piece(offset: u64, length: u64, zeroes: bool) -> Piece {
        Piece {
            offset,
            length,
            zeroes,
        }
    }

    #[test]
    fn pieces_are_found_packed_and_landed() {
        let mut part = FilePart {
            length: 1 << 20,
            pieces: vec![piece(10, 3, false), piece(100, 50, true), piece(4096, 2, false)],
            data: b"abcde".as_slice().into(),
            ..FilePart::default()
        };
        let wanted = [
            PieceOf::Data(10, b"abc"),
            PieceOf::Zeroes(100..150),
            PieceOf::Data(4096, b"de"),
        ];
        assert_eq!(of(&part, None).unwrap(), wanted);
        let mut landed = vec![0; 2 * PAGE_BYTES];
        landed[..3].copy_from_slice(b"abc");
        landed[PAGE_BYTES..][..2].copy_from_slice(b"de");
        part.landed = Some(Landed::default());
        part.data = Default::default();
        assert_eq!(of(&part, Some(&landed)).unwrap(), wanted);
        let plain = FilePart {
            offset: 7,
            data: b"x".as_slice().into(),
            ..FilePart::default()
        };
        assert_eq!(of(&plain, None).unwrap(), [PieceOf::Data(7, b"x")]);
    }

    #[test]
    fn what_cannot_be_true_is_refused() {
        let part = |length, pieces, data: &'static [u8]| FilePart {
            length,
            pieces,
            data: data.into(),
            ..FilePart::default()
        };
        let wrong = [
            (
                part(4, vec![piece(i64::MAX as u64, 3, false)], b"abc"),
                "beyond any end",
            ),
            (part(4, vec![piece(u64::MAX, 3, true)], b""), "overflows"),
            (part(4, vec![piece(0, 0, true)], b""), "empty"),
            (part(4, vec![piece(0, 3, false)], b"ab"), "too little"),
            (part(4, vec![piece(0, 1, false)], b"ab"), "too much"),
            (part(4, vec![piece(0, 1, true)], b"a"), "zeroes with content"),
            (
                part(9000, vec![piece(0, 1, true); MOST_PIECES + 1], b""),
                "too many",
            ),
        ];
        for (part, what) in wrong {
            assert!(of(&part, None).is_err(), "{what}");
        }
        let landed = FilePart {
            landed: Some(Landed::default()),
            ..FilePart::default()
        };
        assert!(of(&landed, None).is_err() && of(&landed, Some(&[0; PAGE_BYTES])).is_err());
        assert!(of(&FilePart::default(), Some(&[])).is_err());
    }
}
