//! Whether the tasks of a restore may ever have run: a file in its work directory that outlives everybody but the machine.
//!
//! | in the work directory | |
//! | --- | --- |
//! | nothing | no restore has been prepared here: CRIU was asked for nothing |
//! | `unreleased` | one was, and none of its tasks has executed an instruction of the program |
//! | `released` | they may have |
//!
//! The proxy makes the file before the agent can let the request through, and renames it before CRIU gets the answer to
//! `post-restore`. That is the last notification whose refusal CRIU heeds, and the death of the proxy or of runc is a
//! refusal: whatever happens to them later, CRIU goes on and lets the tasks run (`criu/cr-restore.c`, `restore_root_task`: "Below
//! this line nothing should fail"; what follows does not look at what its scripts return). So a marker that was made later
//! could be missing where the program runs.
//!
//! The file says which cgroup the container is in, since runc writes that down only when the restore is done. It is on
//! tmpfs: it is there for all when the call returns, and gone when the machine was restarted. That must be told by the
//! machine's boot ID.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::{Mode, OFlags};

use crate::cgroup::Cgroup;

const UNRELEASED: &str = "unreleased";
const RELEASED: &str = "released";

/// What the marker says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Marker {
    /// No restore has been prepared.
    None,
    /// The tasks have not run: those in this cgroup.
    Unreleased(Cgroup),
    /// The tasks may have run.
    Released(Cgroup),
}

/// Whether the tasks of the restore in `work` may have executed an instruction of the program. Before the restore is
/// prepared they have not.
///
/// An error says that this is not known: the directory is missing, for one. A machine that was restarted since has lost the
/// file.
pub fn released(work: &Path) -> io::Result<bool> {
    Ok(matches!(read(work)?, Marker::Released(_)))
}

/// Looks at the marker in `work`.
pub(crate) fn read(work: &Path) -> io::Result<Marker> {
    let located = |name: &str, error: io::Error| {
        io::Error::new(error.kind(), format!("{}: {error}", work.join(name).display()))
    };
    let content = |name: &str| match std::fs::read(work.join(name)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        text => {
            let text = text.map_err(|error| located(name, error))?;
            let cgroup = serde_json::from_slice(&text).map_err(|error| located(name, error.into()))?;
            Ok::<_, io::Error>(Some(cgroup))
        }
    };
    // The name changes at most once and in this direction: looked for in this order, it is not missed.
    if let Some(cgroup) = content(UNRELEASED)? {
        return Ok(Marker::Unreleased(cgroup));
    }
    if let Some(cgroup) = content(RELEASED)? {
        return Ok(Marker::Released(cgroup));
    }
    if !work.is_dir() {
        return Err(located("", io::ErrorKind::NotFound.into()));
    }
    Ok(Marker::None)
}

/// Removes what an earlier restore in `work` has left.
pub(crate) fn clear(work: &Path) -> io::Result<()> {
    for name in [RELEASED, UNRELEASED] {
        match std::fs::remove_file(work.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// The proxy's part: says that a restore into `cgroup` is under way.
pub(crate) fn prepare(work: impl AsFd, cgroup: &Cgroup) -> io::Result<()> {
    const FRESH: &str = "unreleased.new";
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC;
    let file = rustix::fs::openat(&work, FRESH, flags, Mode::RUSR | Mode::WUSR)?;
    std::fs::File::from(file).write_all(&serde_json::to_vec(cgroup)?)?;
    Ok(rustix::fs::renameat(&work, FRESH, &work, UNRELEASED)?)
}

/// The proxy's part: from now on the tasks may run. Needs no room, so that it works also where none is left.
pub(crate) fn release(work: impl AsFd) -> io::Result<()> {
    Ok(rustix::fs::renameat(&work, UNRELEASED, &work, RELEASED)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cgroup() -> Cgroup {
        serde_json::from_str(r#"{"version": "V2", "path": "/sys/fs/cgroup/web"}"#).unwrap()
    }

    #[test]
    fn a_restore_is_prepared_then_released_then_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let work = std::fs::File::open(folder.path()).unwrap();
        assert_eq!(read(folder.path()).unwrap(), Marker::None);
        assert!(release(&work).is_err(), "there is nothing to release");
        prepare(&work, &cgroup()).unwrap();
        assert_eq!(read(folder.path()).unwrap(), Marker::Unreleased(cgroup()));
        assert!(!released(folder.path()).unwrap());
        release(&work).unwrap();
        assert_eq!(read(folder.path()).unwrap(), Marker::Released(cgroup()));
        assert!(released(folder.path()).unwrap());
        clear(folder.path()).unwrap();
        assert_eq!(read(folder.path()).unwrap(), Marker::None);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_cannot_be_read_is_not_taken_for_a_no() {
        let folder = tempfile::tempdir().unwrap();
        assert!(released(&folder.path().join("missing")).is_err());
        std::fs::write(folder.path().join(UNRELEASED), "{").unwrap();
        assert!(released(folder.path()).is_err());
        std::fs::remove_file(folder.path().join(UNRELEASED)).unwrap();
        std::fs::create_dir(folder.path().join(RELEASED)).unwrap();
        assert!(released(folder.path()).is_err());
    }
}
