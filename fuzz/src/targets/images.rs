//! CRIU's images, as a full disk may leave them.

use std::path::Path;

use verbatim_fill::images;

/// What CRIU puts at the front of every image.
const COMMON: u32 = 0x5456_4319;
const KINDS: [u32; 4] = [0x5027_3030, 0x5505_3847, 0x5749_2820, 0x5608_4025];

/// Bytes of any content: read as each kind of image, or refused with the place.
pub fn criu_images(bytes: &[u8]) {
    let path = Path::new("image");
    if let Ok(ranges) = images::lazy_pages(path, bytes) {
        assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start));
        assert!(ranges.iter().all(|range| range.start < range.end));
    }
    if let Ok(mappings) = images::mappings_of(path, bytes) {
        assert!(
            mappings
                .windows(2)
                .all(|pair| pair[0].range.end <= pair[1].range.start)
        );
    }
    let _ = (images::tree_of(path, bytes), images::is_zombie(path, bytes));
}

/// The front of each kind, with a record or two.
pub fn seeds() -> Vec<Vec<u8>> {
    let record = [0x08, 0x80, 0x20, 0x10, 0x02, 0x20, 0x02];
    let image = |kind: u32| {
        let mut bytes = [COMMON, kind].map(u32::to_le_bytes).concat();
        for _ in 0..2 {
            bytes.extend((record.len() as u32).to_le_bytes());
            bytes.extend(record);
        }
        bytes
    };
    KINDS.into_iter().map(image).collect()
}
