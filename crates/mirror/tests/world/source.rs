//! The source's process, which carries out its engine's actions.

use verbatim_mirror::decision::{Answer, Ask, Role, SessionId, decided};
use verbatim_mirror::{Action, Event, Failure, Op, Report, RequestId, Standing};

use super::disk::Io;
use super::host::{Data, For, Purpose, Session, Stage, Writing};
use super::network::{Connection, Letter, Name, ToDestination, ToSource};
use super::{Quirk, World};

impl World {
    pub(super) fn engine(&mut self, host: usize, event: Event) {
        let now = self.now;
        self.tell(|| format!("{host}: {event:?}"));
        let mut actions = Vec::new();
        if let Some(engine) = &mut self.process_mut(host).engine {
            engine.handle(now, event, &mut actions);
        }
        for action in actions {
            self.tell(|| format!("{host}:     {action:?}"));
            self.act(host, action);
        }
    }

    fn act(&mut self, host: usize, action: Action) {
        let process = self.process_mut(host);
        match action {
            Action::Local { id } => {
                let io = match &process.requests[&id] {
                    Data::Read { extent, .. } => Io::read(extent.offset as usize, extent.length as usize),
                    Data::Write { extent, values } => Io::write(extent.offset as usize, values.clone()),
                    Data::Flush { .. } => Io::flush(),
                };
                process.io.push((For::Tenant(id), io));
            }
            Action::Mirror { id } => {
                let Data::Write { extent, values } = &process.requests[&id] else {
                    panic!("only changes are doubled");
                };
                let (offset, values) = (extent.offset as usize, values.clone());
                let name = Name::Request(id);
                self.send(host, ToDestination::Put { name, offset, values });
            }
            Action::Reply { id, result } => self.reply(host, id, result),
            Action::ReadChunk { ticket, extent } => {
                process.chunks.insert(ticket, (extent, Vec::new()));
                let (number, io) = (
                    process.engine_number,
                    Io::read(extent.offset as usize, extent.length as usize),
                );
                process.io.push((For::Chunk(number, ticket), io));
            }
            Action::SendChunk { ticket } => {
                let (extent, values) = process.chunks.remove(&ticket).expect("it was read");
                let (name, offset) = (Name::Chunk(ticket), extent.offset as usize);
                self.send(host, ToDestination::Put { name, offset, values });
            }
            Action::DropChunk { ticket } => {
                process.chunks.remove(&ticket);
            }
            Action::FlushMirror { ticket } => self.send(host, ToDestination::Flush { ticket }),
            Action::Disconnect => {
                if let Some(session) = &mut process.session {
                    session.connection = None;
                }
            }
            Action::Report(report) => self.report(host, report),
        }
    }

    fn send(&mut self, host: usize, message: ToDestination) {
        let connection = self.process(host).session.and_then(|session| session.connection);
        if let Some(Some(connection)) = connection.map(|index| &mut self.connections[index]) {
            connection.to_destination.push(message);
        }
    }

    fn reply(&mut self, host: usize, id: RequestId, result: Result<(), Failure>) {
        // A change may still have to be sent: its data stay.
        let process = self.process_mut(host);
        process.open.remove(&id);
        let data = process.requests[&id].clone();
        if result.is_err() {
            return;
        }
        self.tally.acknowledged += 1;
        match data {
            Data::Read {
                extent,
                promised,
                values,
            } => {
                if let Err(what) = self
                    .history
                    .check_read(extent.offset as usize, &values, &promised)
                {
                    self.is_wrong(format!("a read on {host}: {what}"));
                }
            }
            Data::Write { extent, values } => self.history.acknowledge(extent.offset as usize, &values),
            Data::Flush { promised } => self.history.flushed(&promised),
        }
    }

    fn report(&mut self, host: usize, report: Report) {
        let sidecar = self.hosts[host].sidecar.clone().expect("it serves");
        let process = self.process_mut(host);
        match report {
            Report::Mirrored => {
                if let Some(session) = &mut process.session {
                    session.is_mirrored = true;
                }
            }
            Report::HoldFailed(_) => {}
            Report::Ended(_) => process.session = None,
            Report::Held => {
                let session = process.session.expect("it is being moved");
                let role = Role::Deciding {
                    session: session.id,
                    to: session.to.to_string(),
                };
                process.stage = Stage::Writing;
                process.writing = Some(Writing {
                    sidecar: sidecar.with(role),
                    purpose: Purpose::Deciding,
                });
            }
        }
    }

    /// An operator orders a move.
    pub(super) fn migrate(&mut self, host: usize) {
        let id = SessionId(self.number().into());
        let process = self.process_mut(host);
        if process.session.is_some() || process.writing.is_some() || process.stage != Stage::None {
            return;
        }
        process.session = Some(Session {
            id,
            to: 1 - host,
            connection: None,
            peer: None,
            is_mirrored: false,
        });
        let bytes_per_second = None;
        self.engine(host, Event::Migrate { bytes_per_second });
    }

    /// The source calls the destination, if it has no connection.
    pub(super) fn connect(&mut self, host: usize) {
        let process = self.process(host);
        let standing = process.engine.as_ref().map(|engine| engine.standing());
        let (Some(session), Some(Standing::Serving)) = (process.session, standing) else {
            return;
        };
        let from_process = process.number;
        let Some(peer) = &self.hosts[session.to].process else {
            return;
        };
        if session.connection.is_some() {
            return;
        }
        let connection = Connection {
            session: session.id,
            from: host,
            from_process,
            to: session.to,
            to_process: peer.number,
            line: None,
            to_destination: vec![ToDestination::Hello],
            to_source: Vec::new(),
        };
        let index = self.connections.len();
        self.connections.push(Some(connection));
        let session = self.process_mut(host).session.as_mut().expect("it is there");
        session.connection = Some(index);
    }

    pub(super) fn comes_back(&mut self, index: usize, message: ToSource) {
        let Some(connection) = &self.connections[index] else {
            return;
        };
        let (host, number, peer) = (connection.from, connection.from_process, connection.to_process);
        let trusts = self.has(Quirk::TrustsRestarted);
        let Some(process) = &mut self.hosts[host].process else {
            return;
        };
        let Some(session) = &mut process.session else {
            return;
        };
        if process.number != number || session.connection != Some(index) {
            return;
        }
        match message {
            ToSource::Welcome => {
                let keeps = session.peer == Some(peer) || trusts && session.peer.is_some();
                session.peer = Some(peer);
                self.engine(host, Event::LinkUp { keeps });
            }
            ToSource::Done { name, is_good } => {
                let result = if is_good { Ok(()) } else { Err(Failure::Disk(5)) };
                let event = match name {
                    Name::Request(id) => Event::MirrorDone { id, result },
                    Name::Chunk(ticket) => Event::ChunkSent { ticket, result },
                    Name::Flush(ticket) => Event::MirrorFlushed { ticket, result },
                };
                self.engine(host, event);
            }
            ToSource::Refused => self.engine(host, Event::Cancel),
            ToSource::Closed => {
                session.connection = None;
                self.engine(host, Event::LinkDown);
            }
        }
    }

    /// A source that waits for the decision asks (again).
    pub(super) fn ask(&mut self, host: usize) {
        let Some(sidecar) = &self.hosts[host].sidecar else {
            return;
        };
        if let Role::Deciding { session, to } = &sidecar.role {
            let ask = Ask {
                id: sidecar.id,
                session: *session,
                base: sidecar.generation,
            };
            let to = to.parse().expect("a host");
            self.letters.push(Letter::Ask { from: host, to, ask });
        }
    }

    pub(super) fn answered(&mut self, host: usize, ask: Ask, answer: Answer) {
        let Some(sidecar) = self.hosts[host].sidecar.clone() else {
            return;
        };
        let is_meant = matches!(&sidecar.role, Role::Deciding { session, .. } if *session == ask.session);
        let Some(process) = &mut self.hosts[host].process else {
            return;
        };
        if !is_meant || process.stage != Stage::Asking || process.writing.is_some() {
            return;
        }
        let Some(next) = decided(&sidecar, answer) else {
            return;
        };
        process.stage = Stage::Writing;
        process.writing = Some(Writing {
            sidecar: next,
            purpose: Purpose::Decided,
        });
        // A tenant that is held here need not wait for the write.
        let event = match answer {
            Answer::Committed => Event::Moved,
            _ => Event::Release,
        };
        self.engine(host, event);
    }

    /// An I/O of the engine has ended.
    pub(super) fn local_done(&mut self, host: usize, what: For, io: Io, result: Result<(), Failure>) {
        let process = self.process_mut(host);
        match what {
            For::Tenant(id) => {
                if let Some(Data::Read { values, .. }) = process.requests.get_mut(&id) {
                    *values = io.values;
                }
                self.engine(host, Event::LocalDone { id, result });
            }
            For::Chunk(number, ticket) if number == process.engine_number => {
                if let Some((_, values)) = process.chunks.get_mut(&ticket) {
                    *values = io.values;
                }
                self.engine(host, Event::ChunkRead { ticket, result });
            }
            For::Chunk(..) | For::Arrival(_) => {}
        }
    }

    pub(super) fn issue(&mut self, host: usize) {
        let id = RequestId(self.number());
        let offset = self.random_cell();
        let length = self.random_length(offset);
        let extent = verbatim_mirror::Extent {
            offset: offset as u64,
            length: length as u64,
        };
        let is_held = !matches!(self.rules.which, super::Which::Ours);
        let overlaps = |data: &Data| match data {
            Data::Write { extent: other, .. } => other.overlaps(extent),
            _ => false,
        };
        let (data, op) = match self.roll(10) {
            0..6 => {
                let process = self.process(host);
                if is_held && process.open.iter().any(|id| overlaps(&process.requests[id])) {
                    return;
                }
                let values = self.history.issue(offset, length);
                (Data::Write { extent, values }, Op::Change(extent))
            }
            6..9 => {
                let promised = self.history.promised();
                let values = Vec::new();
                let read = Data::Read {
                    extent,
                    promised,
                    values,
                };
                (read, Op::Read)
            }
            _ => {
                let promised = self.history.promised();
                (Data::Flush { promised }, Op::Flush)
            }
        };
        self.tell(|| format!("{host}: tenant {id:?} {data:?}"));
        let process = self.process_mut(host);
        process.requests.insert(id, data);
        process.open.insert(id);
        self.engine(host, Event::Request { id, op });
    }
}
