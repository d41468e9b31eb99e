//! Control verbs wait here while a session has the process, or the queue pair that they would change, in its hands.
//!
//! Data verbs never come here.

use std::collections::HashMap;

use parking_lot::{Condvar, Mutex};

#[derive(Debug, Default)]
pub struct ControlGate {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Sessions that have closed the gate for all.
    closed: usize,
    /// Sessions that have closed it for a queue pair.
    closed_qps: HashMap<u32, usize>,
    /// Control verbs under way.
    inside: usize,
    /// Of them, those that change a queue pair.
    inside_qps: HashMap<u32, usize>,
    /// Somebody is alone.
    alone: bool,
}

impl State {
    fn is_closed(&self) -> bool {
        self.closed > 0 || !self.closed_qps.is_empty()
    }
}

/// Neither a session nor another control verb has anything in its hands.
#[derive(Debug)]
#[must_use = "others may enter as soon as this is dropped"]
pub struct Alone<'a> {
    gate: &'a ControlGate,
}

/// A control verb under way.
#[derive(Debug)]
#[must_use = "the gate may be closed as soon as this is dropped"]
pub struct Pass<'a> {
    gate: &'a ControlGate,
    qpn: Option<u32>,
}

impl ControlGate {
    /// Waits until the gate is open; it cannot be closed while the pass exists.
    pub fn enter(&self) -> Pass<'_> {
        self.enter_for(None)
    }

    /// As [`Self::enter`], for a verb that changes a queue pair.
    pub fn enter_qp(&self, qpn: u32) -> Pass<'_> {
        self.enter_for(Some(qpn))
    }

    fn enter_for(&self, qpn: Option<u32>) -> Pass<'_> {
        let mut state = self.state.lock();
        while state.alone || state.closed > 0 || qpn.is_some_and(|qpn| state.closed_qps.contains_key(&qpn)) {
            self.changed.wait(&mut state);
        }
        state.inside += 1;
        if let Some(qpn) = qpn {
            *state.inside_qps.entry(qpn).or_default() += 1;
        }
        Pass { gate: self, qpn }
    }

    /// Waits until it is open for all and nobody is inside; until the answer is dropped it cannot be closed, and nobody enters.
    pub fn alone(&self) -> Alone<'_> {
        let mut state = self.state.lock();
        while state.alone || state.is_closed() {
            self.changed.wait(&mut state);
        }
        state.alone = true;
        while state.inside > 0 {
            self.changed.wait(&mut state);
        }
        Alone { gate: self }
    }

    /// Closes it for all and waits for those inside.
    pub fn close(&self) {
        let mut state = self.state.lock();
        while state.alone {
            self.changed.wait(&mut state);
        }
        state.closed += 1;
        while state.inside > 0 {
            self.changed.wait(&mut state);
        }
    }

    /// Takes one [`Self::close`] back.
    pub fn open(&self) {
        let mut state = self.state.lock();
        state.closed = state.closed.saturating_sub(1);
        self.changed.notify_all();
    }

    /// Closes it for one queue pair and waits for those inside that change it.
    pub fn close_qp(&self, qpn: u32) {
        let mut state = self.state.lock();
        while state.alone {
            self.changed.wait(&mut state);
        }
        *state.closed_qps.entry(qpn).or_default() += 1;
        while state.inside_qps.contains_key(&qpn) {
            self.changed.wait(&mut state);
        }
    }

    /// Takes one [`Self::close_qp`] back.
    pub fn open_qp(&self, qpn: u32) {
        let mut state = self.state.lock();
        decrement(&mut state.closed_qps, qpn);
        self.changed.notify_all();
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        let mut state = self.gate.state.lock();
        state.inside -= 1;
        if let Some(qpn) = self.qpn {
            decrement(&mut state.inside_qps, qpn);
        }
        if state.alone || state.is_closed() {
            self.gate.changed.notify_all();
        }
    }
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        self.gate.state.lock().alone = false;
        self.gate.changed.notify_all();
    }
}

fn decrement(counts: &mut HashMap<u32, usize>, qpn: u32) {
    if let Some(count) = counts.get_mut(&qpn) {
        *count -= 1;
        if *count == 0 {
            counts.remove(&qpn);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::thread;

    #[test]
    fn a_closed_gate_waits_for_who_is_inside_and_lets_nobody_in() {
        let gate = ControlGate::default();
        let pass = gate.enter();
        let (done, events) = mpsc::channel();
        thread::scope(|scope| {
            let closer = done.clone();
            let gate = &gate;
            scope.spawn(move || {
                gate.close();
                closer.send("closed").unwrap();
            });
            assert!(events.try_recv().is_err());
            drop(pass);
            assert_eq!(events.recv().unwrap(), "closed");
            scope.spawn(move || {
                let _pass = gate.enter();
                done.send("entered").unwrap();
            });
            assert!(events.try_recv().is_err());
            gate.open();
            assert_eq!(events.recv().unwrap(), "entered");
        });
    }

    #[test]
    fn one_queue_pair_can_be_closed_without_the_others() {
        let gate = ControlGate::default();
        gate.close_qp(5);
        drop(gate.enter_qp(6));
        drop(gate.enter());
        gate.close_qp(5);
        gate.open_qp(5);
        let (done, events) = mpsc::channel();
        thread::scope(|scope| {
            let gate = &gate;
            scope.spawn(move || {
                let _pass = gate.enter_qp(5);
                done.send(()).unwrap();
            });
            assert!(events.try_recv().is_err());
            gate.open_qp(5);
            events.recv().unwrap();
        });
    }

    #[test]
    fn who_is_alone_waits_for_all_others_and_keeps_them_out() {
        let gate = ControlGate::default();
        let pass = gate.enter();
        gate.close_qp(5);
        let (done, events) = mpsc::channel();
        thread::scope(|scope| {
            let gate = &gate;
            let sender = done.clone();
            let alone = scope.spawn(move || {
                let alone = gate.alone();
                sender.send("alone").unwrap();
                alone
            });
            assert!(events.try_recv().is_err());
            gate.open_qp(5);
            assert!(events.try_recv().is_err());
            drop(pass);
            assert_eq!(events.recv().unwrap(), "alone");
            let alone = alone.join().unwrap();
            let sender = done.clone();
            scope.spawn(move || {
                gate.close();
                sender.send("closed").unwrap();
                gate.open();
                drop(gate.enter());
                sender.send("entered").unwrap();
            });
            assert!(events.try_recv().is_err());
            drop(alone);
            assert_eq!(events.recv().unwrap(), "closed");
            assert_eq!(events.recv().unwrap(), "entered");
        });
    }
}
