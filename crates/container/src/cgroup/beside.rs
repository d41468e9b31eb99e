//! A cgroup beside a container's, with the limits on RDMA objects that the container's has or will have.

use std::io;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{MOUNTED, gone_means, in_file};
use crate::bundle::Workload;
use crate::name::ContainerName;

/// The file of the controller `rdma` (kernel documentation, `admin-guide/cgroup-v2.rst`, "RDMA").
const LIMITS: &str = "rdma.max";

/// It is removed with this value, and must be empty then.
#[derive(Debug)]
pub struct CgroupBeside(PathBuf);

impl CgroupBeside {
    /// Makes one below the parent of a host's containers. `None` where there is no unified hierarchy.
    pub fn create(parent: &Path, name: &ContainerName, workload: &Workload) -> io::Result<Option<Self>> {
        let root = Path::new(MOUNTED);
        match root.join("cgroup.controllers").exists() {
            true => Self::create_in(root, parent, name, workload).map(Some),
            false => Ok(None),
        }
    }

    fn create_in(root: &Path, parent: &Path, name: &ContainerName, workload: &Workload) -> io::Result<Self> {
        let relative = parent.strip_prefix("/").unwrap_or(parent);
        let path = root.join(relative).join(format!("{}.trial", name.as_str()));
        std::fs::create_dir_all(&path).map_err(|error| in_file(&path, &error))?;
        let this = Self(path);
        let own = limits(workload)?;
        if !own.is_empty() {
            let above: Vec<_> = this.0.ancestors().skip(1).collect();
            for cgroup in above.iter().rev().filter(|path| path.starts_with(root)) {
                let path = cgroup.join("cgroup.subtree_control");
                std::fs::write(&path, "+rdma").map_err(|error| in_file(&path, &error))?;
            }
            let path = this.0.join(LIMITS);
            for line in &own {
                std::fs::write(&path, line).map_err(|error| in_file(&path, &error))?;
            }
        }
        Ok(this)
    }

    /// Moves a process into it.
    pub fn enter(&self, pid: u32) -> io::Result<()> {
        let path = self.0.join("cgroup.procs");
        std::fs::write(&path, pid.to_string()).map_err(|error| in_file(&path, &error))
    }

    /// The limits of it and of those above it, for people: a file and a line of it each.
    pub fn rdma_limits(&self) -> Vec<String> {
        let of = |cgroup: &Path| {
            let path = cgroup.join(LIMITS);
            let text = gone_means(std::fs::read_to_string(&path), String::new()).unwrap_or_default();
            let lines = text.lines().filter(|line| {
                let values = line.split_whitespace().skip(1);
                values
                    .filter_map(|value| value.split_once('='))
                    .any(|(_, value)| value != "max")
            });
            lines
                .map(|line| format!("{}: {}", path.display(), line.trim_end()))
                .collect::<Vec<_>>()
        };
        let ours = self.0.ancestors().filter(|path| path.starts_with(MOUNTED));
        ours.flat_map(of).collect()
    }
}

impl Drop for CgroupBeside {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir(&self.0) {
            tracing::warn!(path = %self.0.display(), %error, "a cgroup is left behind");
        }
    }
}

/// What the user's bundle says of RDMA (OCI runtime specification, `config-linux.md`, "RDMA"), as the file wants it.
fn limits(workload: &Workload) -> io::Result<Vec<String>> {
    let Workload::Bundle { config, .. } = workload else {
        return Ok(Vec::new());
    };
    let spec: Value = serde_json::from_str(config)?;
    let devices = spec.pointer("/linux/resources/rdma").and_then(Value::as_object);
    let line = |(device, limits): (&String, &Value)| {
        let one = |key: &str, name: &str| Some(format!(" {name}={}", limits.get(key)?.as_u64()?));
        let [handles, objects] = [one("hcaHandles", "hca_handle"), one("hcaObjects", "hca_object")];
        format!(
            "{device}{}{}",
            handles.unwrap_or_default(),
            objects.unwrap_or_default()
        )
    };
    Ok(devices.into_iter().flatten().map(line).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_has_the_limits_of_the_bundle() {
        let folder = tempfile::tempdir().unwrap();
        let text = r#"{"linux": {"resources": {"rdma": {"mlx5_0": {"hcaHandles": 3, "hcaObjects": 100}, "rxe0": {"hcaObjects": 7}}}}}"#;
        let workload = |config: &str| Workload::Bundle {
            path: folder.path().to_owned(),
            config: config.to_owned(),
        };
        assert_eq!(
            limits(&workload(text)).unwrap(),
            ["mlx5_0 hca_handle=3 hca_object=100", "rxe0 hca_object=7"]
        );
        let root = folder.path().join("cgroup");
        let name = ContainerName::new("web").unwrap();
        let made = CgroupBeside::create_in(&root, Path::new("/verbatim"), &name, &workload("{}")).unwrap();
        made.enter(17).unwrap();
        let file = root.join("verbatim/web.trial/cgroup.procs");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "17");
        // A cgroup's files do not stand in the way of its removal, as those of a folder do.
        std::fs::remove_file(file).unwrap();
        drop(made);
        assert!(!root.join("verbatim/web.trial").exists() && root.join("verbatim").exists());
    }
}
