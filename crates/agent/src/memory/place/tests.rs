use super::*;
use crate::proto::{Piece, Stamp};

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
    let link = |path: &str, to: &str| further(path, to);
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
            "a further name, then a link",
            vec![
                file("b"),
                link("a", "b"),
                outside.link("b", "f"),
                file("b"),
                file("a"),
            ],
        ),
        (
            "a further name of a link",
            vec![outside.link("b", "f"), link("a", "b"), file("a")],
        ),
        (
            "a link, then a further name",
            vec![file("b"), outside.link("a", ""), link("a", "b"), file("a")],
        ),
        (
            "a link, then a socket",
            vec![
                folder("d"),
                outside.link("d/a", "f"),
                own(part("d/a", Kind::Socket)),
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
                Kind::Socket => found
                    .as_ref()
                    .is_ok_and(std::os::unix::fs::FileTypeExt::is_socket),
                Kind::Link => found.is_ok(),
                Kind::Removed => found.is_err(),
                Kind::Times => unreachable!("it names nothing"),
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
        Kind::Socket,
        Kind::Removed,
    ] {
        assert!(placer.put(&part("agent.sock", kind)).is_err(), "{kind:?}");
    }
    placer.put(&part("f", Kind::Fifo)).unwrap();
    for (path, to) in [("agent.sock", "f"), ("x", "agent.sock")] {
        assert!(placer.put(&further(path, to)).is_err(), "{path} of {to}");
    }
    assert!(placer.put(&part("new.sock", Kind::Socket)).is_err());
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

/// A further name of what `to` names.
fn further(path: &str, to: &str) -> FilePart {
    FilePart {
        data: to.as_bytes().to_vec().into(),
        ..part(path, Kind::Link)
    }
}

fn stamp(path: &str, seconds: i64, nanoseconds: u32) -> Stamp {
    Stamp {
        path: path.into(),
        modified_seconds: seconds,
        modified_nanoseconds: nanoseconds,
        accessed_seconds: seconds + 1,
        accessed_nanoseconds: nanoseconds + 1,
    }
}

#[test]
fn further_names_are_of_one_file_and_follow_nothing() {
    use std::os::unix::fs::MetadataExt;

    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    let mut placer = Placer::new(root.path().to_owned());
    let file = |path: &str, content: &'static [u8]| FilePart {
        length: content.len() as u64,
        data: content.into(),
        ..part(path, Kind::File)
    };
    for part in [
        file("a", b"old"),
        part("d", Kind::Directory),
        part("p", Kind::Fifo),
    ] {
        placer.put(&part).unwrap();
    }
    // Also twice, and in the place of something else.
    for (path, to) in [
        ("b", "a"),
        ("b", "a"),
        ("d/c", "a"),
        ("q", "p"),
        ("p2", "q"),
        ("p2", "a"),
    ] {
        placer.put(&further(path, to)).unwrap();
    }
    placer.put(&file("a", b"new")).unwrap();
    for name in ["a", "b", "d/c", "p2"] {
        assert_eq!(std::fs::read(at(name)).unwrap(), b"new", "{name}");
        assert_eq!(at(name).metadata().unwrap().nlink(), 4);
    }
    // What is no name of it any more is not written through.
    placer.put(&part("b", Kind::Removed)).unwrap();
    placer.put(&file("b", b"own")).unwrap();
    assert_eq!(std::fs::read(at("a")).unwrap(), b"new");
    // One that is told anew keeps its names.
    placer.put(&part("p", Kind::Fifo)).unwrap();
    assert_eq!(at("q").metadata().unwrap().nlink(), 2);
    for (path, to) in [
        ("x", "missing"),
        ("x", "d"),
        ("x", "../x"),
        ("x", "/etc/passwd"),
        ("x", ""),
        ("x", "d/../a"),
    ] {
        assert!(placer.put(&further(path, to)).is_err(), "{to}");
        assert!(!at("x").exists());
    }
    let outside = Outside::new();
    placer.put(&outside.link("l", "")).unwrap();
    assert!(placer.put(&further("x", "l/f")).is_err());
    outside.must_be_as_before("a further name through a link");
}

#[test]
fn times_are_given_when_all_is_placed_and_through_no_link() {
    let root = tempfile::tempdir().unwrap();
    let outside = Outside::new();
    let mut placer = Placer::new(root.path().to_owned());
    placer.put(&part("d", Kind::Directory)).unwrap();
    placer.put(&outside.link("l", "f")).unwrap();
    placer.put(&outside.link("way", "")).unwrap();
    let names = ["d", "d/f", "l", "gone", "gone/f", "way/f", "d/f/f"];
    let times = FilePart {
        kind: Kind::Times.into(),
        stamps: names.map(|name| stamp(name, -5, 7)).to_vec(),
        ..FilePart::default()
    };
    placer.put(&times).unwrap();
    placer.put(&part("d/f", Kind::File)).unwrap();
    let host_s = outside.folder.path().join("f").metadata().unwrap();
    placer.stamp().unwrap();
    for name in ["d", "d/f", "l"] {
        let found =
            rustix::fs::statat(rustix::fs::CWD, root.path().join(name), AtFlags::SYMLINK_NOFOLLOW).unwrap();
        let found = (
            found.st_mtime,
            found.st_mtime_nsec,
            found.st_atime,
            found.st_atime_nsec,
        );
        assert_eq!(found, (-5, 7, -4, 8), "{name}");
    }
    let after = outside.folder.path().join("f").metadata().unwrap();
    assert_eq!(after.modified().unwrap(), host_s.modified().unwrap());
    for wrong in [stamp("../x", 1, 1), stamp("", 1, 1), stamp("d", 1, 1_000_000_000)] {
        let times = FilePart {
            stamps: vec![wrong],
            ..times.clone()
        };
        assert!(placer.put(&times).is_err());
    }
}

#[test]
fn attributes_are_those_that_were_told_and_modes_survive_owners() {
    use crate::proto::{Attribute, Attributes};

    let root = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut placer = Placer::new(root.path().to_owned());
    let told = |path: &str, kind: Kind, names: &[&str]| FilePart {
        mode: 0o104_751,
        attributes: Some(Attributes {
            all: names
                .iter()
                .map(|name| Attribute {
                    name: name.as_bytes().to_vec(),
                    value: b"v".to_vec(),
                })
                .collect(),
        }),
        ..part(path, kind)
    };
    let names = |path: &str| {
        let mut list = vec![0u8; 4096];
        let length = rustix::fs::listxattr(root.path().join(path), &mut list[..]).unwrap();
        String::from_utf8(list[..length].to_vec()).unwrap()
    };
    for (path, kind) in [("f", Kind::File), ("d", Kind::Directory)] {
        placer.put(&told(path, kind, &["user.a", "user.b"])).unwrap();
        placer.put(&told(path, kind, &["user.b"])).unwrap();
        assert_eq!(names(path), "user.b\0");
        // As agents of the release before tell it.
        placer.put(&part(path, kind)).unwrap();
        assert_eq!(names(path), "user.b\0");
        assert!(placer.put(&told(path, kind, &["security.selinux"])).is_err());
    }
    placer.put(&told("f", Kind::File, &[])).unwrap();
    let mode = root.path().join("f").metadata().unwrap().permissions().mode();
    assert_eq!((mode & 0o7777, names("f").as_str()), (0o4751, ""));
}
