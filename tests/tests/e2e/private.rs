//! Private memory that goes ahead of an instance, and that the instance gets while it runs.
//!
//! `vcheck --private` changes part of its private memory all the time and verifies all of it at its end, as it does with every
//! message: so each of these tests sees one byte that is wrong.

use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use verbatim_e2e::{Instance, Migration, TestLab, eventually};

use crate::Test;
use crate::migration::Check;

const HOSTS: &[&str] = &["src", "dst", "peer"];
const LIMIT: Duration = Duration::from_secs(60);

/// MiB of private memory: filling it takes some time, and sending it not too long.
const PRIVATE_MIB: u64 = 96;

/// All of them.
pub fn tests() -> Vec<Test> {
    let mut tests = vec![
        Test::new("private::to_and_fro", HOSTS, to_and_fro),
        Test::new("private::it_is_told_which_way", HOSTS, it_is_told_which_way),
        Test::new("private::a_small_runtime_folder", HOSTS, a_small_runtime_folder),
        Test::new("private::fork_shares", HOSTS, fork_shares),
        Test::new("private::another_way", HOSTS, another_way),
        Test::new("private::forks_and_maps", HOSTS, forks_and_maps),
        Test::new("private::workers_die", HOSTS, workers_die),
        Test::new("private::both_die", HOSTS, both_die),
        Test::new("private::stopped", HOSTS, stopped),
    ];
    let failing = [
        Test::new("private::rolled_back", HOSTS, rolled_back),
        Test::new("private::compared", HOSTS, compared),
        Test::new("private::agents_die", HOSTS, agents_die),
        Test::new(
            "private::the_journal_says_what_is_missing",
            HOSTS,
            the_journal_says_what_is_missing,
        ),
        Test::new("private::a_page_never_came", HOSTS, a_page_never_came),
    ];
    tests.extend(failing.map(Test::injecting_faults));
    tests
}

fn check(lab: &TestLab) -> anyhow::Result<Check<'_>> {
    let mebibytes = PRIVATE_MIB.to_string();
    let options = ["--op", "mix", "-q", "2", "-s", "16384", "--private", &mebibytes];
    Check::start(lab, &options)
}

/// It went ahead, and little was left for the blackout.
fn must_be_tracked(report: &Migration) -> anyhow::Result<()> {
    report.must_be_committed()?;
    let pre_copy = &report.pre_copy;
    ensure!(
        pre_copy.private_not_tracked.is_none() && pre_copy.private_in_one_piece.is_none(),
        "{report:?}"
    );
    let tracked = pre_copy.private_tracked.as_ref().context("it was not tracked")?;
    let first = tracked.rounds.first().context("it was not sent ahead")?;
    ensure!(first.bytes >= PRIVATE_MIB << 20, "{report:?}");
    ensure!(tracked.last_bytes < PRIVATE_MIB << 20 >> 2, "{report:?}");
    Ok(())
}

/// Nothing of it waits for the instance on that host any more, and nobody is there to give it.
fn must_be_filled(lab: &TestLab, host: &str, name: &str) -> anyhow::Result<()> {
    let folder = lab.path(host, &format!("/run/verbatim/private/{name}"))?;
    eventually("the end of the fill", LIMIT, || {
        Ok((!folder.exists() && fillers(lab, host)?.is_empty()).then_some(()))
    })
}

/// The processes that give tasks of that host their memory.
fn fillers(lab: &TestLab, host: &str) -> anyhow::Result<Vec<i32>> {
    let place = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
    let here = std::fs::read_link(lab.path(host, "/proc/1/ns/pid")?).context("the host is gone")?;
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        let command = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let command = command.split(|byte| *byte == 0).next().unwrap_or_default();
        if command == verbatim_fill::PROGRAM_NAME.as_bytes()
            && place(&pid.to_string()).as_ref() == Some(&here)
        {
            found.push(pid);
        }
    }
    Ok(found)
}

fn kill(pid: i32) {
    if let Some(pid) = Pid::from_raw(pid) {
        // It may have ended.
        let _ = kill_process(pid, Signal::KILL);
    }
}

fn to_and_fro(lab: &TestLab) -> anyhow::Result<()> {
    let check = check(lab)?;
    // The second one begins while the first one's memory may still come.
    for to in ["dst", "src", "dst"] {
        must_be_tracked(&check.client.migrate(to)?)?;
        check.flows(to)?;
    }
    must_be_filled(lab, "dst", "client")?;
    must_be_filled(lab, "src", "client")?;
    check.end()?;
    Ok(())
}

/// Nobody tracks it: all of it is compared with what was sent, and little is left for the blackout.
fn compared(lab: &TestLab) -> anyhow::Result<()> {
    let check = check(lab)?;
    for (from, to) in [("src", "dst"), ("dst", "src"), ("src", "dst")] {
        lab.order_faults(from, "source-track damage\n")?;
        let report = check.client.migrate(to)?;
        lab.order_faults(from, "")?;
        report.must_be_committed()?;
        let why = report.pre_copy.private_not_tracked.as_deref().unwrap_or_default();
        ensure!(why.contains("a test has ordered"), "{report:?}");
        let beside = report.pre_copy.private_tracked.as_ref();
        let beside = beside.context("it went with the images")?;
        let first = beside.rounds.first().context("it was not sent ahead")?;
        ensure!(
            beside.compared && first.bytes >= PRIVATE_MIB << 20 && beside.last_bytes < PRIVATE_MIB << 20 >> 2,
            "{report:?}"
        );
        check.flows(to)?;
    }
    must_be_filled(lab, "dst", "client")?;
    check.end()?;
    Ok(())
}

fn it_is_told_which_way(lab: &TestLab) -> anyhow::Result<()> {
    let check = check(lab)?;
    let said = lab.ask(&["check", "client", "--to", "dst", "--json"])?;
    let said: serde_json::Value = serde_json::from_str(&said.stdout)?;
    let note = said["notes"][0].as_str().context("there is no note")?;
    ensure!(note.contains("tracked from outside"), "{note}");
    let small = lab.instance("src", "small", &["sleep", "1000"])?;
    let said = lab.ask(&["check", "small", "--to", "dst", "--json"])?;
    let said: serde_json::Value = serde_json::from_str(&said.stdout)?;
    let note = said["notes"][0].as_str().context("there is no note")?;
    ensure!(note.contains("not worth it"), "{note}");
    let moved = small.migrate("dst")?;
    moved.must_be_committed()?;
    ensure!(moved.pre_copy.private_tracked.is_none(), "{moved:?}");
    let why = moved.pre_copy.private_in_one_piece.as_deref();
    ensure!(why.is_some_and(|why| why.contains("not worth it")), "{moved:?}");
    check.end()?;
    Ok(())
}

/// Private memory takes no room of the runtime folder's, which is often a tenth of a machine's memory.
fn a_small_runtime_folder(lab: &TestLab) -> anyhow::Result<()> {
    let check = check(lab)?;
    let leave = |mebibytes: u64| -> anyhow::Result<()> {
        let space = rustix::fs::statvfs(lab.path("dst", "/run")?)?;
        let used = (space.f_blocks - space.f_bfree) * space.f_frsize;
        let size = format!("remount,size={}", used + (mebibytes << 20));
        let mounted = lab.start_plain("dst", &["mount", "-o", &size, "/run"])?;
        mounted.succeed(LIMIT)?;
        Ok(())
    };
    // Images and other files need 64 MiB and an eighth of the memory.
    leave(PRIVATE_MIB / 8 + 48)?;
    let refused = lab.verbatim(&["check", "client", "--to", "dst"])?.wait(LIMIT)?;
    ensure!(refused.code == 1, "{}", refused.output());
    ensure!(
        refused.stdout.contains("enlarge that tmpfs"),
        "{}",
        refused.stdout
    );
    leave(PRIVATE_MIB / 8 + 80)?;
    lab.ask(&["check", "client", "--to", "dst"])?;
    must_be_tracked(&check.client.migrate("dst")?)?;
    check.flows("dst")?;
    must_be_filled(lab, "dst", "client")?;
    check.end()?;
    Ok(())
}

/// A program in Python, on `src`, that has said that it is ready.
fn python<'l>(lab: &'l TestLab, name: &str, program: &str) -> anyhow::Result<Instance<'l>> {
    let instance = lab.instance("src", name, &["/usr/bin/python3", "-u", "-c", program])?;
    says(&instance, "ready")?;
    Ok(instance)
}

fn says(instance: &Instance<'_>, word: &str) -> anyhow::Result<()> {
    eventually(&format!("{word:?} of {}", instance.name()), LIMIT, || {
        let output = instance.output()?;
        ensure!(
            !output.contains("Traceback") && !output.contains("wrong"),
            "{output}"
        );
        Ok(output.lines().any(|line| line == word).then_some(()))
    })
}

/// What is said next is of now: the program counts.
fn goes_on(instance: &Instance<'_>) -> anyhow::Result<()> {
    let lines = instance.output()?.lines().count();
    eventually(&format!("more of {}", instance.name()), LIMIT, || {
        let output = instance.output()?;
        ensure!(
            !output.contains("Traceback") && !output.contains("wrong"),
            "{output}"
        );
        Ok((output.lines().count() > lines + 2).then_some(()))
    })
}

/// A parent and its children read the same memory: each getting its own would take it several times.
fn fork_shares(lab: &TestLab) -> anyhow::Result<()> {
    let program = "
import os, time
block = os.urandom(1 << 20) * 48
want = hash(block)
children = [pid for pid in (os.fork(), ) if pid]
print('ready')
while True:
    if hash(bytes(block)) != want: print('wrong')
    print(os.getpid())
    time.sleep(0.05)
";
    let instance = python(lab, "forked", program)?;
    let moved = instance.migrate("dst")?;
    moved.must_be_committed()?;
    let why = moved.pre_copy.private_not_tracked.as_deref().unwrap_or_default();
    ensure!(why.contains("share memory since they were forked"), "{moved:?}");
    ensure!(moved.pre_copy.private_tracked.is_none(), "{moved:?}");
    goes_on(&instance)
}

/// Asynchronous reads write to memory behind the kernel's tracking: what can be left out of the images goes while the program stands
/// still.
fn another_way(lab: &TestLab) -> anyhow::Result<()> {
    let program = "
import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
context = ctypes.c_ulong(0)
if libc.syscall(206, 8, ctypes.byref(context)): raise OSError(ctypes.get_errno())
block = bytearray(os.urandom(1 << 20) * 48)
want = hash(bytes(block))
print('ready')
while True:
    if hash(bytes(block)) != want: print('wrong')
    print(len(block))
    time.sleep(0.02)
";
    let instance = python(lab, "rings", program)?;
    let moved = instance.migrate("dst")?;
    moved.must_be_committed()?;
    let why = moved.pre_copy.private_not_tracked.as_deref().unwrap_or_default();
    ensure!(why.contains("io_setup"), "{moved:?}");
    let beside = moved
        .pre_copy
        .private_tracked
        .as_ref()
        .context("it went with the images")?;
    ensure!(
        beside.rounds.is_empty() && beside.last_bytes >= 48 << 20,
        "{moved:?}"
    );
    goes_on(&instance)?;
    must_be_filled(lab, "dst", "rings")
}

/// What programs do to their memory while it comes, and before.
fn forks_and_maps(lab: &TestLab) -> anyhow::Result<()> {
    let program = "
import mmap, os, random, time
size = 1 << 20
make = lambda seed: random.Random(seed).randbytes(4096) * (size // 4096)
blocks = {}
turn = 0
print('ready')
while True:
    turn += 1
    if len(blocks) < 64:
        block = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block.write(make(turn))
        blocks[turn] = block
    key = random.choice(list(blocks))
    block = blocks[key]
    if block[:] != make(key): print('wrong', key)
    act = random.randrange(4)
    if act == 0 and len(blocks) > 56:
        block.close()
        del blocks[key]
    elif act == 1:
        block.madvise(mmap.MADV_DONTNEED)
        if any(block[:]): print('wrong', 'not zero')
        block.seek(0)
        block.write(make(key))
    elif act == 2 and turn % 16 == 0:
        child = os.fork()
        if not child:
            good = all(blocks[key][:] == make(key) for key in blocks)
            os._exit(0 if good else 1)
        if os.waitpid(child, 0)[1]: print('wrong', 'child')
    elif act == 3:
        block.resize(2 * size)
        if any(block[size:]): print('wrong', 'grown')
        block.resize(size)
    if turn % 20 == 0: print(turn)
";
    let instance = python(lab, "maps", program)?;
    // More than is left alone.
    eventually("enough memory", LIMIT, || {
        let last = instance.output()?.lines().last().map(str::to_owned);
        let turn = last.and_then(|line| line.parse::<u32>().ok()).unwrap_or(0);
        Ok((turn > 100).then_some(()))
    })?;
    let mut tracked = 0;
    for to in ["dst", "src", "dst", "src"] {
        let moved = instance.migrate(to)?;
        moved.must_be_committed()?;
        match moved.pre_copy.private_tracked {
            Some(_) => tracked += 1,
            // A child was there at that moment.
            None => ensure!(
                moved
                    .pre_copy
                    .private_not_tracked
                    .as_deref()
                    .is_some_and(|why| why.contains("share memory")),
                "{moved:?}"
            ),
        }
        goes_on(&instance)?;
    }
    ensure!(tracked > 0, "each time a child shared its memory");
    must_be_filled(lab, "src", "maps")
}

/// Whoever gives the memory is killed again and again while it comes; another one goes on.
fn workers_die(lab: &TestLab) -> anyhow::Result<()> {
    let check = check(lab)?;
    let mut killed = 0;
    for to in ["dst", "src", "dst", "src"] {
        let folder = lab.path(to, "/run/verbatim/private/client")?;
        // From here on tasks are restored.
        let images = lab.path(to, "/run/verbatim/images/client/inventory.img")?;
        let mut migrating = lab.verbatim(&["migrate", "client", "--to", to, "--json"])?;
        let begun = Instant::now();
        let mut before = Vec::new();
        // One of the two at a time, and the other one is given the time to replace it.
        while begun.elapsed() < LIMIT && (folder.exists() || !migrating.has_ended()?) {
            let found = fillers(lab, to)?;
            if let [first, second] = found[..]
                && found != before
                && images.exists()
            {
                kill(if killed % 2 == 0 { first } else { second });
                killed += 1;
                before = found;
            }
        }
        let moved = migrating.wait(LIMIT)?;
        must_be_tracked(&Migration::of(&moved)?)?;
        check.flows(to)?;
        must_be_filled(lab, to, "client")?;
    }
    ensure!(killed >= 4, "only {killed} were killed");
    eprintln!("{killed} killed");
    check.end()?;
    Ok(())
}

/// Whatever loses a page on the way: the tasks are not restored without it, and nobody waits for it.
fn a_page_never_came(lab: &TestLab) -> anyhow::Result<()> {
    let check = check(lab)?;
    lab.order_faults("dst", "destination-prepare-restore damage\n")?;
    let report = check.client.migrate("dst")?;
    lab.order_faults("dst", "")?;
    report.must_be_rolled_back(&["lacks the page"])?;
    check.flows("src")?;
    must_be_tracked(&check.client.migrate("dst")?)?;
    check.flows("dst")?;
    check.end()?;
    Ok(())
}

/// What `verbatim ps` says of an instance; null if it is nowhere.
fn row(lab: &TestLab, name: &str) -> anyhow::Result<serde_json::Value> {
    let rows = lab.ask(&["ps", "--json"])?.stdout;
    let rows: Vec<serde_json::Value> = serde_json::from_str(&rows)?;
    Ok(rows
        .into_iter()
        .find(|row| row["name"] == name)
        .unwrap_or_default())
}

/// A program with much memory that it hardly looks at.
const LARGE: &str = "
import os, time
block = os.urandom(1 << 20) * 400
print('ready')
while True: time.sleep(0.05); print(len(block))
";

/// Kills those who give memory to tasks of that host, all at once.
fn kill_fillers(lab: &TestLab, host: &str) -> anyhow::Result<()> {
    // Neither replaces the other one.
    for signal in [Signal::STOP, Signal::KILL] {
        for pid in fillers(lab, host)? {
            if let Some(pid) = Pid::from_raw(pid) {
                let _ = kill_process(pid, signal);
            }
        }
    }
    Ok(())
}

/// Both are killed at once, and what the instance has not got yet is lost: it is ended rather than let go on with zeros.
fn both_die(lab: &TestLab) -> anyhow::Result<()> {
    for attempt in 0..8 {
        let name = format!("lost{attempt}");
        let instance = python(lab, &name, LARGE)?;
        let migrating = lab.verbatim(&["migrate", &name, "--to", "dst", "--json"])?;
        let folder = lab.path("dst", &format!("/run/verbatim/private/{name}"))?;
        // From this mark on the tasks may run.
        let released = lab.path("dst", &format!("/run/verbatim/criu/{name}/released"))?;
        eventually("the release", LIMIT, || Ok(released.exists().then_some(())))?;
        kill_fillers(lab, "dst")?;
        // The folder outlives the mark of those who have given all.
        let filled = lab.path("dst", &format!("/run/verbatim/criu/{name}/filler.sock.filled"))?;
        let is_missing = folder.exists() && !filled.exists();
        Migration::of(&migrating.wait(LIMIT)?)?.must_be_committed()?;
        if !is_missing {
            // It was too fast.
            instance.kill()?;
            continue;
        }
        return eventually("the end of the instance", LIMIT, || {
            let row = row(lab, &name)?;
            match row["state"].as_str() {
                Some("exited") => {
                    // Or it has met the zeros before it was killed.
                    ensure!(row["exit_status"].as_i64() > Some(128), "{row}");
                    Ok(Some(()))
                }
                Some("running") if folder.exists() => Ok(None),
                // All of it had come just before.
                Some("running") => Ok(Some(())),
                // Neither host has it as its own at this moment, or it is still arriving.
                _ => Ok(None),
            }
        });
    }
    bail!("each time all memory had come before anybody could be killed")
}

/// The agent dies, and with it all that else says that memory is missing: those who give it, and the folder that it comes from. The next agent has it from
/// its journal, and ends the instance rather than let it go on with zeros.
fn the_journal_says_what_is_missing(lab: &TestLab) -> anyhow::Result<()> {
    for attempt in 0..8 {
        let name = format!("lost{attempt}");
        let instance = python(lab, &name, LARGE)?;
        lab.order_faults("dst", "destination-running exit\n")?;
        let migrating = lab.verbatim(&["migrate", &name, "--to", "dst", "--json"])?;
        lab.ended("dst", "agent")?;
        kill_fillers(lab, "dst")?;
        let filled = lab.path("dst", &format!("/run/verbatim/criu/{name}/filler.sock.filled"))?;
        let is_missing = !filled.exists();
        let folder = lab.path("dst", &format!("/run/verbatim/private/{name}"))?;
        std::fs::remove_dir_all(&folder)?;
        lab.order_faults("dst", "")?;
        lab.lab().start("dst", "agent")?;
        Migration::of(&migrating.wait(LIMIT)?)?.must_be_committed()?;
        let was_ended = eventually("the end of the instance", LIMIT, || {
            if lab
                .logs()
                .contains("it is ended, since it would go on with zeros")
            {
                return Ok(Some(true));
            }
            let row = row(lab, &name)?;
            let ended_before = row.is_null() || row["state"] == "exited" || !is_missing;
            Ok(ended_before.then_some(false))
        })?;
        if was_ended {
            return Ok(());
        }
        // It was too fast, or has met the zeros before the next agent came.
        if !row(lab, &name)?.is_null() {
            instance.kill()?;
        }
    }
    bail!("each time all memory had come, or the program had ended, before anybody could be killed")
}

/// Ended while its memory comes: nothing is left.
fn stopped(lab: &TestLab) -> anyhow::Result<()> {
    for _ in 0..2 {
        let check = check(lab)?;
        must_be_tracked(&check.client.migrate("dst")?)?;
        lab.ask(&["stop", "client"])?;
        must_be_filled(lab, "dst", "client")?;
        lab.ask(&["stop", "server"])?;
    }
    Ok(())
}

/// A failure when the tasks are restored, and some of their memory is given to them already: the source's are as they were.
fn rolled_back(lab: &TestLab) -> anyhow::Result<()> {
    let check = check(lab)?;
    for point in [
        "destination-commit",
        "source-commit",
        "destination-restore",
        "source-transfer",
    ] {
        let host = if point.starts_with("source") { "src" } else { "dst" };
        lab.order_faults(host, &format!("{point} fail\n"))?;
        let refused = check.client.migrate("dst")?;
        refused.must_be_rolled_back(&[point])?;
        lab.order_faults(host, "")?;
        check.flows("src")?;
        must_be_filled(lab, "dst", "client")?;
    }
    must_be_tracked(&check.client.migrate("dst")?)?;
    check.flows("dst")?;
    check.end()?;
    Ok(())
}

/// The agents die while memory comes, and those that come after them go on.
fn agents_die(lab: &TestLab) -> anyhow::Result<()> {
    let check = check(lab)?;
    let (mut here, mut there) = ("src", "dst");
    for point in [
        "destination-committed",
        "destination-running",
        "destination-claim",
    ] {
        lab.order_faults(there, &format!("{point} exit\n"))?;
        let migrating = lab.verbatim(&["migrate", "client", "--to", there, "--json"])?;
        lab.ended(there, "agent")?;
        lab.order_faults(there, "")?;
        lab.lab().start(there, "agent")?;
        let moved = Migration::of(&migrating.wait(LIMIT)?)?;
        if point == "destination-committed" {
            // Just before they ran.
            moved.must_be_rolled_back(&[])?;
            check.flows(here)?;
            must_be_filled(lab, there, "client")?;
            continue;
        }
        must_be_tracked(&moved).with_context(|| point)?;
        check.flows(there)?;
        must_be_filled(lab, there, "client")?;
        std::mem::swap(&mut here, &mut there);
    }
    must_be_tracked(&check.client.migrate(there)?)?;
    must_be_filled(lab, there, "client")?;
    check.end()?;
    Ok(())
}
