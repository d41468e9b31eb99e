//! Two daemons at two RNICs, which run in threads of the test on loopback addresses.

#[path = "../../far/tests/support/mod.rs"]
#[allow(dead_code, reason = "each test file uses a part of it")]
mod support;

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use proptest::prelude::*;
use support::Nics;
use verbatim_bulk::fingerprint::Key;
use verbatim_bulk::{
    Borrower, Error, Incoming, Landed, Lender, Operation, Options, Outgoing, PAGE_BYTES, QpClass,
};

const PAGE: u64 = PAGE_BYTES as u64;

fn options(operation: Operation) -> Options {
    Options {
        operation,
        run_bytes: 16 * PAGE,
        ring_bytes: 64 * PAGE,
        window_bytes: 32 * PAGE,
        class: QpClass::User,
        // What is moved by rings of either kind is the same; here each test of READs has them locked.
        locks: operation == Operation::Read,
    }
}

fn pair(nics: &Nics, options: Options) -> (Outgoing<u64>, Incoming) {
    let (mut outgoing, offer) = Outgoing::open(nics.device(0), options).unwrap();
    let (incoming, accepted) = match options.locks {
        true => Incoming::accept_locked(nics.device(1), &offer).unwrap(),
        false => Incoming::accept(nics.device(1), &offer).unwrap(),
    };
    outgoing.accept(&accepted).unwrap();
    (outgoing, incoming)
}

fn bytes_of(number: u64, length: usize) -> Vec<u8> {
    (0..length)
        .map(|index| (number * 31 + index as u64 / 7) as u8)
        .collect()
}

/// What is to be sent, by its number: so many bytes in pieces, or nothing but the number.
fn carry(outgoing: &mut Outgoing<u64>, incoming: &mut Incoming, items: &[Vec<usize>]) {
    let mut told: VecDeque<(u64, Option<Landed>)> = VecDeque::new();
    let mut taken = Vec::new();
    let mut take = |outgoing: &mut Outgoing<u64>, told: &mut VecDeque<(u64, Option<Landed>)>| {
        let (number, landed) = told.pop_front().expect("something is under way");
        assert_eq!(number, taken.len() as u64, "in order, and each once");
        let mut content = Vec::new();
        if let Some(landed) = &landed {
            let fetched = incoming.fetch(landed).unwrap();
            incoming.take(landed, fetched, &mut content).unwrap();
            outgoing.freed(landed.end()).unwrap();
        }
        taken.push(content);
    };
    for (number, pieces) in (0..).zip(items) {
        if pieces.is_empty() {
            outgoing.pass(number);
            continue;
        }
        let mut run = loop {
            match outgoing.begin() {
                Some(run) => break run,
                None => {
                    while let Some(next) = outgoing.next(true).unwrap() {
                        told.push_back(next);
                    }
                    take(outgoing, &mut told);
                }
            }
        };
        for length in pieces {
            outgoing.add(&mut run, &bytes_of(number, *length)).unwrap();
        }
        outgoing.send(run, number).unwrap();
        while let Some(next) = outgoing.next(false).unwrap() {
            told.push_back(next);
        }
    }
    while let Some(next) = outgoing.next(true).unwrap() {
        told.push_back(next);
    }
    while !told.is_empty() {
        take(outgoing, &mut told);
    }
    assert!(outgoing.is_empty());
    for (number, (pieces, content)) in (0..).zip(items.iter().zip(&taken)) {
        let mut wanted = Vec::new();
        for length in pieces {
            wanted.extend(bytes_of(number, *length));
            wanted.resize(wanted.len().next_multiple_of(PAGE_BYTES), 0);
        }
        assert!(*content == wanted, "item {number}");
    }
}

#[test]
fn all_runs_arrive_in_order_by_either_operation() {
    let nics = Nics::start();
    let pieces = prop::collection::vec(1..=4 * PAGE_BYTES, 0..4);
    let items = prop::collection::vec(pieces, 1..40);
    for operation in [Operation::Write, Operation::Read] {
        let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(24));
        let carried = runner.run(&items, |items| {
            let (mut outgoing, mut incoming) = pair(&nics, options(operation));
            carry(&mut outgoing, &mut incoming, &items);
            Ok(())
        });
        carried.unwrap();
    }
}

#[test]
fn a_class_can_be_changed_between_runs() {
    let nics = Nics::start();
    let (mut outgoing, mut incoming) = pair(
        &nics,
        Options {
            class: QpClass::Background,
            ..options(Operation::Write)
        },
    );
    carry(&mut outgoing, &mut incoming, &[vec![5], vec![], vec![PAGE_BYTES]]);
    outgoing.set_class(QpClass::User).unwrap();
    incoming.set_class(QpClass::User).unwrap();
    carry(&mut outgoing, &mut incoming, &[vec![9], vec![PAGE_BYTES, 1]]);
}

/// One run that has landed.
fn one(operation: Operation, nics: &Nics) -> (Outgoing<u64>, Incoming, Landed) {
    let (mut outgoing, incoming) = pair(nics, options(operation));
    let mut run = outgoing.begin().unwrap();
    outgoing.add(&mut run, &bytes_of(1, 3 * PAGE_BYTES)).unwrap();
    outgoing.send(run, 1).unwrap();
    let (_, landed) = outgoing.next(true).unwrap().unwrap();
    (outgoing, incoming, landed.unwrap())
}

#[test]
fn what_the_network_has_changed_is_noticed() {
    let nics = Nics::start();
    let (_outgoing, mut incoming, landed) = one(Operation::Write, &nics);
    incoming.damage(&landed).unwrap();
    let error = incoming.take(&landed, None, &mut Vec::new()).unwrap_err();
    assert!(
        matches!(error, Error::Damaged { damaged: 1, offset: 0, length } if length == 3 * PAGE),
        "{error}"
    );
    // It was one bit.
    incoming.damage(&landed).unwrap();
    incoming.take(&landed, None, &mut Vec::new()).unwrap();
}

#[test]
fn a_run_that_did_not_arrive_is_noticed() {
    let nics = Nics::start();
    let (_outgoing, mut incoming, landed) = one(Operation::Read, &nics);
    let error = incoming.take(&landed, None, &mut Vec::new()).unwrap_err();
    assert!(matches!(error, Error::Damaged { damaged: 3, .. }), "{error}");
    let fetched = incoming.fetch(&landed).unwrap();
    incoming.take(&landed, fetched, &mut Vec::new()).unwrap();
}

#[test]
fn words_that_cannot_be_true_are_refused() {
    let nics = Nics::start();
    let (mut outgoing, mut incoming, landed) = one(Operation::Write, &nics);
    let changes: [fn(&mut Landed); 6] = [
        |landed| landed.length = 0,
        |landed| landed.length = u64::MAX,
        |landed| landed.length -= 1,
        |landed| landed.length += PAGE,
        |landed| landed.position = 63 * PAGE,
        |landed| landed.fingerprints.truncate(31),
    ];
    for (number, change) in changes.iter().enumerate() {
        let mut changed = landed.clone();
        change(&mut changed);
        let fetched = incoming.fetch(&changed).map(drop);
        let taken = incoming.take(&changed, None, &mut Vec::new());
        assert!(matches!(fetched, Err(Error::Malformed(_))), "{number}");
        assert!(matches!(taken, Err(Error::Malformed(_))), "{number}");
    }
    assert!(outgoing.freed(landed.end() + 1).is_err());
    outgoing.freed(landed.end()).unwrap();
    for wrong in [
        Options {
            run_bytes: PAGE + 1,
            ..Options::default()
        },
        Options {
            ring_bytes: 3 << 19,
            ..Options::default()
        },
        Options {
            ring_bytes: 1 << 40,
            ..Options::default()
        },
    ] {
        assert!(Outgoing::<u64>::open(nics.device(0), wrong).is_err(), "{wrong:?}");
    }
}

/// A file in memory of so many pages, each of which is another.
fn lent(pages: u64) -> (std::fs::File, Vec<u8>) {
    let file = rustix::fs::memfd_create("bulk", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let file = std::fs::File::from(file);
    let content: Vec<u8> = (0..pages).flat_map(|page| bytes_of(page, PAGE_BYTES)).collect();
    std::os::unix::fs::FileExt::write_all_at(&file, &content, 0).unwrap();
    (file, content)
}

fn borrow(nics: &Nics, file: &std::fs::File, pages: u64, class: QpClass) -> (Lender, Borrower) {
    let rooms = (3, 4 * PAGE);
    let (mut borrower, wish) = Borrower::open(nics.device(0), class, rooms, Duration::from_secs(10)).unwrap();
    let copy = file.try_clone().unwrap().into();
    let (lender, loan) = Lender::accept(nics.device(1), copy, pages * PAGE, &wish).unwrap();
    assert_eq!(loan.length(), pages * PAGE);
    borrower.accept(&loan).unwrap();
    (lender, borrower)
}

#[test]
fn what_is_lent_is_read_in_order_and_compared() {
    let nics = Nics::start();
    let (file, content) = lent(64);
    let key = Key::new();
    let wanted = |range: &Range<u64>| &content[range.start as usize..range.end as usize];
    for class in [QpClass::User, QpClass::Background] {
        let (_lender, mut borrower) = borrow(&nics, &file, 64, class);
        let starts = (0..22).map(|number| (21 - number) * 3 * PAGE);
        let ranges = starts.map(|at| at..(at + 3 * PAGE).min(64 * PAGE));
        let mut waiting = VecDeque::new();
        for range in ranges {
            if !borrower.has_room() {
                let range: Range<u64> = waiting.pop_front().unwrap();
                let bytes = borrower.take(&key, &key.fingerprints(wanted(&range))).unwrap();
                assert!(bytes == wanted(&range), "{range:?}");
            }
            borrower.fetch(range.clone()).unwrap();
            waiting.push_back(range);
        }
        for range in waiting {
            let bytes = borrower.take(&key, &key.fingerprints(wanted(&range))).unwrap();
            assert!(bytes == wanted(&range), "{range:?}");
        }
        assert!(!borrower.is_fetching() && borrower.take(&key, &[]).is_err());
        for wrong in [0..0, 0..100, 0..5 * PAGE, 63 * PAGE..65 * PAGE] {
            assert!(borrower.fetch(wrong.clone()).is_err(), "{wrong:?}");
        }
        // One that is not what its owner has said.
        borrower.fetch(PAGE..3 * PAGE).unwrap();
        borrower.damage().unwrap();
        let told = key.fingerprints(wanted(&(PAGE..3 * PAGE)));
        let error = borrower.take(&key, &told).unwrap_err();
        let damaged = Error::Damaged {
            damaged: 1,
            offset: 0,
            length: 2 * PAGE,
        };
        assert_eq!(error.to_string(), damaged.to_string());
    }
}

#[test]
fn who_lends_no_more_is_not_read() {
    let nics = Nics::start();
    let (file, content) = lent(8);
    let key = Key::new();
    let (lender, mut borrower) = borrow(&nics, &file, 8, QpClass::User);
    borrower.fetch(0..PAGE).unwrap();
    let told = key.fingerprints(&content[..PAGE_BYTES]);
    borrower.take(&key, &told).unwrap();
    drop(lender);
    borrower.fetch(0..PAGE).unwrap();
    assert!(matches!(borrower.take(&key, &told), Err(Error::Far(_))));
}
