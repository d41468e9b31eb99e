//! The certificate authority of a cluster of agents: a lab's, whose key is forgotten when the certificates are made, or an operator's,
//! whose key is kept for the hosts that come later.

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use std::net::IpAddr;

pub use rcgen::Error;

/// Signs the hosts' certificates.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: String,
}

/// What a host needs to prove itself to the others, in PEM.
pub struct Identity {
    /// Its certificate.
    pub certificate: String,
    /// The key of that.
    pub key: String,
}

impl Authority {
    /// A new one with this name.
    pub fn new(name: &str) -> Result<Self, Error> {
        let (params, key) = (parameters(name)?, KeyPair::generate()?);
        Ok(Self {
            certificate: params.self_signed(&key)?.pem(),
            issuer: Issuer::new(params, key),
        })
    }

    /// The one that was made with this name, by what was kept of it: [`Authority::certificate`] and [`Authority::key`].
    pub fn open(name: &str, certificate: String, key: &str) -> Result<Self, Error> {
        Ok(Self {
            issuer: Issuer::new(parameters(name)?, KeyPair::from_pem(key)?),
            certificate,
        })
    }

    /// Its own certificate, in PEM.
    pub fn certificate(&self) -> &str {
        &self.certificate
    }

    /// Its key, in PEM. Whoever has it can make himself a host.
    pub fn key(&self) -> String {
        self.issuer.key().serialize_pem()
    }

    /// A certificate for a client of volumes over the network that is not a host. It is valid only for
    /// clients of TLS.
    pub fn issue_client(&self, name: &str) -> Result<Identity, Error> {
        self.sign(
            name,
            vec![name.to_owned()],
            vec![ExtendedKeyUsagePurpose::ClientAuth],
        )
    }

    /// A certificate for a host, good for both ends of a connection: agents call and are called.
    pub fn issue(&self, host: &str, address: IpAddr) -> Result<Identity, Error> {
        let names = vec![host.to_owned(), address.to_string()];
        let usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        self.sign(host, names, usages)
    }

    fn sign(
        &self,
        name: &str,
        names: Vec<String>,
        usages: Vec<ExtendedKeyUsagePurpose>,
    ) -> Result<Identity, Error> {
        let mut params = CertificateParams::new(names)?;
        params.distinguished_name.push(DnType::CommonName, name);
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = usages;
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?;
        Ok(Identity {
            certificate: certificate.pem(),
            key: key.serialize_pem(),
        })
    }
}

fn parameters(name: &str) -> Result<CertificateParams, Error> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    Ok(params)
}
