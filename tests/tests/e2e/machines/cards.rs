//! Network cards that were added to and removed from a virtual machine while it ran, with their networks: the next host's QEMU has the present ones.

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use verbatim_e2e::{TestLab, eventually};

use super::changed::Monitor;
use super::{Guest, HOSTS, LIMIT, NAME};
use crate::Test;
use crate::faults::Subject;

/// The instance's tap link.
const LINK: &str = "tap0";

/// Register of the machine `pc` into which a guest's ACPI code writes the slots whose devices it lets go of (QEMU, docs/specs/acpi_pci_hotplug).
const EJECT: u16 = 0xae08;

/// All of them.
pub fn tests() -> Vec<Test> {
    vec![Test::new("machines::changed_cards", HOSTS, cards)]
}

fn property(monitor: &Monitor<'_>, device: &str, name: &str) -> anyhow::Result<Value> {
    let path = format!("/machine/peripheral/{device}");
    monitor.ask("qom-get", json!({"path": path, "property": name}))
}

/// A card with its place and its address.
fn card(monitor: &Monitor<'_>, device: &str) -> anyhow::Result<[Value; 3]> {
    let of = |name| property(monitor, device, name);
    Ok([of("type")?, of("addr")?, of("mac")?])
}

/// Removes a card. The guest of these tests knows no ACPI: its part is played by the monitor.
fn remove(monitor: &Monitor<'_>, device: &str) -> anyhow::Result<()> {
    let address = property(monitor, device, "addr")?;
    let slot = address.as_u64().context("no address")? >> 3;
    monitor.ask("device_del", json!({"id": device}))?;
    let said = monitor.line(&format!("o /w {EJECT:#x} {:#x}", 1u32 << slot))?;
    ensure!(said.is_empty(), "{said}");
    eventually("a card that is gone", LIMIT, || {
        let is_there = monitor.devices()?.iter().any(|name| name == device);
        Ok((!is_there).then_some(()))
    })
}

/// The networks at the host's side with their kinds, and the cards on them, in QEMU's words without numbers.
fn networks(monitor: &Monitor<'_>) -> anyhow::Result<Vec<String>> {
    let said = monitor.line("info network")?;
    let lines = said.lines().map(|line| line.trim_end().replace("index=0,", ""));
    let mut lines: Vec<_> = lines.collect();
    lines.sort();
    Ok(lines)
}

/// A card on the tap link is removed with its network; later another one takes the link. A second card on a network of QEMU's own gets a port forward.
fn cards(lab: &TestLab) -> anyhow::Result<()> {
    let guest = Guest::start(
        lab,
        &[
            "-netdev",
            "tap,id=out",
            "-device",
            "virtio-net-pci,netdev=out,id=first",
            "-netdev",
            "user,id=own",
            "-device",
            "e1000,netdev=own,id=second",
        ],
    )?;
    let monitor = Monitor::at(lab, "src")?;
    let second = card(&monitor, "second")?;
    remove(&monitor, "first")?;
    monitor.ask("netdev_del", json!({"id": "out"}))?;
    guest.moves("dst")?;
    guest.counts_on()?;
    let monitor = Monitor::at(lab, "dst")?;
    ensure!(monitor.devices()? == ["second"], "{:?}", monitor.devices()?);
    ensure!(card(&monitor, "second")? == second, "{second:?}");
    let said = networks(&monitor)?;
    ensure!(
        said.len() == 2 && !said.iter().any(|line| line.contains("tap")),
        "{said:?}"
    );

    let tap = json!({"type": "tap", "id": "late", "ifname": LINK, "script": "no", "downscript": "no"});
    monitor.ask("netdev_add", tap)?;
    monitor.ask(
        "device_add",
        json!({"driver": "virtio-net-pci", "netdev": "late", "id": "third", "mac": "52:54:00:aa:bb:cc", "host_mtu": 1400}),
    )?;
    monitor.line("hostfwd_add own tcp::2001-:7")?;
    let expected = (
        card(&monitor, "second")?,
        card(&monitor, "third")?,
        networks(&monitor)?,
    );
    ensure!(
        expected
            .2
            .iter()
            .any(|line| line.contains(&format!("late: type=tap,ifname={LINK}"))),
        "{:?}",
        expected.2
    );
    let check = lab.ask(&["check", NAME, "--to", "src"])?.output();
    for to in ["src", "dst"] {
        guest.moves(to).with_context(|| check.clone())?;
        guest.counts_on()?;
        let monitor = Monitor::at(lab, to)?;
        ensure!(
            monitor.devices()? == ["second", "third"],
            "{:?}",
            monitor.devices()?
        );
        let there = (
            card(&monitor, "second")?,
            card(&monitor, "third")?,
            networks(&monitor)?,
        );
        ensure!(there == expected, "on {to}: {there:?} was {expected:?}");
        ensure!(property(&monitor, "third", "host_mtu")? == 1400);
        let forwards = monitor.line("info usernet")?;
        let row = forwards.lines().find(|line| line.contains("TCP[HOST_FORWARD]"));
        ensure!(row.is_some_and(|row| row.contains(" 2001 ")), "{forwards}");
    }
    // The link is the new card's: no other one can be opened.
    let monitor = Monitor::at(lab, "dst")?;
    let tap = json!({"type": "tap", "id": "more", "ifname": LINK, "script": "no", "downscript": "no"});
    ensure!(
        monitor.ask("netdev_add", tap).is_err(),
        "nothing has the link {LINK}"
    );
    lab.ask(&["stop", NAME]).map(drop)
}
