//! A volume that a virtual machine has on a socket of its instance. The machine may connect long before the
//! decision which copy serves.

mod support;

use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use support::client::Client;
use support::{Lab, PATIENCE, until};
use verbatim_volume::control::{Order, Outcome, Row, order_now};

const SIZE: u64 = 4 << 20;
const PIECE: usize = 4096;
/// Time for which no answer may come.
const MOMENT: Duration = Duration::from_millis(200);

fn give(lab: &Lab, host: usize, order: &Order) -> Result<Row, String> {
    match order_now(&lab.path(host, "run/volumes.sock"), order, PATIENCE) {
        Ok(Outcome::Volumes(mut rows)) => rows.pop().ok_or_else(|| "no volume".to_owned()),
        Ok(other) => Err(format!("{other:?}")),
        Err(error) => Err(format!("{error:#}")),
    }
}

/// The socket, in a folder of the instance on this host. Its path is longer than a socket's may be.
fn socket(lab: &Lab, host: usize) -> PathBuf {
    let folder = lab.path(host, "disks").join("a-long-name-".repeat(12));
    std::fs::create_dir_all(&folder).expect("a folder");
    folder.join("nbd")
}

fn lend(lab: &Lab, host: usize, holder: &str, by: Option<u64>) -> Result<(), String> {
    lend_for(lab, host, holder, by, false)
}

fn lend_for(lab: &Lab, host: usize, holder: &str, by: Option<u64>, read_only: bool) -> Result<(), String> {
    let order = Order::Attach {
        vhost_user: false,
        name: "db".to_owned(),
        device: false,
        holder: Some(holder.to_owned()),
        by,
        socket: Some(socket(lab, host)),
        read_only,
    };
    let row = give(lab, host, &order)?;
    assert_eq!(row.holder.as_deref(), Some(holder));
    assert_eq!(row.socket, Some(socket(lab, host)));
    Ok(())
}

/// Connects by a short path, as a container does by its bound folder.
fn connect(lab: &Lab, host: usize) -> std::io::Result<Client> {
    let short = lab.path(host, "s");
    let _ = std::fs::remove_file(&short);
    std::os::unix::fs::symlink(socket(lab, host).parent().expect("a folder"), &short)?;
    Client::connect(&short.join("nbd"))
}

fn follow(lab: &Lab, by: u64) {
    let name = "db".to_owned();
    let order = Order::Follow {
        name: name.clone(),
        to: "b".to_owned(),
        by,
        bytes_per_second: None,
    };
    give(lab, 0, &order).expect("it is copied");
    give(lab, 0, &Order::Mirrored { name, by }).expect("it is there");
}

fn hold(lab: &Lab, by: u64) -> Result<Row, String> {
    let name = "db".to_owned();
    give(lab, 0, &Order::Hold { name, by })
}

fn settle(lab: &Lab, host: usize, by: u64, is_committed: bool) {
    let order = Order::Settle {
        name: "db".to_owned(),
        by,
        is_committed,
    };
    give(lab, host, &order).expect("it hears it");
}

/// Asks for the first piece; the result comes through the channel.
fn ask(mut client: Client) -> Receiver<Result<Vec<u8>, ErrorKind>> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let mut data = vec![0; PIECE];
        let read = client.read(0, &mut data).map(|()| data);
        // The receiver may be gone.
        let _ = sender.send(read.map_err(|error| error.kind()));
    });
    receiver
}

fn is_silent(asked: &Receiver<Result<Vec<u8>, ErrorKind>>) {
    assert_eq!(asked.recv_timeout(MOMENT), Err(RecvTimeoutError::Timeout));
}

/// A volume that is made on the first host, lent there, and written to.
fn begun() -> (Lab, Client) {
    let lab = Lab::new();
    lab.order(0, &["create", "db", "--size", &SIZE.to_string()]);
    lend(&lab, 0, "vm", None).expect("it is lent");
    lend(&lab, 0, "vm", None).expect("once more is the same");
    let mut client = connect(&lab, 0).expect("it is there");
    assert_eq!(client.size, SIZE);
    client.write(0, &[7; PIECE], false).expect("written");
    (lab, client)
}

#[test]
fn what_is_lent_is_for_one_and_is_given_back() {
    let (lab, mut client) = begun();
    assert!(lend(&lab, 0, "other", None).is_err());
    for order in [
        &["attach", "db"][..],
        &["detach", "db"],
        &["migrate", "db", "--to", "b"],
        &["delete", "db"],
    ] {
        let refused = lab.try_order(0, order);
        let why = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(
            !refused.status.success() && why.contains("in use by the instance vm"),
            "{order:?}: {why}"
        );
    }
    client
        .write(0, &[8; PIECE], true)
        .expect("it is served all the same");
    let detach = Order::Detach {
        name: "db".to_owned(),
        holder: Some("vm".to_owned()),
    };
    let row = give(&lab, 0, &detach).expect("it is given back");
    assert!(row.holder.is_none() && row.socket.is_none());
    assert!(client.flush().is_err(), "the connection has ended");
    assert!(!socket(&lab, 0).exists());
    lend(&lab, 0, "other", None).expect("the next one has it");
    // Odd sizes are no disks.
    lab.order(0, &["create", "odd", "--size", "1000"]);
    let odd = Order::Attach {
        vhost_user: false,
        name: "odd".to_owned(),
        device: false,
        holder: Some("vm".to_owned()),
        by: None,
        socket: Some(socket(&lab, 0).with_file_name("odd")),
        read_only: false,
    };
    assert!(give(&lab, 0, &odd).unwrap_err().contains("whole sectors"));
}

#[test]
fn who_may_read_only_is_told_so_and_cannot_write_whatever_it_says_also_after_a_restart() {
    let (mut lab, client) = begun();
    assert_eq!(client.flags & 2, 0);
    drop(client);
    let detach = Order::Detach {
        name: "db".to_owned(),
        holder: Some("vm".to_owned()),
    };
    give(&lab, 0, &detach).expect("it is given back");
    lend_for(&lab, 0, "vm", None, true).expect("it is lent");
    for is_started_anew in [false, true] {
        if is_started_anew {
            lab.kill(0);
            lab.start(0, None);
        }
        let mut client = connect(&lab, 0).expect("it is there");
        assert_eq!(client.flags & 2, 2, "NBD_FLAG_READ_ONLY");
        let refused = [
            client.write(0, &[9; PIECE], false),
            client.write(0, &[9; PIECE], true),
            client.trim(0, PIECE as u32),
            client.zero(0, PIECE as u32),
        ];
        for refused in refused {
            assert_eq!(refused.unwrap_err().raw_os_error(), Some(1), "EPERM");
        }
        client.flush().expect("there is nothing to refuse");
        let mut data = vec![0; PIECE];
        client.read(0, &mut data).expect("read");
        assert_eq!(data, [7; PIECE]);
    }
}

#[test]
fn a_daemon_that_comes_after_one_that_was_killed_lends_it_again() {
    let (mut lab, _client) = begun();
    lab.kill(0);
    lab.start(0, None);
    let mut client = connect(&lab, 0).expect("it is there");
    let mut data = vec![0; PIECE];
    client.read(0, &mut data).expect("read");
    assert_eq!(data, [7; PIECE]);
    assert!(lend(&lab, 0, "other", None).is_err(), "it is still somebody's");
    // The instance goes while there is no daemon.
    lab.kill(0);
    std::fs::remove_dir_all(lab.path(0, "disks")).expect("removed");
    lab.start(0, None);
    let status = lab.status(0, "db").expect("it is there");
    assert!(
        status["holder"].is_null() && status["socket"].is_null(),
        "{status}"
    );
    lab.order(0, &["attach", "db"]);
}

#[test]
fn who_connects_before_the_decision_is_served_after_it_and_only_by_the_copy_that_serves() {
    for (by, is_committed, dies) in [
        (1, true, false),
        (2, false, false),
        (3, true, true),
        (4, false, true),
    ] {
        let (mut lab, mut before) = begun();
        assert!(lend(&lab, 1, "vm", Some(by)).is_err(), "there is nothing yet");
        follow(&lab, by);
        assert!(lend(&lab, 1, "vm", None).is_err(), "it does not serve there");
        lend(&lab, 1, "vm", Some(by)).expect("it waits there");
        let early = connect(&lab, 1).expect("it is welcome");
        assert_eq!(early.size, SIZE);
        let mut early = ask(early);
        is_silent(&early);
        before.write(0, &[9; PIECE], false).expect("written on both");
        before.flush().expect("flushed");
        hold(&lab, by).expect("it is held and promised");
        assert_eq!([lab.role(0, "db"), lab.role(1, "db")], ["held", "ready"]);
        let mut waiting = ask(connect(&lab, 0).expect("it is welcome"));
        if dies {
            for host in [0, 1] {
                lab.kill(host);
                lab.start(host, None);
            }
            // The connections have ended, and each client reconnects.
            for (host, asked) in [(0, &mut waiting), (1, &mut early)] {
                assert!(asked.recv_timeout(PATIENCE).expect("it ends").is_err());
                *asked = ask(connect(&lab, host).expect("it is welcome"));
            }
        }
        for asked in [&early, &waiting] {
            is_silent(asked);
        }
        let other = by + 100;
        for host in [0, 1] {
            settle(&lab, host, other, true);
        }
        for asked in [&early, &waiting] {
            is_silent(asked);
        }
        // The later host twice: an agent that was killed does not know that its order was carried out.
        for host in [0, 1, 1] {
            settle(&lab, host, by, is_committed);
        }
        let (served, refused) = match is_committed {
            true => (&early, &waiting),
            false => (&waiting, &early),
        };
        let data = served.recv_timeout(PATIENCE).expect("an answer");
        assert_eq!(data.expect("read"), [9; PIECE], "{by}");
        assert!(refused.recv_timeout(PATIENCE).expect("an end").is_err(), "{by}");
        let serves = usize::from(is_committed);
        let status = |host: usize| lab.status(host, "db").expect("it is there");
        assert_eq!(status(serves)["holder"], "vm");
        assert!(status(1 - serves)["holder"].is_null() && !socket(&lab, 1 - serves).exists());
        let mut after = connect(&lab, serves).expect("it is there");
        after.write(0, &[1; PIECE], true).expect("it is served");
        // A later daemon serves it, too.
        lab.kill(serves);
        lab.start(serves, None);
        let mut after = connect(&lab, serves).expect("it is there");
        let mut data = vec![0; PIECE];
        after.read(0, &mut data).expect("read");
        assert_eq!(data, [1; PIECE]);
    }
}

#[test]
fn who_waits_for_a_session_that_is_over_is_not_served_by_the_next() {
    let (lab, _client) = begun();
    follow(&lab, 1);
    lend(&lab, 1, "vm", Some(1)).expect("it waits there");
    let early = ask(connect(&lab, 1).expect("it is welcome"));
    // The source learns that the session is over, and the destination not yet.
    settle(&lab, 0, 1, false);
    follow(&lab, 2);
    hold(&lab, 2).expect("it is held and promised");
    assert!(early.recv_timeout(PATIENCE).expect("an end").is_err());
    for host in [0, 1] {
        settle(&lab, host, 2, true);
    }
    assert_eq!(lab.role(1, "db"), "serving");
    assert!(lab.status(1, "db").expect("it is there")["holder"].is_null());
    until("a volume that is free", || {
        lab.try_order(1, &["attach", "db"]).status.success()
    });
}

#[test]
fn who_has_it_on_a_socket_connects_anew_when_it_grows_and_hears_its_size_then() {
    let (lab, mut client) = begun();
    lab.order(0, &["resize", "db", "--size", "8M"]);
    until("the end of the connection", || client.flush().is_err());
    let mut client = connect(&lab, 0).expect("it is there");
    assert_eq!(client.size, 8 << 20);
    client
        .write(SIZE, &[5; PIECE], true)
        .expect("there is more of it");
    let mut data = vec![0; PIECE];
    client.read(0, &mut data).expect("read");
    assert_eq!(data, [7; PIECE]);
    // A client that knows the size stays connected.
    lab.order(0, &["resize", "db", "--size", "8M"]);
    client.read(SIZE, &mut data).expect("it is served as before");
    assert_eq!(data, [5; PIECE]);
}
