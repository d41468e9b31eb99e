//! Guests that run before all of their memory has arrived.

use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;

use anyhow::{Context, ensure};
use tokio::task::JoinHandle;
use verbatim_tracking::{FileFaults, PAGE, Ranges};
use verbatim_vm::{Behind, Error, Incoming, Outgoing, PostCopy, Rounds};

use crate::end::{Disk, End, consecutive, copy, same_ram};
use crate::filler::{Faults, Server, Wanted, dies_at, fill};
use crate::{move_it, says};

/// Number of moves of a guest in a row.
const MOVES: usize = 4;

/// Number of faults after which a filler process dies.
const FAULTS: u64 = 20;

/// A move up to the decision. Only missing pages that the load needed have been brought.
struct Arriving {
    outgoing: Outgoing,
    incoming: Incoming,
    post_copy: PostCopy,
    server: Server,
    /// Faults so far.
    faults: Faults,
}

/// Path of the record of missing pages.
pub fn record(end: &End) -> PathBuf {
    end.path("ram.missing")
}

/// The same before the devices' state is handed over.
struct Stopped {
    outgoing: Outgoing,
    incoming: Incoming,
    post_copy: PostCopy,
    behind: Behind,
    pump: JoinHandle<std::io::Result<u64>>,
}

/// Stops a guest. `rounds`: number of pre-copy rounds before.
async fn stop(from: &End, to: &End, rounds: u32) -> anyhow::Result<Stopped> {
    let mut pages = Rounds::begin(from.machine.ram(), from.machine.pid())?;
    for _ in 0..rounds {
        copy(&pages.round()?, &from.machine, &to.machine)?;
        from.ticks_on()?;
    }
    let post_copy = to.machine.post_copy(&record(to)).await?;
    post_copy.lack(&pages.leave_behind()?)?;
    from.ticks_on()?;
    let (mut outgoing, mut state) = from.machine.leave().await?;
    let (incoming, mut sink) = to.machine.arrive().await?;
    let pump = tokio::spawn(async move { tokio::io::copy(&mut state, &mut sink).await });
    outgoing.stopped().await?;
    let (last, behind) = pages.leave_last_behind()?;
    post_copy.lack(&last)?;
    post_copy.complete()?;
    Ok(Stopped {
        outgoing,
        incoming,
        post_copy,
        behind,
        pump,
    })
}

async fn bring(from: &End, to: &End, rounds: u32) -> anyhow::Result<Arriving> {
    let Stopped {
        mut outgoing,
        mut incoming,
        post_copy,
        behind,
        pump,
    } = stop(from, to, rounds).await?;
    let server = Server::of(behind).await?;
    let faults = Faults::default();
    let loading = fill(&post_copy, server.port, Wanted::Faults, &faults);
    let loaded = async {
        outgoing.hand_over().await?;
        incoming.loaded().await.with_context(|| to.log())
    };
    tokio::select! {
        filled = loading => anyhow::bail!("nothing is missing: {filled:?}"),
        loaded = loaded => loaded?,
    }
    pump.await??;
    ensure!(post_copy.left() > 0, "nothing is missing");
    Ok(Arriving {
        outgoing,
        incoming,
        post_copy,
        server,
        faults,
    })
}

/// Lets the guest run at its destination, at first with faults alone, then with all missing pages.
async fn finish(from: &End, to: &End, arriving: Arriving) -> anyhow::Result<u64> {
    let Arriving {
        post_copy,
        server,
        faults,
        ..
    } = arriving;
    from.is_silent()?;
    from.machine.quit().await?;
    let goes_on = async {
        arriving.incoming.run().await?;
        to.ticks_on_beside().await
    };
    tokio::select! {
        filled = fill(&post_copy, server.port, Wanted::Faults, &faults) => filled?,
        went_on = goes_on => went_on?,
    }
    ensure!(faults.count() > 0, "nobody has waited for a page");
    whole(to, post_copy, server.port).await?;
    Ok(faults.count())
}

/// Brings all missing pages, and ends the post-copy.
async fn whole(to: &End, post_copy: PostCopy, port: u16) -> anyhow::Result<()> {
    if post_copy.left() > 0 {
        says(to.machine.may_move().await, "not all of its memory has come")?;
    }
    fill(&post_copy, port, Wanted::All, &Faults::default()).await?;
    post_copy.end()?;
    ensure!(!record(to).exists(), "what was missing is still written down");
    to.machine.may_move().await?;
    to.ticks_on()
}

/// By turns the whole memory or only the last writes are missing at the decision; every third move is without
/// post-copy.
async fn in_a_row(more: &[&str]) -> anyhow::Result<()> {
    let mut places = vec![End::run(more).await?];
    for number in 1..=MOVES {
        let from = places.last().context("one at least")?;
        let to = End::arriving(from).await?;
        let moved = async {
            match number % 3 {
                0 => move_it(from, &to).await.map(|()| None),
                rounds => {
                    let arriving = bring(from, &to, rounds as u32 - 1).await?;
                    let loading = arriving.faults.count();
                    let left = arriving.post_copy.left();
                    let waited = finish(from, &to, arriving).await?;
                    Ok(Some((loading, left, waited)))
                }
            }
        };
        let moved = moved.await.with_context(|| format!("move {number} of {MOVES}"))?;
        if let Some((loading, left, waited)) = moved {
            println!(
                "move {number}: {} KiB missing when loaded, {loading} faults until then, {} after",
                left >> 10,
                waited - loading
            );
        }
        places.push(to);
    }
    let ticks = consecutive(&places.iter().collect::<Vec<_>>())?;
    println!("{MOVES} moves, {ticks} ticks");
    Ok(())
}

pub async fn again_and_again() -> anyhow::Result<()> {
    in_a_row(&[]).await
}

/// The kernel touches missing pages: for the disk, and when its queue is read before the guest runs.
pub async fn with_a_disk() -> anyhow::Result<()> {
    let disk = Disk::new()?;
    let drive = disk.drive("threads");
    in_a_row(&[
        "-drive",
        &drive,
        "-device",
        "virtio-blk-pci,drive=disk,disable-modern=on",
    ])
    .await
}

/// The filler dies with a fault that was reported to it alone.
pub async fn taken_over() -> anyhow::Result<()> {
    let from = End::run(&[]).await?;
    let to = End::arriving(&from).await?;
    let arriving = bring(&from, &to, 0).await?;
    let (pid, ram, port) = (to.machine.pid(), to.machine.ram(), arriving.server.port);
    drop(arriving.post_copy);
    from.machine.quit().await?;
    let filler = dies_at(pid, ram, record(&to), port, FAULTS);
    let (died, ()) = tokio::try_join!(filler, async { Ok(arriving.incoming.run().await?) })?;
    ensure!(
        died.signal() == Some(9),
        "the process that fills has ended with {died}"
    );
    to.is_silent()?;
    let post_copy = PostCopy::take_over(pid, ram, &record(&to))?.context("something is missing")?;
    let left = post_copy.left();
    ensure!(left > 0 && left < ram.bytes(), "{left} bytes are missing");
    whole(&to, post_copy, port).await?;
    ensure!(
        PostCopy::take_over(pid, ram, &record(&to))?.is_none(),
        "nothing is missing"
    );
    let third = End::arriving(&to).await?;
    move_it(&to, &third).await?;
    consecutive(&[&from, &to, &third])?;
    Ok(())
}

/// The filler's death in the middle of the end, and the loss of data that must not be lost.
pub async fn ends() -> anyhow::Result<()> {
    let from = End::run(&[]).await?;
    let to = End::arriving(&from).await?;
    let (pid, ram, path) = (to.machine.pid(), to.machine.ram(), record(&to));
    // Prepared, and not needed.
    to.machine.post_copy(&path).await?.end()?;
    ensure!(!path.exists(), "it is over");
    // QEMU has closed the userfaultfd, and the record is still there.
    let post_copy = to.machine.post_copy(&path).await?;
    let written = std::fs::read(&path)?;
    post_copy.end()?;
    std::fs::write(&path, &written)?;
    ensure!(
        PostCopy::take_over(pid, ram, &path)?.is_none(),
        "nothing is missing"
    );
    ensure!(!path.exists(), "it is over");
    // A page is missing at the end.
    let post_copy = to.machine.post_copy(&path).await?;
    let number = i32::from_le_bytes(std::fs::read(&path)?[12..16].try_into()?);
    let page = PAGE..2 * PAGE;
    let page = Ranges::from_iter([page]);
    post_copy.lack(&page)?;
    let ended = PostCopy::take_over(pid, ram, &path)?
        .context("something is missing")?
        .end();
    says(ended, "are missing")?;
    // A page that should be missing is there.
    ram.write(PAGE, &[1; PAGE as usize])?;
    says(post_copy.complete(), "and are there")?;
    ram.clear(PAGE..2 * PAGE)?;
    post_copy.complete()?;
    says(post_copy.lack(&page), "becomes more")?;
    says(post_copy.fill(1, &[0; PAGE as usize]), "no whole pages")?;
    drop(post_copy);
    let faults = FileFaults::take(pid, number, ram.file())?.context("it is there")?;
    faults.end()?;
    faults.close()?;
    let lost = PostCopy::take_over(pid, ram, &path);
    ensure!(matches!(lost, Err(Error::Lost { bytes: PAGE })), "{lost:?}");
    // QEMU ends.
    std::fs::remove_file(&path)?;
    let post_copy = to.machine.post_copy(&path).await?;
    let (waited, quit) = tokio::join!(post_copy.fault(), to.machine.quit());
    quit?;
    ensure!(matches!(waited, Err(Error::Gone)), "{waited:?}");
    ensure!(PostCopy::take_over(pid, ram, &path).is_err(), "nobody is there");
    Ok(())
}

/// Cancelled before the decision: while QEMU waits for a page, and when it is loaded, with all of its memory
/// there or not.
pub async fn it_goes_on() -> anyhow::Result<()> {
    let from = End::run(&[]).await?;
    let to = End::arriving(&from).await?;
    let mut stopped = stop(&from, &to, 0).await?;
    tokio::select! {
        // QEMU answers nothing then, and the fault is not served.
        waits = stopped.post_copy.fault() => ensure!(!waits?.is_empty(), "nobody waits"),
        loaded = stopped.incoming.loaded() => anyhow::bail!("it is loaded by what is missing: {loaded:?}"),
        handed_over = async {
            match stopped.outgoing.hand_over().await {
                Ok(()) => std::future::pending().await,
                Err(error) => error,
            }
        } => anyhow::bail!(handed_over),
    }
    drop(to);
    stopped.outgoing.take_back().await?;
    drop(stopped.pump.await?);
    from.ticks_on()?;
    for all in [false, true] {
        let to = End::arriving(&from).await?;
        let arriving = bring(&from, &to, 1).await?;
        if all {
            let port = arriving.server.port;
            fill(&arriving.post_copy, port, Wanted::All, &Faults::default()).await?;
            same_ram(&from.machine, &to.machine)?;
        }
        drop(to);
        arriving.outgoing.take_back().await?;
        from.ticks_on()?;
    }
    let third = End::arriving(&from).await?;
    move_it(&from, &third).await?;
    consecutive(&[&from, &third])?;
    Ok(())
}

/// The guest detects a page that is wrongly filled with zeros.
pub async fn zeros_are_found() -> anyhow::Result<()> {
    let from = End::run(&[]).await?;
    let to = End::arriving(&from).await?;
    let arriving = bring(&from, &to, 0).await?;
    let post_copy = arriving.post_copy;
    // Behind the guest and behind the pages that it writes all the time, which begin at 4 MiB.
    let page = 8 << 20;
    post_copy.fill_zeros(page..page + PAGE)?;
    fill(&post_copy, arriving.server.port, Wanted::All, &Faults::default()).await?;
    post_copy.end()?;
    ensure!(
        same_ram(&from.machine, &to.machine).is_err(),
        "the page is zero at its source, too"
    );
    from.machine.quit().await?;
    arriving.incoming.run().await?;
    let begun = std::time::Instant::now();
    while !to.said()?.contains("BAD page") {
        ensure!(
            begun.elapsed().as_secs() < 30,
            "the guest misses no page: {}",
            to.said()?
        );
        // The growth of a file has no notification.
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    Ok(())
}
