//! Who the hosts are, and how they prove it: `hosts.json` and `tls/`, which agents use, too.

use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use serde::Deserialize;
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector, client, server};

/// An entry of `hosts.json`.
#[derive(Debug, Clone, Deserialize)]
struct Entry {
    name: String,
    address: IpAddr,
    #[serde(default)]
    trusted_network: bool,
}

/// What a daemon has of the others.
#[derive(Clone)]
pub struct Hosts {
    entries: Vec<Entry>,
    connector: TlsConnector,
    acceptor: TlsAcceptor,
}

impl Hosts {
    /// Reads `hosts.json` and `tls/` in `folder`.
    pub fn load(folder: &Path) -> anyhow::Result<Self> {
        let list = folder.join("hosts.json");
        let text = std::fs::read(&list).with_context(|| format!("cannot read {}", list.display()))?;
        let entries =
            serde_json::from_slice(&text).with_context(|| format!("{} is damaged", list.display()))?;
        let path = |name: &str| folder.join("tls").join(name);
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_file_iter(path("ca.pem")).context("cannot read ca.pem")? {
            roots.add(certificate?)?;
        }
        let roots = Arc::new(roots);
        let chain: Vec<_> = CertificateDer::pem_file_iter(path("cert.pem"))
            .context("cannot read cert.pem")?
            .collect::<Result<_, _>>()?;
        let key = PrivateKeyDer::from_pem_file(path("key.pem")).context("cannot read key.pem")?;
        let provider = verbatim_tls::provider();
        let client = ClientConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots.clone())
            .with_client_auth_cert(chain.clone(), key.clone_key())?;
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider.clone()).build()?;
        let server = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key)?;
        Ok(Self {
            entries,
            connector: Arc::new(client).into(),
            acceptor: Arc::new(server).into(),
        })
    }

    /// The address of that host.
    pub fn address(&self, host: &str) -> anyhow::Result<IpAddr> {
        let Some(entry) = self.entries.iter().find(|entry| entry.name == host) else {
            let names: Vec<_> = self.entries.iter().map(|entry| entry.name.as_str()).collect();
            bail!("there is no host {host}; known hosts: {}", names.join(", "));
        };
        Ok(entry.address)
    }

    /// Those of these hosts whose network the list does not trust.
    pub fn untrusted<'a>(&self, hosts: &[&'a str]) -> Vec<&'a str> {
        let is_trusted = |host: &str| {
            let entry = self.entries.iter().find(|entry| entry.name == host);
            entry.is_some_and(|entry| entry.trusted_network)
        };
        hosts.iter().copied().filter(|host| !is_trusted(host)).collect()
    }

    /// Calls that host, which proves that it is the one.
    pub async fn connect(&self, host: &str, port: u16) -> anyhow::Result<client::TlsStream<TcpStream>> {
        let stream = TcpStream::connect((self.address(host)?, port)).await?;
        stream.set_nodelay(true)?;
        let name = ServerName::try_from(host.to_owned())?;
        Ok(self.connector.connect(name, stream).await?)
    }

    /// Takes a call of a host of the same authority.
    pub async fn accept(&self, stream: TcpStream) -> std::io::Result<server::TlsStream<TcpStream>> {
        stream.set_nodelay(true)?;
        self.acceptor.accept(stream).await
    }

    /// Whether the caller's certificate is that of that host.
    pub fn is_from(stream: &server::TlsStream<TcpStream>, host: &str) -> bool {
        let (_, connection) = stream.get_ref();
        let certificate = connection.peer_certificates().and_then(|chain| chain.first());
        let (Some(certificate), Ok(name)) = (certificate, ServerName::try_from(host)) else {
            return false;
        };
        let parsed = rustls::server::ParsedCertificate::try_from(certificate);
        parsed.is_ok_and(|parsed| rustls::client::verify_server_name(&parsed, &name).is_ok())
    }

    /// For clients of another protocol that prove themselves in the same way.
    pub fn acceptor(&self) -> TlsAcceptor {
        self.acceptor.clone()
    }
}
