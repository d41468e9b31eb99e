//! Clients: requests come in, answers go out, and neither waits.

use std::collections::VecDeque;
use std::os::unix::net::UnixStream;

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use verbatim_lease::{Event, Extent, Failure, Op, SlotId};
use verbatim_volume::nbd::wire::{self, Command, REQUEST_BYTES, error, simple_reply};

use super::{CLIENTS, Disk, FOR_READS, InUse, SLOTS};
use crate::block::{PAGE_BYTES, SLOT_BYTES, SLOT_PAGES};
use crate::negotiation::MAX_REQUEST;

/// Slots of the longest request.
const PIECES: usize = MAX_REQUEST as usize / SLOT_BYTES + 1;

const INPUT_BYTES: usize = 64 << 10;
const OUTPUT_BYTES: usize = 256 << 10;

/// Data from this size on are received directly into their slot.
const DIRECT_BYTES: usize = 16 << 10;

/// Most answers that a client has not taken; beyond this number its requests are not read.
const MAX_READY: usize = 4 * SLOTS as usize;

pub type RequestId = u16;

/// A request of a client, in pieces of a slot each.
pub struct Request {
    client: usize,
    number: u64,
    cookie: u64,
    op: Op,
    bytes: usize,
    slots: [SlotId; PIECES],
    pieces: usize,
    /// Pieces without an answer.
    left: usize,
    error: u32,
}

#[derive(Debug, Clone, Copy)]
enum Ready {
    Request(RequestId),
    Error { cookie: u64, code: u32 },
}

/// A client's connection.
pub struct Client {
    stream: UnixStream,
    number: u64,
    is_kernel: bool,
    input: Box<[u8]>,
    from: usize,
    to: usize,
    /// The write whose data are being received, and the number of bytes received.
    taking: Option<(RequestId, usize)>,
    /// Bytes of data to discard.
    skip: usize,
    ready: VecDeque<Ready>,
    /// The answer that is partly in the output, and the number of its bytes there.
    current: Option<(RequestId, usize)>,
    output: Vec<u8>,
    sent: usize,
    /// The connection waits for slots, or for its client to take answers.
    is_held_up: bool,
    /// Events that are awaited at the socket.
    interest: EventFlags,
}

impl Client {
    pub fn is_held_up(&self) -> bool {
        self.is_held_up
    }

    /// The client is the kernel, for the device; it is connected whether the device is in use or not.
    pub fn is_kernel(&self) -> bool {
        self.is_kernel
    }
}

/// Next step of a client.
enum Step {
    /// There may be another request at once.
    Again,
    /// There is no request, or it has to wait.
    Wait,
    Gone,
}

impl Disk {
    /// Adds a client.
    pub(super) fn client(&mut self, stream: UnixStream, is_kernel: bool) {
        let Some(at) = self.clients.iter().position(Option::is_none) else {
            // The client sees the end of its connection.
            return;
        };
        if self.register(&stream, at as u64).is_err() {
            return;
        }
        self.client_numbers += 1;
        self.clients[at] = Some(Client {
            stream,
            number: self.client_numbers,
            is_kernel,
            input: vec![0; INPUT_BYTES].into(),
            from: 0,
            to: 0,
            taking: None,
            skip: 0,
            ready: VecDeque::with_capacity(MAX_READY + 1),
            current: None,
            output: Vec::with_capacity(OUTPUT_BYTES),
            sent: 0,
            is_held_up: false,
            interest: EventFlags::IN,
        });
    }

    /// Handles the requests that a client has sent.
    pub(super) fn serve(&mut self, at: usize) {
        if !self.listens() {
            // The client's requests wait in its socket.
            if let Some(client) = &mut self.clients[at] {
                client.is_held_up = true;
            }
            return;
        }
        loop {
            match self.step(at) {
                Step::Again => {}
                Step::Wait => return,
                Step::Gone => return self.gone(at),
            }
        }
    }

    /// Reads requests again of clients that had to wait.
    pub(super) fn listen_again(&mut self) {
        for at in 0..CLIENTS {
            if let Some(client) = &mut self.clients[at] {
                client.is_held_up = false;
                self.serve(at);
            }
        }
    }

    fn gone(&mut self, at: usize) {
        let Some(client) = self.clients[at].take() else {
            return;
        };
        let _ = epoll::delete(&self.epoll, &client.stream);
        // Requests that have begun end normally; others are dropped.
        if let Some((request, _)) = client.taking {
            let of = self.requests[usize::from(request)]
                .take()
                .expect("it is being taken");
            for slot in &of.slots[..of.pieces] {
                self.slots[usize::from(*slot)] = None;
                self.free.push(*slot);
            }
        }
        let ready = client.ready.iter().filter_map(|ready| match ready {
            Ready::Request(request) => Some(*request),
            Ready::Error { .. } => None,
        });
        let current = client.current.map(|(request, _)| request);
        for request in ready.chain(current).collect::<Vec<_>>() {
            self.sent(request);
        }
    }

    fn step(&mut self, at: usize) -> Step {
        let Some(client) = &mut self.clients[at] else {
            return Step::Wait;
        };
        let have = client.to - client.from;
        if client.skip > 0 && have > 0 {
            let part = client.skip.min(have);
            client.skip -= part;
            client.from += part;
            return Step::Again;
        }
        if let Some((request, taken)) = client.taking {
            return self.take_data(at, request, taken);
        }
        if client.skip == 0 && have >= REQUEST_BYTES {
            if client.ready.len() >= MAX_READY {
                client.is_held_up = true;
                return Step::Wait;
            }
            let head = client.input[client.from..][..REQUEST_BYTES]
                .try_into()
                .expect("so many");
            let Some(request) = wire::Request::parse(head) else {
                return Step::Gone;
            };
            return self.begin(at, &request);
        }
        client.input.copy_within(client.from..client.to, 0);
        (client.from, client.to) = (0, have);
        match rustix::net::recv(&client.stream, &mut client.input[have..], RecvFlags::DONTWAIT) {
            Ok((_, 0)) => Step::Gone,
            Ok((_, count)) => {
                client.to += count;
                Step::Again
            }
            Err(Errno::AGAIN | Errno::INTR) => Step::Wait,
            Err(_) => Step::Gone,
        }
    }

    /// Receives the data of a write into their slot.
    fn take_data(&mut self, at: usize, id: RequestId, taken: usize) -> Step {
        let request = self.requests[usize::from(id)]
            .as_ref()
            .expect("it is being taken");
        let (bytes, slot) = (request.bytes, request.slots[taken / SLOT_BYTES]);
        let within = taken % SLOT_BYTES;
        let wanted = (bytes - taken).min(SLOT_BYTES - within);
        let client = self.clients[at].as_mut().expect("it is served");
        let have = client.to - client.from;
        let block = std::sync::Arc::get_mut(&mut self.blocks[usize::from(slot)]);
        let block = &mut block.expect("nobody else has it").bytes_mut()[within..][..wanted];
        let count = if have > 0 {
            let count = have.min(wanted);
            block[..count].copy_from_slice(&client.input[client.from..][..count]);
            client.from += count;
            count
        } else if wanted >= DIRECT_BYTES {
            match rustix::net::recv(&client.stream, block, RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return Step::Gone,
                Ok((_, count)) => count,
                Err(Errno::AGAIN | Errno::INTR) => return Step::Wait,
                Err(_) => return Step::Gone,
            }
        } else {
            (client.from, client.to) = (0, 0);
            match rustix::net::recv(&client.stream, &mut client.input[..], RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return Step::Gone,
                Ok((_, count)) => client.to = count,
                Err(Errno::AGAIN | Errno::INTR) => return Step::Wait,
                Err(_) => return Step::Gone,
            }
            return Step::Again;
        };
        client.taking = Some((id, taken + count));
        if taken + count == bytes {
            client.taking = None;
            self.start(id);
        }
        Step::Again
    }

    /// Begins a request whose head is at the beginning of the input.
    fn begin(&mut self, at: usize, request: &wire::Request) -> Step {
        let (op, has_data) = match request.command {
            Command::Read => (Op::Read, false),
            Command::Write => (Op::Write, true),
            Command::Trim | Command::WriteZeroes => (Op::Zero, false),
            Command::Disconnect => return Step::Gone,
            Command::Flush => return self.refuse(at, request, false, 0),
            Command::Other(_) => return self.refuse(at, request, false, error::EINVAL),
        };
        if self.is_gone() {
            return self.refuse(at, request, has_data, error::ESHUTDOWN);
        }
        let length = u64::from(request.length);
        if has_data && request.length > MAX_REQUEST {
            return Step::Gone;
        }
        let is_too_long = op == Op::Read && request.length > MAX_REQUEST;
        let is_whole = request.offset.is_multiple_of(PAGE_BYTES) && length.is_multiple_of(PAGE_BYTES);
        let end = request.offset.checked_add(length);
        let is_within = end.is_some_and(|end| end <= self.settings.bytes);
        if is_too_long || !is_whole || !is_within {
            return self.refuse(at, request, has_data, error::EINVAL);
        }
        if length == 0 {
            return self.refuse(at, request, false, 0);
        }
        let extent = Extent {
            page: request.offset / PAGE_BYTES,
            count: length / PAGE_BYTES,
        };
        let pieces = match op {
            Op::Zero => 1,
            Op::Read | Op::Write => extent.count.div_ceil(SLOT_PAGES) as usize,
        };
        let reserve = if has_data { FOR_READS } else { 0 };
        let id = self.requests.iter().position(Option::is_none);
        let client = self.clients[at].as_mut().expect("it is served");
        let (Some(id), true) = (id, self.free.len() >= pieces + reserve) else {
            client.is_held_up = true;
            return Step::Wait;
        };
        client.is_held_up = false;
        client.from += REQUEST_BYTES;
        let mut slots = [0; PIECES];
        for (piece, slot) in slots[..pieces].iter_mut().enumerate() {
            *slot = self.free.pop().expect("there are enough");
            let page = extent.page + piece as u64 * SLOT_PAGES;
            let count = match op {
                Op::Zero => extent.count,
                Op::Read | Op::Write => SLOT_PAGES.min(extent.page + extent.count - page),
            };
            self.slots[usize::from(*slot)] = Some(InUse {
                extent: Extent { page, count },
                request: Some(id as RequestId),
                is_released: false,
                is_needed: op == Op::Read,
            });
        }
        self.requests[id] = Some(Request {
            client: at,
            number: client.number,
            cookie: request.cookie,
            op,
            bytes: if op == Op::Zero { 0 } else { length as usize },
            slots,
            pieces,
            left: pieces,
            error: 0,
        });
        match has_data {
            true => client.taking = Some((id as RequestId, 0)),
            false => self.start(id as RequestId),
        }
        Step::Again
    }

    /// Answers without carrying anything out.
    fn refuse(&mut self, at: usize, request: &wire::Request, has_data: bool, code: u32) -> Step {
        let client = self.clients[at].as_mut().expect("it is served");
        client.from += REQUEST_BYTES;
        client.is_held_up = false;
        client.skip = if has_data { request.length as usize } else { 0 };
        client.ready.push_back(Ready::Error {
            cookie: request.cookie,
            code,
        });
        self.counts.failed += u64::from(code != 0);
        Step::Again
    }

    fn start(&mut self, id: RequestId) {
        let request = self.requests[usize::from(id)].as_ref().expect("it was made");
        let (op, slots, pieces) = (request.op, request.slots, request.pieces);
        for slot in &slots[..pieces] {
            let (slot, extent) = (*slot, self.in_use(*slot).extent);
            self.event(Event::Request { slot, op, extent });
        }
    }

    /// The engine's answer for one slot.
    pub(super) fn piece_done(&mut self, slot: SlotId, result: Result<(), Failure>) {
        let id = self.in_use(slot).request.expect("a refill has no answer");
        let request = self.requests[usize::from(id)]
            .as_mut()
            .expect("it has no answer yet");
        request.left -= 1;
        match result {
            Ok(()) => {}
            Err(Failure::Errno(libc::ENOSPC)) => request.error = error::ENOSPC,
            Err(Failure::Lost | Failure::Errno(_)) => request.error = error::EIO,
        }
        if request.left > 0 {
            return;
        }
        let totals = &mut self.counts;
        match request.op {
            Op::Read => totals.reads += 1,
            Op::Write => totals.writes += 1,
            Op::Zero => totals.zeros += 1,
        }
        totals.failed += u64::from(request.error != 0);
        let client = self.clients[request.client].as_mut();
        match client.filter(|client| client.number == request.number) {
            Some(client) => client.ready.push_back(Ready::Request(id)),
            None => self.sent(id),
        }
    }

    /// The answer was sent, or its client has gone.
    fn sent(&mut self, id: RequestId) {
        let request = self.requests[usize::from(id)].take().expect("it was answered");
        if request.op != Op::Read {
            return;
        }
        for slot in &request.slots[..request.pieces] {
            self.in_use(*slot).is_needed = false;
            self.free_if_done(*slot);
        }
    }

    /// Sends a client's answers, as far as it takes them; returns whether any bytes were sent.
    pub(super) fn answer(&mut self, at: usize) -> bool {
        debug_assert!(at < CLIENTS);
        let mut has_sent = false;
        let is_open = loop {
            self.fill_output(at);
            let Some(client) = &mut self.clients[at] else {
                return false;
            };
            if client.output.is_empty() {
                break true;
            }
            let rest = &client.output[client.sent..];
            match rustix::net::send(&client.stream, rest, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(count) => {
                    client.sent += count;
                    has_sent = true;
                }
                Err(Errno::AGAIN) => break true,
                Err(Errno::INTR) => {}
                Err(_) => break false,
            }
            if client.sent == client.output.len() {
                client.output.clear();
                client.sent = 0;
            }
        };
        if !is_open {
            self.gone(at);
            return true;
        }
        let client = self.clients[at].as_mut().expect("it is open");
        let mut interest = EventFlags::empty();
        interest.set(EventFlags::IN, !client.is_held_up);
        interest.set(EventFlags::OUT, !client.output.is_empty());
        if interest != client.interest {
            client.interest = interest;
            let data = EventData::new_u64(at as u64);
            if epoll::modify(&self.epoll, &client.stream, data, interest).is_err() {
                self.gone(at);
            }
        }
        has_sent
    }

    fn fill_output(&mut self, at: usize) {
        loop {
            let Some(client) = &mut self.clients[at] else {
                return;
            };
            let room = OUTPUT_BYTES - client.output.len();
            let Some((id, done)) = client.current else {
                if room < 16 {
                    return;
                }
                match client.ready.pop_front() {
                    None => return,
                    Some(Ready::Error { cookie, code }) => client.output.extend(simple_reply(code, cookie)),
                    Some(Ready::Request(id)) => {
                        let request = self.requests[usize::from(id)].as_ref().expect("it was answered");
                        client.output.extend(simple_reply(request.error, request.cookie));
                        client.current = Some((id, 0));
                    }
                }
                continue;
            };
            let request = self.requests[usize::from(id)].as_ref().expect("it was answered");
            let bytes = match request.op {
                Op::Read if request.error == 0 => request.bytes,
                _ => 0,
            };
            if done == bytes {
                client.current = None;
                self.sent(id);
                continue;
            }
            if room == 0 {
                return;
            }
            let (slot, within) = (request.slots[done / SLOT_BYTES], done % SLOT_BYTES);
            let part = room.min(bytes - done).min(SLOT_BYTES - within);
            let block = &self.blocks[usize::from(slot)];
            client.output.extend(&block.bytes()[within..][..part]);
            client.current = Some((id, done + part));
        }
    }
}
