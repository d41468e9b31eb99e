//! Doors for the fuzz targets (`fuzz/`) to what reads bytes of others and is nobody else's business.

use std::path::Path;

use verbatim_channel::{KeyPair, RoadMap};
use verbatim_session::Role;
use verbatim_session::record::{Standing, What};

use crate::instances::record::{self, Record};
use crate::journal::{Journal, Known};
use crate::memory::place::Placer;
use crate::proto::FilePart;
use crate::session::{ProcessKeys, decode, encode};

/// A journal whose first segment has any content is refused, or gone on in.
pub fn journal(folder: &Path, segment: &str, content: &[u8]) {
    std::fs::create_dir_all(folder).expect("a folder of the test's own");
    std::fs::write(folder.join(segment), content).expect("a file of the test's own");
    let Ok(journal) = Journal::open(folder) else {
        return;
    };
    let before = journal.sessions();
    let free = (0..)
        .find(|session| journal.parts(*session).is_empty())
        .expect("there are more numbers than sessions");
    journal
        .write(free, Role::Destination, What::Committed)
        .expect("it can be written");
    drop(journal);
    let again = Journal::open(folder).expect("as before");
    assert_eq!(again.standing(free, Role::Destination), Some(Standing::Committed));
    let mut after = again.sessions();
    after.retain(|known| known.session != free);
    let standings = |known: &[Known]| -> Vec<_> {
        known
            .iter()
            .map(|known| (known.session, known.role, known.standing))
            .collect()
    };
    assert_eq!(
        standings(&before),
        standings(&after),
        "one more record changes nothing about other sessions"
    );
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
