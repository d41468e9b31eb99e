//! Memory without a name: what of it moves, what a limit of the blackout makes of it, and what is refused by name.

use std::collections::BTreeMap;

use anyhow::{Context, ensure};
use verbatim_e2e::{Instance, TestLab};

use super::{HOSTS, LIMIT, lines, next_line, python};
use crate::Test;

pub(super) fn tests() -> Vec<Test> {
    vec![
        Test::new("carried::files_without_a_name", HOSTS, files_without_a_name),
        Test::new("carried::a_name_among_several", HOSTS, a_name_among_several),
        Test::new(
            "carried::a_strict_limit_counts_shared_memory",
            HOSTS,
            a_strict_limit_counts_shared_memory,
        ),
        Test::new(
            "carried::what_criu_cannot_write_is_named",
            HOSTS,
            what_criu_cannot_write_is_named,
        ),
        Test::new("carried::flags_of_mappings", HOSTS, flags_of_mappings),
    ]
}

/// Unlinked files of several MiB, mapped by two processes or open, one of them nearly all hole.
fn files_without_a_name(lab: &TestLab) -> anyhow::Result<()> {
    let program = "
import mmap, os, time
SIZE = 24 << 20
block = os.urandom(1 << 20)
def file(path, size):
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o640)
    os.ftruncate(descriptor, size)
    os.unlink(path)
    return descriptor
closed = file('/dev/shm/closed', SIZE)
mapped = mmap.mmap(closed, SIZE)
os.close(closed)
for at in range(0, SIZE, 1 << 20):
    mapped[at:at + (1 << 20)] = block
kept = file('/tmp/kept', SIZE)
for at in range(0, SIZE, 1 << 20):
    os.pwrite(kept, block, at)
sparse = file('/tmp/sparse', 4 << 30)
os.pwrite(sparse, b'end', (4 << 30) - 3)
if os.fork() == 0:
    while True:
        mapped[0:8] = time.monotonic_ns().to_bytes(8, 'little')
        time.sleep(0.01)
print('ready')
before = 0
while True:
    now = int.from_bytes(mapped[0:8], 'little')
    right = all(mapped[at + 8:at + (1 << 20)] == block[8:] for at in range(0, SIZE, 1 << 20))
    right &= all(os.pread(kept, 1 << 20, at) == block for at in range(0, SIZE, 1 << 20))
    right &= os.pread(sparse, 9, (4 << 30) - 9) == bytes(6) + b'end' and os.fstat(sparse).st_blocks < 1000
    print('files', right, os.fstat(kept).st_nlink, now != before)
    before = now
    time.sleep(0.1)
";
    let instance = python(lab, "nameless", program)?;
    let said = lab.ask(&["check", "nameless", "--to", "dst"])?;
    ensure!(
        said.stdout.contains("without a file") || said.stderr.contains("without a file"),
        "{}",
        said.output()
    );
    for to in ["dst", "src"] {
        instance.moves(to)?;
        let said = next_line(&instance, "files", lines(&instance)? + 1)?;
        ensure!(said == "files True 0 True", "on {to}: {said}");
    }
    Ok(())
}

/// A file is open by a name that is gone, and has another one.
fn a_name_among_several(lab: &TestLab) -> anyhow::Result<()> {
    let program = "
import os, time
for folder in ('/tmp', '/dev/shm'):
    with open(folder + '/left', 'w') as file:
        file.write('content')
    os.link(folder + '/left', folder + '/gone')
files = [os.open(folder + '/gone', os.O_RDWR) for folder in ('/tmp', '/dev/shm')]
for folder in ('/tmp', '/dev/shm'):
    os.unlink(folder + '/gone')
print('ready')
turn = 0
while True:
    turn += 1
    same = True
    for file, folder in zip(files, ('/tmp', '/dev/shm')):
        os.pwrite(file, b'%07d' % turn, 0)
        same &= open(folder + '/left').read() == '%07d' % turn
        same &= os.path.samestat(os.fstat(file), os.stat(folder + '/left'))
        same &= os.listdir(folder) == ['left']
    print('names', same, [os.fstat(file).st_nlink for file in files])
    time.sleep(0.1)
";
    let instance = python(lab, "several", program)?;
    lab.ask(&["check", "several", "--to", "dst"])?;
    for to in ["dst", "src", "dst"] {
        instance.moves(to)?;
        let said = next_line(&instance, "names", lines(&instance)? + 1)?;
        ensure!(said == "names True [1, 1]", "on {to}: {said}");
    }
    // Outside of what moves along nobody would carry the other name.
    let folder = tempfile::tempdir_in("/var/tmp")?;
    let path = folder.path().to_str().context("a path")?;
    std::fs::write(folder.path().join("left"), "content")?;
    std::fs::hard_link(folder.path().join("left"), folder.path().join("gone"))?;
    let program = format!(
        "import os, time\nfile = os.open('{path}/gone', os.O_RDONLY)\nprint('ready')\ntime.sleep(1000)\n"
    );
    let options = ["--name", "outside", "--bind", path, "--"];
    let outside = Instance::run(lab, "src", &options, &["/usr/bin/python3", "-u", "-c", &program])?;
    super::says(&outside, "ready")?;
    std::fs::remove_file(folder.path().join("gone"))?;
    refused(lab, &outside, "whose name was removed while it has others")
}

/// `check` says why it cannot move, and a migration begins nothing.
pub(super) fn refused(lab: &TestLab, instance: &Instance<'_>, why: &str) -> anyhow::Result<()> {
    let said = lab
        .verbatim(&["check", instance.name(), "--to", "dst"])?
        .wait(LIMIT)?;
    ensure!(said.code == 1 && said.stdout.contains(why), "{}", said.output());
    let moved = instance.migrate("dst")?;
    moved.must_be_rolled_back(&[why])?;
    ensure!(
        moved.bytes.pre_copy == 0 && moved.pre_copy.rounds.is_empty(),
        "something was sent: {moved:?}"
    );
    Ok(())
}

/// Shared memory that no round sends: a limit is kept, or the instance stays.
fn a_strict_limit_counts_shared_memory(lab: &TestLab) -> anyhow::Result<()> {
    const MIB: u64 = 64;
    let kinds = [
        (
            "memfd",
            "memory = os.memfd_create('m')\nos.ftruncate(memory, SIZE)\nblock = mmap.mmap(memory, SIZE)",
        ),
        ("anonymous", "block = mmap.mmap(-1, SIZE)"),
        (
            "sysv",
            "
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
number = libc.shmget(0x1234, ctypes.c_size_t(SIZE), 0o1600)
block = (ctypes.c_char * SIZE).from_address(libc.shmat(number, None, 0))",
        ),
    ];
    for (name, make) in kinds {
        let program = format!(
            "
import ctypes, hashlib, mmap, os, time
SIZE = {MIB} << 20
{make}
part = os.urandom(1 << 20)
for at in range(0, SIZE, 1 << 20):
    block[at:at + (1 << 20)] = part
print('ready')
while True:
    print('block', all(bytes(block[at:at + (1 << 20)]) == part for at in range(0, SIZE, 1 << 20)))
    time.sleep(0.1)
"
        );
        let instance = python(lab, name, &program)?;
        let said = lab.ask(&["check", name, "--to", "dst"])?;
        ensure!(
            said.output().contains(&format!("{MIB} MiB of shared memory")),
            "{}",
            said.output()
        );
        let moved = instance.migrate_with("dst", &["--max-blackout", "100", "--strict"])?;
        moved.must_be_rolled_back(&["of shared memory"])?;
        // Nobody has forbidden it.
        let moved = instance.moves("dst")?;
        let (predicted, real) = (moved.pre_copy.predicted_blackout_ms, moved.service_blackout_ms);
        println!("{name}: predicted {predicted:.0} ms, {real:.0} ms");
        ensure!(predicted > 100.0, "{moved:?}");
        let said = next_line(&instance, "block", lines(&instance)? + 1)?;
        ensure!(said == "block True", "{said}");
        lab.ask(&["stop", name])?;
    }
    Ok(())
}

/// Kinds of memory that CRIU gives up on, in the middle of its dump or its restore.
fn what_criu_cannot_write_is_named(lab: &TestLab) -> anyhow::Result<()> {
    let sealed = "
fd = os.memfd_create('sealed', os.MFD_ALLOW_SEALING)
os.ftruncate(fd, 8192)
fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
try:
    block = mmap.mmap(fd, 8192, mmap.MAP_SHARED, mmap.PROT_READ)
except OSError:
    print('unsupported')
";
    // memfd_secret has the same number on all machines.
    let secret = "
libc = ctypes.CDLL(None, use_errno=True)
fd = libc.syscall(447, 0)
if fd < 0:
    print('unsupported')
else:
    os.ftruncate(fd, 8192)
    block = mmap.mmap(fd, 8192)
    block[0:4] = b'here'
    os.close(fd)
";
    let key = "
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
block = libc.mmap(None, ctypes.c_size_t(8192), 3, 0x22, -1, ctypes.c_long(0))
number = libc.pkey_alloc(0, 0)
if number < 0 or libc.pkey_mprotect(ctypes.c_void_p(block), ctypes.c_size_t(8192), 3, number) != 0:
    print('unsupported')
";
    let own = "
libc = ctypes.CDLL(None, use_errno=True)
fd = libc.syscall({'x86_64': 323, 'aarch64': 282}[os.uname().machine], 1)
if fd < 0:
    print('unsupported')
";
    let cases = [
        ("sealed", sealed, "F_SEAL_WRITE", true),
        ("secret", secret, "memfd_secret", true),
        ("key", key, "protection key", true),
        // As with any kind of descriptor that CRIU does not know.
        ("userfaultfd", own, "userfaultfd", false),
    ];
    for (name, what, why, begins_nothing) in cases {
        let program =
            format!("import ctypes, fcntl, mmap, os, time\n{what}\nprint('ready')\ntime.sleep(1000)\n");
        let instance = python(lab, name, &program)?;
        if instance.output()?.contains("unsupported") {
            eprintln!("this machine has no such memory: {name}");
            continue;
        }
        if begins_nothing {
            refused(lab, &instance, why)?;
        } else {
            let said = lab.verbatim(&["check", name, "--to", "dst"])?.wait(LIMIT)?;
            ensure!(said.code == 1 && said.stdout.contains(why), "{}", said.output());
        }
    }
    Ok(())
}

/// `VmFlags` of the mappings that a program has named, by their names.
fn flags(
    lab: &TestLab,
    instance: &Instance<'_>,
    addresses: &BTreeMap<String, u64>,
) -> anyhow::Result<BTreeMap<String, String>> {
    let row = instance.row()?;
    let pid = row.pid.context("it has ended")?;
    let smaps = std::fs::read_to_string(lab.path(&row.host, &format!("/proc/{pid}/smaps"))?)?;
    let mut found = BTreeMap::new();
    for (name, address) in addresses {
        let head = format!("{address:x}-");
        let mapping = smaps
            .split_once(&format!("\n{head}"))
            .with_context(|| format!("{name} is not at {address:x}"))?;
        let line = mapping
            .1
            .lines()
            .find(|line| line.starts_with("VmFlags:"))
            .context("VmFlags")?;
        // Soft-dirty, and what tracks memory from outside.
        let kept = line
            .split(' ')
            .filter(|flag| !["sd", "uw", "um", "ui"].contains(flag));
        found.insert(name.clone(), kept.collect::<Vec<_>>().join(" "));
    }
    Ok(found)
}

fn flags_of_mappings(lab: &TestLab) -> anyhow::Result<()> {
    let program = "
import ctypes, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
SIZE = 4 << 20
def block(name, advice=None):
    # Between mappings of other kinds, so that it is one of its own.
    libc.mmap(None, 4096, 0, 0x22, -1, 0)
    address = libc.mmap(None, SIZE, 3, 0x22, -1, 0)
    ctypes.memset(address, 7, 8192)
    if advice is not None and libc.madvise(address, SIZE, advice) != 0:
        return address
    print('at', name, hex(address))
    return address
for name, advice in [('plain', None), ('dontfork', 10), ('mergeable', 12), ('hugepage', 14), ('nohugepage', 15),
                     ('dontdump', 16), ('wipeonfork', 18)]:
    block(name, advice)
libc.mlock(block('locked'), SIZE)
print('ready')
time.sleep(1000)
";
    let instance = python(lab, "flags", program)?;
    let output = instance.output()?;
    let addresses: BTreeMap<String, u64> = output
        .lines()
        .filter_map(|line| {
            let (name, address) = line.strip_prefix("at ")?.split_once(" 0x")?;
            Some((name.to_owned(), u64::from_str_radix(address, 16).ok()?))
        })
        .collect();
    ensure!(addresses.len() > 5, "{output}");
    let before = flags(lab, &instance, &addresses)?;
    ensure!(
        before["locked"].contains(" lo") && before["dontfork"].contains(" dc"),
        "{before:?}"
    );
    for to in ["dst", "src"] {
        instance.moves(to)?;
        let after = flags(lab, &instance, &addresses)?;
        ensure!(before == after, "on {to}: {before:?} became {after:?}");
    }
    Ok(())
}
