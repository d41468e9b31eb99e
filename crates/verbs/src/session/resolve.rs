//! Where is an endpoint today? Asked of the host's agent before a queue pair is connected or an address handle made.

use std::io::ErrorKind;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use serde::de::DeserializeOwned;
use verbatim_channel::{Endpoint, Greeting, KeyPair, MovedEndpoint, Resolved, SOCKET_NAME, VERSION};
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
    let greeting = Greeting::Resolve {
        version: VERSION,
        endpoint,
    };
    let resolved = ask(process, "modify_qp", &greeting)?;
    Ok(resolved.unwrap_or(Resolved {
        endpoint,
        keys: Vec::new(),
    }))
}

/// The datagram queue pairs that programs know under this GID and that are elsewhere, likewise.
pub fn ways(process: &Process, gid: [u8; 16]) -> Result<Vec<MovedEndpoint>, VerbsError> {
    let greeting = Greeting::Ways {
        version: VERSION,
        gid,
    };
    Ok(ask(process, "create_ah", &greeting)?.unwrap_or_default())
}

/// A number for a queue pair of a context that has moved, under which others find it with the GID that the program has: its
/// physical number where nobody can give one.
pub fn publish(context: &Context, qpn: u32, qp_type: QpType) -> u32 {
    let process = context.process();
    let gid = context.gid(0).unwrap_or_default();
    let moves = context.moves.load(SeqCst);
    let greeting = Greeting::Publish {
        version: VERSION,
        gid,
        qpn,
        keys: moved_keys(process),
        datagram: (qp_type == QpType::Ud).then_some(moves),
    };
    // One that the process has from another host already is of no use.
    (0..PUBLISH_TRIES)
        .map_while(|_| ask::<Option<u32>>(process, "create_qp", &greeting).ok()??)
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

/// The agent's answer; `None` where there is no agent.
fn ask<T: DeserializeOwned>(
    process: &Process,
    verb: &'static str,
    greeting: &Greeting,
) -> Result<Option<T>, VerbsError> {
    let failed = |source| VerbsError::Channel {
        verb,
        peer: "host agent",
        source,
    };
    let socket = match Socket::connect(&process.runtime().join(SOCKET_NAME)) {
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
    let (answer, _) = verbatim_channel::recv(&socket).map_err(failed)?;
    Ok(Some(answer))
}
