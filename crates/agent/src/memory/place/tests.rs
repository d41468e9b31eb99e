use super::*;
use crate::proto::Piece;

impl Placer {
    /// A part that has its content with it.
    fn put(&mut self, part: &FilePart) -> io::Result<u64> {
        self.place(part, None)
    }
}

fn part(path: &str, kind: Kind) -> FilePart {
    FilePart {
        path: path.into(),
        kind: kind.into(),
        mode: 0o640,
        ..FilePart::default()
    }
}

#[test]
fn what_stands_in_for_a_file_has_its_content_and_stays_what_it_is() {
    let (folder, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let path = elsewhere.path().join("ram");
    std::fs::write(&path, [7; 3 * 4096]).unwrap();
    std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    let mut placer = Placer::new(folder.path().to_owned());
    let file = File::options().read(true).write(true).open(&path).unwrap();
    placer.stand_in(Path::new("mem/ram"), file);
    placer.put(&part("mem", Kind::Directory)).unwrap();
    let content = FilePart {
        length: 3 * 4096,
        offset: 4096,
        data: vec![1; 4096].into(),
        ..part("mem/ram", Kind::File)
    };
    assert_eq!(placer.put(&content).unwrap(), 4096);
    let placed = std::fs::read(&path).unwrap();
    assert_eq!(placed, [[7; 4096], [1; 4096], [7; 4096]].concat());
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o7777, 0o600);
    assert!(!folder.path().join("mem/ram").exists(), "it is not there, too");
    // Others are placed as always.
    let other = FilePart {
        path: b"mem/other".to_vec(),
        ..content.clone()
    };
    placer.put(&other).unwrap();
    assert!(folder.path().join("mem/other").exists());
    // What is longer there than here is not the same RAM.
    let longer = FilePart {
        length: 4 * 4096,
        ..content
    };
    assert!(placer.put(&longer).unwrap_err().to_string().contains("length"));
    assert_eq!(std::fs::read(&path).unwrap(), placed);
}

#[test]
fn parts_make_the_same_file() {
    let folder = tempfile::tempdir().unwrap();
    let mut placer = Placer::new(folder.path().to_owned());
    placer
        .put(&FilePart {
            mode: 0o750,
            ..part("d", Kind::Directory)
        })
        .unwrap();
    let file = FilePart {
        length: 10,
        ..part("d/f", Kind::File)
    };
    placer
        .put(&FilePart {
            offset: 4,
            data: b"four".as_slice().into(),
            ..file.clone()
        })
        .unwrap();
    placer
        .put(&FilePart {
            offset: 0,
            data: b"zero".as_slice().into(),
            ..file
        })
        .unwrap();
    assert_eq!(std::fs::read(folder.path().join("d/f")).unwrap(), b"zerofour\0\0");
    placer
        .put(&FilePart {
            data: b"d/f".as_slice().into(),
            ..part("l", Kind::Symlink)
        })
        .unwrap();
    assert_eq!(
        std::fs::read_link(folder.path().join("l")).unwrap(),
        Path::new("d/f")
    );
    // Each round sends it anew, as long as it is fresh.
    for _ in 0..2 {
        placer.put(&part("p", Kind::Fifo)).unwrap();
    }
    let fifo = std::fs::symlink_metadata(folder.path().join("p")).unwrap();
    assert!(std::os::unix::fs::FileTypeExt::is_fifo(&fifo.file_type()));
    assert_eq!(fifo.permissions().mode() & 0o7777, 0o640);
    for path in ["d", "d/f", "d/f/g"] {
        placer.put(&part(path, Kind::Removed)).unwrap();
    }
    assert!(!folder.path().join("d").exists());
    assert!(placer.open.files.is_empty(), "what is removed keeps no room");
}

#[test]
fn no_path_leads_out() {
    let folder = tempfile::tempdir().unwrap();
    let mut placer = Placer::new(folder.path().to_owned());
    placer
        .put(&FilePart {
            data: b"/tmp".as_slice().into(),
            ..part("out", Kind::Symlink)
        })
        .unwrap();
    for path in ["", "/etc/x", "../x", "a/../../x", "out/x", "."] {
        assert!(placer.put(&part(path, Kind::File)).is_err(), "{path}");
    }
}

/// A folder of the host with a file in it, and what both are like.
struct Outside {
    folder: tempfile::TempDir,
    before: Vec<(u32, u32, Vec<u8>)>,
}

impl Outside {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("f"), "the host's").unwrap();
        let before = Self::look(folder.path());
        Self { folder, before }
    }

    fn look(folder: &Path) -> Vec<(u32, u32, Vec<u8>)> {
        use std::os::unix::fs::MetadataExt;
        let names: Vec<_> = std::fs::read_dir(folder)
            .unwrap()
            .map(|e| e.unwrap().path())
            .collect();
        let all = names.iter().map(PathBuf::as_path).chain([folder]);
        let look = |path: &Path| {
            let metadata = std::fs::symlink_metadata(path).unwrap();
            (
                metadata.mode(),
                metadata.uid(),
                std::fs::read(path).unwrap_or_default(),
            )
        };
        all.map(look).collect()
    }

    fn link(&self, path: &str, to: &str) -> FilePart {
        let to = self.folder.path().join(to);
        FilePart {
            data: to.as_os_str().as_bytes().to_vec().into(),
            ..part(path, Kind::Symlink)
        }
    }

    fn must_be_as_before(&self, what: &str) {
        assert_eq!(Self::look(self.folder.path()), self.before, "{what}");
    }
}

#[test]
fn no_sequence_of_parts_reaches_the_host() {
    // Only root may give files away.
    let uid = rustix::process::geteuid();
    let uid = if uid.is_root() { 1 } else { uid.as_raw() };
    let own = |part: FilePart| FilePart {
        mode: 0o7777,
        uid: Some(uid),
        length: 3,
        ..part
    };
    let file = |path: &str| FilePart {
        data: b"new".as_slice().into(),
        ..own(part(path, Kind::File))
    };
    let folder = |path: &str| own(part(path, Kind::Directory));
    let outside = Outside::new();
    let sequences = [
        (
            "a link, then a folder",
            vec![outside.link("a", ""), folder("a"), file("a/f")],
        ),
        ("a link, then a file", vec![outside.link("a", "f"), file("a")]),
        (
            "a link to nothing, then a file",
            vec![outside.link("a", "new"), file("a")],
        ),
        (
            "a link, then a FIFO",
            vec![outside.link("a", "f"), own(part("a", Kind::Fifo))],
        ),
        (
            "a link, then a link",
            vec![outside.link("a", ""), own(outside.link("a", "f"))],
        ),
        (
            "a link, then nothing",
            vec![outside.link("a", ""), part("a", Kind::Removed)],
        ),
        ("a FIFO, then a file", vec![own(part("a", Kind::Fifo)), file("a")]),
        (
            "a FIFO, then a folder",
            vec![own(part("a", Kind::Fifo)), folder("a")],
        ),
        (
            "a file, then a link",
            vec![file("a"), outside.link("a", "f"), file("a")],
        ),
        ("a file, then a folder", vec![file("a"), folder("a"), file("a/f")]),
        (
            "a folder, then a file",
            vec![folder("a"), file("a/f"), file("a"), folder("a")],
        ),
        (
            "a folder that becomes a link, with a file open in it",
            vec![
                folder("a"),
                file("a/f"),
                part("a", Kind::Removed),
                outside.link("a", ""),
                file("a/f"),
            ],
        ),
        (
            "deep",
            vec![
                folder("a"),
                folder("a/b"),
                outside.link("a/b/c", ""),
                folder("a/b/c"),
                file("a/b/c/f"),
            ],
        ),
        (
            "through a link",
            vec![
                outside.link("a", ""),
                file("a/f"),
                folder("a/d"),
                part("a/f", Kind::Removed),
            ],
        ),
    ];
    for (what, parts) in sequences {
        let root = tempfile::tempdir().unwrap();
        let mut placer = Placer::new(root.path().to_owned());
        for part in parts {
            let placed = placer.put(&part);
            outside.must_be_as_before(what);
            // Whatever was in the way: it is what the part says now, or the part is refused.
            let path = root.path().join(OsStr::from_bytes(&part.path));
            let found = std::fs::symlink_metadata(&path).map(|metadata| metadata.file_type());
            let is_due = match part.kind() {
                Kind::File => found.as_ref().is_ok_and(std::fs::FileType::is_file),
                Kind::Directory => found.as_ref().is_ok_and(std::fs::FileType::is_dir),
                Kind::Symlink => found.as_ref().is_ok_and(std::fs::FileType::is_symlink),
                Kind::Fifo => found.as_ref().is_ok_and(std::os::unix::fs::FileTypeExt::is_fifo),
                Kind::Removed => found.is_err(),
            };
            let through_a_link = what == "through a link" && part.path != b"a"
                || what.starts_with("a folder that becomes a link") && placed.is_err();
            assert_eq!(placed.is_ok(), !through_a_link, "{what}: {placed:?}");
            assert!(is_due || placed.is_err(), "{what}: {part:?}");
        }
    }
}

#[test]
fn a_socket_of_the_host_is_not_replaced() {
    let root = tempfile::tempdir().unwrap();
    let _listener = std::os::unix::net::UnixListener::bind(root.path().join("agent.sock")).unwrap();
    let mut placer = Placer::new(root.path().to_owned());
    for kind in [
        Kind::File,
        Kind::Directory,
        Kind::Symlink,
        Kind::Fifo,
        Kind::Removed,
    ] {
        assert!(placer.put(&part("agent.sock", kind)).is_err(), "{kind:?}");
    }
    let found = std::fs::symlink_metadata(root.path().join("agent.sock")).unwrap();
    assert!(std::os::unix::fs::FileTypeExt::is_socket(&found.file_type()));
}

#[test]
fn names_are_bytes() {
    let root = tempfile::tempdir().unwrap();
    let mut placer = Placer::new(root.path().to_owned());
    let name = OsStr::from_bytes(b"caf\xe9");
    let file = FilePart {
        path: name.as_bytes().to_vec(),
        length: 1,
        data: b"x".as_slice().into(),
        ..FilePart::default()
    };
    placer.put(&file).unwrap();
    let link = FilePart {
        data: name.as_bytes().to_vec().into(),
        ..part("l", Kind::Symlink)
    };
    placer.put(&link).unwrap();
    assert_eq!(std::fs::read(root.path().join(name)).unwrap(), b"x");
    assert_eq!(
        std::fs::read_link(root.path().join("l")).unwrap(),
        Path::new(name)
    );
}

#[test]
fn few_files_are_kept_open() {
    let root = tempfile::tempdir().unwrap();
    let mut placer = Placer::new(root.path().to_owned());
    let files = quotas::PLACED_OPEN * 3;
    for round in 0..2 {
        for number in 0..files {
            let file = FilePart {
                offset: round,
                length: 2,
                data: vec![b'0' + round as u8].into(),
                ..part(&number.to_string(), Kind::File)
            };
            placer.put(&file).unwrap();
            assert!(placer.open.files.len() <= quotas::PLACED_OPEN);
        }
    }
    for number in 0..files {
        assert_eq!(
            std::fs::read(root.path().join(number.to_string())).unwrap(),
            b"01"
        );
    }
}

#[test]
fn pieces_are_put_where_they_belong_and_zeroes_punched() {
    let root = tempfile::tempdir().unwrap();
    let mut placer = Placer::new(root.path().to_owned());
    let whole = FilePart {
        data: vec![1; 5 * 4096].into(),
        length: 5 * 4096,
        ..part("f", Kind::File)
    };
    placer.put(&whole).unwrap();
    let piece = |offset, length, zeroes| Piece {
        offset,
        length,
        zeroes,
    };
    let changes = FilePart {
        pieces: vec![
            piece(0, 2, false),
            piece(4096, 8192, true),
            piece(4 * 4096, 3, false),
        ],
        data: b"abcde".as_slice().into(),
        length: 5 * 4096,
        ..part("f", Kind::File)
    };
    assert_eq!(placer.put(&changes).unwrap(), 2 + 8192 + 3);
    let mut wanted = vec![1; 5 * 4096];
    wanted[..2].copy_from_slice(b"ab");
    wanted[4096..3 * 4096].fill(0);
    wanted[4 * 4096..][..3].copy_from_slice(b"cde");
    let file = File::open(root.path().join("f")).unwrap();
    assert!(std::fs::read(root.path().join("f")).unwrap() == wanted);
    let hole = |file: &File| rustix::fs::seek(file, rustix::fs::SeekFrom::Hole(0)).unwrap();
    assert_eq!(hole(&file), 4096, "zeroes take no room");
    let mut placer = Placer::new(root.path().to_owned()).writing_zeroes();
    placer.put(&changes).unwrap();
    assert!(std::fs::read(root.path().join("f")).unwrap() == wanted);
    assert_eq!(hole(&file), 5 * 4096, "a hole is what never came");
    assert!(
        placer.place(&changes, Some(b"abcde")).is_err(),
        "it has not landed"
    );
}
