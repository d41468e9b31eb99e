//! The OCI bundle of an instance: a directory with `config.json`, and the mounts that it refers to.
//!
//! ```text
//!  BUNDLE/config.json    made by us, from a command or from the user's own bundle
//!  BUNDLE/rootfs/        for a command: the host's root file system, bind-mounted read-only; for a bundle: its own
//!  BUNDLE/run/           for a command: its `/run`, with nothing of the host's in it
//!  BUNDLE/dev/           a small tmpfs with the device nodes of the container
//! ```
//!
//! Every mount inside the container but `/proc`, `/sys` and `/dev/pts` is a bind mount of something on the host, which CRIU takes
//! for external and neither dumps nor restores: the content of a tmpfs mounted inside would be packed with `tar`,
//! some 10 ms each, in the blackout. What the container may write and takes along when it moves lies in the
//! instance's runtime folder:
//!
//! | inside | in the runtime folder |
//! | --- | --- |
//! | `/run/verbatim` | itself |
//! | `/tmp` | `tmp` |
//! | `/dev/shm` | `shm` |
//! | standard output and error | `stdout` |

mod device;
mod differing;
mod fields;
pub(crate) mod fuzzing;
mod lookup;
pub(crate) mod masks;
mod needs;
mod seccomp;
mod spec;
mod submounts;

pub use device::has as has_device;
pub(crate) use device::{is_harmless as is_harmless_device, is_own_terminal, is_terminal};
pub(crate) use spec::{SHELL, TERMINALS};

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use serde::{Deserialize, Serialize};

use crate::error::{Error, make_dir, make_open_dir};
use crate::name::ContainerName;

/// A FIFO in the runtime folder. If there is one when a container starts, and [`Bundle::tells_start`], it is opened, and closed when the
/// program is executed; if that fails, something is written to it before.
pub const STARTED_NAME: &str = "started";

/// Where the runtime folder is inside a container.
pub(crate) const RUNTIME_INSIDE: &str = "/run/verbatim";

/// What a container runs. It goes to the destination as it is: paths in it must mean the same there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Workload {
    /// A command over the host's own root file system, which it sees read-only, as root with the usual rights of a
    /// container. `/bin/sh` is needed.
    Command {
        /// The program and its arguments.
        args: Vec<String>,
        /// Its environment, `NAME=value` each.
        env: Vec<String>,
        /// Its working directory; `/` if it is missing there.
        cwd: PathBuf,
        /// More of the host to be seen inside.
        binds: Vec<Bind>,
    },
    /// The user's own bundle. Its root file system must exist on the destination too, with the same content.
    Bundle {
        /// Its directory.
        path: PathBuf,
        /// Its `config.json`.
        config: String,
    },
}

/// A part of the host that is seen inside, at the same path. It is not moved: use it for what both hosts have (a
/// shared file system, an installed program outside the root file system).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bind {
    /// The file or directory.
    pub path: PathBuf,
    /// Whether the container may write to it.
    pub writable: bool,
}

impl Workload {
    /// Reads the user's bundle at `path`.
    pub fn from_bundle(path: &Path) -> Result<Self, Error> {
        spec::text(path)?;
        let file = path.join("config.json");
        let config = std::fs::read_to_string(&file).map_err(|source| Error::file("read", &file, source))?;
        let spec = spec::parse(&config, &file)?;
        let refuse = |reason| Error::Config {
            path: file.clone(),
            reason,
        };
        if let Some(reason) = fields::refusal(&spec) {
            return Err(refuse(reason));
        }
        let spec = submounts::expanded(path, spec).map_err(refuse)?;
        let config = serde_json::to_string(&spec).map_err(|error| refuse(error.to_string()))?;
        Ok(Self::Bundle {
            path: path.to_owned(),
            config,
        })
    }

    /// What a container of this gets in the place of what its configuration asks for, in words for an operator.
    pub fn notes(&self) -> Vec<String> {
        let Self::Bundle { config, .. } = self else {
            return Vec::new();
        };
        serde_json::from_str(config).map_or_else(|_| Vec::new(), |spec| fields::notes(&spec))
    }

    /// The user and group that its first process begins with.
    pub fn user(&self) -> (u32, u32) {
        let Self::Bundle { config, .. } = self else {
            return (0, 0);
        };
        let config: serde_json::Value = serde_json::from_str(config).unwrap_or_default();
        let id = |field: &str| {
            let id = config["process"]["user"][field].as_u64();
            id.and_then(|id| u32::try_from(id).ok()).unwrap_or(0)
        };
        (id("uid"), id("gid"))
    }

    /// An annotation of a bundle.
    pub fn annotation(&self, key: &str) -> Option<String> {
        let Self::Bundle { config, .. } = self else {
            return None;
        };
        let config: serde_json::Value = serde_json::from_str(config).ok()?;
        Some(config.get("annotations")?.get(key)?.as_str()?.to_owned())
    }
}

/// Where a container's parts are on this host.
#[derive(Debug, Clone)]
pub struct BundleConfig {
    /// The container.
    pub name: ContainerName,
    /// The directory to make. Not in the runtime folder.
    pub dir: PathBuf,
    /// The instance's runtime folder, on tmpfs; `tmp` and `shm` are made in it if they are missing.
    pub runtime: PathBuf,
    /// The network namespace ([`Network::path`](crate::Network::path)).
    pub netns: PathBuf,
    /// The parent of its cgroup: unique to this host where several virtual hosts share a machine. `/verbatim`, say.
    pub cgroup_parent: PathBuf,
    /// The library to preload, as seen inside. `None`: none.
    pub preload: Option<PathBuf>,
    /// RNICs of this host that the container may open, by their names.
    pub rnics: Vec<String>,
    /// More devices of this host that the container may open, disks among them, by their names in `/dev`; those that the host lacks it goes without.
    pub devices: Vec<String>,
    /// Folders of this host that are seen inside elsewhere.
    pub folders: Vec<FolderMount>,
}

/// A folder of the host that is seen inside at another path. What is mounted on it when the container starts, or is restored, is what is
/// seen; another host may have another folder, with something else mounted, in its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FolderMount {
    /// On the host.
    pub source: PathBuf,
    /// In the container.
    pub inside: PathBuf,
    /// Whether the container may write to it.
    pub writable: bool,
}

/// A bundle on disk, with its mounts in place. Dropping it leaves it there; see [`Bundle::remove`].
#[derive(Debug)]
pub struct Bundle {
    dir: PathBuf,
}

impl Bundle {
    /// Makes the bundle. Takes a few ms.
    pub fn create(config: &BundleConfig, workload: &Workload) -> Result<Self, Error> {
        spec::text(&config.dir)?;
        make_dir(&config.dir)?;
        for (part, mode) in [("tmp", 0o1777), ("shm", 0o1777)] {
            let path = config.runtime.join(part);
            make_dir(&path)?;
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode))
                .map_err(|source| Error::file("change the mode of", &path, source))?;
        }
        let bundle = Self {
            dir: config.dir.clone(),
        };
        let made = bundle.fill(config, workload);
        if made.is_err()
            && let Err(error) = bundle.unmount()
        {
            tracing::warn!(bundle = %bundle.dir.display(), %error, "a half-made bundle could not be taken apart");
        }
        made.map(|()| bundle)
    }

    /// Takes a bundle that was made earlier (before the agent was restarted).
    pub fn open(dir: &Path) -> Result<Self, Error> {
        let config = dir.join("config.json");
        std::fs::metadata(&config).map_err(|source| Error::file("find", &config, source))?;
        Ok(Self { dir: dir.to_owned() })
    }

    /// Removes what an agent that died may have left of a bundle in `dir`; nothing if there is nothing.
    pub fn clear(dir: &Path) -> Result<(), Error> {
        if !dir.exists() {
            return Ok(());
        }
        Self { dir: dir.to_owned() }.remove()
    }

    /// Its directory.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// Whether the container's program is started by a shell of its own, which says what became of that ([`STARTED_NAME`]). Where there is
    /// no shell, runc starts the program, and fails if it cannot.
    pub fn tells_start(&self) -> Result<bool, Error> {
        let file = self.dir.join("config.json");
        let text = std::fs::read_to_string(&file).map_err(|source| Error::file("read", &file, source))?;
        Ok(spec::tells_start(&spec::parse(&text, &file)?))
    }

    /// Takes the mounts away and removes the directory. The container must be gone.
    pub fn remove(self) -> Result<(), Error> {
        self.unmount()?;
        // Never a recursive removal of `rootfs`: if its mount were still there, that would be the host's.
        for dir in [self.rootfs(), self.dev()] {
            match std::fs::remove_dir(&dir) {
                Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
                    return Err(Error::file("remove", &dir, source));
                }
                _ => {}
            }
        }
        std::fs::remove_dir_all(&self.dir).map_err(|source| Error::file("remove", &self.dir, source))
    }

    fn fill(&self, config: &BundleConfig, workload: &Workload) -> Result<(), Error> {
        let dev = self.dev();
        make_dir(&dev)?;
        device::make_tmpfs(&dev)?;
        let devices = device::populate(&dev, &crate::rnic::nodes_of(&config.rnics)?, &config.devices)?;
        let spec = match workload {
            Workload::Command {
                args,
                env,
                cwd,
                binds,
            } => {
                let rootfs = self.rootfs();
                make_dir(&rootfs)?;
                bind_root(&rootfs)?;
                let run = self.dir.join("run");
                make_run(&run, binds)?;
                let inside = config.folders.iter().map(|folder| folder.inside.as_path());
                for mount_point in inside.filter_map(|inside| in_run(&run, inside)) {
                    make_open_dir(&mount_point)?;
                }
                spec::for_command(config, &rootfs, &run, &dev, &devices, args, env, cwd, binds)?
            }
            Workload::Bundle { path, config: text } => {
                let file = path.join("config.json");
                let users = spec::parse(text, &file)?;
                let rootfs = self.rootfs();
                make_dir(&rootfs)?;
                bind_alone(&spec::root_of(path, &users), &rootfs)?;
                spec::for_bundle(config, path, &rootfs, &dev, &devices, users)?
            }
        };
        let file = self.dir.join("config.json");
        let text = serde_json::to_vec_pretty(&spec).map_err(|error| Error::Config {
            path: file.clone(),
            reason: format!("cannot be written as JSON: {error}"),
        })?;
        std::fs::write(&file, text).map_err(|source| Error::file("write", &file, source))
    }

    fn unmount(&self) -> Result<(), Error> {
        for dir in [self.rootfs(), self.dev()] {
            loop {
                match rustix::mount::unmount(&dir, UnmountFlags::DETACH) {
                    Ok(()) => {}
                    // Not a mount point (any more), or not there at all (`man 2 umount`).
                    Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOENT) => break,
                    Err(errno) => return Err(Error::file("unmount", &dir, errno.into())),
                }
            }
        }
        Ok(())
    }

    fn rootfs(&self) -> PathBuf {
        self.dir.join("rootfs")
    }

    fn dev(&self) -> PathBuf {
        self.dir.join("dev")
    }
}

/// Makes the `/run` of a command: where no file system of its own is mounted on the host's, that is a part of the root file
/// system, and holds the sockets of services that do what root asks them.
///
/// There is nothing in it but what is mounted there.
fn make_run(run: &Path, binds: &[Bind]) -> Result<(), Error> {
    make_open_dir(&in_run(run, Path::new(RUNTIME_INSIDE)).expect("it lies in /run"))?;
    for part in binds {
        let Some(mount_point) = in_run(run, &part.path) else {
            continue;
        };
        if part.path.is_dir() {
            make_open_dir(&mount_point)?;
        } else {
            make_open_dir(mount_point.parent().expect("it lies in a folder"))?;
            std::fs::File::create(&mount_point)
                .map_err(|source| Error::file("create", &mount_point, source))?;
        }
    }
    Ok(())
}

/// Where a path in `/run` is in the folder that stands for it.
fn in_run(run: &Path, path: &Path) -> Option<PathBuf> {
    path.strip_prefix("/run").ok().map(|inside| run.join(inside))
}

/// Bind-mounts the host's root file system, without what is mounted on it, read-only.
///
/// Read-only on our side too, so that nothing that walks through the bundle can harm the host.
fn bind_root(rootfs: &Path) -> Result<(), Error> {
    bind_alone(Path::new("/"), rootfs)?;
    // runc mounts a folder of ours there; below the host's own mount, if it has one, it must exist, too.
    make_open_dir(&rootfs.join("run"))?;
    rustix::mount::mount_remount(rootfs, MountFlags::BIND | MountFlags::RDONLY, "")
        .map_err(|errno| Error::file("make read-only", rootfs, errno.into()))
}

/// Bind-mounts a root file system without what is mounted on it.
fn bind_alone(root: &Path, rootfs: &Path) -> Result<(), Error> {
    use rustix::mount::{mount_bind, mount_change};

    mount_bind(root, rootfs)
        .map_err(|errno| Error::file("bind to the instance's bundle", root, errno.into()))?;
    mount_change(rootfs, MountPropagationFlags::PRIVATE)
        .map_err(|errno| Error::file("make private", rootfs, errno.into()))
}
