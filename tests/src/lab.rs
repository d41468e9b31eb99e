//! A lab that goes away with its test, whatever becomes of that.

use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use verbatim_lab::{Lab, ServiceState};

use crate::instance::Instance;
use crate::releases::{Installed, Release};
use crate::running::{Finished, Running};
use crate::shim::Shim;
use crate::tools::Tools;
use crate::wait::{eventually, patience};

/// A command that does nothing but ask or order takes no longer than this.
const COMMAND_LIMIT: Duration = Duration::from_secs(60);

/// How long the hosts may take to be ready.
const READY_LIMIT: Duration = Duration::from_secs(20);

/// How long a program may take until it listens.
const LISTEN_LIMIT: Duration = Duration::from_secs(20);

/// A running lab with a name of its own.
///
/// It is taken down by a process that waits for the end of a pipe which only this one holds: so it goes down when this
/// is dropped, when the test panics, and when somebody kills the test.
pub struct TestLab {
    tools: Tools,
    name: String,
    /// Always there, but for the time within `up`.
    lab: Option<Lab>,
    keeper: Option<Child>,
    /// Of the hosts whose programs can be exchanged.
    installed: Installed,
}

impl TestLab {
    /// Brings up a lab with these hosts.
    pub fn up(tools: &Tools, hosts: &[&str]) -> anyhow::Result<Self> {
        Self::up_with(tools, hosts, &[], None, None)
    }

    /// The same; what these hosts run can be exchanged ([`Self::install`]), and is of these releases at first. With `volumes` each host has
    /// a volume daemon, which copies in that way. With `umask` all daemons are started with that.
    pub fn up_with(
        tools: &Tools,
        hosts: &[&str],
        releases: &[(&str, Release)],
        volumes: Option<&str>,
        umask: Option<u32>,
    ) -> anyhow::Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(1);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("e2e-{}-{number}", std::process::id());
        let keeper = keeper(&tools.verbatim, &name)?;
        let mut lab = Self {
            tools: tools.clone(),
            name,
            lab: None,
            keeper: Some(keeper),
            installed: Installed::new()?,
        };
        let (hosts, ready) = (hosts.join(","), patience(READY_LIMIT).as_secs().to_string());
        let mut arguments = ["lab", "up", "--hosts", &hosts, "--ready-timeout", &ready]
            .map(str::to_owned)
            .to_vec();
        for (host, release) in releases {
            lab.install(host, *release)?;
            let link = lab.installed.link(host);
            arguments.extend(["--binaries".to_owned(), format!("{host}={}", link.display())]);
        }
        arguments.extend(volumes.map(|transport| format!("--volumes={transport}")));
        let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
        match umask {
            None => lab.verbatim(&arguments)?,
            Some(umask) => {
                let mut command = Command::new("sh");
                let script = format!("umask {umask:04o}; exec \"$0\" \"$@\"");
                command
                    .args(["-c", &script])
                    .arg(&lab.tools.verbatim)
                    .args(&arguments);
                command.env("VERBATIM_LAB_NAME", &lab.name);
                Running::start("verbatim lab up", command)?
            }
        }
        .succeed(patience(COMMAND_LIMIT))?;
        lab.lab = Some(Lab::open(&lab.name)?);
        Ok(lab)
    }

    /// Takes it down; an error if anything of that failed.
    pub fn down(mut self) -> anyhow::Result<()> {
        self.end()
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The lab itself.
    pub fn lab(&self) -> &Lab {
        self.lab.as_ref().expect("`up` has set it")
    }

    /// What was built.
    pub fn tools(&self) -> &Tools {
        &self.tools
    }

    /// Puts the programs of a release on a host of [`Self::up_with`]. What runs there runs on as it is.
    pub fn install(&self, host: &str, release: Release) -> anyhow::Result<()> {
        self.installed.install(host, &release.folder(&self.tools)?)
    }

    /// Puts the monotonic clock and the uptime of a host's agent so many seconds ahead, as those of a machine that has been up
    /// for longer, and starts it again. The host is one whose programs can be exchanged.
    pub fn put_clocks_ahead(&self, host: &str, seconds: u64) -> anyhow::Result<()> {
        self.installed
            .install_ahead(host, &Release::This.folder(&self.tools)?, seconds)?;
        self.restart(host, "agent")
    }

    /// Ends a service of a host, at once, and starts the one that is installed there now.
    pub fn restart(&self, host: &str, service: &str) -> anyhow::Result<()> {
        self.lab().kill(host, service)?;
        Ok(self.lab().start(host, service)?)
    }

    /// The release of a service that runs on a host.
    pub fn release_of(&self, host: &str, service: &str) -> anyhow::Result<Release> {
        let pid = self.service_pid(host, service)?;
        let link = self.path(host, &format!("/proc/{pid}/exe"))?;
        let program = std::fs::read_link(&link).with_context(|| format!("cannot read {}", link.display()))?;
        let is_of = |release: Release| {
            Ok::<_, anyhow::Error>(release.verbatim(&self.tools)?.canonicalize()? == program)
        };
        if is_of(Release::This)? {
            Ok(Release::This)
        } else if is_of(Release::Previous)? {
            Ok(Release::Previous)
        } else {
            bail!(
                "{service} of {host} is {}, which is of no release",
                program.display()
            )
        }
    }

    /// Starts `verbatim` with these arguments, for this lab.
    pub fn verbatim(&self, arguments: &[&str]) -> anyhow::Result<Running> {
        self.verbatim_of(Release::This, arguments)
    }

    /// The same with the command of a release.
    pub fn verbatim_of(&self, release: Release, arguments: &[&str]) -> anyhow::Result<Running> {
        let program = match release {
            Release::This => self.tools.verbatim.clone(),
            Release::Previous => release.verbatim(&self.tools)?,
        };
        let mut command = Command::new(program);
        command.args(arguments).env("VERBATIM_LAB_NAME", &self.name);
        Running::start(format!("verbatim {}", arguments.join(" ")), command)
    }

    /// Runs `verbatim` with these arguments, and fails if it does.
    pub fn ask(&self, arguments: &[&str]) -> anyhow::Result<Finished> {
        self.verbatim(arguments)?.succeed(patience(COMMAND_LIMIT))
    }

    /// Runs `verbatim` with these arguments, which must fail with status 1; what it wrote to standard error.
    pub fn refused(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let finished = self.verbatim(arguments)?.wait(patience(COMMAND_LIMIT))?;
        if finished.code != 1 {
            bail!(
                "`{}` ended with status {} instead of 1{}",
                finished.what,
                finished.code,
                finished.output()
            );
        }
        Ok(finished.stderr)
    }

    /// Starts a program in a host, with the guest library.
    pub fn start(&self, host: &str, argv: &[&str]) -> anyhow::Result<Running> {
        self.start_preloaded(host, argv, None)
    }

    /// Starts a program in a host, with the guest library, and with another one before that.
    pub fn start_preloaded(&self, host: &str, argv: &[&str], shim: Option<&Shim>) -> anyhow::Result<Running> {
        let (program, arguments) = argv.split_first().context("there is no command to run")?;
        let mut command = self.lab().command(host, program)?;
        let mut preload = OsString::new();
        if let Some(shim) = shim {
            preload.push(shim.path());
            preload.push(":");
            command.envs(shim.settings().iter().map(|(variable, value)| (variable, value)));
        }
        preload.push(&self.tools.library);
        command.args(arguments).env("LD_PRELOAD", preload);
        Running::start(format!("{host}: {}", argv.join(" ")), command)
    }

    /// Starts a program in a host as it is.
    pub fn start_plain(&self, host: &str, argv: &[&str]) -> anyhow::Result<Running> {
        let (program, arguments) = argv.split_first().context("there is no command to run")?;
        let mut command = self.lab().command(host, program)?;
        command.args(arguments);
        Running::start(format!("{host}: {}", argv.join(" ")), command)
    }

    /// Starts an instance.
    pub fn instance(&self, host: &str, name: &str, argv: &[&str]) -> anyhow::Result<Instance<'_>> {
        Instance::run(self, host, &["--name", name, "--"], argv)
    }

    /// Starts an instance that is a virtual machine, by QEMU's arguments.
    pub fn machine(&self, host: &str, name: &str, arguments: &[&str]) -> anyhow::Result<Instance<'_>> {
        self.machine_with(host, name, &[], arguments)
    }

    /// The same with options of `verbatim run`.
    pub fn machine_with(
        &self,
        host: &str,
        name: &str,
        options: &[&str],
        arguments: &[&str],
    ) -> anyhow::Result<Instance<'_>> {
        Instance::run(
            self,
            host,
            &[&["--vm", name], options, &["--"]].concat(),
            arguments,
        )
    }

    /// One that is there already.
    pub fn known(&self, name: &str) -> Instance<'_> {
        Instance::of(self, name)
    }

    /// Starts an instance of an OCI bundle.
    pub fn bundle(&self, host: &str, name: &str, bundle: &Path) -> anyhow::Result<Instance<'_>> {
        let bundle = bundle.to_str().context("a path that is not UTF-8")?;
        Instance::run(self, host, &["--name", name], &["--bundle", bundle])
    }

    /// A host's address.
    pub fn address(&self, host: &str) -> anyhow::Result<String> {
        let status = self.lab().status()?;
        Ok(status
            .host(host)
            .with_context(|| format!("there is no host {host}"))?
            .address
            .to_string())
    }

    /// Where a path of a host is for this process.
    pub fn path(&self, host: &str, path: &str) -> anyhow::Result<PathBuf> {
        Ok(self.lab().host_path(host, path)?)
    }

    /// Waits until something listens on a TCP port in the network of a process of a host; of the host itself: pid 1.
    pub fn listens(&self, host: &str, pid: i32, port: u16) -> anyhow::Result<()> {
        let tables = ["tcp", "tcp6"].map(|table| self.path(host, &format!("/proc/{pid}/net/{table}")));
        let tables = tables.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
        eventually(
            &format!("a program on {host} that listens on port {port}"),
            patience(LISTEN_LIMIT),
            || {
                let listening = tables.iter().any(|table| {
                    std::fs::read_to_string(table).is_ok_and(|table| has_listener(&table, port))
                });
                Ok(listening.then_some(()))
            },
        )
    }

    /// The process of a service, in its host's PID namespace.
    pub fn service_pid(&self, host: &str, service: &str) -> anyhow::Result<u32> {
        let status = self.lab().status()?;
        let state = status
            .host(host)
            .and_then(|host| host.service(service))
            .map(|service| &service.state);
        let Some(ServiceState::Running { pid }) = state else {
            bail!("{service} of {host} does not run: {state:?}");
        };
        Ok(*pid)
    }

    /// The processor time that a service of a host has used.
    pub fn cpu_time(&self, host: &str, service: &str) -> anyhow::Result<Duration> {
        let pid = self.service_pid(host, service)?;
        let stat = std::fs::read_to_string(self.path(host, &format!("/proc/{pid}/stat"))?)?;
        // Fields 14 and 15, in clock ticks of which Linux has 100 a second everywhere; field 2 may hold spaces.
        let (_, rest) = stat.rsplit_once(')').context("a malformed stat file")?;
        let mut fields = rest.split_ascii_whitespace().skip(14 - 3);
        let mut ticks = || {
            fields
                .next()
                .and_then(|field| field.parse::<u64>().ok())
                .context("a malformed stat file")
        };
        Ok(Duration::from_millis(10 * (ticks()? + ticks()?)))
    }

    /// Orders failures at the named points of a host's agent: lines of `POINT ACTION`; an empty text ends that.
    pub fn order_faults(&self, host: &str, faults: &str) -> anyhow::Result<()> {
        if !self.tools.fail_on_order() {
            bail!(
                "the agents of this lab take no such orders: `Tools::that_fail_on_order` has those that do"
            );
        }
        let path = self.path(host, "/run/verbatim/faults")?;
        std::fs::write(&path, faults).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Waits until a service has ended.
    pub fn ended(&self, host: &str, service: &str) -> anyhow::Result<()> {
        eventually(&format!("the end of {service} on {host}"), COMMAND_LIMIT, || {
            let status = self.lab().status()?;
            let state = status.host(host).and_then(|host| host.service(service));
            let state = state.map(|service| &service.state);
            Ok(matches!(state, Some(ServiceState::Exited { .. })).then_some(()))
        })
    }

    /// The last lines of every service's log, for whoever has to find out why a test failed.
    pub fn logs(&self) -> String {
        const LINES: usize = 40;
        let Some(lab) = &self.lab else {
            return String::new();
        };
        let mut text = String::new();
        for host in lab.hosts() {
            for service in ["nic", "agent", "volumes"] {
                let path = lab
                    .state_dir()
                    .join("hosts")
                    .join(host)
                    .join(format!("{service}.log"));
                let log = std::fs::read_to_string(&path).unwrap_or_default();
                let lines: Vec<_> = log.lines().collect();
                let tail = &lines[lines.len().saturating_sub(LINES)..];
                if !tail.is_empty() {
                    text.push_str(&format!("\n--- {service} of {host}\n{}", tail.join("\n")));
                }
            }
        }
        text
    }

    fn end(&mut self) -> anyhow::Result<()> {
        let Some(mut keeper) = self.keeper.take() else {
            return Ok(());
        };
        // The end of the pipe.
        drop(keeper.stdin.take());
        let mut output = String::new();
        if let Some(mut stderr) = keeper.stderr.take() {
            stderr.read_to_string(&mut output)?;
        }
        if !keeper.wait()?.success() {
            bail!("lab {} could not be taken down: {output}", self.name);
        }
        Ok(())
    }
}

impl Drop for TestLab {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            eprintln!("{error:#}");
        }
    }
}

/// Starts the process that takes the lab down when this one lets go of its standard input.
fn keeper(verbatim: &Path, lab: &str) -> anyhow::Result<Child> {
    use std::os::unix::process::CommandExt;
    let mut command = Command::new("sh");
    command
        .args(["-c", r#"cat >/dev/null; exec "$0" --lab "$1" lab down"#])
        .arg(verbatim)
        .arg(lab)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        // A terminal's Ctrl-C is not for it.
        .process_group(0);
    command.spawn().context("cannot start sh")
}

/// Whether a table of TCP sockets has a listener on `port`: state 0A, proc_pid_net(5).
fn has_listener(table: &str, port: u16) -> bool {
    let suffix = format!(":{port:04X}");
    table.lines().skip(1).any(|line| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let (local, state) = (fields.next(), fields.nth(1));
        local.is_some_and(|local| local.ends_with(&suffix)) && state == Some("0A")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_is_found_by_port_and_state() {
        let table = "\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:4854 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0
   1: 0100007F:4855 0100007F:C350 01 00000000:00000000 00:00000000 00000000     0        0 2 1 0 20 4 30 10 -1
";
        assert!(has_listener(table, 0x4854));
        assert!(!has_listener(table, 0x4855), "a connection is no listener");
        assert!(!has_listener(table, 0x4856));
    }
}
