//! Children of `fork` have copies of their own.

mod support;

use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use rustix::mm::Advice;
use support::{Region, adopt, mapping_of, mem_dir, page, shape};
use verbatim_adopt::{Adopter, Backing, Options};

static ADOPTER: OnceLock<Adopter> = OnceLock::new();

extern "C" fn before() {
    ADOPTER.get().unwrap().before_fork();
}
extern "C" fn parent() {
    ADOPTER.get().unwrap().after_fork_parent();
}
extern "C" fn child() {
    ADOPTER.get().unwrap().after_fork_child();
}

/// Runs `body` in a child; whether it was content.
fn in_child(body: impl FnOnce() -> bool) -> impl FnOnce() {
    // SAFETY: the child runs `body` only, which touches the test's memory and makes system calls.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let good = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or(false);
        // SAFETY: ends the child without the harness's exit handlers.
        unsafe { libc::_exit(i32::from(!good)) };
    }
    assert!(pid > 0);
    move || {
        let mut status = 0;
        // SAFETY: waits for the child made above.
        let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
        assert_eq!(waited, pid);
        assert_eq!(status, 0, "the child was not content");
    }
}

fn load(region: &Region, index: usize) -> u64 {
    region.word(index * page()).load(Ordering::SeqCst)
}

fn store(region: &Region, index: usize, value: u64) {
    region.word(index * page()).store(value, Ordering::SeqCst);
}

/// A child that is made without libc's `fork` cannot write to its parent's pages, before and after others that can.
fn no_child_shares(region: &Region, shared: &Region) {
    for _ in 0..2 {
        assert!(
            mapping_of(region.address()).1.contains("dc"),
            "the kernel gives it to no child"
        );
        let writes = |region: &Region| {
            // SAFETY: the child does nothing but write to memory, and ends. It runs on this stack, which is the process's own.
            let pid = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
            if pid == 0 {
                store(region, 0, 777);
                // SAFETY: ends the child.
                unsafe { libc::_exit(0) };
            }
            let mut status = 0;
            // SAFETY: waits for the child made above.
            let waited = unsafe { libc::waitpid(pid as i32, &raw mut status, 0) };
            assert_eq!(waited, pid as i32);
            status
        };
        assert_eq!(
            writes(shared),
            0,
            "what is the program's own way to share is shared"
        );
        assert_eq!(load(shared, 0), 777);
        store(shared, 0, 0);
        let status = writes(region);
        region.check_numbers(0);
        assert!(
            libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV,
            "{status}"
        );
        in_child(|| load(region, 4) == 4)();
    }
}

#[test]
fn the_child_has_a_copy_and_adopts_for_itself() {
    let dir = mem_dir();
    let adopter = ADOPTER.get_or_init(|| Adopter::new(dir.path()).unwrap());
    adopter.set_options(Options {
        user_mode: true,
        ..Options::default()
    });
    // SAFETY: the handlers may run at any fork of this process from now on.
    let registered = unsafe { libc::pthread_atfork(Some(before), Some(parent), Some(child)) };
    assert_eq!(registered, 0);

    let region = Region::new(1000);
    region.number(0);
    let absent = Region::new(2);
    // SAFETY: changes no content.
    unsafe { rustix::mm::madvise(absent.pointer(0).cast(), absent.length(), Advice::LinuxDontFork) }.unwrap();
    let adoption = adopt(adopter, region.pages(0..1000));
    let _absent = adopt(adopter, absent.pages(0..2));
    let heap = vec![9u8; 50_000];
    let heap_adoption = adopter.adopt(heap.as_ptr().addr(), heap.len()).unwrap();
    assert!(
        heap_adoption
            .segments
            .iter()
            .any(|(_, backing)| *backing != Backing::Process)
    );
    let shared = Region::with(1, rustix::mm::MapFlags::SHARED);
    no_child_shares(&region, &shared);

    let done = in_child(|| {
        while load(&shared, 0) == 0 {
            std::thread::yield_now();
        }
        // What the parent wrote after the fork is not here.
        region.check_numbers(0);
        store(&region, 4, 444);
        let mine = adopt(adopter, region.pages(0..10));
        assert_eq!(shape(&mine, &region), [(0, 10, true)]);
        assert!(adopter.path().unwrap().ends_with(std::process::id().to_string()));
        assert_eq!(adopter.ranges().len(), 1);
        adopter.release(mine.token);
        // A grandchild has its own as well.
        in_child(|| load(&region, 4) == 444)();
        adopter.cleanup();
        load(&region, 4) == 444 && heap.iter().all(|byte| *byte == 9)
    });
    store(&region, 3, 333);
    store(&shared, 0, 1);
    done();
    assert_eq!(
        (load(&region, 3), load(&region, 4)),
        (333, 4),
        "and the parent does not see the child's"
    );
    let released = adopter.release(adoption.token);
    assert_eq!(released.returned_bytes, region.length() as u64, "{released:?}");
    assert_eq!((load(&region, 3), load(&region, 4)), (333, 4));
    assert!(
        !mapping_of(region.address()).1.contains("dc"),
        "children have it again"
    );
    assert_eq!(adopter.release(heap_adoption.token).kept_bytes, 0);

    // Tokens of the parent mean nothing in a child.
    let adoption = adopt(adopter, region.pages(0..10));
    let pieces = std::cell::Cell::new(Some(adoption));
    in_child(|| adopter.release(pieces.take().unwrap().token) == Default::default())();
    let released = adopter.release(pieces.take().unwrap().token);
    assert_eq!(released.returned_bytes, 10 * page() as u64);
    adopter.cleanup();
}
