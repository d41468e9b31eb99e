//! The helper thread and a stand-in for the agent, over real sockets and a real gate.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use verbatim_channel::{
    Answer, GATE_NAME, Gate, Greeting, MAX_LONG_BYTES, MEMORY_DIR, MovedEndpoint, OLDEST, Order, SOCKET_NAME,
    Scope, VERSION,
};
use verbatim_seqpacket::{Listener, Socket};

use crate::testing::Wire;
use crate::{Context, Process};

struct Agent {
    listener: Listener,
    gate: Gate,
    runtime: tempfile::TempDir,
    wire: Wire,
}

impl Agent {
    fn new() -> Self {
        let runtime = tempfile::tempdir().unwrap();
        std::fs::create_dir(runtime.path().join(MEMORY_DIR)).unwrap();
        Self {
            listener: Listener::bind(&runtime.path().join(SOCKET_NAME)).unwrap(),
            gate: Gate::open(&runtime.path().join(GATE_NAME), true).unwrap(),
            runtime,
            wire: Wire::new(),
        }
    }

    fn program(&self) -> (Arc<Process>, Arc<Context>) {
        let process = Process::new(self.runtime.path());
        let context = process.open_on(|| Ok(self.wire.device(1))).unwrap();
        (process, context)
    }

    /// As an agent that speaks this version alone, and has to go on working with libraries that speak others: a question in another
    /// is not answered, and who greets as a process must know better. What was asked, and the process's connection.
    fn meet(&self, spoken: u32) -> (Vec<u32>, Socket, Greeting) {
        let mut asked = Vec::new();
        loop {
            let socket = self.listener.accept().unwrap();
            match verbatim_channel::recv::<Greeting>(&socket).unwrap().0 {
                Greeting::Ways { version, .. } => {
                    asked.push(version);
                    if version == spoken {
                        verbatim_channel::send(&socket, &Vec::<MovedEndpoint>::new(), &[]).unwrap();
                    }
                }
                greeting => return (asked, socket, greeting),
            }
        }
    }

    fn accept(&self, expect_quiesced: bool) -> Socket {
        let (_, socket, greeting) = self.meet(VERSION);
        let Greeting::Process {
            pid,
            quiesced,
            generation,
            ..
        } = greeting
        else {
            panic!("{greeting:?}")
        };
        assert_eq!(pid, std::process::id());
        assert_eq!((quiesced, generation), (expect_quiesced, self.gate.generation()));
        socket
    }

    fn quiesce(&self, socket: &Socket, session: u64) -> Vec<OwnedFd> {
        let scope = Scope::All;
        assert!(matches!(
            order(socket, &Order::Suspend { session, scope }).0,
            Answer::Suspended { .. }
        ));
        let drain = Order::Drain {
            session,
            expected: Vec::new(),
            timeout_ms: 1000,
            sends_only: false,
        };
        assert!(matches!(order(socket, &drain).0, Answer::Drained));
        let (answer, connections) = order(socket, &Order::Quiesce { session });
        assert!(matches!(answer, Answer::Quiesced), "{answer:?}");
        connections
    }
}

fn order(socket: &Socket, order: &Order) -> (Answer, Vec<OwnedFd>) {
    verbatim_channel::send(socket, order, &[]).unwrap();
    verbatim_channel::recv(socket).unwrap()
}

fn claim(socket: &Socket, session: u64, connections: &[OwnedFd]) {
    let claim = Order::Claim {
        session,
        contexts: Vec::new(),
        key_tables: Vec::new(),
    };
    let fds: Vec<_> = connections.iter().map(std::os::fd::AsFd::as_fd).collect();
    verbatim_channel::send(socket, &claim, &fds).unwrap();
    let (answer, _) = verbatim_channel::recv::<Answer>(socket).unwrap();
    assert!(matches!(answer, Answer::Claimed { .. }), "{answer:?}");
}

/// What this process has open under a folder.
fn open_below(folder: &Path) -> Vec<std::path::PathBuf> {
    let fds = std::fs::read_dir("/proc/self/fd").unwrap();
    fds.filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok())
        .filter(|path| path.starts_with(folder))
        .collect()
}

#[test]
fn a_quiesced_process_waits_at_the_gate_and_comes_back() {
    let agent = Agent::new();
    let (process, context) = agent.program();
    let socket = agent.accept(false);
    let (Answer::Described(map), _) = order(&socket, &Order::Describe) else {
        panic!("no road map")
    };
    assert_eq!(map.contexts.len(), 1);

    let connections = agent.quiesce(&socket, 5);
    assert_eq!(connections.len(), 1);
    let end = verbatim_channel::recv::<Answer>(&socket).unwrap_err();
    assert!(matches!(end, verbatim_seqpacket::Error::Closed), "{end}");
    assert!(open_below(agent.runtime.path()).is_empty());

    agent.gate.open_up().unwrap();
    let socket = agent.accept(true);
    claim(&socket, 5, &connections);
    let (answer, _) = order(&socket, &Order::Resume { session: 5 });
    assert!(
        matches!(answer, Answer::Resumed { intercepted: 0, .. }),
        "{answer:?}"
    );
    context.alloc_pd().unwrap();
    process.cleanup();
}

#[test]
fn a_new_agent_finds_the_process_again() {
    let agent = Agent::new();
    let (process, context) = agent.program();
    let socket = agent.accept(false);
    let scope = Scope::All;
    order(&socket, &Order::Suspend { session: 1, scope });
    drop(socket);
    let socket = agent.accept(false);
    // The first agent's session is gone.
    context.alloc_pd().unwrap();
    let (answer, _) = order(&socket, &Order::Abort { session: 1 });
    assert!(matches!(answer, Answer::Done), "{answer:?}");
    let (answer, _) = order(&socket, &Order::Resume { session: 1 });
    assert!(
        matches!(answer, Answer::Resumed { intercepted: 0, .. }),
        "{answer:?}"
    );
    process.cleanup();
    let end = verbatim_channel::recv::<Answer>(&socket).unwrap_err();
    assert!(matches!(end, verbatim_seqpacket::Error::Closed), "{end}");
}

#[test]
fn an_agent_that_dies_at_the_hand_over_leaves_the_process_running() {
    let agent = Agent::new();
    let (process, context) = agent.program();
    let socket = agent.accept(false);
    let scope = Scope::All;
    let session = 2;
    order(&socket, &Order::Suspend { session, scope });
    let expected = Vec::new();
    order(
        &socket,
        &Order::Drain {
            session,
            expected,
            timeout_ms: 1000,
            sends_only: false,
        },
    );
    // As if it died before it could take the answer.
    rustix::net::shutdown(&socket, rustix::net::Shutdown::Read).unwrap();
    verbatim_channel::send(&socket, &Order::Quiesce { session }, &[]).unwrap();
    let socket = agent.accept(false);
    context.alloc_pd().unwrap();
    let (Answer::Described(map), _) = order(&socket, &Order::Describe) else {
        panic!("no road map")
    };
    assert_eq!(map.contexts[0].pds.len(), 1);
    process.cleanup();
}

/// The version of a process's greeting.
fn greeted_in(greeting: &Greeting) -> u32 {
    match greeting {
        Greeting::Process { version, .. } => *version,
        other => panic!("{other:?}"),
    }
}

/// An agent of the release before notes a process that greets in another version, and refuses for seconds to move its instance, although
/// the process has long greeted in the right one.
#[test]
fn an_agent_of_an_earlier_release_is_never_greeted_in_another_version_than_its_own() {
    let agent = Agent::new();
    let (process, _context) = agent.program();
    let newest_first: Vec<_> = (OLDEST..=VERSION).rev().collect();
    for _ in 0..3 {
        let (asked, socket, greeting) = agent.meet(OLDEST);
        assert_eq!(greeted_in(&greeting), OLDEST);
        assert_eq!(asked, newest_first);
        verbatim_channel::send_as(&socket, OLDEST, &Order::Describe, &[]).unwrap();
        let (answer, _) = verbatim_channel::recv_as::<Answer>(&socket, OLDEST, MAX_LONG_BYTES).unwrap();
        assert!(matches!(answer, Answer::Described(_)), "{answer:?}");
        // Whoever comes after it is asked anew: it may be another release's.
    }
    let (asked, _socket, greeting) = agent.meet(VERSION);
    assert_eq!((greeted_in(&greeting), asked), (VERSION, vec![VERSION]));
    process.cleanup();
}

#[test]
fn an_agent_that_understands_no_version_hears_the_newest_and_can_name_it() {
    let agent = Agent::new();
    let (process, _context) = agent.program();
    let (asked, _socket, greeting) = agent.meet(OLDEST - 1);
    assert_eq!(asked.last(), Some(&OLDEST));
    assert_eq!(greeted_in(&greeting), VERSION);
    process.cleanup();
}
