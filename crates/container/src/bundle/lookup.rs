//! Files of a container that is not there yet, by its configuration: looked up through its mounts, with links as the container will
//! follow them.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use serde_json::Value;

use super::spec;

/// Links that the kernel follows in one path (`MAXSYMLINKS`).
const MOST_LINKS: usize = 40;

/// What a container of a configuration will see.
pub(super) struct Inside {
    root: PathBuf,
    mounts: Vec<Mount>,
}

struct Mount {
    inside: PathBuf,
    /// Folders or files of the host that are seen there, the uppermost first; none where that is not known.
    sources: Vec<PathBuf>,
}

/// What is at a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum There {
    /// A file of that length, or a folder.
    File(u64),
    /// Nothing.
    Missing,
    /// It is on a mount that only the container has, or cannot be looked at.
    Unknown,
}

impl There {
    /// By what the kernel says of it.
    pub fn of(looked: io::Result<fs::Metadata>) -> Self {
        match looked {
            Ok(meta) => Self::File(meta.len()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Self::Missing,
            Err(_) => Self::Unknown,
        }
    }
}

impl Inside {
    /// Of the user's configuration of the bundle in a folder.
    pub fn of(bundle: &Path, spec: &Value) -> Self {
        let mounts = spec["mounts"].as_array().into_iter().flatten();
        let mounts = mounts.filter_map(|mount| {
            let inside = Path::new("/").join(mount["destination"].as_str()?);
            Some(Mount {
                inside,
                sources: sources(bundle, mount),
            })
        });
        Self {
            root: spec::root_of(bundle, spec),
            mounts: mounts.collect(),
        }
    }

    /// Whether there is a file at a path.
    pub fn has(&self, path: &str) -> bool {
        self.find(Path::new(path)).is_some_and(|file| file.is_file())
    }

    /// What is at a path.
    pub fn look(&self, path: &Path) -> There {
        let covering = self
            .mounts
            .iter()
            .rev()
            .find(|mount| path.starts_with(&mount.inside));
        if covering.is_some_and(|mount| mount.sources.is_empty()) {
            return There::Unknown;
        }
        match self.find(path) {
            Some(file) => There::of(fs::metadata(file)),
            None => There::Missing,
        }
    }

    /// Where a file is on the host.
    fn find(&self, path: &Path) -> Option<PathBuf> {
        let mut left = names(path);
        let mut at = PathBuf::from("/");
        let mut links = 0;
        while let Some(name) = left.pop() {
            if name == ".." {
                at.pop();
                continue;
            }
            let next = at.join(name);
            let there = self.place(&next)?;
            let is_mount_point = self.mounts.iter().any(|mount| mount.inside == next);
            if is_mount_point || !fs::symlink_metadata(&there).ok()?.is_symlink() {
                at = next;
                continue;
            }
            links += 1;
            if links > MOST_LINKS {
                return None;
            }
            let target = fs::read_link(&there).ok()?;
            if target.is_absolute() {
                at = PathBuf::from("/");
            }
            left.extend(names(&target));
        }
        self.place(&at)
    }

    /// Where a path is on the host whose folders are no links: below the last mount that covers it.
    fn place(&self, inside: &Path) -> Option<PathBuf> {
        let below = |folder: &Path, mounted_at: &Path| match inside.strip_prefix(mounted_at) {
            Ok(rest) if rest.as_os_str().is_empty() => folder.to_owned(),
            Ok(rest) => folder.join(rest),
            Err(_) => folder.to_owned(),
        };
        let covering = self
            .mounts
            .iter()
            .rev()
            .find(|mount| inside.starts_with(&mount.inside));
        let Some(mount) = covering else {
            return Some(below(&self.root, Path::new("/")));
        };
        let places = mount.sources.iter().map(|source| below(source, &mount.inside));
        places
            .into_iter()
            .find(|place| fs::symlink_metadata(place).is_ok())
    }
}

/// The names in a path, the last one first.
fn names(path: &Path) -> Vec<OsString> {
    let names = path.components().rev().filter_map(|component| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::Prefix(_) | Component::RootDir | Component::CurDir => None,
    });
    names.collect()
}

fn sources(bundle: &Path, mount: &Value) -> Vec<PathBuf> {
    if is_bind(mount) {
        let source = mount["source"].as_str();
        return source.map(|source| bundle.join(source)).into_iter().collect();
    }
    if mount["type"] != "overlay" {
        return Vec::new();
    }
    let option = |name: &str| options(mount).find_map(|option| option.strip_prefix(name)?.strip_prefix('='));
    let layers = option("upperdir").into_iter();
    let layers = layers.chain(
        option("lowerdir")
            .into_iter()
            .flat_map(|layers| layers.split(':')),
    );
    layers.map(PathBuf::from).collect()
}

/// Whether a mount of a configuration is a bind mount.
pub(super) fn is_bind(mount: &Value) -> bool {
    mount["type"] == "bind" || options(mount).any(|option| matches!(option, "bind" | "rbind"))
}

/// Its options.
pub(super) fn options(mount: &Value) -> impl Iterator<Item = &str> {
    let options = mount["options"].as_array().into_iter().flatten();
    options.filter_map(Value::as_str)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use serde_json::json;

    use super::*;

    /// A folder with `rootfs`, which has `/bin` as a link to `usr/bin`, and `mounted/bin/sh` beside it.
    fn bundle() -> tempfile::TempDir {
        let bundle = tempfile::tempdir().unwrap();
        let at = |path: &str| bundle.path().join(path);
        for folder in ["rootfs/usr", "mounted/bin", "upper"] {
            fs::create_dir_all(at(folder)).unwrap();
        }
        symlink("usr/bin", at("rootfs/bin")).unwrap();
        symlink("/usr/bin/dash", at("mounted/bin/sh")).unwrap();
        fs::write(at("mounted/bin/dash"), "").unwrap();
        bundle
    }

    fn has(bundle: &Path, mounts: Value) -> bool {
        let spec = json!({"root": {"path": "rootfs"}, "mounts": mounts});
        Inside::of(bundle, &spec).has("/bin/sh")
    }

    #[test]
    fn a_file_is_found_through_the_mounts_and_by_the_containers_own_links() {
        let bundle = bundle();
        let usr = |mount: Value| json!([{"destination": "/proc", "type": "proc"}, mount]);
        assert!(!has(bundle.path(), json!([])), "nothing is mounted at /usr");
        assert!(has(
            bundle.path(),
            usr(json!({"destination": "/usr", "type": "bind", "source": "mounted", "options": ["bind"]}))
        ));
        let absolute = bundle.path().join("mounted");
        assert!(has(
            bundle.path(),
            usr(json!({"destination": "/usr", "source": absolute, "options": ["ro", "rbind"]}))
        ));
        let layers = format!(
            "lowerdir={}:{}",
            bundle.path().join("upper").display(),
            absolute.display()
        );
        assert!(has(
            bundle.path(),
            usr(json!({"destination": "/usr", "type": "overlay", "options": [layers]}))
        ));
        assert!(!has(
            bundle.path(),
            usr(json!({"destination": "/usr", "type": "tmpfs"}))
        ));
    }

    #[test]
    fn a_link_of_the_container_never_leads_to_a_file_of_the_host() {
        let bundle = bundle();
        let link = bundle.path().join("rootfs/bin");
        fs::remove_file(&link).unwrap();
        fs::create_dir(&link).unwrap();
        // There is one on the host, and none in the container.
        symlink("/etc/passwd", link.join("sh")).unwrap();
        assert!(!has(bundle.path(), json!([])));
        fs::remove_file(link.join("sh")).unwrap();
        symlink("sh", link.join("sh")).unwrap();
        assert!(!has(bundle.path(), json!([])), "a link to itself ends");
    }
}
