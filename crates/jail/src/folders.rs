//! Folders that other users have to reach, in a process whose files are private ([`crate::umask`]).

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Everybody may look and pass through.
const OPEN: u32 = 0o755;

/// Rights to write of the group and of others.
const WRITE_OF_OTHERS: u32 = 0o022;

/// `mkdir -p`; everybody may read the folders that it makes and pass through them, whatever the umask is. Those that are there stay as they are.
pub fn make_open(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    if let Some(above) = path.parent().filter(|above| !above.as_os_str().is_empty()) {
        make_open(above)?;
    }
    match std::fs::create_dir(path) {
        // Somebody else was faster.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        made => {
            made?;
            std::fs::set_permissions(path, Permissions::from_mode(OPEN))
        }
    }
}

/// A folder with sockets for other users: it is made if it is not there, and nobody but its owner may write to it.
pub fn reachable(path: &Path) -> io::Result<()> {
    make_open(path)?;
    let mode = path.metadata()?.permissions().mode() & 0o7777;
    if mode & WRITE_OF_OTHERS == 0 {
        return Ok(());
    }
    std::fs::set_permissions(path, Permissions::from_mode(mode & !WRITE_OF_OTHERS))?;
    tracing::warn!(
        folder = %path.display(),
        mode = format!("{mode:o}"),
        "other users could write there, and replace sockets; they cannot any more"
    );
    Ok(())
}
