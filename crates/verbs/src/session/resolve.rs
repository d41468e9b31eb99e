//! Where is an endpoint today? Asked of the host's agent before a queue pair is connected or an address handle made.

use std::io::ErrorKind;
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use serde::de::DeserializeOwned;
use verbatim_channel::{Endpoint, Greeting, MovedEndpoint, Resolved, SOCKET_NAME, VERSION};
use verbatim_seqpacket::{Error, Socket};

use crate::error::VerbsError;
use crate::process::Process;

/// How long an agent may take to answer, before connecting fails.
const TIMEOUT: Duration = Duration::from_secs(5);

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
