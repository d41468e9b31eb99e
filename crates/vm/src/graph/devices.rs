//! Devices: those of the command line that are gone, and those that were added later.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::carried::Work;
use super::drives;
use super::line::{Params, Word};
use super::now::{ANONYMOUS, Device, NAMED};

/// Devices that can be added and removed; a variant has a suffix (`-transitional`).
const CARDS: &[&str] = &["virtio-blk-pci", "virtio-net-pci", "e1000", "rtl8139"];
const USB: &[&str] = &[
    "usb-tablet",
    "usb-mouse",
    "usb-kbd",
    "usb-wacom-tablet",
    "usb-hub",
];

/// Options that make a device without a name, as `-device` does.
const OTHERS: &[&str] = &["-virtfs", "-watchdog"];

/// Properties of an added device that are written in another form.
const SAID: &[&str] = &["addr", "legacy-addr", "drive", "port", "attached"];

/// Origin of a device of the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum From {
    /// A word of the user.
    Rest(usize),
    /// A word of ours.
    Disks(usize),
    /// A `-drive` of the user, with `if=virtio`.
    Drive(usize),
}

/// A device that the command line makes, and its path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Made {
    pub from: From,
    pub path: String,
    pub kind: String,
}

/// The devices that the command line makes. QEMU makes those in JSON last.
pub(super) fn made(work: &Work<'_>) -> Vec<Made> {
    let (mut plain, mut in_json) = (Vec::new(), Vec::new());
    let rest = work
        .rest
        .iter()
        .enumerate()
        .map(|(at, word)| (From::Rest(at), word));
    let disks = work
        .disks
        .iter()
        .enumerate()
        .map(|(at, word)| (From::Disks(at), word));
    for (from, word) in rest.chain(disks) {
        match word.params("-device") {
            Some(params) => {
                let device = (from, params.get("id"), params.kind(&["driver"]));
                match params {
                    Params::Plain(_) => plain.push(device),
                    Params::Json(_) => in_json.push(device),
                }
            }
            None if OTHERS.contains(&word.name.as_str()) => plain.push((from, None, word.name.clone())),
            None => {}
        }
    }
    let drives = drives::named(&work.rest, work.machine).into_iter();
    let implied = drives.filter(|drive| drive.interface == "virtio");
    plain.extend(implied.map(|drive| (From::Drive(drive.at), None, "virtio-blk-pci".to_owned())));
    let mut number = 0;
    let all = plain.into_iter().chain(in_json);
    all.map(|(from, name, kind)| Made {
        from,
        path: match name {
            Some(name) => format!("{NAMED}/{name}"),
            None => {
                number += 1;
                format!("{ANONYMOUS}/device[{}]", number - 1)
            }
        },
        kind,
    })
    .collect()
}

/// The device that a word has made, if it is there.
pub(super) fn found<'a>(work: &Work<'a>, made: &Made) -> Option<&'a Device> {
    work.now
        .devices
        .iter()
        .find(|device| device.path == made.path && !device.is_hot)
}

fn is_usb(kind: &str) -> bool {
    USB.contains(&kind)
}

/// Removes the words of devices that are gone, and returns them.
pub(super) fn remove(work: &mut Work<'_>, made: &[Made]) -> Vec<Made> {
    let gone: Vec<_> = made
        .iter()
        .filter(|made| found(work, made).is_none())
        .cloned()
        .collect();
    let known: BTreeSet<_> = made.iter().map(|made| &made.path).collect();
    let strange = work
        .now
        .devices
        .iter()
        .find(|device| !device.is_hot && !known.contains(&device.path));
    if let (Some(strange), false) = (strange, gone.is_empty()) {
        let title = strange.title();
        work.refuse(format!(
            "a device was removed while it ran, and which one cannot be told: the command line does not say where {title} comes from"
        ));
        return gone;
    }
    for gone in &gone {
        let title = gone.path.rsplit('/').next().unwrap_or_default().to_owned();
        // The name of the kind in the command line may be shorter: `virtio-net` for `virtio-net-pci`.
        let may = is_usb(&gone.kind)
            || CARDS
                .iter()
                .any(|card| gone.kind.starts_with(card) || card.strip_suffix("-pci") == Some(&gone.kind));
        match gone.from {
            From::Rest(at) if may => work.take_out(at),
            // The drive goes with its device.
            From::Drive(_) => {}
            From::Disks(_) => work.refuse(format!(
                "the disk {title}, which is a volume or memory of another host, was removed while it ran: stop it, and start it without"
            )),
            From::Rest(_) => work.refuse(format!(
                "the device {title} ({}) was removed while it ran: that cannot be carried over but for virtio disks, network cards and USB devices",
                gone.kind
            )),
        }
    }
    gone
}

/// If a device was removed, the others have to stay in their slots: QEMU would give the free slot to the next
/// one.
pub(super) fn pin(work: &mut Work<'_>, made: &[Made], removed: &[Made]) {
    if removed.is_empty() {
        return;
    }
    let usb_removed = removed.iter().any(|removed| is_usb(&removed.kind));
    for made in made.iter().filter(|made| !removed.contains(made)) {
        let Some(device) = found(work, made) else { continue };
        let word = match made.from {
            From::Rest(at) => work.rest[at].clone(),
            From::Disks(at) => work.disks[at].clone(),
            From::Drive(at) => {
                own_device(work, at, device);
                continue;
            }
        };
        let Some(mut params) = word.params("-device") else {
            continue;
        };
        if params.get("addr").is_none()
            && let Some(slot) = device.slot()
        {
            params.set("addr", &slot);
        }
        if params.get("netdev").is_some()
            && params.get("mac").is_none()
            && let Some(mac) = &device.mac
        {
            params.set("mac", mac);
        }
        if made.kind.starts_with("usb-") && params.get("port").is_none() {
            let port = device.name().and_then(|name| work.now.ports.get(name));
            match port.filter(|port| !port.is_empty()) {
                Some(port) => params.set("port", port),
                None if usb_removed => work.refuse(format!(
                    "a USB device was removed while it ran, and at which port {} is cannot be told: give it an `id=` when you start it next",
                    device.title()
                )),
                None => {}
            }
        }
        let word = Word::new("-device", params);
        match made.from {
            From::Disks(at) => work.disks[at] = word,
            From::Rest(at) | From::Drive(at) => work.rest[at] = word,
        }
    }
}

/// Gives a device that a `-drive` makes a word of its own.
fn own_device(work: &mut Work<'_>, at: usize, device: &Device) {
    let drives = drives::named(&work.rest, work.machine);
    let Some(drive) = drives.into_iter().find(|drive| drive.at == at) else {
        return;
    };
    let mut params = drive.params;
    params.set("if", "none");
    params.set("id", &drive.id);
    params.retain(|key| !["index", "bus", "unit", "addr"].contains(&key));
    work.rest[at] = Word::new("-drive", params);
    let mut device_params = Params::parse(&device.kind);
    device_params.set("drive", &drive.id);
    if let Some(slot) = device.slot() {
        device_params.set("addr", &slot);
    }
    work.rest.push(Word::new("-device", device_params));
}

/// Adds devices that were added later.
pub(super) fn add(work: &mut Work<'_>) {
    let now = work.now;
    let mut hot: Vec<_> = now.devices.iter().filter(|device| device.is_hot).collect();
    // A hub comes before its devices.
    let port = |device: &Device| device.name().and_then(|name| now.ports.get(name)).cloned();
    hot.sort_by_key(|device| (port(device).map_or(0, |port| port.len()), device.path.clone()));
    for device in hot {
        match word(work, device, port(device)) {
            Ok(word) => work.rest.push(word),
            Err(why) => work.refuse(why),
        }
    }
}

fn word(work: &Work<'_>, device: &Device, port: Option<String>) -> Result<Word, String> {
    let title = device.title();
    let is_card = CARDS.iter().any(|card| device.kind.starts_with(card));
    if !is_card && !is_usb(&device.kind) {
        return Err(format!(
            "the device {title} was added while it ran, and cannot be carried over: remove it (`device_del`), or start the virtual machine with it"
        ));
    }
    let mut said = serde_json::Map::new();
    let mut say = |key: &str, value: Value| {
        said.insert(key.to_owned(), value);
    };
    say("driver", json!(device.kind));
    if let Some(name) = device.name() {
        say("id", json!(name));
    }
    if let Some(bus) = &device.bus {
        say("bus", json!(bus));
    }
    if is_card {
        let slot = device
            .slot()
            .ok_or_else(|| format!("QEMU does not say where the device {title} is"))?;
        say("addr", json!(slot));
    } else {
        let port = port.ok_or_else(|| {
            format!("at which port the device {title} is cannot be told: remove it, and add it with an `id`")
        })?;
        say("port", json!(port));
    }
    let has_rom = device.properties.get("romfile").is_some_and(|rom| rom != "");
    for (key, value) in &device.properties {
        if SAID.contains(&key.as_str()) || key == "romsize" && !has_rom {
            continue;
        }
        // The name of an object, in place of its path.
        let value = match (key.as_str(), value.as_str()) {
            ("iothread", Some(path)) => json!(path.rsplit('/').next().unwrap_or(path)),
            _ => value.clone(),
        };
        say(key, value);
    }
    if let Some(backend) = drives::backend_of(work.now, &device.path) {
        let drive = match (&backend.device[..], &backend.inserted) {
            ("", Some(inserted)) => drives::name_of(work.now, &inserted.node),
            ("", None) => {
                return Err(format!(
                    "the disk {title} has no medium, and cannot be carried over"
                ));
            }
            (drive, _) => drive.to_owned(),
        };
        say("drive", json!(drive));
    }
    Ok(Word::new("-device", Value::Object(said)))
}
