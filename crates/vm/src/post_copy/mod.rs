//! A guest that runs before all of its memory has come ([`PostCopy`]).

mod bits;
mod order;
mod record;

use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use serde_json::json;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use verbatim_tracking::{DEVICE, FileFaults, PAGE, Ranges, not_missing};

use crate::error::{Error, Result};
use crate::machine::Machine;
use crate::ram::Ram;
use bits::{bytes, pages};
use order::Order;
use record::Record;

pub use order::{AHEAD, URGENT};

/// QEMU's name of the device for a moment.
const DEVICE_NAME: &str = "verbatim-userfaultfd";

/// The memory of a guest here that has not arrived in full. A drop changes nothing: a thread that waits for a
/// page waits on ([`PostCopy::take_over`]).
///
/// ```text
///  source                                             destination
///  Rounds::round … ───── runs of the RAM ───────────► Ram::write, Ram::clear
///                                                     Machine::post_copy   (armed, before `arrive`)
///  Rounds::leave_behind ── ranges left behind ──────► PostCopy::lack
///  leave ────────────┐                   ┌─────────── arrive
///  stopped           │                   │
///  leave_last_behind │── the rest of them ──────────► PostCopy::lack, then PostCopy::complete
///  Behind::runs    ◄─│── wanted ranges ──│─────────── PostCopy::fault, PostCopy::next   (from here on, all the time)
///         └──────────│── pages ──────────│──────────► PostCopy::fill, PostCopy::fill_zeros
///  hand_over         └── device state ──►└─ loaded    (paused)
///                       *decision*
///  quit; the RAM stays                                run
///  …                                                  …
///  the RAM goes ◄─────── RAM complete ─────────────── PostCopy::end, when nothing is PostCopy::left
/// ```
///
/// Missing pages are holes in the file of the RAM. A userfaultfd over QEMU's mapping of the file makes every
/// access to them wait: the guest's, those of QEMU's threads, and those of the kernel on their behalf (reads
/// from a disk; KVM). It is made in QEMU's process, as if by QEMU, and stays open there: it ends with QEMU,
/// and not with the process that answers. Devices' state is loaded by the same means: pages that a device
/// then reads of its rings are asked for like all others, so faults must be answered from `complete` on.
///
/// Pages are put in place by `UFFDIO_COPY` and never by a write to the file: it fills a missing page
/// atomically, and leaves an existing page alone. A page that comes twice therefore undoes no later write of
/// the guest. A page that is no memory at the source, or that the guest has given back since (a balloon), is
/// a hole that is not missing: an access to it gets zeros at once.
///
/// # Durable state
///
/// - At the destination the missing pages, from [`PostCopy::complete`] on, which is before the source hands
///   the devices' state over: a file beside the RAM, which this type keeps. It is right at each moment, since
///   a page's bit is cleared after the page has come.
/// - At the source, from the decision until the destination has reported that all pages have come: the fact
///   that its RAM is kept, and the RAM's place. The source does not know which pages are missing: it answers
///   for any page. QEMU there must not write to the RAM: it is ended first.
///
/// # Failures
///
/// | process or host that fails | when | then |
/// | --- | --- | --- |
/// | any | before the decision | the destination's QEMU is killed (it may wait for a page, and then answers nothing), and the source takes the guest back: its RAM is as it was |
/// | the agent of the destination | after it | accesses to missing pages wait; the next agent goes on by [`PostCopy::take_over`], and nothing is lost |
/// | the agent of the source, or the network | after it | the same; when it is there again, [`PostCopy::ask_again`] |
/// | QEMU at the destination | after it | the guest is lost, as always without its QEMU; [`PostCopy::fault`] reports it |
/// | the host of the source, for good | after it | **the guest is lost**: a part of its memory was only there. Its QEMU is killed |
/// | any | in [`PostCopy::end`] | no page is missing any more; `take_over` finds that, and does the rest |
///
/// While the kernel waits for a page on behalf of a thread (a read from a disk), no signal but SIGKILL
/// reaches that thread, and a cgroup with it does not freeze. QEMU answers nothing while a thread that waits
/// has QEMU's big lock.
#[derive(Debug)]
pub struct PostCopy {
    ram: Arc<Ram>,
    faults: AsyncFd<FileFaults>,
    /// QEMU's process, readable when it has ended.
    process: AsyncFd<OwnedFd>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    record: Record,
    order: Order,
}

impl Machine {
    /// Makes accesses to missing pages of the RAM wait, in a QEMU that was started for a migration, before
    /// [`Machine::arrive`]. The missing pages are written down at `record`, a path beside the RAM. No page is
    /// missing yet.
    pub async fn post_copy(&self, record: &Path) -> Result<PostCopy> {
        let device = File::options().read(true).write(true).open(DEVICE);
        let device = device.map_err(Error::io(format!(
            "open {DEVICE}, which post-copy needs (Linux 6.1 and newer)"
        )))?;
        let copy = device
            .try_clone()
            .map_err(Error::io(format!("copy a descriptor of {DEVICE}")))?;
        self.qmp().give(DEVICE_NAME, copy.into()).await?;
        let put_in = FileFaults::put_in(self.pid(), &device, self.ram().file());
        self.qmp().run("closefd", json!({"fdname": DEVICE_NAME})).await?;
        let faults = put_in?;
        let record = Record::create(record, self.ram().bytes() / PAGE, faults.number())?;
        faults.begin()?;
        PostCopy::of(self.ram(), faults, record)
    }
}

impl PostCopy {
    fn of(ram: &Arc<Ram>, faults: FileFaults, record: Record) -> Result<Self> {
        let failed = || Error::io("wait for a process's faults");
        let process = faults.process().try_clone_to_owned().map_err(failed())?;
        Ok(Self {
            ram: Arc::clone(ram),
            faults: watched(faults).map_err(failed())?,
            process: watched(process).map_err(failed())?,
            state: Mutex::new(State {
                order: Order::new(record.missing().pages()),
                record,
            }),
        })
    }

    /// Takes over from an earlier process, and answers in its place; `None` if no page is missing, and no
    /// answers are needed. QEMU may be waiting, and gets no command. The earlier process must not answer any
    /// more.
    ///
    /// [`Error::Lost`] says that the guest must not go on.
    pub fn take_over(pid: u32, ram: &Arc<Ram>, record: &Path) -> Result<Option<Self>> {
        let Some(record) = Record::open(record)? else {
            return Ok(None);
        };
        if record.missing().pages() != ram.bytes() / PAGE {
            return Err(Error::PostCopy(format!(
                "what is missing was written down of a RAM of {} pages, and this one has {}",
                record.missing().pages(),
                ram.bytes() / PAGE
            )));
        }
        let left = record.missing().count() * PAGE;
        match FileFaults::take(pid, record.descriptor(), ram.file())? {
            Some(faults) => Self::of(ram, faults, record).map(Some),
            None if left == 0 => record.remove().map(|()| None),
            None => Err(Error::Lost { bytes: left }),
        }
    }

    /// Number of missing bytes of a guest by its record at `record`, for information only. 0 without a
    /// record.
    pub fn left_in(record: &Path) -> Result<u64> {
        let left = Record::open(record)?.map_or(0, |record| record.missing().count());
        Ok(left * PAGE)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under this lock")
    }

    /// Declares that these parts of the RAM are missing here, even if they were brought before, and come
    /// later. From now on they must not be brought in another way. Called before [`PostCopy::complete`];
    /// large parts are best declared while the guest still runs at its source.
    pub fn lack(&self, ranges: &Ranges) -> Result<()> {
        let mut state = self.state();
        if state.record.is_complete() {
            return Err(Error::PostCopy(
                "what is missing was complete, and becomes more".to_owned(),
            ));
        }
        for range in ranges.iter() {
            self.check(&range)?;
            // Pages that were missing before are holes already.
            let known = state.record.missing().runs(pages(&range));
            let mut new = Ranges::from_iter([range.clone()]);
            new.subtract(&known.iter().map(bytes).collect());
            state.record.lack(pages(&range))?;
            for hole in new.iter() {
                self.ram.clear(hole)?;
            }
        }
        Ok(())
    }

    /// Declares that all missing pages are known. Called before the state of the devices is loaded.
    pub fn complete(&self) -> Result<()> {
        let mut state = self.state();
        let missing = Ranges::from(state.record.missing());
        let there = not_missing(self.ram.file(), &missing)?;
        if !there.is_empty() {
            return Err(Error::PostCopy(format!(
                "{} KiB of the RAM are to be missing and are there: large pages that cannot be split, or somebody has written to them",
                there.bytes() >> 10
            )));
        }
        state.record.complete()
    }

    /// Whether [`PostCopy::complete`] was called, by this process or the earlier one.
    pub fn is_complete(&self) -> bool {
        self.state().record.is_complete()
    }

    /// Size of the guest's RAM in bytes, missing pages included.
    pub fn bytes(&self) -> u64 {
        self.ram.bytes()
    }

    /// Number of missing bytes.
    pub fn left(&self) -> u64 {
        self.state().record.missing().count() * PAGE
    }

    /// Waits until a thread touches a missing page that was not asked for, and returns the range to ask for
    /// before all others: the page and pages behind it, at most [`URGENT`]. Accesses to zero pages are served
    /// meanwhile.
    ///
    /// This must be polled from [`PostCopy::complete`] to [`PostCopy::end`], also when nothing is
    /// [`PostCopy::left`]: accesses to zero pages wait for it, too. It may be dropped at any time.
    pub async fn fault(&self) -> Result<Range<u64>> {
        loop {
            tokio::select! {
                biased;
                ended = self.process.readable() => {
                    ended.map_err(Error::io("wait for QEMU's end"))?.retain_ready();
                    return Err(Error::Gone);
                }
                ready = self.faults.readable() => {
                    let mut ready = ready.map_err(Error::io("wait for a process's faults"))?;
                    match ready.get_inner().next()? {
                        None => ready.clear_ready(),
                        Some(at) => if let Some(range) = self.touched(at)? {
                            return Ok(range);
                        }
                    }
                }
            }
        }
    }

    /// A thread waits for a page.
    fn touched(&self, at: u64) -> Result<Option<Range<u64>>> {
        let State { record, order } = &mut *self.state();
        let page = at / PAGE;
        if record.missing().contains(page) {
            return Ok(order.urgent(record.missing(), page));
        }
        // The page has come since, or is no memory.
        self.faults.get_ref().zero(at..at + PAGE)?;
        Ok(None)
    }

    /// The next range to ask for, beside those of [`PostCopy::fault`]: at most [`AHEAD`], from the last page
    /// that a thread waited for; `None` if all missing pages were asked for. Few of these requests should be
    /// in flight at once: pages that threads wait for come behind them.
    pub fn next(&self) -> Option<Range<u64>> {
        let State { record, order } = &mut *self.state();
        order.next(record.missing())
    }

    /// Forgets requests that were not answered: a connection was lost.
    pub fn ask_again(&self) -> Result<()> {
        let mut state = self.state();
        state.order.forget();
        // Threads that wait for these pages were reported, and are reported again.
        Ok(self.faults.get_ref().tell_again()?)
    }

    /// Fills pages that have come. Pages that are not missing (any more) stay as they are.
    pub fn fill(&self, start: u64, bytes_there: &[u8]) -> Result<()> {
        let range = start..start + bytes_there.len() as u64;
        self.check(&range)?;
        let mut state = self.state();
        for run in state.record.missing().runs(pages(&range)) {
            let run = bytes(&run);
            let part = (run.start - start) as usize..(run.end - start) as usize;
            self.faults.get_ref().copy(run.start, &bytes_there[part])?;
        }
        state.record.given(pages(&range))
    }

    /// These pages are zero: they stay holes.
    pub fn fill_zeros(&self, range: Range<u64>) -> Result<()> {
        self.check(&range)?;
        let mut state = self.state();
        state.record.given(pages(&range))?;
        // Threads that wait touch the pages again, and get zeros.
        Ok(self.faults.get_ref().wake(range)?)
    }

    fn check(&self, range: &Range<u64>) -> Result<()> {
        self.ram.holds(range.clone())?;
        match range.start.is_multiple_of(PAGE) && range.end.is_multiple_of(PAGE) {
            true => Ok(()),
            false => Err(Error::Malformed(format!("{range:?}, which are no whole pages"))),
        }
    }

    /// Ends post-copy when all pages have come: QEMU is as if it had always been there, and the guest may
    /// move again. Also called if post-copy was prepared and is not needed.
    pub fn end(self) -> Result<()> {
        let left = self.left();
        if left > 0 {
            return Err(Error::PostCopy(format!("{} KiB are missing", left >> 10)));
        }
        let faults = self.faults.into_inner();
        faults.end()?;
        faults.close()?;
        let state = self.state.into_inner().expect("no panic under this lock");
        state.record.remove()
    }
}

/// An object whose descriptor becomes readable. Needs a tokio runtime.
fn watched<T: AsFd + AsRawFd>(inner: T) -> std::io::Result<AsyncFd<T>> {
    // SAFETY: the two types that come here own the descriptor that they lend: it stays open and the same until they are dropped, and
    // `AsyncFd` deregisters it before.
    Ok(unsafe { AsyncFd::register_with_interest(inner, Interest::READABLE) }?)
}
