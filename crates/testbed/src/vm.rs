//! A machine: bring up, run commands in, end.

use crate::channel::PORTS;
use crate::error::{Error, Result};
use crate::image::Image;
use crate::kernel::Kernel;
use crate::network::{Address, Network, Tap};
use crate::qemu::{Machine, PROGRAM};
use crate::session::{Command, Ended, Session};
use crate::state::{self, Names, VmRecord};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::Signal;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;
use verbatim_lab::ProcessId;

/// How long a machine may take to come up: some 8 s are usual under TCG, more if all cores are busy.
const BOOT_LIMIT: Duration = Duration::from_secs(120);
/// How often a machine is started at most.
const STARTS: u32 = 3;
/// How long a command of ours in a machine may take.
const SETUP_LIMIT: Duration = Duration::from_secs(60);

/// A machine to boot.
#[derive(Clone, Debug)]
pub struct VmConfig {
    /// Its name, which is its host name too: 1 to 32 letters, digits and `-`.
    pub name: String,
    /// Processors. Default 2.
    pub cpus: u32,
    /// Memory in MiB. Default 2048.
    pub memory_mib: u32,
    /// The address of its `eth0`.
    pub address: Option<Address>,
    /// Whether `eth0` is a port of a bridge `br0`, which has the address, as agents want it.
    pub bridge: bool,
    /// Whether to make `rxe0`, the kernel's software RNIC, on `eth0`, or on the bridge.
    pub rxe: bool,
    /// What an emulated processor has beside the ordinary, by QEMU's names, each with a comma before it: `,+aes`, say. Default
    /// none.
    pub features: String,
    /// What its disks `/dev/vda` and so on are: files, or URIs that QEMU knows (`nbd+unix:///…`). It needs `modprobe virtio_blk`.
    pub drives: Vec<String>,
    /// Behind those: sockets of vhost-user-blk. QEMU has one connected again whose server has gone.
    pub vhost_user: Vec<PathBuf>,
    /// What is appended to the kernel's command line.
    pub parameters: String,
    /// The program that is put into the image as pid 1; its `main` begins with [`crate::run_role`]. Default: the
    /// running program.
    pub program: Option<PathBuf>,
}

impl VmConfig {
    /// A machine of that name with the defaults.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            cpus: 2,
            memory_mib: 2048,
            address: None,
            bridge: false,
            rxe: false,
            features: String::new(),
            drives: Vec::new(),
            vhost_user: Vec::new(),
            parameters: String::new(),
            program: None,
        }
    }

    fn check(&self) -> Result<()> {
        if !rustix::process::geteuid().is_root() {
            return Err(Error::NotRoot);
        }
        if self.cpus == 0 || self.memory_mib < 256 {
            return Err(Error::Config(format!(
                "a machine needs a processor and 256 MiB, not {} and {} MiB",
                self.cpus, self.memory_mib
            )));
        }
        if (self.rxe || self.bridge) && self.address.is_none() {
            return Err(Error::Config(
                "rxe and a bridge need an interface with an address: give one".to_owned(),
            ));
        }
        Ok(())
    }
}

/// A machine that runs until this is dropped.
#[derive(Debug)]
pub struct Vm {
    record: VmRecord,
    keeper: Option<Keeper>,
}

impl Vm {
    /// Boots a machine on `network`; returns when it can run commands and its interface is up.
    pub fn boot(config: &VmConfig, network: &Network) -> Result<Self> {
        Self::up(config, network, Lifetime::Owned)
    }

    /// As [`Self::boot`], but the machine lives on until [`Names::down`].
    pub fn boot_detached(config: &VmConfig, network: &Network) -> Result<VmRecord> {
        let mut vm = Self::up(config, network, Lifetime::Detached)?;
        if let Some(keeper) = vm.keeper.take() {
            keeper.let_go();
        }
        Ok(vm.record.clone())
    }

    /// A machine that QEMU's translator has ended (see [`Error::Emulator`]) has done nothing yet, and is started again.
    fn up(config: &VmConfig, network: &Network, lifetime: Lifetime) -> Result<Self> {
        let once = || {
            let vm = Self::start(config, network, lifetime)?;
            vm.set_up(config)?;
            Ok(vm)
        };
        for _ in 1..STARTS {
            match once() {
                Err(error @ Error::Emulator { .. }) => {
                    eprintln!("{error}\nMachine {} starts again.", config.name)
                }
                result => return result,
            }
        }
        once()
    }

    fn start(config: &VmConfig, network: &Network, lifetime: Lifetime) -> Result<Self> {
        config.check()?;
        let program = match &config.program {
            Some(program) => program.clone(),
            None => std::env::current_exe().map_err(Error::io("find the path of the running program"))?,
        };
        let image = Image::of(&Kernel::find()?, &program)?;
        let dir = Names::default().create(&config.name)?;
        let started = Keeper::start(config, network, &image, &dir, lifetime);
        let (keeper, process) = started.inspect_err(|_| {
            // The first error is the one to tell.
            let _ = state::remove(&dir);
        })?;
        let record = VmRecord {
            name: config.name.clone(),
            process,
            owner: match lifetime {
                Lifetime::Owned => Some(ProcessId::of(std::process::id())?),
                Lifetime::Detached => None,
            },
            address: config.address,
            release: image.release,
            dir,
        };
        let vm = Self {
            record,
            keeper: Some(keeper),
        };
        vm.record.save()?;
        Session::open(&vm.record)?.hello(BOOT_LIMIT)?;
        Ok(vm)
    }

    /// Gives the machine what the configuration asks for, once it is up.
    fn set_up(&self, config: &VmConfig) -> Result<()> {
        let mut script = "ip link set lo up\n".to_owned();
        let port = if config.bridge { "br0" } else { "eth0" };
        if let Some(address) = config.address {
            let mtu = self.keeper.as_ref().map_or(1500, |keeper| keeper.mtu);
            // nodad: an IPv6 address is usable, and among the GIDs, at once.
            let no_dad = if address.ip.is_ipv6() { " nodad" } else { "" };
            if config.bridge {
                // Its Ethernet address is that of its port whatever ports come: GID 0 is made of it.
                script += &format!(
                    "sysctl -qw net.ipv6.conf.eth0.disable_ipv6=1\n\
                     ip link add br0 address \"$(cat /sys/class/net/eth0/address)\" type bridge forward_delay 0 mcast_snooping 0\n\
                     ip link set eth0 mtu {mtu} master br0 up\n"
                );
            }
            script += &format!(
                "sysctl -qw net.ipv6.conf.{port}.accept_dad=0\nip addr add {address} dev {port}{no_dad}\n\
                 ip link set {port} mtu {mtu} up\n"
            );
        }
        if config.rxe {
            // Not on the bridge's port: what comes for an address of the bridge's is the bridge's, and rxe looks for its own.
            script += &format!("modprobe rdma_rxe\nrdma link add rxe0 type rxe netdev {port}\n");
        }
        let command = Command::new(["sh", "-ec", &script]);
        let ended = self.run(&command, SETUP_LIMIT)?;
        if ended.code == 0 {
            return Ok(());
        }
        Err(Error::Command {
            command: format!("sh -ec {script:?} in machine {}", config.name),
            output: String::from_utf8_lossy(&ended.stderr).trim().to_owned(),
        })
    }

    /// What another process needs to use it.
    pub fn record(&self) -> &VmRecord {
        &self.record
    }

    /// Runs a command and collects what it writes; after `limit` it is killed.
    pub fn run(&self, command: &Command, limit: Duration) -> Result<Ended> {
        Session::open(&self.record)?.collect(command, limit)
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        if let Some(keeper) = self.keeper.take() {
            keeper.end();
            // What is left is cleared when the name is used again.
            let _ = state::remove(&self.record.dir);
        }
    }
}

/// How long a machine lives.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lifetime {
    /// No longer than the process that owns it.
    Owned,
    /// Until it is told to end.
    Detached,
}

/// The thread that started QEMU, and waits until it may end it.
///
/// PR_SET_PDEATHSIG tells of the death of the *thread* that started a process, so it must be one that lives as long as
/// the machine.
#[derive(Debug)]
struct Keeper {
    orders: mpsc::Sender<Order>,
    thread: JoinHandle<()>,
    mtu: u32,
}

enum Order {
    Kill,
    LetGo,
}

impl Keeper {
    fn start(
        config: &VmConfig,
        network: &Network,
        image: &Image,
        dir: &Path,
        lifetime: Lifetime,
    ) -> Result<(Self, ProcessId)> {
        let namespace = rustix::io::dup(network).map_err(Error::io("keep the network"))?;
        let (config, image, dir) = (config.clone(), image.clone(), dir.to_owned());
        let (orders, inbox) = mpsc::channel();
        let (sender, started) = mpsc::channel();
        let thread =
            std::thread::spawn(
                move || match start_qemu(&config, namespace, &image, &dir, lifetime) {
                    Ok((mut child, mtu)) => {
                        // The receiver waits for it.
                        let _ =
                            sender.send(ProcessId::of(child.id()).map(|id| (id, mtu)).map_err(Error::from));
                        if !matches!(inbox.recv(), Ok(Order::LetGo)) {
                            // Both fail only if it has ended.
                            let _ = child.kill();
                            let _ = child.wait();
                        }
                    }
                    Err(error) => {
                        let _ = sender.send(Err(error));
                    }
                },
            );
        let (process, mtu) = started.recv().expect("the thread sends once, come what may")?;
        Ok((Self { orders, thread, mtu }, process))
    }

    fn end(self) {
        self.order(Order::Kill);
    }

    fn let_go(self) {
        self.order(Order::LetGo);
    }

    fn order(self, order: Order) {
        // A thread that panicked has ended QEMU by its death.
        let _ = self.orders.send(order);
        let _ = self.thread.join();
    }
}

/// Starts QEMU in the namespace of the machine's network, with all that it inherits.
fn start_qemu(
    config: &VmConfig,
    namespace: OwnedFd,
    image: &Image,
    dir: &Path,
    lifetime: Lifetime,
) -> Result<(Child, u32)> {
    Network::from(namespace).enter()?;
    let tap = Tap::new()?;
    let listeners: Vec<UnixListener> = (0..PORTS)
        .map(|number| {
            let path = dir.join(format!("port.{number}"));
            UnixListener::bind(&path).map_err(Error::file("listen on", path))
        })
        .collect::<Result<_>>()?;
    let ports: Vec<RawFd> = listeners.iter().map(AsRawFd::as_raw_fd).collect();
    let machine = Machine {
        name: &config.name,
        image,
        cpus: config.cpus,
        memory_mib: config.memory_mib,
        features: &config.features,
        parameters: &config.parameters,
        console: &dir.join("console.log"),
        ports: &ports,
        drives: &config.drives,
        vhost_user: &config.vhost_user,
        taps: &[(tap.fd.as_raw_fd(), ethernet_address(&config.name))],
    };
    let path = dir.join("qemu.log");
    let log = File::create(&path).map_err(Error::file("write", &path))?;
    let mut command = machine.command();
    command
        .stdin(Stdio::null())
        .stdout(log.try_clone().map_err(Error::file("write", &path))?)
        .stderr(log);
    let inherited: Vec<RawFd> = ports.iter().copied().chain([tap.fd.as_raw_fd()]).collect();
    // SAFETY: what runs between fork and exec makes plain system calls only, on descriptors that are open here.
    unsafe {
        command.pre_exec(move || {
            for &fd in &inherited {
                fcntl_setfd(BorrowedFd::borrow_raw(fd), FdFlags::empty())?;
            }
            match lifetime {
                Lifetime::Owned => rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?,
                Lifetime::Detached => rustix::process::setsid().map(drop)?,
            }
            Ok(())
        });
    }
    let child = command.spawn().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Error::NotInstalled {
            what: format!("{PROGRAM} (package qemu-system-x86)"),
        },
        _ => Error::io(format!("start {PROGRAM}"))(error),
    })?;
    Ok((child, tap.mtu))
}

/// An Ethernet address that follows from the name: machines on one network have different names.
fn ethernet_address(name: &str) -> String {
    let hash = blake3::hash(name.as_bytes());
    let [a, b, c, ..] = *hash.as_bytes();
    // 52:54:00 is what QEMU uses.
    format!("52:54:00:{a:02x}:{b:02x}:{c:02x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_work_is_refused_before_anything_is_started() {
        let without_address = VmConfig {
            rxe: true,
            ..VmConfig::new("a")
        };
        assert!(without_address.check().is_err());
        let small = VmConfig {
            memory_mib: 10,
            ..VmConfig::new("a")
        };
        assert!(small.check().is_err());
    }

    #[test]
    fn names_give_addresses() {
        assert_ne!(ethernet_address("a"), ethernet_address("b"));
        assert_eq!(ethernet_address("a").len(), 17);
    }
}
