//! Doors for the fuzz targets (`fuzz/`) to what reads bytes of others and is nobody else's business.

use std::path::Path;

use verbatim_channel::{KeyPair, RoadMap};
use verbatim_session::Role;
use verbatim_session::decision::Outcome;
use verbatim_session::fill::Noted;
use verbatim_session::record::{Entry, Parties, What};

use crate::instances::record::{self, Record};
use crate::memory::place::Placer;
use crate::proto::FilePart;
use crate::session::{ProcessKeys, decode, encode};

/// A record of the journal.
pub fn journal(record: &[u8]) {
    if let Ok(entry) = Entry::decode(record) {
        assert_eq!(
            Entry::decode(&entry.encode()),
            Ok(entry),
            "what was read can be written"
        );
    }
}

/// Records of the journal, for a start.
pub fn journal_records() -> Vec<Vec<u8>> {
    let parties = Parties {
        instance: "web".to_owned(),
        source: "a".to_owned(),
        destination: "b".to_owned(),
    };
    let whats = [
        What::Opened(parties),
        What::Committed(Noted::Missing),
        What::Filled,
        What::Closed(Outcome::Committed),
    ];
    let entries = whats.into_iter().map(|what| Entry {
        session: 7,
        role: Role::Destination,
        unix_ms: 1,
        boot: [3; 16],
        what,
    });
    entries.map(|entry| entry.encode()).collect()
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
    let _ = decode::<verbatim_bulk::Offer>(bytes);
    let _ = decode::<verbatim_bulk::Accepted>(bytes);
}

/// Puts parts in their places below `root`, whatever they say.
pub fn place(root: &Path, parts: &[FilePart]) {
    let mut placer = Placer::new(root.to_owned());
    for part in parts {
        let _ = placer.place(part, landed(part));
    }
}

/// What has landed for a part that says so: some pages.
fn landed(part: &FilePart) -> Option<&'static [u8]> {
    part.landed.is_some().then_some(&[7; 4 << 12])
}
