//! A client of NBD by TLS, as far as the negotiation.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

/// Limit for a daemon's answer.
const SILENCE: Duration = Duration::from_secs(30);

pub type Stream = StreamOwned<ClientConnection, TcpStream>;

/// Connects to `address` of `host`, with the certificate in the folder `tls`.
pub fn connect(address: &str, host: &'static str, tls: &Path) -> std::io::Result<Stream> {
    let mut roots = RootCertStore::empty();
    let authority = CertificateDer::from_pem_file(tls.join("ca.pem")).expect("it is there");
    roots.add(authority).expect("it is one");
    let certificate = CertificateDer::from_pem_file(tls.join("cert.pem")).expect("it is there");
    let key = PrivateKeyDer::from_pem_file(tls.join("key.pem")).expect("it is there");
    let config = ClientConfig::builder_with_provider(verbatim_tls::provider())
        .with_safe_default_protocol_versions()
        .expect("there are some")
        .with_root_certificates(roots)
        .with_client_auth_cert(vec![certificate], key)
        .expect("they belong together");
    let mut socket = TcpStream::connect(address)?;
    socket.set_read_timeout(Some(SILENCE))?;
    let mut hello = [0; 18];
    socket.read_exact(&mut hello)?;
    socket.write_all(&3u32.to_be_bytes())?;
    socket.write_all(&option(5, &[]))?;
    let (kind, _) = reply(&mut socket)?;
    assert_eq!(kind, 1, "STARTTLS is acknowledged");
    let name = ServerName::try_from(host).expect("a name");
    let connection = ClientConnection::new(Arc::new(config), name).expect("a connection");
    Ok(StreamOwned::new(connection, socket))
}

/// An option of the negotiation.
pub fn option(number: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = b"IHAVEOPT".to_vec();
    bytes.extend(number.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

/// The kind of a reply to an option, and its data.
pub fn reply(stream: &mut impl Read) -> std::io::Result<(u32, Vec<u8>)> {
    let mut head = [0; 20];
    stream.read_exact(&mut head)?;
    let number = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().expect("four bytes"));
    let mut data = vec![0; number(16) as usize];
    stream.read_exact(&mut data)?;
    Ok((number(12), data))
}
