//! Where is an endpoint today? Asked of the host's agent before a queue pair is connected or an address handle made.

use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use verbatim_channel::{Endpoint, Greeting, KeyPair, MAX_LONG_BYTES, MovedEndpoint, Resolved, VERSIONS};
use verbatim_device::control::QpType;
use verbatim_seqpacket::{Error, Socket};

use crate::context::Context;
use crate::error::VerbsError;
use crate::process::Process;

/// How long an agent may take to answer, before connecting fails.
const TIMEOUT: Duration = Duration::from_secs(60);

/// How often another number is asked for.
const PUBLISH_TRIES: u32 = 8;

/// The physical endpoint. Where there is no agent, nothing has moved.
pub fn resolve(process: &Process, endpoint: Endpoint) -> Result<Resolved, VerbsError> {
    let greeting = |version| Greeting::Resolve { version, endpoint };
    let resolved = ask(process, "modify_qp", greeting, |socket, version| {
        verbatim_channel::recv_as(socket, version, MAX_LONG_BYTES)
    })?;
    Ok(resolved.unwrap_or(Resolved {
        endpoint,
        keys: Vec::new(),
    }))
}

/// The datagram queue pairs that programs know under this GID and that are elsewhere, likewise.
pub fn ways(process: &Process, gid: [u8; 16]) -> Result<Vec<MovedEndpoint>, VerbsError> {
    let greeting = |version| Greeting::Ways { version, gid };
    let ways = ask(process, "create_ah", greeting, |socket, _| {
        verbatim_channel::recv(socket)
    })?;
    Ok(ways.unwrap_or_default())
}

/// A number for a queue pair of a context that has moved, under which others find it with the GID that the program has: its
/// physical number where nobody can give one.
pub fn publish(context: &Context, qpn: u32, qp_type: QpType) -> u32 {
    let process = context.process();
    let gid = context.gid(0).unwrap_or_default();
    let moves = context.moves.load(SeqCst);
    let keys = moved_keys(process);
    let greeting = |version| Greeting::Publish {
        version,
        gid,
        qpn,
        keys: keys.clone(),
        datagram: (qp_type == QpType::Ud).then_some(moves),
    };
    let publish = || {
        ask::<Option<u32>>(process, "create_qp", greeting, |socket, _| {
            verbatim_channel::recv(socket)
        })
    };
    // One that the process has from another host already is of no use.
    (0..PUBLISH_TRIES)
        .map_while(|_| publish().ok()??)
        .find(|number| process.qp(*number).is_none())
        .unwrap_or(qpn)
}

/// The remote keys of a process, as far as the RNIC's differ.
fn moved_keys(process: &Process) -> Vec<KeyPair> {
    let mut keys = Vec::new();
    for context in process.contexts() {
        let objects = context.objects.lock();
        let mrs = objects.mrs.values().map(|mr| KeyPair {
            virtual_key: mr.rkey(),
            physical_key: mr.physical_rkey.load(SeqCst),
            any_tag: false,
        });
        let mws = objects.mws.values().map(|mw| KeyPair {
            virtual_key: mw.rkey(),
            physical_key: context.windows.physical(mw.rkey()),
            any_tag: true,
        });
        let all = mrs.chain(mws);
        keys.extend(all.filter(|pair| pair.virtual_key != pair.physical_key));
    }
    keys
}

/// The agent's answer; `None` where there is no agent. One that closes the channel unheard is asked in the version below: it may
/// be of an earlier release.
fn ask<T>(
    process: &Process,
    verb: &'static str,
    greeting: impl Fn(u32) -> Greeting,
    recv: impl Fn(&Socket, u32) -> Result<(T, Vec<OwnedFd>), Error>,
) -> Result<Option<T>, VerbsError> {
    let mut version = VERSIONS.newest;
    loop {
        let answer = ask_as(process, verb, &greeting(version), |socket| recv(socket, version));
        match (answer, VERSIONS.below(version)) {
            (
                Err(VerbsError::Channel {
                    source: Error::Closed,
                    ..
                }),
                Some(below),
            ) => version = below,
            (answer, _) => return answer,
        }
    }
}

fn ask_as<T>(
    process: &Process,
    verb: &'static str,
    greeting: &Greeting,
    recv: impl Fn(&Socket) -> Result<(T, Vec<OwnedFd>), Error>,
) -> Result<Option<T>, VerbsError> {
    let failed = |source| VerbsError::Channel {
        verb,
        peer: "host agent",
        source,
    };
    let Some(agent) = process.agent_socket() else {
        return Ok(None);
    };
    let socket = match Socket::connect(&agent) {
        Ok(socket) => socket,
        Err(Error::Os { source, .. })
            if matches!(source.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) =>
        {
            return Ok(None);
        }
        Err(error) => return Err(failed(error)),
    };
    set_socket_timeout(&socket, Timeout::Recv, Some(TIMEOUT)).map_err(|errno| VerbsError::Os {
        call: "setsockopt",
        source: errno.into(),
    })?;
    verbatim_channel::send(&socket, greeting, &[]).map_err(failed)?;
    let (answer, _) = recv(&socket).map_err(failed)?;
    Ok(Some(answer))
}
