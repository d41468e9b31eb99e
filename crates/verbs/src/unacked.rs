//! Events that the program has got and not acknowledged: what they concern must live until then
//! (ibv_ack_cq_events(3), ibv_ack_async_event(3)).

use parking_lot::{Condvar, Mutex};

/// The count of one object's events of one kind.
#[derive(Debug, Default)]
pub struct Unacked {
    state: Mutex<State>,
    acked: Condvar,
}

#[derive(Debug, Default)]
struct State {
    count: u64,
    closed: bool,
}

impl Unacked {
    /// Counts an event that the program is about to get; false if the object was destroyed, so that it must not.
    #[must_use]
    pub fn note(&self) -> bool {
        let mut state = self.state.lock();
        state.count += u64::from(!state.closed);
        !state.closed
    }

    /// The program has acknowledged so many.
    pub fn ack(&self, count: u32) {
        let mut state = self.state.lock();
        state.count = state.count.saturating_sub(count.into());
        if state.count == 0 {
            self.acked.notify_all();
        }
    }

    /// The object was destroyed: no more events. Waits until the others are acknowledged.
    pub fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        while state.count > 0 {
            self.acked.wait(&mut state);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn destroying_waits_for_all_acknowledgements() {
        let unacked = Unacked::default();
        assert!(unacked.note() && unacked.note());
        std::thread::scope(|scope| {
            let destroyer = scope.spawn(|| unacked.close());
            while !unacked.state.lock().closed {
                std::thread::yield_now();
            }
            assert!(!unacked.note(), "destroyed: no more");
            unacked.ack(1);
            assert!(!destroyer.is_finished());
            unacked.ack(1);
            destroyer.join().unwrap();
        });
    }
}
