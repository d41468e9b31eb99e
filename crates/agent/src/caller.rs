//! Which host a request comes from.
//!
//! TLS lets in whoever holds a certificate of our authority. What a host may ask for depends on which one it is, and that is
//! what its certificate says, not what its messages do: a host moves only instances of its own, and touches only connections
//! that lead to it.

use std::collections::HashSet;

use tonic::transport::CertificateDer;
use tonic::transport::server::UdsConnectInfo;
use tonic::{Request, Status};
use verbatim_channel::Endpoint;

use crate::directory::{Directory, HostEntry};
use crate::gids::Gid;
use crate::proto::{PartnerConnection, links_request};

/// The host whose certificate the caller has presented.
#[allow(clippy::result_large_err, reason = "tonic's own type")]
pub fn identify<'d, T>(request: &Request<T>, directory: &'d Directory) -> Result<&'d HostEntry, Status> {
    let certificates = request
        .peer_certs()
        .ok_or_else(|| Status::unauthenticated("the connection has no certificate"))?;
    let own = certificates
        .first()
        .ok_or_else(|| Status::unauthenticated("the connection has no certificate"))?;
    of_certificate(own, directory)
}

#[allow(clippy::result_large_err, reason = "tonic's own type")]
fn of_certificate<'d>(
    certificate: &CertificateDer<'_>,
    directory: &'d Directory,
) -> Result<&'d HostEntry, Status> {
    let certificate = webpki::EndEntityCert::try_from(certificate)
        .map_err(|error| Status::unauthenticated(format!("the certificate cannot be read: {error}")))?;
    let names: Vec<_> = certificate.valid_dns_names().collect();
    names.iter().find_map(|name| directory.host(name)).ok_or_else(|| {
        Status::permission_denied(format!(
            "the certificate is for {}, and the hosts known here are {}; add it to hosts.json",
            names.join(", "),
            directory.names()
        ))
    })
}

/// Lets a command line in that root has started, by the kernel's word: the socket's mode alone does not bind who was given a
/// descriptor of it.
#[allow(clippy::result_large_err, reason = "tonic's own type")]
pub fn may_command(request: Request<()>) -> Result<Request<()>, Status> {
    let connection = request.extensions().get::<UdsConnectInfo>();
    let credentials = connection.and_then(|connection| connection.peer_cred);
    match credentials.map(|credentials| credentials.uid()) {
        Some(uid) if uid == 0 || uid == rustix::process::geteuid().as_raw() => Ok(request),
        Some(uid) => Err(Status::permission_denied(format!(
            "user {uid} may not command this agent, only root"
        ))),
        None => Err(Status::unauthenticated(
            "the connection does not say who has made it",
        )),
    }
}

/// It says that it is the source of the session: is it?
#[allow(clippy::result_large_err, reason = "tonic's own type")]
pub fn is_source(caller: &HostEntry, source: &str) -> Result<(), Status> {
    match caller.name == source {
        true => Ok(()),
        false => Err(Status::permission_denied(format!(
            "{} asks in the name of {source}",
            caller.name
        ))),
    }
}

/// The moving ends of connections.
#[allow(clippy::result_large_err, reason = "tonic's own type")]
pub fn moving_ends(connections: &[PartnerConnection]) -> Result<Vec<Endpoint>, Status> {
    ends(connections.iter().map(|connection| connection.moving.as_ref()))
}

/// The askers' ends of links.
#[allow(clippy::result_large_err, reason = "tonic's own type")]
pub fn asking_ends(links: &[links_request::Link]) -> Result<Vec<Endpoint>, Status> {
    ends(links.iter().map(|link| link.asker.as_ref()))
}

/// Ends as they are in a message; one that is missing is an error.
#[allow(clippy::result_large_err, reason = "tonic's own type")]
pub fn ends<'e>(
    ends: impl Iterator<Item = Option<&'e crate::proto::Endpoint>>,
) -> Result<Vec<Endpoint>, Status> {
    let ends = ends.map(|end| Endpoint::try_from(end.cloned().unwrap_or_default()));
    let ends: anyhow::Result<_> = ends.collect();
    ends.map_err(|error| Status::invalid_argument(error.to_string()))
}

/// Do all of these ends lie on the caller's host, whose RNIC has these GIDs?
#[allow(clippy::result_large_err, reason = "tonic's own type")]
pub fn owns(caller: &HostEntry, gids: &HashSet<Gid>, ends: &[Endpoint]) -> Result<(), Status> {
    match ends.iter().all(|end| gids.contains(&end.gid)) {
        true => Ok(()),
        false => Err(Status::permission_denied(format!(
            "{} speaks of queue pairs that are not its own",
            caller.name
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto;
    use rcgen::{CertificateParams, KeyPair};

    fn directory() -> Directory {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hosts.json");
        let hosts = r#"[{"name": "a", "address": "10.0.0.1"}, {"name": "b", "address": "10.0.0.2"}]"#;
        std::fs::write(&path, hosts).unwrap();
        Directory::load(&path, "a").unwrap()
    }

    fn certificate(names: &[&str]) -> CertificateDer<'static> {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let params = CertificateParams::new(names).unwrap();
        let key = KeyPair::generate().unwrap();
        params.self_signed(&key).unwrap().der().clone()
    }

    #[test]
    fn a_certificate_names_its_host() {
        let directory = directory();
        let caller = of_certificate(&certificate(&["b", "10.0.0.2"]), &directory).unwrap();
        assert_eq!(caller.name, "b");
        let error = of_certificate(&certificate(&["c"]), &directory).unwrap_err();
        assert!(error.message().contains("for c") && error.message().contains("a, b"));
        let garbage = CertificateDer::from(vec![1, 2, 3]);
        assert!(of_certificate(&garbage, &directory).is_err());
    }

    #[test]
    fn a_request_without_a_certificate_comes_from_nobody() {
        let error = identify(&Request::new(()), &directory()).unwrap_err();
        assert_eq!(error.code(), tonic::Code::Unauthenticated);
    }

    #[test]
    fn a_host_speaks_for_itself_and_its_connections_only() {
        let directory = directory();
        let (a, b) = (directory.host("a").unwrap(), directory.host("b").unwrap());
        assert!(is_source(a, "a").is_ok());
        assert!(is_source(b, "a").is_err());
        let at = |host: &HostEntry| PartnerConnection {
            connection: 0,
            moving: Some(proto::Endpoint {
                gid: host.gid().to_vec(),
                qpn: 17,
            }),
            partner: None,
            late: false,
        };
        let gids = HashSet::from([b.gid(), [7; 16]]);
        let owns = |connections: &[PartnerConnection]| owns(b, &gids, &moving_ends(connections)?);
        assert!(owns(&[]).is_ok());
        assert!(owns(&[at(b), at(b)]).is_ok());
        assert!(owns(&[at(b), at(a)]).is_err());
        let nowhere = PartnerConnection {
            moving: None,
            ..at(b)
        };
        assert!(owns(&[nowhere]).is_err());
        let by_another_gid = |gid: u8| PartnerConnection {
            moving: Some(proto::Endpoint {
                gid: vec![gid; 16],
                qpn: 17,
            }),
            ..at(b)
        };
        assert!(owns(&[by_another_gid(7)]).is_ok());
        assert!(owns(&[by_another_gid(8)]).is_err());
    }
}
