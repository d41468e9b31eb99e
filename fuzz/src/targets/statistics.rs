//! `nic.stats`, as whoever watches an RNIC opens it.

use verbatim_nic::{NicStats, StatsReader};

use super::folder;

/// A file of any content and length: opened and read, or refused.
pub fn statistics(content: &[u8]) {
    let path = folder::path("nic.stats");
    std::fs::write(&path, content).expect("it can be written");
    if let Ok(reader) = StatsReader::open(&path) {
        assert_eq!(content.len(), size_of::<NicStats>());
        assert_eq!(reader.read(), reader.read());
    }
}

/// The magic number at the front is the RNIC's own affair: one of these versions is today's.
pub fn seeds() -> Vec<Vec<u8>> {
    let file = |version: u8| {
        let mut file = vec![0; size_of::<NicStats>()];
        let magic = u64::from_be_bytes([b'V', b'B', b'N', b'I', b'C', b'S', b'T', version]);
        file[..8].copy_from_slice(&magic.to_ne_bytes());
        file
    };
    (b'1'..=b'9').map(file).chain([vec![0; 8]]).collect()
}
