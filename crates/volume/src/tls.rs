//! The hosts and their proofs of identity: `hosts.json` and `tls/`, which agents use as well.
//!
//! Both are read again when they have changed ([`Hosts::renew`]): all clones of a [`Hosts`] then have the new
//! content, and connections stay.

use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use rustix::net::sockopt;
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

/// Content of the files.
struct Known {
    entries: Vec<Entry>,
    connector: TlsConnector,
    acceptor: TlsAcceptor,
}

/// State of the files when they were read: times of modification, lengths and inode numbers.
type Stamp = [Option<(i64, i64, u64, u64)>; 4];

/// A daemon's knowledge of the other hosts.
#[derive(Clone)]
pub struct Hosts(Arc<Shared>);

struct Shared {
    folder: PathBuf,
    known: RwLock<Arc<Known>>,
    stamp: Mutex<Stamp>,
}

/// Limit for the other kernel to take a connection. A host without power answers nothing, and Linux asks it again after 1, 3, 7 and 15 s:
/// one that is back meanwhile hears of a caller sooner by a new connection.
const CONNECT: Duration = Duration::from_secs(3);

/// An idle connection is looked after that often, and ends when the other kernel has not answered so many times. One that was started again
/// answers the first time that it knows of no such connection.
const LOOK: Duration = Duration::from_secs(2);
const LOOKS: u32 = 30;

/// Has the kernel find out that the other host has lost its power: it says nothing when that happens.
fn look_after(stream: &TcpStream) -> std::io::Result<()> {
    sockopt::set_tcp_keepidle(stream, LOOK)?;
    sockopt::set_tcp_keepintvl(stream, LOOK)?;
    sockopt::set_tcp_keepcnt(stream, LOOKS)?;
    Ok(sockopt::set_socket_keepalive(stream, true)?)
}

fn stamp(folder: &Path) -> Stamp {
    ["hosts.json", "tls/ca.pem", "tls/cert.pem", "tls/key.pem"].map(|name| {
        let metadata = std::fs::metadata(folder.join(name)).ok()?;
        Some((
            metadata.mtime(),
            metadata.mtime_nsec(),
            metadata.len(),
            metadata.ino(),
        ))
    })
}

impl Known {
    fn load(folder: &Path) -> anyhow::Result<Self> {
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

    fn names(&self) -> String {
        let names: Vec<_> = self.entries.iter().map(|entry| entry.name.as_str()).collect();
        names.join(", ")
    }
}

impl Hosts {
    /// Reads `hosts.json` and `tls/` in `folder`.
    pub fn load(folder: &Path) -> anyhow::Result<Self> {
        let stamp = stamp(folder);
        let known = Known::load(folder)?;
        Ok(Self(Arc::new(Shared {
            folder: folder.to_owned(),
            known: RwLock::new(Arc::new(known)),
            stamp: Mutex::new(stamp),
        })))
    }

    fn known(&self) -> Arc<Known> {
        self.0.known.read().expect("no panic under this lock").clone()
    }

    /// Reads the files again if they have changed, or in any case. Returns whether it has read them. On an
    /// error the old content stays, and the next change is awaited. `own`: the host that must be in the list.
    pub fn renew(&self, own: &str, in_any_case: bool) -> anyhow::Result<bool> {
        let mut read = self.0.stamp.lock().expect("no panic under this lock");
        let now = stamp(&self.0.folder);
        if *read == now && !in_any_case {
            return Ok(false);
        }
        *read = now;
        let known = Known::load(&self.0.folder)?;
        ensure!(
            known.entries.iter().any(|entry| entry.name == own),
            "this host, {own}, is not in {}, which has {}",
            self.0.folder.join("hosts.json").display(),
            known.names()
        );
        *self.0.known.write().expect("no panic under this lock") = Arc::new(known);
        Ok(true)
    }

    /// The names of all hosts.
    pub fn names(&self) -> String {
        self.known().names()
    }

    /// The address of this host.
    pub fn address(&self, host: &str) -> anyhow::Result<IpAddr> {
        let known = self.known();
        let Some(entry) = known.entries.iter().find(|entry| entry.name == host) else {
            bail!("there is no host {host}; known hosts: {}", known.names());
        };
        Ok(entry.address)
    }

    /// The hosts among these whose network the list does not trust.
    pub fn untrusted<'a>(&self, hosts: &[&'a str]) -> Vec<&'a str> {
        let known = self.known();
        let is_trusted = |host: &str| {
            let entry = known.entries.iter().find(|entry| entry.name == host);
            entry.is_some_and(|entry| entry.trusted_network)
        };
        hosts.iter().copied().filter(|host| !is_trusted(host)).collect()
    }

    /// Calls this host, which proves its identity.
    pub async fn connect(&self, host: &str, port: u16) -> anyhow::Result<client::TlsStream<TcpStream>> {
        let connecting = TcpStream::connect((self.address(host)?, port));
        let connected = tokio::time::timeout(CONNECT, connecting).await;
        let stream =
            connected.with_context(|| format!("it takes no connection within {} s", CONNECT.as_secs()))??;
        stream.set_nodelay(true)?;
        look_after(&stream)?;
        let name = ServerName::try_from(host.to_owned())?;
        Ok(self.known().connector.connect(name, stream).await?)
    }

    /// Accepts a call of a caller with a certificate of the same authority.
    pub async fn accept(&self, stream: TcpStream) -> std::io::Result<server::TlsStream<TcpStream>> {
        stream.set_nodelay(true)?;
        look_after(&stream)?;
        self.acceptor().accept(stream).await
    }

    /// Whether the caller's certificate belongs to this host.
    pub fn is_from(stream: &server::TlsStream<TcpStream>, host: &str) -> bool {
        let (_, connection) = stream.get_ref();
        let certificate = connection.peer_certificates().and_then(|chain| chain.first());
        let (Some(certificate), Ok(name)) = (certificate, ServerName::try_from(host)) else {
            return false;
        };
        let parsed = rustls::server::ParsedCertificate::try_from(certificate);
        parsed.is_ok_and(|parsed| rustls::client::verify_server_name(&parsed, &name).is_ok())
    }

    /// The host of the list whose certificate the caller has. `None` for a client, which has a certificate of
    /// the same authority.
    pub fn caller(&self, stream: &server::TlsStream<TcpStream>) -> Option<String> {
        let known = self.known();
        let mut names = known.entries.iter().map(|entry| &entry.name);
        names.find(|name| Self::is_from(stream, name)).cloned()
    }

    /// The acceptor for another protocol whose clients prove their identity in the same way.
    pub fn acceptor(&self) -> TlsAcceptor {
        self.known().acceptor.clone()
    }
}

#[cfg(test)]
mod tests {
    use verbatim_certificates::Authority;

    use super::*;

    fn write(folder: &Path, list: &str) {
        // Replaced by a rename, since others read the file.
        std::fs::write(folder.join("new"), list).expect("written");
        std::fs::rename(folder.join("new"), folder.join("hosts.json")).expect("renamed");
    }

    #[test]
    fn a_list_that_has_changed_is_read_again_and_a_broken_one_is_not_taken() {
        let folder = tempfile::tempdir().expect("a folder");
        let authority = Authority::new("test").expect("an authority");
        let identity = authority
            .issue("a", "127.0.0.1".parse().expect("an address"))
            .expect("a certificate");
        std::fs::create_dir(folder.path().join("tls")).expect("a folder");
        for (name, text) in [
            ("ca.pem", authority.certificate()),
            ("cert.pem", identity.certificate.as_str()),
            ("key.pem", identity.key.as_str()),
        ] {
            std::fs::write(folder.path().join("tls").join(name), text).expect("written");
        }
        let one = r#"{"name": "a", "address": "127.0.0.1"}"#;
        write(folder.path(), &format!("[{one}]"));
        let hosts = Hosts::load(folder.path()).expect("a list");
        let (other, renew) = (hosts.clone(), || hosts.renew("a", false));
        assert!(!renew().expect("it can be read"), "nothing has changed");
        for broken in ["[", r#"[{"name": "b", "address": "127.0.0.2"}]"#] {
            write(folder.path(), broken);
            assert!(renew().is_err(), "{broken}");
            assert!(!renew().expect("it is said once"));
            assert!(other.address("a").is_ok(), "what was known stays");
        }
        write(
            folder.path(),
            &format!(r#"[{one}, {{"name": "c", "address": "127.0.0.3"}}]"#),
        );
        assert!(other.address("c").is_err());
        assert!(renew().expect("a list"));
        assert!(other.address("c").is_ok(), "all know it");
        std::fs::write(folder.path().join("tls/key.pem"), "no key").expect("written");
        assert!(renew().is_err());
        assert_eq!(other.names(), "a, c");
    }
}
