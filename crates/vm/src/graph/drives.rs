//! Disks: the node of the block graph that the command line gives to each, and its present one.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::carried::Work;
use super::devices::{self, From, Made};
use super::line::{Params, Word};
use super::nodes::{Node, Nodes};
use super::now::{Backend, Now};
use crate::arguments::paths;

/// Options that stand for a `-drive`, and the parameters that they imply.
const SHORT: &[(&str, &str)] = &[
    ("-hda", "index=0,media=disk"),
    ("-hdb", "index=1,media=disk"),
    ("-hdc", "index=2,media=disk"),
    ("-hdd", "index=3,media=disk"),
    ("-cdrom", "index=2,media=cdrom"),
    ("-fda", "if=floppy,index=0"),
    ("-fdb", "if=floppy,index=1"),
    ("-pflash", "if=pflash"),
    ("-sd", "if=sd"),
];

/// Parameters of a `-drive` that do not belong to the image.
const KEPT: &[&str] = &[
    "if",
    "id",
    "index",
    "bus",
    "unit",
    "media",
    "werror",
    "rerror",
    "cache",
    "aio",
    "discard",
    "detect-zeroes",
    "copy-on-read",
    "group",
];
const KEPT_BEGINNINGS: &[&str] = &["cache.", "throttling.", "bps", "iops", "stats-"];

/// Parameters of an opened file that QEMU does not show.
const HINTS: &[&str] = &["aio", "locking", "discard", "pr-manager"];

/// Drives that a machine has by default, and the parameters that give them a medium.
const USUAL: &[(&str, &str)] = &[
    ("ide1-cd0", "if=ide,index=2,media=cdrom"),
    ("ide2-cd0", "if=ide,index=2,media=cdrom"),
    ("floppy0", "if=floppy,index=0"),
];

/// A `-drive`, or an option that stands for one.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Drive {
    pub at: usize,
    pub params: Params,
    /// QEMU's name of the drive, given by the user or not.
    pub id: String,
    /// The interface: `none`, `virtio`, `ide`, ...
    pub interface: String,
}

/// The drives of a line, with QEMU's names for those without a name.
pub(super) fn named(rest: &[Word], machine: &str) -> Vec<Drive> {
    let per_bus = |interface: &str| match interface {
        "ide" if machine.contains("q35") => 1,
        "ide" => 2,
        "scsi" => 7,
        _ => 0,
    };
    let usual = if machine.starts_with("virt") {
        "virtio"
    } else {
        "ide"
    };
    let (mut taken, mut drives) = (BTreeSet::new(), Vec::new());
    for (at, word) in rest.iter().enumerate() {
        let short = SHORT.iter().find(|(option, _)| *option == word.name);
        let params = match (short, &word.value) {
            (Some((_, about)), Some(file)) => {
                let mut params = Params::parse(about);
                params.set("file", file);
                params
            }
            _ => match word.params("-drive") {
                Some(params) => params,
                None => continue,
            },
        };
        let number = |key: &str| params.get(key).and_then(|number| number.parse::<u32>().ok());
        let interface = params.get("if").unwrap_or_else(|| usual.to_owned());
        let most = per_bus(&interface);
        let (mut bus, mut unit) = match number("index") {
            Some(index) if most > 0 => (index / most, Some(index % most)),
            Some(index) => (0, Some(index)),
            None => (number("bus").unwrap_or(0), number("unit")),
        };
        let unit = *unit.get_or_insert_with(|| {
            let mut unit = 0;
            while taken.contains(&(interface.clone(), bus, unit)) {
                unit += 1;
                if most > 0 && unit >= most {
                    (bus, unit) = (bus + 1, 0);
                }
            }
            unit
        });
        taken.insert((interface.clone(), bus, unit));
        let media = match (interface.as_str(), params.get("media").as_deref()) {
            ("ide" | "scsi", Some("cdrom")) => "-cd",
            ("ide" | "scsi", _) => "-hd",
            _ => "",
        };
        let id = params.get("id").unwrap_or_else(|| match most {
            0 => format!("{interface}{media}{unit}"),
            _ => format!("{interface}{bus}{media}{unit}"),
        });
        drives.push(Drive {
            at,
            params,
            id,
            interface,
        });
    }
    drives
}

/// The backend of a device.
pub(super) fn backend_of<'a>(now: &'a Now, device: &str) -> Option<&'a Backend> {
    now.backends.iter().find(|backend| {
        let path = backend.qdev.as_deref().unwrap_or_default();
        path.strip_prefix(device)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    })
}

/// Name of a node at its next place.
pub(super) fn name_of(now: &Now, node: &str) -> String {
    match node.strip_prefix('#') {
        None => node.to_owned(),
        Some(_) => {
            let unnamed = now.nodes.all().filter(|node| node.is_unnamed());
            let number = unnamed.take_while(|known| known.node_name != node).count();
            let mut name = format!("verbatim-now{number}");
            while now.nodes.get(&name).is_some() {
                name.push('x');
            }
            name
        }
    }
}

/// Knowledge about the disks of a line.
#[derive(Debug)]
pub(super) struct Drives {
    drives: Vec<Drive>,
    /// Names of the nodes whose `-blockdev` words are still right.
    kept: BTreeSet<String>,
    hints: BTreeMap<String, Map<String, Value>>,
}

impl Drives {
    pub fn of(work: &Work<'_>) -> Self {
        let words = || work.rest.iter().chain(&work.disks);
        let blockdevs: Vec<_> = words()
            .filter_map(|word| {
                let params = word.params("-blockdev")?;
                Some((params.get("node-name")?, word.value.clone()?, params))
            })
            .collect();
        let names: BTreeSet<_> = blockdevs.iter().map(|(name, _, _)| name.clone()).collect();
        let kept = blockdevs.iter().filter(|(name, value, params)| {
            let node = work.now.nodes.get(name);
            node.is_some_and(|node| {
                is_kept(node, params) && is_as_named(&work.now.nodes, value, node, &names)
            })
        });
        let mut hints = BTreeMap::new();
        for (_, _, params) in &blockdevs {
            collect_hints(params, &mut hints);
        }
        Self {
            drives: named(&work.rest, work.machine),
            kept: kept.map(|(name, _, _)| name.clone()).collect(),
            hints,
        }
    }

    /// Gives each disk its present node.
    pub fn carry(self, work: &mut Work<'_>, made: &[Made]) {
        let now = work.now;
        let mut defined = self.kept.clone();
        for at in 0..work.rest.len() {
            let node = work.rest[at]
                .params("-blockdev")
                .and_then(|params| params.get("node-name"));
            if node.is_some_and(|node| !self.kept.contains(&node)) {
                work.take_out(at);
            }
        }
        let mut roots = Vec::new();
        for made in made {
            self.device(work, made, &mut roots);
        }
        let hot = now.devices.iter().filter(|device| device.is_hot);
        let hot = hot.filter_map(|device| backend_of(now, &device.path));
        let hot = hot.filter(|backend| backend.device.is_empty());
        roots.extend(hot.filter_map(|backend| Some(backend.inserted.as_ref()?.node.clone())));
        for root in &roots {
            self.define(work, root, &mut defined);
        }
        self.each_drive(work, &mut defined);
        // Nodes without a user may still be given to a disk.
        let in_drives: BTreeSet<_> = self.below_drives(now);
        for node in now.nodes.all() {
            if !node.is_unnamed() && !node.has_parent && !in_drives.contains(&node.node_name) {
                self.define(work, &node.node_name, &mut defined);
            }
        }
    }

    /// Names of nodes that belong to a `-drive`.
    fn below_drives(&self, now: &Now) -> BTreeSet<String> {
        let drives = now.backends.iter().filter(|backend| !backend.device.is_empty());
        let roots = drives.filter_map(|backend| backend.inserted.as_ref());
        let below = roots.flat_map(|inserted| now.nodes.named_below(&inserted.node));
        below.map(|node| node.node_name.clone()).collect()
    }

    /// Gives a device of the line its present node.
    fn device(&self, work: &mut Work<'_>, made: &Made, roots: &mut Vec<String>) {
        let now = work.now;
        let (From::Rest(at) | From::Disks(at)) = made.from else {
            return;
        };
        let words = match made.from {
            From::Disks(_) => &work.disks,
            _ => &work.rest,
        };
        let Some(mut params) = words[at].params("-device") else {
            return;
        };
        if devices::found(work, made).is_none() {
            return;
        }
        let wanted = params.get("drive");
        let Some(backend) = backend_of(now, &made.path).filter(|backend| backend.device.is_empty()) else {
            return;
        };
        let has = backend.inserted.as_ref().map(|inserted| inserted.node.clone());
        if let From::Disks(_) = made.from {
            if has != wanted {
                work.refuse(format!(
                    "the disk {}, which is a volume or memory of another host, has something else in its place (a snapshot, a mirror), which \
                     cannot be carried over",
                    wanted.unwrap_or_default()
                ));
            }
            return;
        }
        if backend
            .inserted
            .as_ref()
            .is_some_and(|inserted| inserted.is_limited())
        {
            work.refuse(limited(wanted.as_deref().unwrap_or(&made.path)));
        }
        match has {
            Some(has) => {
                if !self.kept.contains(&has) {
                    roots.push(has.clone());
                }
                let name = name_of(now, &has);
                if wanted.as_ref() != Some(&name) {
                    params.set("drive", &name);
                }
            }
            None => params.retain(|key| key != "drive"),
        }
        // Words with the same meaning stay as they are.
        if work.rest[at].params("-device").as_ref() != Some(&params) {
            work.rest[at] = Word::new("-device", params);
        }
    }

    /// Adds a node, with all missing nodes below it.
    fn define(&self, work: &mut Work<'_>, root: &str, defined: &mut BTreeSet<String>) {
        let now = work.now;
        let name = name_of(now, root);
        if defined.contains(&name) {
            return;
        }
        self.define_below(work, root, defined);
        match self.describe(now, root, defined) {
            Err(why) => work.refuse(why),
            Ok(mut said) => {
                names_in(&said, defined);
                said.insert("node-name".to_owned(), Value::String(name.clone()));
                if let Some(node) = now.nodes.get(root) {
                    said.insert("read-only".to_owned(), Value::Bool(node.read_only));
                    let cache = [("direct", node.cache.direct), ("no-flush", node.cache.no_flush)];
                    let cache = cache.map(|(key, is)| (key.to_owned(), Value::Bool(is)));
                    said.insert("cache".to_owned(), Value::Object(cache.into_iter().collect()));
                }
                defined.insert(name);
                work.rest.push(Word::new("-blockdev", Value::Object(said)));
            }
        }
    }

    /// Adds the named nodes below a node: a backing file that refers to another node has to be a node of its
    /// own.
    fn define_below(&self, work: &mut Work<'_>, root: &str, defined: &mut BTreeSet<String>) {
        let now = work.now;
        let Some(node) = now.nodes.get(root) else { return };
        for child in node.children.values() {
            match now.nodes.get(child) {
                Some(child) if !child.is_unnamed() => self.define(work, &child.node_name, defined),
                _ => self.define_below(work, child, defined),
            }
        }
    }

    fn describe(
        &self,
        now: &Now,
        root: &str,
        defined: &BTreeSet<String>,
    ) -> Result<Map<String, Value>, String> {
        let is_there = |name: &str| defined.contains(name);
        let hint = |path: &str| self.hints.get(path).cloned().unwrap_or_default();
        now.nodes.describe(root, &is_there, &hint)
    }

    /// Gives each `-drive` its present image, and adds later ones.
    fn each_drive(&self, work: &mut Work<'_>, defined: &mut BTreeSet<String>) {
        let now = work.now;
        let mut known = BTreeSet::new();
        for drive in &self.drives {
            let id = &drive.id;
            known.insert(id.clone());
            if drive.params.get("snapshot").is_some_and(|is| is == "on") {
                work.refuse(format!(
                    "what is written to the disk {id} would be lost with the process (`snapshot=on`)"
                ));
                continue;
            }
            let Some(backend) = now.backends.iter().find(|backend| backend.device == *id) else {
                match ["none", "virtio"].contains(&drive.interface.as_str()) {
                    true => work.take_out(drive.at),
                    false => work.refuse(format!(
                        "the disk {id} was removed while it ran, and its device is still there: that cannot be carried over"
                    )),
                }
                continue;
            };
            let value = work.rest[drive.at].value.clone().unwrap_or_default();
            let is_limited = backend
                .inserted
                .as_ref()
                .is_some_and(|inserted| inserted.is_limited());
            if is_limited
                && !["throttling.", "bps", "iops"]
                    .iter()
                    .any(|word| value.contains(word))
            {
                work.refuse(limited(id));
            }
            let root = backend
                .inserted
                .as_ref()
                .and_then(|inserted| now.nodes.get(&inserted.node));
            let is_as_it_was = match root {
                Some(root) => is_as_named(&now.nodes, &value, root, &self.kept),
                None => drive.params.get("file").is_none() && !value.contains("file."),
            };
            if !is_as_it_was {
                if let Some(root) = root {
                    self.define_below(work, &root.node_name, defined);
                }
                match self.drive(now, &drive.params, root, defined) {
                    Ok(params) => work.rest[drive.at] = Word::new("-drive", params),
                    Err(why) => work.refuse(why),
                }
            }
        }
        for backend in &now.backends {
            let id = &backend.device;
            if id.is_empty() || known.contains(id) {
                continue;
            }
            let root = backend
                .inserted
                .as_ref()
                .and_then(|inserted| now.nodes.get(&inserted.node));
            let usual = USUAL.iter().find(|(usual, _)| usual == id);
            let params = match (usual, root) {
                (Some((_, about)), Some(_)) => Params::parse(about),
                // A drive of the machine type, without a medium.
                (_, None) if backend.removable => continue,
                (None, _) => Params::parse(&format!("if=none,id={id}")),
                (Some(_), None) => continue,
            };
            if let Some(root) = root {
                self.define_below(work, &root.node_name, defined);
            }
            match self.drive(now, &params, root, defined) {
                Ok(params) => work.rest.push(Word::new("-drive", params)),
                Err(why) => work.refuse(why),
            }
        }
    }

    /// A drive with its present image.
    fn drive(
        &self,
        now: &Now,
        drive: &Params,
        root: Option<&Node>,
        defined: &mut BTreeSet<String>,
    ) -> Result<Params, String> {
        let mut params = drive.clone();
        params.retain(|key| {
            KEPT.contains(&key) || KEPT_BEGINNINGS.iter().any(|beginning| key.starts_with(beginning))
        });
        let Some(root) = root else { return Ok(params) };
        let mut said = self.describe(now, &root.node_name, defined)?;
        names_in(&said, defined);
        if let Some(name) = said.remove("node-name").as_ref().and_then(Value::as_str) {
            params.set("node-name", name);
        }
        if root.read_only && params.get("media").as_deref() != Some("cdrom") {
            params.set("readonly", "on");
        }
        params.set("file", &format!("json:{}", Value::Object(said)));
        Ok(params)
    }
}

fn limited(disk: &str) -> String {
    format!(
        "the disk {disk} has limits of its rate that were set while it ran (`block_set_io_throttle`): take them back, or start the virtual \
         machine with them"
    )
}

/// Whether a node is of the kind of a `-blockdev` word.
fn is_kept(node: &Node, params: &Params) -> bool {
    let is_on = |key: &str| {
        params
            .get(key)
            .is_some_and(|value| ["on", "true", "yes"].contains(&value.as_str()))
    };
    let refers = |edge: &str| match params.get(edge) {
        Some(name) if !name.starts_with('{') && name != "null" => {
            node.children.get(edge).map(String::as_str) == Some(name.as_str())
        }
        _ => true,
    };
    params.kind(&["driver"]) == node.driver
        && (is_on("auto-read-only") || is_on("read-only") == node.read_only)
        && refers("file")
        && refers("backing")
}

/// Whether the files below a node are those that `value` names, except files that headers refer to. `others`
/// are nodes with words of their own.
fn is_as_named(nodes: &Nodes, value: &str, root: &Node, others: &BTreeSet<String>) -> bool {
    let mut expected: BTreeSet<String> = paths(value)
        .iter()
        .map(|path| path.display().to_string())
        .collect();
    let absolute = expected.clone();
    expected.extend(Params::parse(value).get("file"));
    expected.insert(value.to_owned());
    let (mut leaves, mut has_other) = (BTreeSet::new(), false);
    let (mut next, mut seen) = (vec![root], BTreeSet::new());
    let below: BTreeSet<_> = nodes
        .named_below(&root.node_name)
        .iter()
        .map(|node| &node.node_name)
        .collect();
    while let Some(node) = next.pop() {
        if !seen.insert(&node.node_name) {
            continue;
        }
        if node.node_name != root.node_name && others.contains(&node.node_name) {
            if !value.contains(&node.node_name) {
                return false;
            }
            continue;
        }
        match node.path() {
            Some(path) => {
                leaves.insert(path);
            }
            None if node.children.is_empty() => {
                let is_named =
                    value.contains(&node.driver) || node.driver == "vvfat" && value.contains("fat:");
                if !is_named {
                    return false;
                }
                has_other = true;
            }
            None => {}
        }
        let children = node.children.values().filter(|child| below.contains(child));
        next.extend(children.filter_map(|child| nodes.get(child)));
    }
    // Files that headers refer to may be named as well.
    let all: BTreeSet<_> = nodes
        .all_below(&root.node_name)
        .iter()
        .filter_map(|node| node.path())
        .collect();
    leaves.is_subset(&expected) && (has_other || absolute.is_subset(&all))
}

fn names_in(said: &Map<String, Value>, names: &mut BTreeSet<String>) {
    names.extend(said.get("node-name").and_then(Value::as_str).map(str::to_owned));
    for value in said.values().filter_map(Value::as_object) {
        names_in(value, names);
    }
}

/// Collects the hints for files in a `-blockdev`, by their paths.
fn collect_hints(params: &Params, hints: &mut BTreeMap<String, Map<String, Value>>) {
    match params {
        Params::Json(map) => collect_from(map, hints),
        Params::Plain(_) => {
            for prefix in ["", "file."] {
                let Some(path) = params.get(&format!("{prefix}filename")) else {
                    continue;
                };
                let found = HINTS.iter().filter_map(|hint| {
                    let value = params.get(&format!("{prefix}{hint}"))?;
                    Some(((*hint).to_owned(), Value::String(value)))
                });
                hints.entry(path).or_default().extend(found);
            }
        }
    }
}

fn collect_from(map: &Map<String, Value>, hints: &mut BTreeMap<String, Map<String, Value>>) {
    if let Some(path) = map.get("filename").and_then(Value::as_str) {
        let found = HINTS
            .iter()
            .filter_map(|hint| Some(((*hint).to_owned(), map.get(*hint)?.clone())));
        hints.entry(path.to_owned()).or_default().extend(found);
    }
    for value in map.values().filter_map(Value::as_object) {
        collect_from(value, hints);
    }
}
