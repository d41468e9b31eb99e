//! What an instance leaves on a host.

use crate::lab::TestLab;

/// Where an instance's things are on its host: folder by folder, one entry per instance.
const FOLDERS: [&str; 8] = [
    "/run/verbatim/instances",
    "/run/verbatim/bundles",
    "/run/verbatim/net",
    "/run/verbatim/images",
    "/run/verbatim/criu",
    "/run/verbatim/disks",
    "/run/verbatim/swaps",
    "/run/verbatim/containers/runc",
];

/// What there is of an instance on a host: folders, its network namespace, its runc container.
pub fn left_behind(lab: &TestLab, host: &str, instance: &str) -> anyhow::Result<Vec<String>> {
    let mut found = Vec::new();
    for folder in FOLDERS {
        let path = format!("{folder}/{instance}");
        // The namespace's file is not a file any more while the namespace lives, but it is there.
        if lab.path(host, &path)?.symlink_metadata().is_ok() {
            found.push(path);
        }
    }
    let links = lab.start_plain(host, &["ip", "-o", "link", "show", "type", "veth"])?;
    let links = links.succeed(std::time::Duration::from_secs(10))?.stdout;
    let strangers = links.lines().filter(|line| !line.contains("uplink"));
    found.extend(strangers.map(|line| format!("link {line}")));
    Ok(found)
}
