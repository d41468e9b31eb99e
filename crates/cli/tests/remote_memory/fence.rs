//! What a memory server lets reach a lease that goes to another host: owners that speak its protocol themselves, and do not keep to it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;
use verbatim_far::{Buffer, Connection, Device, Exposed, Options};
use verbatim_swap::wire::{ToOwner, ToServer, Token, VERSION};
use verbatim_volume::Hosts;
use verbatim_volume::wire::{receive, send};

use crate::lab::{Lab, NAMES, signal};

const BYTES: u64 = 64 << 10;
const BY: u64 = 7;

/// Until a WRITE that nobody answers counts as refused, in a test.
const SHORT: Duration = Duration::from_secs(1);
const LONG: Duration = Duration::from_secs(20);

/// One with its own queue pair.
struct Owner {
    stream: TlsStream<TcpStream>,
    connection: Connection,
    buffer: Arc<Buffer>,
    memory: Exposed,
    token: Token,
    _device: Device,
}

/// What a server says to whoever calls it so.
async fn call(
    lab: &Lab,
    host: usize,
    greeting: impl FnOnce(String, verbatim_far::End) -> ToServer,
) -> Result<Owner, ToOwner> {
    let hosts = Hosts::load(&lab.path(host, "config")).expect("they are written");
    let mut stream = hosts.connect("b", lab.port).await.expect("it answers");
    let device = Device::open(&lab.path(host, "run")).expect("there is an RNIC");
    let mut connection = device.connection(Options::default()).expect("made");
    let buffer = connection.locked_buffer(4096).expect("made");
    let greeting = greeting(NAMES[host].to_owned(), connection.end());
    send(&mut stream, &greeting).await.expect("it is heard");
    match receive::<ToOwner>(&mut stream).await.expect("it answers").0 {
        ToOwner::Granted {
            token, end, memory, ..
        } => {
            connection.connect(&end).expect("connected");
            Ok(Owner {
                stream,
                connection,
                buffer,
                memory,
                token,
                _device: device,
            })
        }
        other => Err(other),
    }
}

async fn lease(lab: &Lab, host: usize, resume: Option<Token>) -> Result<Owner, ToOwner> {
    let greeting = |host, end| ToServer::Lease {
        version: VERSION,
        host,
        name: "guest".to_owned(),
        bytes: BYTES,
        end,
        resume,
    };
    call(lab, host, greeting).await
}

async fn adopt(lab: &Lab, host: usize, by: u64) -> Result<Owner, ToOwner> {
    let greeting = |host, end| ToServer::Adopt {
        version: VERSION,
        host,
        name: "guest".to_owned(),
        bytes: BYTES,
        by,
        end,
        resume: None,
    };
    call(lab, host, greeting).await
}

impl Owner {
    /// Writes this everywhere into its first page; whether that is answered within the time.
    fn write(&mut self, byte: u8, limit: Duration) -> bool {
        self.buffer.write(0, &[byte; 4096]).expect("it fits");
        let (near, far) = ((&self.buffer, 0), (&self.memory, 0));
        let Ok(ticket) = self.connection.write(near, far, 4096, None) else {
            return false;
        };
        self.connection.wait(ticket, Some(Instant::now() + limit)).is_ok()
    }

    fn read(&mut self) -> u8 {
        let (near, far) = ((&self.buffer, 0), (&self.memory, 0));
        let ticket = self.connection.read(near, far, 4096, None).expect("posted");
        let end = Some(Instant::now() + LONG);
        self.connection.wait(ticket, end).expect("it is read");
        let mut page = [0; 4096];
        self.buffer.read(0, &mut page).expect("it fits");
        assert!(page.iter().all(|byte| *byte == page[0]), "a torn page");
        page[0]
    }

    async fn say(&mut self, message: ToServer) {
        send(&mut self.stream, &message).await.expect("it is heard");
    }

    async fn hear(&mut self) -> ToOwner {
        receive::<ToOwner>(&mut self.stream).await.expect("it answers").0
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn one_queue_pair_at_a_time_reaches_a_lease_that_moves() {
    let mut lab = Lab::new();
    lab.start_server(1, "4M");
    let mut old = lease(&lab, 0, None).await.expect("there is memory");
    assert!(old.write(1, LONG));
    assert!(matches!(adopt(&lab, 2, BY).await, Err(ToOwner::NotOffered)));

    let to = "c".to_owned();
    old.say(ToServer::Offer { to, by: BY }).await;
    assert!(matches!(old.hear().await, ToOwner::Offered { by: BY }));
    // Neither to another host, nor in another session.
    assert!(matches!(adopt(&lab, 0, BY).await, Err(ToOwner::NotOffered)));
    assert!(matches!(adopt(&lab, 2, BY + 1).await, Err(ToOwner::NotOffered)));

    // Who has adopted it does not reach it before the commit.
    let mut early = adopt(&lab, 2, BY).await.expect("it is offered");
    assert!(!early.write(2, SHORT), "two reach the lease");
    assert_eq!(old.read(), 1);
    drop(early);
    let mut new = adopt(&lab, 2, BY).await.expect("it is offered still");
    new.say(ToServer::TakeOver { by: BY + 1 }).await;
    assert!(matches!(new.hear().await, ToOwner::NotOffered));
    assert!(old.write(3, LONG), "it is the old owner's until the commit");
    let status = lab.ask(1, &["memory", "status", "--json"]);
    assert_eq!(
        (&status["leases"][0]["host"], &status["leases"][0]["moves_to"]),
        (&"a".into(), &"c".into())
    );

    new.say(ToServer::TakeOver { by: BY }).await;
    assert!(matches!(new.hear().await, ToOwner::Taken { by: BY, .. }));
    // The old owner does not know yet, and goes on.
    assert!(!old.write(4, LONG), "a host that was fenced has written");
    assert_eq!(new.read(), 3, "what was written before the commit");
    assert!(new.write(5, LONG));
    assert_eq!(new.read(), 5);
    match old.hear().await {
        ToOwner::Gone { to } => assert_eq!(to, "c"),
        other => panic!("{other:?}"),
    }
    // Nor does it come back.
    match lease(&lab, 0, Some(old.token)).await {
        Err(ToOwner::Gone { to }) => assert_eq!(to, "c"),
        other => panic!("{:?}", other.err()),
    }
    let again = lease(&lab, 2, Some(new.token)).await;
    let mut again = again.expect("it is the new owner's, on a new connection");
    assert_eq!(again.read(), 5);
    let status = lab.ask(1, &["memory", "status", "--json"]);
    assert_eq!(status["leases"].as_array().expect("a list").len(), 1);
    assert_eq!(
        (&status["leases"][0]["host"], &status["leases"][0]["moves_to"]),
        (&"c".into(), &serde_json::Value::Null)
    );
    drop((old, new));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn an_offer_that_is_withdrawn_gives_nothing() {
    let mut lab = Lab::new();
    lab.start_server(1, "4M");
    let mut old = lease(&lab, 0, None).await.expect("there is memory");
    let to = "c".to_owned();
    old.say(ToServer::Offer { to, by: BY }).await;
    assert!(matches!(old.hear().await, ToOwner::Offered { by: BY }));
    let mut new = adopt(&lab, 2, BY).await.expect("it is offered");
    old.say(ToServer::Withdraw { by: BY }).await;
    // Said and heard on one connection: it is withdrawn when this is answered.
    old.say(ToServer::Ping).await;
    assert!(matches!(old.hear().await, ToOwner::Pong));
    new.say(ToServer::TakeOver { by: BY }).await;
    assert!(matches!(new.hear().await, ToOwner::NotOffered));
    assert!(old.write(1, LONG));
    assert_eq!(old.read(), 1);
}

/// Pages may be there alone, which their owner has not fetched yet.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_server_that_is_about_to_end_is_still_reached_by_its_owners() {
    let mut lab = Lab::new();
    lab.start_server(1, "4M");
    let mut old = lease(&lab, 0, None).await.expect("there is memory");
    assert!(old.write(1, LONG));
    let mut server = lab.servers[1].take().expect("it runs");
    signal(&server, Signal::TERM);
    assert!(matches!(old.hear().await, ToOwner::Leaving));
    let token = old.token;
    drop(old);
    let again = lease(&lab, 0, Some(token)).await;
    let mut again = again.unwrap_or_else(|said| panic!("{said:?}"));
    assert_eq!(again.read(), 1);
    assert!(matches!(again.hear().await, ToOwner::Leaving));
    // It has memory for nobody else, nor for other leases.
    for (host, resume) in [(2, None), (0, None), (2, Some(token))] {
        assert!(matches!(
            lease(&lab, host, resume).await,
            Err(ToOwner::Refused(_))
        ));
    }
    again.say(ToServer::Goodbye).await;
    assert!(server.wait().expect("it ends").success());
}

/// The owner's RNIC may have been replaced once more meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_connection_that_cannot_be_made_does_not_end_the_lease() {
    let mut lab = Lab::new();
    lab.start_server(1, "4M");
    let mut old = lease(&lab, 0, None).await.expect("there is memory");
    assert!(old.write(1, LONG));
    let token = old.token;
    drop(old);
    let greeting = |host, end| ToServer::Lease {
        version: VERSION,
        host,
        name: "guest".to_owned(),
        bytes: BYTES,
        end: verbatim_far::End { mtu: 0, ..end },
        resume: Some(token),
    };
    assert!(matches!(call(&lab, 0, greeting).await, Err(ToOwner::Refused(_))));
    let again = lease(&lab, 0, Some(token)).await;
    let mut again = again.unwrap_or_else(|said| panic!("{said:?}"));
    assert_eq!((again.token, again.read()), (token, 1));
}
