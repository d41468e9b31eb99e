//! Data flows one way: within a crate no module at the top leads back to itself by what it imports.
//!
//! The knots that there still are stand in [`KNOWN`]. One that grows, or a new one, fails here; one that was cut is to be struck off.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use petgraph::graphmap::DiGraphMap;
use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, Item, ItemMod, ItemUse, UseTree};

/// Crates and the modules of each that still lead to each other.
const KNOWN: &[(&str, &[&str])] = &[
    (
        "agent",
        &[
            "agent",
            "datagrams",
            "forwarding",
            "gids",
            "guests",
            "held",
            "identity",
            "instances",
            "journal",
            "keeper",
            "memory",
            "peers",
            "protocol",
            "quotas",
            "report",
            "secrets",
            "session",
            "turns",
        ],
    ),
    ("nic", &["objects", "qp", "wqe"]),
    ("session", &["decision", "record"]),
    ("simulation", &["check", "explore", "simulated", "world"]),
    (
        "verbs",
        &[
            "ah",
            "async_events",
            "channel",
            "cm",
            "cm_line",
            "context",
            "cq",
            "described",
            "dm",
            "dump",
            "helper",
            "mr",
            "mw",
            "pd",
            "process",
            "qp",
            "road_map",
            "session",
            "srq",
        ],
    ),
];

/// What a module names of its own crate: paths from the crate's root.
struct Named<'a> {
    /// The module that is read, from the crate's root.
    module: &'a [String],
    paths: BTreeSet<Vec<String>>,
}

impl Named<'_> {
    /// A path as it is written, if it leads into the crate.
    fn add(&mut self, path: Vec<String>) {
        let mut rest = path.as_slice();
        let mut base = match rest.first().map(String::as_str) {
            Some("crate") => Vec::new(),
            Some("self" | "super") => self.module.to_vec(),
            _ => return,
        };
        if matches!(rest[0].as_str(), "crate" | "self") {
            rest = &rest[1..];
        }
        while rest.first().is_some_and(|segment| segment == "super") {
            base.pop();
            rest = &rest[1..];
        }
        base.extend(rest.iter().cloned());
        self.paths.insert(base);
    }

    fn add_tree(&mut self, before: &[String], tree: &UseTree) {
        let with = |name: &dyn ToString| [before, &[name.to_string()]].concat();
        match tree {
            UseTree::Path(path) => self.add_tree(&with(&path.ident), &path.tree),
            UseTree::Name(name) => self.add(with(&name.ident)),
            UseTree::Rename(name) => self.add(with(&name.ident)),
            UseTree::Glob(_) => self.add(before.to_vec()),
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.add_tree(before, tree)),
        }
    }

    /// What is written within a macro's parentheses is no syntax tree.
    fn add_tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(name) if path.is_empty() || colons == 2 => {
                    path.push(name.to_string());
                    colons = 0;
                }
                TokenTree::Punct(mark) if mark.as_char() == ':' => colons += 1,
                other => {
                    self.add(std::mem::take(&mut path));
                    colons = 0;
                    match other {
                        TokenTree::Group(group) => self.add_tokens(group.stream()),
                        TokenTree::Ident(name) => path.push(name.to_string()),
                        TokenTree::Punct(_) | TokenTree::Literal(_) => {}
                    }
                }
            }
        }
        self.add(path);
    }
}

fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute
                .parse_args::<syn::Path>()
                .is_ok_and(|path| path.is_ident("test"))
    })
}

impl<'ast> Visit<'ast> for Named<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        let attributes = match item {
            Item::Mod(item) => &item.attrs,
            Item::Use(item) => &item.attrs,
            Item::Fn(item) => &item.attrs,
            Item::Impl(item) => &item.attrs,
            _ => &Vec::new(),
        };
        if !is_for_tests(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        self.add_tree(&[], &item.tree);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.add(
            path.segments
                .iter()
                .map(|segment| segment.ident.to_string())
                .collect(),
        );
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, used: &'ast syn::Macro) {
        self.add_tokens(used.tokens.clone());
    }
}

/// The sources of a crate: each module's path and its syntax tree, without those that are for tests.
fn modules(root: &Path) -> BTreeMap<Vec<String>, syn::File> {
    let mut found = BTreeMap::new();
    for name in ["lib.rs", "main.rs"] {
        if root.join(name).exists() {
            read(&root.join(name), root, Vec::new(), &mut found);
            break;
        }
    }
    found
}

fn read(file: &Path, folder: &Path, path: Vec<String>, found: &mut BTreeMap<Vec<String>, syn::File>) {
    let text = std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let tree = syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let below = tree.items.iter().filter_map(|item| match item {
        Item::Mod(ItemMod {
            attrs,
            ident,
            content: None,
            ..
        }) if !is_for_tests(attrs) => Some(ident.to_string()),
        _ => None,
    });
    for name in below.collect::<Vec<_>>() {
        let places: [PathBuf; 2] = [
            folder.join(format!("{name}.rs")),
            folder.join(&name).join("mod.rs"),
        ];
        // One that is not there is made by the build, or lies elsewhere by `#[path]`.
        if let Some(place) = places.iter().find(|place| place.exists()) {
            let path = [path.as_slice(), std::slice::from_ref(&name)].concat();
            read(place, &folder.join(&name), path, found);
        }
    }
    found.insert(path, tree);
}

/// What the root gives names of its own to: name to module.
fn given_names(root: &syn::File, tops: &BTreeSet<String>) -> BTreeMap<String, String> {
    let mut names = BTreeMap::new();
    for item in &root.items {
        if let Item::Use(item) = item {
            give(&[], &item.tree, tops, &mut names);
        }
    }
    names
}

fn give(before: &[String], tree: &UseTree, tops: &BTreeSet<String>, names: &mut BTreeMap<String, String>) {
    let mut name = |name: &syn::Ident| {
        let from = before
            .iter()
            .find(|segment| !["self", "crate"].contains(&segment.as_str()));
        if let Some(from) = from.filter(|from| tops.contains(*from)) {
            names.insert(name.to_string(), from.clone());
        }
    };
    match tree {
        UseTree::Path(path) => {
            let before = [before, &[path.ident.to_string()]].concat();
            give(&before, &path.tree, tops, names);
        }
        UseTree::Name(used) => name(&used.ident),
        UseTree::Rename(used) => name(&used.rename),
        UseTree::Glob(_) => {}
        UseTree::Group(group) => group
            .items
            .iter()
            .for_each(|tree| give(before, tree, tops, names)),
    }
}

/// The modules at the top of a crate that lead to each other, knot by knot, and by which imports.
fn knots(source: &Path) -> Vec<BTreeMap<String, BTreeSet<String>>> {
    let modules = modules(source);
    let tops: BTreeSet<String> = modules.keys().filter_map(|path| path.first().cloned()).collect();
    let given = modules.get(&Vec::new()).map(|root| given_names(root, &tops));
    let given = given.unwrap_or_default();
    let mut imports: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (path, tree) in modules.iter().filter(|(path, _)| !path.is_empty()) {
        let mut named = Named {
            module: path,
            paths: BTreeSet::new(),
        };
        named.visit_file(tree);
        let leads_to = named.paths.iter().filter_map(|path| {
            let first = path.first()?;
            tops.get(first).or_else(|| given.get(first))
        });
        let from = tops.get(&path[0]).expect("it is one of them");
        let leads_to = leads_to.map(|to| tops.get(to).expect("it is one of them").as_str());
        imports
            .entry(from)
            .or_default()
            .extend(leads_to.filter(|to| to != from));
    }
    let graph: DiGraphMap<&str, ()> = imports
        .iter()
        .flat_map(|(from, all)| all.iter().map(|to| (*from, *to)))
        .collect();
    let mut knots = Vec::new();
    for knot in petgraph::algo::tarjan_scc(&graph)
        .into_iter()
        .filter(|knot| knot.len() > 1)
    {
        let within = |from: &str| {
            let to = imports[from].iter().filter(|to| knot.contains(to));
            to.map(|to| (*to).to_owned()).collect()
        };
        knots.push(
            knot.iter()
                .map(|from| ((*from).to_owned(), within(from)))
                .collect(),
        );
    }
    knots.sort();
    knots
}

#[test]
fn no_module_leads_back_to_itself() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates");
    let mut names: Vec<String> = std::fs::read_dir(&crates)
        .expect("the workspace has crates")
        .map(|entry| {
            entry
                .expect("it can be read")
                .file_name()
                .into_string()
                .expect("ASCII")
        })
        .collect();
    names.sort();
    let (mut wrong, mut met) = (Vec::new(), BTreeSet::new());
    for name in &names {
        for knot in knots(&crates.join(name).join("src")) {
            let modules: Vec<&str> = knot.keys().map(String::as_str).collect();
            match KNOWN
                .iter()
                .position(|(owner, known)| owner == name && *known == modules)
            {
                Some(known) => {
                    met.insert(known);
                }
                None => wrong.push(format!(
                    "{name} has a knot that is not known: {knot:#?}\nin short: {modules:?}"
                )),
            }
        }
    }
    for (index, (name, known)) in KNOWN.iter().enumerate() {
        if !met.contains(&index) {
            wrong.push(format!(
                "{name} has the knot of {known:?} no more; strike it off KNOWN"
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_knot_is_found_by_whatever_it_is_tied() {
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().expect("it has one")).expect("a folder");
        std::fs::write(path, text).expect("a file");
    };
    let found = |text: &str| {
        write("a/deep.rs", text);
        let knots = knots(folder.path());
        knots
            .into_iter()
            .map(|knot| knot.into_keys().collect::<Vec<_>>())
            .collect::<Vec<_>>()
    };
    write(
        "lib.rs",
        "mod a; mod b; mod c; pub use self::b::{Thing as Named};",
    );
    write("a/mod.rs", "mod deep;");
    write("b.rs", "use crate::a;");
    write("c.rs", "use crate::{a, b};");
    for tie in [
        "use crate::b::Thing;",
        "use super::super::{c, b as other};",
        "fn f() -> crate::b::Thing { todo!() }",
        "fn f() { println!(\"{}\", crate::b::thing()); }",
        "use crate::Named;",
    ] {
        assert!(
            found(tie)
                .iter()
                .any(|knot| knot.starts_with(&["a".into(), "b".into()])),
            "{tie}"
        );
    }
    for fine in [
        "use std::b::Thing;",
        "#[cfg(test)] mod tests { use crate::b; }",
        "fn f() { self::b() }",
    ] {
        assert_eq!(found(fine), Vec::<Vec<String>>::new(), "{fine}");
    }
}
