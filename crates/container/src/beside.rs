//! Commands that are added to a container, and move along with it.
//!
//! CRIU takes the tree below a container's first process, and what `runc exec` starts is not in it. A shell in the container opens
//! the standard streams, as for the first process; the guest library, which is loaded before the shell begins, leaves the process
//! that runc started, so that the rest is a child of the first process (`VERBATIM_DETACH`). It has the clocks of the container, which
//! has a time namespace once it has moved ([`clocks`](crate::clocks)).

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::Value;
use tokio::process::Command;

use crate::blocking::blocking;
use crate::bundle::SHELL;
use crate::clocks::Clocks;
use crate::error::Error;
use crate::init::Exit;
use crate::name::ContainerName;
use crate::runc::Runc;

/// A process leaves itself in a millisecond; a busy machine may need longer.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(30);

/// Runs its arguments with streams inside the container, as the first process has them.
const OPEN_STREAMS: &str = r#"exec </dev/null >>/run/verbatim/stdout 2>&1
unset VERBATIM_PRELOAD
exec "$@""#;

/// What `runc exec` is given.
#[derive(Debug, PartialEq, Eq)]
struct Added {
    env: Vec<String>,
    args: Vec<String>,
}

/// For a container with this configuration.
fn added(config: &Value, command: &[String], env: &[String]) -> Result<Added, &'static str> {
    if command.is_empty() {
        return Err("there is no command to run");
    }
    let process = &config["process"];
    if process["args"][0] != SHELL {
        return Err("it has no /bin/sh, which opens the standard streams of what is added");
    }
    let theirs = process["env"].as_array().into_iter().flatten();
    let theirs = theirs.filter_map(Value::as_str);
    let all: Vec<&str> = theirs.chain(env.iter().map(String::as_str)).collect();
    let value = |name: &str| {
        let mut set = all.iter().rev().filter_map(|variable| variable.split_once('='));
        set.find(|(theirs, _)| *theirs == name).map(|(_, value)| value)
    };
    let library = value("VERBATIM_PRELOAD").ok_or("it has no guest library")?;
    let preload = match value("LD_PRELOAD") {
        Some(others) => format!("LD_PRELOAD={library}:{others}"),
        None => format!("LD_PRELOAD={library}"),
    };
    let env = env.iter().cloned();
    let ours = [preload, "VERBATIM_DETACH=1".to_owned()];
    let shell = [SHELL, "-c", OPEN_STREAMS, "sh"].map(str::to_owned);
    Ok(Added {
        env: env.chain(ours).collect(),
        args: shell.into_iter().chain(command.iter().cloned()).collect(),
    })
}

impl Runc {
    /// Adds a command to a running container, with more environment variables (`NAME=VALUE`) than its first process has. It
    /// writes where that one writes, is a child of it, and moves along. Takes about 0.1 s.
    ///
    /// Nobody waits for its end. What keeps it from starting inside, a wrong name for one, is in the container's output.
    pub async fn add(
        &self,
        name: &ContainerName,
        bundle: &Path,
        command: &[String],
        env: &[String],
    ) -> Result<(), Error> {
        let file = bundle.join("config.json");
        let refuse = |reason: String| Error::Config {
            path: file.clone(),
            reason,
        };
        let config = std::fs::read_to_string(&file).map_err(|source| Error::file("read", &file, source))?;
        let config = serde_json::from_str(&config).map_err(|error| refuse(format!("not JSON: {error}")))?;
        let added = added(&config, command, env)
            .map_err(|reason| refuse(format!("nothing can be added to this container: {reason}")))?;

        static COUNT: AtomicU64 = AtomicU64::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let pid_file = bundle.join(format!("added-{number}.pid"));
        let log = bundle.join(format!("added-{number}.log"));
        let state = bundle.join(format!("added-{number}.state"));
        let outcome = match self.in_its_clocks(name, &state).await {
            Ok(command) => self.start_added(name, command, &added, &pid_file, &log).await,
            Err(error) => Err(error),
        };
        for file in [&pid_file, &log] {
            let _ = std::fs::remove_file(file);
        }
        let _ = std::fs::remove_dir_all(&state);
        outcome
    }

    /// runc, to be started in the time namespace of a container's first process; `folder` is for a copy of its state.
    async fn in_its_clocks(&self, name: &ContainerName, folder: &Path) -> Result<Command, Error> {
        let (state, copy) = (self.state_file(name), folder.join(name).join("state.json"));
        let failed = |source| Error::file("enter the time namespace of the container in", &state, source);
        let clocks = blocking({
            let state = state.clone();
            move || Clocks::of_container(&state, &copy)
        });
        Ok(match clocks.await.map_err(failed)? {
            None => self.command(),
            Some(clocks) => {
                let mut command = self.command_at(folder);
                clocks.enter(&mut command);
                command
            }
        })
    }

    async fn start_added(
        &self,
        name: &ContainerName,
        mut command: Command,
        added: &Added,
        pid_file: &Path,
        log: &Path,
    ) -> Result<(), Error> {
        command.arg("exec");
        for variable in &added.env {
            command.args(["--env", variable]);
        }
        let mut left = self
            .start_detached("exec", command, &added.args, name, pid_file, log)
            .await?;
        let status = match tokio::time::timeout(LEAVE_TIMEOUT, left.wait_exit()).await {
            Ok(Ok(Exit::Code(0))) => return Ok(()),
            Ok(Ok(exit)) => format!("the process ended: {exit:?}"),
            Ok(Err(source)) => return Err(Error::file("wait for the process named in", pid_file, source)),
            Err(_) => {
                // It is not in the tree, and would stop every migration. If the kernel does not let it end, nobody can.
                let _ = left.kill();
                let _ = tokio::time::timeout(LEAVE_TIMEOUT, left.wait_exit()).await;
                "the process did not become the container's own; does its shell load LD_PRELOAD?".to_owned()
            }
        };
        let output = std::fs::read_to_string(log).unwrap_or_default();
        Err(self.error("exec", name, status, log.parent().unwrap_or(log), &output))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn strings(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|text| (*text).to_owned()).collect()
    }

    #[test]
    fn what_is_added_has_the_containers_environment_and_streams() {
        let config = json!({"process": {
            "args": ["/bin/sh", "-c", "…", "sh", "first"],
            "env": ["A=1", "LD_PRELOAD=/theirs.so", "VERBATIM_PRELOAD=/ours.so"],
        }});
        let added = added(&config, &strings(&["second", "--option"]), &strings(&["B=2"])).unwrap();
        assert_eq!(
            added.env,
            ["B=2", "LD_PRELOAD=/ours.so:/theirs.so", "VERBATIM_DETACH=1"]
        );
        assert_eq!(added.args[..2], ["/bin/sh", "-c"]);
        assert_eq!(added.args[3..], ["sh", "second", "--option"]);
    }

    #[test]
    fn the_callers_preload_comes_before_the_containers() {
        let config = json!({"process": {
            "args": ["/bin/sh"], "env": ["VERBATIM_PRELOAD=/ours.so", "LD_PRELOAD=/theirs.so"],
        }});
        let added = added(&config, &strings(&["x"]), &strings(&["LD_PRELOAD=/callers.so"])).unwrap();
        assert_eq!(added.env[1], "LD_PRELOAD=/ours.so:/callers.so");
    }

    #[test]
    fn what_cannot_be_added_is_refused() {
        let with = |args, env: &[&str]| json!({"process": {"args": [args], "env": env}});
        let command = strings(&["x"]);
        assert!(added(&with("/bin/sh", &["VERBATIM_PRELOAD=/l.so"]), &[], &[]).is_err());
        assert!(added(&with("/bin/sh", &["A=1"]), &command, &[]).is_err());
        assert!(added(&with("first", &["VERBATIM_PRELOAD=/l.so"]), &command, &[]).is_err());
    }
}
