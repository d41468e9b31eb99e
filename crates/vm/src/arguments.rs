//! QEMU's command line: the user's part of it, and ours.

mod named;
mod refused;
mod tap;

use std::path::Path;
use std::process::Command;

use serde::{Deserialize, Serialize};

pub(crate) use self::named::paths;
pub use self::refused::is_vhost_user_disk;
use self::refused::{OURS, immovable, lost};
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

    /// QEMU's program.
    pub fn program(&self) -> &str {
        &self.program
    }

    /// The machine type, with its version once that is known.
    pub(crate) fn machine(&self) -> &str {
        self.machine.as_deref().unwrap_or_default()
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
mod tests;
