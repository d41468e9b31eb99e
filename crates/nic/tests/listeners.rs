//! The sockets of instances: added, replaced, asked for, removed.

mod support;

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use support::{Program, Server, wait_for};
use verbatim_device::control::{MAX_INSTANCE_NAME, Reply, Request, VERSION};
use verbatim_seqpacket::{Listener, Socket};

struct Agent {
    socket: Socket,
    folder: tempfile::TempDir,
}

impl Agent {
    fn of(server: &Server) -> Self {
        Self {
            socket: Socket::connect(&server.socket()).expect("the RNIC listens"),
            folder: tempfile::tempdir().expect("a folder"),
        }
    }

    fn path(&self, instance: &str) -> PathBuf {
        self.folder.path().join(instance)
    }

    fn call(&self, request: &Request) -> Reply {
        let reply = self.socket.call::<_, Reply>(request, &[]);
        reply.expect("an answer").message
    }

    /// Keeps no copy, as an agent.
    fn add(&self, instance: &str, path: &Path) -> Reply {
        let listener = Listener::bind(path).expect("a listener");
        let instance = instance.to_owned();
        let reply = self
            .socket
            .call::<_, Reply>(&Request::AddListener { instance }, &[listener.as_fd()]);
        reply.expect("an answer").message
    }

    fn remove(&self, instance: &str) {
        let instance = instance.to_owned();
        assert!(matches!(
            self.call(&Request::RemoveListener { instance }),
            Reply::Done
        ));
    }

    fn all(&self) -> Vec<String> {
        let mut all: Vec<String> = Vec::new();
        loop {
            let after = all.last().cloned();
            let Reply::Listeners { instances, more } = self.call(&Request::QueryListeners { after }) else {
                panic!("no listeners")
            };
            all.extend(instances);
            if !more {
                return all;
            }
        }
    }
}

#[test]
fn a_listener_lives_until_it_is_removed_and_its_connections_longer() {
    let server = Server::start([127, 7, 97, 1]);
    let agent = Agent::of(&server);
    let path = agent.path("web");
    assert!(matches!(agent.add("web", &path), Reply::Done));
    let program = Program::connect(&path, "web");
    // It does not need whoever has added it.
    let agent = Agent {
        socket: Socket::connect(&server.socket()).expect("the RNIC listens"),
        ..agent
    };
    assert_eq!(agent.all(), ["web"]);
    Program::connect(&path, "web");
    agent.remove("web");
    agent.remove("web");
    assert!(agent.all().is_empty());
    let refused = Socket::connect(&path).expect_err("nobody listens");
    assert_eq!(refused.errno(), libc::ECONNREFUSED);
    program.call(Request::AllocPd);
}

/// While the RNIC is busy a program connects to the socket that is replaced.
#[test]
fn who_waits_at_a_listener_that_is_replaced_is_served() {
    let server = Server::start([127, 7, 98, 1]);
    let agent = Agent::of(&server);
    let path = agent.path("web");
    let old = Listener::bind(&path).expect("a listener");
    let early = Socket::connect(&path).expect("somebody listens");
    let open = Request::OpenContext {
        version: VERSION,
        name: "early".to_owned(),
    };
    early.send(&open, &[]).expect("there is room");
    let add = || Request::AddListener {
        instance: "web".to_owned(),
    };
    let new = Listener::bind(&path).expect("a listener");
    for listener in [old, new] {
        agent
            .socket
            .send(&add(), &[listener.as_fd()])
            .expect("there is room");
    }
    for _ in 0..2 {
        let reply = agent.socket.recv::<Reply>().expect("an answer").message;
        assert!(matches!(reply, Reply::Done), "{reply:?}");
    }
    let reply = early.recv::<Reply>().expect("an answer").message;
    assert!(matches!(reply, Reply::Context { .. }), "{reply:?}");
    assert_eq!(agent.all(), ["web"]);
    Program::connect(&path, "late");
}

/// The RNIC alone holds the sockets: nobody waits for one that has died.
#[test]
fn a_listener_dies_with_the_rnic() {
    let server = Server::start([127, 7, 99, 1]);
    let agent = Agent::of(&server);
    let path = agent.path("web");
    assert!(matches!(agent.add("web", &path), Reply::Done));
    drop(server);
    let refused = wait_for("the end of the RNIC", || Socket::connect(&path).err());
    assert_eq!(refused.errno(), libc::ECONNREFUSED);
}

#[test]
fn many_are_told_in_pages_and_long_names_fit() {
    let server = Server::start([127, 7, 100, 1]);
    let agent = Agent::of(&server);
    let name = |n: usize| format!("{n:0width$}", width = MAX_INSTANCE_NAME);
    let names: Vec<_> = (0..300).map(name).collect();
    for (n, name) in names.iter().enumerate() {
        assert!(matches!(
            agent.add(name, &agent.path(&n.to_string())),
            Reply::Done
        ));
    }
    assert_eq!(agent.all(), names);
    let long = agent.add(&format!("{}1", name(1)), &agent.path("long"));
    assert!(
        matches!(
            long,
            Reply::Error {
                errno: libc::EINVAL,
                ..
            }
        ),
        "{long:?}"
    );
}
