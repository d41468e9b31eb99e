//! A command line for a QEMU with the present disks and devices of this one.

use std::path::PathBuf;

use super::domain::differences;
use super::drives::Drives;
use super::line::{Word, joined, words};
use super::nodes::{Leaf, Nodes};
use super::now::Now;
use super::remote::{self, Remote};
use super::{devices, forwards, networks};
use crate::arguments::{Arguments, MEMORY, is_vhost_user_disk};
use crate::error::{Error, Result};
use crate::machine::Machine;
use crate::refusal::vhost_user_disk;

/// Prefixes of the names of character devices that QEMU makes for other options than `-chardev`.
const OWN_CHARACTERS: &[&str] = &[
    "serial",
    "parallel",
    "compat_monitor",
    "virtcon",
    "debugcon",
    "gdb",
    "vc",
    "sclp",
    "verbatim-qmp",
];

/// Types of objects that come from other options, or not from the command line.
const OWN_OBJECTS: &[&str] = &["memory-backend-", "throttle-group"];

/// A file or a device of the host that is a part of the virtual machine's disks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct File {
    /// The path, as QEMU names it.
    pub path: PathBuf,
    /// Whether QEMU only reads it now.
    pub read_only: bool,
}

/// The present state of a virtual machine, for its next place.
#[derive(Debug, Clone)]
pub struct Carried {
    /// The arguments for a start at the next place. `None`: libvirt starts the machine, from its own
    /// description.
    pub arguments: Option<Arguments>,
    /// All files and devices of its disks, with those that images refer to.
    pub files: Vec<File>,
    /// Disks, and parts of them, that others serve; those of [`Arguments::with_disk`] left out.
    pub remotes: Vec<Remote>,
    nodes: Nodes,
}

impl Carried {
    pub(crate) fn new(arguments: Option<Arguments>, now: &Now, remotes: Vec<Remote>) -> Self {
        let files = now
            .nodes
            .leaves()
            .into_iter()
            .map(|Leaf { path, read_only }| File {
                path: path.into(),
                read_only,
            });
        Self {
            arguments,
            files: files.collect(),
            remotes,
            nodes: now.nodes.clone(),
        }
    }

    /// Whether both are the same virtual machine with the same disks.
    pub fn is(&self, other: &Self) -> bool {
        self.arguments == other.arguments && self.files == other.files && self.remotes == other.remotes
    }
}

impl Machine {
    /// The present state of the virtual machine. `arguments`: the ones that it was started with; `link`: the
    /// tap link that it may have. The error names parts that cannot be carried over.
    pub async fn carried(&self, arguments: Option<&Arguments>, link: &str) -> Result<Carried> {
        if let Some(arguments) = arguments {
            return arguments.carried(&self.now().await?, link);
        }
        let domain = self.qmp().domain();
        let domain = domain.ok_or_else(|| Error::Malformed("nobody knows what starts it".to_owned()))?;
        let named = domain.named().await?;
        let now = self.now_beside(&named.aliases).await?;
        let mut reasons = differences(&now, &named.files, &named.aliases);
        match remote::of(&now.nodes, |_| false) {
            Ok(remotes) if reasons.is_empty() => Ok(Carried::new(None, &now, remotes)),
            Ok(_) => Err(Error::Unmovable(reasons)),
            Err(refused) => {
                reasons.extend(refused);
                Err(Error::Unmovable(reasons))
            }
        }
    }

    /// An error if the disks have changed since. The guest may stand still.
    pub async fn has_still(&self, carried: &Carried) -> Result<()> {
        match self.nodes_alone().await?.is_like(&carried.nodes) {
            true => Ok(()),
            false => Err(Error::Unmovable(vec![
                "its disks were changed while it was being moved (a snapshot, a mirror, another medium): try again".to_owned(),
            ])),
        }
    }
}

impl Arguments {
    /// The arguments for a QEMU with the state `now` of a QEMU that was started with these arguments.
    pub fn carried(&self, now: &Now, link: &str) -> Result<Carried> {
        let mut work = Work {
            now,
            machine: self.machine_type(),
            rest: words(self.rest()),
            disks: words(&self.disks),
            reasons: Vec::new(),
        };
        let made = devices::made(&work);
        let removed = devices::remove(&mut work, &made);
        Drives::of(&work).carry(&mut work, &made);
        devices::pin(&mut work, &made, &removed);
        devices::add(&mut work);
        networks::carry(&mut work, link);
        forwards::carry(&mut work);
        work.others(self.memory().unwrap_or(MEMORY));
        work.reasons.extend(self.unmade());
        let remotes = remote::of(&now.nodes, |socket| self.node_at(socket).is_some());
        let remotes = remotes.unwrap_or_else(|refused| {
            work.reasons.extend(refused);
            Vec::new()
        });
        for device in now
            .devices
            .iter()
            .filter(|device| is_vhost_user_disk(&device.kind))
        {
            work.refuse(vhost_user_disk(device.name().unwrap_or(&device.path)));
        }
        if !work.reasons.is_empty() {
            return Err(Error::Unmovable(work.reasons));
        }
        // A removed word has no name.
        work.rest.retain(|word| !word.name.is_empty());
        let arguments = self.clone().with(joined(&work.rest), joined(&work.disks));
        Ok(Carried::new(Some(arguments), now, remotes))
    }
}

/// A line that is being changed. Words keep their numbers: a removed word stays as one without a name.
#[derive(Debug)]
pub(super) struct Work<'a> {
    pub now: &'a Now,
    pub machine: &'a str,
    /// The user's words.
    pub rest: Vec<Word>,
    /// Words for disks that we added, such as volumes.
    pub disks: Vec<Word>,
    /// Obstacles.
    pub reasons: Vec<String>,
}

impl Work<'_> {
    pub fn refuse(&mut self, why: impl Into<String>) {
        let why = why.into();
        if !self.reasons.contains(&why) {
            self.reasons.push(why);
        }
    }

    pub fn take_out(&mut self, at: usize) {
        self.rest[at] = Word {
            name: String::new(),
            value: None,
        };
    }

    /// Objects, character devices, exports and bitmaps.
    fn others(&mut self, memory: &str) {
        let named = |option: &str, key: &str, rest: &[Word]| -> Vec<(usize, String)> {
            let words = rest.iter().enumerate();
            words
                .filter_map(|(at, word)| Some((at, word.params(option)?.get(key)?)))
                .collect()
        };
        let objects = named("-object", "id", &self.rest);
        for (name, kind) in &self.now.objects {
            let is_own = OWN_OBJECTS.iter().any(|own| kind.starts_with(own)) || name == memory;
            if !is_own && !objects.iter().any(|(_, id)| id == name) {
                self.refuse(format!(
                    "the object {name} ({kind}) was added while it ran: remove it (`object-del`), or start the virtual machine with it"
                ));
            }
        }
        for (at, id) in objects {
            if !self.now.objects.iter().any(|(name, _)| *name == id) {
                self.take_out(at);
            }
        }
        let characters = named("-chardev", "id", &self.rest);
        for label in &self.now.characters {
            let is_own = OWN_CHARACTERS.iter().any(|own| label.starts_with(own));
            let is_named = |(_, id): &(usize, String)| label == id || label.strip_suffix("-base") == Some(id);
            if !is_own && !characters.iter().any(is_named) {
                self.refuse(format!(
                    "the character device {label} was added while it ran: remove it (`chardev-remove`), or start the virtual machine with it"
                ));
            }
        }
        for (at, id) in characters {
            if !self.now.characters.contains(&id) {
                self.take_out(at);
            }
        }
        let now = self.now;
        for export in &now.exports {
            self.refuse(format!(
                "the block export {export} serves a disk to others: end it first (`block-export-del`)"
            ));
        }
        for node in now.nodes.all() {
            for bitmap in node.dirty_bitmaps.iter().filter(|bitmap| !bitmap.persistent) {
                let name = bitmap.name.as_deref().unwrap_or("without a name");
                self.refuse(format!(
                    "the dirty bitmap {name} of {} is in memory only, and would be lost: end the backup that has it, or remove it \
                     (`block-dirty-bitmap-remove`)",
                    node.filename
                ));
            }
        }
    }
}
