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

/// The name by which QEMU knows the device for a moment.
const DEVICE_NAME: &str = "verbatim-userfaultfd";

/// The memory of a guest here that has not all come. Dropping it changes nothing: who waits for a page waits on ([`PostCopy::take_over`]).
///
/// ```text
///  source                                             destination
///  Rounds::round … ───── runs of the RAM ───────────► Ram::write, Ram::clear
///                                                     Machine::post_copy   (armed, before `arrive`)
///  Rounds::leave_behind ── what is not brought ─────► PostCopy::lack
///  leave ────────────┐                   ┌─────────── arrive
///  stopped           │                   │
///  leave_last_behind │── the rest of that ──────────► PostCopy::lack, then PostCopy::complete
///  Behind::runs    ◄─│── what is wanted ─│─────────── PostCopy::fault, PostCopy::next   (from here on, all the time)
///         └──────────│── pages ──────────│──────────► PostCopy::fill, PostCopy::fill_zeros
///  hand_over         └── device state ──►└─ loaded    (paused)
///                       *decision*
///  quit; the RAM stays                                run
///  …                                                  …
///  the RAM goes ◄─────── all has come ─────────────── PostCopy::end, when nothing is PostCopy::left
/// ```
///
/// What is missing is holes in the file of the RAM. A userfaultfd over QEMU's mapping of it has everything wait that touches one: the guest,
/// QEMU's threads, and the kernel for them (reads from a disk; KVM). It is made in QEMU's process, as if by QEMU, and stays open there: so it
/// ends with QEMU and not with whoever answers. Devices' state is loaded by the same means: what a device
/// reads of its rings then is asked for like everything else, so faults must be answered from `complete` on.
///
/// Pages are put in their place by `UFFDIO_COPY` and never by a write to the file: it puts one page where none is, in one step, and leaves a
/// page that is there alone. So a page that comes twice takes nothing back that the guest has written since.
/// A page that is no memory at the source, or that the guest has given back since (a balloon), is a hole that is not missing: who
/// touches it is told at once that it is zero.
///
/// # What must be durable, and when
///
/// - At the destination what is missing, from [`PostCopy::complete`] on, which is before the source hands the devices' state over: a file
///   beside the RAM, which this type keeps. It is true at each moment, since a page's bit goes after the page has come.
/// - At the source, from the decision until the destination has said that all has come: that its RAM is kept, and where
///   it is. Which pages are missing there is not its business: it answers for any. QEMU there must not write to it: it is ended first.
///
/// # Who may die, and when
///
/// | who | when | then |
/// | --- | --- | --- |
/// | anybody | before the decision | the destination's QEMU is killed (it may wait for a page, and then answers nothing), and the source takes the guest back: its RAM is as it was |
/// | the agent of the destination | after it | who touches what is missing waits; the next agent goes on by [`PostCopy::take_over`], and nothing is lost |
/// | the agent of the source, or the network | after it | the same; when it is there again, [`PostCopy::ask_again`] |
/// | QEMU at the destination | after it | the guest is lost, as it always is then; [`PostCopy::fault`] says so |
/// | the host of the source, for good | after it | **the guest is lost**: a part of its memory was only there. Its QEMU is killed |
/// | anybody | in [`PostCopy::end`] | nothing is missing any more; `take_over` finds that, and does the rest |
///
/// While somebody waits for a page in the kernel's name (a read from a disk), no signal but SIGKILL reaches that thread, and a cgroup with it
/// does not come to freeze. QEMU answers nothing while a thread waits that has QEMU's big lock.
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
    /// Has everything in a QEMU that was started to take what arrives wait for pages of the RAM that it lacks, before
    /// [`Machine::arrive`]. What is missing is written down at `record`, a path beside the RAM. Nothing is missing yet.
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

    /// Takes over from one who has died, and answers in its place; `None` if nothing is missing, and nobody need answer. QEMU, which may be waiting,
    /// is asked nothing. Nobody else may answer any more.
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

    /// In bytes: how much is missing to a guest by what is written down at `record`, for who only wants to know. Nothing where nothing is
    /// written down.
    pub fn left_in(record: &Path) -> Result<u64> {
        let left = Record::open(record)?.map_or(0, |record| record.missing().count());
        Ok(left * PAGE)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under this lock")
    }

    /// These parts of the RAM are missing here, whatever was brought before, and come later. Nothing may be brought there otherwise from now on.
    /// Before [`PostCopy::complete`]; what is long is best said while the guest still runs at its source.
    pub fn lack(&self, ranges: &Ranges) -> Result<()> {
        let mut state = self.state();
        if state.record.is_complete() {
            return Err(Error::PostCopy(
                "what is missing was complete, and becomes more".to_owned(),
            ));
        }
        for range in ranges.iter() {
            self.check(&range)?;
            // What was missing before is no memory already.
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

    /// All that is missing was said. Before the state of the devices is loaded.
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

    /// Whether [`PostCopy::complete`] was called, here or by whom this was taken over from.
    pub fn is_complete(&self) -> bool {
        self.state().record.is_complete()
    }

    /// In bytes: how much the guest has, missing or not.
    pub fn bytes(&self) -> u64 {
        self.ram.bytes()
    }

    /// In bytes: how much is missing.
    pub fn left(&self) -> u64 {
        self.state().record.missing().count() * PAGE
    }

    /// Waits until somebody touches what is missing and was not asked for, and says what is to be asked for now, before all else: the page and
    /// what follows it, at most [`URGENT`]. Whoever touches what is zero meanwhile is served.
    ///
    /// This must be waited for from [`PostCopy::complete`] to [`PostCopy::end`], also when nothing is [`PostCopy::left`]: who touches what is zero
    /// waits for it, too. It may be dropped at any time.
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

    /// Somebody waits for a page.
    fn touched(&self, at: u64) -> Result<Option<Range<u64>>> {
        let State { record, order } = &mut *self.state();
        let page = at / PAGE;
        if record.missing().contains(page) {
            return Ok(order.urgent(record.missing(), page));
        }
        // It has come since, or is no memory.
        self.faults.get_ref().zero(at..at + PAGE)?;
        Ok(None)
    }

    /// What is to be asked for next, beside what [`PostCopy::fault`] says: at most [`AHEAD`], from where somebody last waited; `None` if all that
    /// is missing was asked for. Few of these should be under way at once: what somebody waits for comes behind them.
    pub fn next(&self) -> Option<Range<u64>> {
        let State { record, order } = &mut *self.state();
        order.next(record.missing())
    }

    /// What was asked for and has not come does not come: a connection was lost.
    pub fn ask_again(&self) -> Result<()> {
        let mut state = self.state();
        state.order.forget();
        // Who waits for it was told of, and is told of again.
        Ok(self.faults.get_ref().tell_again()?)
    }

    /// Pages have come. Those that are not missing (any more) stay as they are.
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

    /// These are zero: they stay holes.
    pub fn fill_zeros(&self, range: Range<u64>) -> Result<()> {
        self.check(&range)?;
        let mut state = self.state();
        state.record.given(pages(&range))?;
        // Who waits touches them again, and is told that they are zero.
        Ok(self.faults.get_ref().wake(range)?)
    }

    fn check(&self, range: &Range<u64>) -> Result<()> {
        self.ram.holds(range.clone())?;
        match range.start.is_multiple_of(PAGE) && range.end.is_multiple_of(PAGE) {
            true => Ok(()),
            false => Err(Error::Malformed(format!("{range:?}, which are no whole pages"))),
        }
    }

    /// All has come: QEMU is as if it had always been there, and the guest may move again. Also where post-copy was prepared and is not needed.
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

/// Something whose descriptor becomes readable. Needs a tokio runtime.
fn watched<T: AsFd + AsRawFd>(inner: T) -> std::io::Result<AsyncFd<T>> {
    // SAFETY: the two types that come here own the descriptor that they lend: it stays open and the same until they are dropped, and
    // `AsyncFd` deregisters it before.
    Ok(unsafe { AsyncFd::register_with_interest(inner, Interest::READABLE) }?)
}
