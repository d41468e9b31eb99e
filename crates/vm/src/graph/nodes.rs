//! The block graph: its nodes, their parts, and options to make them again.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value, json};

/// Drivers of nodes with a path at the host.
const FILES: &[&str] = &["file", "host_device", "host_cdrom"];

/// Drivers of nodes that can be made again from QEMU's answers.
const FORMATS: &[&str] = &["raw", "qcow2"];

/// Limit of the depth of a chain.
const DEEPEST: usize = 256;

/// A node, by `query-named-block-nodes`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Node {
    #[serde(default)]
    pub node_name: String,
    #[serde(rename = "drv")]
    pub driver: String,
    /// The name of its content: a path, or all options as `json:{…}`.
    #[serde(rename = "file")]
    pub filename: String,
    #[serde(rename = "ro", default)]
    pub read_only: bool,
    #[serde(rename = "detect_zeroes", default)]
    pub detect_zeroes: String,
    #[serde(default)]
    pub cache: Cache,
    #[serde(default)]
    pub image: Image,
    #[serde(default)]
    pub dirty_bitmaps: Vec<Bitmap>,
    /// The names of its children, by their roles.
    #[serde(skip)]
    pub children: BTreeMap<String, String>,
    /// Whether another node or a disk has it.
    #[serde(skip)]
    pub has_parent: bool,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Cache {
    #[serde(default)]
    pub direct: bool,
    #[serde(default)]
    pub no_flush: bool,
}

/// Content of an image's header.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Image {
    #[serde(default)]
    pub backing_filename: Option<String>,
    #[serde(default)]
    pub full_backing_filename: Option<String>,
    #[serde(default)]
    pub backing_filename_format: Option<String>,
    #[serde(default)]
    pub encrypted: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct Bitmap {
    #[serde(default)]
    pub name: Option<String>,
    #[serde(default)]
    pub persistent: bool,
}

/// The answer to `x-debug-query-block-graph`.
#[derive(Debug, Deserialize)]
struct Graph {
    nodes: Vec<Vertex>,
    edges: Vec<Edge>,
}

#[derive(Debug, Deserialize)]
struct Vertex {
    id: u64,
    name: String,
    #[serde(rename = "type")]
    kind: String,
}

#[derive(Debug, Deserialize)]
struct Edge {
    parent: u64,
    child: u64,
    name: String,
}

/// A node that is a file or a device of the host.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Leaf {
    pub path: String,
    pub read_only: bool,
}

/// All nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Nodes(BTreeMap<String, Node>);

impl Node {
    /// Whether QEMU gave the name, which is then another one at the next place.
    pub fn is_unnamed(&self) -> bool {
        self.node_name.starts_with('#')
    }

    /// The path, if the node is a file or a device.
    pub fn path(&self) -> Option<String> {
        if !FILES.contains(&self.driver.as_str()) {
            return None;
        }
        match self.options() {
            Some(options) => options.get("filename")?.as_str().map(str::to_owned),
            None => Some(self.filename.clone()),
        }
    }

    /// The options, if the name is `json:{…}`.
    pub fn options(&self) -> Option<Map<String, Value>> {
        let text = self.filename.strip_prefix("json:")?;
        serde_json::from_str(text).ok()
    }

    /// The node in words, for display.
    pub fn title(&self) -> String {
        match self.is_unnamed() {
            true => format!("{} ({})", self.filename, self.driver),
            false => format!("{} ({}, {})", self.node_name, self.driver, self.filename),
        }
    }
}

impl Nodes {
    /// Parses the answers to `query-named-block-nodes` (flat) and `x-debug-query-block-graph`.
    pub fn parse(named: Value, graph: Value) -> Result<Self, serde_json::Error> {
        let named: Vec<Node> = serde_json::from_value(named)?;
        let graph: Graph = serde_json::from_value(graph)?;
        let names: BTreeMap<u64, &Vertex> = graph.nodes.iter().map(|node| (node.id, node)).collect();
        let mut nodes: BTreeMap<_, _> = named
            .into_iter()
            .map(|node| (node.node_name.clone(), node))
            .collect();
        for edge in &graph.edges {
            let (Some(parent), Some(child)) = (names.get(&edge.parent), names.get(&edge.child)) else {
                continue;
            };
            if let Some(child) = nodes.get_mut(&child.name) {
                child.has_parent = true;
            }
            if parent.kind == "block-driver"
                && let Some(parent) = nodes.get_mut(&parent.name)
            {
                parent.children.insert(edge.name.clone(), child.name.clone());
            }
        }
        Ok(Self(nodes))
    }

    /// Whether both have the same nodes, of the same files. Their state may differ. An inserted or removed
    /// node is noticed at any place of the graph.
    pub fn is_like(&self, other: &Self) -> bool {
        let alike = |(one, other): (&Node, &Node)| {
            one.node_name == other.node_name && one.driver == other.driver && one.filename == other.filename
        };
        self.0.len() == other.0.len() && self.all().zip(other.all()).all(alike)
    }

    pub fn get(&self, name: &str) -> Option<&Node> {
        self.0.get(name)
    }

    pub fn all(&self) -> impl Iterator<Item = &Node> {
        self.0.values()
    }

    /// The files and devices of all nodes, each once.
    pub fn leaves(&self) -> Vec<Leaf> {
        let mut found: BTreeMap<String, bool> = BTreeMap::new();
        for (path, node) in self.all().filter_map(|node| Some((node.path()?, node))) {
            *found.entry(path).or_insert(true) &= node.read_only;
        }
        let leaves = found.into_iter();
        leaves.map(|(path, read_only)| Leaf { path, read_only }).collect()
    }

    /// A node and all below it, except those that the headers of images refer to.
    pub fn named_below(&self, root: &str) -> Vec<&Node> {
        self.below(root, |node, edge, child| {
            edge == "backing" && self.header_leads_to(node, child)
        })
    }

    /// A node and all below it.
    pub fn all_below(&self, root: &str) -> Vec<&Node> {
        self.below(root, |_, _, _| false)
    }

    fn below(&self, root: &str, leaves_out: impl Fn(&Node, &str, &str) -> bool) -> Vec<&Node> {
        let (mut found, mut next) = (BTreeMap::new(), vec![root]);
        while let Some(node) = next.pop().and_then(|name| self.get(name)) {
            if found.insert(&node.node_name, node).is_none() {
                let children = node.children.iter();
                let children = children.filter(|(edge, child)| !leaves_out(node, edge, child));
                next.extend(children.map(|(_, child)| child.as_str()));
            }
        }
        found.into_values().collect()
    }

    /// Whether QEMU would open the same nodes below by the headers alone.
    fn header_leads_to(&self, node: &Node, child: &str) -> bool {
        let Some(child) = self.get(child) else {
            return false;
        };
        let image = &node.image;
        let name = image
            .full_backing_filename
            .as_ref()
            .or(image.backing_filename.as_ref());
        let same_format = image
            .backing_filename_format
            .as_ref()
            .is_none_or(|format| *format == child.driver);
        name == Some(&child.filename)
            && same_format
            && child.is_unnamed()
            && child
                .children
                .iter()
                .all(|(edge, below)| edge != "backing" || self.header_leads_to(child, below))
    }

    /// Options of `-blockdev` that make a node again. `is_there`: a node of this name is made by an earlier
    /// word; `hint`: options of an opened file that QEMU does not show.
    pub fn describe(
        &self,
        root: &str,
        is_there: &dyn Fn(&str) -> bool,
        hint: &dyn Fn(&str) -> Map<String, Value>,
    ) -> Result<Map<String, Value>, String> {
        self.described(root, is_there, hint, 0)
    }

    fn described(
        &self,
        name: &str,
        is_there: &dyn Fn(&str) -> bool,
        hint: &dyn Fn(&str) -> Map<String, Value>,
        depth: usize,
    ) -> Result<Map<String, Value>, String> {
        let node = self
            .get(name)
            .ok_or_else(|| format!("QEMU does not say what its block node {name} is"))?;
        let cannot = |why: &str| {
            Err(format!(
                "the block node {} cannot be made again: {why}",
                node.title()
            ))
        };
        if depth > DEEPEST {
            return cannot("its chain is too long");
        }
        let mut said = Map::new();
        said.insert("driver".to_owned(), json!(node.driver));
        if !node.is_unnamed() {
            said.insert("node-name".to_owned(), json!(node.node_name));
        }
        if let Some(path) = node.path() {
            let options = node.options().unwrap_or_default();
            if options
                .keys()
                .any(|key| !["driver", "filename", "node-name"].contains(&key.as_str()))
            {
                return cannot("it was opened with options of which not all are known");
            }
            said.extend(hint(&path));
            said.insert("filename".to_owned(), json!(path));
            return Ok(said);
        }
        if !FORMATS.contains(&node.driver.as_str()) {
            return cannot(&format!(
                "the driver {} was put there while the guest ran; raw and qcow2 on files and devices can be",
                node.driver
            ));
        }
        if node.image.encrypted {
            return cannot("it is encrypted");
        }
        let options = node.options().unwrap_or_default();
        for (key, value) in &options {
            match key.as_str() {
                "driver" | "node-name" | "file" | "backing" => {}
                "offset" | "size" if node.driver == "raw" => {
                    said.insert(key.clone(), value.clone());
                }
                _ => return cannot(&format!("it was opened with `{key}`")),
            }
        }
        for (edge, child) in &node.children {
            if !["file", "backing"].contains(&edge.as_str()) {
                return cannot(&format!("it has another part ({edge})"));
            }
            let below = match is_there(child) {
                true => json!(child),
                false => Value::Object(self.described(child, is_there, hint, depth + 1)?),
            };
            said.insert(edge.clone(), below);
        }
        let has_header = node.image.backing_filename.is_some();
        if has_header && !node.children.contains_key("backing") {
            said.insert("backing".to_owned(), Value::Null);
        }
        if node.detect_zeroes != "off" && !node.detect_zeroes.is_empty() && depth == 0 {
            said.insert("detect-zeroes".to_owned(), json!(node.detect_zeroes));
        }
        Ok(said)
    }
}
