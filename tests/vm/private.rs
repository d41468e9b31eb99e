//! Private memory that goes ahead, on a kernel that says what is written to it: a lab of virtual hosts within the machine, and
//! `vcheck` in it, which holds private memory beside its connections.
//!
//! The test program plays two parts: on this machine it boots, and within it runs a story ([`inside`]).

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, ensure};
use verbatim_e2e::{CheckReport, Instance, Migration, TestLab, Tools, Traffic, VCHECK_PORT, patience};
use verbatim_testbed::{Command, Network, Vm, VmConfig};

/// The first argument of the part within the machine; the second is the story's name.
pub const INSIDE: &str = "--inside";

/// How much more time everything takes where two processors are emulated.
const PATIENCE: u32 = 8;

/// How long a story may take there.
const STORY_LIMIT: Duration = Duration::from_secs(2400);

/// Three hosts and their programs, with room for images.
const MEMORY_MIB: u32 = 3072;

/// The agents' TLS: without them 64 MiB take more than a minute on an emulated processor.
const CRYPTOGRAPHY: &str = ",+aes,+pclmulqdq";

const PRIVATE_MIB: u64 = 40;
const HOSTS: &[&str] = &["src", "dst", "peer"];
const LIMIT: Duration = Duration::from_secs(60);

/// A lab, and what is done in it.
type Story = fn(&TestLab) -> anyhow::Result<()>;

const STORIES: &[(&str, Story)] = &[
    ("it_goes_ahead", it_goes_ahead),
    (
        "what_fails_on_the_way_is_no_harm",
        what_fails_on_the_way_is_no_harm,
    ),
    (
        "memory_that_moves_goes_another_way",
        memory_that_moves_goes_another_way,
    ),
];

/// Their tests, each of which boots a machine.
pub const ALL: &[crate::tool::Test] = &[
    ("private::it_goes_ahead", |_| boot("it_goes_ahead")),
    ("private::what_fails_on_the_way_is_no_harm", |_| {
        boot("what_fails_on_the_way_is_no_harm")
    }),
    ("private::memory_that_moves_goes_another_way", |_| {
        boot("memory_that_moves_goes_another_way")
    }),
];

/// Boots a machine in which a story is told.
fn boot(story: &str) -> anyhow::Result<()> {
    let config = VmConfig {
        memory_mib: MEMORY_MIB,
        features: CRYPTOGRAPHY.to_owned(),
        ..VmConfig::new(format!("private-{}", std::process::id()))
    };
    let vm = Vm::boot(&config, &Network::new()?)?;
    let program = std::env::current_exe()?.display().to_string();
    let command =
        Command::new([program.as_str(), INSIDE, story]).env("VERBATIM_TEST_PATIENCE", PATIENCE.to_string());
    let ended = vm.run(&command, STORY_LIMIT)?;
    let words = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    println!("{}", words(&ended.stdout));
    ensure!(
        ended.code == 0,
        "status {}\n{}{}",
        ended.code,
        words(&ended.stdout),
        words(&ended.stderr)
    );
    Ok(())
}

/// The part within the machine.
pub fn inside(story: &str) -> ExitCode {
    match tell(story) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn tell(name: &str) -> anyhow::Result<()> {
    let (_, story) = STORIES
        .iter()
        .find(|(known, _)| *known == name)
        .context("no such story")?;
    let lo = std::process::Command::new("ip")
        .args(["link", "set", "lo", "up"])
        .status()?;
    ensure!(lo.success(), "the loopback device is not up");
    let lab = TestLab::up(&Tools::find()?.that_fail_on_order(), HOSTS)?;
    for host in HOSTS {
        lab.order_faults(host, NOT_TRACKED)?;
    }
    story(&lab).with_context(|| lab.logs())?;
    lab.down()
}

/// The kernel could track memory from outside as well, which would be taken.
const NOT_TRACKED: &str = "source-track damage\n";

/// A client with private memory on `src`, and a server on `peer`.
struct Pair<'a> {
    lab: &'a TestLab,
    client: Instance<'a>,
    server: Instance<'a>,
}

impl<'a> Pair<'a> {
    fn start(lab: &'a TestLab) -> anyhow::Result<Self> {
        let program = lab.tools().vcheck.display().to_string();
        // The RNICs take turns on two emulated processors: who gets none for some seconds is not gone.
        let patient = ["--stall-timeout", "600", "--ack-timeout", "21"];
        let server = lab.instance("peer", "server", &[&[program.as_str()], &patient[..]].concat())?;
        server.listens(VCHECK_PORT)?;
        let (address, private) = (server.address()?, PRIVATE_MIB.to_string());
        let options = [
            "--private",
            &private,
            "--op",
            "mix",
            "-q",
            "2",
            "-D",
            "100000",
            "--depth",
            "8",
        ];
        let argv = [&[program.as_str()], &patient[..], &options, &[&address]].concat();
        let client = lab.instance("src", "client", &argv)?;
        let pair = Self { lab, client, server };
        pair.flows("src")?;
        Ok(pair)
    }

    fn flows(&self, host: &str) -> anyhow::Result<()> {
        let traffic = Traffic::of(self.lab, host)?;
        traffic
            .flows(1 << 16, patience(LIMIT))
            .with_context(|| self.words())
    }

    fn words(&self) -> String {
        let words = |instance: &Instance| instance.output().unwrap_or_else(|error| format!("{error:#}"));
        format!(
            "the client wrote {:?}, the server {:?}",
            words(&self.client),
            words(&self.server)
        )
    }

    fn moves(&self, to: &str) -> anyhow::Result<Migration> {
        let migration = self.client.moves(to).with_context(|| self.words())?;
        println!("{}", serde_json::to_string(&migration)?);
        self.flows(to)?;
        Ok(migration)
    }

    /// Both sides have found nothing wrong, neither with messages nor with the private memory.
    fn end(self) -> anyhow::Result<()> {
        self.client.interrupt()?;
        let client = self
            .client
            .succeed(patience(LIMIT))
            .with_context(|| self.words())?;
        let server = self
            .server
            .succeed(patience(LIMIT))
            .with_context(|| self.words())?;
        CheckReport::both_clean(&client, &server).map(drop)
    }
}

/// What lies in the folder of an instance's images.
fn images(lab: &TestLab, host: &str) -> anyhow::Result<Vec<String>> {
    let folder = lab.path(host, "/run/verbatim/images/client")?;
    let Ok(entries) = std::fs::read_dir(&folder) else {
        return Ok(Vec::new());
    };
    Ok(entries
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect())
}

/// Most of it goes while the program runs, and the program finds all of it as it was, again and again.
fn it_goes_ahead(lab: &TestLab) -> anyhow::Result<()> {
    let pair = Pair::start(lab)?;
    for to in ["dst", "src"] {
        let ahead = pair.moves(to)?;
        let pre_copy = &ahead.pre_copy;
        ensure!(pre_copy.private_in_one_piece.is_none(), "{pre_copy:?}");
        let [first, .., last] = &pre_copy.pre_dumps[..] else {
            anyhow::bail!("a round is missing: {pre_copy:?}");
        };
        ensure!(first.bytes >= PRIVATE_MIB << 20, "{pre_copy:?}");
        ensure!(last.bytes < first.bytes / 4, "{pre_copy:?}");
        ensure!(
            pre_copy.pre_dumps.iter().all(|one| one.frozen_ms > Some(0.0)),
            "{pre_copy:?}"
        );
        ensure!(ahead.bytes.pre_copy >= PRIVATE_MIB << 20, "{ahead:?}");
        // 1 MiB of it changes all the time, and the rest of the process's own memory is small.
        ensure!(ahead.bytes.stop_and_copy < PRIVATE_MIB << 20 >> 2, "{ahead:?}");
    }
    // The same without: a pre-dump that fails is told, and memory is compared with what was sent.
    lab.order_faults("src", &format!("{NOT_TRACKED}source-pre-copy damage\n"))?;
    let compared = pair.moves("dst")?;
    let why = compared
        .pre_copy
        .private_not_tracked
        .as_deref()
        .unwrap_or_default();
    ensure!(why.contains("pre-dump"), "{why}");
    ensure!(compared.pre_copy.pre_dumps.is_empty(), "{compared:?}");
    let beside = compared.pre_copy.private_tracked.as_ref();
    let beside = beside.context("it went with the images")?;
    ensure!(beside.compared && !beside.rounds.is_empty(), "{compared:?}");
    ensure!(
        compared.bytes.stop_and_copy < PRIVATE_MIB << 20 >> 2,
        "{compared:?}"
    );
    pair.end()
}

/// After a rollback the program goes on with its memory, nothing lies about, and a next attempt sends the right pages.
fn what_fails_on_the_way_is_no_harm(lab: &TestLab) -> anyhow::Result<()> {
    let pair = Pair::start(lab)?;
    lab.order_faults("src", &format!("{NOT_TRACKED}source-restore fail\n"))?;
    let refused = pair.client.migrate("dst")?;
    refused.must_be_rolled_back(&["source-restore"])?;
    ensure!(!refused.pre_copy.pre_dumps.is_empty(), "{refused:?}");
    for host in ["src", "dst"] {
        let left = images(lab, host)?;
        ensure!(left.is_empty(), "{host} has {left:?}");
    }
    pair.flows("src")?;
    lab.order_faults("src", NOT_TRACKED)?;
    let moved = pair.moves("dst")?;
    ensure!(moved.pre_copy.private_in_one_piece.is_none(), "{moved:?}");
    ensure!(moved.bytes.stop_and_copy < PRIVATE_MIB << 20 >> 2, "{moved:?}");
    pair.end()
}

/// A program that puts pages in the place of others by mremap, which the kernel takes for unchanged.
const MOVER: &str = r"
import ctypes, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
PART = 2 << 20
# A reservation, and in it two parts as aligned as page tables are; MAP_PRIVATE | MAP_ANONYMOUS, PROT_READ | PROT_WRITE.
room = libc.mmap(None, 64 << 20, 3, 0x22, -1, 0)
libc.madvise(ctypes.c_void_p(room), ctypes.c_size_t(64 << 20), 15)  # MADV_NOHUGEPAGE
ctypes.memset(room, 9, 64 << 20)
base = (room + PART - 1) // PART * PART
spare, place = base, base + 2 * PART
turn = 0
while True:
    turn = turn % 250 + 1
    libc.mmap(spare, PART, 3, 0x32, -1, 0)  # MAP_FIXED
    libc.madvise(ctypes.c_void_p(spare), ctypes.c_size_t(PART), 15)
    ctypes.memset(spare, turn, PART)
    # MREMAP_MAYMOVE | MREMAP_FIXED
    assert libc.mremap(spare, PART, PART, 3, place) == place, ctypes.get_errno()
    for offset in range(0, PART, 4096):
        found = ctypes.c_ubyte.from_address(place + offset).value
        if found != turn:
            print('page', offset // 4096, 'has', found, 'not', turn)
            sys.exit(1)
    print('fine', turn, flush=True)
    time.sleep(0.05)
";

/// Pre-dumps are not relied on, the report says why, and the program finds its memory as it was.
fn memory_that_moves_goes_another_way(lab: &TestLab) -> anyhow::Result<()> {
    let program = lab.instance("src", "client", &["/usr/bin/python3", "-c", MOVER])?;
    let says = |least: usize| {
        verbatim_e2e::eventually("turns of the program", patience(LIMIT), || {
            program.row()?;
            let fine = program
                .output()?
                .lines()
                .filter(|line| line.starts_with("fine"))
                .count();
            Ok((fine >= least).then_some(fine))
        })
    };
    let before = says(3)?;
    let moved = program.moves("dst")?;
    println!("{}", serde_json::to_string(&moved)?);
    let pre_copy = &moved.pre_copy;
    let why = pre_copy
        .private_in_one_piece
        .as_deref()
        .or(pre_copy.private_not_tracked.as_deref());
    ensure!(why.is_some_and(|why| why.contains("mremap")), "{moved:?}");
    ensure!(
        pre_copy.private_tracked.is_some() || moved.bytes.stop_and_copy >= 60 << 20,
        "{moved:?}"
    );
    says(before + 10).with_context(|| program.output().unwrap_or_default())?;
    program.kill()
}
