//! A program that takes all it can get keeps nobody else from being served.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32};

use verbatim_channel::{OLDEST, VERSION};

use super::*;

mod answers;

/// How long an answer may take on a busy machine.
const LIMIT: Duration = Duration::from_secs(30);

/// Answers at once.
#[derive(Default)]
struct Answers(AtomicU32, AtomicBool);

impl Resolver for Answers {
    async fn resolve(&self, endpoint: Endpoint, _: Option<&str>) -> Resolved {
        let key = KeyPair {
            virtual_key: 1,
            physical_key: 2,
            any_tag: false,
        };
        let keys = vec![key];
        Resolved { endpoint, keys }
    }

    async fn may_know(&self, _: &Process, _: Endpoint) -> bool {
        self.1.load(Ordering::Relaxed)
    }

    async fn publish(&self, _: [u8; 16], _: u32, _: Vec<KeyPair>, _: Option<u32>) -> Option<u32> {
        Some(self.0.fetch_add(1, Ordering::Relaxed))
    }

    fn ways(&self, _: [u8; 16]) -> Vec<MovedEndpoint> {
        Vec::new()
    }
}

struct Site {
    folder: tempfile::TempDir,
    guests: Guests,
    resolver: Arc<Answers>,
}

impl Site {
    fn new() -> Self {
        // Both ends of the connections are this process's.
        crate::run::raise_descriptor_limit();
        Self {
            folder: tempfile::tempdir().unwrap(),
            guests: Guests::default(),
            resolver: Arc::default(),
        }
    }

    /// The socket of an instance.
    fn instance(&self, name: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        let listener = Listener::bind(&path).unwrap();
        self.guests
            .serve(listener, Some(name.to_owned()), Arc::clone(&self.resolver))
            .unwrap();
        path
    }
}

/// Asks as a program does; an error if the agent closes the connection unheard.
async fn ask<T: serde::de::DeserializeOwned>(
    path: &std::path::Path,
    greeting: &Greeting,
) -> anyhow::Result<T> {
    let socket = Channel::new(Socket::connect(path)?)?;
    socket.send(greeting, &[]).await?;
    Ok(tokio::time::timeout(LIMIT, socket.recv(1 << 20)).await??.0)
}

fn resolve() -> Greeting {
    resolve_as(VERSION)
}

fn resolve_as(version: u32) -> Greeting {
    Greeting::Resolve {
        version,
        endpoint: Endpoint { gid: [1; 16], qpn: 7 },
    }
}

fn publish() -> Greeting {
    Greeting::Publish {
        version: VERSION,
        gid: [1; 16],
        qpn: 7,
        keys: Vec::new(),
        datagram: None,
    }
}

/// Connects until the agent closes what comes, and says how many connections stay.
fn connect_without_end(path: &std::path::Path) -> Vec<Socket> {
    let mut kept = Vec::new();
    for _ in 0..quotas::CONNECTIONS * 3 {
        // The listener's queue is full for moments: waiting for room is what a program does, too.
        kept.push(Socket::connect(path).unwrap());
    }
    kept
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_without_end_are_their_instance_s_affair() {
    let site = Site::new();
    let (hostile, other) = (site.instance("hostile"), site.instance("other"));
    let path = hostile.clone();
    let flood = tokio::task::spawn_blocking(move || connect_without_end(&path));
    for _ in 0..100 {
        let found: Resolved = ask(&other, &resolve()).await.unwrap();
        assert_eq!(found.endpoint.qpn, 7);
    }
    let kept = flood.await.unwrap();
    {
        let tallies = site.guests.tallies.lock().unwrap();
        let tally = &tallies[&Tenant::Instance("hostile".to_owned())];
        assert!(tally.connections <= quotas::CONNECTIONS, "{}", tally.connections);
    }
    ask::<Resolved>(&hostile, &resolve())
        .await
        .expect_err("it has as many as it gets");
    let _: Resolved = ask(&other, &resolve()).await.unwrap();
    // Whoever closes them is served again.
    drop(kept);
    let served = async {
        while ask::<Resolved>(&hostile, &resolve()).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(LIMIT, served).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn numbers_without_end_are_their_instance_s_affair() {
    let site = Site::new();
    let (hostile, other) = (site.instance("hostile"), site.instance("other"));
    let mut given = 0;
    while ask::<Option<u32>>(&hostile, &publish()).await.unwrap().is_some() {
        given += 1;
    }
    assert_eq!(given, quotas::PUBLISHED);
    assert!(ask::<Option<u32>>(&other, &publish()).await.unwrap().is_some());
}

#[tokio::test]
async fn who_says_nothing_keeps_no_place() {
    let mut site = Site::new();
    site.guests.greeting_time = Duration::from_millis(50);
    let path = site.instance("silent");
    let socket = Channel::new(Socket::connect(&path).unwrap()).unwrap();
    let closed = tokio::time::timeout(LIMIT, socket.recv::<Resolved>(1 << 20)).await;
    let closed = closed.unwrap().unwrap_err();
    assert!(
        matches!(closed.downcast_ref(), Some(SocketError::Closed)),
        "{closed:#}"
    );
    let tallies = site.guests.tallies.lock().unwrap();
    assert!(tallies.is_empty(), "{tallies:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_greeting_that_is_too_long_is_not_read() {
    let site = Site::new();
    let path = site.instance("a");
    let keys = quotas::GREETING_BYTES as usize / size_of::<KeyPair>() * 8;
    let key = KeyPair {
        virtual_key: 1 << 30,
        physical_key: 1 << 30,
        any_tag: false,
    };
    let greeting = Greeting::Publish {
        version: VERSION,
        gid: [1; 16],
        qpn: 7,
        keys: vec![key; keys],
        datagram: None,
    };
    ask::<Option<u32>>(&path, &greeting)
        .await
        .expect_err("it is too long");
    assert!(ask::<Option<u32>>(&path, &publish()).await.unwrap().is_some());
}

/// Greets as the helper thread of this process would, with a library of this version.
async fn greet(path: &std::path::Path, version: u32) -> Channel {
    let socket = Channel::new(Socket::connect(path).unwrap()).unwrap();
    let greeting = Greeting::Process {
        version,
        pid: std::process::id(),
        program: "web".to_owned(),
        generation: 0,
        quiesced: false,
    };
    socket.send(&greeting, &[]).await.unwrap();
    socket
}

#[tokio::test(flavor = "multi_thread")]
async fn libraries_of_all_versions_in_the_range_are_served() {
    let mut site = Site::new();
    site.guests.versions = Versions::new(VERSION - 1, VERSION + 1);
    let path = site.instance("a");
    for version in [VERSION - 1, VERSION, VERSION + 1] {
        let found: Resolved = ask(&path, &resolve_as(version)).await.unwrap();
        assert_eq!(found.endpoint.qpn, 7);
        let socket = greet(&path, version).await;
        let present = site.guests.present(Some("a"), std::process::id());
        let guest = tokio::time::timeout(LIMIT, present).await.unwrap();
        assert_eq!(guest.version, version, "that is spoken with it from now on");
        assert!(site.guests.refused("a").is_empty());
        drop(socket);
        tokio::time::timeout(LIMIT, site.guests.gone(&guest))
            .await
            .unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_library_outside_of_the_range_is_refused_at_once_and_named() {
    let site = Site::new();
    let path = site.instance("a");
    let remedies = [
        (OLDEST - 1, "end the instance and start it again"),
        (VERSION + 1, "upgrade this host's agent"),
    ];
    for (version, remedy) in remedies {
        ask::<Resolved>(&path, &resolve_as(version))
            .await
            .expect_err("it is closed");
        let socket = greet(&path, version).await;
        let closed = tokio::time::timeout(LIMIT, socket.recv::<Order>(1 << 20)).await;
        closed.unwrap().expect_err("it is closed");
        let refused = site.guests.refused("a").join("; ");
        for word in [
            "web",
            &format!("version {version}"),
            &format!("versions {OLDEST} to {VERSION}"),
            remedy,
        ] {
            assert!(refused.contains(word), "{refused}");
        }
        assert!(site.guests.of_instance("a").is_empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_library_that_was_refused_in_a_newer_version_is_served_in_an_older_one_at_once() {
    let site = Site::new();
    let path = site.instance("a");
    let refused = greet(&path, VERSION + 1).await;
    let closed = tokio::time::timeout(LIMIT, refused.recv::<Order>(1 << 20)).await;
    closed.unwrap().expect_err("it is closed");
    assert!(!site.guests.refused("a").is_empty());
    let _socket = greet(&path, VERSION).await;
    let present = site.guests.present(Some("a"), std::process::id());
    tokio::time::timeout(LIMIT, present).await.unwrap();
    assert_eq!(site.guests.refused("a"), Vec::<String>::new());
}
