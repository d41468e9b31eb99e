//! The other hosts' agents: TLS, connections that are kept, and what an error of theirs means.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
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

/// A connection to another agent, and its number among those of this process.
#[derive(Clone)]
struct Kept {
    number: u64,
    channel: Channel,
}

/// The host could not be reached by the connection that was tried: nobody there has said anything.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Unreached(String);

/// Connections to the other agents, opened at first use and kept while they work.
pub struct Peers {
    directory: Directory,
    credentials: Credentials,
    channels: Mutex<HashMap<String, Kept>>,
    /// How many were opened.
    opened: AtomicU64,
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
            opened: AtomicU64::new(0),
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
        // A channel that lost its connection makes one attempt at a new one for all who call. That may have begun long
        // ago, may even have failed long ago and not been heard of: the host may have come back since.
        let kept = self.lock_channels().get(host).cloned();
        if let Some(kept) = kept {
            match self.agree(entry, &kept).await {
                Err(error) if error.is::<Unreached>() => {}
                answered => return answered,
            }
        }
        let fresh = Kept {
            number: self.opened.fetch_add(1, Ordering::Relaxed),
            channel: self.channel(entry)?,
        };
        self.lock_channels().insert(host.to_owned(), fresh.clone());
        self.agree(entry, &fresh).await
    }

    /// A channel to a host, which connects when it is first used.
    fn channel(&self, host: &HostEntry) -> anyhow::Result<Channel> {
        let endpoint = Endpoint::from_shared(format!("https://{}", host.socket_address()))?;
        Ok(endpoint
            .tls_config(self.credentials.client(&host.name))?
            .connect_timeout(CONNECT_TIMEOUT)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(KEEP_ALIVE_INTERVAL)
            .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
            .keep_alive_while_idle(true)
            // Page data come in large messages; small windows would make them wait for each other.
            .initial_stream_window_size(4 << 20)
            .initial_connection_window_size(16 << 20)
            .connect_lazy())
    }

    /// Greets the agent of a host and agrees with it on a protocol. The channel is forgotten if it does not reach it:
    /// who comes next begins anew.
    async fn agree(&self, host: &HostEntry, kept: &Kept) -> anyhow::Result<PeerClient<Channel>> {
        let mut client = PeerClient::new(kept.channel.clone());
        let own = &self.directory.own().name;
        let hello = protocol::hello(self.versions, own);
        let reply = match greet(&mut client, host, hello.clone()).await {
            Err(error) if error.is::<Unreached>() => {
                self.lock_channels()
                    .retain(|name, present| *name != host.name || present.number != kept.number);
                return Err(error);
            }
            answered => answered?,
        };
        let agreed = protocol::read_hello(self.versions, own, &reply)?;
        if protocol::demands_its_own(&hello, &reply, &agreed) {
            let hello = protocol::hello(Versions::only(agreed.protocol), own);
            greet(&mut client, host, hello).await?;
        }
        self.lock_agreed().insert(host.name.clone(), agreed);
        Ok(client)
    }

    fn lock_channels(&self) -> std::sync::MutexGuard<'_, HashMap<String, Kept>> {
        self.channels.lock().expect("no panic under this lock")
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

    /// Whether the agent of `host` has said what it knows, and this capability is not among it.
    pub fn lacks(&self, host: &str, capability: &str) -> bool {
        self.lock_agreed().contains_key(host) && !self.can(host, capability)
    }

    /// An error if one of these programs could not speak to the agent of `host`, which has been connected to.
    pub fn must_know(&self, host: &str, guests: &[Guest]) -> anyhow::Result<()> {
        match self.lock_agreed().get(host) {
            Some(agreed) => protocol::must_know(agreed, host, guests),
            None => Ok(()),
        }
    }
}

/// The answer of a host's agent to a greeting; [`Unreached`] if there was no connection to it.
async fn greet(
    client: &mut PeerClient<Channel>,
    host: &HostEntry,
    hello: HelloRequest,
) -> anyhow::Result<HelloReply> {
    let (name, address) = (&host.name, &host.address);
    let mut request = tonic::Request::new(hello);
    request.set_timeout(CONNECT_TIMEOUT);
    let reply = client.hello(request).await.map_err(|status| {
        let error = format!(
            "the agent of {name} ({address}) does not answer: {}",
            reason(&status)
        );
        match status.code() {
            tonic::Code::Unavailable => anyhow::Error::new(Unreached(error)),
            _ => anyhow::anyhow!(error),
        }
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
    /// A listener whose queue is full: the kernel leaves whoever else connects without an answer.
    fn full(address: std::net::SocketAddr) -> (tokio::net::TcpListener, Vec<std::net::TcpStream>) {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.set_reuseaddr(true).unwrap();
        socket.bind(address).unwrap();
        let listener = socket.listen(1).unwrap();
        let wait = Duration::from_millis(200);
        let waiting = std::iter::from_fn(|| std::net::TcpStream::connect_timeout(&address, wait).ok());
        let waiting = waiting.collect();
        (listener, waiting)
    }

    #[tokio::test]
    async fn a_host_that_has_come_back_is_not_missed_for_an_attempt_that_began_before() {
        let id = std::process::id();
        let address = std::net::Ipv4Addr::new(127, 77, (id >> 8) as u8, id as u8);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hosts.json");
        let hosts = [("a", "127.0.0.1".to_owned()), ("b", address.to_string())];
        let hosts = hosts.map(|(name, address)| serde_json::json!({"name": name, "address": address}));
        std::fs::write(&path, serde_json::to_vec(&hosts).unwrap()).unwrap();
        let authority = Authority::new();
        let directory = Directory::load(&path, "a").unwrap();
        let (listener, waiting) = full(directory.host("b").unwrap().socket_address());
        let peers = Peers::new(directory, authority.credentials("a", &authority));
        // Somebody begins to connect and turns away.
        let turned_away = tokio::time::timeout(Duration::from_millis(100), peers.connect("b")).await;
        assert!(turned_away.is_err(), "the host's queue was not full");
        // The attempt's time passes.
        tokio::time::sleep(CONNECT_TIMEOUT).await;
        drop(waiting);
        let server = tonic::transport::Server::builder()
            .tls_config(authority.credentials("b", &authority).server())
            .unwrap()
            .add_routes(tonic::service::Routes::default())
            .serve_with_incoming(TcpListenerStream::new(listener));
        let server = tokio::spawn(server);
        let error = peers.connect("b").await.unwrap_err();
        assert!(
            !error.is::<Unreached>(),
            "the server, which offers no service, was not heard: {error:#}"
        );
        server.abort();
    }
}
