//! Machines that are hosts: each has a bridge, rxe on it, and an agent.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, ensure};
use serde::Deserialize;
use tempfile::TempDir;
use verbatim_e2e::eventually;
use verbatim_testbed::{Command, Ended, Network, Vm, VmConfig};

use crate::built;

/// The hosts. All cases have the moving side on the first; it goes to the last.
pub const HOSTS: [&str; 3] = ["a", "b", "c"];

/// How long a command may take that does not wait for a program.
pub const SHORT: Duration = Duration::from_secs(60);

/// What agents are told if this program was: how much they and CRIU say, for a look into a blackout.
const TOLD_TO_AGENTS: [&str; 2] = ["VERBATIM_LOG", "VERBATIM_CRIU_LOG_LEVEL"];

/// The network of all machines.
fn address(index: usize) -> String {
    format!("10.78.0.{}", index + 1)
}

/// A machine for one test. One processor: the kernel changes its own code while it runs, which several emulated ones take badly.
pub fn boot(name: &str, index: usize, network: &Network) -> anyhow::Result<Vm> {
    let config = VmConfig {
        cpus: 1,
        memory_mib: 1536,
        bridge: true,
        rxe: true,
        address: Some(
            format!("{}/16", address(index))
                .parse()
                .map_err(anyhow::Error::msg)?,
        ),
        ..VmConfig::new(format!("rnic-{name}-{}", std::process::id()))
    };
    Ok(Vm::boot(&config, network)?)
}

/// Runs a command in a machine; an error if its status is not 0.
pub fn succeed(vm: &Vm, command: &Command, limit: Duration) -> anyhow::Result<String> {
    let ended = vm.run(command, limit)?;
    ensure!(ended.code == 0, "status {}: {}", ended.code, words(&ended));
    Ok(String::from_utf8_lossy(&ended.stdout).into_owned())
}

/// What a command has written.
pub fn words(ended: &Ended) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    format!("{}{}", text(&ended.stdout), text(&ended.stderr))
}

/// All of them, with agents.
pub struct Machines {
    vms: Vec<Vm>,
    cluster: TempDir,
    verbatim: String,
    script: String,
}

/// As `verbatim ps --json` says it.
#[derive(Debug, Deserialize)]
pub struct Row {
    pub name: String,
    pub state: String,
    pub address: String,
    pub exit_status: Option<i32>,
    pub pid: Option<u32>,
}

impl Machines {
    /// Boots them. Their agents fail on order ([`Self::order_faults`]).
    pub fn up() -> anyhow::Result<Self> {
        let path = |path: &Path| {
            Ok::<_, anyhow::Error>(path.to_str().context("a path that is not UTF-8")?.to_owned())
        };
        let verbatim = path(&built("verbatim-with-faults")?)?;
        // Machines have a /run of their own, and see everything else.
        let cluster = tempfile::tempdir_in(built("verbatim")?.parent().context("a folder")?)?;
        let hosts = HOSTS.iter().enumerate();
        let made = std::process::Command::new(&verbatim)
            .arg("hosts")
            .arg(cluster.path())
            .args(hosts.map(|(index, name)| format!("{name}={}", address(index))))
            .arg("--trusted-network")
            .output()?;
        ensure!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let network = Network::new()?;
        let boot = |(index, name): (usize, &&str)| boot(name, index, &network);
        let vms = HOSTS
            .iter()
            .enumerate()
            .map(boot)
            .collect::<anyhow::Result<Vec<_>>>()?;
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vm/rnic/host.sh");
        let machines = Self {
            vms,
            cluster,
            verbatim,
            script: path(&script.canonicalize()?)?,
        };
        for host in HOSTS {
            machines
                .start_agent(host)
                .with_context(|| format!("making {host} a host"))?;
        }
        Ok(machines)
    }

    fn vm(&self, host: &str) -> anyhow::Result<&Vm> {
        let index = HOSTS.iter().position(|name| *name == host);
        Ok(&self.vms[index.context("no such host")?])
    }

    /// Starts a host's agent, for the first time or after one that has ended.
    pub fn start_agent(&self, host: &str) -> anyhow::Result<()> {
        let folder = self.cluster.path().to_str().context("a path that is not UTF-8")?;
        let argv = [self.script.as_str(), self.verbatim.as_str(), folder, host];
        let mut command = Command::new(argv);
        for name in TOLD_TO_AGENTS {
            if let Ok(value) = std::env::var(name) {
                command = command.env(name, value);
            }
        }
        succeed(self.vm(host)?, &command, SHORT).map(drop)
    }

    /// Runs a script on a host; what it printed.
    pub fn shell(&self, host: &str, script: &str) -> anyhow::Result<String> {
        self.shell_for(host, script, SHORT)
    }

    /// The same, where it takes longer.
    pub fn shell_for(&self, host: &str, script: &str, limit: Duration) -> anyhow::Result<String> {
        succeed(self.vm(host)?, &Command::new(["sh", "-c", script]), limit)
    }

    /// Orders failures of a host's agent, a line `POINT ACTION` for each; none if it is empty.
    pub fn order_faults(&self, host: &str, lines: &str) -> anyhow::Result<()> {
        let script = format!(
            "cd /run/verbatim && {{ [ -n '{lines}' ] && rm -f faults.reached; printf '%s' '{lines}' >faults.new; mv faults.new faults; }}"
        );
        self.shell(host, &script).map(drop)
    }

    /// Waits until a host's agent has come to a point at which a failure was ordered.
    pub fn reached(&self, host: &str, point: &str) -> anyhow::Result<()> {
        let script =
            format!("until grep -q '{point}' /run/verbatim/faults.reached 2>/dev/null; do sleep 0.1; done");
        self.shell(host, &script)
            .map(drop)
            .with_context(|| format!("the agent of {host} does not come to {point}"))
    }

    /// Switches a machine off, as if its power had failed.
    pub fn switch_off(&self, host: &str) -> anyhow::Result<()> {
        let vm = self.vm(host)?;
        // Nobody is left to answer.
        let _ = vm.run(
            &Command::new(["sh", "-c", "echo o >/proc/sysrq-trigger; sleep 60"]),
            SHORT,
        );
        eventually(&format!("{host} switched off"), SHORT, || {
            Ok((!vm.record().is_alive()).then_some(()))
        })
    }

    /// Runs `verbatim` on a host; how that ended.
    pub fn verbatim_ended(&self, host: &str, arguments: &[&str], limit: Duration) -> anyhow::Result<Ended> {
        let argv = [&[self.verbatim.as_str()], arguments].concat();
        Ok(self.vm(host)?.run(&Command::new(argv), limit)?)
    }

    /// Runs `verbatim` on a host; what it printed.
    pub fn verbatim(&self, host: &str, arguments: &[&str], limit: Duration) -> anyhow::Result<String> {
        let argv = [&[self.verbatim.as_str()], arguments].concat();
        succeed(self.vm(host)?, &Command::new(argv), limit)
            .with_context(|| format!("verbatim {} on {host}", arguments.join(" ")))
    }

    /// Starts an instance with rxe0; its address.
    pub fn start(&self, host: &str, name: &str, argv: &[&str]) -> anyhow::Result<String> {
        let arguments = [&["run", "--json", "--name", name, "--rnic", "rxe0", "--"], argv].concat();
        let row: Row = serde_json::from_str(&self.verbatim(host, &arguments, SHORT)?)?;
        Ok(row.address)
    }

    /// What a host's agent lists.
    pub fn rows(&self, host: &str) -> anyhow::Result<Vec<Row>> {
        Ok(serde_json::from_str(&self.verbatim(
            host,
            &["ps", "--json"],
            SHORT,
        )?)?)
    }

    /// How an instance is, on a host that has it.
    pub fn row(&self, host: &str, name: &str) -> anyhow::Result<Row> {
        let rows = self.rows(host)?;
        let row = rows.into_iter().find(|row| row.name == name);
        row.with_context(|| format!("{host} has no {name}"))
    }

    /// Where an instance has last been running or has ended.
    pub fn host_of(&self, name: &str) -> anyhow::Result<&'static str> {
        for host in HOSTS {
            let rows = self.rows(host)?;
            if rows
                .iter()
                .any(|row| row.name == name && !row.state.starts_with("moved"))
            {
                return Ok(host);
            }
        }
        anyhow::bail!("no host has {name}")
    }

    /// What it wrote.
    pub fn output(&self, host: &str, name: &str) -> anyhow::Result<String> {
        self.verbatim(host, &["logs", name], SHORT)
    }

    /// Waits until it has ended; its status.
    pub fn ended(&self, host: &str, name: &str, limit: Duration) -> anyhow::Result<i32> {
        eventually(&format!("the end of {name}"), limit, || {
            Ok(self.row(host, name)?.exit_status)
        })
    }

    /// Waits until something listens on a TCP port in an instance.
    pub fn listens(&self, host: &str, name: &str, port: u16) -> anyhow::Result<()> {
        // Local port and state 0A: proc_pid_net(5).
        let script = format!(
            "cd /run/verbatim/net; until nsenter --net={name} grep -q ':{port:04X} [0-9A-F]*:[0-9A-F]* 0A' /proc/net/tcp \
             /proc/net/tcp6; do sleep 0.1; done"
        );
        self.shell(host, &script)
            .map(drop)
            .with_context(|| format!("{name} does not listen:\n{}", self.looks(host, name)))
    }

    /// For the message of a case that failed: how an instance is, what it has written, and where its threads are.
    fn looks(&self, host: &str, name: &str) -> String {
        let said = |result: anyhow::Result<String>| result.unwrap_or_else(|error| format!("{error:#}"));
        let row = self.row(host, name);
        let pid = row.as_ref().map(|row| row.pid).ok().flatten();
        let threads = pid.map(|pid| {
            let script = format!(
                "cd /proc/{pid}/task && for t in *; do echo \"thread $t $(cat $t/comm) $(cat $t/syscall)\"; cat $t/stack; done; \
                 ls -l /proc/{pid}/fd; nsenter --net=/proc/{pid}/ns/net cat /proc/net/tcp"
            );
            said(self.shell(host, &script))
        });
        let output = said(self.output(host, name));
        format!("{row:?}\n{output}\n{}", threads.unwrap_or_default())
    }

    /// Sends SIGINT to an instance's first process.
    pub fn interrupt(&self, host: &str, name: &str) -> anyhow::Result<()> {
        let pid = self.row(host, name)?.pid.context("it does not run")?;
        self.shell(host, &format!("kill -INT {pid}")).map(drop)
    }

    /// The packets that an RNIC's port has sent, as its driver counts them.
    pub fn sent(&self, host: &str) -> anyhow::Result<u64> {
        let counter = "cat /sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts";
        let said = self.shell(host, counter)?;
        said.trim().parse().context("a counter that is no number")
    }

    /// Ends instances that are there, wherever.
    pub fn clear(&self) -> anyhow::Result<()> {
        for host in HOSTS {
            let rows = self.rows(host)?;
            for row in rows.iter().filter(|row| !row.state.starts_with("moved")) {
                self.verbatim(host, &["stop", &row.name], SHORT)?;
            }
        }
        Ok(())
    }

    /// For the message of a case that failed: what agents and kernels have said last.
    pub fn told(&self) -> String {
        // What a warning of the kernel's is of stands at its beginning.
        let script = "tail -n 30 /run/agent.log; dmesg | grep -m 1 -A 12 'cut here'; dmesg | tail -n 15";
        let told = HOSTS.iter().zip(&self.vms).map(|(host, vm)| {
            let said = vm.run(&Command::new(["sh", "-c", script]), SHORT);
            let said = said.map_or_else(|error| error.to_string(), |ended| words(&ended));
            format!("\n--- {host}\n{said}")
        });
        told.collect()
    }
}
