//! Files and memory that travel with an instance are the same after a move.

mod memory;
mod snapshot;

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, ensure};
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, Timespec, Timestamps, XattrFlags, makedev, mknodat, setxattr,
};
use verbatim_e2e::{Instance, TestLab, eventually};

use crate::Test;
use snapshot::Snapshot;

const HOSTS: &[&str] = &["src", "dst"];
const LIMIT: Duration = Duration::from_secs(60);

/// All of them.
pub fn tests() -> Vec<Test> {
    let mut tests = vec![
        Test::new("carried::a_tree", HOSTS, a_tree),
        Test::new(
            "carried::links_change_during_the_move",
            HOSTS,
            links_change_during_the_move,
        ),
        Test::new(
            "carried::what_cannot_be_made_is_refused",
            HOSTS,
            what_cannot_be_made_is_refused,
        ),
        Test::new("carried::leases", HOSTS, leases),
        Test::new("carried::guard_regions", HOSTS, guard_regions),
    ];
    tests.extend(memory::tests());
    tests
}

/// A program in Python that has said "ready".
fn python<'l>(lab: &'l TestLab, name: &str, program: &str) -> anyhow::Result<Instance<'l>> {
    let instance = lab.instance("src", name, &["/usr/bin/python3", "-u", "-c", program])?;
    says(&instance, "ready")?;
    Ok(instance)
}

fn says(instance: &Instance<'_>, word: &str) -> anyhow::Result<()> {
    eventually(&format!("{word:?} of {}", instance.name()), LIMIT, || {
        let output = instance.output()?;
        ensure!(!output.contains("Traceback"), "{output}");
        Ok(output.lines().any(|line| line == word).then_some(()))
    })
}

/// The last line that begins with `word`, once there is one beyond the first `lines`.
fn next_line(instance: &Instance<'_>, word: &str, lines: usize) -> anyhow::Result<String> {
    eventually(&format!("{word:?} of {}", instance.name()), LIMIT, || {
        let output = instance.output()?;
        ensure!(!output.contains("Traceback"), "{output}");
        let found = output.lines().skip(lines).filter(|line| line.starts_with(word));
        Ok(found.last().map(str::to_owned))
    })
}

fn lines(instance: &Instance<'_>) -> anyhow::Result<usize> {
    Ok(instance.output()?.lines().count())
}

/// An ACL as the kernel has it: version 2, and an entry for each of user::, user:4711:, group::, mask:: and other::.
fn acl() -> Vec<u8> {
    let none = u32::MAX;
    let entries = [
        (0x01, 7, none),
        (0x02, 6, 4711),
        (0x04, 5, none),
        (0x10, 7, none),
        (0x20, 1, none),
    ];
    let mut bytes = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        bytes.extend(u16::to_le_bytes(tag));
        bytes.extend(u16::to_le_bytes(permissions));
        bytes.extend(u32::to_le_bytes(id));
    }
    bytes
}

fn attribute(path: &Path, name: &str, value: &[u8]) -> anyhow::Result<()> {
    setxattr(path, name, value, XattrFlags::empty()).with_context(|| format!("{name} of {}", path.display()))
}

/// Everything that a file system without a disk can have.
fn plant(root: &Path, seed: i64) -> anyhow::Result<()> {
    let at = |name: &str| root.join(name);
    for name in ["d", "d/deep", "empty", "sticky"] {
        fs::create_dir(at(name))?;
    }
    fs::write(at("a"), "data\n")?;
    for further in ["b", "d/c"] {
        fs::hard_link(at("a"), at(further))?;
    }
    attribute(&at("a"), "user.k", b"v\0binary")?;
    attribute(&at("a"), "user.empty", b"")?;
    attribute(&at("a"), "trusted.k", b"root's")?;
    fs::write(at("old"), "#!/bin/true\n")?;
    std::os::unix::fs::chown(at("old"), Some(33), Some(44))?;
    fs::set_permissions(at("old"), fs::Permissions::from_mode(0o4755))?;
    fs::write(at("none"), "secret")?;
    fs::set_permissions(at("none"), fs::Permissions::from_mode(0o000))?;
    fs::write(at("capable"), "content")?;
    // cap_net_raw, permitted and effective.
    let capability = [0x0200_0001u32, 1 << 13, 0, 0, 0].map(u32::to_le_bytes).concat();
    attribute(&at("capable"), "security.capability", &capability)?;
    fs::set_permissions(at("sticky"), fs::Permissions::from_mode(0o3777))?;
    attribute(&at("d"), "system.posix_acl_default", &acl())?;
    fs::write(at("d/inherits"), "")?;
    fs::write(at("listed"), "")?;
    attribute(&at("listed"), "system.posix_acl_access", &acl())?;
    mknodat(CWD, at("fifo"), FileType::Fifo, Mode::from_raw_mode(0o620), 0)?;
    fs::hard_link(at("fifo"), at("d/fifo2"))?;
    symlink("nowhere/at all", at("link"))?;
    fs::hard_link(at("link"), at("d/link2"))?;
    std::os::unix::fs::lchown(at("link"), Some(1), Some(2))?;
    drop(std::os::unix::net::UnixListener::bind(at("dead.sock"))?);
    fs::set_permissions(at("dead.sock"), fs::Permissions::from_mode(0o640))?;
    let sparse = fs::File::create(at("sparse"))?;
    sparse.set_len(50 << 20)?;
    std::os::unix::fs::FileExt::write_all_at(&sparse, b"end", (50 << 20) - 3)?;
    // Each has times of its own; folders last.
    let mut paths = snapshot::paths(root)?;
    paths.sort_by_key(|path| std::cmp::Reverse(path.components().count()));
    for (number, path) in (1..).zip(paths) {
        let times = Timestamps {
            last_access: Timespec {
                tv_sec: seed + number * 1000,
                tv_nsec: 123_456_789 - number,
            },
            last_modification: Timespec {
                tv_sec: seed - number * 1000,
                tv_nsec: 987_654_321 - number,
            },
        };
        rustix::fs::utimensat(CWD, root.join(path), &times, AtFlags::SYMLINK_NOFOLLOW)?;
    }
    Ok(())
}

/// It has a socket that lives beside one that does not.
const SERVER: &str = "
import os, socket, time
os.makedirs('/tmp/live')
server = socket.socket(socket.AF_UNIX)
server.bind('/tmp/live/s')
os.chmod('/tmp/live/s', 0o605)
server.listen()
print('ready')
while True:
    connection, _ = server.accept()
    connection.send(b'here')
    connection.close()
";

fn trees(instance: &Instance<'_>) -> anyhow::Result<[PathBuf; 2]> {
    Ok([instance.path("/tmp")?, instance.path("/dev/shm")?])
}

fn a_tree(lab: &TestLab) -> anyhow::Result<()> {
    let instance = python(lab, "tree", SERVER)?;
    for (root, seed) in trees(&instance)?.iter().zip([1_000_000_000, -1_000_000]) {
        plant(root, seed)?;
    }
    let look = || -> anyhow::Result<Vec<Snapshot>> {
        trees(&instance)?.iter().map(|root| Snapshot::of(root)).collect()
    };
    let mut before = look()?;
    ensure!(before == look()?, "the look changes what it looks at");
    lab.ask(&["check", "tree", "--to", "dst"])?;
    for to in ["dst", "src", "dst"] {
        instance.moves(to)?;
        for (before, after) in before.iter().zip(look()?) {
            before.must_be(&after).with_context(|| format!("on {to}"))?;
        }
        // The names are of one file, and the socket is somebody's.
        let [tmp, _] = trees(&instance)?;
        let socket = std::os::unix::net::UnixStream::connect(short(&tmp)?.join("live/s"));
        let mut said = String::new();
        std::io::Read::read_to_string(&mut socket?, &mut said)?;
        ensure!(said == "here", "{said:?}");
        // Whoever connects is noted as the socket's reader.
        before = look()?;
    }
    let [tmp, _] = trees(&instance)?;
    fs::write(tmp.join("a"), "more")?;
    ensure!(fs::read(tmp.join("d/c"))? == b"more");
    Ok(())
}

/// A socket's path has room for few letters.
fn short(folder: &Path) -> anyhow::Result<PathBuf> {
    let file = Box::leak(Box::new(fs::File::open(folder)?));
    Ok(PathBuf::from(format!(
        "/proc/self/fd/{}",
        std::os::fd::AsRawFd::as_raw_fd(file)
    )))
}

/// Names come, go, and take each other's places while the files are sent.
fn links_change_during_the_move(lab: &TestLab) -> anyhow::Result<()> {
    let program = "
import os, time
os.chdir('/tmp')
ballast = open('ballast', 'wb')
for _ in range(64):
    ballast.write(os.urandom(1 << 20))
ballast.flush()
def put(name, text):
    with open('new', 'w') as file:
        file.write(text)
    os.rename('new', name)
print('ready')
turn = 0
while not os.path.exists('stop'):
    turn += 1
    # Of one file, and written by its second name; then the first one goes, and then the second.
    put(f'x{turn}', 'unwritten')
    os.link(f'x{turn}', f'y{turn}')
    with open(f'y{turn}', 'r+') as file:
        file.write('%09d' % turn)
    if turn > 200:
        os.remove(f'x{turn - 200}')
    if turn > 400:
        os.remove(f'y{turn - 400}')
    put('a', f'a{turn}' * 3000)
    for name in ('b', 'c'):
        os.link('a', 'further')
        os.rename('further', name)
        if os.path.samestat(os.stat('a'), os.stat(name)) and os.path.exists('further'):
            os.remove('further')
    put('c', f'c{turn}' * 2000)
    os.rename('b', 'a') if turn % 3 == 0 else None
    if os.path.exists('b') and os.path.samestat(os.stat('a'), os.stat('b')):
        with open('b', 'r+') as file:
            file.write(f'b{turn}')
    time.sleep(0.001)
for number in range(max(1, turn - 399), turn + 1):
    names = [f'y{number}'] + [f'x{number}'] * (number > turn - 200)
    assert all(open(name).read() == '%09d' % number for name in names), (turn, number)
    assert all(os.stat(name).st_nlink == len(names) for name in names), (turn, number)
    assert len({os.stat(name).st_ino for name in names}) == 1, (turn, number)
print('stopped')
time.sleep(1000)
";
    let instance = python(lab, "links", program)?;
    for to in ["dst", "src", "dst"] {
        instance.moves(to)?;
        let [tmp, _] = trees(&instance)?;
        // Whatever it was at the freeze: names of one file are one, and its content is whole.
        eventually("names that agree", LIMIT, || {
            let content = |name: &str| fs::read_to_string(tmp.join(name));
            let Ok(found) = ["a", "c"].map(content).into_iter().collect::<Result<Vec<_>, _>>() else {
                return Ok(None);
            };
            let whole = |text: &str| text.len() >= 4000 && !text.contains('\0');
            Ok(found.iter().all(|text| whole(text)).then_some(()))
        })?;
    }
    let [tmp, _] = trees(&instance)?;
    fs::write(tmp.join("stop"), "")?;
    says(&instance, "stopped")
}

/// Makes something that cannot move.
type Make<'a> = dyn Fn() -> Result<(), rustix::io::Errno> + 'a;

fn what_cannot_be_made_is_refused(lab: &TestLab) -> anyhow::Result<()> {
    let instance = lab.instance("src", "odd", &["sleep", "1000"])?;
    let [tmp, shm] = trees(&instance)?;
    fs::create_dir(tmp.join("d"))?;
    let null = || {
        mknodat(
            CWD,
            tmp.join("d/null"),
            FileType::CharacterDevice,
            Mode::RWXU,
            makedev(1, 3),
        )
    };
    let odd = || attribute(&shm.join("odd"), "security.odd", b"x").map_err(|_| rustix::io::Errno::PERM);
    fs::write(shm.join("odd"), "")?;
    let cases: [(&Make<'_>, PathBuf, &str); 2] = [
        (&null, tmp.join("d/null"), "tmp/d/null is a device"),
        (
            &odd,
            shm.join("odd"),
            "shm/odd has the extended attribute security.odd",
        ),
    ];
    for (make, path, wanted) in cases {
        make()?;
        let said = lab.verbatim(&["check", "odd", "--to", "dst"])?.wait(LIMIT)?;
        ensure!(
            said.code == 1 && said.stdout.contains(wanted),
            "{}",
            said.output()
        );
        let moved = instance.migrate("dst")?;
        ensure!(moved.must_be_committed().is_err(), "{moved:?}");
        ensure!(moved.pre_copy.rounds.is_empty(), "something was sent: {moved:?}");
        fs::remove_file(path)?;
    }
    lab.ask(&["check", "odd", "--to", "dst"])?;
    instance.moves("dst")?;
    Ok(())
}

/// The program is not told of an end of its leases, and has them afterwards.
fn leases(lab: &TestLab) -> anyhow::Result<()> {
    let program = "
import fcntl, os, signal, time
broken = []
signal.signal(signal.SIGIO, lambda *_: broken.append(1))
def leased(name, kind):
    with open(name, 'w') as file:
        file.write('w' if kind == fcntl.F_WRLCK else 'content of ' + name)
    descriptor = os.open(name, os.O_RDONLY if kind == fcntl.F_RDLCK else os.O_RDWR)
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, kind)
    return descriptor
files = [leased('/tmp/w', fcntl.F_WRLCK), leased('/dev/shm/r', fcntl.F_RDLCK)]
print('ready')
while True:
    kinds = [fcntl.fcntl(file, fcntl.F_GETLEASE) for file in files]
    texts = [os.pread(file, 100, 0) for file in files]
    right = texts == [b'w', b'content of /dev/shm/r']
    print('leases', kinds == [fcntl.F_WRLCK, fcntl.F_RDLCK], 'broken', len(broken), 'right', right)
    time.sleep(0.1)
";
    let instance = python(lab, "leases", program)?;
    lab.ask(&["check", "leases", "--to", "dst"])?;
    for to in ["dst", "src", "dst"] {
        instance.moves(to)?;
        let said = next_line(&instance, "leases", lines(&instance)?)?;
        ensure!(said == "leases True broken 0 right True", "on {to}: {said}");
    }
    lab.ask(&["stop", "leases"])?;
    // CRIU would look into the one and wait for 45 s; nobody can read the other.
    for (name, flags, content) in [("looked", "O_RDWR", "content"), ("blind", "O_WRONLY", "c")] {
        let program = format!(
            "
import fcntl, os, time
file = os.open('/tmp/leased', os.{flags} | os.O_CREAT, 0o600)
os.write(file, b'{content}')
fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print('ready')
time.sleep(1000)
"
        );
        let instance = python(lab, name, &program)?;
        let why = "has a lease for writing (F_SETLEASE) on /tmp/leased";
        memory::refused(lab, &instance, why)?;
    }
    Ok(())
}

/// Private memory goes ahead also where there are guard regions in it, and they are there afterwards.
fn guard_regions(lab: &TestLab) -> anyhow::Result<()> {
    let program = "
import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
PAGE, PAGES = 4096, 16384
block = libc.mmap(None, PAGE * PAGES, 3, 0x22, -1, 0)
page = lambda number: number.to_bytes(8, 'little') * (PAGE // 8)
for number in range(PAGES):
    ctypes.memmove(block + number * PAGE, page(number), PAGE)
guards = {8, 9, 10, 11, 5000, 5001, PAGES - 1}
install = [(8, 4), (5000, 2), (PAGES - 1, 1)]
done = [libc.madvise(block + first * PAGE, count * PAGE, 102) for first, count in install]
if any(done):
    print('unsupported', ctypes.get_errno())
untouched = libc.mmap(None, PAGE * 256, 3, 0x22, -1, 0)
libc.madvise(untouched + 16 * PAGE, 16 * PAGE, 102)
out, into = os.pipe()
def is_guard(address):
    if libc.write(into, ctypes.c_void_p(address), ctypes.c_size_t(1)) == 1:
        os.read(out, 1)
        return False
    return ctypes.get_errno() == 14
print('ready')
while True:
    found = {number for number in range(PAGES) if is_guard(block + number * PAGE)}
    other = {number for number in range(256) if is_guard(untouched + number * PAGE)}
    wrong = sum(ctypes.string_at(block + number * PAGE, PAGE) != page(number)
                for number in range(PAGES) if number not in guards and number not in found)
    print('guards', found == guards, other == set(range(16, 32)), 'wrong', wrong)
    time.sleep(0.1)
";
    let instance = python(lab, "guards", program)?;
    if instance.output()?.contains("unsupported") {
        eprintln!("this kernel has no guard regions");
        return Ok(());
    }
    for to in ["dst", "src", "dst"] {
        let moved = instance.moves(to)?;
        ensure!(
            moved.pre_copy.private_tracked.is_some(),
            "it did not go ahead: {moved:?}"
        );
        let said = next_line(&instance, "guards", lines(&instance)? + 1)?;
        ensure!(said == "guards True True wrong 0", "on {to}: {said}");
    }
    Ok(())
}
