//! The lab and the machine that all cases share.

use anyhow::{Context, bail, ensure};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use verbatim_e2e::{Running, TestLab, Tools};
use verbatim_testbed::{Network, Vm, VmConfig};

/// The lab's host with our RNIC.
const HOST: &str = "nic";
/// The machine's addresses; the lab's hosts count from 1.
const VM_ADDRESS: &str = "10.77.0.100";
/// How long a program may take until it listens, with one processor emulating two.
const LISTEN_LIMIT: Duration = Duration::from_secs(30);
/// How long a command of ours may take.
const SHORT: Duration = Duration::from_secs(30);

/// Which end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Our software RNIC, in a host of the lab.
    Ours,
    /// The kernel's rxe, in the machine.
    Rxe,
    /// rxe through our guest library's backend for the system's own libibverbs.
    GuestOverRxe,
}

impl End {
    /// Its name in those of the tests.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::Rxe => "rxe",
            Self::GuestOverRxe => "guest-over-rxe",
        }
    }

    /// The options by which perftest and vcheck find device and GID. Our first GIDs are of the IPv4 and the routed IPv6
    /// address; rxe's are in the order in which the addresses came, the link-local one first.
    pub fn device(self, ipv6: bool) -> &'static [&'static str] {
        match (self, ipv6) {
            (Self::Ours, false) => &["-d", "verbatim0", "-x", "0"],
            (Self::Ours, true) => &["-d", "verbatim0", "-x", "1"],
            (Self::Rxe | Self::GuestOverRxe, false) => &["-d", "rxe0", "-x", "1"],
            (Self::Rxe | Self::GuestOverRxe, true) => &["-d", "rxe0", "-x", "2"],
        }
    }
}

/// A lab with one host, and a machine on its bridge.
pub struct Site {
    // In the order in which they go.
    vm: Vm,
    network: Network,
    lab: TestLab,
    no_ipv6: Option<String>,
}

impl Site {
    /// The one that all cases share, which is made by the first of them.
    pub fn shared(slot: &mut Option<Self>) -> anyhow::Result<&Self> {
        if slot.is_none() {
            *slot = Some(Self::up()?);
        }
        slot.as_ref().context("it was made just now")
    }

    fn up() -> anyhow::Result<Self> {
        if let Some(obstacle) = Tools::obstacle() {
            bail!("{obstacle}");
        }
        let lab = TestLab::up(&Tools::find()?, &[HOST])?;
        let network = Network::of_lab(lab.name())?;
        let config = VmConfig {
            address: Some(format!("{VM_ADDRESS}/16").parse().map_err(anyhow::Error::msg)?),
            rxe: true,
            ..VmConfig::new(format!("vm-{}", std::process::id()))
        };
        let vm = Vm::boot(&config, &network)?;
        let no_ipv6 = add_ipv6(&lab, &vm).err().map(|error| format!("{error:#}"));
        Ok(Self {
            vm,
            network,
            lab,
            no_ipv6,
        })
    }

    /// Why nothing can be tested over IPv6, if so.
    pub fn no_ipv6(&self) -> Option<&str> {
        self.no_ipv6.as_deref()
    }

    /// Ends the machine, then the lab.
    pub fn down(self) -> anyhow::Result<()> {
        drop(self.vm);
        self.lab.down()
    }

    /// The machine.
    pub fn vm(&self) -> &Vm {
        &self.vm
    }

    /// The machine's name.
    pub fn name(&self) -> &str {
        &self.vm.record().name
    }

    /// What was built.
    pub fn tools(&self) -> &Tools {
        self.lab.tools()
    }

    /// The address of an end.
    pub fn address(&self, end: End) -> anyhow::Result<String> {
        match end {
            End::Ours => self.lab.address(HOST),
            End::Rxe | End::GuestOverRxe => Ok(VM_ADDRESS.to_owned()),
        }
    }

    /// Starts a program at an end.
    pub fn start(&self, end: End, argv: &[&str]) -> anyhow::Result<Running> {
        match end {
            End::Ours => self.lab.start(HOST, argv),
            End::Rxe => self.in_vm(argv, &[]),
            End::GuestOverRxe => self.with_library("rdma-core", argv),
        }
    }

    /// Starts a program in the machine with our guest library and this backend of it.
    pub fn with_library(&self, backend: &str, argv: &[&str]) -> anyhow::Result<Running> {
        let preload = format!("LD_PRELOAD={}", self.tools().library.display());
        let backend = format!("VERBATIM_BACKEND={backend}");
        self.in_vm(argv, &["--env", &preload, "--env", &backend])
    }

    fn in_vm(&self, argv: &[&str], options: &[&str]) -> anyhow::Result<Running> {
        self.tool(&[&["exec", self.name()], options, &["--"], argv].concat())
    }

    /// Starts `testbed`. What holds for a child of ours holds for a command that it runs in the machine.
    pub fn tool(&self, arguments: &[&str]) -> anyhow::Result<Running> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_testbed"));
        command.args(arguments);
        Running::start(format!("testbed {}", arguments.join(" ")), command)
    }

    /// Waits until something listens on a TCP port at an end.
    pub fn listens(&self, end: End, port: u16) -> anyhow::Result<()> {
        match end {
            End::Ours => self.lab.listens(HOST, 1, port),
            End::Rxe | End::GuestOverRxe => {
                // Local port and state 0A: proc_pid_net(5).
                let script = format!(
                    "until grep -q ':{port:04X} [0-9A-F]*:[0-9A-F]* 0A' /proc/net/tcp /proc/net/tcp6; do sleep 0.05; done"
                );
                self.in_vm(&["sh", "-c", &script], &[])?.succeed(LISTEN_LIMIT)?;
                Ok(())
            }
        }
    }

    /// Drops packets of RoCEv2 on the bridge at random, until what is returned is dropped.
    pub fn lose(&self, per_mille: u32) -> anyhow::Result<Loss<'_>> {
        self.nft(&format!(
            "table bridge loss {{ chain forward {{ type filter hook forward priority 0;
               udp dport 4791 numgen random mod 1000 < {per_mille} counter drop; }}; }}"
        ))?;
        Ok(Loss { site: self })
    }

    /// Runs a script of nft(8) where the bridge is; what it printed.
    fn nft(&self, script: &str) -> anyhow::Result<String> {
        let run = || {
            let mut child = Command::new("nft")
                .args(["-f", "-"])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .context("cannot start nft (package nftables)")?;
            // The pipe is closed after this statement, which ends the script.
            child
                .stdin
                .take()
                .context("stdin is piped")?
                .write_all(script.as_bytes())?;
            let output = child.wait_with_output()?;
            let words = String::from_utf8_lossy(&output.stderr);
            ensure!(output.status.success(), "nft {script:?}: {words}");
            Ok(String::from_utf8_lossy(&output.stdout).into_owned())
        };
        // The namespace is that of the thread, and so of what it starts.
        self.network.within(|| Ok(run()))?
    }

    /// For the message of a case that failed: what the RNIC and the kernel of the machine have said last, and what rxe has
    /// counted.
    pub fn words(&self) -> String {
        let script = "dmesg | tail -n 60; cd /sys/class/infiniband/rxe0/ports/1/hw_counters && grep . *";
        let dmesg = self
            .in_vm(&["sh", "-c", script], &[])
            .and_then(|running| running.wait(SHORT))
            .map_or_else(|error| format!("{error:#}"), |finished| finished.stdout);
        format!("{}\n--- the machine's kernel\n{dmesg}", self.lab.logs())
    }
}

/// Gives both ends an IPv6 address. Our RNIC looks for addresses when it starts.
fn add_ipv6(lab: &TestLab, vm: &Vm) -> anyhow::Result<()> {
    if !Path::new("/proc/sys/net/ipv6").exists() {
        bail!("this machine's kernel has no IPv6");
    }
    let add = |address, interface| ["ip", "-6", "addr", "add", address, "dev", interface, "nodad"];
    lab.start_plain(HOST, &add("fd77::1/64", "br0"))?.succeed(SHORT)?;
    lab.lab().kill(HOST, "nic")?;
    lab.lab().start(HOST, "nic")?;
    let ended = vm.run(
        &verbatim_testbed::Command::new(add("fd77::100/64", "eth0")),
        SHORT,
    )?;
    ensure!(ended.code == 0, "{}", String::from_utf8_lossy(&ended.stderr));
    Ok(())
}

/// Packets get lost as long as this lives.
pub struct Loss<'a> {
    site: &'a Site,
}

impl Loss<'_> {
    /// How many packets were dropped so far.
    pub fn dropped(&self) -> anyhow::Result<u64> {
        let listed = self.site.nft("list table bridge loss")?;
        let mut words = listed
            .split_ascii_whitespace()
            .skip_while(|&word| word != "packets")
            .skip(1);
        let count = words.next().and_then(|count| count.parse().ok());
        count.with_context(|| format!("no count of packets in {listed}"))
    }
}

impl Drop for Loss<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.site.nft("delete table bridge loss") {
            eprintln!("{error:#}");
        }
    }
}
