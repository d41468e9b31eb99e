//! What runc leaves of cgroups.

use std::io;
use std::path::Path;

/// Where cgroups are mounted: one hierarchy, or, with version 1, one in each subdirectory.
const MOUNTED: &str = "/sys/fs/cgroup";

/// Removes the cgroup above a host's containers ([`BundleConfig::cgroup_parent`](crate::BundleConfig)) where it is
/// empty. runc makes it with the first container and removes only the containers' own.
pub fn remove_cgroup_parent(parent: &Path) -> io::Result<()> {
    let relative = parent.strip_prefix("/").unwrap_or(parent);
    // Without a name it would be the root of them all.
    if relative.as_os_str().is_empty() {
        return Ok(());
    }
    let root = Path::new(MOUNTED);
    let hierarchies = std::fs::read_dir(root)?.flatten().map(|entry| entry.path());
    for hierarchy in hierarchies.filter(|path| path.is_dir()).chain([root.to_owned()]) {
        match std::fs::remove_dir(hierarchy.join(relative)) {
            Err(error)
                if !matches!(
                    error.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::ResourceBusy
                ) =>
            {
                return Err(error);
            }
            _ => {}
        }
    }
    Ok(())
}
