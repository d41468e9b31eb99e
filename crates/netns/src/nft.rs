//! The ruleset of nftables, by nft(8).

use std::io::{self, Read, Write};
use std::process::{Command, Stdio};

use crate::netlink::{Netlink, attribute, attributes};

/// A longer ruleset is refused.
const MAX_RULESET: u64 = 4 << 20;

/// `NFNL_SUBSYS_NFTABLES`, with `NFT_MSG_GETTABLE` and `NFT_MSG_GETRULE` (`linux/netfilter/nf_tables.h`).
const GET_TABLE: u16 = 10 << 8 | 1;
const GET_RULE: u16 = 10 << 8 | 7;

/// `struct nfgenmsg`.
const HEADER: usize = 4;

/// `NFTA_RULE_EXPRESSIONS`, `NFTA_LIST_ELEM`, `NFTA_EXPR_NAME`, `NFTA_TABLE_NAME`.
const EXPRESSIONS: u16 = 4;
const ELEMENT: u16 = 1;
const NAME: u16 = 1;
const TABLE_NAME: u16 = 1;

/// Tables of Verbatim's own (crate `filter`, module `moving`): they are no part of the instance.
const OWN: [&str; 2] = ["inet verbatim_arrivals", "inet verbatim_loopback"];

/// Families of tables by their numbers (`NFPROTO_INET` …, `linux/netfilter.h`), as nft(8) calls them.
const FAMILIES: [(u8, &str); 6] = [
    (1, "inet"),
    (2, "ip"),
    (3, "arp"),
    (5, "netdev"),
    (7, "bridge"),
    (10, "ip6"),
];

/// The tables of this thread's namespace that are the instance's, as nft(8) calls them (`inet filter`): a few microseconds, where nft(8)
/// takes milliseconds.
fn tables() -> Vec<String> {
    let tables = Netlink::netfilter().and_then(|netlink| netlink.dump(GET_TABLE, &[0; HEADER]));
    // A kernel without nftables has none.
    let tables = tables.unwrap_or_default().into_iter();
    let named = tables.filter_map(|table| {
        let name = attribute(table.get(HEADER..)?, TABLE_NAME)?;
        let name = String::from_utf8_lossy(name.strip_suffix(b"\0").unwrap_or(name)).into_owned();
        let (_, family) = FAMILIES.iter().find(|(number, _)| *number == table[0])?;
        let table = format!("{family} {name}");
        (!OWN.contains(&table.as_str())).then_some(table)
    });
    named.collect()
}

/// Without tables of Verbatim's own.
fn without_own(ruleset: &str) -> String {
    let mut kept = String::with_capacity(ruleset.len());
    let mut is_own = false;
    for line in ruleset.split_inclusive('\n') {
        let table = line
            .strip_prefix("table ")
            .and_then(|rest| rest.trim_end().strip_suffix(" {"));
        is_own |= table.is_some_and(|table| OWN.contains(&table));
        if !is_own {
            kept.push_str(line);
        }
        // The end of a table stands at the beginning of its line.
        is_own &= !line.starts_with('}');
    }
    kept
}

/// Whether a rule has an extension of iptables's, which nft(8) does not write down so that it can read it.
pub(crate) fn has_foreign_rules() -> io::Result<bool> {
    let rules = Netlink::netfilter()?.dump(GET_RULE, &[0; HEADER])?;
    let is_foreign = |rule: &Vec<u8>| {
        let has = rule.get(HEADER..).unwrap_or_default();
        let expressions = attribute(has, EXPRESSIONS).unwrap_or_default();
        attributes(expressions).any(|(kind, element)| {
            kind == ELEMENT
                && attribute(element, NAME).is_some_and(|name| [&b"match\0"[..], b"target\0"].contains(&name))
        })
    };
    Ok(rules.iter().any(is_foreign))
}

/// The ruleset of this thread's namespace, without tables of Verbatim's own; empty if there is none.
pub(crate) fn list() -> io::Result<String> {
    if tables().is_empty() {
        return Ok(String::new());
    }
    let mut child = nft(&["list", "ruleset"], Stdio::null())?;
    let (mut out, mut told) = (Vec::new(), Vec::new());
    let stdout = child.stdout.take().expect("it is piped");
    let read = stdout.take(MAX_RULESET + 1).read_to_end(&mut out);
    if out.len() as u64 > MAX_RULESET {
        let _ = child.kill();
    }
    let stderr = child.stderr.take().expect("it is piped");
    let _ = stderr.take(4096).read_to_end(&mut told);
    let status = child.wait()?;
    read?;
    if out.len() as u64 > MAX_RULESET {
        return Err(io::Error::other(format!(
            "the ruleset is longer than {MAX_RULESET} bytes"
        )));
    }
    if !status.success() {
        return Err(said(&told));
    }
    let ruleset = String::from_utf8(out).map_err(|_| io::Error::other("the ruleset is no text"))?;
    let ruleset = without_own(&ruleset);
    match includes(&ruleset) {
        true => Err(io::Error::other("a comment in the ruleset looks like an include")),
        false => Ok(ruleset),
    }
}

/// Puts a ruleset in the place of this thread's namespace's: all of it, or nothing. Tables of Verbatim's own stay.
pub(crate) fn put(ruleset: &str) -> io::Result<()> {
    if includes(ruleset) {
        return Err(io::Error::other("the ruleset includes a file"));
    }
    let mut child = nft(&["-f", "-"], Stdio::piped())?;
    let mut stdin = child.stdin.take().expect("it is piped");
    let gone: String = tables()
        .iter()
        .map(|table| format!("delete table {table}\n"))
        .collect();
    let written = stdin
        .write_all(gone.as_bytes())
        .and_then(|()| stdin.write_all(ruleset.as_bytes()));
    drop(stdin);
    let output = child.wait_with_output()?;
    match output.status.success() {
        true => written,
        false => Err(said(&output.stderr)),
    }
}

/// Whether a line has nft(8) read a file: comments are the programs' own, with all that they have in them.
fn includes(ruleset: &str) -> bool {
    ruleset
        .split(['\n', ';', '{', '}'])
        .any(|statement| statement.trim_start().starts_with("include"))
}

fn nft(arguments: &[&str], stdin: Stdio) -> io::Result<std::process::Child> {
    let child = Command::new("nft")
        .args(arguments)
        .stdin(stdin)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    child.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => io::Error::new(
            error.kind(),
            "there is no nft on this host; install the package nftables",
        ),
        _ => error,
    })
}

fn said(stderr: &[u8]) -> io::Error {
    let said = String::from_utf8_lossy(stderr);
    let first = said.lines().next().unwrap_or("nothing").trim();
    io::Error::other(format!("nft says: {first}"))
}

/// Without what counts and what passes: values of counters, and when an element expires.
pub(crate) fn lasting(ruleset: &str) -> String {
    let mut lasting = String::with_capacity(ruleset.len());
    for line in ruleset.lines() {
        let mut words = line.split(' ').peekable();
        while let Some(word) = words.next() {
            if ["packets", "bytes", "expires", "used"].contains(&word) {
                // `counter packets 3 bytes 180`, `timeout 1h expires 59m12s`, `quota 9 mbytes used 3 bytes`.
                words.next();
                continue;
            }
            lasting.push_str(word);
            lasting.push(' ');
        }
        lasting.push('\n');
    }
    lasting
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_counts_is_left_out() {
        let one = "\t\ttcp dport 9999 counter packets 3 bytes 180 drop";
        let other = "\t\ttcp dport 9999 counter packets 0 bytes 0 drop";
        assert_eq!(lasting(one), lasting(other));
        assert_ne!(lasting(one), lasting(&one.replace("9999", "9998")));
        let element = "elements = { 1.2.3.4 timeout 1h expires 59m12s }";
        assert_eq!(lasting(element), lasting(&element.replace("59m12s", "3s")));
    }

    #[test]
    fn own_tables_are_left_out() {
        let ruleset = "table inet verbatim_arrivals {\n\tchain input {\n\t}\n}\ntable ip nat {\n\tchain verbatim_ {\n\t}\n}\n\
                       table inet verbatim_loopback {\n}\ntable inet verbatim_mine {\n}\n";
        assert_eq!(
            without_own(ruleset),
            "table ip nat {\n\tchain verbatim_ {\n\t}\n}\ntable inet verbatim_mine {\n}\n"
        );
        assert_eq!(without_own(""), "");
    }

    #[test]
    fn files_are_not_read() {
        assert!(includes(
            "table inet t {\n\tcomment \"x\"\n include \"/etc/shadow\"\n}"
        ));
        assert!(includes("table inet t { } ; include \"/dev/zero\""));
        assert!(!includes("table inet t { chain includes { } }"));
    }
}
