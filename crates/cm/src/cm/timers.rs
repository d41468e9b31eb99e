//! What happens when nothing does.

use verbatim_roce::Time;

use super::Cm;
use crate::event::Event;
use crate::num::CommId;
use crate::state::State;
use crate::talk::Frame;

impl Cm {
    /// It is late enough for [`Cm::next_deadline`]. Calling it earlier does nothing.
    pub fn handle_timeout(&mut self, now: Time) {
        while let Some((due, id)) = self.table.first_timer()
            && due <= now
        {
            self.expired(now, id);
        }
    }

    fn expired(&mut self, now: Time, id: CommId) {
        let Some(talk) = self.table.talk(id) else {
            self.table.update(id, |entry| entry.deadline = None);
            return;
        };
        match talk.state {
            State::ReqSent
            | State::MraReqReceived
            | State::RepSent
            | State::MraRepReceived
            | State::DreqSent
            | State::SidrReqSent => {
                if talk.left == 0 {
                    self.unanswered(now, id, talk.state);
                } else {
                    self.send_again(now, id);
                }
            }
            State::TimeWait => {
                self.table.update_talk(id, |talk, deadline| {
                    talk.state = State::Closed;
                    *deadline = None;
                });
                self.tell(id, Event::TimeWaitExit);
                self.remove_if_left(id);
            }
            _ => {
                self.table.update(id, |entry| entry.deadline = None);
                self.remove_if_left(id);
            }
        }
    }

    fn remove_if_left(&mut self, id: CommId) {
        if self.table.get(id).is_some_and(|entry| entry.owner.is_none()) {
            self.table.remove(id);
        }
    }

    fn send_again(&mut self, now: Time, id: CommId) {
        let again = self.table.update_talk(id, |talk, deadline| {
            talk.left -= 1;
            *deadline = Some(now + talk.wait);
            (talk.path, talk.last.clone())
        });
        if let Some((path, Some(frame))) = again {
            self.counters.resent += 1;
            self.send(&path, &frame);
        }
    }

    /// The last repetition has not been answered either.
    fn unanswered(&mut self, now: Time, id: CommId, state: State) {
        match state {
            State::DreqSent => {
                self.wait_for_the_wire(now, id);
                let event = Event::Disconnected {
                    private_data: Vec::new(),
                    timed_out: true,
                };
                self.tell(id, event);
            }
            State::SidrReqSent => {
                self.close(now, id, None);
                self.tell(id, Event::Unreachable);
            }
            _ => {
                self.give_up(now, id);
                self.tell(id, Event::Unreachable);
            }
        }
        if self.table.get(id).is_some_and(|entry| entry.deadline.is_none()) {
            self.remove_if_left(id);
        }
    }

    /// Does not wait for the answer any more, and says so to the peer, which may have sent one.
    pub(super) fn give_up(&mut self, now: Time, id: CommId) {
        let Some((talk, conn)) = self
            .table
            .talk(id)
            .and_then(|talk| Some((talk, talk.connection.as_ref()?)))
        else {
            return;
        };
        let rej: Frame = (&talk.gives_up(id, conn)).into();
        let path = talk.path;
        self.close(now, id, Some(rej.clone()));
        self.send(&path, &rej);
    }

    /// An id is over. That of a request answers repetitions for a while (they would be new requests otherwise).
    pub(super) fn close(&mut self, now: Time, id: CommId, answer: Option<Frame>) {
        self.table.update_talk(id, |talk, deadline| {
            talk.state = State::Closed;
            let lingers = talk.passive;
            talk.last = answer.filter(|_| lingers);
            *deadline = lingers.then(|| now + talk.linger);
        });
    }

    /// A connection has ended: what is on the wire of it must be gone before its numbers are used again.
    pub(super) fn wait_for_the_wire(&mut self, now: Time, id: CommId) {
        self.table.update_talk(id, |talk, deadline| {
            talk.state = State::TimeWait;
            talk.last = None;
            *deadline = Some(now + talk.time_wait());
        });
    }
}
