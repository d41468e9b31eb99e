//! Where is an endpoint today? Asked of the host's agent before a queue pair is connected.

use std::io::ErrorKind;
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use verbatim_channel::{Endpoint, Greeting, Resolved, SOCKET_NAME, VERSION};
use verbatim_seqpacket::{Error, Socket};

use crate::error::VerbsError;
use crate::process::Process;

/// How long an agent may take to answer, before connecting fails.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The physical endpoint. Where there is no agent, nothing has moved.
pub fn resolve(process: &Process, endpoint: Endpoint) -> Result<Resolved, VerbsError> {
    let failed = |source| VerbsError::Channel {
        verb: "modify_qp",
        peer: "host agent",
        source,
    };
    let socket = match Socket::connect(&process.runtime().join(SOCKET_NAME)) {
        Ok(socket) => socket,
        Err(Error::Os { source, .. })
            if matches!(source.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) =>
        {
            return Ok(Resolved {
                endpoint,
                keys: Vec::new(),
            });
        }
        Err(error) => return Err(failed(error)),
    };
    set_socket_timeout(&socket, Timeout::Recv, Some(TIMEOUT)).map_err(|errno| VerbsError::Os {
        call: "setsockopt",
        source: errno.into(),
    })?;
    let greeting = Greeting::Resolve {
        version: VERSION,
        endpoint,
    };
    verbatim_channel::send(&socket, &greeting, &[]).map_err(failed)?;
    let (resolved, _) = verbatim_channel::recv(&socket).map_err(failed)?;
    Ok(resolved)
}
