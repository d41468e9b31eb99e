//! Virtual machines of the installed QEMU, moved between two processes on this machine.
//!
//! Their guest (`guest/check.c`) knows the right content of its memory, and counts on its serial line: its
//! output at all its places together must be 1, 2, 3, ... So the tests find a second running copy, a guest
//! that went back in time, and a missing page. While the guest stands still, the tests also compare both
//! copies of its RAM.

mod end;
mod filler;
mod now;
mod post_copy;
mod settings;
mod silence;

use std::io::Read;
use std::path::Path;
use std::process::{ExitCode, Stdio};

use anyhow::{Context, ensure};
use libtest_mimic::{Arguments, Failed, Trial};
use rustix::process::Signal;
use serde_json::json;
use verbatim_vm::{Error, Incoming, Machine, Outgoing, Qmp, Rounds};

use end::{Disk, End, consecutive, copy, qemu, same_ram};

/// Rounds before the guest stops.
const ROUNDS: u32 = 12;

/// Environment variable with the number of moves in a row; the default is [`MOVES`].
const MOVES_VARIABLE: &str = "VERBATIM_VM_MOVES";

/// Environment variable with the program of a newer QEMU.
const NEWER_VARIABLE: &str = "VERBATIM_NEWER_QEMU";

/// Number of moves in a row.
const MOVES: usize = 8;

/// Environment variable with a file that this program maps, and nothing else, until its input ends.
const MAPPER: &str = "MAPPED_RAM";

fn main() -> ExitCode {
    if let Some(path) = std::env::var_os(MAPPER) {
        return map(path.as_ref()).map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS);
    }
    if let Ok(what) = std::env::var(filler::FILLER) {
        let ended = tokio::runtime::Runtime::new()
            .map_err(anyhow::Error::new)
            .and_then(|runtime| runtime.block_on(filler::run(&what)));
        eprintln!("{ended:?}");
        return ExitCode::FAILURE;
    }
    let arguments = Arguments::from_args();
    let trials = vec![
        case("a_guest_moves_again_and_again", again_and_again),
        case("what_a_disk_writes_is_not_lost", with_a_disk),
        case("a_guest_with_a_display_and_disks_moves", with_devices),
        case("what_is_left_out_is_found", what_is_left_out_is_found),
        case("between_releases_of_qemu", between_releases),
        case("it_goes_on_at_its_source", it_goes_on),
        case("a_paused_guest_stays_paused", paused),
        case("a_destination_that_dies", destination_dies),
        case("a_source_that_is_silent", silent_source),
        case("what_stands_in_the_way_is_said", obstacles),
        case("one_that_runs_is_attached", attached),
        case("settings_are_put_back_at_every_end", settings::put_back),
        case("a_snapshot_has_the_ram_at_each_end", settings::snapshots),
        case("a_lock_on_an_image_keeps_it_here", settings::locked),
        case("a_quorum_is_said_to_keep_its_locks", settings::quorum),
        case("what_a_qemu_offers_is_compared", settings::offered),
        case("now_what_was_not_changed_stays_as_it_is", now::as_started),
        case("now_what_was_changed_goes_along", now::changed),
        case("now_port_forwards_go_along", now::forwarded),
        case("now_what_cannot_be_had_elsewhere_is_named", now::named),
        case("memory_comes_later_again_and_again", post_copy::again_and_again),
        case("memory_comes_later_with_a_disk", post_copy::with_a_disk),
        case("memory_comes_later_whoever_dies", post_copy::taken_over),
        case("memory_comes_later_and_an_end_is_one", post_copy::ends),
        case("memory_comes_later_or_it_goes_on", post_copy::it_goes_on),
        case(
            "memory_comes_later_and_zeros_are_found",
            post_copy::zeros_are_found,
        ),
        case("how_long_a_guest_is_silent", silence::by_pool).with_ignored_flag(true),
    ];
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn case(name: &'static str, body: impl AsyncFnOnce() -> anyhow::Result<()> + Send + 'static) -> Trial {
    Trial::test(name, move || {
        let strict = std::env::var("CI").is_ok_and(|value| value == "true");
        if let Err(missing) = end::installed() {
            return match strict {
                true => Err(Failed::from(missing)),
                false => {
                    println!("skipped: {missing}");
                    Ok(())
                }
            };
        }
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()?;
        runtime
            .block_on(body())
            .map_err(|error| Failed::from(format!("{error:#}")))
    })
}

fn map(path: &Path) -> anyhow::Result<()> {
    let file = std::fs::File::open(path)?;
    let (read, shared) = (rustix::mm::ProtFlags::READ, rustix::mm::MapFlags::SHARED);
    // SAFETY: a fresh mapping, which nobody looks into.
    unsafe { rustix::mm::mmap(std::ptr::null_mut(), 4096, read, shared, &file, 0)? };
    println!("ready");
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// A running guest, and a QEMU that is to take it.
async fn pair(more: &[&str]) -> anyhow::Result<(End, End)> {
    let from = End::run(more).await?;
    let to = End::arriving(&from).await?;
    Ok((from, to))
}

/// A move up to the decision: the guest is at both ends, and runs at neither.
struct Moving {
    outgoing: Outgoing,
    incoming: Incoming,
}

/// Moves a guest up to the decision. `last`: whether the writes since the last round are brought, too.
async fn bring(from: &End, to: &End, last: bool) -> anyhow::Result<Moving> {
    let mut rounds = Rounds::begin(from.machine.ram(), from.machine.pid())?;
    let mut written = 0;
    for number in 0..ROUNDS {
        let copied = copy(&rounds.round()?, &from.machine, &to.machine)?;
        if number % 4 == 0 {
            from.ticks_on()?;
        }
        if number > 0 {
            written += copied;
        }
    }
    ensure!(
        written > 1 << 20,
        "only {written} bytes were written after the first round"
    );
    if !last {
        // The RAM at the destination is a consistent state of one moment then, which is the hardest error to
        // find.
        from.machine.qmp().run("stop", json!({})).await?;
        copy(&rounds.round()?, &from.machine, &to.machine)?;
        from.machine.go_on().await?;
        from.ticks_on()?;
    }
    let (mut outgoing, mut state) = from.machine.leave().await?;
    let (mut incoming, mut sink) = to.machine.arrive().await?;
    let pump = tokio::spawn(async move { tokio::io::copy(&mut state, &mut sink).await });
    outgoing.stopped().await?;
    let runs = rounds.last()?;
    if last {
        copy(&runs, &from.machine, &to.machine)?;
    }
    outgoing.hand_over().await?;
    incoming.loaded().await.with_context(|| to.log())?;
    pump.await??;
    Ok(Moving { outgoing, incoming })
}

async fn move_it(from: &End, to: &End) -> anyhow::Result<()> {
    let moving = bring(from, to, true).await?;
    same_ram(&from.machine, &to.machine)?;
    from.is_silent()?;
    from.machine.quit().await?;
    moving.incoming.run().await?;
    to.ticks_on()
}

async fn again_and_again() -> anyhow::Result<()> {
    move_on(&[]).await
}

/// A disk's direct writes to the RAM are in no page table when they land.
async fn with_a_disk() -> anyhow::Result<()> {
    let disk = Disk::new()?;
    let drive = disk.drive("threads");
    move_on(&[
        "-drive",
        &drive,
        "-device",
        "virtio-blk-pci,drive=disk,disable-modern=on",
    ])
    .await
}

async fn move_on(more: &[&str]) -> anyhow::Result<()> {
    let moves = std::env::var(MOVES_VARIABLE)
        .ok()
        .and_then(|text| text.parse().ok());
    let moves = moves.unwrap_or(MOVES);
    let mut places = vec![End::run(more).await?];
    for number in 1..=moves {
        let last = places.last().context("one at least")?;
        let next = End::arriving(last).await?;
        move_it(last, &next)
            .await
            .with_context(|| format!("move {number} of {moves}"))?;
        places.push(next);
    }
    let ticks = consecutive(&places.iter().collect::<Vec<_>>())?;
    println!("{moves} moves, {ticks} ticks");
    Ok(())
}

/// Memory outside of the RAM file goes with QEMU's stream: that of a display.
async fn with_devices() -> anyhow::Result<()> {
    let disk = Disk::new()?;
    let drive = disk.drive("threads");
    let more = [
        "-vga",
        "std",
        "-drive",
        &drive,
        "-device",
        "virtio-blk-pci,drive=disk",
        "-device",
        "qemu-xhci",
    ];
    let (from, to) = pair(&more).await?;
    move_it(&from, &to).await?;
    consecutive(&[&from, &to])?;
    Ok(())
}

/// To a newer QEMU, and back.
async fn between_releases() -> anyhow::Result<()> {
    let Ok(newer) = std::env::var(NEWER_VARIABLE) else {
        println!("skipped: {NEWER_VARIABLE} names no newer QEMU");
        return Ok(());
    };
    let disk = Disk::new()?;
    let drive = disk.drive("threads");
    let more = [
        "-vga",
        "std",
        "-drive",
        &drive,
        "-device",
        "virtio-blk-pci,drive=disk,disable-modern=on",
    ];
    let first = End::run(&more).await?;
    let second = End::arriving_at(&newer, &first).await?;
    move_it(&first, &second).await.context("to the newer one")?;
    let third = End::arriving_at(&qemu(), &second).await?;
    move_it(&second, &third).await.context("back to the older one")?;
    consecutive(&[&first, &second, &third])?;
    Ok(())
}

/// The checks of these tests find a missing page.
async fn what_is_left_out_is_found() -> anyhow::Result<()> {
    let (from, to) = pair(&[]).await?;
    let moving = bring(&from, &to, false).await?;
    ensure!(
        same_ram(&from.machine, &to.machine).is_err(),
        "nothing was written since the last round"
    );
    moving.incoming.run().await?;
    let found = to.ticks_on().is_err() || consecutive(&[&from, &to]).is_err();
    ensure!(found, "the guest misses no page: {}", to.said()?);
    Ok(())
}

/// After a cancellation at each step before the decision the guest goes on, and can be moved afterwards.
async fn it_goes_on() -> anyhow::Result<()> {
    let from = End::run(&[]).await?;
    // While the guest runs.
    let (outgoing, state) = from.machine.leave().await?;
    drop(state);
    outgoing.take_back().await?;
    from.ticks_on()?;
    // When it stands still.
    let (mut outgoing, _state) = from.machine.leave().await?;
    outgoing.stopped().await?;
    from.is_silent()?;
    outgoing.take_back().await?;
    from.ticks_on()?;
    // When it is loaded at the destination.
    let to = End::arriving(&from).await?;
    let moving = bring(&from, &to, true).await?;
    to.machine.quit().await?;
    moving.outgoing.take_back().await?;
    from.ticks_on()?;
    let third = End::arriving(&from).await?;
    move_it(&from, &third).await?;
    consecutive(&[&from, &third])?;
    ensure!(to.said()?.is_empty(), "the copy that was given up ran");
    Ok(())
}

async fn paused() -> anyhow::Result<()> {
    let (from, to) = pair(&[]).await?;
    from.machine.qmp().run("stop", json!({})).await?;
    let (mut outgoing, mut state) = from.machine.leave().await?;
    ensure!(!outgoing.ran());
    let (mut incoming, mut sink) = to.machine.arrive().await?;
    let pump = tokio::spawn(async move { tokio::io::copy(&mut state, &mut sink).await });
    outgoing.stopped().await?;
    let mut rounds = Rounds::begin(from.machine.ram(), from.machine.pid())?;
    copy(&rounds.round()?, &from.machine, &to.machine)?;
    ensure!(rounds.last()?.is_empty(), "a guest that is paused writes");
    outgoing.hand_over().await?;
    incoming.loaded().await?;
    pump.await??;
    same_ram(&from.machine, &to.machine)?;
    // After the cancellation the guest is paused as before.
    outgoing.take_back().await?;
    from.is_silent()?;
    ensure!(!from.machine.status().await?.running, "it was paused, and runs");
    Ok(())
}

async fn destination_dies() -> anyhow::Result<()> {
    let (from, to) = pair(&[]).await?;
    let (mut outgoing, mut state) = from.machine.leave().await?;
    let (mut incoming, mut sink) = to.machine.arrive().await?;
    let pump = tokio::spawn(async move { tokio::io::copy(&mut state, &mut sink).await });
    outgoing.stopped().await?;
    to.signal(Signal::KILL)?;
    let lost = incoming.loaded().await;
    ensure!(matches!(lost, Err(Error::Gone)), "{lost:?}");
    let (Ok(_) | Err(_)) = outgoing.hand_over().await;
    outgoing.take_back().await?;
    drop(pump.await?);
    from.ticks_on()?;
    consecutive(&[&from])?;
    Ok(())
}

/// Requests to a stopped QEMU end in time, and QEMU is unchanged when it goes on.
async fn silent_source() -> anyhow::Result<()> {
    let from = End::run(&[]).await?;
    from.signal(Signal::STOP)?;
    let asked = from.machine.may_move().await;
    ensure!(matches!(asked, Err(Error::Silent { .. })), "{asked:?}");
    from.signal(Signal::CONT)?;
    from.ticks_on()?;
    from.machine.may_move().await?;
    consecutive(&[&from])?;
    Ok(())
}

/// An error unless the result is an error with these words.
fn says<T: std::fmt::Debug>(result: Result<T, Error>, words: &str) -> anyhow::Result<()> {
    let error = result
        .map(drop)
        .err()
        .with_context(|| format!("nothing is said of {words}"))?;
    ensure!(error.to_string().contains(words), "`{words}` is not in `{error}`");
    Ok(())
}

async fn obstacles() -> anyhow::Result<()> {
    let disk = Disk::new()?;
    let drive = |aio: &str| disk.drive(aio);
    let from = End::run(&[
        "-drive",
        &drive("threads"),
        "-device",
        "virtio-blk-pci,drive=disk",
    ])
    .await?;
    from.machine.may_move().await?;

    let mut mapper = std::process::Command::new(std::env::current_exe()?)
        .env(MAPPER, from.machine.ram().path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut said = [0];
    let ready = mapper.stdout.as_mut().context("a pipe")?.read_exact(&mut said);
    let asked = from.machine.may_move().await;
    // Closes its input, which ends it.
    drop(mapper.stdin.take());
    mapper.wait()?;
    ready?;
    says(asked, "maps the RAM, too")?;
    from.machine.may_move().await?;

    let target = disk.beside("copy");
    let backup = json!({"device": "disk", "target": target, "sync": "full", "job-id": "copy", "speed": 1, "format": "raw"});
    from.machine.qmp().run("drive-mirror", backup).await?;
    says(
        from.machine.may_move().await,
        "a job is under way: \"mirror\" \"copy\"",
    )?;
    from.machine
        .qmp()
        .run("block-job-cancel", json!({"device": "copy", "force": true}))
        .await?;
    while from.machine.may_move().await.is_err() {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }

    let (outgoing, _state) = from.machine.leave().await?;
    says(
        from.machine.may_move().await,
        "a migration of its own is under way",
    )?;
    outgoing.take_back().await?;
    from.ticks_on()?;
    drop(from);

    for aio in ["native", "io_uring"] {
        let direct = End::run(&["-drive", &drive(aio), "-device", "virtio-blk-pci,drive=disk"]).await?;
        says(direct.machine.may_move().await, "aio=threads")?;
    }
    let share = format!(
        "local,id=share,path={},security_model=none",
        disk.beside("").display()
    );
    let blocked = End::run(&[
        "-fsdev",
        &share,
        "-device",
        "virtio-9p-pci,fsdev=share,mount_tag=share",
    ])
    .await?;
    // It blocks a move only while it is mounted.
    blocked.machine.may_move().await?;
    Ok(())
}

async fn attached() -> anyhow::Result<()> {
    let folder = tempfile::tempdir_in("/dev/shm")?;
    let path = |name: &str| folder.path().join(name).display().to_string();
    let backend = format!(
        "memory-backend-file,id=mem,size=16M,mem-path={},share=on",
        path("theirs")
    );
    for (memory, refused) in [
        (
            vec!["-object", &backend, "-machine", "pc,memory-backend=mem"],
            None,
        ),
        (vec!["-machine", "pc"], Some("its RAM is not shared")),
    ] {
        let socket = path("qmp");
        let mut command = std::process::Command::new(qemu());
        command
            .args([
                "-m",
                "16M",
                "-nodefaults",
                "-display",
                "none",
                "-accel",
                "tcg",
                "-S",
            ])
            .args(memory);
        command.args(["-qmp", &format!("unix:{socket},server=on,wait=off")]);
        let mut child = End::spawn(command, folder.path())?;
        let listens = std::time::Instant::now();
        let result = loop {
            let result = match Qmp::connect(socket.as_ref()).await {
                Ok(qmp) => Machine::attached(child.id(), qmp).await,
                Err(error) => Err(error),
            };
            if !matches!(result, Err(Error::Io { .. })) || listens.elapsed().as_secs() > 20 {
                break result;
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        };
        let checked = match (result, refused) {
            (Ok(machine), None) => {
                ensure!(machine.ram().bytes() == 16 << 20, "another size");
                ensure!(machine.memory().await? == "mem", "another name");
                let kind = machine.machine_type().await?;
                ensure!(
                    kind.starts_with("pc-i440fx-"),
                    "the type of the machine is {kind}"
                );
                Ok(())
            }
            (result, Some(words)) => says(result, words),
            (Err(error), None) => Err(error.into()),
        };
        child.kill()?;
        child.wait()?;
        checked?;
    }
    Ok(())
}
