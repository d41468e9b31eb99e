//! Two daemons at two RNICs, which run in threads of the test on loopback addresses.

#[allow(dead_code, reason = "each test file uses a part of it")]
mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use support::{Nic, pair};
use verbatim_far::{Connection, Device, Error, Options, QpClass};

const SOON: Duration = Duration::from_secs(20);

fn soon() -> Option<Instant> {
    Some(Instant::now() + SOON)
}

fn content(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[3]
    };
    (0..bytes).map(|_| next()).collect()
}

#[test]
fn what_is_written_is_there_and_can_be_read_back() {
    let (nics, mut one, other) = pair(Options {
        window_bytes: 256 << 10,
        ..Options::default()
    });
    const BYTES: usize = 3 << 20;
    const PIECE: usize = 100_000;
    let far = other.buffer(BYTES).unwrap();
    let (exposed, near, back) = (
        far.exposed(),
        one.buffer(BYTES).unwrap(),
        one.buffer(BYTES).unwrap(),
    );
    let wanted = content(1, BYTES);
    near.write(0, &wanted).unwrap();
    for offset in (0..BYTES).step_by(PIECE) {
        let (at, length) = (offset as u64, PIECE.min(BYTES - offset) as u64);
        one.write((&near, at), (&exposed, at), length, soon()).unwrap();
    }
    one.wait_for_all(soon()).unwrap();
    assert_eq!(one.done_bytes(), BYTES as u64);
    let mut seen = vec![0; BYTES];
    far.read(0, &mut seen).unwrap();
    assert!(seen == wanted, "the other side has what was written");
    for offset in (0..BYTES).step_by(PIECE).rev() {
        let (at, length) = (offset as u64, PIECE.min(BYTES - offset) as u64);
        one.read((&back, at), (&exposed, at), length, soon()).unwrap();
    }
    one.wait_for_all(soon()).unwrap();
    back.read(0, &mut seen).unwrap();
    assert!(seen == wanted, "what is read is what was written");
    drop(nics);
}

#[test]
fn what_is_done_says_the_oldest_first() {
    let (_nics, mut one, other) = pair(Options::default());
    let (far, near) = (other.buffer(1 << 20).unwrap(), one.buffer(1 << 20).unwrap());
    let exposed = far.exposed();
    let first = one.write((&near, 0), (&exposed, 0), 1 << 19, soon()).unwrap();
    let second = one.write((&near, 0), (&exposed, 1 << 19), 8, soon()).unwrap();
    assert!(first < second);
    one.wait(second, soon()).unwrap();
    assert!(one.is_done(first).unwrap());
}

#[test]
fn a_range_outside_of_a_buffer_is_refused_before_it_is_posted() {
    let (_nics, mut one, other) = pair(Options::default());
    let (far, near) = (other.buffer(4096).unwrap(), one.buffer(8192).unwrap());
    let exposed = far.exposed();
    for (local, remote, length) in [(0, 1, 4096), (4097, 0, 4096), (0, u64::MAX, 2)] {
        let error = one
            .write((&near, local), (&exposed, remote), length, soon())
            .unwrap_err();
        assert!(matches!(error, Error::Range { .. }), "{error}");
    }
    assert!(near.write(8190, &[0; 3]).is_err() && near.read(8190, &mut [0; 3]).is_err());
    // Nothing of it has reached the RNIC: the connection still works.
    one.write((&near, 0), (&exposed, 0), 4096, soon()).unwrap();
    one.wait_for_all(soon()).unwrap();
}

/// A file of so many bytes without a name.
fn file(content: &[u8]) -> std::fs::File {
    let file = rustix::fs::memfd_create("far", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let file = std::fs::File::from(file);
    std::os::unix::fs::FileExt::write_all_at(&file, content, 0).unwrap();
    file
}

#[test]
fn a_file_that_is_lent_is_read_in_place_and_not_written() {
    const BYTES: usize = 1 << 20;
    let (nics, mut one, other) = pair(Options::default());
    let wanted = content(3, BYTES);
    let file = file(&wanted);
    let copy = || file.try_clone().unwrap().into();
    assert!(other.lend(copy(), BYTES as u64 + 1).is_err() && other.lend(copy(), 0).is_err());
    let lent = other.lend(copy(), BYTES as u64).unwrap();
    let (exposed, near) = (lent.exposed(), one.buffer(BYTES).unwrap());
    let mut seen = vec![0; BYTES];
    one.read((&near, 0), (&exposed, 0), BYTES as u64, soon()).unwrap();
    one.wait_for_all(soon()).unwrap();
    near.read(0, &mut seen).unwrap();
    assert!(seen == wanted);
    // What changes in the file is what is read.
    std::os::unix::fs::FileExt::write_all_at(&file, &[9; 4096], 8192).unwrap();
    one.read((&near, 0), (&exposed, 8192), 4096, soon()).unwrap();
    one.wait_for_all(soon()).unwrap();
    near.read(0, &mut seen[..4096]).unwrap();
    assert_eq!(seen[..4096], [9; 4096]);
    one.write((&near, 0), (&exposed, 0), 4096, soon()).unwrap();
    let error = one.wait_for_all(soon()).unwrap_err();
    assert!(error.to_string().contains("remote access error"), "{error}");
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut seen[..4096], 0).unwrap();
    assert_eq!(seen[..4096], wanted[..4096]);
    drop((lent, nics));
}

#[test]
fn a_buffer_of_another_connection_cannot_be_reached() {
    let (nics, mut one, other) = pair(Options::default());
    let (_, elsewhere) = nics.connect(Options::default());
    let near = one.buffer(4096).unwrap();
    near.write(0, &[7; 4096]).unwrap();
    let foreign = elsewhere.buffer(4096).unwrap();
    one.write((&near, 0), (&foreign.exposed(), 0), 4096, soon())
        .unwrap();
    let error = one.wait_for_all(soon()).unwrap_err();
    assert!(error.to_string().contains("remote access error"), "{error}");
    let mut seen = [1; 4096];
    foreign.read(0, &mut seen).unwrap();
    assert_eq!(seen, [0; 4096]);
    drop(other);
}

#[test]
fn a_buffer_that_was_taken_back_cannot_be_written_any_more() {
    let (_nics, mut one, other) = pair(Options::default());
    let (far, near) = (other.buffer(4096).unwrap(), one.buffer(4096).unwrap());
    let exposed = far.exposed();
    drop(far);
    one.write((&near, 0), (&exposed, 0), 8, soon()).unwrap();
    let error = one.wait_for_all(soon()).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Failed {
                request: "a WRITE",
                bytes: 8,
                ..
            }
        ),
        "{error}"
    );
    // It says so again, and nobody waits for what will never be done.
    let again = one.wait_for_all(None).unwrap_err();
    assert_eq!(again.to_string(), error.to_string());
    assert!(one.write((&near, 0), (&exposed, 0), 8, None).is_err());
}

#[test]
fn nothing_lands_after_a_connection_is_dropped() {
    const BYTES: usize = 8 << 20;
    for reads in [true, false] {
        let (nics, mut one, other) = pair(Options {
            window_bytes: u64::MAX,
            ..Options::default()
        });
        let (far, near) = (other.buffer(BYTES).unwrap(), one.buffer(BYTES).unwrap());
        let exposed = far.exposed();
        let (from, to) = if reads { (&far, &near) } else { (&near, &far) };
        from.write(0, &content(2, BYTES)).unwrap();
        for offset in (0..BYTES as u64).step_by(1 << 20) {
            let (local, remote) = ((&near, offset), (&exposed, offset));
            let posted = match reads {
                true => one.read(local, remote, 1 << 20, soon()),
                false => one.write(local, remote, 1 << 20, soon()),
            };
            posted.unwrap();
        }
        // The side whose memory is written lets go first.
        let rest = match reads {
            true => {
                drop(one);
                other
            }
            false => {
                drop(other);
                one
            }
        };
        let mut then = vec![0; BYTES];
        to.read(0, &mut then).unwrap();
        // All that was under way before this has left both RNICs.
        let (mut again, there) = nics.connect(Options::default());
        let (a, b) = (again.buffer(BYTES).unwrap(), there.buffer(BYTES).unwrap());
        let exposed = b.exposed();
        again.write((&a, 0), (&exposed, 0), BYTES as u64, soon()).unwrap();
        again.read((&a, 0), (&exposed, 0), BYTES as u64, soon()).unwrap();
        again.wait_for_all(soon()).unwrap();
        let mut now = vec![0; BYTES];
        to.read(0, &mut now).unwrap();
        assert!(then == now, "reads: {reads}");
        drop(rest);
    }
}

#[test]
fn a_deadline_ends_the_wait_and_says_how_far_it_came() {
    let nics = support::Nics::start();
    // Of a connection whose other end never answers.
    let (mut one, other) = nics.unconnected(Options::default());
    let mut end = other.end();
    end.qpn = 0xABCDE;
    one.connect(&end).unwrap();
    let (far, near) = (other.buffer(4096).unwrap(), one.buffer(4096).unwrap());
    one.write((&near, 0), (&far.exposed(), 0), 8, soon()).unwrap();
    let deadline = Instant::now() + Duration::from_millis(50);
    let error = one.wait_for_all(Some(deadline)).unwrap_err();
    assert!(matches!(error, Error::Late { done: 0, posted: 1 }), "{error}");
    assert!(Instant::now() >= deadline);
}

#[test]
fn a_wait_is_cancelled_by_another_thread() {
    let nics = support::Nics::start();
    let (mut one, other) = nics.unconnected(Options::default());
    let mut end = other.end();
    end.qpn = 0xABCDE;
    one.connect(&end).unwrap();
    let (far, near) = (other.buffer(4096).unwrap(), one.buffer(4096).unwrap());
    let exposed = far.exposed();
    one.write((&near, 0), (&exposed, 0), 8, soon()).unwrap();
    let canceller = one.canceller();
    let (waits, waiting) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        waits.send(()).unwrap();
        let error = one.wait_for_all(None).unwrap_err();
        let after = one.write((&near, 0), (&exposed, 0), 8, None).unwrap_err();
        (error, after)
    });
    waiting.recv().unwrap();
    canceller.cancel();
    let (error, after) = thread.join().unwrap();
    assert!(matches!(error, Error::Cancelled), "{error}");
    assert!(
        matches!(after, Error::Cancelled),
        "what is cancelled stays so: {after}"
    );
}

#[test]
fn an_rnic_that_goes_ends_the_wait() {
    let here = Nic::start();
    let there = Nic::start();
    let (near, far) = (
        Device::open(here.path()).unwrap(),
        Device::open(there.path()).unwrap(),
    );
    let (mut one, mut other) = (
        near.connection(Options::default()).unwrap(),
        far.connection(Options::default()).unwrap(),
    );
    let mut end = other.end();
    end.qpn = 0xABCDE;
    one.connect(&end).unwrap();
    other.connect(&one.end()).unwrap();
    let (buffer, exposed) = (one.buffer(4096).unwrap(), other.buffer(4096).unwrap().exposed());
    one.write((&buffer, 0), (&exposed, 0), 8, soon()).unwrap();
    let (waits, waiting) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        waits.send(()).unwrap();
        one.wait_for_all(soon())
    });
    waiting.recv().unwrap();
    drop(here);
    let error = thread.join().unwrap().unwrap_err();
    assert!(matches!(error, Error::Failed { .. }), "{error}");
    assert!(near.is_gone());
    assert!(near.connection(Options::default()).is_err());
}

#[test]
fn memory_that_a_second_connection_shares_keeps_its_content_and_is_reached_by_that_one_only() {
    let (nics, mut one, other) = pair(Options::default());
    const BYTES: usize = 1 << 20;
    let (far, near) = (
        other.locked_buffer(BYTES).unwrap(),
        one.locked_buffer(BYTES).unwrap(),
    );
    let wanted = content(4, BYTES);
    near.write(0, &wanted).unwrap();
    one.write((&near, 0), (&far.exposed(), 0), BYTES as u64, soon())
        .unwrap();
    one.wait_for_all(soon()).unwrap();
    drop(other);
    let (mut again, there) = nics.connect(Options::default());
    let shared = there.share(&far).unwrap();
    let old = far.exposed();
    drop(far);
    let back = again.buffer(BYTES).unwrap();
    again
        .read((&back, 0), (&shared.exposed(), 0), BYTES as u64, soon())
        .unwrap();
    again.wait_for_all(soon()).unwrap();
    let mut seen = vec![0; BYTES];
    back.read(0, &mut seen).unwrap();
    assert!(seen == wanted);
    // The first connection has no other end any more, and its key is worth nothing.
    again.read((&back, 0), (&old, 0), 8, soon()).unwrap();
    assert!(again.wait_for_all(soon()).is_err());
}

#[test]
fn who_waits_for_other_things_too_is_told_of_each_completion() {
    let (_nics, mut one, other) = pair(Options::default());
    let (far, near) = (other.buffer(1 << 16).unwrap(), one.buffer(1 << 16).unwrap());
    let exposed = far.exposed();
    for _ in 0..200 {
        one.progress().unwrap();
        assert!(one.has_room(4096));
        let ticket = one.write((&near, 0), (&exposed, 0), 4096, soon()).unwrap();
        while one.progress().unwrap() < ticket {
            let mut fds = [PollFd::from_borrowed_fd(one.events(), PollFlags::IN)];
            let limit = Timespec::try_from(SOON).unwrap();
            let ready = rustix::event::poll(&mut fds, Some(&limit)).unwrap();
            assert_eq!(ready, 1, "a completion without an event");
        }
    }
}

#[test]
fn both_ends_may_be_active_at_once() {
    let (_nics, one, other) = pair(Options {
        class: QpClass::User,
        window_bytes: 64 << 10,
        window_requests: 3,
    });
    let run = |mut connection: Connection, seed: u64, peer: verbatim_far::Exposed, half: u64| {
        std::thread::spawn(move || {
            let near = connection.buffer(1 << 20).unwrap();
            for round in 0..20 {
                let wanted = content(seed + round, 1 << 18);
                near.write(0, &wanted).unwrap();
                for piece in 0..8 {
                    let at = piece << 15;
                    let remote = (&peer, half + at);
                    connection.write((&near, at), remote, 1 << 15, soon()).unwrap();
                }
                let read = connection
                    .read((&near, 1 << 19), (&peer, half), 1 << 18, soon())
                    .unwrap();
                connection.wait(read, soon()).unwrap();
                let mut seen = vec![0; 1 << 18];
                near.read(1 << 19, &mut seen).unwrap();
                assert!(seen == wanted, "round {round}: a READ sees the WRITEs before it");
            }
            connection
        })
    };
    let (a, b) = (one.buffer(1 << 20).unwrap(), other.buffer(1 << 20).unwrap());
    let threads = [
        run(one, 100, b.exposed(), 0),
        run(other, 900, a.exposed(), 1 << 19),
    ];
    let ends: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    drop(ends);
    drop((Arc::clone(&a), Arc::clone(&b)));
}

#[test]
fn in_the_background_all_arrives_while_a_user_streams() {
    let nics = support::Nics::start();
    let (mut user, user_to) = nics.connect(Options::default());
    let (mut behind, behind_to) = nics.connect(Options {
        class: QpClass::Background,
        ..Options::default()
    });
    assert_eq!((behind.yields(), user.yields()), (support::has_classes(), false));
    let stop = std::sync::atomic::AtomicBool::new(false);
    const BYTES: usize = 1 << 20;
    let (near, far) = (behind.buffer(BYTES).unwrap(), behind_to.buffer(BYTES).unwrap());
    let exposed = far.exposed();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (near, far) = (user.buffer(BYTES).unwrap(), user_to.buffer(BYTES).unwrap());
            let exposed = far.exposed();
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                user.write((&near, 0), (&exposed, 0), BYTES as u64, soon())
                    .unwrap();
            }
            user.wait_for_all(soon()).unwrap();
        });
        let wanted = content(3, BYTES);
        near.write(0, &wanted).unwrap();
        behind
            .write((&near, 0), (&exposed, 0), BYTES as u64, soon())
            .unwrap();
        let all = behind.wait_for_all(soon());
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        all.unwrap();
        let mut seen = vec![0; BYTES];
        far.read(0, &mut seen).unwrap();
        assert!(seen == wanted);
    });
}

#[test]
fn a_host_without_an_rnic_is_told_what_to_do() {
    let empty = tempfile::tempdir().unwrap();
    let error = Device::open(empty.path()).unwrap_err().to_string();
    assert!(error.contains("verbatim nic"), "{error}");
}
