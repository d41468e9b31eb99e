//! The kernel that the machines boot, as `setup.sh --vm` laid it down, and the order in which its modules load.

use crate::error::{Error, Result};
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Names another folder with a kernel.
const VARIABLE: &str = "VERBATIM_VM_KERNEL";
const DEFAULT: &str = "/opt/verbatim/vm/kernel";

/// A kernel: `vmlinuz`, `release` and `lib/modules/RELEASE` in one folder.
#[derive(Clone, Debug)]
pub struct Kernel {
    home: PathBuf,
    release: String,
}

impl Kernel {
    /// The kernel in the folder that `VERBATIM_VM_KERNEL` names, else the one that `setup.sh --vm` fetched.
    pub fn find() -> Result<Self> {
        Self::at(std::env::var_os(VARIABLE).map_or_else(|| PathBuf::from(DEFAULT), PathBuf::from))
    }

    /// The kernel in `home`.
    pub fn at(home: impl Into<PathBuf>) -> Result<Self> {
        let home = home.into();
        let missing = |path: &Path| Error::NotInstalled {
            what: format!("the machines' kernel ({})", path.display()),
        };
        let release = home.join("release");
        let kernel = Self {
            release: fs::read_to_string(&release)
                .map_err(|_| missing(&release))?
                .trim()
                .to_owned(),
            home,
        };
        match [kernel.image(), kernel.modules_dir().join("modules.dep")]
            .into_iter()
            .find(|path| !path.is_file())
        {
            Some(path) => Err(missing(&path)),
            None => Ok(kernel),
        }
    }

    /// What `uname -r` says in a machine.
    pub fn release(&self) -> &str {
        &self.release
    }

    /// The kernel proper.
    pub fn image(&self) -> PathBuf {
        self.home.join("vmlinuz")
    }

    /// The folder that belongs at `/lib/modules` in a machine.
    pub fn modules_root(&self) -> PathBuf {
        self.home.join("lib/modules")
    }

    fn modules_dir(&self) -> PathBuf {
        self.modules_root().join(&self.release)
    }

    /// The files of `modules` and of all that they depend on, in the order in which they load. What is built into the
    /// kernel is left out.
    pub(crate) fn load_order(&self, modules: &[&str]) -> Result<Vec<PathBuf>> {
        let dir = self.modules_dir();
        let read = |name: &str| {
            let path = dir.join(name);
            fs::read_to_string(&path).map_err(Error::file("read", path))
        };
        let (dependencies, builtin) = (read("modules.dep")?, read("modules.builtin")?);
        let table = Dependencies::parse(&dependencies);
        let mut order = Vec::new();
        for module in modules {
            match table.files(module) {
                Some(files) => files.for_each(|file| {
                    let path = dir.join(file);
                    if !order.contains(&path) {
                        order.push(path);
                    }
                }),
                None if builtin.lines().any(|line| module_name(line) == *module) => {}
                None => {
                    return Err(Error::NoModule {
                        release: self.release.clone(),
                        module: (*module).to_owned(),
                    });
                }
            }
        }
        Ok(order)
    }
}

/// `modules.dep`: a module's file, a colon, the files that it needs with the one to load first at the end:
/// modules.dep(5).
struct Dependencies<'a>(HashMap<String, (&'a str, &'a str)>);

impl<'a> Dependencies<'a> {
    fn parse(text: &'a str) -> Self {
        let lines = text.lines().filter_map(|line| line.split_once(':'));
        Self(
            lines
                .map(|(file, needs)| (module_name(file), (file, needs)))
                .collect(),
        )
    }

    /// The files of `module`, what it needs first.
    fn files(&self, module: &str) -> Option<impl Iterator<Item = &'a str> + use<'a>> {
        let (file, needs) = self.0.get(module)?;
        Some(needs.split_ascii_whitespace().rev().chain([*file]))
    }
}

/// `drivers/net/virtio_net.ko.xz` is `virtio_net`; dashes count as underscores: modprobe(8).
fn module_name(file: &str) -> String {
    let name = file.rsplit('/').next().unwrap_or(file);
    name.split(".ko").next().unwrap_or(name).replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(dir: &Path) -> Kernel {
        let modules = dir.join("lib/modules/6.0-test");
        fs::create_dir_all(&modules).unwrap();
        fs::write(dir.join("release"), "6.0-test\n").unwrap();
        fs::write(dir.join("vmlinuz"), "").unwrap();
        let table = "\
kernel/fs/9p/9p.ko.xz: kernel/net/9p/9pnet.ko.xz kernel/fs/netfs/netfs.ko.xz
kernel/net/9p/9pnet.ko.xz: kernel/fs/netfs/netfs.ko.xz
kernel/fs/netfs/netfs.ko.xz:
";
        fs::write(modules.join("modules.dep"), table).unwrap();
        fs::write(
            modules.join("modules.builtin"),
            "kernel/drivers/virtio/virtio-pci.ko\n",
        )
        .unwrap();
        Kernel::at(dir).unwrap()
    }

    #[test]
    fn what_a_module_needs_comes_before_it_and_only_once() {
        let dir = tempfile::tempdir().unwrap();
        let order = kernel(dir.path())
            .load_order(&["9pnet", "9p", "virtio_pci"])
            .unwrap();
        let names: Vec<_> = order
            .iter()
            .map(|path| module_name(path.to_str().unwrap()))
            .collect();
        assert_eq!(names, ["netfs", "9pnet", "9p"]);
    }

    #[test]
    fn a_module_that_is_not_there_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let error = kernel(dir.path())
            .load_order(&["rdma_rxe"])
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("rdma_rxe") && error.contains("6.0-test"),
            "{error}"
        );
    }

    #[test]
    fn without_a_kernel_the_error_says_what_to_run() {
        let error = Kernel::at("/nonexistent").unwrap_err().to_string();
        assert!(error.contains("setup.sh --vm"), "{error}");
    }
}
