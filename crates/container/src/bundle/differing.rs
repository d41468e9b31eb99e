//! Files that a container has open or mapped, and that its next host has not, or has otherwise.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::Workload;
use super::lookup::{Inside, There};
use crate::needed_file::NeededFile;

impl Workload {
    /// Those of these files that are not on this host, or not as the container reads them, in words for an operator. What cannot be looked at
    /// before the container is there is passed over.
    pub fn differing(&self, files: &[NeededFile]) -> Vec<String> {
        let look: Box<dyn Fn(&Path) -> There> = match self {
            // It sees the host's own root file system.
            Self::Command { .. } => Box::new(|path: &Path| There::of(fs::metadata(path))),
            Self::Bundle { path, config } => {
                let config: Value = serde_json::from_str(config).unwrap_or_default();
                let inside = Inside::of(path, &config);
                Box::new(move |path: &Path| inside.look(path))
            }
        };
        files
            .iter()
            .filter_map(|file| {
                let path = file.path.display();
                match (look(&file.path), file.size) {
                    (There::Missing, _) => Some(format!(
                        "{path} is not there, which it has open or mapped; put the same file there, or have the program close it"
                    )),
                    (There::File(there), Some(here)) if there != here => Some(format!(
                        "{path} has {there} bytes there, and {here} where the program reads it; install the same at both hosts"
                    )),
                    _ => None,
                }
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn files_are_compared_as_the_container_sees_them() {
        let bundle = tempfile::tempdir().unwrap();
        let at = |path: &str| bundle.path().join(path);
        for folder in ["rootfs/usr/lib", "data"] {
            fs::create_dir_all(at(folder)).unwrap();
        }
        fs::write(at("rootfs/usr/lib/x.so"), "seven!!").unwrap();
        fs::write(at("data/table"), "12345").unwrap();
        std::os::unix::fs::symlink("/usr/lib", at("rootfs/lib")).unwrap();
        let config = json!({"root": {"path": "rootfs"}, "mounts": [
            {"destination": "/data", "type": "bind", "source": "data"},
            {"destination": "/scratch", "type": "tmpfs", "source": "tmpfs"},
        ]});
        let workload = Workload::Bundle {
            path: bundle.path().to_owned(),
            config: config.to_string(),
        };
        let differing = |path: &str, size: Option<u64>| {
            workload.differing(&[NeededFile {
                path: path.into(),
                size,
            }])
        };
        for (path, size) in [
            ("/usr/lib/x.so", Some(7)),
            ("/lib/x.so", Some(7)),
            ("/usr/lib/x.so", None),
            ("/data/table", Some(5)),
            ("/scratch/x", Some(1)),
        ] {
            assert_eq!(differing(path, size), Vec::<String>::new(), "{path}");
        }
        assert!(differing("/usr/lib/x.so", Some(8))[0].contains("has 7 bytes there, and 8"));
        assert!(differing("/usr/lib/y.so", None)[0].contains("/usr/lib/y.so is not there"));
        assert!(differing("/data/other", Some(5))[0].contains("is not there"));
        let command = Workload::Command {
            args: Vec::new(),
            env: Vec::new(),
            cwd: "/".into(),
            binds: Vec::new(),
        };
        let file = |path: &str, size| NeededFile {
            path: path.into(),
            size,
        };
        let found = command.differing(&[file("/proc/self/exe", None), file("/no/such/file", None)]);
        assert_eq!(found.len(), 1, "{found:?}");
    }
}
