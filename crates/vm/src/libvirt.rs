//! Domains of libvirt: a QEMU that libvirt has started, and whose monitor it has for itself.
//!
//! libvirt is asked by its own `virsh`, one process for each question, and QEMU through it (`virsh qemu-monitor-command`). A library of libvirt's
//! would have to be on every machine that this program is on, and most have no libvirt. A process takes some 15 ms, of which a move has a handful
//! while the guest stands still.
//!
//! libvirt sees in QEMU's events what is done to the guest behind it. So it knows a guest that was stopped as paused, and a QEMU that has ended as a domain
//! that is off. Only that a guest is to go on is asked of libvirt itself ([`Domain::resume`]): it takes what it gave back when the guest stopped.

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

/// The program that libvirt is asked by.
const VIRSH: &str = "virsh";

/// How long libvirt may take to answer. QEMU is behind it, which answers from its main loop.
const ANSWER: Duration = Duration::from_secs(15);

/// How long it may take to start a QEMU. At first it asks QEMU for all that this one can do.
const START: Duration = Duration::from_secs(60);

/// The name by which QEMU knows a descriptor that it is found by.
const FOUND_BY: &str = "verbatim-found-by";

/// A domain, on the host that this process is on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Domain {
    /// The connection to libvirt: `qemu:///system`.
    uri: String,
    name: String,
    uuid: String,
}

/// What `virsh` is given on its standard input.
enum Input<'a> {
    Nothing,
    /// A descriptor that is meant for QEMU.
    Descriptor(OwnedFd),
    Text(&'a str),
}

impl Domain {
    /// The one of this name that runs, or is paused.
    pub async fn find(uri: &str, name: &str) -> Result<Self> {
        // By a number virsh would find another one.
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

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The connection to its libvirt.
    pub fn uri(&self) -> &str {
        &self.uri
    }

    /// As people and `virsh` name it.
    pub fn line(&self) -> Vec<String> {
        ["libvirt", &self.uri, &self.name].map(str::to_owned).into()
    }

    /// How it is, in libvirt's words; `None`: libvirt does not know it.
    pub async fn state(&self) -> Result<Option<String>> {
        match self.ask("domstate", &[]).await {
            Ok(state) => Ok(Some(state.trim().to_owned())),
            Err(Error::Gone) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Its QEMU's process: that which has a descriptor that libvirt passes on to it.
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

    /// The files of its disks and images, with whether it may write to each.
    pub async fn files(&self) -> Result<Vec<(PathBuf, bool)>> {
        obstacles::files(&self.ask("dumpxml", &[]).await?)
    }

    /// Lets the guest run.
    pub async fn resume(&self) -> Result<()> {
        self.ask("resume", &[]).await.map(drop)
    }

    /// Ends it. One that is not there or off is fine.
    pub async fn destroy(&self) -> Result<()> {
        match self.ask("destroy", &[]).await {
            Ok(_) | Err(Error::Gone) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// It has left this host for good, and its QEMU is killed: libvirt has seen that when this returns, and does not start it at the host's next boot.
    pub async fn left(&self) -> Result<()> {
        self.destroy().await?;
        match self.ask("autostart", &["--disable"]).await {
            // It was never defined.
            Ok(_) | Err(Error::Gone | Error::Libvirt(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// What stands in the way of moving it, as far as libvirt knows.
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

    /// Files and devices that its description names, volumes of storage pools by their paths.
    pub(crate) async fn named(&self) -> Result<Named> {
        let mut named = obstacles::named(&self.ask("dumpxml", &[]).await?)?;
        for (pool, volume) in &named.volumes {
            let words = ["vol-path", "--pool", pool, "--", volume];
            let path = self.virsh(&words, Input::Nothing, ANSWER).await?;
            named.files.insert(path.trim().to_owned());
        }
        Ok(named)
    }

    /// Has QEMU carry out a command; its answer, or the words with which it refuses.
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

    /// Has QEMU do something with the descriptor that it is found by.
    async fn run(&self, command: &'static str, descriptor: Option<OwnedFd>) -> Result<()> {
        let answer = self.qmp(command, json!({"fdname": FOUND_BY}), descriptor).await?;
        let refused = |description| Error::Refused { command, description };
        answer.map(drop).map_err(refused)
    }

    /// What `virsh` says to a command with this domain.
    async fn ask(&self, command: &str, more: &[&str]) -> Result<String> {
        let words = [&[command], more, &[&self.uuid[..]]].concat();
        self.virsh(&words, Input::Nothing, ANSWER).await
    }

    async fn virsh(&self, words: &[&str], input: Input<'_>, limit: Duration) -> Result<String> {
        let mut command = Command::new(VIRSH);
        // Its words are read.
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
            // It no longer has the descriptor of its input.
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

/// What QEMU has answered, as `virsh` prints it.
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
        // One that has ended meanwhile is not it.
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
