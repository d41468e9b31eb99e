//! The destination's process, and the ends of sidecar writes.

use verbatim_mirror::decision::{Answer, Ask, Here, Offer, Role, Sidecar, Verdict, answer, prepare};
use verbatim_mirror::trust::failed;
use verbatim_mirror::{Event, Receiver, Task};

use super::disk::Io;
use super::host::{For, Purpose, Stage, Writing};
use super::network::{Letter, Name, ToDestination, ToSource};
use super::{Quirk, World};

impl World {
    pub(super) fn arrives(&mut self, index: usize, message: ToDestination) {
        let Some(connection) = &self.connections[index] else {
            return;
        };
        let (host, line) = (connection.to, connection.line);
        let number = connection.to_process;
        if self.hosts[host]
            .process
            .as_ref()
            .is_none_or(|process| process.number != number)
        {
            return;
        }
        let mut tasks = Vec::new();
        let process = self.process_mut(host);
        match (message, line) {
            (ToDestination::Hello, _) => return self.offered(host, index),
            (ToDestination::Put { name, offset, values }, Some(line)) => {
                if let Some(arrival) = process.receiver.write(line, &mut tasks) {
                    process.arrivals.insert(arrival, (index, name));
                    process
                        .io
                        .push((For::Arrival(arrival), Io::write(offset, values)));
                }
            }
            (ToDestination::Flush { ticket }, Some(line)) => {
                if let Some(arrival) = process.receiver.flush(line, &mut tasks) {
                    process.arrivals.insert(arrival, (index, Name::Flush(ticket)));
                    let io = match self.has(Quirk::NoFlush) {
                        true => Io::read(0, 1),
                        false => Io::flush(),
                    };
                    self.process_mut(host).io.push((For::Arrival(arrival), io));
                }
            }
            (_, None) => {}
        }
        self.carry_out(host, tasks);
    }

    fn offered(&mut self, host: usize, index: usize) {
        let connection = self.connections[index].as_ref().expect("it is there");
        let source = self.hosts[connection.from].sidecar.clone().expect("it serves");
        let offer = Offer {
            id: source.id,
            session: connection.session,
            base: source.generation,
            length: source.length,
            from: connection.from.to_string(),
        };
        let here = self.hosts[host].sidecar.as_ref();
        if here.is_some_and(
            |here| matches!(here.role, Role::Incoming { session, .. } if session == offer.session),
        ) {
            return self.take(host, index);
        }
        let prepared = prepare(Here::from(here), &offer);
        let process = self.process_mut(host);
        match prepared {
            Ok(_) if process.writing.is_some() => self.answer_on(index, ToSource::Closed),
            Ok(sidecar) => {
                let purpose = Purpose::Prepare(index);
                process.writing = Some(Writing { sidecar, purpose });
            }
            Err(_) => self.answer_on(index, ToSource::Refused),
        }
    }

    /// Makes the connection the current one.
    fn take(&mut self, host: usize, index: usize) {
        let is_early = self.has(Quirk::EarlyWelcome);
        let Some(connection) = &self.connections[index] else {
            return;
        };
        let session = connection.session;
        let mut tasks = Vec::new();
        let process = self.process_mut(host);
        // In the session in which the disk has failed nothing counts; the next session writes everything
        // again.
        let goes_on = match process.receives == Some(session) {
            true => !process.receiver.is_poisoned(),
            false => process.receiver.renew(),
        };
        if !goes_on {
            return self.answer_on(index, ToSource::Refused);
        }
        if is_early {
            // Numbers go on, so that old arrivals are not mistaken for new ones.
            process.arrivals.clear();
            process.receiver = Receiver::default();
        }
        process.receives = Some(session);
        let line = process.receiver.connected(&mut tasks);
        if let Some(connection) = &mut self.connections[index] {
            connection.line = Some(line);
        }
        self.carry_out(host, tasks);
    }

    fn carry_out(&mut self, host: usize, tasks: Vec<Task>) {
        for task in tasks {
            match task {
                // The I/O has begun already.
                Task::Write(_) | Task::Flush(_) => {}
                Task::Suspect => self.process_mut(host).is_suspecting = true,
                Task::Welcome(line) => self.on_line(host, line, ToSource::Welcome),
                Task::Close(line) => self.on_line(host, line, ToSource::Closed),
                Task::Answer { arrival, is_good, .. } => {
                    if let Some((index, name)) = self.process_mut(host).arrivals.remove(&arrival) {
                        self.answer_on(index, ToSource::Done { name, is_good });
                    }
                }
            }
        }
    }

    fn on_line(&mut self, host: usize, line: verbatim_mirror::Line, message: ToSource) {
        let number = self.process(host).number;
        let index = self.connections.iter().rposition(|connection| {
            connection
                .as_ref()
                .is_some_and(|connection| connection.to_process == number && connection.line == Some(line))
        });
        if let Some(index) = index {
            self.answer_on(index, message);
        }
    }

    fn answer_on(&mut self, index: usize, message: ToSource) {
        if let Some(connection) = &mut self.connections[index] {
            connection.to_source.push(message);
        }
    }

    /// An I/O for the source has ended.
    pub(super) fn arrival_done(&mut self, host: usize, what: For, is_good: bool) {
        let For::Arrival(arrival) = what else {
            return;
        };
        let mut tasks = Vec::new();
        let process = self.process_mut(host);
        process.receiver.written(arrival, is_good, &mut tasks);
        process.receiver.flushed(arrival, is_good, &mut tasks);
        self.carry_out(host, tasks);
    }

    /// The note that the copy is suspect is durable.
    pub(super) fn suspect(&mut self, host: usize) {
        let place = &mut self.hosts[host];
        if let Some(suspect) = place.sidecar.as_ref().and_then(failed) {
            place.sidecar = Some(suspect);
        }
        let mut tasks = Vec::new();
        let process = self.process_mut(host);
        process.is_suspecting = false;
        process.receiver.suspected(&mut tasks);
        self.tell(|| format!("{host}: is suspect"));
        self.carry_out(host, tasks);
    }

    pub(super) fn asked(&mut self, from: usize, host: usize, ask: Ask) {
        let here = self.hosts[host].sidecar.clone();
        let Some(process) = &self.hosts[host].process else {
            return;
        };
        if process.writing.is_some() {
            return;
        }
        let is_complete = process.receives == Some(ask.session) && process.receiver.is_flushed();
        let verdict = answer(Here::from(here.as_ref()), &ask, is_complete);
        self.tell(|| format!("{host}: asked {ask:?}: {verdict:?}"));
        match verdict {
            Verdict::Say(answer) => self.letters.push(Letter::Answer {
                to: from,
                ask,
                answer,
            }),
            Verdict::Refuse => {}
            Verdict::WriteThenSay(sidecar, _) => {
                let process = self.process_mut(host);
                process.receiver.close();
                let is_commit = sidecar.may_serve();
                let purpose = Purpose::Answer(ask);
                process.writing = Some(Writing { sidecar, purpose });
                if is_commit && self.has(Quirk::CommitsBeforeDurable) {
                    self.committed(host, ask);
                }
            }
        }
    }

    fn committed(&mut self, host: usize, ask: Ask) {
        self.tally.commits += 1;
        let disk = &self.hosts[host].disk;
        let (visible, durable) = (disk.visible().to_vec(), disk.durable().to_vec());
        if let Err(what) = self.history.moved(&visible, &durable, false) {
            self.is_wrong(format!("{host} has the volume: {what}"));
        }
        self.hosts[host].has_lost_power = false;
        self.serve(host);
        self.letters.push(Letter::Answer {
            to: 1 - host,
            ask,
            answer: Answer::Committed,
        });
    }

    /// A sidecar is durable, or could not be written.
    pub(super) fn written(&mut self, host: usize, is_good: bool) {
        let Some(process) = &mut self.hosts[host].process else {
            return;
        };
        let Some(Writing { sidecar, purpose }) = process.writing.take() else {
            return;
        };
        self.tell(|| format!("{host}: writes {sidecar:?}: {is_good}"));
        if is_good || self.random_bool() {
            self.hosts[host].sidecar = Some(sidecar.clone());
        }
        if !is_good {
            self.tally.faults += 1;
            return self.not_written(host, sidecar, purpose);
        }
        let is_early = self.has(Quirk::CommitsBeforeDurable) && self.process(host).serves();
        let process = self.process_mut(host);
        match purpose {
            Purpose::Prepare(index) => self.take(host, index),
            Purpose::Deciding => process.stage = Stage::Asking,
            Purpose::Answer(_) if is_early => {}
            Purpose::Answer(ask) if sidecar.may_serve() => self.committed(host, ask),
            Purpose::Answer(ask) => {
                let (to, answer) = (1 - host, Answer::NotCommitted);
                self.letters.push(Letter::Answer { to, ask, answer });
            }
            Purpose::Decided => {
                process.stage = Stage::None;
                process.session = None;
                // The process was restarted in the middle of the decision: no tenant is held.
                if sidecar.may_serve() && process.engine.is_none() {
                    self.serve_again(host);
                }
            }
            Purpose::Undo => {
                process.stage = Stage::None;
                self.engine(host, Event::Release);
            }
        }
    }

    /// The sidecar may be durable or not. Sidecars are written until one is durable.
    fn not_written(&mut self, host: usize, sidecar: Sidecar, purpose: Purpose) {
        let releases_at_once = self.has(Quirk::ReleasesAtOnce);
        let process = self.process_mut(host);
        let again = match purpose {
            Purpose::Deciding if releases_at_once => {
                process.stage = Stage::None;
                return self.engine(host, Event::Release);
            }
            Purpose::Deciding => Writing {
                sidecar: sidecar.with(Role::Serving),
                purpose: Purpose::Undo,
            },
            _ => Writing { sidecar, purpose },
        };
        process.writing = Some(again);
    }
}
