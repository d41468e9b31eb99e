use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use proptest::prelude::*;
use serde::{Deserialize, Serialize};

use super::*;

/// Counts what is allocated, and the most that was at once.
struct Counter;

static NOW: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

fn add(bytes: usize) {
    let now = NOW.fetch_add(bytes, Relaxed) + bytes;
    MOST.fetch_max(now, Relaxed);
}

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Counter {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: as this one was called.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as this one was called.
        unsafe { System.dealloc(place, layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        add(size);
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as this one was called.
        unsafe { System.realloc(place, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counter = Counter;

/// Tests that measure go one after the other.
static ALONE: Mutex<()> = Mutex::new(());

/// The most that was allocated at once while this was done.
fn peak(does: impl FnOnce()) -> usize {
    let before = NOW.load(Relaxed);
    MOST.store(before, Relaxed);
    does();
    MOST.load(Relaxed) - before
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Answer {
    Nothing,
    Newtype(Vec<Item>),
    Tuple(u8, Vec<String>),
    Struct {
        items: Vec<Item>,
        named: BTreeMap<u16, String>,
    },
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct Item {
    numbers: Vec<u32>,
    name: Option<String>,
    array: [u8; 16],
    wide: (i64, u128, f32, char, bool),
    signed: Vec<Option<i16>>,
}

#[test]
fn zeroes_on_the_wire_are_not_gigabytes_in_memory() {
    let _alone = ALONE.lock();
    const WIRE: usize = 64 << 20;
    const MOST: usize = 16 << 20;
    let mut bytes = postcard::to_stdvec(&(WIRE as u64)).unwrap();
    bytes.resize(WIRE, 0);
    fn refuses<T: DeserializeOwned + Debug>(bytes: &[u8]) {
        let most = peak(|| {
            let refused = from_bytes::<T>(bytes, MOST).unwrap_err();
            assert_eq!(refused, Error::TooLarge { most: MOST });
        });
        // A list that is begun has room for a mebibyte.
        assert!(most <= PEAK * MOST + (2 << 20), "{most} bytes at once");
    }
    refuses::<Vec<String>>(&bytes);
    refuses::<Vec<(Vec<u32>, Option<String>, [u8; 16])>>(&bytes);
    refuses::<Vec<Vec<Vec<u8>>>>(&bytes);
    refuses::<Vec<Option<u128>>>(&bytes);
    refuses::<BTreeMap<u8, u8>>(&bytes);
    refuses::<Vec<()>>(&bytes);
}

/// What this crate is for: without a budget the sender decides how much is allocated.
#[test]
fn without_a_budget_zeroes_take_many_times_their_length() {
    let _alone = ALONE.lock();
    let mut bytes = postcard::to_stdvec(&(1u64 << 20)).unwrap();
    bytes.resize(bytes.len() + (1 << 20), 0);
    let most = peak(|| drop(postcard::from_bytes::<Vec<String>>(&bytes).unwrap()));
    assert!(most >= size_of::<String>() << 20, "{most} bytes at once");
    let refused = from_bytes::<Vec<String>>(&bytes, memory_of(bytes.len())).unwrap_err();
    assert!(matches!(refused, Error::TooLarge { .. }), "{refused}");
}

#[test]
fn what_is_cut_off_or_has_a_wrong_length_is_malformed() {
    let bytes = postcard::to_stdvec(&vec![7u32; 100]).unwrap();
    for end in 0..bytes.len() {
        let refused = from_bytes::<Vec<u32>>(&bytes[..end], 1 << 20).unwrap_err();
        assert!(matches!(refused, Error::Malformed(_)), "{refused}");
    }
    let huge = postcard::to_stdvec(&u64::MAX).unwrap();
    let refused = from_bytes::<Vec<u64>>(&huge, 1 << 20).unwrap_err();
    assert!(matches!(refused, Error::Malformed(_)), "{refused}");
}

#[test]
fn the_budget_is_for_what_lies_on_the_heap() {
    let list = vec![String::from("four"); 3];
    let bytes = postcard::to_stdvec(&list).unwrap();
    let takes = 3 * (size_of::<String>() + 4);
    assert_eq!(from_bytes::<Vec<String>>(&bytes, takes), Ok(list));
    let refused = from_bytes::<Vec<String>>(&bytes, takes - 1).unwrap_err();
    assert_eq!(
        refused.to_string(),
        format!("what it says takes more than {} bytes of memory", takes - 1)
    );
    // A structure has what is in it in its own place.
    let bytes = postcard::to_stdvec(&[[1u8; 16]; 4]).unwrap();
    assert_eq!(from_bytes::<[[u8; 16]; 4]>(&bytes, 0), Ok([[1; 16]; 4]));
}

#[test]
fn bytes_behind_a_message_are_given_back() {
    let bytes = [1, 5, 9, 9];
    let mut budget = 3;
    assert_eq!(
        take_within::<Vec<u8>>(&bytes, &mut budget),
        Ok((vec![5], &[9, 9][..]))
    );
    assert_eq!(budget, 2);
}

fn items() -> impl Strategy<Value = Vec<Item>> {
    let item = (
        prop::collection::vec(any::<u32>(), 0..5),
        any::<Option<String>>(),
        any::<[u8; 16]>(),
        any::<(i64, u128, f32, char, bool)>(),
        prop::collection::vec(any::<Option<i16>>(), 0..5),
    );
    let item = item.prop_map(|(numbers, name, array, wide, signed)| Item {
        numbers,
        name,
        array,
        wide,
        signed,
    });
    prop::collection::vec(item, 0..5)
}

fn answers() -> impl Strategy<Value = Answer> {
    prop_oneof![
        Just(Answer::Nothing),
        items().prop_map(Answer::Newtype),
        any::<(u8, Vec<String>)>().prop_map(|(number, texts)| Answer::Tuple(number, texts)),
        (items(), any::<BTreeMap<u16, String>>()).prop_map(|(items, named)| Answer::Struct { items, named }),
    ]
}

proptest! {
    /// Within its budget a message is what postcard says.
    #[test]
    fn what_fits_is_decoded_as_ever(answer in answers()) {
        let bytes = postcard::to_stdvec(&answer).unwrap();
        prop_assert_eq!(from_bytes::<Answer>(&bytes, 1 << 20), Ok(answer));
    }

    /// So are bytes that nobody has encoded.
    #[test]
    fn any_bytes_are_the_same_to_both(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let same = |ours: Result<Answer, Error>, theirs: Result<Answer, postcard::Error>| match (ours, theirs) {
            (Ok(ours), Ok(theirs)) => postcard::to_stdvec(&ours) == postcard::to_stdvec(&theirs),
            (ours, theirs) => ours.is_err() && theirs.is_err(),
        };
        prop_assert!(same(from_bytes(&bytes, 1 << 20), postcard::from_bytes(&bytes)));
    }
}
