//! Virtual machines: instances with QEMU as their only program, which moves by its own means and not by
//! CRIU's (`verbatim_vm`).
//!
//! ```text
//!  instances/NAME/   /run/verbatim inside
//!    mem/ram           the guest's RAM: a file that QEMU shares, and that is sent in rounds (`crate::memory::ram`)
//!    qmp               QMP socket for the agent, which QEMU makes on each host
//!  images/NAME/      during a move: the state of the devices, and whether the guest ran ([`leaving`])
//!  criu/NAME/ran     during a move, on both hosts: whether the guest ran, for a later agent
//!  criu/NAME/settings  during a move, on both hosts: QEMU's settings from before ([`settings`])
//!  criu/NAME/locks   on the host that a guest has come to: locks that its QEMU is to have ([`locks`])
//!  criu/NAME/stands  reason why a guest stands still that should run here ([`standing`])
//!  criu/NAME/ram.*   while RAM is missing that is still at the source ([`post_copy`])
//! ```
//!
//! A domain of libvirt's is asked and started through libvirt ([`domain`]).
//!
//! The container makes a virtual machine an instance like others: it provides the cgroup, by which the
//! machine is frozen for the decision and killed after it, the network, the output, and the entry in runc's
//! list. The differences are in [`leaving`] and [`arriving`], which stand beside a checkpoint and a restore
//! ([`tasks`](super::tasks)).

pub mod arriving;
pub mod attached;
pub mod domain;
pub mod fits;
pub mod guest;
pub mod leaving;
mod locks;
pub mod post_copy;
pub mod qemu;
mod settings;
pub mod sizes;
pub mod standing;
pub mod trouble;

use std::fs::File;
use std::net::Ipv4Addr;
use std::path::Path;

use anyhow::{Context, bail};
use rustix::fs::{FallocateFlags, Mode, OFlags};
use verbatim_channel::RUNTIME_DIR;
use verbatim_container::{Bind, TAP, Workload, mac_of};
use verbatim_vm::{Arguments, Carried};

use self::guest::Guest;
use super::record::Record;
use crate::beneath;
use crate::memory::private;
use crate::whole;

/// File of the RAM, in the runtime folder.
pub const RAM: &str = "mem/ram";

/// QMP socket for the agent, in the runtime folder.
pub const QMP: &str = "qmp";

/// First part of QEMU's program name if only arguments are given; the processor's name follows.
const PROGRAM: &str = "qemu-system-";

/// Devices that QEMU's container may open beside those of every container: KVM, and the tap link.
pub const DEVICES: [&str; 2] = ["kvm", "net/tun"];

/// Takes a user's command line: QEMU's program and arguments, or the arguments alone.
pub async fn arguments(line: &[String], address: Ipv4Addr) -> anyhow::Result<Arguments> {
    let has_program = line.first().is_some_and(|word| !word.starts_with('-'));
    let program = (!has_program).then(|| format!("{PROGRAM}{}", std::env::consts::ARCH));
    let line: Vec<String> = program.into_iter().chain(line.iter().cloned()).collect();
    let arguments = Arguments::parse(&line)?.on_tap(TAP, mac_of(address))?;
    if let Some(unmade) = arguments.unmade().first() {
        bail!("{unmade}");
    }
    let mut command = tokio::process::Command::new(arguments.program());
    let listed = command
        .args(["-machine", "help"])
        .kill_on_drop(true)
        .output()
        .await;
    let listed = listed.with_context(|| {
        format!(
            "cannot start {}; install it (Debian: qemu-system-x86), or name it by its path",
            arguments.program()
        )
    })?;
    if !listed.status.success() {
        bail!(
            "{} -machine help: {}",
            arguments.program(),
            String::from_utf8_lossy(&listed.stderr).trim()
        );
    }
    Ok(arguments.versioned(&String::from_utf8_lossy(&listed.stdout))?)
}

/// The container's workload, apart from the command.
pub fn workload(arguments: &Arguments, env: &[String]) -> Workload {
    let files = arguments.files().into_iter();
    // A container has its own /dev/urandom and the like.
    let binds = files.filter(|(path, _)| !verbatim_container::has_device(path));
    Workload::Command {
        args: arguments.line(),
        env: env.to_vec(),
        cwd: "/".into(),
        binds: binds.map(|(path, writable)| Bind { path, writable }).collect(),
    }
}

/// The record with the virtual machine's present state, for its next host.
pub fn as_carried(record: &Record, carried: &Carried) -> Record {
    let mut record = record.clone();
    let Workload::Command {
        env, binds: known, ..
    } = &record.workload
    else {
        return record;
    };
    let mut binds = Vec::new();
    if let Some(arguments) = &carried.arguments {
        let known = known.clone();
        record.workload = workload(arguments, &env.clone());
        record.machine = Some(Guest::Qemu(arguments.clone()));
        if let Workload::Command { binds: named, .. } = &mut record.workload {
            let was_writable = |path: &Path| known.iter().any(|bind| bind.writable && bind.path == path);
            for bind in named.iter_mut() {
                bind.writable |= was_writable(&bind.path);
            }
            binds = std::mem::take(named);
        }
    }
    for file in &carried.files {
        let path = Path::new("/").join(&file.path);
        match binds.iter_mut().find(|bind| bind.path == path) {
            Some(bind) => bind.writable |= !file.read_only,
            None => binds.push(Bind {
                path,
                writable: !file.read_only,
            }),
        }
    }
    if let Workload::Command { binds: all, .. } = &mut record.workload {
        *all = binds;
    }
    record
}

/// The way in which QEMU comes into its container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// QEMU starts there with a new guest.
    Started,
    /// QEMU starts there, and waits for a guest from another host.
    Arriving,
    /// QEMU runs already, outside ([`attached`]).
    Attached,
}

/// The program that the container runs.
pub fn started(guest: &Guest, workload: &Workload, origin: Origin) -> anyhow::Result<Workload> {
    let arguments = match guest {
        Guest::Qemu(arguments) if origin != Origin::Attached => arguments,
        _ => return attached::holder(workload),
    };
    let Workload::Command { env, cwd, binds, .. } = workload else {
        bail!("a virtual machine has no bundle of its own");
    };
    let inside = Path::new(RUNTIME_DIR);
    let command = arguments.command(&inside.join(RAM), &inside.join(QMP), origin == Origin::Arriving);
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let args: Option<Vec<String>> = words.map(|word| Some(word.to_str()?.to_owned())).collect();
    Ok(Workload::Command {
        args: args.context("the command line is not UTF-8")?,
        env: env.clone(),
        cwd: cwd.clone(),
        binds: binds.clone(),
    })
}

/// Reasons why an instance cannot come to this host: files of its host that are missing here.
pub fn lacking(record: &Record) -> Vec<String> {
    let Workload::Command { binds, .. } = &record.workload else {
        return Vec::new();
    };
    let missing = binds.iter().filter(|bind| !bind.path.exists());
    let words = missing.map(|bind| match record.machine {
        Some(_) => format!(
            "{} is not there: what the virtual machine names must be at the same path on both hosts, and its disks on storage that both reach",
            bind.path.display()
        ),
        None => format!(
            "{} is not there: what the instance is shown of its host (--bind, or a program in /tmp or /run) must be at the same path on both hosts",
            bind.path.display()
        ),
    });
    words.collect()
}

/// Makes the RAM of one that starts here, or arrives: of full length, and empty. With `prealloc` all of it is
/// allocated; an error if there is too little memory.
pub fn make_ram(folder: &Path, bytes: u64, prealloc: bool) -> anyhow::Result<()> {
    if prealloc && let Some(lack) = private::lack_of_memory(bytes) {
        bail!("its RAM cannot be allocated at the start (--prealloc): {lack}");
    }
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
    let mode = Mode::RUSR | Mode::WUSR;
    let made = beneath::open_any(beneath::folder(folder)?, Path::new(RAM), flags, mode);
    let made = made.map_err(std::io::Error::from).map(File::from);
    let sized = made.and_then(|file| {
        file.set_len(bytes)?;
        if prealloc {
            rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes)?;
        }
        Ok(())
    });
    let path = folder.join(RAM);
    whole::explained(&path, sized).with_context(|| format!("cannot make {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn ram_is_there_from_the_beginning_if_it_is_to_be() {
        for prealloc in [false, true] {
            let folder = tempfile::tempdir_in("/dev/shm").unwrap();
            std::fs::create_dir(folder.path().join("mem")).unwrap();
            make_ram(folder.path(), 1 << 20, prealloc).unwrap();
            let made = folder.path().join(RAM).metadata().unwrap();
            assert_eq!(made.len(), 1 << 20);
            assert_eq!(made.blocks() * 512, if prealloc { 1 << 20 } else { 0 });
        }
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        std::fs::create_dir(folder.path().join("mem")).unwrap();
        let error = make_ram(folder.path(), 1 << 50, true).unwrap_err().to_string();
        assert!(
            error.contains("--prealloc") && error.contains("MiB of memory available"),
            "{error}"
        );
        assert!(!folder.path().join(RAM).exists());
    }
}
