//! A volume as a block device, with a file system that is mounted.

mod support;

use support::Lab;
use support::block::{Mounted, backing, make_file_system, obstacle};

#[test]
fn a_file_system_on_a_volume_is_there_again_and_goes_with_nobody() {
    if let Some(obstacle) = obstacle() {
        eprintln!("skipped: {obstacle}");
        return;
    }
    let mut lab = Lab::new();
    lab.order(0, &["create", "db", "--size", "64M"]);
    let device = lab.order(0, &["attach", "db", "--device"]);
    assert_eq!(
        lab.order(0, &["attach", "db", "--device"]),
        device,
        "it is one device"
    );
    make_file_system(&device);
    let content: Vec<u8> = (0..5_000_000u32).map(|index| (index / 7) as u8).collect();
    {
        let mounted = Mounted::new(&device);
        std::fs::write(mounted.file(), &content).expect("written");
        for order in [["detach", "db"].as_slice(), &["migrate", "db", "--to", "b"]] {
            let refused = lab.try_order(0, order);
            let why = String::from_utf8_lossy(&refused.stderr);
            assert!(
                !refused.status.success() && why.contains("in use as /dev/loop"),
                "{why}"
            );
        }
        assert_eq!(std::fs::read(mounted.file()).expect("read"), content);
    }
    // The volume moves, and the written data are at the other host.
    lab.order(0, &["migrate", "db", "--to", "b"]);
    assert_eq!(backing(&device), None, "the device has gone");
    let device = lab.order(1, &["attach", "db", "--device"]);
    {
        let mounted = Mounted::new(&device);
        assert_eq!(std::fs::read(mounted.file()).expect("read"), content);
    }
    lab.order(1, &["detach", "db"]);
    assert_eq!(backing(&device), None, "the device has gone");

    // A killed daemon leaves the device to the next one.
    let device = lab.order(1, &["attach", "db", "--device"]);
    lab.kill(1);
    lab.start(1, None);
    assert_eq!(lab.order(1, &["attach", "db", "--device"]), device);
    let mounted = Mounted::new(&device);
    assert_eq!(std::fs::read(mounted.file()).expect("read"), content);
}
