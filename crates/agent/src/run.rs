//! Starting and stopping an agent.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail};
use rustix::process::Resource;
use tokio::net::{TcpListener, UnixListener};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use verbatim_channel::SOCKET_NAME;
use verbatim_container::{Host, HostConfig};
use verbatim_seqpacket::Listener;

use crate::agent::Agent;
use crate::api::ControlService;
use crate::caller;
use crate::config::Config;
use crate::confirming;
use crate::directory::Directory;
use crate::faults::Faults;
use crate::forwarding;
use crate::instances::recovery::{make_private, recover};
use crate::memory::parts::PART_BYTES;
use crate::memory::private_tmpfs;
use crate::own_state;
use crate::peer_service::PeerService;
use crate::peers::{Credentials, KEEP_ALIVE_INTERVAL, KEEP_ALIVE_TIMEOUT, Peers};
use crate::proto::control_server::ControlServer;
use crate::proto::peer_server::PeerServer;
use crate::session::behind;

/// The largest frame of HTTP/2 that other agents may send: a part of memory, and what it says of itself.
const FRAME_BYTES: u32 = 2 * PART_BYTES as u32;

/// Gives this thread, and those that it starts, more of a busy processor: much of what an agent does lies in somebody's
/// blackout. To be called before the runtime is made; without the right to do so nothing changes.
pub fn raise_priority() {
    const NICE: i32 = -10;
    if let Err(errno) = rustix::process::setpriority_process(None, NICE) {
        tracing::warn!(
            "the agent runs with ordinary priority ({errno}); blackouts may be longer on busy hosts"
        );
    }
}

/// Lets this process have as many descriptors as it may. Each instance may take some ([`crate::quotas`]), and the usual limit of 1024
/// would be a few programs' to use up. Returns what it was: the limit of programs that this one starts for others.
pub(crate) fn raise_descriptor_limit() -> Option<u64> {
    let mut limit = rustix::process::getrlimit(Resource::Nofile);
    let before = limit.current;
    limit.current = limit.maximum;
    if let Err(errno) = rustix::process::setrlimit(Resource::Nofile, limit) {
        tracing::warn!("the limit on descriptors stays as it is ({errno})");
    }
    before
}

/// Images, registered memory and the journal lie in the runtime folder: on a disk they would be slow, and stay there.
fn must_lie_in_memory(folder: &Path) -> anyhow::Result<()> {
    /// `f_type` of tmpfs and ramfs (statfs(2)).
    const IN_MEMORY: [i64; 2] = [0x0102_1994, 0x8584_58f6];
    let found = rustix::fs::statfs(folder).with_context(|| format!("cannot look at {}", folder.display()))?;
    if !IN_MEMORY.contains(&found.f_type) {
        bail!(
            "{} is not in memory; mount a tmpfs there, or name another folder with --runtime-dir",
            folder.display()
        );
    }
    Ok(())
}

/// Where private memory of instances that come here will lie. Without a tmpfs of its own it lies in the runtime folder's.
fn mount_private(runtime_dir: &Path) -> anyhow::Result<()> {
    let folder = runtime_dir.join("private");
    make_private(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    match private_tmpfs::mount(&folder) {
        Ok(found) => {
            tracing::debug!(folder = %folder.display(), ?found, "private memory that comes here lies there")
        }
        Err(error) => tracing::warn!(
            folder = %folder.display(),
            %error,
            "no tmpfs of the agent's own can be there: private memory that comes here lies in what is there already"
        ),
    }
    Ok(())
}

/// Runs an agent until it is told to stop (SIGTERM or SIGINT). Instances go on without it.
pub async fn run(config: Config, faults: Faults) -> anyhow::Result<()> {
    // Containers outlive the runc that started them, and become our children.
    rustix::process::set_child_subreaper(rustix::process::Pid::from_raw(1))
        .context("cannot become a subreaper")?;
    let descriptors = raise_descriptor_limit();
    must_lie_in_memory(&config.runtime_dir)?;
    let directory = Directory::load(&config.hosts, &config.name)?;
    let credentials = Credentials::load(&config.tls)?;
    let address = directory.own().socket_address();
    let server_tls = credentials.server();
    let tools = Host::open(HostConfig {
        state: config.runtime_dir.join("containers"),
        proxy: config.program.clone(),
        descriptors,
        plugin: config.criu_plugin.clone(),
    })
    .await?;
    mount_private(&config.runtime_dir)?;
    own_state::close(&config)?;
    let mut agent = Agent::open(config, Peers::new(directory, credentials), tools)?;
    agent.faults = faults;
    let agent = Arc::new(agent);

    // Before all that may make connections.
    let confirming = tokio::spawn(confirming::watch(Arc::clone(&agent)));
    agent
        .behinds
        .find()
        .context("looking for RAM that was left here")?;
    recover(&agent)
        .await
        .context("taking over from an earlier agent")?;
    behind::recover(&agent);
    let nic_listeners = Arc::clone(&agent.nic_listeners).watch();
    let numbers = forwarding::watch(Arc::clone(&agent));

    // Programs outside of any instance.
    let socket = agent.config.runtime_dir.join(SOCKET_NAME);
    let guests = Listener::bind(&socket)?;
    std::fs::set_permissions(&socket, PermissionsExt::from_mode(0o666))?;
    agent.guests.serve(guests, None, Arc::clone(&agent))?;

    let tcp = TcpListener::bind(address)
        .await
        .with_context(|| format!("cannot listen at {address}"))?;
    let peers = Server::builder()
        .tls_config(server_tls)?
        .http2_keepalive_interval(Some(KEEP_ALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEP_ALIVE_TIMEOUT))
        .initial_stream_window_size(4 << 20)
        .initial_connection_window_size(16 << 20)
        // A part of memory comes in one frame, not in sixteen.
        .max_frame_size(Some(FRAME_BYTES))
        .add_service(PeerServer::new(PeerService(Arc::clone(&agent))))
        // The builder's own setting is for sockets that it makes itself. Without it an answer in two parts takes 40 ms.
        .serve_with_incoming(TcpIncoming::from(tcp).with_nodelay(Some(true)));

    let api_path = agent.config.api_socket();
    let _ = std::fs::remove_file(&api_path);
    let unix =
        UnixListener::bind(&api_path).with_context(|| format!("cannot listen at {}", api_path.display()))?;
    std::fs::set_permissions(&api_path, PermissionsExt::from_mode(0o600))?;
    let api = Server::builder()
        .add_service(ControlServer::with_interceptor(
            ControlService(Arc::clone(&agent)),
            caller::may_command,
        ))
        .serve_with_incoming(UnixListenerStream::new(unix));

    tracing::info!(host = agent.name(), %address, "ready");
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    tokio::select! {
        result = peers => result.context("serving other agents"),
        result = api => result.context("serving the command line"),
        result = nic_listeners => result.context("watching the RNIC"),
        ended = confirming => ended.map_err(Into::into).and_then(|it| it).context("answering the RNIC"),
        result = numbers => result.context("watching the numbers of what has left"),
        _ = terminate.recv() => Ok(()),
        _ = tokio::signal::ctrl_c() => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_on_a_disk_is_refused_with_the_way_out() {
        assert!(must_lie_in_memory(Path::new("/dev/shm")).is_ok());
        let error = must_lie_in_memory(Path::new("/proc")).unwrap_err().to_string();
        assert!(error.contains("/proc is not in memory; mount a tmpfs"), "{error}");
        assert!(must_lie_in_memory(Path::new("/nonexistent")).is_err());
    }
}
