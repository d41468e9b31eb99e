//! Features of the disk, and its configuration space.

use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_SEG_MAX,
    VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

/// Bytes of a sector: the unit of all numbers of a guest.
pub const SECTOR: u64 = 512;

/// The most queues of a front end. QEMU gives a disk one for each processor of the guest, unless it is told a number.
pub const MAX_QUEUES: u16 = 64;

/// The longest queue, in descriptors; QEMU's limit.
pub const MAX_QUEUE_SIZE: u16 = 1024;

/// The longest DISCARD and WRITE_ZEROES, in sectors: as much as one of NBD.
const MAX_ZERO_SECTORS: u32 = u32::MAX >> 9;

/// Segments of the data of a request: those of QEMU's usual queue of 128 descriptors, less head and status.
const MAX_SEGMENTS: u32 = 126;

/// The largest configuration space of the protocol (VHOST_USER_MAX_CONFIG_SIZE).
const SPACE: usize = 256;

/// FLUSH. Requests of a guest without it are durable when they are answered (§5.2.6.2).
pub const FLUSH: u64 = 1 << VIRTIO_BLK_F_FLUSH;

/// The guest tells from which request on it wants a notification.
pub const EVENT_IDX: u64 = 1 << VIRTIO_RING_F_EVENT_IDX;

/// The front end negotiates protocol features, and enables queues by messages
/// (VHOST_USER_F_PROTOCOL_FEATURES).
pub const PROTOCOL_FEATURES: u64 = 1 << 30;

/// All offered features.
pub const FEATURES: u64 = 1 << VIRTIO_F_VERSION_1
    | 1 << VIRTIO_RING_F_INDIRECT_DESC
    | EVENT_IDX
    | PROTOCOL_FEATURES
    | 1 << VIRTIO_BLK_F_SEG_MAX
    | 1 << VIRTIO_BLK_F_BLK_SIZE
    | 1 << VIRTIO_BLK_F_TOPOLOGY
    | 1 << VIRTIO_BLK_F_MQ
    | FLUSH
    | 1 << VIRTIO_BLK_F_DISCARD
    | 1 << VIRTIO_BLK_F_WRITE_ZEROES;

/// A part of the configuration space (§5.2.4) of a disk with this many bytes; `None` if the part reaches
/// behind the end.
pub fn read(length: u64, offset: u32, size: u32) -> Option<Vec<u8>> {
    let mut space = [0; SPACE];
    let mut put = |at: usize, value: &[u8]| space[at..at + value.len()].copy_from_slice(value);
    put(0, &(length / SECTOR).to_le_bytes());
    put(12, &MAX_SEGMENTS.to_le_bytes());
    put(20, &(SECTOR as u32).to_le_bytes());
    // A physical block has 2^3 sectors, and so have the least and the best request.
    put(24, &[3]);
    put(26, &8u16.to_le_bytes());
    put(28, &8u32.to_le_bytes());
    // There is a write cache.
    put(32, &[1]);
    put(34, &MAX_QUEUES.to_le_bytes());
    for first in [36, 48] {
        // DISCARD, and WRITE_ZEROES: sectors, and runs of sectors in a request.
        put(first, &MAX_ZERO_SECTORS.to_le_bytes());
        put(first + 4, &1u32.to_le_bytes());
    }
    // Alignment of a DISCARD, in sectors.
    put(44, &8u32.to_le_bytes());
    // WRITE_ZEROES may give space back.
    put(56, &[1]);
    let offset = offset as usize;
    let end = offset.checked_add(size as usize)?;
    Some(space.get(offset..end)?.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_space_is_as_the_standard_has_it() {
        let whole = read(5 << 20, 0, 60).expect("it is so long");
        assert_eq!(whole[..8], (5u64 << 11).to_le_bytes());
        assert_eq!(whole[20..24], 512u32.to_le_bytes());
        assert_eq!(
            whole[36..40],
            (u32::MAX >> 9).to_le_bytes(),
            "max_discard_sectors"
        );
        assert_eq!(whole[40..44], 1u32.to_le_bytes(), "max_discard_seg");
        assert_eq!(
            whole[48..52],
            (u32::MAX >> 9).to_le_bytes(),
            "max_write_zeroes_sectors"
        );
        assert_eq!(read(5 << 20, 20, 4).expect("a part"), whole[20..24]);
        assert_eq!(read(5 << 20, 0, 256).expect("all of it")[..60], whole);
        for (offset, size) in [(0, 257), (256, 1), (u32::MAX, 1), (1, u32::MAX)] {
            assert_eq!(read(5 << 20, offset, size), None);
        }
    }
}
