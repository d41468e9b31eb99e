//! Files and sockets of a process are their owner's alone, whatever umask its starter had.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::Mode;

/// No umask.
const NONE: u32 = u32::MAX;

/// The one that this process was started with, once [`keep_private`] has changed it.
static FORMER: AtomicU32 = AtomicU32::new(NONE);

/// From here on nobody else has rights to what this process makes. Each long-running command begins with it.
///
/// What other users have to reach gets its mode where it is made.
pub fn keep_private() {
    let former = rustix::process::umask(Mode::RWXG | Mode::RWXO).bits();
    // A second call finds its own.
    let _ = FORMER.compare_exchange(NONE, former, Ordering::Relaxed, Ordering::Relaxed);
}

/// For `CommandExt::pre_exec`, before a program that makes files for others (runc, CRIU, and so a container): it has the umask that this process was
/// started with. The closure only makes a system call, so that it may be called between fork and exec.
pub fn given_back() -> impl FnMut() -> io::Result<()> + Send + Sync + 'static {
    let former = FORMER.load(Ordering::Relaxed);
    move || {
        if former != NONE {
            rustix::process::umask(Mode::from_raw_mode(former));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;
    use std::process::Command;

    use super::*;

    fn own() -> u32 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let umask = status.lines().find_map(|line| line.strip_prefix("Umask:"));
        u32::from_str_radix(umask.unwrap().trim(), 8).unwrap()
    }

    /// One test: the umask is the whole process's.
    #[test]
    fn files_are_private_and_children_get_what_was_there() {
        let folder = tempfile::tempdir().unwrap();
        rustix::process::umask(Mode::from_raw_mode(0o002));
        keep_private();
        keep_private();
        assert_eq!(own(), 0o077);
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o7777, 0o600);

        let mut shell = Command::new("sh");
        shell.args(["-c", "umask"]);
        let said = |shell: &mut Command| String::from_utf8(shell.output().unwrap().stdout).unwrap();
        assert_eq!(said(&mut shell).trim(), "0077");
        #[allow(unsafe_code)]
        // SAFETY: the closure only calls umask(2).
        unsafe {
            shell.pre_exec(given_back());
        }
        assert_eq!(said(&mut shell).trim(), "0002");
        assert_eq!(own(), 0o077);

        let open = folder.path().join("a/b");
        crate::folders::make_open(&open).unwrap();
        let mode = |path: &std::path::Path| path.metadata().unwrap().permissions().mode() & 0o7777;
        assert_eq!((mode(&folder.path().join("a")), mode(&open)), (0o755, 0o755));
        std::fs::set_permissions(&open, PermissionsExt::from_mode(0o777)).unwrap();
        crate::folders::make_open(&open).unwrap();
        assert_eq!(mode(&open), 0o777, "it is somebody else's");
        crate::folders::reachable(&open).unwrap();
        assert_eq!(mode(&open), 0o755);
        std::fs::set_permissions(&open, PermissionsExt::from_mode(0o710)).unwrap();
        crate::folders::reachable(&open).unwrap();
        assert_eq!(mode(&open), 0o710, "an operator may close it");
    }
}
