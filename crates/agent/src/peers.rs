//! The other hosts' agents: TLS, connections that are kept, and what an error of theirs means.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context, bail};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity, ServerTlsConfig};

use crate::PROTOCOL;
use crate::directory::Directory;
use crate::proto::HelloRequest;
use crate::proto::peer_client::PeerClient;

/// How long a host may take to answer the first call.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// Certificates of this host and of those that it trusts.
pub struct Credentials {
    ca: Certificate,
    identity: Identity,
}

impl Credentials {
    /// Reads `ca.pem`, `cert.pem` and `key.pem` in `folder`.
    pub fn load(folder: &Path) -> anyhow::Result<Self> {
        let read = |name: &str| {
            let path = folder.join(name);
            std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))
        };
        Ok(Self {
            ca: Certificate::from_pem(read("ca.pem")?),
            identity: Identity::from_pem(read("cert.pem")?, read("key.pem")?),
        })
    }

    /// What this host's server presents, and whom it lets in: holders of a certificate of the same authority.
    pub fn server(&self) -> ServerTlsConfig {
        ServerTlsConfig::new().identity(self.identity.clone()).client_ca_root(self.ca.clone())
    }

    fn client(&self, host: &str) -> ClientTlsConfig {
        ClientTlsConfig::new().identity(self.identity.clone()).ca_certificate(self.ca.clone()).domain_name(host)
    }
}

/// Connections to the other agents, opened at first use and kept.
pub struct Peers {
    directory: Directory,
    credentials: Credentials,
    channels: Mutex<HashMap<String, Channel>>,
}

impl Peers {
    /// Nothing is connected yet.
    pub fn new(directory: Directory, credentials: Credentials) -> Self {
        Self { directory, credentials, channels: Mutex::default() }
    }

    /// The hosts.
    pub fn directory(&self) -> &Directory {
        &self.directory
    }

    /// The agent of `host`, after it has answered a greeting in our protocol.
    pub async fn connect(&self, host: &str) -> anyhow::Result<PeerClient<Channel>> {
        let Some(entry) = self.directory.host(host) else {
            bail!("there is no host {host}; known hosts: {}", self.directory.names());
        };
        let cached = self.channels.lock().expect("no panic under this lock").get(host).cloned();
        let channel = match cached {
            Some(channel) => channel,
            None => {
                let channel = Endpoint::from_shared(format!("https://{}", entry.socket_address()))?
                    .tls_config(self.credentials.client(host))?
                    .connect_timeout(CONNECT_TIMEOUT)
                    .tcp_nodelay(true)
                    // Page data come in large messages; small windows would make them wait for each other.
                    .initial_stream_window_size(4 << 20)
                    .initial_connection_window_size(16 << 20)
                    .connect_lazy();
                self.channels.lock().expect("no panic under this lock").insert(host.to_owned(), channel.clone());
                channel
            }
        };
        let mut client = PeerClient::new(channel);
        let hello = HelloRequest { protocol: PROTOCOL, host: self.directory.own().name.clone() };
        let mut request = tonic::Request::new(hello);
        request.set_timeout(CONNECT_TIMEOUT);
        let reply = client
            .hello(request)
            .await
            .map_err(|status| anyhow::anyhow!("the agent of {host} ({}) does not answer: {}", entry.address, reason(&status)))?
            .into_inner();
        if reply.protocol != PROTOCOL {
            bail!(
                "the agent of {host} speaks protocol {} and this one {PROTOCOL}: install the same version on both",
                reply.protocol
            );
        }
        if reply.host != host {
            bail!("the agent at {} calls itself {}, not {host}; mend the list of hosts", entry.address, reply.host);
        }
        Ok(client)
    }
}

/// What a failed call was about, in words: the status's message, or its causes when there is none worth reading.
pub fn reason(status: &tonic::Status) -> String {
    let mut text = status.message().to_owned();
    let mut source = std::error::Error::source(status);
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = if text.is_empty() { cause_text } else { format!("{text}: {cause_text}") };
        }
        source = cause.source();
    }
    if text.is_empty() { status.code().to_string() } else { text }
}
