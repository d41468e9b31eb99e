//! The answers of a connection on their way to its client.
//!
//! The thread that has an answer sends it, and sends several together; no thread waits for a client that does
//! not read. Bytes that the socket does not take are left to the connection's writer.

use std::collections::VecDeque;
use std::os::unix::net::UnixStream;
use std::sync::{Condvar, Mutex, MutexGuard};

use rustix::net::SendFlags;

use super::wire;
use crate::room::{Held, Own, Room};

/// Data up to this size are copied behind others, so that one call sends many.
const SMALL: usize = 16 << 10;

/// Size from which on a piece takes no more answers.
const PIECE: usize = 128 << 10;

/// Bytes that are sent in one piece.
#[derive(Default)]
struct Piece {
    bytes: Vec<u8>,
    sent: usize,
    requests: usize,
    kib: usize,
    held: Vec<Held>,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Piece>,
    /// The reader has more to do at once: its answers, and others that come meanwhile, leave together.
    is_gathering: bool,
    /// The writer sends, or is about to.
    is_writing: bool,
    /// The client takes no more bytes.
    is_dead: bool,
    /// No further answers will come.
    is_over: bool,
    /// Threads that wait for `left`. Without one nobody is told: that is a system call for each answer.
    waiting: usize,
    room: Own,
}

/// Answers on their way to one client.
pub struct Outbox {
    stream: UnixStream,
    /// The volume's room for requests in flight.
    room: Room,
    state: Mutex<State>,
    /// The writer has something to do.
    write: Condvar,
    /// Answers have left.
    left: Condvar,
}

impl Outbox {
    /// An outbox of this client.
    pub fn new(stream: UnixStream, room: Room) -> Self {
        Self {
            stream,
            room,
            state: Mutex::default(),
            write: Condvar::new(),
            left: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under this lock")
    }

    /// Waits until answers have left.
    fn wait<'a>(&self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        state.waiting += 1;
        let mut state = self.left.wait(state).expect("no panic under this lock");
        state.waiting -= 1;
        state
    }

    /// Begins one more request, with this many KiB of data. Waits until there is room for it.
    pub fn begin(&self, kib: usize) -> Held {
        let mut state = self.lock();
        while !state.room.try_begin(kib) {
            state.is_gathering = false;
            self.send(&mut state);
            if state.room.try_begin(kib) {
                break;
            }
            state = self.wait(state);
        }
        if let Some(held) = self.room.try_begin(kib) {
            return held;
        }
        // Gathered answers hold room, too.
        state.is_gathering = false;
        self.send(&mut state);
        drop(state);
        self.room.begin_here(kib)
    }

    /// Ends a request with its answer. Does not wait for the client.
    pub fn answer(&self, cookie: u64, (kib, held): (usize, Held), result: Result<Vec<u8>, u32>) {
        let (code, data) = match result {
            Ok(data) => (0, data),
            Err(code) => (code, Vec::new()),
        };
        let head = wire::simple_reply(code, cookie);
        let mut state = self.lock();
        // The piece that the writer has taken is not in the queue.
        let is_first = state.queue.back().is_none_or(|last| last.bytes.len() >= PIECE);
        if is_first {
            state.queue.push_back(Piece::default());
        }
        let last = state.queue.back_mut().expect("one was added");
        last.requests += 1;
        last.bytes.extend(head);
        if data.len() <= SMALL {
            last.bytes.extend(&data);
            last.kib += kib;
            if kib > 0 {
                last.held.push(held);
            }
        } else {
            // The request counts until its data have left.
            last.requests -= 1;
            state.queue.push_back(Piece {
                bytes: data,
                sent: 0,
                requests: 1,
                kib,
                held: vec![held],
            });
        }
        if !state.is_gathering {
            self.send(&mut state);
        }
    }

    /// Gathers answers until [`Outbox::scatter`], or until there is no room for more.
    pub fn gather(&self) {
        self.lock().is_gathering = true;
    }

    /// Sends the gathered answers.
    pub fn scatter(&self) {
        let mut state = self.lock();
        state.is_gathering = false;
        self.send(&mut state);
    }

    /// Sends as much as the socket takes at once, and leaves the rest to the writer.
    fn send(&self, state: &mut State) {
        while let (false, Some(piece)) = (state.is_writing, state.queue.front_mut()) {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match rustix::net::send(&self.stream, &piece.bytes[piece.sent..], flags) {
                Ok(sent) => piece.sent += sent,
                Err(rustix::io::Errno::AGAIN) => {
                    state.is_writing = true;
                    self.write.notify_one();
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => state.is_dead = true,
            }
            self.has_left(state);
        }
    }

    /// Removes pieces at the head of the queue that were sent, or never will be.
    fn has_left(&self, state: &mut State) {
        while let Some(piece) = state.queue.front()
            && (state.is_dead || piece.sent == piece.bytes.len())
        {
            let (requests, kib) = (piece.requests, piece.kib);
            state.room.end(requests, kib);
            state.queue.pop_front();
            if state.waiting > 0 {
                self.left.notify_all();
            }
        }
    }

    /// Sends the bytes that the socket did not take at once, until the connection is over. Runs on a thread
    /// of its own.
    pub fn write(&self) {
        let mut state = self.lock();
        loop {
            while !state.is_writing {
                if state.is_over {
                    return;
                }
                state = self.write.wait(state).expect("no panic under this lock");
            }
            while let Some(mut piece) = state.queue.pop_front() {
                drop(state);
                let mut is_dead = false;
                while piece.sent < piece.bytes.len() && !is_dead {
                    match rustix::net::send(&self.stream, &piece.bytes[piece.sent..], SendFlags::NOSIGNAL) {
                        Ok(sent) => piece.sent += sent,
                        Err(rustix::io::Errno::INTR) => {}
                        Err(_) => is_dead = true,
                    }
                }
                state = self.lock();
                state.is_dead |= is_dead;
                state.queue.push_front(piece);
                self.has_left(&mut state);
            }
            state.is_writing = false;
        }
    }

    /// No requests will follow. Waits until all answers have left, and ends the writer.
    pub fn end(&self) {
        self.scatter();
        let mut state = self.lock();
        while state.room.requests() > 0 {
            state = self.wait(state);
        }
        state.is_over = true;
        self.write.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::time::Duration;

    use super::*;
    use crate::room::MAX_IN_FLIGHT;

    /// Some of the answers fit into no socket's buffer, and the client begins to read late.
    #[test]
    fn answers_leave_whole_and_in_order_however_slow_the_client_is() {
        let (near, mut far) = UnixStream::pair().expect("a pair");
        let outbox = Outbox::new(near, Room::new(std::sync::Arc::default()));
        let sizes = [0, 100, SMALL, SMALL + 1, 3 << 20, 7, 1 << 20, 0];
        std::thread::scope(|scope| {
            scope.spawn(|| outbox.write());
            scope.spawn(|| {
                for (cookie, size) in (0..).zip(sizes) {
                    let held = outbox.begin(size.div_ceil(1024));
                    if cookie == 1 {
                        outbox.gather();
                    }
                    outbox.answer(cookie, (size.div_ceil(1024), held), Ok(vec![cookie as u8; size]));
                }
                outbox.end();
            });
            for (cookie, size) in (0u64..).zip(sizes) {
                let mut head = [0; 16];
                far.read_exact(&mut head).expect("an answer");
                assert_eq!(head, wire::simple_reply(0, cookie));
                let mut data = vec![0; size];
                far.read_exact(&mut data).expect("its data");
                assert!(data.iter().all(|&byte| byte == cookie as u8), "{cookie}");
            }
        });
    }

    #[test]
    fn a_client_that_leaves_holds_nobody_up() {
        let (near, far) = UnixStream::pair().expect("a pair");
        let outbox = Outbox::new(near, Room::new(std::sync::Arc::default()));
        std::thread::scope(|scope| {
            scope.spawn(|| outbox.write());
            let held = outbox.begin(4096);
            outbox.answer(1, (4096, held), Ok(vec![0; 4 << 20]));
            let held = outbox.begin(0);
            far.set_read_timeout(Some(Duration::from_secs(1))).expect("set");
            drop(far);
            outbox.answer(2, (0, held), Ok(Vec::new()));
            outbox.end();
        });
    }

    #[test]
    fn no_more_is_begun_than_there_is_room_for() {
        let (near, mut far) = UnixStream::pair().expect("a pair");
        let outbox = Outbox::new(near, Room::new(std::sync::Arc::default()));
        for cookie in 0..MAX_IN_FLIGHT as u64 {
            let held = outbox.begin(0);
            if cookie == 0 {
                outbox.gather();
                outbox.answer(0, (0, held), Ok(Vec::new()));
            }
        }
        // Sending gathered answers makes room.
        outbox.begin(0);
        let mut head = [0; 16];
        far.read_exact(&mut head).expect("it was sent");
        assert_eq!(head, wire::simple_reply(0, 0));
        assert_eq!(outbox.lock().room.requests(), MAX_IN_FLIGHT);
    }
}
