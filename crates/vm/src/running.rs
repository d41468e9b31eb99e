//! The command line of a QEMU that another program has started, in the form for the next host's QEMU.
//!
//! Words that the agent adds itself, or that belong to this process alone, are left out: monitors for
//! programs, the RAM, the links of networks, the way it was started. Everything else stays as it is, since
//! the devices must be the same, in the same order.

use std::path::Path;

use crate::arguments::Arguments;
use crate::error::{Error, Result};

/// QEMU's MAC for the first card without one.
pub const USUAL_MAC: [u8; 6] = [0x52, 0x54, 0x00, 0x12, 0x34, 0x56];

/// Options that are left out.
const ALONE: &[&str] = &["-daemonize", "-S", "-mem-prealloc"];

/// Options that are left out with their values.
const WITH_VALUE: &[&str] = &["-qmp", "-qmp-pretty", "-pidfile", "-incoming"];

/// Parts of a network that name its link.
const LINK: &[&str] = &[
    "ifname=",
    "fd=",
    "fds=",
    "vhost=",
    "vhostfd=",
    "vhostfds=",
    "vhostforce=",
    "queues=",
    "br=",
    "helper=",
    "script=",
    "downscript=",
];

/// Options whose whole value is a path, and parts of values that are paths.
const PATHS: &[&str] = &[
    "-hda", "-hdb", "-hdc", "-hdd", "-cdrom", "-fda", "-fdb", "-kernel", "-initrd", "-dtb", "-bios",
    "-pflash",
];
const PATH_PARTS: &[&str] = &["file=", "file.filename=", "filename=", "path=", "romfile="];

impl Arguments {
    /// The arguments of a QEMU that runs by `line`, in the folder `cwd`; `memory` is the name of the object
    /// that is its RAM, and `machine` the type of its machine, with its version.
    pub fn of_running(line: &[String], memory: &str, machine: &str, cwd: &Path) -> Result<Self> {
        let (program, words) = line
            .split_first()
            .ok_or_else(|| refused("its command line is empty"))?;
        let monitors = monitors(words);
        let (mut kept, mut words, mut cards) = (vec![program.clone()], words.iter().peekable(), 0);
        while let Some(word) = words.next() {
            let option = match word.strip_prefix("--") {
                Some(name) => format!("-{name}"),
                None => word.clone(),
            };
            if ALONE.contains(&option.as_str()) {
                continue;
            }
            if option == "-add-fd" {
                return Err(refused(
                    "it has descriptors that somebody has opened for it (`-add-fd`)",
                ));
            }
            let value = match option.starts_with('-') {
                true => words.next_if(|value| !value.starts_with('-')),
                false => None,
            };
            let Some(value) = value else {
                kept.push(option);
                continue;
            };
            if WITH_VALUE.contains(&option.as_str()) || is_ours(&option, value, memory, &monitors) {
                continue;
            }
            if let Some(path) = relative(&option, value).filter(|path| cwd.join(path).exists()) {
                return Err(refused(&format!(
                    "`{option} {value}` names {path} by a path that is not absolute: start it with {}",
                    cwd.join(path).display()
                )));
            }
            cards += usize::from(is_card_without_mac(&option, value));
            let value = match option.as_str() {
                "-machine" | "-M" => without(value, &["memory-backend="]),
                "-netdev" | "-nic" => any_link(&option, value)?,
                _ => value.clone(),
            };
            kept.extend([option, value]);
        }
        if cards > 1 {
            return Err(refused(
                "several of its network cards have no `mac=`: which has which the command line does not say",
            ));
        }
        Ok(Self::parse(&kept)?.of_machine(memory, machine))
    }
}

fn refused(why: &str) -> Error {
    Error::Arguments(format!("this virtual machine cannot be attached: {why}"))
}

/// The names of character devices that are monitors for programs.
fn monitors(words: &[String]) -> Vec<String> {
    let values = words
        .windows(2)
        .filter(|pair| pair[0] == "-mon" || pair[0] == "--mon");
    let control = values.filter(|pair| pair[1].split(',').any(|part| part == "mode=control"));
    control.filter_map(|pair| part_of(&pair[1], "chardev")).collect()
}

/// The value of a part: `id=a` in `socket,id=a,path=/b`.
fn part_of(value: &str, name: &str) -> Option<String> {
    let mut parts = value.split(',').filter_map(|part| part.split_once('='));
    parts.find_map(|(key, value)| (key == name).then(|| value.to_owned()))
}

/// Whether the agent adds this option itself.
fn is_ours(option: &str, value: &str, memory: &str, monitors: &[String]) -> bool {
    match option {
        "-mon" => value.split(',').any(|part| part == "mode=control"),
        "-chardev" => part_of(value, "id").is_some_and(|id| monitors.contains(&id)),
        "-object" if value.starts_with('{') => {
            serde_json::from_str::<serde_json::Value>(value).is_ok_and(|object| object["id"] == memory)
        }
        "-object" => part_of(value, "id").is_some_and(|id| id == memory),
        _ => false,
    }
}

/// The value without the parts that begin like this.
fn without(value: &str, beginnings: &[&str]) -> String {
    let parts = value.split(',');
    let kept = parts.filter(|part| !beginnings.iter().any(|beginning| part.starts_with(beginning)));
    kept.collect::<Vec<_>>().join(",")
}

/// Gives a network with a link of this host one of the next host.
fn any_link(option: &str, value: &str) -> Result<String> {
    if value.starts_with('{') && value.contains("fd") {
        return Err(refused(&format!(
            "`{option} {value}` has a descriptor that somebody has opened for it"
        )));
    }
    let (kind, rest) = value
        .split_once(',')
        .map_or((value, ""), |(kind, rest)| (kind, rest));
    match kind {
        "tap" | "bridge" => {
            let rest = without(rest, LINK);
            Ok(match rest.as_str() {
                "" => "tap".to_owned(),
                rest => format!("tap,{rest}"),
            })
        }
        _ => Ok(value.to_owned()),
    }
}

/// A relative path in the value.
fn relative<'a>(option: &str, value: &'a str) -> Option<&'a str> {
    let parts = value.split(',');
    let mut named = parts.filter_map(|part| PATH_PARTS.iter().find_map(|key| part.strip_prefix(key)));
    let whole = PATHS.contains(&option).then_some(value);
    let is_relative = |path: &&str| !path.starts_with('/') && !path.contains(':');
    whole.filter(is_relative).or_else(|| named.find(is_relative))
}

fn is_card_without_mac(option: &str, value: &str) -> bool {
    let has = |beginning: &str| value.split(',').any(|part| part.starts_with(beginning));
    let is_card = match option {
        "-device" => has("netdev="),
        "-nic" => value != "none",
        "-net" => value.starts_with("nic"),
        _ => false,
    };
    is_card && !has("mac=") && !has("macaddr=")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(line: &str) -> Result<Vec<String>> {
        let words: Vec<_> = line.split(' ').map(str::to_owned).collect();
        let arguments = Arguments::of_running(&words, "mem", "pc-i440fx-7.2", Path::new("/"))?;
        let command = arguments.command(Path::new("/r/ram"), Path::new("/r/qmp"), true);
        let words = command.get_args().map(|word| word.to_str().unwrap().to_owned());
        Ok(words.collect())
    }

    #[test]
    fn what_is_of_the_process_alone_is_left_out_and_the_rest_stays_in_its_order() {
        let words = of(
            "qemu -name g -daemonize -pidfile /p -S -machine pc,accel=tcg,memory-backend=mem -m 64 \
             -object memory-backend-file,id=mem,size=64M,mem-path=/dev/shm/m,share=on -object iothread,id=t \
             -chardev socket,id=m,path=/q,server=on -mon chardev=m,mode=control -chardev null,id=n -qmp unix:/q2,server=on \
             -netdev tap,id=a,ifname=vnet3,script=no,vhost=on -device virtio-net,netdev=a -incoming tcp:0:1",
        );
        assert_eq!(
            words.unwrap().join(" "),
            "-machine pc-i440fx-7.2,accel=tcg,memory-backend=mem -m 67108864B \
             -object memory-backend-file,id=mem,size=67108864,mem-path=/r/ram,share=on \
             -chardev socket,id=verbatim-qmp,path=/r/qmp,server=on,wait=off -mon chardev=verbatim-qmp,mode=control \
             -name g -object iothread,id=t -chardev null,id=n -netdev tap,id=a -device virtio-net,netdev=a -display none -S \
             -incoming defer"
        );
    }

    #[test]
    fn what_cannot_be_the_same_elsewhere_is_refused() {
        for (line, why) in [
            ("qemu -add-fd fd=3,set=1", "-add-fd"),
            ("qemu -netdev {\"type\":\"tap\",\"fd\":\"3\"}", "descriptor"),
            ("qemu -device a,netdev=x -device b,netdev=y", "mac="),
            (
                "qemu -object memory-backend-ram,id=other,size=1G",
                "one piece of RAM",
            ),
            ("qemu -drive file=etc,if=none", "not absolute"),
            ("qemu -device vfio-pci,host=1", "state of a device"),
        ] {
            let error = of(line).unwrap_err().to_string();
            assert!(error.contains(why), "{line}: {error}");
        }
    }
}
