//! The other hosts' agents: TLS, connections that are kept, and what an error of theirs means.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context, bail};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity, ServerTlsConfig};
use verbatim_versions::Versions;

use crate::PROTOCOLS;
use crate::directory::{Directory, HostEntry};
use crate::guests::Guest;
use crate::proto::peer_client::PeerClient;
use crate::proto::{HelloReply, HelloRequest};
use crate::protocol::{self, Agreed};

/// How long a host may take to answer the first call.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// How often the other end of an idle connection must give a sign of life: a host that lost its power sends no farewell,
/// and programs wait for what it was about to say.
pub const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(2);

/// How long it may take to do so.
pub const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(6);

/// Certificates of this host and of those that it trusts.
pub struct Credentials {
    ca: Certificate,
    identity: Identity,
}

impl Credentials {
    /// Reads `ca.pem`, `cert.pem` and `key.pem` in `folder`.
    pub fn load(folder: &Path) -> anyhow::Result<Self> {
        verbatim_tls::install();
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
        ServerTlsConfig::new()
            .identity(self.identity.clone())
            .client_ca_root(self.ca.clone())
    }

    fn client(&self, host: &str) -> ClientTlsConfig {
        ClientTlsConfig::new()
            .identity(self.identity.clone())
            .ca_certificate(self.ca.clone())
            .domain_name(host)
    }
}

/// Connections to the other agents, opened at first use and kept.
pub struct Peers {
    directory: Directory,
    credentials: Credentials,
    channels: Mutex<HashMap<String, Channel>>,
    /// What the other agents were found to be, by host, when they were last connected to.
    agreed: Mutex<HashMap<String, Agreed>>,
    /// What this agent speaks.
    versions: Versions,
}

impl Peers {
    /// Nothing is connected yet.
    pub fn new(directory: Directory, credentials: Credentials) -> Self {
        Self {
            directory,
            credentials,
            channels: Mutex::default(),
            agreed: Mutex::default(),
            versions: PROTOCOLS,
        }
    }

    /// The hosts.
    pub fn directory(&self) -> &Directory {
        &self.directory
    }

    /// The agent of `host`, after it has answered a greeting and both have agreed on a protocol.
    pub async fn connect(&self, host: &str) -> anyhow::Result<PeerClient<Channel>> {
        let Some(entry) = self.directory.host(host) else {
            bail!("there is no host {host}; known hosts: {}", self.directory.names());
        };
        let cached = self
            .channels
            .lock()
            .expect("no panic under this lock")
            .get(host)
            .cloned();
        let channel = match cached {
            Some(channel) => channel,
            None => {
                let channel = Endpoint::from_shared(format!("https://{}", entry.socket_address()))?
                    .tls_config(self.credentials.client(host))?
                    .connect_timeout(CONNECT_TIMEOUT)
                    .tcp_nodelay(true)
                    .http2_keep_alive_interval(KEEP_ALIVE_INTERVAL)
                    .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
                    .keep_alive_while_idle(true)
                    // Page data come in large messages; small windows would make them wait for each other.
                    .initial_stream_window_size(4 << 20)
                    .initial_connection_window_size(16 << 20)
                    .connect_lazy();
                self.channels
                    .lock()
                    .expect("no panic under this lock")
                    .insert(host.to_owned(), channel.clone());
                channel
            }
        };
        let mut client = PeerClient::new(channel);
        let own = &self.directory.own().name;
        let hello = protocol::hello(self.versions, own);
        let reply = greet(&mut client, entry, hello.clone()).await?;
        let agreed = protocol::read_hello(self.versions, own, &reply)?;
        if protocol::demands_its_own(&hello, &reply, &agreed) {
            greet(
                &mut client,
                entry,
                protocol::hello(Versions::only(agreed.protocol), own),
            )
            .await?;
        }
        self.lock_agreed().insert(host.to_owned(), agreed);
        Ok(client)
    }

    fn lock_agreed(&self) -> std::sync::MutexGuard<'_, HashMap<String, Agreed>> {
        self.agreed.lock().expect("no panic under this lock")
    }

    /// The protocol that was agreed with the agent of `host`, for a session to pin; 0 if it was never reached.
    pub fn spoken(&self, host: &str) -> u32 {
        self.lock_agreed().get(host).map_or(0, |agreed| agreed.protocol)
    }

    /// Whether the agent of `host`, which has been connected to, has said that it can do this.
    pub fn can(&self, host: &str, capability: &str) -> bool {
        let agreed = self.lock_agreed();
        let agreed = agreed.get(host);
        agreed.is_some_and(|agreed| agreed.capabilities.iter().any(|name| name == capability))
    }

    /// An error if one of these programs could not speak to the agent of `host`, which has been connected to.
    pub fn must_know(&self, host: &str, guests: &[Guest]) -> anyhow::Result<()> {
        match self.lock_agreed().get(host) {
            Some(agreed) => protocol::must_know(agreed, host, guests),
            None => Ok(()),
        }
    }
}

/// The answer of a host's agent to a greeting.
async fn greet(
    client: &mut PeerClient<Channel>,
    host: &HostEntry,
    hello: HelloRequest,
) -> anyhow::Result<HelloReply> {
    let (name, address) = (&host.name, &host.address);
    let mut request = tonic::Request::new(hello);
    request.set_timeout(CONNECT_TIMEOUT);
    let reply = client.hello(request).await.map_err(|status| {
        anyhow::anyhow!(
            "the agent of {name} ({address}) does not answer: {}",
            reason(&status)
        )
    })?;
    let reply = reply.into_inner();
    if reply.host != *name {
        bail!(
            "the agent at {address} calls itself {}, not {name}; mend the list of hosts",
            reply.host
        );
    }
    Ok(reply)
}

/// What a failed call was about, in words: the status's message, or its causes when there is none worth reading.
pub fn reason(status: &tonic::Status) -> String {
    let mut text = status.message().to_owned();
    let mut source = std::error::Error::source(status);
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = if text.is_empty() {
                cause_text
            } else {
                format!("{text}: {cause_text}")
            };
        }
        source = cause.source();
    }
    if text.is_empty() {
        status.code().to_string()
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
    use std::sync::Arc;
    use tokio_stream::wrappers::TcpListenerStream;

    /// A certificate authority of a test, and the credentials that it gives out.
    struct Authority(CertifiedIssuer<'static, KeyPair>);

    impl Authority {
        fn new() -> Self {
            let mut params = CertificateParams::new(Vec::new()).unwrap();
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
        }

        fn credentials(&self, host: &str, trusted: &Self) -> Credentials {
            let key = KeyPair::generate().unwrap();
            let params = CertificateParams::new(vec![host.to_owned()]).unwrap();
            let certificate = params.signed_by(&key, &self.0).unwrap();
            Credentials {
                ca: Certificate::from_pem(trusted.0.pem()),
                identity: Identity::from_pem(certificate.pem(), key.serialize_pem()),
            }
        }
    }

    /// What a client with `credentials` gets from a server of `authority` that offers no service at all.
    async fn greet(authority: &Authority, server_name: &str, credentials: Credentials) -> tonic::Status {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = tonic::transport::Server::builder()
            .tls_config(authority.credentials(server_name, authority).server())
            .unwrap()
            .add_routes(tonic::service::Routes::default())
            .serve_with_incoming(TcpListenerStream::new(listener));
        let server = tokio::spawn(server);
        let channel = Endpoint::from_shared(format!("https://{address}"))
            .unwrap()
            .tls_config(credentials.client("b"))
            .unwrap()
            .connect_lazy();
        let status = PeerClient::new(channel)
            .hello(HelloRequest::default())
            .await
            .unwrap_err();
        server.abort();
        status
    }

    #[tokio::test]
    async fn only_holders_of_a_certificate_of_the_same_authority_are_heard() {
        let (ours, theirs) = (Authority::new(), Authority::new());
        let status = greet(&ours, "b", ours.credentials("a", &ours)).await;
        assert_eq!(
            status.code(),
            tonic::Code::Unimplemented,
            "let in, as far as there is anything: {status}"
        );
        let status = greet(&ours, "b", theirs.credentials("a", &ours)).await;
        assert_ne!(
            status.code(),
            tonic::Code::Unimplemented,
            "a stranger's certificate was taken"
        );
        let status = greet(&ours, "b", ours.credentials("a", &theirs)).await;
        assert_ne!(
            status.code(),
            tonic::Code::Unimplemented,
            "a stranger was taken for a host of ours"
        );
        let status = greet(&ours, "c", ours.credentials("a", &ours)).await;
        assert_ne!(
            status.code(),
            tonic::Code::Unimplemented,
            "one host was taken for another"
        );
    }

    #[tokio::test]
    async fn a_host_that_is_not_there_is_named_with_those_that_are() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hosts.json");
        std::fs::write(
            &path,
            r#"[{"name": "a", "address": "127.0.0.1"}, {"name": "b", "address": "127.0.0.2"}]"#,
        )
        .unwrap();
        let authority = Authority::new();
        let directory = Directory::load(&path, "a").unwrap();
        let peers = Arc::new(Peers::new(directory, authority.credentials("a", &authority)));
        let error = peers.connect("nowhere").await.unwrap_err();
        assert_eq!(error.to_string(), "there is no host nowhere; known hosts: a, b");
        let error = peers.connect("b").await.unwrap_err();
        assert!(error.to_string().contains("does not answer"), "{error:#}");
    }
}
