//! Volumes whose name, data or size have another history than they seem to have.

mod support;

use std::path::Path;

use support::client::Client;
use support::devices::{Loop, can_have_devices};
use support::frozen::Disk;
use support::sockets::is_all_read;
use support::{Lab, PATIENCE, until};
use verbatim_volume::control::{Order, Outcome, Row, order_now};

fn refused(lab: &Lab, host: usize, args: &[&str]) -> String {
    let output = lab.try_order(host, args);
    assert!(
        !output.status.success(),
        "{args:?} is not refused\n{}",
        lab.logs()
    );
    String::from_utf8(output.stderr).expect("text")
}

fn text(path: &Path) -> String {
    path.to_str().expect("text").to_owned()
}

/// A volume with another name's history: the host committed the first `db`, deleted its copy, and has made a second `db` since.
#[test]
fn another_volume_of_the_same_name_does_not_hide_what_was_committed() {
    let mut lab = Lab::without_daemons();
    lab.start(0, Some("Answered"));
    lab.start(1, None);
    lab.start(2, None);
    lab.volume("db", "4M");
    refused(&lab, 0, &["migrate", "db", "--to", "b"]);
    lab.kill(0);
    lab.order(1, &["migrate", "db", "--to", "c"]);
    lab.order(1, &["delete", "db"]);
    lab.order(1, &["create", "db", "--size", "1M"]);
    lab.start(0, None);
    until("the first source hears that it was committed", || {
        let role = lab.role(0, "db");
        assert!(role != "serving", "two copies serve\n{}", lab.logs());
        role == "moved"
    });
    assert_eq!(lab.role(1, "db"), "serving");
    assert_eq!(lab.role(2, "db"), "serving");
}

/// A resize is durable, and a request that hangs keeps clients from hearing of it.
#[test]
fn a_volume_whose_clients_were_not_told_of_its_size_moves_with_all_of_it() {
    let mut lab = Lab::without_daemons();
    let Some(mut disk) = Disk::new(96) else { return };
    let data = disk.file("data");
    let mut content = vec![0; 8 << 20];
    content[6 << 20..].fill(9);
    std::fs::write(&data, &content).expect("written");
    let waits = lab.path(0, "waits");
    let variable = format!("Grown:{}", text(&waits));
    lab.environment = vec![("VERBATIM_VOLUME_WAIT_AT", String::leak(variable))];
    lab.start(0, None);
    lab.start(1, None);
    lab.order(0, &["create", "db", "--size", "4M", "--data", &data, "--adopt"]);
    lab.order(0, &["attach", "db"]);

    let mut resize = lab.command(0, &["resize", "db", "--size", "8M"]);
    let resize = resize
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("it runs");
    until("it has grown durably", || waits.exists());
    disk.hang();
    let socket = lab.socket(0, "db");
    let (sender, connected) = std::sync::mpsc::channel();
    let writer = std::thread::spawn(move || {
        let mut client = Client::connect(&socket).expect("it is served");
        client.wait_for_ever();
        sender.send(()).expect("the test waits");
        client.write(0, &[7; 4096], true)
    });
    connected.recv_timeout(PATIENCE).expect("it is connected");
    until("its request is at the disk", || {
        lab.status(0, "db")
            .is_none_or(|status| status["in_flight"].as_u64() != Some(0))
    });
    // The orders about it wait for the one that has its lock.
    std::thread::sleep(std::time::Duration::from_millis(300));
    std::fs::remove_file(&waits).expect("it was there");
    let ended = resize.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(said.contains("never idle"), "{said}");

    // While it is busy it does not move.
    let said = refused(&lab, 0, &["migrate", "db", "--to", "b"]);
    assert!(said.contains("was resized to 8388608 bytes"), "{said}");
    disk.go_on();
    writer.join().expect("no panic").expect("written");
    lab.order(0, &["migrate", "db", "--to", "b"]);
    content[..4096].fill(7);
    let moved = lab.data(1, "db");
    assert_eq!(moved.len(), content.len());
    assert!(moved == content, "its end is not there\n{}", lab.logs());
}

/// Two orders have the same new file for their data. One gets it, and the other takes nothing away.
#[test]
fn of_two_orders_with_one_file_the_one_that_fails_leaves_it() {
    let lab = Lab::new();
    for round in 0..20 {
        let data = lab.path(0, &format!("shared-{round}"));
        let orders = ["one", "two"].map(|name| {
            let name = format!("{name}-{round}");
            let args = ["create", &name, "--size", "1M", "--data", &text(&data)];
            let mut order = lab.command(0, &args);
            order
                .stderr(std::process::Stdio::null())
                .spawn()
                .expect("it runs")
        });
        let done = orders.map(|mut order| order.wait().expect("it ends").success());
        assert_eq!(done.iter().filter(|done| **done).count(), 1, "{}", lab.logs());
        assert!(data.exists(), "the data of a volume are gone\n{}", lab.logs());
    }
}

/// A client whose write hangs with the disk. The daemon has the write when this returns: a detach waits for it.
fn writer(lab: &Lab, host: usize, volume: &str) -> std::thread::JoinHandle<()> {
    let socket = lab.socket(host, volume);
    let (sender, connected) = std::sync::mpsc::channel();
    let writer = std::thread::spawn(move || {
        let mut client = Client::connect(&socket).expect("it is served");
        client.wait_for_ever();
        client.send_write(0, &[7; 4096], true).expect("sent");
        let connection = client.connection().upgrade().expect("the client has it");
        until("the daemon has read the write", || {
            is_all_read(&connection).expect("a socket")
        });
        sender.send(()).expect("the test waits");
        let _ = client.answer();
    });
    connected
        .recv_timeout(PATIENCE)
        .expect("the server has the write");
    writer
}

/// Another volume's disk hangs while a detach has its lock.
#[test]
fn a_volume_is_made_and_placed_while_the_disk_of_another_hangs() {
    let lab = Lab::new();
    let Some(mut disk) = Disk::new(96) else { return };
    lab.order(
        0,
        &["create", "slow", "--size", "16M", "--data", &disk.file("slow")],
    );
    lab.order(0, &["attach", "slow"]);
    disk.hang();
    let writer = writer(&lab, 0, "slow");
    let mut detach = lab.command(0, &["detach", "slow"]);
    let mut detach = detach
        .stderr(std::process::Stdio::null())
        .spawn()
        .expect("it runs");
    until("a detach has its lock", || lab.role(0, "slow") != "serving");
    let made = lab.path(0, "made");
    let is_made = lab.ends_in_time(0, &["create", "made", "--size", "1M", "--data", &text(&made)]);
    let placed = lab.path(0, "placed");
    let is_placed = lab.ends_in_time(0, &["place", "comes", "--data", &text(&placed)]);
    let said = refused(&lab, 0, &["place", "other", "--data", &text(&made)]);
    let slow = refused(&lab, 0, &["place", "other", "--data", &disk.file("slow")]);
    disk.go_on();
    detach.wait().expect("it ends");
    writer.join().expect("no panic");
    assert!(
        is_made && is_placed,
        "another volume's disk is waited for\n{}",
        lab.logs()
    );
    assert!(said.contains("is the place of the volume made"), "{said}");
    assert!(slow.contains("is the place of the volume slow"), "{slow}");
}

/// Another host asks for a volume whose disk hangs, while a detach has its lock.
#[test]
fn a_question_about_a_volume_whose_disk_hangs_ends() {
    let lab = Lab::new();
    let Some(mut disk) = Disk::new(96) else { return };
    lab.order(1, &["create", "db", "--size", "16M", "--data", &disk.file("db")]);
    lab.order(1, &["attach", "db"]);
    lab.order(0, &["create", "db", "--size", "1M"]);
    disk.hang();
    let writer = writer(&lab, 1, "db");
    let mut detach = lab.command(1, &["detach", "db"]);
    let mut detach = detach
        .stderr(std::process::Stdio::null())
        .spawn()
        .expect("it runs");
    until("a detach has its lock", || lab.role(1, "db") != "serving");
    let check = Order::Check {
        name: "db".to_owned(),
        to: "b".to_owned(),
    };
    let said = order_now(&lab.path(0, "run/volumes.sock"), &check, PATIENCE);
    disk.go_on();
    detach.wait().expect("it ends");
    writer.join().expect("no panic");
    let said = format!("{said:?}");
    assert!(said.contains("something is being done with db here"), "{said}");
}

/// The volume lent to an instance, as a row that says whether it is new; it is taken back.
fn lent(lab: &Lab, host: usize) -> Option<bool> {
    let order = |order: &Order| -> Row {
        match order_now(&lab.path(host, "run/volumes.sock"), order, PATIENCE) {
            Ok(Outcome::Volumes(mut rows)) => rows.pop().expect("a row"),
            other => panic!("{other:?}"),
        }
    };
    let (name, holder) = ("db".to_owned(), Some("vm".to_owned()));
    let row = order(&Order::Attach {
        name: name.clone(),
        device: false,
        vhost_user: false,
        holder: holder.clone(),
        by: None,
        socket: Some(lab.path(host, "lent")),
        read_only: false,
    });
    order(&Order::Detach { name, holder });
    row.fresh
}

/// Raw data, without a signature that anybody would find.
#[test]
fn a_device_with_data_is_no_new_volume_wherever_they_came_from() {
    if !can_have_devices() {
        return;
    }
    let lab = Lab::new();
    let device = |name: &str, content: &[u8]| {
        let path = lab.path(1, name);
        let mut bytes = vec![0; 4 << 20];
        bytes[..content.len()].copy_from_slice(content);
        std::fs::write(&path, bytes).expect("written");
        Loop::over(&path)
    };
    let comes = device("comes", &[]);
    let raw = lab.path(0, "raw");
    let mut content = vec![0; 4 << 20];
    content[2 << 20] = 1;
    std::fs::write(&raw, content).expect("written");
    lab.order(
        0,
        &["create", "db", "--size", "4M", "--data", &text(&raw), "--adopt"],
    );
    lab.order(1, &["place", "db", "--data", &comes.device]);
    lab.order(0, &["migrate", "db", "--to", "b"]);
    assert_eq!(lent(&lab, 1), Some(false), "data have come, and it counts as new");
    lab.order(1, &["delete", "db"]);

    let (blank, used) = (device("blank", &[]), device("used", &[7; 512]));
    for (device, is_new) in [(&blank, true), (&used, false)] {
        lab.order(1, &["create", "db", "--size", "4M", "--data", &device.device]);
        assert_eq!(lent(&lab, 1), Some(is_new), "{}", device.device);
        lab.order(1, &["delete", "db"]);
    }
}
