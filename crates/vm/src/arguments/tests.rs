//! Tests of command lines.

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
        ("-drive file=fat:rw:/srv,format=raw", "make an image"),
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
