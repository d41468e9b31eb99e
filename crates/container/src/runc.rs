//! runc's command line (`man runc`), as this crate uses it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};

use serde::Deserialize;
use tokio::process::Command;

use crate::blocking::blocking;
use crate::cgroup::{Cgroup, LIMIT};
use crate::criu::{CRIU_VARIABLE, find_in_path};
use crate::error::Error;
use crate::init::Init;
use crate::name::ContainerName;
use crate::room;

/// runc, with its state kept in a directory of ours.
#[derive(Debug, Clone)]
pub struct Runc {
    program: PathBuf,
    root: PathBuf,
    proxy: PathBuf,
    criu: PathBuf,
    /// Up to 1.1 the program to start as CRIU is an option; from 1.2 on it is `criu` in `PATH`.
    takes_criu_option: bool,
    /// The limit on descriptors that containers get.
    descriptors: Option<u64>,
}

/// What runc says of a container (`runc state`).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct State {
    /// How it is.
    pub status: Status,
    /// Its first process, or 0.
    pub pid: i32,
    /// Its bundle.
    pub bundle: PathBuf,
}

/// The status of a container (OCI runtime specification, "State").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Its process is not started yet.
    Created,
    /// It runs.
    Running,
    /// Its processes are frozen.
    Paused,
    /// It has ended.
    Stopped,
}

impl Runc {
    /// Finds runc in `PATH`. `root` is the directory of its state; `proxy` is a link called `criu` to the proxy, and
    /// `criu` the real one.
    pub(crate) fn find(
        root: PathBuf,
        proxy: PathBuf,
        criu: PathBuf,
        descriptors: Option<u64>,
    ) -> Result<Self, Error> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let program = find_in_path("runc", &path).ok_or(Error::ToolMissing { tool: "runc" })?;
        let output = std::process::Command::new(&program)
            .arg("--version")
            .output()
            .map_err(|source| Error::Start {
                tool: program.display().to_string(),
                source,
            })?;
        let takes_criu_option = takes_criu_option(&String::from_utf8_lossy(&output.stdout));
        crate::error::make_dir(&root)?;
        Ok(Self {
            program,
            root,
            proxy,
            criu,
            takes_criu_option,
            descriptors,
        })
    }

    /// One that is not there: whatever is asked of it fails.
    pub(crate) fn missing(folder: &Path) -> Self {
        Self {
            program: folder.join("runc"),
            root: folder.to_owned(),
            proxy: folder.join("proxy"),
            criu: folder.join("criu"),
            takes_criu_option: false,
            descriptors: None,
        }
    }

    /// Starts a container in the background and returns its first process, which becomes a child of the nearest
    /// subreaper above us. Takes about 0.1 s.
    ///
    /// What the container prints before it has opened its own standard output goes to `run.log` in the bundle.
    pub async fn run(&self, name: &ContainerName, bundle: &Path) -> Result<Init, Error> {
        let mut command = self.command();
        command.args(["run", "--bundle"]).arg(bundle);
        let (pid_file, log) = (bundle.join("init.pid"), bundle.join("run.log"));
        self.start_detached("run", command, &[], name, &pid_file, &log)
            .await
    }

    /// Has runc start a process in a container in the background, by this command and, behind the container's name, these
    /// arguments: what it prints before it has streams of its own goes to `log`.
    pub(crate) async fn start_detached(
        &self,
        subcommand: &'static str,
        mut command: Command,
        arguments: &[String],
        name: &ContainerName,
        pid_file: &Path,
        log: &Path,
    ) -> Result<Init, Error> {
        let output = std::fs::File::create(log).map_err(|source| Error::file("create", log, source))?;
        let errors = output
            .try_clone()
            .map_err(|source| Error::file("open", log, source))?;
        command
            .args(["--detach", "--pid-file"])
            .arg(pid_file)
            .arg(name.as_str())
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(errors);
        let descriptors = self.descriptors;
        // SAFETY: the system calls are async-signal-safe and touch nothing of this process but its own limits.
        unsafe {
            command.pre_exec(move || {
                // The agent may run with more than ordinary priority, and with more descriptors, which are not the program's.
                libc::setpriority(libc::PRIO_PROCESS, 0, 0);
                let mut limit: libc::rlimit = std::mem::zeroed();
                if let Some(descriptors) = descriptors
                    && libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) == 0
                {
                    limit.rlim_cur = descriptors.min(limit.rlim_max);
                    libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
                }
                Ok(())
            });
        }
        let status = command
            .status()
            .await
            .map_err(|source| self.start_error(source))?;
        if !status.success() {
            return Err(self.error(
                subcommand,
                name,
                status.to_string(),
                log.parent().unwrap_or(&self.root),
                &std::fs::read_to_string(log).unwrap_or_default(),
            ));
        }
        let text =
            std::fs::read_to_string(pid_file).map_err(|source| Error::file("read", pid_file, source))?;
        let pid = text.trim().parse().map_err(|_| Error::Config {
            path: pid_file.to_owned(),
            reason: format!("runc wrote {text:?} in the place of a process id"),
        })?;
        Init::open(pid).map_err(|source| Error::file("open the process named in", pid_file, source))
    }

    /// Where runc keeps what it knows of a container, if it knows it.
    pub(crate) fn state_file(&self, name: &ContainerName) -> PathBuf {
        self.root.join(name).join("state.json")
    }

    /// The state of a container; `None` if runc does not know it.
    pub async fn state(&self, name: &ContainerName) -> Result<Option<State>, Error> {
        if !self.state_file(name).exists() {
            return Ok(None);
        }
        let text = self.call("state", &[name.as_str().into()], name).await?;
        serde_json::from_str(&text)
            .map(Some)
            .map_err(|error| Error::Runc {
                command: "state",
                container: name.to_string(),
                status: "success".to_owned(),
                output: format!("not a state: {error}"),
            })
    }

    /// The containers that runc knows here.
    pub fn list(&self) -> Result<Vec<ContainerName>, Error> {
        let entries =
            std::fs::read_dir(&self.root).map_err(|source| Error::file("read", &self.root, source))?;
        Ok(entries
            .flatten()
            .filter_map(|entry| ContainerName::new(entry.file_name().into_string().ok()?).ok())
            .collect())
    }

    /// Sends a signal to the container's first process.
    pub async fn kill(&self, name: &ContainerName, signal: i32) -> Result<(), Error> {
        self.call("kill", &[name.as_str().into(), signal.to_string().into()], name)
            .await
            .map(drop)
    }

    /// Forgets a container; with `force`, kills it first, and a container that runc does not know is fine.
    ///
    /// No checkpoint or restore of it may be under way.
    pub async fn delete(&self, name: &ContainerName, force: bool) -> Result<(), Error> {
        self.unmount_root(name)?;
        if force {
            // runc would kill the first process of a frozen container and thaw the others (version 1 of the freezer).
            let state = self.state_file(name);
            let killed = blocking(move || match Cgroup::of_container(&state)? {
                Some(cgroup) if cgroup.is_frozen()? => cgroup.kill(LIMIT),
                _ => Ok(()),
            });
            killed.await.map_err(|source| Error::Tasks {
                action: "kill",
                container: name.to_string(),
                source,
            })?;
        }
        let mut arguments: Vec<OsString> = Vec::new();
        if force {
            arguments.push("--force".into());
        }
        arguments.push(name.as_str().into());
        self.call("delete", &arguments, name).await.map(drop)
    }

    /// Takes away the mount of the container's root file system that a runc which was killed in the middle of a restore has left in
    /// its state directory (`libcontainer/criu_linux.go`, `Restore`, "criu-root"). `runc delete --force` removes that directory with all
    /// that is in it: through the mount those would be the user's own files.
    fn unmount_root(&self, name: &ContainerName) -> Result<(), Error> {
        use rustix::io::Errno;
        use rustix::mount::{UnmountFlags, unmount};

        let root = self.root.join(name).join("criu-root");
        loop {
            match unmount(&root, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
                // There may be another one below it.
                Ok(()) => {}
                // It is not there, or nothing is mounted.
                Err(Errno::NOENT | Errno::INVAL) => return Ok(()),
                Err(errno) => return Err(Error::file("unmount", &root, errno.into())),
            }
        }
    }

    /// Runs a command inside a container, on our own standard streams, until it ends.
    ///
    /// While it runs the container cannot be checkpointed: its standard streams lie outside.
    pub async fn exec(&self, name: &ContainerName, arguments: &[String]) -> Result<ExitStatus, Error> {
        let mut command = self.command();
        command
            .args(["exec", name.as_str()])
            .args(arguments)
            .kill_on_drop(true);
        command.status().await.map_err(|source| self.start_error(source))
    }

    /// `runc checkpoint`, ready to be spawned. `parent`: the images of the last pre-dump, relative to `images`.
    pub(crate) fn checkpoint(
        &self,
        name: &ContainerName,
        images: &Path,
        work: &Path,
        parent: Option<&Path>,
    ) -> Command {
        self.dump(&[], name, images, work, parent)
    }

    /// `runc checkpoint --pre-dump`, ready to be spawned.
    pub(crate) fn pre_dump(
        &self,
        name: &ContainerName,
        images: &Path,
        work: &Path,
        parent: Option<&Path>,
    ) -> Command {
        self.dump(&["--pre-dump"], name, images, work, parent)
    }

    fn dump(
        &self,
        options: &[&str],
        name: &ContainerName,
        images: &Path,
        work: &Path,
        parent: Option<&Path>,
    ) -> Command {
        let mut command = self.command();
        command
            .args(["checkpoint", "--tcp-established", "--file-locks"])
            .args(options)
            .arg("--image-path")
            .arg(images)
            .arg("--work-path")
            .arg(work);
        if let Some(parent) = parent {
            command.arg("--parent-path").arg(parent);
        }
        command.arg(name.as_str());
        command
    }

    /// `runc restore`, ready to be spawned.
    pub(crate) fn restore(&self, name: &ContainerName, bundle: &Path, images: &Path, work: &Path) -> Command {
        let mut command = self.command();
        command
            .args([
                "restore",
                "--detach",
                "--tcp-established",
                "--file-locks",
                "--bundle",
            ])
            .arg(bundle);
        command
            .arg("--image-path")
            .arg(images)
            .arg("--work-path")
            .arg(work)
            .arg(name.as_str());
        command
    }

    pub(crate) fn command(&self) -> Command {
        self.command_at(&self.root)
    }

    /// The same with its state in another folder.
    pub(crate) fn command_at(&self, root: &Path) -> Command {
        let bin = self.proxy.parent().expect("the proxy lies in a directory");
        let inherited = std::env::var_os("PATH").unwrap_or_default();
        let path =
            std::env::join_paths(std::iter::once(bin.to_owned()).chain(std::env::split_paths(&inherited)))
                .unwrap_or(inherited);
        let mut command = Command::new(&self.program);
        command
            .env("PATH", path)
            .env(CRIU_VARIABLE, &self.criu)
            .arg("--root")
            .arg(root);
        if self.takes_criu_option {
            command.arg("--criu").arg(&self.proxy);
        }
        // What runc and CRIU make is a container's.
        // SAFETY: the closure makes one system call, which touches nothing but the child.
        unsafe {
            command.pre_exec(verbatim_jail::umask::given_back());
        }
        command
    }

    async fn call(
        &self,
        subcommand: &'static str,
        arguments: &[OsString],
        name: &ContainerName,
    ) -> Result<String, Error> {
        let mut command = self.command();
        command.arg(subcommand).args(arguments).stdin(Stdio::null());
        let output = command
            .output()
            .await
            .map_err(|source| self.start_error(source))?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        Err(self.error(
            subcommand,
            name,
            output.status.to_string(),
            &self.root,
            &String::from_utf8_lossy(&output.stderr),
        ))
    }

    /// A reason why something has failed that writes to a folder of work, behind the folder that has no room, if there is one.
    pub(crate) fn with_lack_of_room(&self, work: &Path, reason: &str) -> String {
        room::first([work, &self.root], reason.to_owned())
    }

    /// The error of a call, by what runc has printed.
    pub(crate) fn error(
        &self,
        command: &'static str,
        name: &ContainerName,
        status: String,
        work: &Path,
        output: &str,
    ) -> Error {
        Error::Runc {
            command,
            container: name.to_string(),
            status,
            output: self.with_lack_of_room(work, &last_lines(output)),
        }
    }

    pub(crate) fn start_error(&self, source: std::io::Error) -> Error {
        Error::Start {
            tool: self.program.display().to_string(),
            source,
        }
    }
}

/// The end of what a tool printed, on one line.
pub(crate) fn last_lines(text: &str) -> String {
    let lines: Vec<_> = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect();
    lines[lines.len().saturating_sub(5)..].join(" / ")
}

/// Reads `runc version 1.1.5+ds1`. An unreadable version is taken for a new one.
fn takes_criu_option(text: &str) -> bool {
    let version = text
        .lines()
        .find_map(|line| line.strip_prefix("runc version "))
        .unwrap_or_default();
    let mut numbers = version
        .split(|c: char| !c.is_ascii_digit())
        .map(str::parse::<u32>);
    matches!((numbers.next(), numbers.next()), (Some(Ok(1)), Some(Ok(0..=1))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_criu_option_is_used_up_to_runc_1_1() {
        assert!(takes_criu_option("runc version 1.1.5+ds1\ncommit: x\n"));
        assert!(takes_criu_option("runc version 1.0.0-rc93\n"));
        assert!(!takes_criu_option("runc version 1.2.0\n"));
        assert!(!takes_criu_option("runc version 1.10.3\n"));
        assert!(!takes_criu_option("crun version 1.14\n"));
    }

    #[test]
    fn only_the_end_of_long_output_is_kept() {
        let text = (0..20).map(|n| format!("line {n}\n\n")).collect::<String>();
        assert_eq!(
            last_lines(&text),
            "line 15 / line 16 / line 17 / line 18 / line 19"
        );
    }
}
