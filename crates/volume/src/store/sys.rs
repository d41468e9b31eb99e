//! System calls without a safe form in the libraries: the lock of a file, and its identity.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// `_IOR(0x15, 0, struct fsuuid2)`: of any file system, from Linux 6.9 on.
const FS_IOC_GETFSUUID: libc::c_ulong = 0x8011_1500;

/// The largest handle (`MAX_HANDLE_SZ`).
const LARGEST_HANDLE: usize = 128;

#[repr(C)]
struct FsUuid {
    length: u8,
    bytes: [u8; 16],
}

#[repr(C)]
struct Handle {
    bytes: u32,
    kind: i32,
    handle: [u8; LARGEST_HANDLE],
}

/// Takes the write lock of the whole file for this open file (`F_OFD_SETLK`). It is released when the last
/// descriptor is closed.
pub fn lock(file: &File) -> io::Result<()> {
    ask_for(file, libc::F_OFD_SETLK, libc::F_WRLCK).map(drop)
}

/// Takes the read lock of the whole file for this open file, which need not be writable. Read locks go together:
/// an error if another open file has one, too. Of two that come at once each may get the error.
pub fn lock_to_read(file: &File) -> io::Result<()> {
    ask_for(file, libc::F_OFD_SETLK, libc::F_RDLCK)?;
    // Tells whether the write lock could be had, and takes nothing. An open file is not in its own way.
    match ask_for(file, libc::F_OFD_GETLK, libc::F_WRLCK)? == libc::F_UNLCK {
        true => Ok(()),
        false => Err(io::Error::from_raw_os_error(libc::EAGAIN)),
    }
}

/// Asks for a lock of the whole file. Returns the kind of lock that the kernel has written into the question.
fn ask_for(file: &File, question: libc::c_int, kind: libc::c_int) -> io::Result<libc::c_int> {
    // SAFETY: all bytes of it may be zero.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    // SAFETY: the descriptor is open, and the kernel reads and writes one `flock`.
    match unsafe { libc::fcntl(file.as_raw_fd(), question, &raw mut lock) } {
        0 => Ok(lock.l_type.into()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The UUID of the file system of a file, where the kernel tells it.
pub fn file_system(file: &File) -> Option<[u8; 16]> {
    let mut uuid = FsUuid {
        length: 0,
        bytes: [0; 16],
    };
    // SAFETY: the descriptor is open, and the kernel writes one `fsuuid2` of 17 bytes, the size of `FsUuid`.
    let got = unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_GETFSUUID as _, &raw mut uuid) };
    (got == 0 && uuid.length == 16).then_some(uuid.bytes)
}

/// The handle of a file (name_to_handle_at(2)): its kind, and its bytes. No other file of the file system has
/// or will have the same.
pub fn handle(file: &File) -> Option<(i32, Vec<u8>)> {
    let mut handle = Handle {
        bytes: LARGEST_HANDLE as u32,
        kind: 0,
        handle: [0; LARGEST_HANDLE],
    };
    let mut mount: libc::c_int = 0;
    // SAFETY: the descriptor is open, the path is an empty string that ends with a zero, and the kernel writes at most as many bytes of a
    // handle as `bytes` says, and one number.
    let got = unsafe {
        libc::syscall(
            libc::SYS_name_to_handle_at,
            file.as_raw_fd(),
            c"".as_ptr(),
            &raw mut handle,
            &raw mut mount,
            libc::AT_EMPTY_PATH,
        )
    };
    let length = (handle.bytes as usize).min(LARGEST_HANDLE);
    (got == 0).then(|| (handle.kind, handle.handle[..length].to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_keeps_out_every_other_open_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("data");
        let open = || {
            let mut options = File::options();
            options.read(true).write(true).create(true).truncate(false);
            options.open(&path).expect("opened")
        };
        let (first, second) = (open(), open());
        lock(&first).expect("it is free");
        lock(&first).expect("it is ours");
        let error = lock(&second).expect_err("it is taken");
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        drop(first);
        lock(&second).expect("it is free again");
    }

    #[test]
    fn an_open_file_that_cannot_be_written_is_kept_from_others_and_others_from_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("data");
        std::fs::write(&path, "data").expect("written");
        let reads = || File::open(&path).expect("opened");
        let writes = || File::options().write(true).open(&path).expect("opened");
        let is_taken = |locked: io::Result<()>| {
            let error = locked.expect_err("it is taken");
            assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        };
        let first = reads();
        lock(&first).expect_err("a write lock needs an open file that can be written");
        lock_to_read(&first).expect("it is free");
        lock_to_read(&first).expect("it is ours");
        is_taken(lock(&writes()));
        is_taken(lock_to_read(&reads()));
        drop(first);
        let second = writes();
        lock(&second).expect("it is free again");
        is_taken(lock_to_read(&reads()));
        drop(second);
        lock_to_read(&reads()).expect("it is free again");
    }

    #[test]
    fn a_file_keeps_its_handle_and_another_one_has_another() {
        let folder = tempfile::tempdir().expect("a folder");
        let (one, other) = (folder.path().join("one"), folder.path().join("other"));
        for path in [&one, &other] {
            std::fs::write(path, "").expect("written");
        }
        let of = |path: &std::path::Path| handle(&File::open(path).expect("opened"));
        let before = of(&one);
        std::fs::rename(&one, folder.path().join("moved")).expect("renamed");
        assert_eq!(of(&folder.path().join("moved")), before);
        assert!(before.is_none() || of(&other) != before);
    }
}
