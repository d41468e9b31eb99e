//! QEMU's present state, by its own answers.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::forwards::{self, Forwards};
use super::nodes::Nodes;
use crate::error::{Error, Result};
use crate::machine::Machine;

/// Paths of devices with a name, and of those without.
pub(super) const NAMED: &str = "/machine/peripheral";
pub(super) const ANONYMOUS: &str = "/machine/peripheral-anon";

/// The state at one moment.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Now {
    pub(super) nodes: Nodes,
    pub(super) backends: Vec<Backend>,
    pub(super) devices: Vec<Device>,
    pub(super) networks: Vec<Network>,
    /// Port forwards of QEMU's own networks.
    pub(super) forwards: Vec<Forwards>,
    /// Names of character devices.
    pub(super) characters: Vec<String>,
    /// Names and types of objects.
    pub(super) objects: Vec<(String, String)>,
    /// Ports of USB devices, by name.
    pub(super) ports: BTreeMap<String, String>,
    /// Jobs that export nodes.
    pub(super) exports: Vec<String>,
}

/// The backend of a guest's disk, by `query-block`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(super) struct Backend {
    /// The name from `-drive`; empty for a device without one.
    pub device: String,
    /// The device's path.
    #[serde(default)]
    pub qdev: Option<String>,
    #[serde(default)]
    pub removable: bool,
    #[serde(default)]
    pub inserted: Option<Inserted>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(super) struct Inserted {
    #[serde(rename = "node-name", default)]
    pub node: String,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

impl Inserted {
    /// Whether the backend has rate limits.
    pub fn is_limited(&self) -> bool {
        let limits = self
            .rest
            .iter()
            .filter(|(key, _)| key.starts_with("bps") || key.starts_with("iops"));
        limits
            .into_iter()
            .any(|(_, value)| value.as_u64().is_some_and(|value| value > 0))
    }
}

/// A device named by `-device`, or added since.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Device {
    pub path: String,
    /// The kind: `virtio-blk-pci`, ...
    pub kind: String,
    /// Whether it was added while QEMU ran.
    pub is_hot: bool,
    /// The bus and the address on it.
    pub bus: Option<String>,
    pub address: Option<i64>,
    pub mac: Option<String>,
    /// Properties of an added device that differ from the defaults.
    pub properties: Map<String, Value>,
}

impl Device {
    /// The name, if it has one.
    pub fn name(&self) -> Option<&str> {
        self.path.strip_prefix(NAMED)?.strip_prefix('/')
    }

    /// The device in words, for display.
    pub fn title(&self) -> String {
        format!("{} ({})", self.name().unwrap_or(&self.path), self.kind)
    }

    /// The slot on a PCI bus, in the form of `-device`.
    pub fn slot(&self) -> Option<String> {
        let number = self.address.and_then(|address| u8::try_from(address).ok())?;
        Some(format!("{:02x}.{:x}", number >> 3, number & 7))
    }
}

/// A network at the host's side, by `info network`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Network {
    pub name: String,
    /// The kind: `user`, `tap`, ...
    pub kind: String,
    /// The description.
    pub about: String,
}

#[derive(Debug, Deserialize)]
struct Listed {
    name: String,
    #[serde(rename = "type")]
    kind: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Property {
    name: String,
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    default_value: Option<Value>,
}

impl Machine {
    /// The present state.
    pub async fn now(&self) -> Result<Now> {
        let qmp = self.qmp();
        let nodes = self.nodes().await?;
        let backends = qmp.ask("query-block", json!({})).await?;
        let mut devices = Vec::new();
        for folder in [NAMED, ANONYMOUS] {
            for (name, kind) in self.children(folder).await? {
                devices.push(self.device(format!("{folder}/{name}"), kind).await?);
            }
        }
        let characters: Vec<Value> = qmp.ask("query-chardev", json!({})).await?;
        let characters = characters.iter().filter_map(|device| device["label"].as_str());
        Ok(Now {
            nodes,
            backends,
            devices,
            networks: networks(&self.monitor("info network").await?),
            forwards: self.forwards().await?,
            characters: characters.map(str::to_owned).collect(),
            objects: self.children("/objects").await?,
            ports: ports(&self.monitor("info usb").await?),
            exports: self.exports().await?,
        })
    }

    /// The state of a machine that libvirt starts: its disks, and the devices with other names than these.
    pub(super) async fn now_beside(&self, names: &BTreeSet<String>) -> Result<Now> {
        let mut devices = Vec::new();
        for folder in [NAMED, ANONYMOUS] {
            for (name, kind) in self.children(folder).await? {
                if !names.contains(&name) {
                    devices.push(self.device(format!("{folder}/{name}"), kind).await?);
                }
            }
        }
        Ok(Now {
            nodes: self.nodes().await?,
            backends: Vec::new(),
            devices,
            networks: Vec::new(),
            forwards: Vec::new(),
            characters: Vec::new(),
            objects: Vec::new(),
            ports: BTreeMap::new(),
            exports: self.exports().await?,
        })
    }

    async fn forwards(&self) -> Result<Vec<Forwards>> {
        let listed = self.monitor("info usernet").await?;
        forwards::parse(&listed).map_err(|line| {
            Error::Unmovable(vec![format!(
                "QEMU lists a port forward in a form that is not known here (`info usernet`): {}; remove it (`hostfwd_remove`)",
                line.trim()
            )])
        })
    }

    async fn exports(&self) -> Result<Vec<String>> {
        let exports: Vec<Value> = self.qmp().ask("query-block-exports", json!({})).await?;
        let exports = exports.iter().filter_map(|export| export["id"].as_str());
        Ok(exports.map(str::to_owned).collect())
    }

    /// The block nodes, without the edges of the graph.
    pub(super) async fn nodes_alone(&self) -> Result<Nodes> {
        let named = self
            .qmp()
            .ask("query-named-block-nodes", json!({"flat": true}))
            .await?;
        let graph = json!({"nodes": [], "edges": []});
        Nodes::parse(named, graph).map_err(|error| Error::Malformed(format!("the block nodes: {error}")))
    }

    /// The block graph alone.
    pub(super) async fn nodes(&self) -> Result<Nodes> {
        let flat = json!({"flat": true});
        let named = self.qmp().ask("query-named-block-nodes", flat).await?;
        let graph = self.qmp().ask("x-debug-query-block-graph", json!({})).await?;
        Nodes::parse(named, graph).map_err(|error| Error::Malformed(format!("the block graph: {error}")))
    }

    async fn children(&self, folder: &str) -> Result<Vec<(String, String)>> {
        let listed: Vec<Listed> = self.qmp().ask("qom-list", json!({"path": folder})).await?;
        let children = listed.into_iter().filter_map(|listed| {
            let kind = listed.kind.strip_prefix("child<")?.strip_suffix('>')?.to_owned();
            Some((listed.name, kind))
        });
        Ok(children.collect())
    }

    async fn property(&self, path: &str, name: &str) -> Result<Option<Value>> {
        let asked = json!({"path": path, "property": name});
        match self.qmp().ask("qom-get", asked).await {
            Ok(value) => Ok(Some(value)),
            // There is no property of this name.
            Err(Error::Refused { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn device(&self, path: String, kind: String) -> Result<Device> {
        let is_hot = self.property(&path, "hotplugged").await? == Some(Value::Bool(true));
        let text = |value: Option<Value>| value.and_then(|value| value.as_str().map(str::to_owned));
        let bus = text(self.property(&path, "parent_bus").await?);
        let bus = bus.and_then(|bus| bus.rsplit('/').next().map(str::to_owned));
        let address = self.property(&path, "addr").await?;
        let mac = text(self.property(&path, "mac").await?);
        let mut properties = Map::new();
        if is_hot {
            let asked = json!({"typename": kind});
            let listed: Vec<Property> = self.qmp().ask("device-list-properties", asked).await?;
            for property in listed
                .into_iter()
                .filter(|property| !property.kind.starts_with("child<"))
            {
                let value = self.property(&path, &property.name).await?;
                properties.extend(
                    value
                        .filter(|value| differs(&property, value))
                        .map(|value| (property.name, value)),
                );
            }
        }
        Ok(Device {
            address: address.and_then(|address| address.as_i64()),
            bus,
            is_hot,
            kind,
            mac,
            path,
            properties,
        })
    }

    pub(crate) async fn monitor(&self, line: &str) -> Result<String> {
        let asked = json!({"command-line": line});
        self.qmp().ask("human-monitor-command", asked).await
    }
}

/// Whether a property differs from its default, and so has to be written.
fn differs(property: &Property, value: &Value) -> bool {
    match (&property.default_value, value) {
        (Some(usual), value) => usual != value,
        // An empty option ROM differs from the default one.
        (None, Value::String(text)) => !text.is_empty() || property.name == "romfile",
        (None, Value::Number(number)) => property.name != "bootindex" || number.as_i64() != Some(-1),
        // `attached`, of USB devices.
        (None, Value::Bool(is)) => !is,
        (None, _) => false,
    }
}

/// The networks of `info network`, without cards.
fn networks(text: &str) -> Vec<Network> {
    let found = text.lines().filter_map(|line| {
        let line = line.trim_start_matches([' ', '\\']).trim_end();
        let (name, about) = line.split_once(": ")?;
        let about = about.split(',').skip_while(|part| part.starts_with("index="));
        let mut about = about.collect::<Vec<_>>().into_iter();
        let kind = about.next()?.strip_prefix("type=")?;
        (kind != "nic").then(|| Network {
            name: name.to_owned(),
            kind: kind.to_owned(),
            about: about.collect::<Vec<_>>().join(","),
        })
    });
    found.collect()
}

/// The ports in `info usb`, by name.
fn ports(text: &str) -> BTreeMap<String, String> {
    let found = text.lines().filter_map(|line| {
        let port = line.split_once("Port ")?.1.split(',').next()?;
        let name = line.rsplit_once("ID: ")?.1;
        Some((name.trim().to_owned(), port.to_owned()))
    });
    found.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_and_ports_are_read_from_their_lists() {
        let text = "jn: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:12:34:56\r\n \\ n: index=0,type=user,net=10.0.2.0,restrict=off\r\n\
                    free: index=0,type=tap,ifname=tap0,script=no,downscript=no\r\n";
        let found = networks(text);
        assert_eq!(found.len(), 2);
        assert_eq!(
            (&found[0].name[..], &found[0].kind[..], &found[0].about[..]),
            ("n", "user", "net=10.0.2.0,restrict=off")
        );
        assert_eq!((&found[1].name[..], &found[1].kind[..]), ("free", "tap"));
        let text = "  Device 0.0, Port 1, Speed 480 Mb/s, Product QEMU USB Tablet, ID: tab\r\n  Device 0.0, Port 2.1, Speed 480 Mb/s, Product QEMU USB Mouse\r\n";
        assert_eq!(ports(text), BTreeMap::from([("tab".to_owned(), "1".to_owned())]));
    }
}
