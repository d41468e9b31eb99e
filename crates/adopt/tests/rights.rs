//! A thread without privileges, as in a container: what it may use, and that a device sent by the agent helps.

mod support;

use std::os::fd::OwnedFd;
use std::sync::mpsc;

use support::{Region, adopt, adopter, mem_dir, page, shape};
use verbatim_adopt::Options;

const NOBODY: libc::uid_t = 65_534;

#[test]
fn a_device_from_the_agent_gives_full_rights() {
    // SAFETY: no preconditions.
    let root = unsafe { libc::geteuid() } == 0;
    let device = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/userfaultfd");
    let Some(device) = device.ok().filter(|_| root) else {
        eprintln!("skipped: needs root, to give up rights, and /dev/userfaultfd");
        return;
    };
    if std::fs::read("/proc/sys/vm/unprivileged_userfaultfd").is_ok_and(|mode| mode.trim_ascii() == b"1") {
        eprintln!("skipped: vm.unprivileged_userfaultfd gives everybody full rights");
        return;
    }
    let dir = mem_dir();
    let everybody = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    std::fs::set_permissions(dir.path(), everybody).unwrap();
    let (end, wait) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || wait.recv());
        // SAFETY: no preconditions. The system call, unlike the C function, changes the calling thread only.
        let changed = unsafe { libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY) };
        assert_eq!(changed, 0);
        let adopter = adopter(&dir, Options::default());
        let region = Region::new(20);
        region.number(5);
        let adopted = |shape_wanted: bool| {
            let adoption = adopt(&adopter, region.pages(0..20));
            assert_eq!(shape(&adoption, &region), [(0, 20, shape_wanted)]);
            let released = adopter.release(adoption.token);
            assert_eq!(
                released.returned_bytes,
                if shape_wanted { 20 * page() as u64 } else { 0 }
            );
            region.check_numbers(5);
        };
        adopted(false);
        adopter.set_userfaultfd_device(Some(OwnedFd::from(device)));
        adopted(true);
        adopter.close_files();
        adopted(false);
        adopter.set_options(Options {
            user_mode: true,
            ..Options::default()
        });
        adopted(true);
        // As if all other threads were known to sleep: nobody has to be kept out.
        adopter.set_options(Options {
            full: false,
            user_mode: false,
            own_threads: 100,
        });
        adopted(true);
        // A descriptor that the program closed and used for something else does no harm.
        let other = std::fs::File::open("/dev/null").unwrap();
        adopter.set_userfaultfd_device(Some(OwnedFd::from(other)));
        adopter.set_options(Options::default());
        adopted(false);
        drop(end);
    });
}
