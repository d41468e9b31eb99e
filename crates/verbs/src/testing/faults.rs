//! What the transport in memory never does by itself, and RNICs do: they die, are slow, give a number again, cannot be moved or stopped,
//! speak of what has happened to them. Nothing here stands for an RNIC: each of these makes a real one do one thing.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use verbatim_device::control::AsyncEvent;

use super::Wire;

/// What is to go wrong.
#[derive(Debug, Default)]
pub struct Faults {
    /// Says for the next packets whether they are lost; none is when it is empty.
    pub losses: VecDeque<bool>,
    /// Nobody knows the original values of atomics for longer than it takes to send them.
    pub forgetful: bool,
    /// So many looks find no room in a send queue although there is: slots that the RNIC frees late.
    pub late_room: u32,
    /// So many times the network does not say where the other end of a queue pair is that goes to RTR.
    pub unanswered: u32,
    /// Every device gives the least number that is free, so that they come again, also elsewhere. Else no two things have one.
    pub reuses_numbers: bool,
    /// Numbers that are given next.
    pub next_numbers: VecDeque<u32>,
    /// Devices whose contexts cannot be moved.
    pub pinned: BTreeSet<u8>,
    /// Devices that a library in the process drives, and where they are made again. They stop no queue pair.
    pub made_again: BTreeMap<u8, Option<u8>>,
    /// Done once the next queue pair is gone at its device, before its destroyer hears of it.
    pub on_destroy: Option<Hook>,
    /// Done when somebody next asks whether a device can be moved.
    pub on_look: Option<Hook>,
}

/// Something to be done in the middle of something else.
pub struct Hook(pub Box<dyn FnOnce() + Send>);

impl std::fmt::Debug for Hook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hook")
    }
}

impl Wire {
    fn faults<T>(&self, change: impl FnOnce(&mut Faults) -> T) -> T {
        change(&mut self.0.lock().faults)
    }

    /// The next packets to arrive: `true` is lost.
    pub fn lose(&self, losses: impl IntoIterator<Item = bool>) {
        self.faults(|faults| faults.losses.extend(losses));
    }

    /// From now on RNICs do not keep the original values of atomics.
    pub fn forget_atomics(&self) {
        self.faults(|faults| faults.forgetful = true);
    }

    /// For the next `looks` looks, send queues say that they have no room.
    pub fn free_slots_late(&self, looks: u32) {
        self.faults(|faults| faults.late_room = looks);
    }

    /// Whether this is one of those looks.
    pub(super) fn frees_late(&self) -> bool {
        self.faults(|faults| {
            let late = faults.late_room > 0;
            faults.late_room = faults.late_room.saturating_sub(1);
            late
        })
    }

    /// The next queue pairs that go to RTR do not find the way so many times.
    pub fn answer_late(&self, times: u32) {
        self.faults(|faults| faults.unanswered = times);
    }

    /// Whether this is one of those times.
    pub(super) fn does_not_answer(&self) -> bool {
        self.faults(|faults| {
            let unanswered = faults.unanswered > 0;
            faults.unanswered = faults.unanswered.saturating_sub(1);
            unanswered
        })
    }

    /// From now on every device gives the least number that is free.
    pub fn reuse_numbers(&self) {
        self.faults(|faults| faults.reuses_numbers = true);
    }

    /// The next object that is made has this number, which was another's: a queue pair as it is, a region in the upper 24 bits of its
    /// key.
    pub fn give_again(&self, number: u32) {
        self.faults(|faults| faults.next_numbers.push_back(number));
    }

    /// From now on, contexts that are opened on the device cannot be moved.
    pub fn pin(&self, id: u8) {
        self.faults(|faults| faults.pinned.insert(id));
    }

    /// The process that has the device makes it again where it moves to: at `target`, or nowhere.
    pub fn makes_again(&self, id: u8, target: Option<u8>) {
        self.faults(|faults| faults.made_again.insert(id, target));
    }

    /// Has something done when the next queue pair is gone at its device, before its destroyer hears of it.
    pub fn on_destroy(&self, hook: impl FnOnce() + Send + 'static) {
        self.faults(|faults| faults.on_destroy = Some(Hook(Box::new(hook))));
    }

    /// Has something done when somebody next asks whether a device can be moved.
    pub fn on_look(&self, hook: impl FnOnce() + Send + 'static) {
        self.faults(|faults| faults.on_look = Some(Hook(Box::new(hook))));
    }

    /// Ends a device, as `kill -9` does its RNIC.
    pub fn kill(&self, id: u8) {
        self.with_rnic(id, |rnic| {
            rnic.dead = true;
            rnic.shared.lines.clear();
        });
    }

    /// A device tells of an event.
    pub fn tell(&self, id: u8, event: AsyncEvent) {
        self.with_rnic(id, |rnic| rnic.shared.tell(event));
    }
}
