//! A file system that runs full, in a mount namespace of a thread of its own.

mod support;

use std::path::Path;
use std::sync::atomic::Ordering;

use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use support::{Region, adopt, adopter, mapping_of, page};
use verbatim_adopt::{AdoptError, Options};

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
        let adopter = adopter(
            &dir,
            Options {
                user_mode: true,
                ..Options::default()
            },
        );
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

#[test]
fn a_tmpfs_without_a_limit_stays_sparse() {
    let dir = tempfile::tempdir().unwrap();
    with_tmpfs(dir.path(), "0", || {
        let adopter = adopter(
            &dir,
            Options {
                user_mode: true,
                ..Options::default()
            },
        );
        let region = Region::new(10_000);
        region.word(5 * page()).store(1, Ordering::Relaxed);
        let adoption = adopt(&adopter, region.pages(0..10_000));
        let file = std::fs::metadata(adopter.path().unwrap()).unwrap();
        let used_bytes = std::os::unix::fs::MetadataExt::blocks(&file) * 512;
        let strict = std::fs::read("/proc/sys/vm/overcommit_memory")
            .unwrap()
            .trim_ascii()
            == b"2";
        assert!(strict || used_bytes == page() as u64, "{used_bytes} bytes");
        region.word(7000 * page()).store(2, Ordering::Relaxed);
        adopter.release(adoption.token);
        assert_eq!(region.word(7000 * page()).load(Ordering::Relaxed), 2);
    });
}
