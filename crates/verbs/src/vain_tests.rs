//! Polls of a completion queue whose RNIC says that it is starved, through the shared memory.

use crate::measure::{KEY, Rig};
use crate::{RecvWr, Sge, Wc, vain};

/// More polls than any thread makes before it naps, if it may: it must have waited for 400 µs.
const MANY: u32 = 1_000_000;

fn post(rig: &Rig, wr_id: u64) {
    let sges = [Sge {
        address: 4096,
        length: 64,
        lkey: KEY,
    }];
    let request = RecvWr { wr_id, sges: &sges };
    rig.qp.post_recv([request]).expect("there is room");
}

fn poll(rig: &Rig) -> Option<u64> {
    let mut out = [Wc::default()];
    (rig.cq.poll(&mut out) == 1).then_some(out[0].wr_id)
}

/// Polls in vain until this thread has napped once more.
fn wait_for_nap(rig: &Rig) {
    let before = vain::naps();
    let napped = (0..MANY).any(|_| {
        assert_eq!(poll(rig), None);
        vain::naps() > before
    });
    assert!(napped, "the RNIC is starved, and a thread polls on without a nap");
}

#[test]
fn who_polls_in_vain_naps_while_the_rnic_is_starved_and_only_then() {
    let rig = Rig::new();
    let mut polls = (0..MANY / 4).map(|_| poll(&rig));
    assert!(
        polls.all(|found| found.is_none()) && vain::naps() == 0,
        "nobody said so"
    );
    rig.set_starved(true);
    wait_for_nap(&rig);
    wait_for_nap(&rig);
    rig.set_starved(false);
    let before = vain::naps();
    let mut polls = (0..MANY / 4).map(|_| poll(&rig));
    assert!(
        polls.all(|found| found.is_none()) && vain::naps() == before,
        "the sign was taken back"
    );
}

#[test]
fn completions_that_are_there_are_taken_at_once() {
    let mut rig = Rig::new();
    rig.set_starved(true);
    for round in 0..20 {
        wait_for_nap(&rig);
        let before = vain::naps();
        (0..32).for_each(|index| post(&rig, round * 32 + index));
        rig.complete();
        for index in 0..32 {
            assert_eq!(poll(&rig), Some(round * 32 + index));
        }
        assert_eq!(vain::naps(), before, "no nap in front of a completion");
    }
}

#[test]
fn who_has_just_found_something_waits_anew_before_it_naps() {
    let mut rig = Rig::new();
    rig.set_starved(true);
    wait_for_nap(&rig);
    post(&rig, 7);
    rig.complete();
    assert_eq!(poll(&rig), Some(7));
    let (naps, polls) = (vain::naps(), 3 * 32);
    // Two pauses: the first begins the wait, the second comes far sooner than a nap is due, or the thread had no core meanwhile.
    let start = std::time::Instant::now();
    (0..polls).for_each(|_| assert_eq!(poll(&rig), None));
    assert!(vain::naps() == naps || start.elapsed().as_micros() >= 400);
}
