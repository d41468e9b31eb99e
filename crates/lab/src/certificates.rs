//! The lab's certificate authority. Its key lives only as long as the certificates are being made.

use crate::error::{Error, Result};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};
use std::net::Ipv4Addr;

/// Signs the hosts' certificates.
pub(crate) struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

/// What a host needs to prove itself to the others, in PEM.
pub(crate) struct Identity {
    pub certificate: String,
    pub key: String,
}

impl Authority {
    /// A new authority for lab `name`.
    pub fn new(name: &str) -> Result<Self> {
        let subject = format!("verbatim lab {name}");
        let make = || {
            let mut params = CertificateParams::new(Vec::new())?;
            params
                .distinguished_name
                .push(DnType::CommonName, subject.as_str());
            params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
            params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
            CertifiedIssuer::self_signed(params, KeyPair::generate()?)
        };
        let issuer = make().map_err(|source| Error::Certificate {
            name: subject.clone(),
            source,
        })?;
        Ok(Self { issuer })
    }

    /// The authority's own certificate, in PEM.
    pub fn certificate(&self) -> String {
        self.issuer.pem()
    }

    /// A certificate for a host, good for both ends of a connection: agents call and are called.
    pub fn issue(&self, host: &str, address: Ipv4Addr) -> Result<Identity> {
        let make = || {
            let mut params = CertificateParams::new(vec![host.to_owned(), address.to_string()])?;
            params.distinguished_name.push(DnType::CommonName, host);
            params.use_authority_key_identifier_extension = true;
            params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
            params.extended_key_usages = vec![
                ExtendedKeyUsagePurpose::ServerAuth,
                ExtendedKeyUsagePurpose::ClientAuth,
            ];
            let key = KeyPair::generate()?;
            let certificate = params.signed_by(&key, &self.issuer)?;
            Ok(Identity {
                certificate: certificate.pem(),
                key: key.serialize_pem(),
            })
        };
        make().map_err(|source| Error::Certificate {
            name: host.to_owned(),
            source,
        })
    }
}
