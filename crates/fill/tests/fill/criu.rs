//! CRIU's side: images, and the connection over which descriptors go.

use std::io::{IoSlice, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

pub const LAZY: u64 = 2;
pub const PRESENT: u64 = 4;

fn varint(mut number: u64, to: &mut Vec<u8>) {
    while number >= 128 {
        to.push(number as u8 | 128);
        number >>= 7;
    }
    to.push(number as u8);
}

fn fields(numbers: &[(u64, u64)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (tag, number) in numbers {
        varint(tag << 3, &mut bytes);
        varint(*number, &mut bytes);
    }
    bytes
}

fn nested(tag: u64, inner: &[u8], to: &mut Vec<u8>) {
    varint(tag << 3 | 2, to);
    varint(inner.len() as u64, to);
    to.extend(inner);
}

fn image(path: &Path, magic: u32, records: &[Vec<u8>]) {
    let mut bytes = 0x5456_4319u32.to_le_bytes().to_vec();
    bytes.extend(magic.to_le_bytes());
    for record in records {
        bytes.extend((record.len() as u32).to_le_bytes());
        bytes.extend(record);
    }
    std::fs::write(path, bytes).unwrap();
}

/// Runs of pages: address, pages, flags; mappings: start, end, madv.
pub fn write_task(images: &Path, vpid: u32, runs: &[(u64, u64, u64)], mappings: &[(u64, u64, u64)]) {
    let mut records = vec![fields(&[(1, 1)])];
    records.extend(
        runs.iter()
            .map(|(at, pages, flags)| fields(&[(1, *at), (2, 0), (4, *flags), (5, *pages)])),
    );
    image(&images.join(format!("pagemap-{vpid}.img")), 0x5608_4025, &records);
    let mut mm = fields(&[(1, 0x400000)]);
    for (start, end, madv) in mappings {
        nested(
            14,
            &fields(&[(1, *start), (2, *end), (5, 3), (9, *madv)]),
            &mut mm,
        );
    }
    image(&images.join(format!("mm-{vpid}.img")), 0x5749_2820, &[mm]);
}

/// The tree: numbers, and whether each is a zombie.
pub fn write_tree(images: &Path, tasks: &[(u32, bool)]) {
    let records: Vec<_> = tasks
        .iter()
        .map(|(vpid, _)| fields(&[(1, u64::from(*vpid)), (2, 0)]))
        .collect();
    image(&images.join("pstree.img"), 0x5027_3030, &records);
    for (vpid, zombie) in tasks {
        let mut core = fields(&[(1, 1)]);
        nested(3, &fields(&[(1, if *zombie { 2 } else { 1 })]), &mut core);
        image(&images.join(format!("core-{vpid}.img")), 0x5505_3847, &[core]);
    }
}

pub struct Criu(UnixStream);

impl Criu {
    pub fn connect(work: &Path) -> Self {
        Self(UnixStream::connect(work.join("lazy-pages.socket")).unwrap())
    }

    pub fn task(&mut self, vpid: i32, uffd: OwnedFd) -> std::io::Result<()> {
        self.0.write_all(&vpid.to_le_bytes())?;
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = [uffd.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
        rustix::net::sendmsg(
            self.0.as_fd(),
            &[IoSlice::new(b"x")],
            &mut control,
            SendFlags::NOSIGNAL,
        )?;
        Ok(())
    }

    pub fn zombie(&mut self, vpid: i32) {
        self.0.write_all(&(-vpid).to_le_bytes()).unwrap();
    }

    pub fn finish(&mut self) {
        self.0.write_all(&0x5253_5446u32.to_le_bytes()).unwrap();
    }

    /// The other end has closed it.
    pub fn is_cut_off(&mut self) -> bool {
        use std::io::Read;
        self.0
            .set_read_timeout(Some(std::time::Duration::from_secs(10)))
            .unwrap();
        !matches!(self.0.read(&mut [0]), Err(error) if error.kind() == std::io::ErrorKind::WouldBlock)
    }
}
