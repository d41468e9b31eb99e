//! Doors for the fuzz targets (`fuzz/`) to what reads bytes of others and is nobody else's business.

use std::path::Path;

use verbatim_channel::{KeyPair, RoadMap};

use crate::instances::record::{self, Record};
use crate::journal::{Event, Journal, Role, Told};
use crate::memory::place::Placer;
use crate::proto::FilePart;
use crate::session::{ProcessKeys, decode, encode};

/// A journal with any content can be opened and gone on in.
pub fn journal(path: &Path) {
    let journal = Journal::open(path).expect("damaged lines are passed over");
    let open = journal.with_last(Role::Source, Event::Opened);
    journal
        .write(
            7,
            Role::Destination,
            Event::Committed,
            Told::parties("web", "a", "b"),
        )
        .expect("it can be written");
    let again = Journal::open(path).expect("as before");
    assert_eq!(again.last(7, Role::Destination), Some(Event::Committed));
    let mut still = again.with_last(Role::Source, Event::Opened);
    let mut open = open;
    open.sort();
    still.sort();
    assert_eq!(open, still, "one more line changes nothing about other sessions");
}

/// What another agent says about an instance.
pub fn records(bytes: &[u8]) {
    if let Ok(record) = serde_json::from_slice::<Record>(bytes) {
        let text = serde_json::to_string(&record).expect("what was read can be written");
        let again: Record = serde_json::from_str(&text).expect("and read again");
        assert_eq!(record, again);
        let _ = record.command();
    }
    let _ = record::parse_address(&String::from_utf8_lossy(bytes));
    if let Ok(road_maps) = decode::<Vec<RoadMap>>(bytes) {
        let encoded = encode(&road_maps);
        let again: Vec<RoadMap> = decode(&encoded).expect("what was encoded");
        assert_eq!(encode(&again), encoded);
    }
    let _ = decode::<ProcessKeys>(bytes);
    let _ = decode::<Vec<Vec<KeyPair>>>(bytes);
}

/// Puts parts in their places below `root`, whatever they say.
pub fn place(root: &Path, parts: &[FilePart]) {
    let mut placer = Placer::new(root.to_owned());
    for part in parts {
        let _ = placer.place(part);
    }
}
