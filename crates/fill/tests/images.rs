//! Images of CRIU, whole and damaged.

use std::path::Path;

use proptest::prelude::*;
use verbatim_fill::images::{is_zombie, lazy_pages, mappings_of, tree_of};
use verbatim_fill::{left_to_fill, tasks};

const PSTREE: u32 = 0x5027_3030;
const CORE: u32 = 0x5505_3847;
const MM: u32 = 0x5749_2820;
const PAGEMAP: u32 = 0x5608_4025;

/// `PE_LAZY` and `PE_PRESENT`.
const LAZY: u64 = 2;
const PRESENT: u64 = 4;

/// An image with these records.
fn image(magic: u32, records: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = [0x5456_4319u32, magic].map(u32::to_le_bytes).concat();
    for record in records {
        bytes.extend((record.len() as u32).to_le_bytes());
        bytes.extend(record);
    }
    bytes
}

/// A message of numbers, by their fields.
fn message(fields: &[(u8, u64)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (number, value) in fields {
        bytes.push(number << 3);
        let mut value = *value;
        while value > 127 {
            bytes.push(value as u8 | 128);
            value >>= 7;
        }
        bytes.push(value as u8);
    }
    bytes
}

fn within(number: u8, inner: &[u8]) -> Vec<u8> {
    [&[number << 3 | 2, inner.len() as u8], inner].concat()
}

fn page_map() -> Vec<u8> {
    let entry = |address, pages, flags| message(&[(1, address), (2, pages), (4, flags)]);
    let records = [
        message(&[(1, 1)]),
        entry(0x10000, 2, LAZY),
        entry(0x12000, 1, LAZY),
        entry(0x13000, 1, PRESENT),
        entry(0x20000, 4, LAZY),
        entry(0x30000, 1, LAZY | PRESENT),
    ];
    image(PAGEMAP, &records)
}

#[test]
fn only_what_the_images_lack_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(folder.path().join(name), bytes).unwrap();
    write("pagemap-7.img", &page_map());
    let left = left_to_fill(folder.path(), 7).unwrap();
    assert_eq!(left, [0x10000..0x13000, 0x20000..0x24000]);
    let task = |pid| message(&[(1, pid), (2, 0), (3, 1), (4, 1)]);
    write("pstree.img", &image(PSTREE, &[task(1), task(7), task(8)]));
    let core = |state| image(CORE, &[within(3, &message(&[(1, state)]))]);
    write("core-1.img", &core(1));
    write("core-7.img", &core(1));
    write("core-8.img", &core(2));
    assert_eq!(tasks(folder.path()).unwrap(), [1, 7]);
    let missing = left_to_fill(folder.path(), 9).unwrap_err().to_string();
    assert!(
        missing.contains("pagemap-9.img") && missing.contains("cannot be opened"),
        "{missing}"
    );
}

#[test]
fn mappings_say_what_a_child_has() {
    let mapping = |start, end, advice| within(14, &message(&[(1, start), (2, end), (9, advice)]));
    let record = [mapping(0x1000, 0x3000, 0), mapping(0x3000, 0x4000, 1 << 10)].concat();
    let mappings = mappings_of(Path::new("mm-1.img"), &image(MM, &[record])).unwrap();
    assert_eq!(mappings.len(), 2);
    assert_eq!(mappings[0].range, 0x1000..0x3000);
    assert!(mappings[0].inherited && !mappings[1].inherited);
}

/// A full disk cuts files off: at whichever byte, that is an error, or the end of a record, where CRIU could have ended, too.
#[test]
fn what_is_cut_off_is_an_error() {
    let whole = page_map();
    let mut ends = vec![8];
    while let Some(length) = whole
        .get(ends[ends.len() - 1]..)
        .and_then(|rest| rest.first_chunk::<4>())
    {
        ends.push(ends[ends.len() - 1] + 4 + u32::from_le_bytes(*length) as usize);
    }
    assert_eq!(*ends.last().unwrap(), whole.len());
    for length in 0..whole.len() {
        let read = lazy_pages(Path::new("pagemap-1.img"), &whole[..length]);
        let at_an_end = ends[1..].contains(&length);
        assert_eq!(read.is_ok(), at_an_end, "{length}: {read:?}");
        if let Err(error) = read {
            let error = error.to_string();
            assert!(error.contains("pagemap-1.img, offset "), "{error}");
        }
    }
}

#[test]
fn ranges_are_pages_in_order() {
    let entry = |address, pages| message(&[(1, address), (5, pages), (4, LAZY)]);
    let read = |entries: &[Vec<u8>]| {
        let records = [&[message(&[(1, 1)])], entries].concat();
        lazy_pages(Path::new("x"), &image(PAGEMAP, &records)).map_err(|error| error.to_string())
    };
    assert!(read(&[entry(0x1000, 1), entry(0x2000, 1)]).is_ok());
    assert!(
        read(&[entry(0x2000, 1), entry(0x1000, 1)])
            .unwrap_err()
            .contains("below the end")
    );
    assert!(
        read(&[entry(0x1234, 1)])
            .unwrap_err()
            .contains("no range of pages")
    );
    assert!(
        read(&[entry(0x1000, u64::MAX)])
            .unwrap_err()
            .contains("no range of pages")
    );
    assert!(
        read(&[entry(0x1000, 0)])
            .unwrap_err()
            .contains("no range of pages")
    );
    let error = mappings_of(Path::new("x"), &page_map()).unwrap_err().to_string();
    assert!(error.contains("magic number"), "{error}");
}

proptest! {
    #[test]
    fn no_bytes_are_too_bad(bytes in prop::collection::vec(any::<u8>(), 0..200), magic in prop::sample::select(vec![PSTREE, CORE, MM, PAGEMAP])) {
        let path = Path::new("x");
        for bytes in [bytes.clone(), [[0x5456_4319u32, magic].map(u32::to_le_bytes).concat(), bytes].concat()] {
            let _ = (lazy_pages(path, &bytes), mappings_of(path, &bytes), tree_of(path, &bytes), is_zombie(path, &bytes));
        }
    }
}
