//! QEMU's present state goes along, and not that of its start.

use std::path::PathBuf;

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use tempfile::TempDir;
use verbatim_vm::{Carried, Error};

use crate::end::{End, consecutive};
use crate::move_it;

/// Name of a tap link that may exist.
const LINK: &str = "tap0";

/// Images of 32 MiB; the guest writes to the first one.
struct Images(TempDir);

impl Images {
    fn new(names: &[&str]) -> anyhow::Result<Self> {
        let images = Self(TempDir::new_in("/var/tmp")?);
        for name in names {
            std::fs::File::create(images.0.path().join(name))?.set_len(32 << 20)?;
        }
        Ok(images)
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }
}

async fn carried(end: &End) -> anyhow::Result<Carried> {
    Ok(end.machine.carried(Some(end.arguments()), LINK).await?)
}

async fn ask(end: &End, command: &'static str, arguments: Value) -> anyhow::Result<Value> {
    Ok(end.machine.qmp().ask(command, arguments).await?)
}

async fn job_is(end: &End, is: impl Fn(&[Value]) -> bool) -> anyhow::Result<()> {
    loop {
        let jobs = ask(end, "query-block-jobs", json!({})).await?;
        if is(jobs.as_array().context("no list")?) {
            return Ok(());
        }
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

/// Without a change the next QEMU gets exactly the arguments of the present one.
pub async fn as_started() -> anyhow::Result<()> {
    let images = Images::new(&["a", "b", "c,d"])?;
    let (a, b, c) = (
        images.path("a"),
        images.path("b"),
        images.path("c,d").replace(',', ",,"),
    );
    let bios = images.path("bios");
    std::fs::File::create(&bios)?.set_len(1 << 20)?;
    let lines: &[&[&str]] = &[
        &["-nodefaults", "-hda", &a, "-cdrom", &b],
        &["-M", "q35", "-hda", &a, "-cdrom", &b],
        &["-fda", &a, "-drive", &format!("file={bios},format=raw,if=pflash")],
        &[
            "-drive",
            &format!("file={c},format=raw,if=virtio,throttling.bps-total=1000000"),
            "-drive",
            "if=none,id=empty",
        ],
        &[
            "-drive",
            &format!("file={a},format=raw,if=none,id=x,copy-on-read=on"),
            "-device",
            "ide-hd,drive=x",
        ],
        &["-drive", &format!("file=blkdebug::{a},format=raw,if=virtio")],
        &[
            "-drive",
            &format!("driver=raw,file.driver=file,file.filename={a},offset=0,size=65536,if=virtio"),
        ],
        &[
            "-drive",
            "file=null-co://,format=raw,if=none,id=n",
            "-device",
            "virtio-blk,drive=n",
        ],
        &[
            "-drive",
            &format!(
                "if=virtio,file=json:{{\"driver\":\"raw\",,\"file\":{{\"driver\":\"file\",,\"filename\":\"{a}\"}}}}"
            ),
        ],
        &[
            "-drive",
            &format!(
                "if=virtio,driver=quorum,vote-threshold=2,children.0.driver=raw,children.0.file.filename={a},children.1.driver=raw,\
                 children.1.file.filename={b}"
            ),
        ],
        &[
            "-blockdev",
            &format!("driver=file,filename={a},node-name=f,aio=threads"),
            "-blockdev",
            "driver=raw,file=f,node-name=r",
            "-object",
            "throttle-group,id=g",
            "-blockdev",
            "driver=throttle,throttle-group=g,file=r,node-name=t",
            "-device",
            "virtio-scsi-pci",
            "-device",
            "scsi-hd,drive=t",
            "-device",
            "scsi-cd",
        ],
        &[
            "-blockdev",
            &format!(
                "{{\"driver\":\"raw\",\"node-name\":\"r\",\"read-only\":true,\"file\":{{\"driver\":\"file\",\"filename\":\"{b}\"}}}}"
            ),
            "-object",
            "iothread,id=io",
            "-device",
            "{\"driver\":\"virtio-blk-pci\",\"drive\":\"r\",\"iothread\":\"io\",\"id\":\"d\"}",
        ],
        &[
            "-nodefaults",
            "-netdev",
            "user,id=n",
            "-device",
            "e1000,netdev=n",
            "-nic",
            "user,model=virtio",
            "-usb",
            "-device",
            "usb-tablet",
            "-chardev",
            "null,id=ch",
            "-device",
            "virtio-serial-pci",
            "-device",
            "virtserialport,chardev=ch",
            "-object",
            "rng-builtin,id=rng",
            "-device",
            "virtio-rng-pci,rng=rng",
            "-device",
            "virtio-balloon-pci",
            "-vga",
            "std",
            "-smp",
            "2",
        ],
        &[
            "-virtfs",
            &format!(
                "local,path={},mount_tag=t,security_model=none",
                images.0.path().display()
            ),
            "-device",
            "virtio-gpu-pci",
        ],
    ];
    for line in lines {
        let end = End::stopped(&[&["-accel", "tcg", "-m", "16"], *line].concat())
            .await
            .with_context(|| line.join(" "))?;
        let carried = carried(&end).await.with_context(|| line.join(" "))?;
        let arguments = carried.arguments.as_ref().context("it has a command line")?;
        ensure!(
            arguments == end.arguments(),
            "{:?}\nbecame\n{:?}",
            end.arguments().line(),
            arguments.line()
        );
    }
    Ok(())
}

/// Changed disks, media, devices and networks: the next QEMU has them, takes the guest, and has the same
/// state then.
pub async fn changed() -> anyhow::Result<()> {
    let images = Images::new(&["one", "two", "three", "four", "cd1", "cd2"])?;
    let drive = |file: &str, more: &str| format!("file={},format=raw,{more}", images.path(file));
    let more = [
        "-device",
        "qemu-xhci,id=usb",
        "-device",
        "usb-tablet,id=tablet",
        "-device",
        "usb-kbd,id=keys",
        "-drive",
        &drive("one", "if=none,id=one"),
        "-device",
        "virtio-blk-pci,drive=one",
        "-drive",
        &drive("two", "if=virtio"),
        "-blockdev",
        &format!(
            "driver=file,filename={},node-name=three-file,aio=threads",
            images.path("three")
        ),
        "-blockdev",
        "driver=raw,file=three-file,node-name=three",
        "-device",
        "virtio-blk-pci,drive=three,id=disk3",
        "-drive",
        &drive("cd1", "media=cdrom,id=cd"),
        "-cdrom",
        &images.path("cd1"),
        "-netdev",
        "user,id=net",
        "-device",
        "virtio-net-pci,netdev=net,id=card",
    ];
    let from = End::run(&more).await?;
    for name in ["one-a", "one-b"] {
        let snapshot = json!({"device": "one", "snapshot-file": images.path(name), "format": "qcow2"});
        ask(&from, "blockdev-snapshot-sync", snapshot).await?;
    }
    let snapshot = json!({"node-name": "three", "snapshot-node-name": "three-now", "snapshot-file": images.path("three-a"), "format": "qcow2"});
    ask(&from, "blockdev-snapshot-sync", snapshot).await?;
    let mirror =
        json!({"device": "virtio0", "target": images.path("two-b"), "format": "raw", "sync": "full"});
    ask(&from, "drive-mirror", mirror).await?;
    job_is(&from, |jobs| jobs.iter().any(|job| job["ready"] == true)).await?;
    ask(&from, "block-job-complete", json!({"device": "virtio0"})).await?;
    job_is(&from, <[_]>::is_empty).await?;
    let change = json!({"device": "cd", "filename": images.path("cd2"), "format": "raw"});
    ask(&from, "blockdev-change-medium", change).await?;
    ask(&from, "eject", json!({"device": "ide1-cd0", "force": true})).await?;
    ask(&from, "device_del", json!({"id": "tablet"})).await?;
    let file = json!({"driver": "raw", "node-name": "late", "file": {"driver": "file", "filename": images.path("four")}});
    ask(&from, "blockdev-add", file).await?;
    ask(
        &from,
        "device_add",
        json!({"driver": "virtio-blk-pci", "drive": "late", "id": "disk4", "serial": "abc"}),
    )
    .await?;
    ask(&from, "netdev_add", json!({"type": "user", "id": "net2"})).await?;
    ask(
        &from,
        "device_add",
        json!({"driver": "virtio-net-pci", "netdev": "net2", "id": "card2"}),
    )
    .await?;
    ask(&from, "device_add", json!({"driver": "usb-mouse", "id": "mouse"})).await?;

    let now = carried(&from).await?;
    let arguments = now.arguments.clone().context("it has a command line")?;
    let names =
        |carried: &Carried| -> Vec<PathBuf> { carried.files.iter().map(|file| file.path.clone()).collect() };
    let expected = [
        "cd2", "four", "one", "one-a", "one-b", "three", "three-a", "two-b",
    ]
    .map(|name| PathBuf::from(images.path(name)));
    ensure!(names(&now) == expected, "{:?}", now.files);
    let to = End::arriving_as(&arguments)
        .await
        .with_context(|| arguments.line().join(" "))?;
    move_it(&from, &to)
        .await
        .with_context(|| arguments.line().join(" "))?;
    let then = carried(&to).await?;
    ensure!(names(&then) == expected, "{:?}", then.files);
    ensure!(
        then.arguments.as_ref() == Some(&arguments),
        "{:?}\nbecame\n{:?}",
        arguments.line(),
        then.arguments.map(|arguments| arguments.line())
    );
    to.machine.has_still(&then).await?;
    let devices = ask(&to, "qom-list", json!({"path": "/machine/peripheral"}))
        .await?
        .to_string();
    ensure!(
        !devices.contains("tablet") && devices.contains("mouse"),
        "{devices}"
    );
    let snapshot = json!({"device": "one", "snapshot-file": images.path("one-c"), "format": "qcow2"});
    ask(&to, "blockdev-snapshot-sync", snapshot).await?;
    ensure!(
        to.machine.has_still(&then).await.is_err(),
        "a snapshot is not seen"
    );
    consecutive(&[&from, &to])?;
    Ok(())
}

/// The port forwards of each of QEMU's own networks, in a fixed order and without their descriptors.
async fn forwards(end: &End) -> anyhow::Result<Vec<String>> {
    let listed = ask(
        end,
        "human-monitor-command",
        json!({"command-line": "info usernet"}),
    )
    .await?;
    let listed = listed.as_str().context("no text")?;
    let mut network = "";
    let mut forwards = Vec::new();
    for line in listed.lines() {
        match line.starts_with("Hub") {
            true => network = line,
            false if line.contains("HOST_FORWARD") => {
                let mut fields: Vec<_> = line.split_whitespace().collect();
                fields.remove(1);
                forwards.push(format!("{network} {}", fields.join(" ")));
            }
            false => {}
        }
    }
    forwards.sort();
    Ok(forwards)
}

/// Port forwards that were added and removed in a monitor, of networks of the command line and of others.
pub async fn forwarded() -> anyhow::Result<()> {
    let more = [
        "-netdev",
        "user,id=net,hostfwd=tcp::2001-:7,hostfwd=udp::2002-:8",
        "-device",
        "virtio-net-pci,netdev=net,id=card",
        "-nic",
        "user,model=e1000",
    ];
    let from = End::run_apart(&more).await?;
    let unchanged = carried(&from).await?.arguments;
    ensure!(unchanged.as_ref() == Some(from.arguments()), "{unchanged:?}");
    let line = async |line: &str| -> anyhow::Result<()> {
        let said = ask(&from, "human-monitor-command", json!({"command-line": line})).await?;
        // QEMU confirms a removal alone.
        let said = said.as_str().context("no text")?;
        ensure!(said.is_empty() || said.ends_with("removed\r\n"), "{line}: {said}");
        Ok(())
    };
    line("hostfwd_remove net tcp::2001").await?;
    line("hostfwd_add net tcp:0.0.0.0:2003-10.0.2.99:9").await?;
    // The only network without a name.
    let networks = ask(
        &from,
        "human-monitor-command",
        json!({"command-line": "info usernet"}),
    )
    .await?;
    let networks = networks.as_str().context("no text")?;
    let unnamed = networks
        .split_once("(#")
        .and_then(|(_, rest)| rest.split_once(')'));
    let (unnamed, _) = unnamed.context("no network without a name")?;
    line(&format!("hostfwd_add #{unnamed} udp::2001-:7")).await?;
    let added = json!({"type": "user", "id": "net2", "hostfwd": [{"str": "tcp::2004-:10"}]});
    ask(&from, "netdev_add", added).await?;
    let expected = forwards(&from).await?;
    ensure!(expected.len() == 4, "{expected:?}");

    let arguments = carried(&from).await?.arguments.context("it has a command line")?;
    let to = End::arriving_apart(&arguments)
        .await
        .with_context(|| arguments.line().join(" "))?;
    move_it(&from, &to).await?;
    // The name that QEMU gives a network is another one in each process.
    let number = |forwards: Vec<String>| -> Vec<String> {
        let named = forwards
            .into_iter()
            .map(|forward| match forward.split_once("(#") {
                Some((_, rest)) => format!("(#{}", rest.split_once(')').map_or("", |(_, rest)| rest)),
                None => forward,
            });
        named.collect()
    };
    let (expected, there) = (number(expected), number(forwards(&to).await?));
    ensure!(there == expected, "{there:?} was {expected:?}");
    let then = carried(&to).await?.arguments;
    ensure!(
        then.as_ref() == Some(&arguments),
        "{:?}\nbecame\n{:?}",
        arguments.line(),
        then.map(|arguments| arguments.line())
    );
    consecutive(&[&from, &to])?;
    Ok(())
}

/// Every other difference is refused by its name.
pub async fn named() -> anyhow::Result<()> {
    let images = Images::new(&["one", "two"])?;
    let drive = format!("file={},format=raw,if=none,id=one", images.path("one"));
    let more = [
        "-drive",
        &drive,
        "-device",
        "virtio-blk-pci,drive=one",
        "-netdev",
        "user,id=a",
        "-netdev",
        "user,id=b",
    ];
    let end = End::run(&more).await?;
    let refused = async |why: &str| -> anyhow::Result<()> {
        match end.machine.carried(Some(end.arguments()), LINK).await {
            Err(Error::Unmovable(reasons)) => {
                ensure!(
                    reasons.len() == 1 && reasons[0].contains(why),
                    "{why}: {reasons:?}"
                );
                Ok(())
            }
            other => anyhow::bail!("{why}: {other:?}"),
        }
    };
    carried(&end).await?;
    ask(
        &end,
        "object-add",
        json!({"qom-type": "iothread", "id": "thread"}),
    )
    .await?;
    refused("the object thread (iothread)").await?;
    ask(&end, "object-del", json!({"id": "thread"})).await?;
    ask(
        &end,
        "chardev-add",
        json!({"id": "char", "backend": {"type": "null", "data": {}}}),
    )
    .await?;
    refused("the character device char").await?;
    ask(&end, "chardev-remove", json!({"id": "char"})).await?;
    ask(
        &end,
        "netdev_add",
        json!({"type": "hubport", "id": "hub", "hubid": 5}),
    )
    .await?;
    ask(&end, "netdev_del", json!({"id": "hub"})).await?;
    ask(&end, "netdev_del", json!({"id": "a"})).await?;
    refused("the network a was removed").await?;
    ask(&end, "netdev_add", json!({"type": "user", "id": "a"})).await?;
    let limits = json!({"device": "one", "bps": 1000000000, "bps_rd": 0, "bps_wr": 0, "iops": 0, "iops_rd": 0, "iops_wr": 0});
    ask(&end, "block_set_io_throttle", limits).await?;
    refused("the disk one has limits").await?;
    let limits =
        json!({"device": "one", "bps": 0, "bps_rd": 0, "bps_wr": 0, "iops": 0, "iops_rd": 0, "iops_wr": 0});
    ask(&end, "block_set_io_throttle", limits).await?;
    ask(
        &end,
        "block-dirty-bitmap-add",
        json!({"node": "one", "name": "backup"}),
    )
    .await?;
    refused("the dirty bitmap backup").await?;
    ask(
        &end,
        "block-dirty-bitmap-remove",
        json!({"node": "one", "name": "backup"}),
    )
    .await?;
    let node = json!({"driver": "blkdebug", "node-name": "odd", "image": {"driver": "file", "filename": images.path("two")}});
    ask(&end, "blockdev-add", node).await?;
    refused("the block node odd").await?;
    ask(&end, "blockdev-del", json!({"node-name": "odd"})).await?;
    ask(&end, "device_add", json!({"driver": "pci-testdev", "id": "test"})).await?;
    refused("the device test (pci-testdev)").await?;

    // QEMU's usual network, which no word makes.
    let end = End::stopped(&["-accel", "tcg", "-m", "16"]).await?;
    carried(&end).await?;
    let asked = json!({"command-line": "hostfwd_add udp::2001-:7"});
    ask(&end, "human-monitor-command", asked).await?;
    match end.machine.carried(Some(end.arguments()), LINK).await {
        Err(Error::Unmovable(reasons)) => {
            let why = "the port forward udp::2001-10.0.2.15:7 was added";
            ensure!(reasons.len() == 1 && reasons[0].contains(why), "{reasons:?}");
        }
        other => anyhow::bail!("{other:?}"),
    }
    Ok(())
}
