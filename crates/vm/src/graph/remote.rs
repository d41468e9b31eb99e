//! Disks, and parts of them, that other processes or hosts serve to QEMU.
//!
//! Each leaf of the block graph is a file or a device of the host, or has servers, or is refused: the next
//! host compares all of them with its own.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::nodes::{Node, Nodes};

/// Drivers of nodes without content.
const EMPTY: &[&str] = &["null-co", "null-aio"];

/// Drivers of nodes with servers.
const SERVED: &[&str] = &[
    "nbd", "iscsi", "ssh", "http", "https", "ftp", "ftps", "gluster", "nfs", "rbd",
];

/// A node with a content that others serve.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remote {
    /// The node, for display.
    pub disk: String,
    /// All its servers. Empty: the host's own configuration names them (Ceph).
    pub servers: Vec<Server>,
}

/// The place of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Server {
    /// A Unix socket, by its absolute path.
    Socket(PathBuf),
    /// A host, by its name or its address.
    Host(String),
}

/// All of them, except those of which each server is our own (`is_own`: whether a socket is). The error names
/// nodes that no other host can compare.
pub(super) fn of(nodes: &Nodes, is_own: impl Fn(&Path) -> bool) -> Result<Vec<Remote>, Vec<String>> {
    let (mut found, mut refused) = (Vec::new(), Vec::new());
    for node in nodes.all().filter(|node| is_leaf(node)) {
        match servers(node) {
            Ok(servers) => {
                let of_us = |server: &Server| matches!(server, Server::Socket(path) if is_own(path));
                if servers.is_empty() || !servers.iter().all(of_us) {
                    let disk = node.title();
                    found.push(Remote { disk, servers });
                }
            }
            Err(why) => refused.push(format!("the disk {} cannot be compared: {why}", node.title())),
        }
    }
    match refused.is_empty() {
        true => Ok(found),
        false => Err(refused),
    }
}

/// Whether a node has its content from elsewhere than from other nodes and from files.
fn is_leaf(node: &Node) -> bool {
    let is_file = node.path().is_some();
    // With `rw` it has a child for what the guest writes.
    let has_own = node.children.is_empty() || node.driver == "vvfat";
    has_own && !is_file && !EMPTY.contains(&node.driver.as_str())
}

fn servers(node: &Node) -> Result<Vec<Server>, String> {
    let driver = node.driver.as_str();
    if driver == "vvfat" {
        return Err("each QEMU makes its file system anew from a folder (`fat:`), and the guest knows the old one; make an image \
                    in its place"
            .to_owned());
    }
    if !SERVED.contains(&driver) {
        return Err(format!(
            "another host cannot tell what the driver {driver} has there"
        ));
    }
    let named = match (node.options(), node.filename.starts_with("json:")) {
        (Some(options), _) => in_options(driver, &options),
        // Cut off by QEMU.
        (None, true) => None,
        (None, false) => in_name(driver, &node.filename),
    };
    let unknown = "QEMU does not say at which socket or host its server is";
    let servers = named.ok_or(unknown)?;
    if servers.is_empty() && driver != "rbd" {
        return Err(unknown.to_owned());
    }
    for server in &servers {
        if let Server::Socket(path) = server
            && !path.is_absolute()
        {
            return Err(format!(
                "the path of its socket is not absolute ({})",
                path.display()
            ));
        }
    }
    Ok(servers)
}

/// The servers in a name (`nbd://a:10809/disk`). `None`: they are not known.
fn in_name(driver: &str, name: &str) -> Option<Vec<Server>> {
    if name.starts_with("nbd+unix:") || name.starts_with("gluster+unix:") {
        // The name of an export may have such a text, too, and stands before it.
        let (_, path) = name.rsplit_once("?socket=")?;
        return Some(vec![Server::Socket(path.into())]);
    }
    match driver {
        "rbd" => monitors(name),
        _ => Some(vec![host_of(name)?]),
    }
}

/// The host in a URL.
fn host_of(url: &str) -> Option<Server> {
    let (_, rest) = url.split_once("://")?;
    let authority = rest.split(['/', '?', '#']).next()?;
    let authority = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    host(authority)
}

/// The host of `host`, `host:port`, `[address]:port` or `address:port`: QEMU writes an address of IPv6 without
/// brackets, and a port always follows it.
fn host(authority: &str) -> Option<Server> {
    let name = match authority.strip_prefix('[') {
        Some(rest) => rest.split_once(']')?.0,
        None => match authority.rsplit_once(':') {
            Some((name, port)) if port.bytes().all(|letter| letter.is_ascii_digit()) => name,
            _ => authority,
        },
    };
    (!name.is_empty()).then(|| Server::Host(name.to_owned()))
}

/// The monitors in the name of a Ceph image (`rbd:pool/image:mon_host=a\:6789`). A name may have none.
fn monitors(name: &str) -> Option<Vec<Server>> {
    // No name contains this character (QEMU takes its words from C strings).
    const COLON: &str = "\0";
    let name = name.replace("\\:", COLON);
    let hosts = name.split(':').find_map(|part| {
        part.strip_prefix("mon_host=")
            .or_else(|| part.strip_prefix("mon-host="))
    });
    let hosts = hosts.unwrap_or_default().replace(COLON, ":").replace('\\', "");
    let words = hosts.split([',', ';', ' ']).filter(|word| !word.is_empty());
    let hosts = words.map(|word| {
        // `[v2:10.0.0.1:3300/0,v1:10.0.0.1:6789/0]`
        let word = ["[v1:", "[v2:", "v1:", "v2:"]
            .iter()
            .find_map(|kind| word.strip_prefix(kind))
            .unwrap_or(word);
        let word = word.split('/').next()?;
        host(word)
    });
    hosts.collect()
}

/// The servers in the options of a node. `None`: they are not known.
fn in_options(driver: &str, options: &Map<String, Value>) -> Option<Vec<Server>> {
    let mut flat = BTreeMap::new();
    flatten("", options, &mut flat);
    // One server, or a list: `server.host`, `server.0.host`.
    let mut each: BTreeMap<&str, BTreeMap<&str, &str>> = BTreeMap::new();
    for (key, value) in &flat {
        let Some(key) = key.strip_prefix("server.") else {
            continue;
        };
        let (number, key) = match key.split_once('.') {
            Some((number, key)) => (number, key),
            None => ("", key),
        };
        each.entry(number).or_default().insert(key, value);
    }
    if !each.is_empty() {
        let servers = each
            .values()
            .map(|server| match *server.get("type").unwrap_or(&"inet") {
                "unix" => Some(Server::Socket(server.get("path")?.into())),
                "inet" | "tcp" => Some(Server::Host((*server.get("host")?).to_owned())),
                // `vsock`, a descriptor that somebody has opened.
                _ => None,
            });
        return servers.collect();
    }
    let option = |key: &str| flat.get(key).map(String::as_str);
    let by_name = || option("host").map(|name| Server::Host(name.to_owned()));
    let server = match driver {
        "rbd" => return Some(Vec::new()),
        "nbd" => option("path")
            .map(|path| Server::Socket(path.into()))
            .or_else(by_name),
        "ssh" => by_name(),
        "iscsi" => option("portal").and_then(host),
        _ => option("url").and_then(host_of),
    };
    Some(vec![server?])
}

/// The texts in options by their keys, which QEMU writes in both forms: `{"server": {"path": …}}` and
/// `{"server.path": …}`.
fn flatten(before: &str, options: &Map<String, Value>, flat: &mut BTreeMap<String, String>) {
    for (key, value) in options {
        let key = format!("{before}{key}");
        match value {
            Value::String(text) => _ = flat.insert(key, text.clone()),
            Value::Object(options) => flatten(&format!("{key}."), options, flat),
            Value::Array(list) => {
                let list = list.iter().enumerate();
                let list = list.map(|(number, value)| (number.to_string(), value.clone()));
                flatten(&format!("{key}."), &list.collect(), flat);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn nodes(named: &[(&str, &str)]) -> Nodes {
        let named: Vec<Value> = named
            .iter()
            .enumerate()
            .map(|(number, (driver, name))| json!({"node-name": format!("n{number}"), "drv": driver, "file": name}))
            .collect();
        Nodes::parse(json!(named), json!({"nodes": [], "edges": []})).unwrap()
    }

    fn found(driver: &str, name: &str) -> Result<Vec<Server>, String> {
        let remotes = of(&nodes(&[(driver, name)]), |_| false);
        match remotes {
            Ok(remotes) if remotes.is_empty() => Err("a file".to_owned()),
            Ok(remotes) => Ok(remotes[0].servers.clone()),
            Err(refused) => Err(refused[0].clone()),
        }
    }

    fn at(name: &str) -> Server {
        match name.starts_with('/') {
            true => Server::Socket(name.into()),
            false => Server::Host(name.to_owned()),
        }
    }

    /// As QEMU 7.2 answers.
    #[test]
    fn servers_are_found_in_names_and_in_options() {
        for (driver, name, server) in [
            ("nbd", "nbd+unix:///exp?socket=/run/d.sock", "/run/d.sock"),
            ("nbd", "nbd+unix://?socket=/run/d.sock", "/run/d.sock"),
            ("nbd", "nbd+unix:///a?socket=/b?socket=/run/d.sock", "/run/d.sock"),
            ("nbd", "nbd://localhost:10809", "localhost"),
            ("nbd", "nbd://::1:10809/disk", "::1"),
            ("nbd", "nbd://[fd00::1]:10809/disk", "fd00::1"),
            (
                "nbd",
                r#"json:{"driver":"nbd","server.type":"unix","server.path":"/s","tls-creds":"t"}"#,
                "/s",
            ),
            (
                "nbd",
                r#"json:{"driver":"nbd","server":{"type":"inet","host":"10.0.0.1","port":"1"}}"#,
                "10.0.0.1",
            ),
            ("nbd", r#"json:{"driver":"nbd","path":"/s"}"#, "/s"),
            ("nbd", r#"json:{"driver":"nbd","host":"a","port":"1"}"#, "a"),
            ("iscsi", "iscsi://user%pw@10.0.0.1:3260/iqn.a/0", "10.0.0.1"),
            (
                "iscsi",
                r#"json:{"driver":"iscsi","portal":"[fd00::2]:3260","target":"iqn.a"}"#,
                "fd00::2",
            ),
            ("ssh", "ssh://me@store:22/srv/disk", "store"),
            (
                "ssh",
                r#"json:{"driver":"ssh","path":"/srv/d","server.host":"store","server.port":"22"}"#,
                "store",
            ),
            ("https", "https://a.example/d.img", "a.example"),
            ("http", r#"json:{"driver":"http","url":"http://u:p@a:81/d"}"#, "a"),
            ("nfs", "nfs://store/export/d?uid=0", "store"),
            ("gluster", "gluster+tcp://store:24007/v/d", "store"),
            ("gluster", "gluster+unix:///v/d?socket=/run/g", "/run/g"),
            ("rbd", "rbd:pool/d:id=a:mon_host=10.0.0.1\\:6789", "10.0.0.1"),
        ] {
            assert_eq!(found(driver, name), Ok(vec![at(server)]), "{name}");
        }
        let list = r#"json:{"driver":"gluster","path":"d","server.0.type":"inet","server.0.host":"a","server.1.type":"unix","server.1.path":"/g"}"#;
        assert_eq!(found("gluster", list), Ok(vec![at("a"), at("/g")]));
        let list = r#"json:{"driver":"rbd","server":[{"host":"a","port":"1"},{"host":"b","port":"1"}]}"#;
        assert_eq!(found("rbd", list), Ok(vec![at("a"), at("b")]));
        let both = "rbd:pool/d:mon_host=[v2\\:10.0.0.1\\:3300/0,v1\\:10.0.0.2\\:6789/0]";
        assert_eq!(found("rbd", both), Ok(vec![at("10.0.0.1"), at("10.0.0.2")]));
        for configured in [
            "rbd:pool/d:conf=/etc/ceph/a",
            r#"json:{"driver":"rbd","pool":"p"}"#,
        ] {
            assert_eq!(found("rbd", configured), Ok(Vec::new()), "{configured}");
        }
    }

    #[test]
    fn what_cannot_be_compared_is_refused_by_name() {
        for (driver, name, why) in [
            (
                "nbd",
                r#"json:{"driver":"nbd","server":{"type":"vsock","cid":"2"}}"#,
                "does not say",
            ),
            (
                "nbd",
                r#"json:{"driver":"nbd","server":{"type":"fd","str":"f"}}"#,
                "does not say",
            ),
            (
                "nbd",
                r#"json:{"driver":"nbd","server.type":"inet","server.ho..."#,
                "does not say",
            ),
            ("nbd", "nbd+unix:///?socket=d.sock", "not absolute (d.sock)"),
            ("gluster", "gluster:///v/d", "does not say"),
            ("nvme", "nvme://0000:01:00.0/1", "the driver nvme"),
            (
                "virtio-blk-vhost-user",
                "json:{}",
                "the driver virtio-blk-vhost-user",
            ),
            (
                "vvfat",
                r#"json:{"driver":"vvfat","dir":"/srv"}"#,
                "from a folder",
            ),
        ] {
            let refused = found(driver, name).unwrap_err();
            assert!(
                refused.contains(why) && refused.contains(driver),
                "{name}: {refused}"
            );
        }
        for (driver, name) in [
            ("null-co", "null-co://"),
            ("file", "/srv/d"),
            ("host_device", "/dev/sdb"),
        ] {
            assert_eq!(found(driver, name), Err("a file".to_owned()), "{driver}");
        }
    }

    #[test]
    fn disks_of_our_own_are_left_out() {
        let nodes = nodes(&[
            ("nbd", "nbd+unix:///db?socket=/run/volumes/db/nbd"),
            ("nbd", "nbd+unix:///db?socket=/run/other"),
        ]);
        let remotes = of(&nodes, |path| path == Path::new("/run/volumes/db/nbd")).unwrap();
        assert_eq!(remotes.len(), 1, "{remotes:?}");
        assert_eq!(remotes[0].servers, [at("/run/other")]);
        assert!(remotes[0].disk.contains("n1 (nbd, "), "{remotes:?}");
    }
}
