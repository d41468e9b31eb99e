//! A guess at a file's content, shown before an operator adopts the file.

use std::fs::File;
use std::os::unix::fs::FileExt;

/// Names, offsets and bytes of signatures.
const SIGNATURES: [(&str, u64, &[u8]); 12] = [
    ("a qcow2 image", 0, b"QFI\xfb"),
    ("a LUKS volume", 0, b"LUKS\xba\xbe"),
    ("an XFS file system", 0, b"XFSB"),
    ("a squashfs file system", 0, b"hsqs"),
    ("a VMDK image", 0, b"KDMV"),
    ("a partition table (GPT)", 512, b"EFI PART"),
    ("a volume of LVM", 536, b"LVM2 001"),
    ("an ext2, ext3 or ext4 file system", 1080, &[0x53, 0xef]),
    ("swap space", 4086, b"SWAPSPACE2"),
    ("an ISO 9660 file system", 0x8001, b"CD001"),
    ("a Btrfs file system", 0x1_0040, b"_BHRfS_M"),
    // Last, since other contents have a boot sector as well.
    ("a boot sector or partition table", 510, &[0x55, 0xaa]),
];

/// Content of a file in words, if its signature is known.
pub fn of(file: &File) -> Option<&'static str> {
    let is_there = |&&(_, offset, signature): &&(&str, u64, &[u8])| {
        let mut bytes = vec![0; signature.len()];
        file.read_exact_at(&mut bytes, offset).is_ok() && bytes == signature
    };
    SIGNATURES.iter().find(is_there).map(|(name, ..)| *name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_system_is_seen_and_zeros_are_not() {
        let file = tempfile::tempfile().expect("a file");
        assert_eq!(of(&file), None);
        file.set_len(1 << 20).expect("longer");
        assert_eq!(of(&file), None);
        file.write_all_at(&[0x55, 0xaa], 510).expect("written");
        assert_eq!(of(&file), Some("a boot sector or partition table"));
        file.write_all_at(&[0x53, 0xef], 1080).expect("written");
        assert_eq!(of(&file), Some("an ext2, ext3 or ext4 file system"));
    }
}
