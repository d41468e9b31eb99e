//! Domains of libvirt: QEMUs that libvirt has started, and whose monitors it uses exclusively.
//!
//! libvirt is asked by its own `virsh`, one process for each question, and QEMU through it (`virsh
//! qemu-monitor-command`). A library of libvirt would have to be on every machine with this program, and most
//! have no libvirt. A process takes some 15 ms; a move has a handful of them while the guest stands still.
//!
//! libvirt learns from QEMU's events of changes that bypass it. So libvirt knows a stopped guest as paused,
//! and a QEMU that has ended as a domain that is off. Only the order to go on goes to libvirt itself
//! ([`Domain::resume`]): it then takes the resources that it gave back when the guest stopped.

mod description;
mod obstacles;

use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

use crate::error::{Error, Result};
use crate::limit::in_time;

pub use description::Description;
pub(crate) use obstacles::Named;

/// The program that talks to libvirt.
const VIRSH: &str = "virsh";

/// Limit for libvirt to answer. QEMU behind it answers from its main loop.
const ANSWER: Duration = Duration::from_secs(15);

/// Limit for libvirt to start a QEMU. The first time it asks QEMU for all abilities.
const START: Duration = Duration::from_secs(60);

/// QEMU's name of the descriptor by which its process is found.
const FOUND_BY: &str = "verbatim-found-by";

/// A domain on the host of this process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Domain {
    /// The connection to libvirt: `qemu:///system`.
    uri: String,
    name: String,
    uuid: String,
}

/// Standard input of `virsh`.
enum Input<'a> {
    Nothing,
    /// A descriptor for QEMU.
    Descriptor(OwnedFd),
    Text(&'a str),
}

impl Domain {
    /// The domain of this name, running or paused.
    pub async fn find(uri: &str, name: &str) -> Result<Self> {
        // virsh would take a number for another domain's id.
        let unknown = || {
            Error::Libvirt(format!(
                "libvirt knows no domain {name} at {uri}; `virsh --connect {uri} list --all` lists those that there are"
            ))
        };
        let domain = Self {
            uri: uri.to_owned(),
            name: name.to_owned(),
            uuid: String::new(),
        };
        let uuid = match domain
            .virsh(&["domuuid", "--", name], Input::Nothing, ANSWER)
            .await
        {
            Ok(uuid) => uuid.trim().to_owned(),
            Err(Error::Gone) => return Err(unknown()),
            Err(error) => return Err(error),
        };
        let domain = Self { uuid, ..domain };
        if domain.ask("domname", &[]).await?.trim() != name {
            return Err(unknown());
        }
        match domain.state().await? {
            Some(state) if ["running", "paused"].contains(&&state[..]) => Ok(domain),
            state => Err(Error::Libvirt(format!(
                "the domain {name} is {}, and would have to run: `virsh --connect {uri} start {name}`",
                state.as_deref().unwrap_or("gone")
            ))),
        }
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The connection to libvirt.
    pub fn uri(&self) -> &str {
        &self.uri
    }

    /// The domain as users and `virsh` name it.
    pub fn line(&self) -> Vec<String> {
        ["libvirt", &self.uri, &self.name].map(str::to_owned).into()
    }

    /// The state in libvirt's words; `None`: libvirt does not know the domain.
    pub async fn state(&self) -> Result<Option<String>> {
        match self.ask("domstate", &[]).await {
            Ok(state) => Ok(Some(state.trim().to_owned())),
            Err(Error::Gone) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// QEMU's process: the one with a descriptor that libvirt passes on to it.
    pub async fn process(&self) -> Result<u32> {
        let (_ours, theirs) =
            std::os::unix::net::UnixStream::pair().map_err(Error::io("make a pair of sockets"))?;
        let theirs = OwnedFd::from(theirs);
        let inode = std::fs::File::from(theirs.try_clone().map_err(Error::io("copy a socket"))?)
            .metadata()
            .map_err(Error::io("look at a socket"))?
            .ino();
        self.run("getfd", Some(theirs)).await?;
        let found = holder_of(&format!("socket:[{inode}]"), &self.uuid);
        self.run("closefd", None).await?;
        found?.ok_or_else(|| {
            Error::Libvirt(format!(
                "the QEMU of the domain {} is no process that this host's agent sees: {} is another host's libvirt, or in a PID namespace beside the agent's",
                self.name, self.uri
            ))
        })
    }

    /// The files of its disks and images, with whether QEMU may write to each.
    pub async fn files(&self) -> Result<Vec<(PathBuf, bool)>> {
        obstacles::files(&self.ask("dumpxml", &[]).await?)
    }

    /// Lets the guest run.
    pub async fn resume(&self) -> Result<()> {
        self.ask("resume", &[]).await.map(drop)
    }

    /// Ends the domain. Succeeds if it is not there, or off.
    pub async fn destroy(&self) -> Result<()> {
        match self.ask("destroy", &[]).await {
            Ok(_) | Err(Error::Gone) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Called when the domain has left this host for good, and its QEMU is killed. When this returns, libvirt
    /// has noticed, and does not start the domain at the host's next boot.
    pub async fn left(&self) -> Result<()> {
        self.destroy().await?;
        match self.ask("autostart", &["--disable"]).await {
            // The domain may never have been defined.
            Ok(_) | Err(Error::Gone | Error::Libvirt(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Obstacles to a move that libvirt knows.
    pub async fn obstacles(&self) -> Result<Vec<String>> {
        let mut found = obstacles::of(&self.ask("dumpxml", &["--security-info"]).await?)?;
        let job = self.ask("domjobinfo", &[]).await?;
        let kind = job.lines().find_map(|line| line.strip_prefix("Job type:"));
        match kind.map(str::trim) {
            None | Some("None") => {}
            Some(kind) => found.push(format!(
                "a job of libvirt's is under way ({kind}): wait for its end, or `virsh --connect {} domjobabort {}`",
                self.uri, self.name
            )),
        }
        Ok(found)
    }

    /// Files and devices in its description, with the paths of volumes of storage pools.
    pub(crate) async fn named(&self) -> Result<Named> {
        let mut named = obstacles::named(&self.ask("dumpxml", &[]).await?)?;
        for (pool, volume) in &named.volumes {
            let words = ["vol-path", "--pool", pool, "--", volume];
            let path = self.virsh(&words, Input::Nothing, ANSWER).await?;
            named.files.insert(path.trim().to_owned());
        }
        Ok(named)
    }

    /// Makes QEMU carry out a command; returns its answer, or the words of its refusal.
    pub(crate) async fn qmp(
        &self,
        command: &str,
        arguments: Value,
        descriptor: Option<OwnedFd>,
    ) -> Result<std::result::Result<Value, String>> {
        let line = json!({"execute": command, "arguments": arguments}).to_string();
        let (words, input) = match descriptor {
            None => (vec!["qemu-monitor-command", &self.uuid, &line], Input::Nothing),
            Some(descriptor) => (
                vec!["qemu-monitor-command", "--pass-fds", "0", &self.uuid, &line],
                Input::Descriptor(descriptor),
            ),
        };
        let said = self.virsh(&words, input, ANSWER).await?;
        answer(&said)
    }

    /// Makes QEMU use the descriptor by which its process is found.
    async fn run(&self, command: &'static str, descriptor: Option<OwnedFd>) -> Result<()> {
        let answer = self.qmp(command, json!({"fdname": FOUND_BY}), descriptor).await?;
        let refused = |description| Error::Refused { command, description };
        answer.map(drop).map_err(refused)
    }

    /// The output of `virsh` for a command with this domain.
    async fn ask(&self, command: &str, more: &[&str]) -> Result<String> {
        let words = [&[command], more, &[&self.uuid[..]]].concat();
        self.virsh(&words, Input::Nothing, ANSWER).await
    }

    async fn virsh(&self, words: &[&str], input: Input<'_>, limit: Duration) -> Result<String> {
        let mut command = Command::new(VIRSH);
        // The output is parsed.
        command.env("LC_ALL", "C").kill_on_drop(true);
        command.args(["--quiet", "--connect", &self.uri]).args(words);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let (input, text) = match input {
            Input::Nothing => (Stdio::null(), ""),
            Input::Descriptor(descriptor) => (Stdio::from(descriptor), ""),
            Input::Text(text) => (Stdio::piped(), text),
        };
        command.stdin(input);
        let answered = async {
            let mut child = command.spawn().map_err(|error| match error.kind() {
                std::io::ErrorKind::NotFound => Error::Libvirt(
                    "virsh is not there, by which libvirt is asked; install it (Debian: libvirt-clients)"
                        .to_owned(),
                ),
                _ => Error::io("start virsh")(error),
            })?;
            // Closes the descriptor of its input here.
            drop(command);
            let mut given = child.stdin.take();
            let give = async {
                if let Some(given) = &mut given {
                    given.write_all(text.as_bytes()).await?;
                }
                drop(given);
                Ok(())
            };
            let (given, output) = tokio::join!(give, child.wait_with_output());
            let output = output.map_err(Error::io("wait for virsh"))?;
            if !output.status.success() {
                return Err(self.refused(words[0], &String::from_utf8_lossy(&output.stderr)));
            }
            given.map_err(Error::io("write to virsh"))?;
            String::from_utf8(output.stdout).map_err(|_| Error::Malformed("virsh prints no UTF-8".to_owned()))
        };
        in_time(&format!("answered `virsh {}`", words[0]), limit, answered).await
    }

    fn refused(&self, command: &str, said: &str) -> Error {
        let lines = said
            .lines()
            .map(|line| line.strip_prefix("error: ").unwrap_or(line).trim());
        let said = lines
            .filter(|line| !line.is_empty())
            .collect::<Vec<_>>()
            .join(": ");
        let is_gone = [
            "failed to get domain",
            "domain is not running",
            "Domain not found",
        ];
        if said.contains("failed to connect to the hypervisor") {
            return Error::Libvirt(format!(
                "libvirt is not reached at {} ({said}): see whether its daemon runs, and which connections `virsh uri` has",
                self.uri
            ));
        }
        if is_gone.iter().any(|words| said.contains(words)) {
            return Error::Gone;
        }
        Error::Libvirt(format!("`virsh {command}` of the domain {}: {said}", self.name))
    }
}

/// Parses QEMU's answer in the output of `virsh`.
fn answer(said: &str) -> Result<std::result::Result<Value, String>> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Answer {
        Returned { r#return: Value },
        Failed { error: Words },
    }
    #[derive(Deserialize)]
    struct Words {
        desc: String,
    }
    match serde_json::from_str(said) {
        Ok(Answer::Returned { r#return }) => Ok(Ok(r#return)),
        Ok(Answer::Failed { error }) => Ok(Err(error.desc)),
        Err(error) => Err(Error::Malformed(format!("{}: {error}", said.trim()))),
    }
}

/// The process whose command line has `word`, and that has `target` open.
fn holder_of(target: &str, word: &str) -> Result<Option<u32>> {
    let processes = std::fs::read_dir("/proc").map_err(Error::io("list the processes"))?;
    for process in processes.flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // A process that has ended meanwhile is another one.
        let line = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
        if !line
            .split(|byte| *byte == 0)
            .any(|given| given == word.as_bytes())
        {
            continue;
        }
        let open = std::fs::read_dir(process.path().join("fd"));
        let mut open = open.into_iter().flatten().flatten();
        if open.any(|entry| std::fs::read_link(entry.path()).is_ok_and(|path| path.as_os_str() == target)) {
            return Ok(Some(pid));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_told_from_refusals() {
        let returned = answer("{\"return\":{\"status\":\"running\"},\"id\":\"libvirt-4\"}\n\n");
        assert_eq!(returned.unwrap().unwrap()["status"], "running");
        let refused = answer("{\"id\":\"libvirt-5\",\"error\":{\"class\":\"GenericError\",\"desc\":\"no\"}}");
        assert_eq!(refused.unwrap().unwrap_err(), "no");
        assert!(matches!(answer("running"), Err(Error::Malformed(_))));
    }

    #[test]
    fn what_virsh_complains_of_is_told_apart() {
        let domain = Domain {
            uri: "qemu:///system".to_owned(),
            name: "web".to_owned(),
            uuid: "u".to_owned(),
        };
        let gone = domain.refused("domstate", "error: failed to get domain 'u'\n\n");
        assert!(matches!(gone, Error::Gone));
        let gone = domain.refused("resume", "error: Failed to resume domain\nerror: Requested operation is not valid: domain is not running\n");
        assert!(matches!(gone, Error::Gone));
        let unreached = "error: failed to connect to the hypervisor\nerror: Failed to connect socket to '/run/libvirt/libvirt-sock'\n";
        let said = domain.refused("domstate", unreached).to_string();
        assert!(
            said.contains("not reached at qemu:///system") && said.contains("libvirt-sock"),
            "{said}"
        );
        let said = domain.refused(
            "create",
            "error: Failed to create domain from /dev/stdin\nerror: no bridge\n",
        );
        assert_eq!(
            said.to_string(),
            "`virsh create` of the domain web: Failed to create domain from /dev/stdin: no bridge"
        );
    }

    #[test]
    fn a_process_is_found_by_what_it_has_open() {
        let (ours, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let inode = std::fs::File::from(OwnedFd::from(ours.try_clone().unwrap()))
            .metadata()
            .unwrap()
            .ino();
        let target = format!("socket:[{inode}]");
        let line = std::fs::read_to_string("/proc/self/cmdline").unwrap();
        let word = line.split('\0').next().unwrap();
        assert_eq!(holder_of(&target, word).unwrap(), Some(std::process::id()));
        assert_eq!(holder_of(&target, "no such word").unwrap(), None);
        assert_eq!(holder_of("socket:[0]", word).unwrap(), None);
    }
}
