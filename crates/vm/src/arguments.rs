//! QEMU's command line: the user's part of it, and ours.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The name of the object that is the RAM.
pub const MEMORY: &str = "verbatim-ram";

/// RAM of a virtual machine whose command line names none.
const USUAL_RAM: u64 = 128 << 20;

/// A user's command line, each part of which can move.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Arguments {
    /// The program: `qemu-system-x86_64`, or its path.
    program: String,
    /// The type of machine, with its version. `None`: QEMU's default, which [`Arguments::versioned`] finds
    /// out.
    machine: Option<String>,
    /// The properties of `-machine` beside the type, each with a comma before it.
    properties: String,
    /// The size of the RAM in bytes.
    ram: u64,
    /// The name of the object that is the RAM, if it is not [`MEMORY`]: both QEMUs find their RAM by it in
    /// the migration stream.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    memory: Option<String>,
    /// All other arguments, unchanged.
    rest: Vec<String>,
    /// Arguments for disks that move along ([`crate::NbdDisk`]), four for each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) disks: Vec<String>,
}

/// Options that a user must not give, with the reason.
const OURS: &[(&str, &str)] = &[
    (
        "-incoming",
        "a virtual machine that arrives is started by a migration",
    ),
    ("-S", "it is started at once"),
    ("-qmp", "the agent has QEMU's QMP socket"),
    ("-qmp-pretty", "the agent has QEMU's QMP socket"),
    ("-daemonize", "the agent is QEMU's parent"),
    ("-mem-path", "its RAM is a file of the agent's"),
    ("-mem-prealloc", "its RAM is a file of the agent's"),
    (
        "-snapshot",
        "what it writes to its disks would be lost with the process",
    ),
    (
        "-loadvm",
        "start it without, and load the snapshot in its monitor",
    ),
    ("-numa", "one piece of RAM can move, and no more"),
];

/// Parts of a tap network that name its link.
const TAP_NAMED: &[&str] = &["ifname=", "fd=", "fds=", "br=", "helper="];

/// Options whose files QEMU only reads.
const READ_ONLY: &[&str] = &[
    "-kernel",
    "-initrd",
    "-dtb",
    "-bios",
    "-cdrom",
    "-L",
    "-fw_cfg",
    "-acpitable",
    "-smbios",
    "-readconfig",
];

/// Options that choose the display.
const DISPLAYS: &[&str] = &[
    "-display",
    "-nographic",
    "-vnc",
    "-spice",
    "-curses",
    "-sdl",
    "-gtk",
];

impl Arguments {
    /// Takes a command line apart: the program, and its arguments.
    pub fn parse<S: AsRef<str>>(line: &[S]) -> Result<Self> {
        let refused = |what: String| Err(Error::Arguments(what));
        let mut words = line.iter().map(AsRef::as_ref);
        let Some(program) = words.next() else {
            return refused("there is no QEMU: say `qemu-system-x86_64`, and its arguments".to_owned());
        };
        let mut arguments = Self {
            program: program.to_owned(),
            machine: None,
            properties: String::new(),
            ram: USUAL_RAM,
            memory: None,
            rest: Vec::new(),
            disks: Vec::new(),
        };
        let mut has_display = false;
        while let Some(word) = words.next() {
            // QEMU takes two dashes as one.
            let option = match word.strip_prefix("--") {
                Some(name) => format!("-{name}"),
                None => word.to_owned(),
            };
            if let Some((name, why)) = OURS.iter().find(|(name, _)| *name == option) {
                return refused(format!("`{name}` cannot be taken: {why}"));
            }
            has_display |= DISPLAYS.contains(&option.as_str());
            let mut value = || {
                let missing = || Error::Arguments(format!("`{option}` needs a value"));
                words.next().ok_or_else(missing)
            };
            match option.as_str() {
                "-m" => arguments.ram = ram_of(value()?)?,
                "-machine" | "-M" => arguments.take_machine(value()?)?,
                "-object" | "-device" | "-chardev" | "-netdev" => {
                    let value = value()?;
                    if let Some(why) = immovable(value) {
                        return refused(format!("`{option} {value}` cannot be taken: {why}"));
                    }
                    arguments.rest.extend([option, value.to_owned()]);
                }
                "-drive" | "-hda" | "-hdb" | "-hdc" | "-hdd" => {
                    let value = value()?;
                    if let Some(why) = lost(value) {
                        return refused(format!("`{option} {value}` cannot be taken: {why}"));
                    }
                    arguments.rest.extend([option, value.to_owned()]);
                }
                _ => arguments.rest.push(word.to_owned()),
            }
        }
        if !has_display {
            // The display has no viewer, and QEMU would end without a desktop.
            arguments.rest.extend(["-display".to_owned(), "none".to_owned()]);
        }
        Ok(arguments)
    }

    /// The same virtual machine as a running one.
    pub(crate) fn of_machine(self, memory: &str, machine: &str) -> Self {
        Self {
            memory: Some(memory.to_owned()),
            machine: Some(machine.to_owned()),
            ..self
        }
    }

    /// The type of its machine, with its version.
    pub(crate) fn machine_type(&self) -> &str {
        self.machine.as_deref().unwrap_or_default()
    }

    /// Name of the object with its RAM, if the user has named it.
    pub(crate) fn memory(&self) -> Option<&str> {
        self.memory.as_deref()
    }

    /// The user's words except machine and RAM.
    pub(crate) fn rest(&self) -> &[String] {
        &self.rest
    }

    /// The same with other disks and devices.
    pub(crate) fn with(self, rest: Vec<String>, disks: Vec<String>) -> Self {
        Self { rest, disks, ..self }
    }

    fn take_machine(&mut self, value: &str) -> Result<()> {
        for (number, part) in value.split(',').enumerate() {
            match part.split_once('=') {
                Some(("memory-backend", _)) => {
                    return Err(Error::Arguments(
                        "`memory-backend` cannot be taken: its RAM is a file of the agent's".to_owned(),
                    ));
                }
                Some(("type", name)) => self.machine = Some(name.to_owned()),
                None if number == 0 => self.machine = Some(part.to_owned()),
                _ => self.properties.push_str(&format!(",{part}")),
            }
        }
        Ok(())
    }

    /// The whole command line for display: the user's words, and a type of machine with its version.
    pub fn line(&self) -> Vec<String> {
        let machine = self.machine.as_deref().unwrap_or_default();
        let own = [
            self.program.clone(),
            "-machine".to_owned(),
            format!("{machine}{}", self.properties),
            "-m".to_owned(),
            format!("{}B", self.ram),
        ];
        let rest = self.rest.iter().chain(&self.disks);
        own.into_iter().chain(rest.cloned()).collect()
    }

    /// Existing files that are named by absolute paths: disks and images, with whether QEMU may have to write
    /// to each.
    pub fn files(&self) -> Vec<(PathBuf, bool)> {
        let mut files: Vec<(PathBuf, bool)> = Vec::new();
        let mut option = "";
        for word in &self.rest {
            if word.starts_with('-') {
                option = word;
                continue;
            }
            for path in paths(word).into_iter().filter(|path| path.exists()) {
                let writes = !READ_ONLY.contains(&option);
                match files.iter_mut().find(|(known, _)| *known == path) {
                    Some((_, written)) => *written |= writes,
                    None => files.push((path, writes)),
                }
            }
        }
        files
    }

    /// QEMU's program.
    pub fn program(&self) -> &str {
        &self.program
    }

    /// The machine type, with its version once that is known.
    pub(crate) fn machine(&self) -> &str {
        self.machine.as_deref().unwrap_or_default()
    }

    /// The values of an option.
    fn values<'a>(&'a self, option: &'a str) -> impl Iterator<Item = &'a str> {
        let pairs = self.rest.windows(2);
        let named =
            pairs.filter(move |pair| pair[0].trim_start_matches('-') == option && pair[0].starts_with('-'));
        named.map(|pair| pair[1].as_str())
    }

    /// The value of `-cpu`.
    pub(crate) fn cpu(&self) -> Option<&str> {
        self.values("cpu").last()
    }

    /// A machine of the same type with the same processors and without devices, which stops before its first
    /// instruction.
    pub(crate) fn bare(&self) -> Vec<String> {
        let accelerators = self
            .properties
            .split(',')
            .filter(|part| part.starts_with("accel="));
        let properties: String = accelerators.map(|part| format!(",{part}")).collect();
        let mut line = vec!["-machine".to_owned(), format!("{}{properties}", self.machine())];
        for option in ["accel", "cpu"] {
            for value in self.values(option) {
                line.extend([format!("-{option}"), value.to_owned()]);
            }
        }
        let has = |option: &str| {
            self.rest
                .iter()
                .any(|word| word.trim_start_matches('-') == option)
        };
        line.extend(has("enable-kvm").then(|| "-enable-kvm".to_owned()));
        let nothing = [
            "-m",
            "32",
            "-S",
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-serial",
            "none",
        ];
        line.extend(nothing.map(str::to_owned));
        line
    }

    /// A key for the answer of [`Arguments::offered`]: equal keys have equal answers.
    pub fn asked(&self) -> Vec<String> {
        let mut asked = self.bare();
        asked.push(self.program.clone());
        asked
    }

    /// Whether it has a tap network.
    pub fn has_tap(&self) -> bool {
        let mut networks = self.values("netdev").chain(self.values("nic"));
        networks.any(|value| value.starts_with("tap"))
    }

    /// Unix sockets of its TPMs.
    pub fn tpm_sockets(&self) -> Vec<PathBuf> {
        let part = |value: &str, name: &str| {
            let mut parts = value.split(',').filter_map(|part| part.split_once('='));
            parts.find_map(|(key, value)| (key == name).then(|| value.to_owned()))
        };
        let tpms = self
            .values("tpmdev")
            .filter(|value| value.starts_with("emulator"));
        let names: Vec<_> = tpms.filter_map(|value| part(value, "chardev")).collect();
        let sockets = self.values("chardev").filter(|value| value.starts_with("socket"));
        let sockets = sockets.filter(|value| part(value, "id").is_some_and(|id| names.contains(&id)));
        sockets
            .filter_map(|value| part(value, "path"))
            .map(PathBuf::from)
            .collect()
    }

    /// The greatest MTU that one of its cards promises to its guest (`host_mtu=`).
    pub fn promised_mtu(&self) -> Option<u32> {
        let parts = self.values("device").flat_map(|value| value.split(','));
        let promised =
            parts.filter_map(|part| part.strip_prefix("host_mtu=").or(part.strip_prefix("host-mtu=")));
        promised.filter_map(|mtu| mtu.parse().ok()).max()
    }

    /// The same virtual machine, run by another program: QEMU's name or path at another host.
    pub fn run_by(&self, program: &str) -> Self {
        Self {
            program: program.to_owned(),
            ..self.clone()
        }
    }

    /// The size of the RAM in bytes.
    pub fn ram(&self) -> u64 {
        self.ram
    }

    /// The same with a type of machine that is the same for every QEMU. `pc` is another machine for each
    /// release. `types` is the output of `-machine help`.
    pub fn versioned(mut self, types: &str) -> Result<Self> {
        let wanted = self.machine.as_deref();
        for line in types.lines() {
            let Some((name, about)) = line.split_once(' ') else {
                continue;
            };
            let named = match wanted {
                Some(wanted) => wanted == name,
                None => about.ends_with("(default)"),
            };
            if named {
                let alias = about
                    .split_once("(alias of ")
                    .and_then(|(_, of)| of.split_once(')'));
                self.machine = Some(alias.map_or(name, |(of, _)| of).to_owned());
                return Ok(self);
            }
        }
        Err(Error::Arguments(match wanted {
            Some(wanted) => format!(
                "{} knows no machine `{wanted}`; `-machine help` lists them",
                self.program
            ),
            None => format!(
                "{} has no default machine: say which, with `-machine`",
                self.program
            ),
        }))
    }

    /// The same, with this link for its tap network (`-netdev tap` or `-nic tap`) and this MAC for its card
    /// on that network, unless the user names others. An error if several networks name no link.
    pub fn on_tap(mut self, link: &str, mac: [u8; 6]) -> Result<Self> {
        let mac = mac.map(|byte| format!("{byte:02x}")).join(":");
        let is_named = |value: &str| {
            value
                .split(',')
                .any(|part| TAP_NAMED.iter().any(|name| part.starts_with(name)))
        };
        let mut network: Option<String> = None;
        let options: Vec<usize> = (0..self.rest.len().saturating_sub(1)).collect();
        for at in &options {
            let (option, value) = (self.rest[*at].clone(), &mut self.rest[*at + 1]);
            let mut parts = value.split(',');
            let kind = parts.next().unwrap_or_default();
            let is_tap = kind == "tap" || kind == "type=tap";
            if !["-netdev", "-nic"].contains(&&option[..]) || !is_tap || is_named(value) {
                continue;
            }
            if network.is_some() {
                return Err(Error::Arguments(format!(
                    "`{option} {value}` cannot be taken: there is one tap link, and another network has it; name a link by `ifname=`"
                )));
            }
            let id = parts.find_map(|part| part.strip_prefix("id="));
            network = Some(id.unwrap_or_default().to_owned());
            let has_mac = value.split(',').any(|part| part.starts_with("mac="));
            value.push_str(&format!(",ifname={link},script=no,downscript=no"));
            if option == "-nic" && !has_mac {
                value.push_str(&format!(",mac={mac}"));
            }
        }
        let Some(id) = network.filter(|id| !id.is_empty()) else {
            return Ok(self);
        };
        let of_it = format!("netdev={id}");
        for at in options {
            let is_device = self.rest[at] == "-device";
            let value = &mut self.rest[at + 1];
            let parts = || value.split(',');
            if is_device && parts().any(|part| part == of_it) && !parts().any(|part| part.starts_with("mac="))
            {
                value.push_str(&format!(",mac={mac}"));
            }
        }
        Ok(self)
    }

    /// The command that starts the virtual machine, which stops before its first instruction: with its RAM,
    /// with QMP on a socket, and waiting for a migration if `incoming`.
    pub fn command(&self, ram: &Path, qmp: &Path, incoming: bool) -> Command {
        let mut command = Command::new(&self.program);
        let escaped = |path: &Path| path.display().to_string().replace(',', ",,");
        let machine = self.machine.as_deref().unwrap_or_default();
        let memory = self.memory.as_deref().unwrap_or(MEMORY);
        let mut option = |name: &str, value: String| {
            command.args([name, &value]);
        };
        option(
            "-machine",
            format!("{machine}{},memory-backend={memory}", self.properties),
        );
        option("-m", format!("{}B", self.ram));
        option(
            "-object",
            format!(
                "memory-backend-file,id={memory},size={},mem-path={},share=on",
                self.ram,
                escaped(ram)
            ),
        );
        option(
            "-chardev",
            format!("socket,id=verbatim-qmp,path={},server=on,wait=off", escaped(qmp)),
        );
        option("-mon", "chardev=verbatim-qmp,mode=control".to_owned());
        command.args(&self.rest).args(&self.disks).arg("-S");
        if incoming {
            command.args(["-incoming", "defer"]);
        }
        command
    }
}

/// The absolute paths in the value of an option. Each begins the value, or follows `=`, `:` or a quotation
/// mark (`file=/a`, `json:{"filename":"/a"}`, `nbd+unix:///?socket=/a`), and ends at a single comma, or at
/// the other quotation mark.
pub(crate) fn paths(value: &str) -> Vec<PathBuf> {
    // No path contains this character (QEMU takes its words from C strings).
    const COMMA: char = '\0';
    let value = value.replace(",,", &COMMA.to_string());
    let mut found = Vec::new();
    let mut before = '=';
    for (at, letter) in value.char_indices() {
        if letter == '/' && matches!(before, '=' | ':' | '"' | ',') {
            let end = match before {
                '"' => '"',
                _ => ',',
            };
            let path = value[at..].split(end).next().unwrap_or_default();
            found.push(PathBuf::from(path.replace(COMMA, ",")));
        }
        before = letter;
    }
    found
}

/// The reason why data written to this disk would not go along.
fn lost(value: &str) -> Option<&'static str> {
    if value.split(',').any(|part| part == "snapshot=on") {
        Some("written data would be lost with the process (`snapshot=on`)")
    } else if value.contains("fat:") && value.contains("rw:") {
        Some(
            "QEMU does not move a folder that it shows as a disk and writes to; leave out `rw:`, or make it a disk",
        )
    } else {
        None
    }
}

/// The reason why a device with this value cannot move.
fn immovable(value: &str) -> Option<&'static str> {
    let kind = value.split(',').next().unwrap_or_default();
    let kind = kind.split_once('=').map_or(kind, |(_, name)| name);
    if kind.starts_with("memory-backend-") {
        Some("one piece of RAM can move, and the agent makes it")
    } else if kind.starts_with("vfio-") {
        Some("the state of a device of the host's cannot move")
    } else if is_vhost_user_disk(kind) {
        Some(
            "another process would write to the RAM, and nobody would see it. If the disk is a volume, start the virtual machine with \
             `--volume NAME` in its place: then it moves along",
        )
    } else if kind.starts_with("vhost-user") || kind == "vhost-vdpa" {
        Some("another process would write to the RAM, and nobody would see it")
    } else if kind.contains("dimm") || kind.starts_with("virtio-mem") || kind.starts_with("virtio-pmem") {
        Some("one piece of RAM can move, and no more")
    } else {
        None
    }
}

/// Whether devices of this kind are disks that another process serves out of the RAM.
pub fn is_vhost_user_disk(kind: &str) -> bool {
    kind.starts_with("vhost-user-blk")
}

/// The value of `-m`: a size, in MiB where it has no unit.
fn ram_of(value: &str) -> Result<u64> {
    let refused = |why: &str| Err(Error::Arguments(format!("`-m {value}` cannot be taken: {why}")));
    let mut parts = value.split(',');
    let size = parts.next().unwrap_or_default();
    let size = size.strip_prefix("size=").unwrap_or(size);
    if parts.any(|part| part.starts_with("slots=") || part.starts_with("maxmem=")) {
        return refused("RAM that is added later cannot move");
    }
    let digits = size.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let shift = match size[digits.len()..].to_ascii_lowercase().as_str() {
        "b" => 0,
        "k" | "kib" => 10,
        "" | "m" | "mib" => 20,
        "g" | "gib" => 30,
        "t" | "tib" => 40,
        _ => return refused("it is no size"),
    };
    match digits
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(1 << shift))
    {
        // QEMU rounds to 8 KiB.
        Some(bytes) if bytes > 0 => match bytes.checked_next_multiple_of(8 << 10) {
            Some(bytes) => Ok(bytes),
            None => refused("it is no size"),
        },
        _ => refused("it is no size"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TYPES: &str = "\
Supported machines are:
microvm              microvm (i386)
pc                   Standard PC (i440FX + PIIX, 1996) (alias of pc-i440fx-7.2)
pc-i440fx-7.2        Standard PC (i440FX + PIIX, 1996) (default)
q35                  Standard PC (Q35 + ICH9, 2009) (alias of pc-q35-7.2)
pc-q35-7.2           Standard PC (Q35 + ICH9, 2009)
none                 empty machine
";

    fn line(line: &str) -> Result<Arguments> {
        Arguments::parse(&line.split(' ').collect::<Vec<_>>())?.versioned(TYPES)
    }

    fn words(command: &Command) -> String {
        let words = command.get_args().map(|word| word.to_str().unwrap());
        words.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn a_command_line_is_completed() {
        let arguments = line("qemu -M q35,accel=tcg -m 1G --device virtio-net,netdev=a -nographic").unwrap();
        assert_eq!(arguments.ram(), 1 << 30);
        let command = arguments.command(Path::new("/run/a,b/ram"), Path::new("/run/qmp"), true);
        assert_eq!(
            words(&command),
            "-machine pc-q35-7.2,accel=tcg,memory-backend=verbatim-ram -m 1073741824B \
             -object memory-backend-file,id=verbatim-ram,size=1073741824,mem-path=/run/a,,b/ram,share=on \
             -chardev socket,id=verbatim-qmp,path=/run/qmp,server=on,wait=off -mon chardev=verbatim-qmp,mode=control \
             -device virtio-net,netdev=a -nographic -S -incoming defer"
        );
        assert_eq!(
            arguments.line().join(" "),
            "qemu -machine pc-q35-7.2,accel=tcg -m 1073741824B -device virtio-net,netdev=a -nographic"
        );
        let plain = line("qemu").unwrap();
        assert_eq!(plain.ram(), 128 << 20);
        let command = plain.command(Path::new("/r"), Path::new("/q"), false);
        assert!(words(&command).starts_with("-machine pc-i440fx-7.2,memory-backend="));
        assert!(
            words(&command).ends_with(" -display none -S"),
            "nobody sees a window"
        );
    }

    #[test]
    fn a_tap_network_gets_the_link_and_its_card_the_mac() {
        let on_tap = |given: &str| {
            let arguments = line(given).unwrap().on_tap("tap0", [2, 0x76, 10, 77, 1, 5])?;
            Ok::<_, Error>(arguments.rest.join(" "))
        };
        let (link, mac) = ("ifname=tap0,script=no,downscript=no", "mac=02:76:0a:4d:01:05");
        let (device, other) = ("-device virtio-net-pci,netdev=n", "-nographic");
        assert_eq!(
            on_tap(&format!("qemu -netdev tap,id=n {device} {other}")).unwrap(),
            format!("-netdev tap,id=n,{link} {device},{mac} {other}")
        );
        assert_eq!(
            on_tap(&format!("qemu {other} -nic tap,model=virtio")).unwrap(),
            format!("{other} -nic tap,model=virtio,{link},{mac}")
        );
        for kept in [
            "-nographic -netdev user,id=n -device virtio-net-pci,netdev=n",
            "-nographic -netdev tap,id=n,ifname=own -device virtio-net-pci,netdev=n",
            "-nographic",
        ] {
            assert_eq!(on_tap(&format!("qemu {kept}")).unwrap(), kept);
        }
        let named = on_tap(&format!(
            "qemu -netdev tap,id=n {device},mac=52:54:00:00:00:01 {other}"
        ));
        assert!(named.unwrap().contains("n,mac=52:54:00:00:00:01 -nographic"));
        let two = on_tap("qemu -netdev tap,id=a -netdev tap,id=b")
            .unwrap_err()
            .to_string();
        assert!(two.contains("`ifname=`"), "{two}");
    }

    #[test]
    fn what_is_named_by_its_path_is_known() {
        let named = |value: &str| {
            let paths = paths(value).into_iter().map(|path| path.display().to_string());
            paths.collect::<Vec<_>>()
        };
        assert_eq!(named("file=/a,,b/c,format=raw,if=none"), ["/a,b/c"]);
        assert_eq!(named("/srv/disk"), ["/srv/disk"]);
        assert_eq!(
            named("file=nbd+unix:///x?socket=/run/s,if=none"),
            ["///x?socket=/run/s", "/run/s"]
        );
        assert_eq!(
            named(r#"{"driver":"file","filename":"/d/1.img","node-name":"a"}"#),
            ["/d/1.img"]
        );
        assert!(named("virtio-blk-pci,drive=a/b").is_empty());
        let folder = tempfile::tempdir().unwrap();
        let (disk, kernel) = (folder.path().join("disk"), folder.path().join("kernel"));
        std::fs::write(&disk, "").unwrap();
        std::fs::write(&kernel, "").unwrap();
        let files = line(&format!(
            "qemu -kernel {} -drive file={},if=virtio -drive file=/not/there",
            kernel.display(),
            disk.display()
        ));
        assert_eq!(files.unwrap().files(), [(kernel, false), (disk, true)]);
    }

    #[test]
    fn types_and_sizes() {
        for (given, bytes) in [
            ("64", 64 << 20),
            ("size=64M", 64 << 20),
            ("3k", 8192),
            ("2g", 2 << 30),
            ("1", 1 << 20),
        ] {
            assert_eq!(ram_of(given).unwrap(), bytes, "{given}");
        }
        for given in ["", "x", "1Z", "-1", "1G,maxmem=2G", "99999999999T", "0"] {
            assert!(ram_of(given).is_err(), "{given}");
        }
        assert_eq!(
            line("qemu -machine type=pc").unwrap().machine.unwrap(),
            "pc-i440fx-7.2"
        );
        assert_eq!(line("qemu -machine none").unwrap().machine.unwrap(), "none");
        assert!(
            line("qemu -machine isapc")
                .unwrap_err()
                .to_string()
                .contains("`isapc`")
        );
    }

    #[test]
    fn what_cannot_move_is_refused_with_the_reason() {
        for (given, reason) in [
            ("-incoming defer", "started by a migration"),
            ("--daemonize", "QEMU's parent"),
            ("-device vfio-pci,host=1", "device of the host's"),
            ("-netdev type=vhost-user,id=a", "another process"),
            (
                "-device vhost-user-blk-pci,chardev=a",
                "`--volume NAME` in its place",
            ),
            (
                "-device driver=vhost-user-blk,chardev=a",
                "`--volume NAME` in its place",
            ),
            ("-drive file=/a,snapshot=on", "lost with the process"),
            ("-drive file=fat:rw:/srv,format=raw", "leave out `rw:`"),
            ("-chardev vhost-user-x", "another process"),
            ("-object memory-backend-memfd,id=a", "one piece of RAM"),
            ("-object qom-type=memory-backend-ram,id=a", "one piece of RAM"),
            ("-device pc-dimm,id=a", "one piece of RAM"),
            ("-machine pc,memory-backend=a", "file of the agent's"),
            ("-m", "needs a value"),
        ] {
            let error = line(&format!("qemu {given}")).unwrap_err().to_string();
            assert!(error.contains(reason), "{given}: {error}");
            let is_disk = given.contains("-blk");
            assert_eq!(error.contains("--volume"), is_disk, "{given}: {error}");
        }
    }
}
