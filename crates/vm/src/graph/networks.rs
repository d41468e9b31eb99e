//! Networks at the host's side (`-netdev`).

use super::carried::Work;
use super::line::Word;
use super::now::Network;

/// Default address of QEMU's own network.
const USUAL: &str = "net=10.0.2.0,";

/// Options that name a network.
const OPTIONS: &[&str] = &["-netdev", "-nic", "-net"];

/// Adds networks that were added, and removes those that were removed. `link` is the tap link that there may
/// be.
pub(super) fn carry(work: &mut Work<'_>, link: &str) {
    let now = &work.now.networks;
    let mut named: Vec<(usize, String, String)> = Vec::new();
    for (at, word) in work.rest.iter().enumerate() {
        let params = OPTIONS.iter().find_map(|option| word.params(option));
        if let Some(params) = params
            && let Some(name) = params.get("id").or_else(|| params.get("name"))
        {
            named.push((at, name, params.kind(&["type"])));
        }
    }
    let is_there = |name: &str| now.iter().any(|network| network.name == name);
    let gone: Vec<_> = named
        .iter()
        .filter(|(_, name, _)| !is_there(name))
        .cloned()
        .collect();
    for (at, name, kind) in gone {
        // A user network has a part in the devices' state, by its number among them.
        if kind == "user" && now.iter().any(|network| network.kind == "user") {
            work.refuse(format!(
                "the network {name} was removed while it ran (`netdev_del`), and the state of the other networks of QEMU's own (`user`) would not be \
                 found again: add it again"
            ));
        } else if work.rest[at].name == "-netdev" {
            work.take_out(at);
        }
    }
    let is_named = |network: &&Network| {
        let is_own = network.name.starts_with('#') || network.name.starts_with("hub");
        is_own || named.iter().any(|(_, name, _)| *name == network.name)
    };
    for network in now.iter().filter(|network| !is_named(network)) {
        let has_link = work.rest.iter().any(|word| {
            OPTIONS.iter().any(|option| {
                word.params(option)
                    .is_some_and(|params| params.get("ifname").as_deref() == Some(link))
            })
        });
        match option(network, link, has_link) {
            Ok(value) => work.rest.push(Word::new("-netdev", value)),
            Err(why) => work.refuse(why),
        }
    }
}

fn option(network: &Network, link: &str, has_link: bool) -> Result<String, String> {
    let Network { name, kind, about } = network;
    let refused = |why: &str| {
        Err(format!(
            "the network {name} ({kind}) was added while it ran, and cannot be carried over: {why}"
        ))
    };
    match kind.as_str() {
        "user" => match about.strip_prefix(USUAL) {
            Some(restrict) if ["restrict=off", "restrict=on"].contains(&restrict) => {
                Ok(format!("user,id={name},{restrict}"))
            }
            _ => refused("QEMU does not say all of its options; start the virtual machine with it"),
        },
        "tap" if has_link => refused("there is one tap link, and another network has it"),
        "tap" => Ok(format!("tap,id={name},ifname={link},script=no,downscript=no")),
        _ => refused("remove it (`netdev_del`), or start the virtual machine with it"),
    }
}
