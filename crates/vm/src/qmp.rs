//! QEMU's machine protocol (QMP): commands that are answered, and events.
//!
//! Written here rather than taken from a library: existing ones give the connection up at an unknown event,
//! and newer QEMUs have some; and they read lines of any length.

use std::collections::HashMap;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Interest};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{broadcast, oneshot};

use crate::error::{Error, Result};
use crate::libvirt::Domain;
use crate::limit::in_time;

/// Limit for QEMU to answer a command. It answers from its main loop, which disks and networks can hold up.
const ANSWER: Duration = Duration::from_secs(10);

/// Pause before QEMU is asked again if there are no events. The question itself takes longer.
const AGAIN: Duration = Duration::from_millis(5);

/// The longest line from QEMU: lists of all devices or of all block nodes are the longest.
const LONGEST: u64 = 16 << 20;

/// Most events that wait for a listener; a listener that falls behind asks for the state.
const EVENTS: usize = 256;

/// An event.
#[derive(Debug, Clone, Deserialize)]
pub struct Event {
    /// The name: `STOP`, `MIGRATION`, ...
    #[serde(rename = "event")]
    pub name: String,
    /// The event's data.
    #[serde(default)]
    pub data: Value,
}

/// A message of QEMU after its greeting.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Message {
    Event(Event),
    Failed { error: Refusal, id: Option<u64> },
    Returned { r#return: Value, id: Option<u64> },
}

#[derive(Debug, Deserialize)]
struct Refusal {
    desc: String,
}

type Answer = std::result::Result<Value, String>;

/// Waiters for answers; `None` when no more answers come.
type Waiting = Mutex<Option<HashMap<u64, oneshot::Sender<Answer>>>>;

/// A partner that answers in QMP: QEMU, or libvirt for it.
#[derive(Debug)]
pub struct Qmp {
    way: Way,
    events: broadcast::Sender<Event>,
    /// Limit for an answer to a command.
    limit: Duration,
}

/// The way to QEMU.
#[derive(Debug)]
enum Way {
    Socket(Connection),
    Libvirt(Domain),
}

/// A connection to a QMP socket.
#[derive(Debug)]
struct Connection {
    writer: tokio::sync::Mutex<OwnedWriteHalf>,
    waiting: Arc<Waiting>,
    next: AtomicU64,
    reader: tokio::task::JoinHandle<()>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

impl Qmp {
    /// Connects to a socket on which QEMU listens.
    pub async fn connect(path: &Path) -> Result<Self> {
        let stream = UnixStream::connect(path).await;
        Self::of(stream.map_err(Error::io(format!("connect to {}", path.display())))?).await
    }

    /// A client on an existing connection.
    pub async fn of(stream: UnixStream) -> Result<Self> {
        let (reader, writer) = stream.into_split();
        let mut lines = Lines(BufReader::new(reader));
        in_time("greeted", ANSWER, greeted(&mut lines)).await?;
        let (events, _) = broadcast::channel(EVENTS);
        let waiting = Arc::new(Mutex::new(Some(HashMap::new())));
        let reader = tokio::spawn(read(lines, waiting.clone(), events.clone()));
        let qmp = Self {
            way: Way::Socket(Connection {
                writer: tokio::sync::Mutex::new(writer),
                waiting,
                next: AtomicU64::new(1),
                reader,
            }),
            events,
            limit: ANSWER,
        };
        qmp.run("qmp_capabilities", json!({})).await?;
        Ok(qmp)
    }

    /// A client through libvirt, which uses its domain's QMP socket exclusively.
    pub fn through(domain: Domain) -> Self {
        let (events, _) = broadcast::channel(EVENTS);
        Self {
            way: Way::Libvirt(domain),
            events,
            limit: ANSWER,
        }
    }

    /// Events from now on. libvirt passes none on: [`Qmp::may_differ`] needs none.
    pub fn events(&self) -> broadcast::Receiver<Event> {
        self.events.subscribe()
    }

    /// The libvirt domain, if QEMU is reached through it.
    pub fn domain(&self) -> Option<&Domain> {
        match &self.way {
            Way::Socket(_) => None,
            Way::Libvirt(domain) => Some(domain),
        }
    }

    /// Waits until another question may have another answer. `events` must have been subscribed to before the
    /// last question.
    ///
    /// libvirt passes events on only to clients that have registered by a connection of their own, and does
    /// not tell from when on. An event at that time could be missed, so the question is repeated instead.
    pub(crate) async fn may_differ(&self, events: &mut broadcast::Receiver<Event>) -> Result<()> {
        match &self.way {
            Way::Libvirt(_) => tokio::time::sleep(AGAIN).await,
            // An event only means that another question is worthwhile.
            Way::Socket(_) => match events.recv().await {
                Ok(_) | Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return Err(Error::Gone),
            },
        }
        Ok(())
    }

    /// Lets the guest run.
    pub(crate) async fn go_on(&self) -> Result<()> {
        match &self.way {
            Way::Socket(_) => self.run("cont", json!({})).await,
            Way::Libvirt(domain) => domain.resume().await,
        }
    }

    /// Makes QEMU carry out a command without a result.
    pub async fn run(&self, command: &'static str, arguments: Value) -> Result<()> {
        self.ask::<Value>(command, arguments).await.map(drop)
    }

    /// Gives QEMU a descriptor, which its commands then know by this name.
    pub async fn give(&self, name: &str, descriptor: OwnedFd) -> Result<()> {
        let arguments = json!({"fdname": name});
        self.send::<Value>("getfd", arguments, Some(descriptor))
            .await
            .map(drop)
    }

    /// Asks QEMU a question.
    pub async fn ask<T: DeserializeOwned>(&self, command: &'static str, arguments: Value) -> Result<T> {
        self.send(command, arguments, None).await
    }

    async fn send<T: DeserializeOwned>(
        &self,
        command: &'static str,
        arguments: Value,
        descriptor: Option<OwnedFd>,
    ) -> Result<T> {
        let answer = match &self.way {
            Way::Socket(connection) => connection.ask(command, arguments, descriptor, self.limit).await?,
            Way::Libvirt(domain) => domain.qmp(command, arguments, descriptor).await?,
        };
        let returned = answer.map_err(|description| Error::Refused { command, description })?;
        serde_json::from_value(returned)
            .map_err(|error| Error::Malformed(format!("the answer to `{command}`: {error}")))
    }
}

/// Reads QEMU's greeting. Events come before it where they were for the client before, which has gone.
async fn greeted(lines: &mut Lines) -> Result<()> {
    for _ in 0..EVENTS {
        let line = lines.next().await?;
        if line.get("QMP").is_some() {
            return Ok(());
        }
        if line.get("event").is_none() {
            return Err(Error::Malformed(line.to_string()));
        }
    }
    Err(Error::Malformed("events, and no greeting".to_owned()))
}

impl Connection {
    async fn ask(
        &self,
        command: &'static str,
        arguments: Value,
        descriptor: Option<OwnedFd>,
        limit: Duration,
    ) -> Result<Answer> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = oneshot::channel();
        match &mut *self.waiting.lock().expect("no panic under this lock") {
            Some(waiting) => waiting.insert(id, sender),
            None => return Err(Error::Gone),
        };
        let mut line = json!({"execute": command, "arguments": arguments, "id": id}).to_string();
        line.push('\n');
        let asked = async {
            let mut writer = self.writer.lock().await;
            let mut bytes = line.as_bytes();
            if let Some(descriptor) = descriptor {
                bytes = &bytes[send_with(&writer, bytes, descriptor.as_fd()).await?..];
            }
            writer.write_all(bytes).await.map_err(|_| Error::Gone)?;
            drop(writer);
            receiver.await.map_err(|_| Error::Gone)
        };
        let answer = in_time(&format!("answered `{command}`"), limit, asked).await;
        if answer.is_err()
            && let Some(waiting) = &mut *self.waiting.lock().expect("no panic under this lock")
        {
            waiting.remove(&id);
        }
        answer
    }
}

/// Sends the beginning of a command with a descriptor, and returns the number of bytes sent.
async fn send_with(writer: &OwnedWriteHalf, bytes: &[u8], descriptor: BorrowedFd<'_>) -> Result<usize> {
    let socket: &UnixStream = writer.as_ref();
    let sent = socket.async_io(Interest::WRITABLE, || {
        let descriptors = [descriptor];
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut with = SendAncillaryBuffer::new(&mut space);
        with.push(SendAncillaryMessage::ScmRights(&descriptors));
        Ok(sendmsg(
            socket,
            &[IoSlice::new(bytes)],
            &mut with,
            SendFlags::NOSIGNAL,
        )?)
    });
    sent.await.map_err(|_| Error::Gone)
}

/// Lines of JSON.
struct Lines(BufReader<OwnedReadHalf>);

impl Lines {
    async fn next(&mut self) -> Result<Value> {
        let mut line = Vec::new();
        let read = (&mut self.0).take(LONGEST).read_until(b'\n', &mut line).await;
        match read {
            Ok(0) => Err(Error::Gone),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Err(Error::Gone),
            Err(error) => Err(Error::io("read from QEMU")(error)),
            Ok(_) => serde_json::from_slice(&line).map_err(|error| Error::Malformed(error.to_string())),
        }
    }
}

/// Passes answers and events to their waiters, until there are no more.
async fn read(mut lines: Lines, waiting: Arc<Waiting>, events: broadcast::Sender<Event>) {
    let ended = loop {
        let message = match lines.next().await {
            Ok(message) => message,
            Err(error) => break error,
        };
        let (id, answer) = match serde_json::from_value(message) {
            Ok(Message::Event(event)) => {
                // There may be no listener.
                let (Ok(_) | Err(_)) = events.send(event);
                continue;
            }
            Ok(Message::Failed { error, id }) => (id, Err(error.desc)),
            Ok(Message::Returned { r#return, id }) => (id, Ok(r#return)),
            Err(error) => break Error::Malformed(error.to_string()),
        };
        let mut waiting = waiting.lock().expect("no panic under this lock");
        let waiter = id.and_then(|id| waiting.as_mut()?.remove(&id));
        if let Some(waiter) = waiter {
            // The waiter may have given up.
            let (Ok(()) | Err(_)) = waiter.send(answer);
        }
    };
    if !matches!(ended, Error::Gone) {
        tracing::warn!("the connection to QEMU is given up: {ended}");
    }
    waiting.lock().expect("no panic under this lock").take();
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The other end, after its greeting and the first command.
    async fn pair() -> (Qmp, BufReader<UnixStream>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut theirs = BufReader::new(theirs);
        let connected = tokio::spawn(Qmp::of(ours));
        // Of the client before.
        say(&mut theirs, r#"{"event": "BLOCK_JOB_COMPLETED", "data": {}}"#).await;
        say(
            &mut theirs,
            r#"{"QMP": {"version": {}, "capabilities": ["oob"]}}"#,
        )
        .await;
        assert_eq!(command(&mut theirs).await["execute"], "qmp_capabilities");
        say(&mut theirs, r#"{"return": {}, "id": 1}"#).await;
        (connected.await.unwrap().unwrap(), theirs)
    }

    async fn say(theirs: &mut BufReader<UnixStream>, line: &str) {
        theirs.write_all(line.as_bytes()).await.unwrap();
        theirs.write_all(b"\r\n").await.unwrap();
    }

    async fn command(theirs: &mut BufReader<UnixStream>) -> Value {
        let mut line = String::new();
        theirs.read_line(&mut line).await.unwrap();
        serde_json::from_str(&line).unwrap()
    }

    #[tokio::test]
    async fn answers_find_their_commands_and_events_their_listeners() {
        let (qmp, mut theirs) = pair().await;
        let mut events = qmp.events();
        let asked = async {
            let both = tokio::join!(
                qmp.ask::<u32>("first", json!({})),
                qmp.ask::<u32>("second", json!({})),
            );
            (both.0.unwrap(), both.1.unwrap())
        };
        let answered = async {
            let ids =
                [command(&mut theirs).await, command(&mut theirs).await].map(|asked| asked["id"].clone());
            say(
                &mut theirs,
                r#"{"event": "OF_A_LATER_QEMU", "data": {"x": [1]}, "timestamp": {}}"#,
            )
            .await;
            say(&mut theirs, &format!(r#"{{"return": 2, "id": {}}}"#, ids[1])).await;
            say(&mut theirs, &format!(r#"{{"return": 1, "id": {}}}"#, ids[0])).await;
            theirs
        };
        let (answers, mut theirs) = tokio::join!(asked, answered);
        assert_eq!(answers, (1, 2));
        assert_eq!(events.recv().await.unwrap().name, "OF_A_LATER_QEMU");
        let refused = async {
            let asked = command(&mut theirs).await;
            let line = format!(
                r#"{{"error": {{"class": "GenericError", "desc": "no"}}, "id": {}}}"#,
                asked["id"]
            );
            say(&mut theirs, &line).await;
            theirs
        };
        let (answer, theirs) = tokio::join!(qmp.run("third", json!({})), refused);
        assert!(
            matches!(answer, Err(Error::Refused { command: "third", description }) if description == "no")
        );
        drop(theirs);
        assert!(matches!(qmp.run("fourth", json!({})).await, Err(Error::Gone)));
        assert!(matches!(qmp.run("fifth", json!({})).await, Err(Error::Gone)));
    }

    #[tokio::test]
    async fn what_is_no_qmp_is_an_error() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut theirs = BufReader::new(theirs);
        say(&mut theirs, r#"{"hello": 1}"#).await;
        assert!(matches!(Qmp::of(ours).await, Err(Error::Malformed(_))));
        let (qmp, mut theirs) = pair().await;
        let (answer, ()) = tokio::join!(qmp.run("any", json!({})), say(&mut theirs, "nonsense"));
        assert!(matches!(answer, Err(Error::Gone)));
    }

    #[tokio::test]
    async fn a_silent_one_is_not_waited_for() {
        let (mut qmp, _theirs) = pair().await;
        assert_eq!(qmp.limit, ANSWER);
        qmp.limit = Duration::from_millis(20);
        let answer = qmp.run("any", json!({})).await;
        assert!(
            matches!(&answer, Err(Error::Silent { limit, .. }) if *limit == qmp.limit),
            "{answer:?}"
        );
    }
}
