//! Daemons of the release before, which speak version 3: a move to one, and one from it.

mod support;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use support::client::Client;
use support::{Lab, PATIENCE, until};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use verbatim_mirror::decision::{Answer, SessionId, VolumeId};
use verbatim_volume::Hosts;
use verbatim_volume::control::{Order, order_now};
use verbatim_volume::wire::{self, Hello, OLDEST, Purpose, Rings, Tag, ToDestination, ToSource, VERSION};

const MIB: usize = 1 << 20;
const SIZE: usize = 8 * MIB;

/// What the other host's daemon has, and has heard.
#[derive(Default)]
struct Older {
    data: Vec<u8>,
    /// Versions in which it was greeted.
    greetings: Vec<u32>,
    zeros: usize,
    /// By which the chunks of a connection are answered.
    answers: Option<tokio::sync::mpsc::UnboundedSender<ToSource>>,
    has_committed: bool,
    /// It has promised its copy to a session of the agents.
    is_promised: bool,
    /// How often it was asked while that was not decided.
    asked: usize,
    wrong: Option<String>,
}

type Shared = Arc<Mutex<Older>>;

/// Carries it out as a daemon that knows no `Allocate`.
fn put(older: &Shared, message: ToDestination, data: &[u8]) {
    let mut older = older.lock().expect("nobody panics");
    let tag = match message {
        ToDestination::Put { tag, offset } => {
            older.data[offset as usize..][..data.len()].copy_from_slice(data);
            tag
        }
        ToDestination::Zero { tag, offset, length } => {
            older.data[offset as usize..][..length as usize].fill(0);
            older.zeros += 1;
            tag
        }
        ToDestination::Flush { tag } => tag,
        other => {
            older.wrong = Some(format!("version 3 has nothing like {other:?}"));
            return;
        }
    };
    let answers = older.answers.as_ref().expect("it was welcomed");
    // The source may have gone.
    let _ = answers.send(ToSource::Done(tag, 0));
}

async fn take(older: &Shared, mut reader: impl AsyncRead + Unpin) {
    // Until the source has gone.
    while let Ok((message, data)) = wire::receive::<ToDestination>(&mut reader).await {
        put(older, message, &data);
    }
}

async fn serve(older: Shared, mut stream: impl AsyncRead + AsyncWrite + Unpin) -> std::io::Result<()> {
    let (hello, _) = wire::receive::<Hello>(&mut stream).await?;
    older.lock().expect("nobody panics").greetings.push(hello.version);
    if hello.version != 3 {
        // Word by word what that release says.
        let why = format!("this daemon speaks version 3, not {}", hello.version);
        return wire::send(&mut stream, &ToSource::Refused(why)).await;
    }
    match hello.purpose {
        Purpose::WouldTake { .. } => {
            let takes = !older.lock().expect("nobody panics").is_promised;
            let answer = match takes {
                true => ToSource::WouldTake,
                false => ToSource::Refused("db is promised here".into()),
            };
            wire::send(&mut stream, &answer).await
        }
        Purpose::Fill { length, .. } => {
            let (sender, mut answers) = tokio::sync::mpsc::unbounded_channel();
            {
                let mut older = older.lock().expect("nobody panics");
                older.data.resize(length as usize, 0xee);
                older.answers = Some(sender);
            }
            let welcome = ToSource::Welcome {
                incarnation: 7,
                has_old: false,
                rings: Rings::None,
            };
            wire::send(&mut stream, &welcome).await?;
            let (reader, mut writer) = tokio::io::split(stream);
            let answer = async {
                while let Some(answer) = answers.recv().await {
                    if wire::send(&mut writer, &answer).await.is_err() {
                        return;
                    }
                }
            };
            tokio::select! {
                () = take(&older, reader) => {}
                () = answer => {}
            }
            Ok(())
        }
        Purpose::Chunks { .. } => {
            take(&older, stream).await;
            Ok(())
        }
        Purpose::Decide { gives_up } => {
            let answer = {
                let mut older = older.lock().expect("nobody panics");
                older.has_committed |= !gives_up;
                older.asked += usize::from(older.is_promised);
                match (older.has_committed, older.is_promised) {
                    (true, _) => Answer::Committed,
                    // As releases did that did not refuse to answer then.
                    (false, true) => Answer::NotKnown,
                    (false, false) => Answer::NotCommitted,
                }
            };
            wire::send(&mut stream, &ToSource::Answer(answer)).await
        }
        Purpose::Promise { .. } => {
            older.lock().expect("nobody panics").is_promised = true;
            wire::send(&mut stream, &ToSource::Promised).await
        }
        // That release cannot read it.
        Purpose::HasLeft => Ok(()),
    }
}

/// The second host has such a daemon.
fn older_daemon(lab: &Lab, runtime: &tokio::runtime::Runtime) -> Shared {
    let older = Shared::default();
    let hosts = Hosts::load(&lab.path(1, "config")).expect("it can be read");
    let address = lab.peer_address(1);
    let of = older.clone();
    let listener = runtime.block_on(TcpListener::bind(address)).expect("a port");
    runtime.spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.expect("a connection");
            let (hosts, older) = (hosts.clone(), of.clone());
            tokio::spawn(async move {
                // Whoever ends it, ends it.
                if let Ok(stream) = hosts.accept(stream).await {
                    let _ = serve(older, stream).await;
                }
            });
        }
    });
    older
}

#[test]
fn a_daemon_of_the_version_before_that_has_promised_its_copy_confirms_nothing() {
    let mut lab = Lab::without_daemons();
    lab.start(0, None);
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let older = older_daemon(&lab, &runtime);
    lab.volume("db", "1M");
    let name = "db".to_owned();
    let by = 7;
    for order in [
        Order::Follow {
            name: name.clone(),
            to: "b".to_owned(),
            by,
            bytes_per_second: None,
        },
        Order::Mirrored {
            name: name.clone(),
            by,
        },
        Order::Hold { name, by },
    ] {
        order_now(&lab.path(0, "run/volumes.sock"), &order, PATIENCE).expect("it is done");
    }
    lab.order(0, &["resolve", "db", "--keep", "source", "--force"]);
    until("it is asked more than once", || {
        older.lock().expect("nobody panics").asked >= 3
    });
    let moved = lab.try_order(0, &["migrate", "db", "--to", "b"]);
    let said = String::from_utf8_lossy(&moved.stderr).into_owned();
    assert!(said.contains("has not said yet"), "{said}\n{}", lab.logs());
    // Its agent tells it at last.
    {
        let mut older = older.lock().expect("nobody panics");
        (older.has_committed, older.is_promised) = (true, false);
    }
    until("it is told", || {
        let status = lab.status(0, "db").expect("listed");
        status["trouble"]
            .as_str()
            .is_some_and(|trouble| trouble.contains("there are two"))
    });
}

#[test]
fn a_volume_moves_to_a_daemon_that_speaks_the_version_before() {
    assert_eq!(
        (OLDEST, VERSION),
        (3, 4),
        "another test is needed for other versions"
    );
    let mut lab = Lab::without_daemons();
    lab.start(0, None);
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let older = older_daemon(&lab, &runtime);
    // All of it has its place: to a daemon of this release its zeros would go as such that keep it.
    lab.order(0, &["create", "db", "--size", &SIZE.to_string(), "--preallocate"]);
    lab.order(0, &["attach", "db"]);
    let mut client = Client::connect(&lab.socket(0, "db")).expect("it is served");
    client.write(MIB as u64, &[7; MIB], true).expect("written");
    client.zero(5 * MIB as u64, MIB as u32).expect("zeroed");
    client.write(7 * MIB as u64, &[9; 4096], true).expect("written");
    drop(client);
    let output = lab.try_order(0, &["migrate", "db", "--to", "b"]);
    let older = older.lock().expect("nobody panics");
    assert_eq!(older.wrong, None);
    assert!(output.status.success(), "{output:?}\n{}", lab.logs());
    assert!(older.has_committed);
    assert_eq!(lab.role(0, "db"), "moved");
    // It was greeted in the newest version first, and in its own from then on; each move asks anew.
    assert_eq!(older.greetings.first(), Some(&VERSION));
    let later = &older.greetings[1..];
    assert!(
        later.iter().filter(|version| **version == 3).count() >= 3,
        "{later:?}"
    );
    assert!(older.zeros > 0);
    let mut expected = vec![0; SIZE];
    expected[MIB..2 * MIB].fill(7);
    expected[7 * MIB..][..4096].fill(9);
    assert!(older.data == expected, "the older daemon has something else");
}

type Stream = tokio_rustls::client::TlsStream<tokio::net::TcpStream>;

/// Greets the second host in that version.
async fn greet(hosts: &Hosts, port: u16, version: u32, purpose: Purpose) -> Result<Stream, String> {
    let connected = hosts.connect("b", port).await;
    let mut stream = connected.map_err(|error| error.to_string())?;
    let hello = Hello {
        version,
        name: "db".to_owned(),
        id: VolumeId(5),
        session: SessionId(6),
        base: 1,
        purpose,
    };
    let sent = wire::send(&mut stream, &hello).await;
    sent.map_err(|error| error.to_string())?;
    Ok(stream)
}

async fn hear(stream: &mut Stream) -> Result<ToSource, String> {
    let heard = wire::receive::<ToSource>(stream).await;
    heard
        .map(|(message, _)| message)
        .map_err(|error| error.to_string())
}

async fn is_done(stream: &mut Stream, tag: Tag) -> Result<(), String> {
    match hear(stream).await? {
        ToSource::Done(done, 0) if done == tag => Ok(()),
        other => Err(format!("{other:?}")),
    }
}

async fn say(stream: &mut Stream, message: &ToDestination, data: &[u8]) -> Result<(), String> {
    let mut frame = wire::frame(message, data.len());
    frame.extend(data);
    let written = async {
        stream.write_all(&frame).await?;
        stream.flush().await
    };
    written.await.map_err(|error: std::io::Error| error.to_string())
}

/// Fills a volume at that host as a daemon of that version does, and asks it to commit.
async fn fill(hosts: &Hosts, port: u16, version: u32) -> Result<Answer, String> {
    let offer = Purpose::Fill {
        length: SIZE as u64,
        from: "a".to_owned(),
        attached: true,
        rdma: None,
        link: 9,
    };
    let mut stream = greet(hosts, port, version, offer).await?;
    match hear(&mut stream).await? {
        ToSource::Welcome { .. } => {}
        ToSource::Refused(why) => return Err(why),
        other => return Err(format!("{other:?}")),
    }
    let mut beside = greet(hosts, port, version, Purpose::Chunks { link: 9 }).await?;
    let tag = Tag::Chunk(1);
    let put = ToDestination::Put { tag, offset: 0 };
    say(&mut beside, &put, &[7; MIB]).await?;
    is_done(&mut stream, tag).await?;
    let tag = Tag::Chunk(2);
    let zero = ToDestination::Zero {
        tag,
        offset: MIB as u64,
        length: (SIZE - MIB) as u64,
    };
    say(&mut beside, &zero, &[]).await?;
    is_done(&mut stream, tag).await?;
    let tag = Tag::Flush(3);
    say(&mut stream, &ToDestination::Flush { tag }, &[]).await?;
    is_done(&mut stream, tag).await?;
    let decide = Purpose::Decide { gives_up: false };
    let mut asking = greet(hosts, port, version, decide).await?;
    match hear(&mut asking).await? {
        ToSource::Answer(answer) => Ok(answer),
        other => Err(format!("{other:?}")),
    }
}

#[test]
fn a_daemon_of_the_version_before_is_taken_and_of_any_other_is_told_which_are_spoken() {
    let mut lab = Lab::without_daemons();
    lab.start(1, None);
    let hosts = Hosts::load(&lab.path(0, "config")).expect("it can be read");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let filled = |version| {
        runtime.block_on(async {
            let filling = fill(&hosts, lab.port(), version);
            let filled = tokio::time::timeout(Duration::from_secs(60), filling).await;
            filled.expect("it comes to an end")
        })
    };
    for version in [OLDEST - 1, VERSION + 1] {
        let why = filled(version).expect_err("it is refused");
        assert_eq!(
            why,
            format!("this daemon speaks version {VERSION}, not {version}")
        );
    }
    assert_eq!(lab.role(1, "db"), "none");
    assert_eq!(filled(OLDEST), Ok(Answer::Committed), "{}", lab.logs());
    until("it is served", || lab.socket(1, "db").exists());
    let mut client = Client::connect(&lab.socket(1, "db")).expect("it is served");
    let mut read = vec![0; 2 * MIB];
    client.read(0, &mut read).expect("read");
    assert!(read[..MIB] == [7; MIB] && read[MIB..] == [0; MIB], "it differs");
}
