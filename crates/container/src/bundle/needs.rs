//! What a container needs of the host that it comes to.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::lookup::is_bind;
use super::{Workload, spec};

impl Workload {
    /// Files and folders that a container of this binds, or that are its root file system, and that are not there on this host.
    pub fn lacking(&self) -> Vec<String> {
        let is_there = |path: &Path| fs::metadata(path).is_ok();
        match self {
            Self::Command { binds, .. } => {
                let lacking = binds.iter().filter(|bind| !is_there(&bind.path));
                lacking
                    .map(|bind| {
                        format!(
                            "{} is not there, which is shown to it (--bind)",
                            bind.path.display()
                        )
                    })
                    .collect()
            }
            Self::Bundle { path, config } => {
                let config: Value = serde_json::from_str(config).unwrap_or_default();
                let root = spec::root_of(path, &config);
                let root = (!is_there(&root)).then(|| {
                    format!(
                        "{} is not there, the root file system of its bundle: it must be the same at each host",
                        root.display()
                    )
                });
                let mounts = config["mounts"].as_array().into_iter().flatten();
                let sources = mounts.filter(|mount| is_bind(mount)).filter_map(|mount| {
                    let inside = mount["destination"].as_str()?;
                    let source = path.join(mount["source"].as_str()?);
                    (!spec::is_replaced(Path::new(inside)) && !is_there(&source)).then(|| {
                        format!(
                            "{} is not there, which its bundle mounts at {inside}",
                            source.display()
                        )
                    })
                });
                root.into_iter().chain(sources).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_a_host_lacks_is_named() {
        let bundle = tempfile::tempdir().unwrap();
        let config = json!({"root": {"path": "rootfs"}, "mounts": [
            {"destination": "/data", "type": "bind", "source": "data"},
            {"destination": "/dev/shm", "type": "bind", "source": "/no/such/folder"},
            {"destination": "/proc", "type": "proc", "source": "proc"},
        ]});
        let workload = Workload::Bundle {
            path: bundle.path().to_owned(),
            config: config.to_string(),
        };
        let lacking = workload.lacking();
        assert_eq!(lacking.len(), 2, "{lacking:?}");
        assert!(
            lacking[0].contains("rootfs") && lacking[1].contains("mounts at /data"),
            "{lacking:?}"
        );
        for folder in ["rootfs", "data"] {
            fs::create_dir(bundle.path().join(folder)).unwrap();
        }
        assert_eq!(workload.lacking(), Vec::<String>::new());
    }
}
