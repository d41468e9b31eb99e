//! A file system that runs full, in a mount namespace of a thread of its own.

mod support;

use std::path::Path;
use std::sync::atomic::Ordering;

use rustix::fs::{SeekFrom, seek};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use support::{Region, adopt, adopter, mapping_of, page, shape};
use verbatim_adopt::{AdoptError, Adopter, Options};

/// Threads of the harness do not touch adopted memory.
const USER_MODE: Options = Options {
    full: true,
    user_mode: true,
    own_threads: 0,
};

/// Runs `body` with a tmpfs mounted on `at` that nobody else sees. False, with the reason, where that is not allowed.
fn with_tmpfs(at: &Path, size: &str, body: impl FnOnce() + Send) -> bool {
    std::thread::scope(|scope| {
        let mounted = move || -> rustix::io::Result<()> {
            // SAFETY: a mount namespace of its own for this thread is no matter of memory safety.
            unsafe { unshare_unsafe(UnshareFlags::NEWNS) }?;
            mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
            let options = std::ffi::CString::new(format!("size={size}")).unwrap();
            mount(
                "tmpfs",
                at,
                "tmpfs",
                MountFlags::empty(),
                Some(options.as_c_str()),
            )
        };
        let run = scope.spawn(move || match mounted() {
            Ok(()) => {
                body();
                true
            }
            Err(error) => {
                eprintln!("skipped: no mount namespace or tmpfs of its own: {error}");
                false
            }
        });
        run.join().unwrap()
    })
}

#[test]
fn a_full_tmpfs_is_an_error_and_never_a_signal() {
    let dir = tempfile::tempdir().unwrap();
    with_tmpfs(dir.path(), "256k", || {
        let adopter = adopter(&dir, USER_MODE);
        let small = Region::new(30);
        small.number(7);
        let adoption = adopt(&adopter, small.pages(0..30));
        let large = Region::new(100);
        large.number(100);
        let error = adopter.adopt(large.address(), large.length()).unwrap_err();
        assert!(matches!(error, AdoptError::Full { .. }), "{error}");
        assert_eq!(error.errno(), libc::ENOMEM);
        assert!(error.leaves_process_access());
        large.check_numbers(100);
        assert!(mapping_of(large.address()).0.contains("rw-p"));
        // What failed holds no space, and what is adopted but was never touched has its space for certain.
        let untouched = Region::new(30);
        let second = adopt(&adopter, untouched.pages(0..30));
        std::fs::write(dir.path().join("filler"), vec![1; 1 << 20]).unwrap_err();
        for index in 0..30 {
            untouched.word(index * page()).store(1, Ordering::Relaxed);
        }
        small.check_numbers(7);
        assert_eq!(adopter.release(adoption.token).kept_bytes, 0);
        assert_eq!(adopter.release(second.token).kept_bytes, 0);
        small.check_numbers(7);
    });
}

/// Memory that the file has, in pages.
fn file_pages(adopter: &Adopter) -> usize {
    let file = adopter.open_file().unwrap().expect("something is adopted");
    rustix::fs::fstat(file).unwrap().st_blocks as usize * 512 / page()
}

/// A hole would be allocated by the RNIC, for whoever writes there, and so outside of this process's cgroup.
fn check_that_all_pages_are_there(adopter: &Adopter) {
    let region = Region::new(10_000);
    region.word(5 * page()).store(1, Ordering::Relaxed);
    let adoption = adopt(adopter, region.pages(0..10_000));
    assert_eq!(file_pages(adopter), 10_000);
    let file = adopter.open_file().unwrap().unwrap();
    let data = seek(&file, SeekFrom::Data(0)).unwrap();
    let hole = seek(&file, SeekFrom::Hole(data)).unwrap();
    assert_eq!(hole - data, page() as u64, "untouched pages are no data");
    region.word(7000 * page()).store(2, Ordering::Relaxed);
    adopter.release(adoption.token);
    assert_eq!(region.word(5 * page()).load(Ordering::Relaxed), 1);
    assert_eq!(region.word(7000 * page()).load(Ordering::Relaxed), 2);
    assert_eq!(file_pages(adopter), 0);
}

#[test]
fn what_is_registered_has_all_of_its_pages_also_without_a_limit() {
    let dir = tempfile::tempdir().unwrap();
    with_tmpfs(dir.path(), "0", || {
        check_that_all_pages_are_there(&adopter(&dir, USER_MODE));
        assert_eq!(
            std::fs::read_dir(dir.path()).unwrap().count(),
            1,
            "the file's name"
        );
    });
}

#[test]
fn what_is_registered_has_all_of_its_pages_also_in_a_file_without_a_name() {
    let dir = tempfile::tempdir().unwrap();
    let adopter = Adopter::new(&dir.path().join("missing")).unwrap();
    adopter.set_options(USER_MODE);
    check_that_all_pages_are_there(&adopter);
    assert_eq!(adopter.path(), None);
}

/// Arguments of fallocate(2).
const OFFSET: u32 = 2;
const LENGTH: u32 = 3;

/// From now on this thread gets no pages for a file's content by a call of which that argument is at least so large, as if its cgroup
/// had none left.
fn refuse_pages(argument: u32, least: u32) {
    // Places in `struct seccomp_data`, where the lower half of an argument comes first.
    let call = 0;
    let place = |argument| 16 + 8 * argument;
    let step = |code: u32, on_true: u8, on_false: u8, k: u32| libc::sock_filter {
        code: code as u16,
        jt: on_true,
        jf: on_false,
        k,
    };
    let load = |at| step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, at);
    let jump = libc::BPF_JMP | libc::BPF_K;
    let end = libc::BPF_RET | libc::BPF_K;
    let mut steps = [
        load(call),
        step(jump | libc::BPF_JEQ, 0, 5, libc::SYS_fallocate as u32),
        load(place(1)),
        step(jump | libc::BPF_JSET, 3, 0, libc::FALLOC_FL_PUNCH_HOLE as u32),
        load(place(argument)),
        step(jump | libc::BPF_JGE, 0, 1, least),
        step(end, 0, 0, libc::SECCOMP_RET_ERRNO | libc::ENOMEM as u32),
        step(end, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog {
        len: steps.len() as u16,
        filter: steps.as_mut_ptr(),
    };
    // SAFETY: the program is there during the call; a call that it refuses is no matter of memory safety.
    let done = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program) == 0
    };
    assert!(done, "{}", std::io::Error::last_os_error());
}

#[test]
fn what_gets_no_pages_stays_with_the_process() {
    const PAGES: usize = 10_000;
    let dir = tempfile::tempdir().unwrap();
    let adopter = Adopter::new(&dir.path().join("missing")).unwrap();
    adopter.set_options(USER_MODE);
    let (chunk, refused) = (2 << 20, 4 << 20);
    let adopting = || {
        // Made here, it does not lie right above this thread's stack, next to which nothing moves.
        let region = Region::new(PAGES);
        region.number(3);
        refuse_pages(OFFSET, refused);
        let partly = adopt(&adopter, region.pages(0..PAGES));
        // The part in the file already is shared; the rest is refused from its first page on.
        refuse_pages(OFFSET, 0);
        let nothing = adopt(&adopter, region.pages(0..PAGES));
        (region, partly, nothing)
    };
    let (region, partly, nothing) =
        std::thread::scope(|scope| scope.spawn(adopting).join().expect("both were adopted"));
    let moved = file_pages(&adopter);
    let expected = refused as usize / page()..(refused as usize + chunk) / page();
    assert!(expected.contains(&moved), "{moved} pages");
    for adoption in [&partly, &nothing] {
        let expected = [(0, moved, true), (moved, PAGES - moved, false)];
        assert_eq!(shape(adoption, &region), expected);
    }
    region.check_numbers(3);
    region.number(4);
    adopter.release(partly.token);
    adopter.release(nothing.token);
    assert_eq!(file_pages(&adopter), 0);
    // Once there are pages again, all of it moves: no room is lost, and none is taken twice.
    let whole = adopt(&adopter, region.pages(0..PAGES));
    assert_eq!(shape(&whole, &region), [(0, PAGES, true)]);
    assert_eq!(file_pages(&adopter), PAGES);
    region.check_numbers(4);
}

/// A freezer or a stop that interrupts a call for pages undoes all of it: a long one may never come to an end.
#[test]
fn no_call_that_allocates_pages_is_long() {
    const PAGES: usize = 10_000;
    for size in ["1g", "0"] {
        let dir = tempfile::tempdir().unwrap();
        with_tmpfs(dir.path(), size, || {
            let adopter = adopter(&dir, USER_MODE);
            let region = Region::new(PAGES);
            refuse_pages(LENGTH, (2 << 20) + 1);
            let adoption = adopt(&adopter, region.pages(0..PAGES));
            assert_eq!(shape(&adoption, &region), [(0, PAGES, true)]);
            assert_eq!(file_pages(&adopter), PAGES);
        });
    }
}
