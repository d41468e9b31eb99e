//! Agents of tests: several in one process, that speak to each other over TLS.

use std::net::SocketAddr;
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint as Address, Identity, Server};
use verbatim_container::Host;

use crate::agent::{Agent, Shared};
use crate::config::Config;
use crate::directory::Directory;
use crate::peer_service::PeerService;
use crate::peers::{Credentials, Peers};
use crate::proto::peer_client::PeerClient;
use crate::proto::peer_server::PeerServer;

/// A certificate authority of a test.
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    /// A new one.
    pub fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// Certificate and key of a host.
    pub fn of(&self, host: &str) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![host.to_owned()]).unwrap();
        (
            params.signed_by(&key, &self.0).unwrap().pem(),
            key.serialize_pem(),
        )
    }
}

/// An agent without an RNIC and without containers, that serves other agents on this machine's loopback.
pub struct TestHost {
    /// The agent.
    pub agent: Shared,
    port: u16,
    service: JoinHandle<Result<(), tonic::transport::Error>>,
    _folder: tempfile::TempDir,
}

impl Drop for TestHost {
    fn drop(&mut self) {
        self.service.abort();
    }
}

impl TestHost {
    /// The one called `host`, of these (name and address), which listens at `at`.
    pub async fn start(authority: &Authority, hosts: &[(&str, &str)], host: &str, at: SocketAddr) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_owned();
        let hosts = hosts.iter();
        let hosts = hosts.map(|(name, address)| serde_json::json!({"name": name, "address": address}));
        let hosts: Vec<_> = hosts.collect();
        std::fs::write(path.join("hosts.json"), serde_json::to_vec(&hosts).unwrap()).unwrap();
        let (certificate, key) = authority.of(host);
        for (name, pem) in [
            ("ca.pem", authority.0.pem()),
            ("cert.pem", certificate),
            ("key.pem", key),
        ] {
            std::fs::write(path.join(name), pem).unwrap();
        }
        let config = Config {
            name: host.to_owned(),
            runtime_dir: path.clone(),
            state_dir: path.join("state"),
            hosts: path.join("hosts.json"),
            tls: path.clone(),
            library: path.join("lib"),
            criu_plugin: "/nonexistent".into(),
            program: path.join("program"),
            memory_device: None,
            instance_files: 64 << 20,
            memory_overcommit: 1.0,
            bridge: String::new(),
            mtu: None,
            filters_addresses: true,
            confirm_peers: Default::default(),
            cgroup_parent: path.clone(),
        };
        let directory = Directory::load(&config.hosts, host).unwrap();
        let credentials = Credentials::load(&path).unwrap();
        let tls = credentials.server();
        let agent = Agent::open(config, Peers::new(directory, credentials), Host::without_tools());
        let agent = Arc::new(agent.unwrap());
        let listener = tokio::net::TcpListener::bind(at).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = Server::builder()
            .tls_config(tls)
            .unwrap()
            .add_service(PeerServer::new(PeerService(agent.clone())))
            .serve_with_incoming(TcpListenerStream::new(listener));
        Self {
            agent,
            port,
            service: tokio::spawn(server),
            _folder: folder,
        }
    }

    /// A connection with the certificate of `caller`.
    pub fn client(&self, authority: &Authority, caller: Option<&str>) -> PeerClient<Channel> {
        let tls = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(authority.0.pem()))
            .domain_name(self.agent.name());
        let tls = match caller.map(|host| authority.of(host)) {
            Some((certificate, key)) => tls.identity(Identity::from_pem(certificate, key)),
            None => tls,
        };
        let address = Address::from_shared(format!("https://127.0.0.1:{}", self.port)).unwrap();
        PeerClient::new(address.tls_config(tls).unwrap().connect_lazy())
    }
}
