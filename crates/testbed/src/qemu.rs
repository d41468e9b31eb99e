//! QEMU's command line.

use crate::channel::{PORTS, port_name};
use crate::image::Image;
use crate::names::{MODULES_PARAMETER, NAME_PARAMETER, ROOT_TAG};
use crate::tsc;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The program.
pub(crate) const PROGRAM: &str = "qemu-system-x86_64";

/// What TCG can do well. Not `max`: QEMU 7.2 ends in a triple fault with it before the kernel is unpacked, and wide
/// vectors are slower than narrow ones when each is a call into the emulator. Not pclmulqdq, for the same reason: the
/// kernel's rxe, whose ICRC would use it, is half as fast with it.
const CPU: &str = "qemu64,+ssse3,+sse4.1,+sse4.2,+popcnt,+rdrand,+rdseed,+smap,+smep";

/// How disks are attached: what the machine asks for goes where they are, past this machine's page cache.
const DRIVE: &str = "format=raw,if=virtio,cache=none,discard=unmap";

/// What a machine is made of.
pub(crate) struct Machine<'a> {
    pub name: &'a str,
    pub image: &'a Image,
    pub cpus: u32,
    pub memory_mib: u32,
    /// What an emulated processor has beside the ordinary: QEMU's names, each with a comma before it.
    pub features: &'a str,
    /// What is appended to the kernel's command line.
    pub parameters: &'a str,
    /// The file that the console's output goes to.
    pub console: &'a Path,
    /// Listening Unix sockets, one per port, which QEMU inherits.
    pub ports: &'a [RawFd],
    /// What its disks are, as QEMU calls them.
    pub drives: &'a [String],
    /// The sockets of those who serve a disk and reach the machine's memory.
    pub vhost_user: &'a [PathBuf],
    /// The taps that it inherits, with their Ethernet addresses.
    pub taps: &'a [(RawFd, String)],
}

impl Machine<'_> {
    /// The command that runs it.
    pub fn command(&self) -> Command {
        let mut command = Command::new(PROGRAM);
        let mut option = |name: &str, value: String| {
            command.args([name, value.as_str()]);
        };
        let accelerator = accelerator();
        let is_emulated = accelerator.starts_with("tcg");
        let usual = || match is_emulated {
            true => format!("{CPU}{}", self.features),
            false => "host".to_owned(),
        };
        let cpu = named(CPU_VARIABLE).unwrap_or_else(usual);
        option("-name", self.name.to_owned());
        option("-accel", accelerator);
        option("-cpu", cpu);
        option("-smp", self.cpus.to_string());
        option("-m", self.memory_mib.to_string());
        option("-display", "none".to_owned());
        option("-serial", format!("file:{}", self.console.display()));
        option("-kernel", self.image.kernel.display().to_string());
        option("-initrd", self.image.initrd.display().to_string());
        let rate = is_emulated.then(tsc::khz).flatten();
        option("-append", self.kernel_line(rate));

        let root = "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap";
        option("-fsdev", root.to_owned());
        option(
            "-device",
            format!("virtio-9p-pci,fsdev=root,mount_tag={ROOT_TAG}"),
        );
        option("-device", format!("virtio-serial-pci,max_ports={}", PORTS + 1));
        for (number, fd) in self.ports.iter().enumerate() {
            option(
                "-chardev",
                format!("socket,id=port{number},fd={fd},server=on,wait=off"),
            );
            let name = port_name(number);
            option(
                "-device",
                format!("virtserialport,chardev=port{number},name={name}"),
            );
        }
        for (number, (fd, mac)) in self.taps.iter().enumerate() {
            option("-netdev", format!("tap,id=net{number},fd={fd},vhost=off"));
            option(
                "-device",
                format!("virtio-net-pci,netdev=net{number},mac={mac},romfile="),
            );
        }
        for drive in self.drives {
            // A comma in a value is written twice.
            let file = drive.replace(',', ",,");
            option("-drive", format!("file={file},{DRIVE}"));
        }
        if !self.vhost_user.is_empty() {
            let size = self.memory_mib;
            option(
                "-object",
                format!("memory-backend-memfd,id=ram,size={size}M,share=on"),
            );
            option("-machine", "memory-backend=ram".to_owned());
        }
        for (number, socket) in self.vhost_user.iter().enumerate() {
            let path = socket.display().to_string().replace(',', ",,");
            option(
                "-chardev",
                format!("socket,id=vhost{number},path={path},reconnect=1"),
            );
            option("-device", format!("vhost-user-blk-pci,chardev=vhost{number}"));
        }
        command.args(["-nodefaults", "-no-user-config", "-no-reboot"]);
        command
    }

    /// `tsc_khz`: of an emulated processor, the rate of its time stamp counter.
    fn kernel_line(&self, tsc_khz: Option<u64>) -> String {
        let rate = tsc_khz.map_or_else(String::new, |khz| format!("tsc_early_khz={khz} "));
        // panic=-1 with -no-reboot: a machine whose kernel panics ends. no_timer_check: at its start Linux counts the timer's interrupts for a
        // moment, and panics ("IO-APIC + timer doesn't work") where a busy machine has not let QEMU deliver some.
        format!(
            "console=ttyS0 quiet panic=-1 no_timer_check tsc=reliable {rate}mitigations=off {MODULES_PARAMETER}{} {NAME_PARAMETER}{} {}",
            self.image.modules.display(),
            self.name,
            self.parameters
        )
    }
}

/// Names an accelerator of QEMU, in the place of the one that this machine can use.
const ACCELERATOR_VARIABLE: &str = "VERBATIM_VM_ACCELERATOR";

/// Names a processor of QEMU, in the place of [`CPU`].
const CPU_VARIABLE: &str = "VERBATIM_VM_CPU";

/// KVM where the processor helps with it, else TCG. `/dev/kvm` alone says too little: with a KVM that is itself
/// emulated (PVM and the like) an ordinary kernel does not get past its first page.
fn accelerator() -> String {
    let usable = || {
        let device = std::fs::File::options().read(true).write(true).open("/dev/kvm");
        device.is_ok() && std::fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| has_virtualisation(&text))
    };
    let usual = || if usable() { "kvm" } else { "tcg,thread=multi" };
    named(ACCELERATOR_VARIABLE).unwrap_or_else(|| usual().to_owned())
}

/// What the environment says, if it says something.
fn named(variable: &str) -> Option<String> {
    std::env::var(variable).ok().filter(|value| !value.is_empty())
}

fn has_virtualisation(cpuinfo: &str) -> bool {
    let flags = cpuinfo.lines().find(|line| line.starts_with("flags"));
    flags.is_some_and(|line| {
        line.split_ascii_whitespace()
            .any(|flag| flag == "vmx" || flag == "svm")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kvm_needs_a_processor_that_helps() {
        assert!(has_virtualisation("processor : 0\nflags\t\t: fpu vmx sse\n"));
        assert!(!has_virtualisation(
            "processor : 0\nflags\t\t: fpu hypervisor\nvmx flags : x\n"
        ));
    }
}
