//! The model's `crate::shared`: the names of `src/shared.rs`, for loom.
//!
//! The words keep their size and place, so that the layouts are those of the product; a word that a scenario *watches*
//! is backed by one of loom's atomics, found by its address. All others are plain memory, which no thread of the
//! scenario may change.
//!
//! Loom takes a sequentially consistent access for an acquiring or releasing one, which would let it find executions that
//! there are not; its sequentially consistent fences are exact. So a load that is sequentially consistent has such a fence
//! in front if its thread has made a sequentially consistent store since the last one: what the queues rely on is that
//! these two keep their order.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::panic::Location;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{self, AcqRel, Acquire, Relaxed, Release, SeqCst};

use loom::cell::UnsafeCell;
use loom::sync::atomic as model;

/// Where in the sources an ordering is named, which, and for what.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// `ring/work.rs:301:20`.
    pub at: String,
    /// `load`, `store`, `swap`, …
    pub access: &'static str,
    /// `Acquire`, …
    pub ordering: String,
}

/// One place made weaker.
#[derive(Debug, Clone)]
pub struct Weakened {
    /// [`Place::at`] and [`Place::access`].
    pub place: (String, String),
    /// The ordering there now; for a fence `Relaxed` means that it is gone.
    pub now: Ordering,
}

/// What one execution of a scenario knows. All its threads are one thread of the operating system, by turns.
#[derive(Default)]
struct Execution {
    words32: HashMap<usize, Rc<model::AtomicU32>>,
    words64: HashMap<usize, Rc<model::AtomicU64>>,
    slots: Vec<(Range<usize>, Rc<UnsafeCell<()>>)>,
    /// Threads with a sequentially consistent store behind which no fence was put yet.
    fence_due: HashSet<loom::thread::ThreadId>,
}

thread_local! {
    static EXECUTION: RefCell<Execution> = RefCell::default();
    static WEAKENED: RefCell<Option<Weakened>> = const { RefCell::new(None) };
    static PLACES: RefCell<BTreeMap<Place, u64>> = const { RefCell::new(BTreeMap::new()) };
}

/// Runs a scenario in all its executions; gives their number and the places that were passed.
///
/// # Panics
/// If one of the executions does.
pub fn explore(weakened: Option<Weakened>, scenario: fn()) -> (usize, Vec<Place>) {
    let executions = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&executions);
    WEAKENED.set(weakened);
    PLACES.take();
    let mut builder = loom::model::Builder::new();
    // All executions with so many preemptions. A bug that needs more of them has not been seen anywhere.
    builder.preemption_bound = Some(3);
    builder.check(move || {
        counted.fetch_add(1, Relaxed);
        scenario();
        // Loom's objects go with the execution that made them.
        EXECUTION.take();
    });
    (executions.load(Relaxed), PLACES.take().into_keys().collect())
}

/// From now on these words are the model's. Called before the scenario starts its threads.
pub fn watch32(word: &AtomicU32) {
    let model = Rc::new(model::AtomicU32::new(word.0.load(Relaxed)));
    EXECUTION.with_borrow_mut(|execution| execution.words32.insert(std::ptr::from_ref(word) as usize, model));
}

/// As [`watch32`].
pub fn watch64(word: &AtomicU64) {
    let model = Rc::new(model::AtomicU64::new(word.0.load(Relaxed)));
    EXECUTION.with_borrow_mut(|execution| execution.words64.insert(std::ptr::from_ref(word) as usize, model));
}

/// From now on accesses to these bytes must be ordered.
pub fn watch_slot(base: NonNull<u8>, offset: u64, bytes: u64) {
    let start = base.as_ptr() as usize + offset as usize;
    let slot = (start..start + bytes as usize, Rc::new(UnsafeCell::new(())));
    EXECUTION.with_borrow_mut(|execution| execution.slots.push(slot));
}

/// The ordering to use at this place.
fn ordering(location: &Location<'_>, access: &'static str, ordering: Ordering) -> Ordering {
    let file = location.file();
    let file = file.rsplit_once("src/").map_or(file, |(_, file)| file);
    let place = Place {
        at: format!("{file}:{}:{}", location.line(), location.column()),
        access,
        ordering: format!("{ordering:?}"),
    };
    let now = WEAKENED.with_borrow(|weakened| {
        let here = |weakened: &&Weakened| {
            (weakened.place.0.as_str(), weakened.place.1.as_str()) == (&place.at, place.access)
        };
        let weakened = weakened.as_ref().filter(here);
        weakened.map_or(ordering, |weakened| weakened.now)
    });
    PLACES.with_borrow_mut(|places| *places.entry(place).or_default() += 1);
    now
}

fn fence_is_due(due: bool) {
    let thread = loom::thread::current().id();
    EXECUTION.with_borrow_mut(|execution| match due {
        true => execution.fence_due.insert(thread),
        false => execution.fence_due.remove(&thread),
    });
}

fn fence_if_due() {
    let thread = loom::thread::current().id();
    if EXECUTION.with_borrow(|execution| execution.fence_due.contains(&thread)) {
        model::fence(SeqCst);
        fence_is_due(false);
    }
}

/// What comes before a load, and the ordering for loom.
fn before_load(ordering: Ordering) -> Ordering {
    if ordering != SeqCst {
        return ordering;
    }
    fence_if_due();
    Acquire
}

/// As [`before_load`], of what stores or exchanges.
fn before_store(ordering: Ordering, also_loads: bool) -> Ordering {
    if ordering != SeqCst {
        // The fence that is due is for the store before this one only.
        fence_if_due();
        return ordering;
    }
    if also_loads {
        fence_if_due();
    }
    fence_is_due(true);
    if also_loads { AcqRel } else { Release }
}

macro_rules! word {
    ($name:ident, $plain:ty, $integer:ty, $words:ident) => {
        /// A word of shared memory.
        #[repr(transparent)]
        #[derive(Debug)]
        pub struct $name($plain);

        impl $name {
            pub const fn new(value: $integer) -> Self {
                Self(<$plain>::new(value))
            }

            fn model(&self) -> Option<Rc<model::$name>> {
                let address = std::ptr::from_ref(self) as usize;
                EXECUTION.with_borrow(|execution| execution.$words.get(&address).cloned())
            }

            #[track_caller]
            pub fn load(&self, order: Ordering) -> $integer {
                let Some(word) = self.model() else {
                    return self.0.load(order);
                };
                let order = ordering(Location::caller(), "load", order);
                word.load(before_load(order))
            }

            #[track_caller]
            pub fn store(&self, value: $integer, order: Ordering) {
                let Some(word) = self.model() else {
                    return self.0.store(value, order);
                };
                let order = ordering(Location::caller(), "store", order);
                word.store(value, before_store(order, false));
            }

            #[track_caller]
            pub fn swap(&self, value: $integer, order: Ordering) -> $integer {
                let Some(word) = self.model() else {
                    return self.0.swap(value, order);
                };
                let order = ordering(Location::caller(), "swap", order);
                word.swap(value, before_store(order, true))
            }

            #[track_caller]
            pub fn fetch_or(&self, value: $integer, order: Ordering) -> $integer {
                let Some(word) = self.model() else {
                    return self.0.fetch_or(value, order);
                };
                let order = ordering(Location::caller(), "fetch_or", order);
                word.fetch_or(value, before_store(order, true))
            }
        }
    };
}

word!(AtomicU32, std::sync::atomic::AtomicU32, u32, words32);
word!(AtomicU64, std::sync::atomic::AtomicU64, u64, words64);

/// Fences matter to loom only inside of an execution.
#[track_caller]
pub fn fence(order: Ordering) {
    let watching =
        EXECUTION.with_borrow(|execution| !execution.words32.is_empty() || !execution.words64.is_empty());
    if !watching {
        return std::sync::atomic::fence(order);
    }
    let order = ordering(Location::caller(), "fence", order);
    if order != Relaxed {
        model::fence(order);
    }
}

fn cell(slot: NonNull<u8>) -> Option<Rc<UnsafeCell<()>>> {
    let address = slot.as_ptr() as usize;
    EXECUTION.with_borrow(|execution| {
        let mut slots = execution.slots.iter();
        slots
            .find(|(range, _)| range.contains(&address))
            .map(|(_, cell)| Rc::clone(cell))
    })
}

fn note_write(slot: NonNull<u8>) {
    if let Some(cell) = cell(slot) {
        cell.with_mut(|_| ());
    }
}

fn note_read(slot: NonNull<u8>) {
    if let Some(cell) = cell(slot) {
        cell.with(|_| ());
    }
}

/// # Safety
/// As in `src/shared.rs`, here and below.
pub unsafe fn write<T: Copy>(slot: NonNull<T>, value: T) {
    note_write(slot.cast());
    // SAFETY: the same contract.
    unsafe { slot.write(value) }
}

/// # Safety
/// See [`write`].
pub unsafe fn write_all<T: Copy>(slot: NonNull<u8>, values: &[T]) {
    note_write(slot);
    // SAFETY: the same contract.
    unsafe { slot.copy_from_nonoverlapping(NonNull::from(values).cast(), size_of_val(values)) }
}

/// # Safety
/// See [`write`].
pub unsafe fn read<T: Copy>(slot: NonNull<T>) -> T {
    note_read(slot.cast());
    // SAFETY: the same contract.
    unsafe { slot.read() }
}

/// # Safety
/// See [`write`].
pub unsafe fn read_once<T: Copy>(slot: NonNull<T>) -> T {
    // SAFETY: the same contract.
    unsafe { read(slot) }
}

/// # Safety
/// See [`write`].
pub unsafe fn read_bytes_once(slot: NonNull<u8>, out: &mut [u8]) {
    note_read(slot);
    // SAFETY: the same contract.
    unsafe { std::ptr::copy_nonoverlapping(slot.as_ptr(), out.as_mut_ptr(), out.len()) }
}
