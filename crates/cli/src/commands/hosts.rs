//! `verbatim hosts`: what agents on several machines need to know of each other.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use verbatim_certificates::Authority;

use crate::args::HostsArguments;

/// The name in the authority's certificate.
const AUTHORITY: &str = "verbatim";

/// Files of the folder.
const CERTIFICATE: &str = "ca.pem";
const KEY: &str = "ca.key";
const LIST: &str = "hosts.json";
const CLIENTS: &str = "clients";

/// An entry of `hosts.json`.
#[derive(Clone, Serialize, Deserialize)]
struct Entry {
    name: String,
    address: IpAddr,
    #[serde(default)]
    trusted_network: bool,
}

/// Makes the folder, or adds hosts to it.
pub fn run(arguments: &HostsArguments) -> anyhow::Result<ExitCode> {
    let folder = &arguments.folder;
    fill(folder, &arguments.hosts, arguments.trusted_network)
        .with_context(|| format!("cannot fill {}", folder.display()))?;
    for client in &arguments.client {
        let made =
            add_client(folder, client).with_context(|| format!("cannot make a certificate for {client}"))?;
        eprintln!(
            "{}: for a client of volumes that is not a host (nbds://…?tls-certificates=FOLDER)",
            made.display()
        );
    }
    if arguments.hosts.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!(
        "{}: copy the folder of each host to /etc/verbatim there, and start its agent with --config-dir /etc/verbatim",
        folder.display()
    );
    Ok(ExitCode::SUCCESS)
}

fn fill(folder: &Path, hosts: &[(String, IpAddr)], trusted_network: bool) -> anyhow::Result<()> {
    make_folder(folder)?;
    let authority = authority(folder)?;
    let mut entries = known(folder)?;
    for (name, address) in hosts {
        if let Some(entry) = entries.iter().find(|entry| entry.name == *name) {
            if entry.address != *address {
                bail!("{name} is there already, with the address {}", entry.address);
            }
            continue;
        }
        if folder.join(CLIENTS).join(name).exists() {
            bail!("{name} is the name of a client, whose certificate would be a host's; choose another name");
        }
        entries.push(Entry {
            name: name.clone(),
            address: *address,
            trusted_network,
        });
    }
    let addresses: BTreeSet<_> = entries.iter().map(|entry| entry.address).collect();
    if addresses.len() < entries.len() {
        bail!("two hosts have one address");
    }
    let list = serde_json::to_vec_pretty(&entries)?;
    for Entry { name, address, .. } in &entries {
        let tls = folder.join(name).join("tls");
        make_folder(&tls)?;
        if !tls.join("key.pem").exists() {
            let identity = authority.issue(name, *address)?;
            write(&tls.join("ca.pem"), authority.certificate().as_bytes())?;
            write(&tls.join("cert.pem"), identity.certificate.as_bytes())?;
            // Written last: without this file all three are made anew.
            write(&tls.join("key.pem"), identity.key.as_bytes())?;
        }
        write(&folder.join(name).join(LIST), &list)?;
    }
    write(&folder.join(LIST), &list)
}

/// Makes a certificate for a client of volumes, unless there is one. The files have the names that libnbd and
/// QEMU look for.
fn add_client(folder: &Path, name: &str) -> anyhow::Result<PathBuf> {
    if known(folder)?.iter().any(|entry| entry.name == name) {
        bail!("there is a host of that name, and the certificate would be that host's; choose another name");
    }
    let authority = authority(folder)?;
    let own = folder.join(CLIENTS).join(name);
    make_folder(&own)?;
    if !own.join("client-key.pem").exists() {
        let identity = authority.issue_client(name)?;
        write(&own.join("ca-cert.pem"), authority.certificate().as_bytes())?;
        write(&own.join("client-cert.pem"), identity.certificate.as_bytes())?;
        // The last: without it they are made anew.
        write(&own.join("client-key.pem"), identity.key.as_bytes())?;
    }
    Ok(own)
}

/// The authority of the folder: the one that it has, or else a new one.
fn authority(folder: &Path) -> anyhow::Result<Authority> {
    let (certificate, key) = (folder.join(CERTIFICATE), folder.join(KEY));
    match fs::read_to_string(&key) {
        Ok(text) => {
            let certificate = fs::read_to_string(&certificate)
                .with_context(|| format!("cannot read {}", certificate.display()))?;
            Authority::open(AUTHORITY, certificate, &text)
                .with_context(|| format!("{} is no key of an authority", key.display()))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let authority = Authority::new(AUTHORITY)?;
            write(&certificate, authority.certificate().as_bytes())?;
            write(&key, authority.key().as_bytes())?;
            Ok(authority)
        }
        Err(error) => Err(error).with_context(|| format!("cannot read {}", key.display())),
    }
}

fn known(folder: &Path) -> anyhow::Result<Vec<Entry>> {
    let path = folder.join(LIST);
    match fs::read(&path) {
        Ok(text) => serde_json::from_slice(&text).with_context(|| format!("{} is damaged", path.display())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

fn make_folder(path: &Path) -> anyhow::Result<()> {
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.with_context(|| format!("cannot make {}", path.display()))
}

/// Writes a file that only its owner reads, in one piece or not at all.
fn write(path: &Path, content: &[u8]) -> anyhow::Result<()> {
    let fresh = path.with_extension("new");
    let put = || {
        let mut file = fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&fresh)?;
        file.write_all(content)?;
        file.sync_all()?;
        fs::rename(&fresh, path)
    };
    put().with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(names: &[&str]) -> Vec<(String, IpAddr)> {
        let host = |name: &&str| {
            (
                (*name).to_owned(),
                format!("10.0.0.{}", name.len()).parse().unwrap(),
            )
        };
        names.iter().map(host).collect()
    }

    #[test]
    fn hosts_that_come_later_are_of_the_same_authority() {
        let folder = tempfile::tempdir().unwrap();
        let read = |path: &str| fs::read_to_string(folder.path().join(path)).unwrap();
        fill(folder.path(), &hosts(&["a", "bb"]), false).unwrap();
        let (first, key) = (read("ca.pem"), read("a/tls/key.pem"));
        fill(folder.path(), &hosts(&["a", "ccc"]), true).unwrap();
        assert_eq!(
            (&read("ca.pem"), &read("a/tls/key.pem")),
            (&first, &key),
            "what is there stays"
        );
        for host in ["a", "bb", "ccc"] {
            assert_eq!(read(&format!("{host}/tls/ca.pem")), first);
            assert_eq!(read(&format!("{host}/hosts.json")), read("hosts.json"));
        }
        let entries = known(folder.path()).unwrap();
        let trusted: Vec<_> = entries.iter().map(|entry| entry.trusted_network).collect();
        assert_eq!(trusted, [false, false, true]);
    }

    #[test]
    fn a_client_is_no_host_and_becomes_none() {
        let folder = tempfile::tempdir().unwrap();
        fill(folder.path(), &hosts(&["a"]), false).unwrap();
        let made = add_client(folder.path(), "laptop").unwrap();
        let key = || fs::read(made.join("client-key.pem")).unwrap();
        let first = key();
        add_client(folder.path(), "laptop").unwrap();
        assert_eq!(key(), first, "what is there stays");
        assert!(made.join("ca-cert.pem").exists() && made.join("client-cert.pem").exists());
        assert!(add_client(folder.path(), "a").is_err());
        assert!(fill(folder.path(), &hosts(&["laptop"]), false).is_err());
        assert_eq!(known(folder.path()).unwrap().len(), 1);
    }

    #[test]
    fn a_host_has_one_address_of_its_own() {
        let folder = tempfile::tempdir().unwrap();
        fill(folder.path(), &hosts(&["a"]), false).unwrap();
        let other = [("a".to_owned(), "10.0.0.9".parse().unwrap())];
        assert!(
            format!("{:#}", fill(folder.path(), &other, false).unwrap_err())
                .contains("with the address 10.0.0.1")
        );
        assert!(
            fill(folder.path(), &hosts(&["b"]), false).is_err(),
            "10.0.0.1 is a's"
        );
    }
}
