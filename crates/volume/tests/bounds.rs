//! Limits: the share of a daemon that one disk, client, host, or caller on the network can take, and the rest
//! for others.

mod support;

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::process::{Resource, Signal, getrlimit, setrlimit};
use support::client::Client;
use support::frozen::Disk;
use support::{Lab, NAMES, PATIENCE, find, tls, until};
use verbatim_certificates::Authority;
use verbatim_mirror::decision::{SessionId, VolumeId};
use verbatim_volume::Hosts;
use verbatim_volume::control::{Order, order_now};
use verbatim_volume::wire::{self, Hello, Purpose, ToSource, VERSION};

/// Runs `what` on a thread, and returns whether it ended in time.
fn ends(what: impl FnOnce() + Send + 'static) -> bool {
    let (sender, ended) = channel();
    std::thread::spawn(move || {
        what();
        // The receiver may be gone.
        let _ = sender.send(());
    });
    ended.recv_timeout(PATIENCE).is_ok()
}

/// Clients that write durably, one request each; all are connected when this returns.
fn writers(socket: &Path, number: u64) -> Vec<JoinHandle<()>> {
    let (connected, all) = channel();
    let write = |index: u64| {
        let (socket, connected) = (socket.to_owned(), connected.clone());
        std::thread::spawn(move || {
            let mut client = Client::connect(&socket).expect("it is served");
            client.wait_for_ever();
            connected.send(()).expect("the test waits");
            // The write fails if the volume is detached before it began.
            let _ = client.write(index * 4096, &[index as u8; 4096], true);
        })
    };
    let writers = (0..number).map(write).collect();
    for _ in 0..number {
        all.recv_timeout(PATIENCE).expect("it is connected");
    }
    writers
}

#[test]
fn a_disk_that_hangs_is_the_trouble_of_its_own_volume_alone() {
    let lab = Lab::new();
    let Some(mut disk) = Disk::new(96) else { return };
    lab.order(
        0,
        &["create", "slow", "--size", "16M", "--data", &disk.file("slow")],
    );
    lab.order(0, &["attach", "slow"]);
    lab.volume("fine", "16M");
    lab.order(0, &["create", "third", "--size", "1M"]);
    // The place for the data of another volume.
    lab.order(1, &["place", "comes", "--data", &disk.file("comes")]);
    lab.volume("comes", "16M");
    let mut filled = Client::connect(&lab.socket(0, "comes")).expect("it is served");
    filled.write(0, &[5; 1 << 20], true).expect("written");
    let mut comes = lab
        .command(0, &["migrate", "comes", "--to", "b", "--max-bandwidth", "1"])
        .spawn()
        .expect("it runs");
    until("it is copied", || {
        lab.status(0, "comes")
            .is_some_and(|status| status["migration"]["copied_bytes"].as_u64() > Some(0))
    });
    disk.hang();
    let stuck = writers(&lab.socket(0, "slow"), 48);
    // Most of them are in flight by then; otherwise the test is less strict.
    std::thread::sleep(Duration::from_millis(300));
    // An order that holds the volume's lock while it waits.
    let mut detach = lab.command(0, &["detach", "slow"]).spawn().expect("it runs");

    let socket = lab.socket(0, "fine");
    let is_written = ends(move || {
        let mut client = Client::connect(&socket).expect("it is served");
        for piece in 0..64 {
            client.write(piece * 4096, &[7; 4096], true).expect("written");
            client.flush().expect("flushed");
        }
    });
    let (address, config) = (lab.nbd_address(0), lab.path(1, "config/tls"));
    let is_found = ends(move || {
        let mut stream = tls::connect(&address, NAMES[0], &config).expect("it is let in");
        stream.write_all(&tls::option(3, &[])).expect("asked");
        loop {
            let (kind, data) = tls::reply(&mut stream).expect("answered");
            assert_ne!(kind, 1, "all were listed, and fine was not among them");
            if data.ends_with(b"fine") {
                break;
            }
        }
    });
    let attach = lab.ends_in_time(0, &["attach", "third"]);
    let migrate = lab.ends_in_time(0, &["migrate", "fine", "--to", "b"]);
    disk.go_on();
    for writer in stuck {
        writer.join().expect("it does not panic");
    }
    assert!(comes.wait().expect("it ends").success(), "{}", lab.logs());
    detach.wait().expect("it ends");
    assert!(is_written, "the disk of another volume is waited for");
    assert!(is_found, "the lock of another volume is waited for");
    assert!(attach && migrate, "an order about another volume waits");
    assert_eq!(lab.role(1, "fine"), "serving");
    assert_eq!(lab.role(1, "comes"), "serving");
}

#[test]
fn a_disk_that_hangs_at_the_start_holds_up_its_own_volume_alone() {
    let mut lab = Lab::new();
    let Some(mut disk) = Disk::new(96) else { return };
    let data = disk.file("first");
    // The volume that hangs is the first by its name, and is opened first.
    lab.order(0, &["create", "first", "--size", "16M", "--data", &data]);
    lab.order(0, &["attach", "first"]);
    lab.volume("second", "16M");
    let mut client = Client::connect(&lab.socket(0, "first")).expect("it is served");
    client.write(0, &[5; 4096], true).expect("written");
    lab.kill(0);
    // A file that is made private again when it is opened, which writes to its disk.
    std::fs::set_permissions(&data, std::fs::Permissions::from_mode(0o644)).expect("changed");
    disk.hang();
    let started = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| lab.start(0, None)));
    let is_served = started.is_ok() && {
        let socket = lab.socket(0, "second");
        ends(move || {
            let mut client = Client::connect(&socket).expect("it is served");
            client.write(0, &[7; 4096], true).expect("written");
        })
    };
    let role = |lab: &Lab, name: &str| {
        let listed = lab.order(0, &["list", "--json"]);
        let rows: serde_json::Value = serde_json::from_str(&listed).expect("JSON");
        let rows = rows.as_array().expect("a list").clone();
        let row = rows.into_iter().find(|row| row["name"] == name);
        row.map(|row| row["role"].as_str().expect("text").to_owned())
    };
    let roles = is_served.then(|| [role(&lab, "first"), role(&lab, "second")]);
    let is_moved = is_served && lab.ends_in_time(0, &["migrate", "second", "--to", "b"]);
    disk.go_on();
    let roles = roles.expect("the daemon waits for the disk of another volume");
    assert_eq!(
        roles.map(|role| role.expect("listed")),
        ["busy", "serving"],
        "{}",
        lab.logs()
    );
    assert!(is_moved, "an order about another volume waits");
    until("it is served when its disk answers", || {
        Client::connect(&lab.socket(0, "first")).is_ok()
    });
    let mut read = [0; 4096];
    let mut client = Client::connect(&lab.socket(0, "first")).expect("it is served");
    client.read(0, &mut read).expect("read");
    assert_eq!(read, [5; 4096]);
    assert_eq!(role(&lab, "first").as_deref(), Some("serving"));
    lab.kill(0);
}

/// Lets this process have this many files open, if it may.
fn may_have_open(files: u64) -> bool {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).expect("it may be raised");
    let is_enough = limit.maximum.is_none_or(|maximum| maximum >= files);
    if !is_enough {
        eprintln!("skipped: no {files} open files");
    }
    is_enough
}

/// Silent callers: as many as can connect, up to `number`.
fn silent(address: &str, number: usize) -> Vec<TcpStream> {
    let address: SocketAddr = address.parse().expect("an address");
    let connect = |_| TcpStream::connect_timeout(&address, Duration::from_secs(5));
    (0..number).map_while(|index| connect(index).ok()).collect()
}

#[test]
fn silent_callers_without_a_certificate_leave_all_others_served() {
    if !may_have_open(4096) {
        return;
    }
    let mut lab = Lab::without_daemons();
    lab.files = Some(1024);
    lab.start(0, None);
    lab.start(1, None);
    lab.volume("db", "1M");
    lab.order(1, &["create", "other", "--size", "1M"]);
    let mut flood = silent(&lab.nbd_address(0), 1_100);
    flood.extend(silent(&lab.peer_address(0), 400));
    assert!(lab.open_files(0) < 900, "{} open files", lab.open_files(0));
    let socket = lab.socket(0, "db");
    assert!(
        ends(move || {
            let mut client = Client::connect(&socket).expect("it is served");
            client.write(0, &[7; 4096], true).expect("written");
        }),
        "{}",
        lab.logs()
    );
    lab.order(0, &["create", "two", "--size", "1M"]);
    lab.order(0, &["attach", "two"]);
    // Hosts and clients that prove themselves come through, at both hosts.
    lab.order(1, &["migrate", "other", "--to", "a"]);
    let (address, config) = (lab.nbd_address(0), lab.path(1, "config/tls"));
    assert!(ends(move || {
        let mut stream = tls::connect(&address, NAMES[0], &config).expect("it is let in");
        stream.write_all(&tls::option(3, &[])).expect("asked");
        tls::reply(&mut stream).expect("answered");
    }));
    // The refusal is logged once for each port, and once a minute.
    let said = lab.logs().matches("many callers do not say who they are").count();
    assert!((2..10).contains(&said), "{said} times\n{}", lab.logs());
    drop(flood);
}

#[test]
fn who_says_nothing_is_cut_off_and_one_that_has_very_many_connections_gets_no_more() {
    let lab = Lab::new();
    lab.volume("db", "1M");
    lab.volume("other", "1M");
    let mut connected = Vec::new();
    for _ in 0..200 {
        connected.push(UnixStream::connect(lab.socket(0, "db")).expect("it listens"));
    }
    // Connections that were not taken end at once, and the others in time.
    let mut client = Client::connect(&lab.socket(0, "other")).expect("others are served");
    client.flush().expect("flushed");
    for mut one in connected {
        one.set_read_timeout(Some(PATIENCE)).expect("a socket");
        let mut said = Vec::new();
        match one.read_to_end(&mut said) {
            Ok(_) => assert!(said.is_empty() || said.len() == 18, "a greeting and no more"),
            // It was closed with an unread message, or was never accepted.
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
        }
    }
    assert!(
        lab.logs().contains("connections of db: there are 128 already"),
        "{}",
        lab.logs()
    );
    let mut client = Client::connect(&lab.socket(0, "db")).expect("there is room again");
    client.flush().expect("flushed");
    // The same for a command.
    let mut command = UnixStream::connect(lab.path(0, "run/volumes.sock")).expect("it listens");
    command.set_read_timeout(Some(PATIENCE)).expect("a socket");
    assert_eq!(command.read(&mut [0]).expect("its end"), 0);
}

#[test]
fn tls_after_tls_is_refused_as_the_protocol_says() {
    let lab = Lab::new();
    lab.volume("db", "1M");
    let config = lab.path(1, "config/tls");
    let mut stream = tls::connect(&lab.nbd_address(0), NAMES[0], &config).expect("it is let in");
    stream.write_all(&tls::option(5, &[])).expect("asked");
    let (kind, _) = tls::reply(&mut stream).expect("answered");
    assert_eq!(kind, 0x8000_0003, "NBD_REP_ERR_INVALID");
    // The negotiation goes on.
    stream.write_all(&tls::option(3, &[])).expect("asked");
    assert_eq!(tls::reply(&mut stream).expect("answered").0, 2, "NBD_REP_SERVER");
}

/// Offers this host a volume in the name of `from`; returns the answer.
fn fill(hosts: &Hosts, to: &str, port: u16, from: &str) -> Result<ToSource, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let connected = hosts.connect(to, port).await;
        let mut stream = connected.map_err(|error| error.to_string())?;
        let hello = Hello {
            version: VERSION,
            name: "forged".to_owned(),
            id: VolumeId(1),
            session: SessionId(1),
            base: 1 << 62,
            purpose: Purpose::Fill {
                length: 4096,
                from: from.to_owned(),
                attached: false,
                rdma: None,
                link: 1,
            },
        };
        wire::send(&mut stream, &hello)
            .await
            .map_err(|error| error.to_string())?;
        let answer = wire::receive::<ToSource>(&mut stream).await;
        answer
            .map(|(answer, _)| answer)
            .map_err(|error| error.to_string())
    })
}

#[test]
fn a_client_is_no_host_and_no_host_is_another_one() {
    let lab = Lab::new();
    lab.volume("db", "1M");
    let refused = |answer: Result<ToSource, String>, word: &str| match answer {
        Ok(ToSource::Refused(why)) => assert!(why.contains(word), "{why}"),
        other => panic!("{other:?}"),
    };
    // A client's certificate is of the same authority.
    let client = lab.path(0, "client");
    let identity = lab.authority.issue_client("laptop").expect("a certificate");
    std::fs::create_dir_all(client.join("tls")).expect("a folder");
    for (name, text) in [
        ("tls/ca.pem", lab.authority.certificate()),
        ("tls/cert.pem", identity.certificate.as_str()),
        ("tls/key.pem", identity.key.as_str()),
    ] {
        std::fs::write(client.join(name), text).expect("written");
    }
    std::fs::copy(lab.path(0, "config/hosts.json"), client.join("hosts.json")).expect("copied");
    let laptop = Hosts::load(&client).expect("it can be read");
    for from in ["a", "laptop"] {
        refused(fill(&laptop, "b", lab.port(), from), "that of no host");
    }
    let host = Hosts::load(&lab.path(0, "config")).expect("it can be read");
    refused(fill(&host, "b", lab.port(), "b"), "and not that of b");
    assert!(matches!(
        fill(&host, "b", lab.port(), "a"),
        Ok(ToSource::Welcome { .. })
    ));
    // The certificate is still a client's; one of another authority is not.
    let mut stream = tls::connect(&lab.nbd_address(0), NAMES[0], &client.join("tls")).expect("it is let in");
    stream.write_all(&tls::option(3, &[])).expect("asked");
    let (kind, name) = tls::reply(&mut stream).expect("answered");
    assert_eq!((kind, &name[4..]), (2, b"db".as_slice()));
    let other = Authority::new("other").expect("an authority");
    let identity = other.issue_client("laptop").expect("a certificate");
    std::fs::write(client.join("tls/cert.pem"), &identity.certificate).expect("written");
    std::fs::write(client.join("tls/key.pem"), &identity.key).expect("written");
    let let_in = tls::connect(&lab.nbd_address(0), NAMES[0], &client.join("tls")).and_then(|mut stream| {
        stream.write_all(&tls::option(3, &[]))?;
        tls::reply(&mut stream)
    });
    assert!(let_in.is_err(), "a certificate of another authority");
}

#[test]
fn the_list_of_hosts_is_read_again_and_no_connection_ends_with_that() {
    let lab = Lab::new();
    lab.volume("db", "1M");
    let mut client = Client::connect(&lab.socket(0, "db")).expect("it is served");
    let list = lab.path(0, "config/hosts.json");
    let both = std::fs::read_to_string(&list).expect("it is there");
    let mut one: serde_json::Value = serde_json::from_str(&both).expect("a list");
    one.as_array_mut().expect("a list").truncate(1);
    let fails_for = |word: &str| {
        let output = lab.try_order(0, &["migrate", "db", "--to", "b"]);
        !output.status.success() && String::from_utf8_lossy(&output.stderr).contains(word)
    };
    std::fs::write(&list, one.to_string()).expect("written");
    until("it is read by itself", || {
        lab.logs().contains("the list of hosts was read again: a\n")
    });
    assert!(fails_for("there is no host b"));
    std::fs::write(&list, "[ broken").expect("written");
    lab.signal(0, Signal::HUP);
    until("it is said that it is broken", || {
        lab.logs().contains("cannot be read again, and stays as it was")
    });
    assert!(fails_for("there is no host b"), "it stays as it was");
    std::fs::write(&list, &both).expect("written");
    lab.signal(0, Signal::HUP);
    until("it moves to the host that was added", || {
        lab.try_order(0, &["migrate", "db", "--to", "b"]).status.success()
    });
    // The client's connection ends with the move, and not before.
    assert!(lab.logs().matches("the list of hosts was read again").count() >= 2);
    assert!(client.flush().is_err());
}

#[test]
fn a_connection_stays_while_the_list_of_hosts_changes() {
    let lab = Lab::new();
    lab.volume("db", "1M");
    let mut client = Client::connect(&lab.socket(0, "db")).expect("it is served");
    client.write(0, &[3; 4096], true).expect("written");
    for round in 1..=3 {
        lab.signal(0, Signal::HUP);
        until("it is read again", || {
            lab.logs().matches("the list of hosts was read again").count() >= round
        });
        client.flush().expect("it is the same connection");
    }
}

#[test]
fn a_copy_that_comes_no_further_says_so() {
    let lab = Lab::new();
    lab.volume("db", "16M");
    let mut client = Client::connect(&lab.socket(0, "db")).expect("it is served");
    client.write(0, &vec![9; 8 << 20], true).expect("written");
    let mut moving = lab.command(0, &["migrate", "db", "--to", "b", "--max-bandwidth", "1"]);
    let mut moving = moving
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("it runs");
    until("it is copied", || {
        lab.status(0, "db")
            .is_some_and(|status| status["migration"]["copied_bytes"].as_u64() > Some(0))
    });
    lab.signal(1, Signal::STOP);
    until("it is said", || {
        lab.status(0, "db").is_some_and(|status| {
            let stalled = status["stalled"].as_str().unwrap_or_default();
            stalled.contains("the destination does not answer")
        })
    });
    until("it is in the log", || {
        lab.logs().contains("the copy has come no further")
    });
    let (line, said) = channel();
    let errors = moving.stderr.take().expect("a pipe");
    std::thread::spawn(move || {
        for one in BufReader::new(errors).lines().map_while(Result::ok) {
            // The test may have read enough.
            let _ = line.send(one);
        }
    });
    let said = said.recv_timeout(PATIENCE).expect("the command says it");
    assert!(
        said.contains("come no further") && said.contains("cancel db"),
        "{said}"
    );
    lab.signal(1, Signal::CONT);
    until("it goes on", || {
        lab.status(0, "db")
            .is_none_or(|status| status["stalled"].is_null())
    });
    assert!(moving.wait().expect("it ends").success());
}

/// A loop device, which is detached on drop.
struct Loop(String);

impl Drop for Loop {
    fn drop(&mut self) {
        let detached = Command::new("losetup").args(["-d", &self.0]).status();
        // The device may be gone.
        let _ = detached;
    }
}

#[test]
fn a_device_on_which_another_one_lies_is_neither_detached_nor_moved() {
    let is_possible = rustix::process::geteuid().is_root()
        && Path::new("/dev/fuse").exists()
        && Path::new("/dev/loop-control").exists()
        && find("losetup").is_some();
    if !is_possible {
        eprintln!("skipped: not root, no FUSE, or no loop devices");
        return;
    }
    let lab = Lab::new();
    lab.order(0, &["create", "db", "--size", "16M"]);
    let device = lab.order(0, &["attach", "db", "--device"]);
    let made = Command::new("losetup").args(["-f", "--show", &device]).output();
    let made = made.expect("it runs");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let upon = Loop(String::from_utf8(made.stdout).expect("text").trim().to_owned());
    for order in [["detach", "db"].as_slice(), &["migrate", "db", "--to", "b"]] {
        let refused = lab.try_order(0, order);
        let why = String::from_utf8_lossy(&refused.stderr);
        assert!(
            !refused.status.success() && why.contains(&format!("on which {} is", upon.0)),
            "{why}"
        );
    }
    drop(upon);
    until("it is free", || {
        lab.try_order(0, &["detach", "db"]).status.success()
    });
}

#[test]
fn an_instance_that_may_read_only_cannot_write_whatever_it_does() {
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
        eprintln!("skipped: not root, or no FUSE");
        return;
    }
    let lab = Lab::new();
    lab.order(0, &["create", "db", "--size", "16M"]);
    let lend = |read_only| {
        let order = Order::Attach {
            name: "db".to_owned(),
            device: true,
            vhost_user: false,
            holder: Some("web".to_owned()),
            by: None,
            socket: None,
            read_only,
        };
        order_now(&lab.path(0, "run/volumes.sock"), &order, PATIENCE).expect("it is lent");
        let status = lab.status(0, "db").expect("it is there");
        status["device"].as_str().expect("a device").to_owned()
    };
    let write = |device: &str| {
        let file = std::fs::File::options().write(true).open(device)?;
        (&file).write_all(&[7; 4096])?;
        file.sync_all()
    };
    write(&lend(false)).expect("it is written");
    let device = lend(true);
    let name = device.strip_prefix("/dev/").expect("a device");
    let is_read_only = std::fs::read_to_string(format!("/sys/block/{name}/ro")).expect("it is one");
    assert_eq!(is_read_only.trim(), "1");
    assert!(write(&device).is_err());
    let mut data = [0; 4096];
    std::fs::File::open(&device)
        .and_then(|mut file| file.read_exact(&mut data))
        .expect("it is read");
    assert_eq!(data, [7; 4096]);
    write(&lend(false)).expect("it is written again");
}
