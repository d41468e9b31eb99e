//! The program in the container, and the peer that it talks to.
//!
//! It shows in a shared file what it sees: how far it has counted, how many answers it has got, the longest time for
//! which it did not run.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The port of the peer.
const PORT: u16 = 7000;

/// What the program shows of itself. All of it starts at zero.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Board {
    /// Counted up, all the time.
    pub ticks: AtomicU64,
    /// Numbers sent to the peer and received back, in order.
    pub echoes: AtomicU64,
    /// What went wrong with that: any error, any wrong number.
    pub errors: AtomicU64,
    /// The longest time between two ticks in ns, by the wall clock; the test sets it to zero before a move.
    pub longest_gap_ns: AtomicU64,
    /// The longest time from a number to its answer, likewise.
    pub longest_echo_ns: AtomicU64,
    /// Counted up by a child, if there is one.
    pub child_ticks: AtomicU64,
}

impl Board {
    /// Maps the file at `path`, which must be as long as a board at least.
    pub fn map(path: &std::path::Path) -> &'static Self {
        let file = std::fs::File::options()
            .read(true)
            .write(true)
            .open(path)
            .expect("the board exists");
        let length = std::mem::size_of::<Self>();
        assert!(file.metadata().expect("it is open").len() >= length as u64);
        // SAFETY: a fresh shared mapping of a file that is long enough and never truncated; it is never unmapped, all
        // of its fields are atomic, and any bit pattern is valid for them.
        unsafe {
            let flags = rustix::mm::MapFlags::SHARED;
            let protection = rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE;
            let address = rustix::mm::mmap(std::ptr::null_mut(), length, protection, flags, &file, 0);
            &*address.expect("a file on tmpfs can be mapped").cast()
        }
    }
}

/// The program: counts in one thread and talks to the peer in another.
pub fn run(peer: &str) -> ExitCode {
    let board = Board::map(std::path::Path::new("/run/verbatim/board"));
    let stream = TcpStream::connect((peer, PORT)).expect("the peer listens");
    stream.set_nodelay(true).expect("it is a TCP socket");
    std::thread::spawn(move || talk(stream, board));
    let mut last = wall_clock();
    loop {
        std::thread::sleep(Duration::from_micros(100));
        let now = wall_clock();
        board
            .longest_gap_ns
            .fetch_max(now.saturating_sub(last).as_nanos() as u64, SeqCst);
        last = now;
        board.ticks.fetch_add(1, SeqCst);
    }
}

fn talk(mut stream: TcpStream, board: &Board) {
    for number in 1u64.. {
        let mut answer = [0; 8];
        let sent = wall_clock();
        let echoed = stream
            .write_all(&number.to_ne_bytes())
            .and_then(|()| stream.read_exact(&mut answer));
        if echoed.is_err() || u64::from_ne_bytes(answer) != number {
            board.errors.fetch_add(1, SeqCst);
            return;
        }
        let waited = wall_clock().saturating_sub(sent).as_nanos() as u64;
        board.longest_echo_ns.fetch_max(waited, SeqCst);
        board.echoes.store(number, SeqCst);
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A program without a peer: two threads and a child that count as fast as they can, or with a pause in between; one of the threads
/// counts what goes through a TCP connection to itself. Each has a word of its own in the file, so that no lock hides one that stands
/// still.
pub fn count(pause: Duration) -> ExitCode {
    let board = Board::map(std::path::Path::new("/run/verbatim/board"));
    let mut child = std::process::Command::new("/run/verbatim/program")
        .args(["count-child", &pause.as_micros().to_string()])
        .spawn()
        .expect("the program starts itself");
    std::thread::spawn(move || count_bytes(board, pause));
    std::thread::spawn(move || count_up(&board.ticks, pause));
    let ended = child.wait();
    eprintln!("the child has ended: {ended:?}");
    ExitCode::FAILURE
}

/// The child of [`count`].
pub fn count_child(pause: Duration) -> ExitCode {
    let board = Board::map(std::path::Path::new("/run/verbatim/board"));
    count_up(&board.child_ticks, pause)
}

fn count_up(word: &AtomicU64, pause: Duration) -> ! {
    loop {
        word.fetch_add(1, SeqCst);
        if !pause.is_zero() {
            std::thread::sleep(pause);
        }
    }
}

/// Sends byte after byte through a connection, and counts them in `echoes` as long as they come as they were sent.
fn count_bytes(board: &Board, pause: Duration) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("the loopback interface is up");
    let address = listener.local_addr().expect("it is bound");
    let mut near = TcpStream::connect(address).expect("it listens");
    near.set_nodelay(true).expect("it is a TCP socket");
    let (mut far, _) = listener.accept().expect("it is connected");
    for byte in (0..=u8::MAX).cycle() {
        let mut came = [0];
        let passed = near
            .write_all(&[byte])
            .and_then(|()| read_when_let(&mut far, &mut came));
        if passed.is_err() || came != [byte] {
            eprintln!("byte {byte}: {passed:?}, {came:?}");
            board.errors.fetch_add(1, SeqCst);
            return;
        }
        board.echoes.fetch_add(1, SeqCst);
        std::thread::sleep(pause);
    }
}

/// Between the death of a CRIU that had not frozen the tasks and the end of the repair mode that it leaves, reading is forbidden.
fn read_when_let(stream: &mut TcpStream, byte: &mut [u8; 1]) -> std::io::Result<()> {
    loop {
        match stream.read_exact(byte) {
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {}
            result => return result,
        }
    }
}

/// The peer: sends back what it gets, on every connection.
pub fn serve(address: &str) -> ExitCode {
    let listener = TcpListener::bind((address, PORT)).expect("the address is ours");
    println!("listening");
    for stream in listener.incoming() {
        let mut stream = stream.expect("accept");
        std::thread::spawn(move || {
            let mut bytes = [0; 8];
            while stream.read_exact(&mut bytes).is_ok() && stream.write_all(&bytes).is_ok() {}
        });
    }
    ExitCode::SUCCESS
}

/// The wall clock goes on while a container is written down; the monotonic one does not, for CRIU gives the restored
/// tasks a time namespace.
fn wall_clock() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970")
}
