//! Tests with recorded answers of QEMU 7.2.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::domain::differences;
use super::forwards::Forwards;
use super::nodes::Nodes;
use super::now::{Device, NAMED, Network, Now};
use crate::arguments::Arguments;
use crate::error::Error;

/// Answers of a QEMU with the arguments [`line`], after a snapshot of its first disk, and after the disk `hb`
/// was added at the node `late`.
const ANSWERS: &str = include_str!("recorded/qemu-7.2.json");

/// The arguments of this QEMU.
fn line() -> Arguments {
    let words = [
        "qemu",
        "-M",
        "pc-i440fx-7.2",
        "-drive",
        "file=/srv/d.qcow2,format=qcow2,if=none,id=disk,aio=threads",
        "-device",
        "virtio-blk-pci,drive=disk",
        "-drive",
        "file=/srv/r.img,format=raw,if=virtio",
        "-drive",
        "file=/srv/one.iso,media=cdrom,format=raw",
        "-blockdev",
        "driver=file,filename=/srv/l.img,node-name=lf",
        "-device",
        "qemu-xhci,id=x",
        "-device",
        "usb-tablet,id=tab",
        "-netdev",
        "user,id=n",
        "-device",
        "virtio-net-pci,netdev=n,id=jn",
    ];
    Arguments::parse(&words).unwrap()
}

fn device(path: &str, kind: &str, address: i64) -> Device {
    Device {
        path: path.to_owned(),
        kind: kind.to_owned(),
        is_hot: false,
        bus: Some("pci.0".to_owned()),
        address: Some(address),
        mac: None,
        properties: Map::new(),
    }
}

fn now() -> Now {
    let mut answers: BTreeMap<String, Value> = serde_json::from_str(ANSWERS).unwrap();
    let mut answer = |command: &str| answers.remove(command).unwrap();
    let nodes = Nodes::parse(
        answer("query-named-block-nodes"),
        answer("x-debug-query-block-graph"),
    )
    .unwrap();
    let mut hot = device("/machine/peripheral/hb", "virtio-blk-pci", 48);
    hot.is_hot = true;
    hot.properties = json!({"addr": 48, "vectors": 2, "drive": "late", "serial": "abc", "romfile": ""})
        .as_object()
        .unwrap()
        .clone();
    let usb = |name: &str| Device {
        bus: Some("x.0".to_owned()),
        address: None,
        ..device(&format!("{NAMED}/{name}"), "usb-tablet", 0)
    };
    Now {
        nodes,
        backends: serde_json::from_value(answer("query-block")).unwrap(),
        devices: vec![
            device("/machine/peripheral/x", "qemu-xhci", 24),
            hot,
            usb("tab"),
            Device {
                mac: Some("52:54:00:12:34:56".to_owned()),
                ..device("/machine/peripheral/jn", "virtio-net-pci", 40)
            },
            device("/machine/peripheral-anon/device[0]", "virtio-blk-pci", 16),
            device("/machine/peripheral-anon/device[1]", "virtio-blk-pci", 56),
        ],
        networks: vec![Network {
            name: "n".to_owned(),
            kind: "user".to_owned(),
            about: "net=10.0.2.0,restrict=off".to_owned(),
        }],
        forwards: vec![forwards_of("n")],
        characters: vec!["compat_monitor0".to_owned()],
        objects: vec![("verbatim-ram".to_owned(), "memory-backend-file".to_owned())],
        ports: BTreeMap::from([("tab".to_owned(), "1".to_owned())]),
        exports: Vec::new(),
    }
}

/// A network of QEMU's own without port forwards.
fn forwards_of(network: &str) -> Forwards {
    Forwards {
        network: network.to_owned(),
        ports: Vec::new(),
    }
}

fn words(now: &Now) -> Vec<String> {
    let carried = line().carried(now, "tap0").unwrap();
    carried.arguments.unwrap().line()
}

fn value<'a>(words: &'a [String], has: &str) -> &'a str {
    words
        .iter()
        .find(|word| word.contains(has))
        .unwrap_or_else(|| panic!("no {has} in {words:?}"))
}

fn reasons(now: &Now) -> Vec<String> {
    match line().carried(now, "tap0") {
        Err(Error::Unmovable(reasons)) => reasons,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_snapshot_is_the_disk_and_a_disk_that_was_added_is_there() {
    let words = words(&now());
    let drive = value(&words, "id=disk");
    assert!(
        drive.starts_with("if=none,id=disk,aio=threads,file=json:{"),
        "{drive}"
    );
    assert!(
        drive.contains("/srv/ov.qcow2") && drive.contains("/srv/d.qcow2"),
        "{drive}"
    );
    // Unchanged disks keep their words.
    assert!(words.contains(&"file=/srv/r.img,format=raw,if=virtio".to_owned()));
    assert!(words.contains(&"file=/srv/one.iso,media=cdrom,format=raw".to_owned()));
    assert!(words.contains(&"driver=file,filename=/srv/l.img,node-name=lf".to_owned()));
    let node: Value = serde_json::from_str(value(&words, "\"node-name\":\"late\"")).unwrap();
    assert_eq!(
        (&node["driver"], &node["file"], &node["read-only"]),
        (&json!("raw"), &json!("lf"), &json!(false))
    );
    let disk: Value = serde_json::from_str(value(&words, "\"id\":\"hb\"")).unwrap();
    let expected = json!({
        "driver": "virtio-blk-pci", "id": "hb", "bus": "pci.0", "addr": "06.0", "drive": "late", "serial": "abc", "vectors": 2, "romfile": ""
    });
    assert_eq!(disk, expected);
    let carried = line().carried(&now(), "tap0").unwrap();
    let files: Vec<_> = carried
        .files
        .iter()
        .map(|file| (file.path.to_str().unwrap(), file.read_only))
        .collect();
    let expected = [
        ("/srv/d.qcow2", true),
        ("/srv/l.img", false),
        ("/srv/one.iso", true),
        ("/srv/ov.qcow2", false),
        ("/srv/r.img", false),
    ];
    assert_eq!(files, expected);
}

#[test]
fn where_a_device_is_gone_the_others_keep_their_places() {
    let mut now = now();
    now.devices.retain(|device| !device.path.ends_with("/tab"));
    let line = words(&now);
    assert!(!line.iter().any(|word| word.contains("usb-tablet")), "{line:?}");
    assert!(line.contains(&"qemu-xhci,id=x,addr=03.0".to_owned()), "{line:?}");
    assert!(
        line.contains(&"virtio-net-pci,netdev=n,id=jn,addr=05.0,mac=52:54:00:12:34:56".to_owned()),
        "{line:?}"
    );
    assert!(
        line.contains(&"virtio-blk-pci,drive=virtio0,addr=07.0".to_owned()),
        "{line:?}"
    );
    assert!(value(&line, "id=virtio0").contains("if=none"), "{line:?}");
}

#[test]
fn a_medium_that_was_taken_out_stays_out() {
    let mut now = now();
    let cd = now
        .backends
        .iter_mut()
        .find(|backend| backend.device == "ide0-cd0")
        .unwrap();
    cd.inserted = None;
    assert!(words(&now).contains(&"media=cdrom".to_owned()));
}

#[test]
fn what_cannot_be_carried_over_is_named() {
    let mut with = now();
    with.devices.retain(|device| !device.path.ends_with("/x"));
    assert!(
        reasons(&with)[0].contains("the device x (qemu-xhci) was removed"),
        "{:?}",
        reasons(&with)
    );
    let mut with = now();
    with.devices.push(Device {
        is_hot: true,
        ..device("/machine/peripheral/cpu1", "qemu64-x86_64-cpu", 0)
    });
    assert!(reasons(&with)[0].contains("the device cpu1 (qemu64-x86_64-cpu) was added"));
    let mut with = now();
    with.networks.push(Network {
        name: "more".to_owned(),
        kind: "socket".to_owned(),
        about: "socket: connect to 10.0.0.1:5".to_owned(),
    });
    assert!(reasons(&with)[0].contains("the network more (socket) was added"));
    let mut with = now();
    with.exports.push("backup".to_owned());
    assert!(reasons(&with)[0].contains("the block export backup"));
    let mut with = now();
    with.objects
        .push(("cert".to_owned(), "tls-creds-x509".to_owned()));
    assert!(reasons(&with)[0].contains("the object cert"));
}

#[test]
fn a_network_that_was_added_is_there_with_the_link_of_the_next_host() {
    let mut now = now();
    for (name, kind, about) in [
        ("u", "user", "net=10.0.2.0,restrict=on"),
        ("t", "tap", "ifname=vnet7,script=no,downscript=no"),
    ] {
        now.networks.push(Network {
            name: name.to_owned(),
            kind: kind.to_owned(),
            about: about.to_owned(),
        });
    }
    now.forwards.push(forwards_of("u"));
    let line = words(&now);
    assert!(line.contains(&"user,id=u,restrict=on".to_owned()), "{line:?}");
    assert!(
        line.contains(&"tap,id=t,ifname=tap0,script=no,downscript=no".to_owned()),
        "{line:?}"
    );
}

#[test]
fn a_domain_is_compared_with_what_libvirt_knows() {
    let mut now = now();
    let mut files: BTreeSet<String> = ["d.qcow2", "l.img", "one.iso", "r.img"]
        .map(|name| format!("/srv/{name}"))
        .into();
    let aliases = BTreeSet::from(["hb".to_owned()]);
    let found = differences(&now, &files, &aliases);
    assert!(
        found.len() == 1 && found[0].contains("/srv/ov.qcow2"),
        "{found:?}"
    );
    files.insert("/srv/ov.qcow2".to_owned());
    assert!(differences(&now, &files, &aliases).is_empty());
    now.exports.push("e".to_owned());
    let found = differences(&now, &files, &BTreeSet::new());
    assert!(
        found.len() == 2 && found[0].contains("the device hb") && found[1].contains("export e"),
        "{found:?}"
    );
}

#[test]
fn a_disk_that_another_process_serves_out_of_the_ram_is_refused() {
    let mut now = now();
    let mut disk = device("/machine/peripheral/shared", "vhost-user-blk-pci", 64);
    disk.is_hot = true;
    now.devices.push(disk);
    let reasons = reasons(&now);
    assert!(
        reasons
            .iter()
            .any(|why| why.contains("the disk shared is attached by vhost-user-blk")),
        "{reasons:?}"
    );
}
