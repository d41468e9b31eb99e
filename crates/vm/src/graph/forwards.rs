//! Port forwards of QEMU's own networks (`hostfwd`), which a monitor can add to a network and remove from it.
//!
//! QEMU lists the present ones ([`parse`]). A network whose options name others gets options for these
//! ([`carry`]).

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddrV4};

use serde_json::{Value, json};

use super::carried::Work;
use super::line::Params;

/// The option of a network.
const OPTION: &str = "hostfwd";

/// The state in QEMU's list.
const FORWARD: &str = "[HOST_FORWARD]";

/// Options of a network that change the guest's address, which is the target of a forward without one.
const ADDRESS: &[&str] = &["net", "ip", "dhcpstart"];

/// The guest's address if none of [`ADDRESS`] is there.
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);

/// A port of the host whose connections or datagrams QEMU hands to its guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Forward {
    protocol: Protocol,
    /// The unspecified address: each address of the host.
    host: SocketAddrV4,
    guest: SocketAddrV4,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Protocol {
    Tcp,
    Udp,
}

/// The forwards of one network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Forwards {
    /// QEMU's name of the network, which begins with `#` if the command line has none.
    pub network: String,
    /// All of them, in a fixed order.
    pub ports: Vec<Forward>,
}

impl std::fmt::Display for Forward {
    /// The form of the option.
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let protocol = match self.protocol {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
        };
        write!(to, "{protocol}:")?;
        if !self.host.ip().is_unspecified() {
            write!(to, "{}", self.host.ip())?;
        }
        write!(to, ":{}-{}", self.host.port(), self.guest)
    }
}

impl Forward {
    /// A forward by its option. `None`: its form, or the meaning of what it leaves out, is not certain here.
    /// `guest`: the address that QEMU takes where there is none.
    fn of_option(option: &str, guest: Option<Ipv4Addr>) -> Option<Self> {
        let (protocol, rest) = option.split_once(':')?;
        let protocol = match protocol {
            "tcp" | "" => Protocol::Tcp,
            "udp" => Protocol::Udp,
            _ => return None,
        };
        let (host, target) = rest.split_once('-')?;
        let (host, host_port) = host.split_once(':')?;
        let (target, guest_port) = target.split_once(':')?;
        let host = match host {
            "" => Ipv4Addr::UNSPECIFIED,
            host => host.parse().ok()?,
        };
        let guest = match target {
            "" => guest?,
            target => target.parse().ok()?,
        };
        Some(Self {
            protocol,
            host: SocketAddrV4::new(host, port(host_port)?),
            guest: SocketAddrV4::new(guest, port(guest_port)?),
        })
    }

    /// A forward by its row: the protocol, a descriptor, address and port at the host, those of the guest.
    fn of_row(row: &str) -> Option<Self> {
        let mut fields = row.split_whitespace();
        let protocol = match fields.next()?.strip_suffix(FORWARD)? {
            "TCP" => Protocol::Tcp,
            "UDP" => Protocol::Udp,
            _ => return None,
        };
        let host = match fields.nth(1)? {
            "*" => Ipv4Addr::UNSPECIFIED,
            host => host.parse().ok()?,
        };
        let host = SocketAddrV4::new(host, port(fields.next()?)?);
        let guest = fields.next()?.parse().ok()?;
        let guest = SocketAddrV4::new(guest, port(fields.next()?)?);
        Some(Self {
            protocol,
            host,
            guest,
        })
    }
}

/// A port in decimal digits. QEMU takes other numbers, too (`0x16`, `026`).
fn port(digits: &str) -> Option<u16> {
    let port: u16 = digits.parse().ok().filter(|port| *port > 0)?;
    (port.to_string() == digits).then_some(port)
}

/// The forwards of each network, from QEMU's list (`info usernet`), in QEMU's order of the networks. An error
/// has the line that is not understood.
pub(super) fn parse(text: &str) -> Result<Vec<Forwards>, String> {
    let mut found: Vec<Forwards> = Vec::new();
    for line in text.lines() {
        // Without spaces before it: the beginning of a network.
        if let Some(name) = line
            .trim_end()
            .strip_suffix("):")
            .filter(|_| !line.starts_with(' '))
        {
            let name = name.split_once('(').map(|(_, name)| name.to_owned());
            found.push(Forwards {
                network: name.ok_or_else(|| line.to_owned())?,
                ports: Vec::new(),
            });
        } else if line.contains("HOST_FORWARD") {
            let forward = Forward::of_row(line).ok_or_else(|| line.to_owned())?;
            let network = found.last_mut().ok_or_else(|| line.to_owned())?;
            network.ports.push(forward);
        }
    }
    for network in &mut found {
        network.ports.sort_unstable();
    }
    Ok(found)
}

/// Gives each network of the line options for the forwards that it has now, if it does not have just these.
/// A word with the right ones stays as it is.
pub(super) fn carry(work: &mut Work<'_>) {
    let all = &work.now.forwards;
    let users = work.now.networks.iter().filter(|network| network.kind == "user");
    for network in users {
        if !all.iter().any(|of| of.network == network.name) {
            work.refuse(format!(
                "QEMU does not list the port forwards of the network {} (`info usernet`), so that they would be lost: remove the network \
                 (`netdev_del`), or stop the virtual machine and start it there",
                network.name
            ));
        }
    }
    let (unnamed, named): (Vec<&Forwards>, Vec<_>) = all.iter().partition(|of| of.network.starts_with('#'));
    // QEMU makes the networks in this order.
    let mut without_name = Vec::new();
    for option in ["-netdev", "-nic", "-net"] {
        for at in 0..work.rest.len() {
            let params = work.rest[at].params(option);
            let Some(params) = params.filter(|params| params.kind(&["type"]) == "user") else {
                continue;
            };
            match params.get("id").or_else(|| params.get("name")) {
                None => without_name.push((at, params)),
                Some(name) => {
                    if let Some(of) = named.iter().find(|of| of.network == name) {
                        give(work, at, params, &of.ports);
                    }
                }
            }
        }
    }
    if without_name.len() == unnamed.len() {
        for ((at, params), of) in without_name.into_iter().zip(unnamed) {
            give(work, at, params, &of.ports);
        }
        return;
    }
    // QEMU's usual network, which no word of the line makes; or one of several was removed.
    for forward in unnamed.iter().flat_map(|of| &of.ports) {
        work.refuse(format!(
            "the port forward {forward} was added to a network without a name while it ran, and cannot be carried over: remove it \
             (`hostfwd_remove`), or start the virtual machine with it (`-nic user,{OPTION}={forward}`)"
        ));
    }
}

/// Gives the network of this word these forwards.
fn give(work: &mut Work<'_>, at: usize, mut params: Params, now: &[Forward]) {
    let has_usual_address = ADDRESS.iter().all(|key| params.get(key).is_none());
    let guest = has_usual_address.then_some(GUEST);
    let said = said(&params);
    let said: Option<BTreeSet<_>> = said.iter().map(|said| Forward::of_option(said, guest)).collect();
    if said.is_some_and(|said| said.iter().eq(now)) {
        return;
    }
    params.retain(|key| key != OPTION);
    let options = now.iter().map(ToString::to_string);
    match &mut params {
        Params::Plain(parts) => parts.extend(options.map(|option| (Some(OPTION.to_owned()), option))),
        Params::Json(map) => {
            let options = options.map(|option| json!({"str": option}));
            map.insert(OPTION.to_owned(), Value::Array(options.collect()));
        }
    }
    work.rest[at].value = Some(params.to_string());
}

/// The options that a network has.
fn said(params: &Params) -> Vec<String> {
    match params {
        Params::Plain(parts) => parts
            .iter()
            .filter(|(key, _)| key.as_deref() == Some(OPTION))
            .map(|(_, value)| value.clone())
            .collect(),
        Params::Json(map) => {
            let all = map.get(OPTION).and_then(Value::as_array).into_iter().flatten();
            all.map(|said| said["str"].as_str().unwrap_or_default().to_owned())
                .collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::line::{joined, words};
    use super::super::now::{Network, Now};
    use super::*;

    /// Answers of QEMU with the options of [`LINE`], after `hostfwd_add a tcp:127.0.0.1:3333-:33`.
    const ANSWERS: [&str; 2] = [
        include_str!("recorded/usernet-7.2.txt"),
        include_str!("recorded/usernet-10.0.txt"),
    ];

    const LINE: [&str; 10] = [
        "-netdev",
        "user,id=a,hostfwd=tcp::2222-:22,hostfwd=udp:127.0.0.1:5353-10.0.2.16:53",
        "-nic",
        "user,model=virtio",
        "-net",
        "user",
        "-net",
        "nic,model=e1000",
        "-nic",
        "user,hostfwd=udp::7777-:7,model=e1000",
    ];

    fn forwards(answer: &str) -> Vec<Forwards> {
        // QEMU's monitor ends its lines like this.
        parse(&answer.replace('\n', "\r\n")).unwrap()
    }

    fn said(of: &Forwards) -> Vec<String> {
        of.ports.iter().map(ToString::to_string).collect()
    }

    /// The line of a QEMU with these forwards, or the reasons why there is none.
    fn carried(line: &[&str], forwards: Vec<Forwards>) -> Result<Vec<String>, Vec<String>> {
        let networks = forwards.iter().map(|of| Network {
            name: of.network.clone(),
            kind: "user".to_owned(),
            about: "net=10.0.2.0,restrict=off".to_owned(),
        });
        let now = Now {
            networks: networks.collect(),
            forwards,
            ..Now::default()
        };
        let line: Vec<_> = line.iter().map(|word| (*word).to_owned()).collect();
        let mut work = Work {
            now: &now,
            machine: "pc",
            rest: words(&line),
            disks: Vec::new(),
            reasons: Vec::new(),
        };
        carry(&mut work);
        match work.reasons.is_empty() {
            true => Ok(joined(&work.rest)),
            false => Err(work.reasons),
        }
    }

    /// The forwards of a network with this option.
    fn network(name: &str, ports: &[&str]) -> Forwards {
        let ports = ports.iter().map(|port| Forward::of_option(port, None).unwrap());
        Forwards {
            network: name.to_owned(),
            ports: ports.collect(),
        }
    }

    #[test]
    fn forwards_are_read_from_the_list_of_each_release() {
        for answer in ANSWERS {
            let found = forwards(answer);
            assert_eq!(found.len(), 4, "{found:?}");
            assert_eq!(found[0].network, "a");
            assert_eq!(
                said(&found[0]),
                [
                    "tcp::2222-10.0.2.15:22",
                    "tcp:127.0.0.1:3333-10.0.2.15:33",
                    "udp:127.0.0.1:5353-10.0.2.16:53"
                ]
            );
            let rest = found[1..].iter().map(said).collect::<Vec<_>>();
            assert_eq!(rest, [vec![], vec!["udp::7777-10.0.2.15:7".to_owned()], vec![]]);
            assert!(
                found[1..].iter().all(|of| of.network.starts_with("#net")),
                "{found:?}"
            );
        }
        // A QEMU without such networks.
        assert_eq!(parse("unknown command: 'info usernet'\r\n"), Ok(Vec::new()));
    }

    #[test]
    fn connections_are_no_forwards_and_wide_columns_are_read() {
        let answer = "Hub -1 (a):\n  Protocol[State]    FD  Source Address  Port   Dest. Address  Port RecvQ SendQ\n\
                      \x20 TCP[ESTABLISHED]   14       127.0.0.1  3333       10.0.2.15    33     0     0\n\
                      \x20 TCP[HOST_FORWARD] 1023 255.255.255.255 65535 255.255.255.254 65534     0     0\n\
                      \x20 UDP[209 sec]       12       10.0.2.15 52417         1.1.1.1    53     0     0\n\
                      \x20 ICMP[10 sec]       12       10.0.2.15     -         1.1.1.1     -     0     0\n";
        let found = forwards(answer);
        assert_eq!(
            said(&found[0]),
            ["tcp:255.255.255.255:65535-255.255.255.254:65534"]
        );
    }

    #[test]
    fn a_list_of_another_form_is_an_error() {
        for line in [
            "  TCP[HOST_FORWARD]   9               *  2222       10.0.2.15    22     0     0",
            "Hub -1 (a):\n  SCTP[HOST_FORWARD]  9               *  2222       10.0.2.15    22     0     0",
            "Hub -1 (a):\n  TCP[HOST_FORWARD]   9           [::1]  2222       10.0.2.15    22     0     0",
            "Hub -1 (a):\n  TCP[HOST_FORWARD]   9               *  2222",
            "Hub -1 (a):\n  TCP[HOST_FORWARD]   9               * 99999       10.0.2.15    22     0     0",
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains("HOST_FORWARD"), "{line}: {error}");
        }
        assert!(parse("a):").is_err());
    }

    #[test]
    fn a_line_with_just_these_forwards_stays_and_others_are_put_in() {
        for answer in ANSWERS {
            let mut now = forwards(answer);
            let mut expected = LINE.map(str::to_owned);
            expected[1] = "user,id=a,hostfwd=tcp::2222-10.0.2.15:22,hostfwd=tcp:127.0.0.1:3333-10.0.2.15:33,\
                           hostfwd=udp:127.0.0.1:5353-10.0.2.16:53"
                .to_owned();
            assert_eq!(carried(&LINE, now.clone()).unwrap(), expected);
            now[0].ports.retain(|forward| forward.host.port() != 3333);
            assert_eq!(carried(&LINE, now.clone()).unwrap(), LINE);
            // One of the start was removed (`hostfwd_remove`).
            now[2].ports.clear();
            let line = carried(&LINE, now).unwrap();
            assert_eq!(line[..9], LINE[..9]);
            assert_eq!(line[9], "user,model=e1000");
        }
    }

    #[test]
    fn options_of_each_form_are_the_forwards_that_they_mean() {
        let same = [
            ("user,id=n,hostfwd=::2222-:22", "tcp::2222-10.0.2.15:22"),
            ("user,id=n,hostfwd=tcp:0.0.0.0:2222-:22", "tcp::2222-10.0.2.15:22"),
            (
                "user,id=n,net=10.1.0.0/16,hostfwd=tcp::1-10.1.2.15:2",
                "tcp::1-10.1.2.15:2",
            ),
            (
                r#"{"type":"user",  "id":"n","hostfwd":[{"str":"udp:127.0.0.1:5-:6"}]}"#,
                "udp:127.0.0.1:5-10.0.2.15:6",
            ),
        ];
        for (word, now) in same {
            let line = carried(&["-netdev", word], vec![network("n", &[now])]).unwrap();
            assert_eq!(line, ["-netdev", word]);
        }
        // QEMU has chosen the port, or takes another address or notation: its present forward goes along.
        let others = [
            ("user,id=n,hostfwd=tcp::0-:22", "tcp::40593-10.0.2.15:22"),
            ("user,id=n,hostfwd=tcp::0x50-:22", "tcp::80-10.0.2.15:22"),
            (
                "user,id=n,hostfwd=tcp:127.1:80-:22",
                "tcp:127.0.0.1:80-10.0.2.15:22",
            ),
            ("user,id=n,hostfwd=tcp::010-:22", "tcp::8-10.0.2.15:22"),
        ];
        for (word, now) in others {
            let line = carried(&["-netdev", word], vec![network("n", &[now])]).unwrap();
            assert_eq!(line, ["-netdev", &format!("user,id=n,hostfwd={now}")]);
        }
        let net = "user,id=n,net=10.1.0.0/16";
        let line = carried(
            &["-netdev", &format!("{net},hostfwd=tcp::1-:2")],
            vec![network("n", &["tcp::1-10.1.2.15:2"])],
        );
        assert_eq!(line.unwrap()[1], format!("{net},hostfwd=tcp::1-10.1.2.15:2"));
        let json = r#"{"type":"user","id":"n"}"#;
        let line = carried(&["-netdev", json], vec![network("n", &["tcp::1-10.0.2.15:2"])]).unwrap();
        let word: Value = serde_json::from_str(&line[1]).unwrap();
        assert_eq!(
            word,
            json!({"type": "user", "id": "n", "hostfwd": [{"str": "tcp::1-10.0.2.15:2"}]})
        );
    }

    #[test]
    fn a_forward_of_a_network_that_no_word_makes_is_named() {
        let port = "tcp::2222-10.0.2.15:22";
        let reasons = carried(&["-m", "16"], vec![network("#net012", &[port])]).unwrap_err();
        assert!(reasons.len() == 1 && reasons[0].contains(port), "{reasons:?}");
        assert!(carried(&["-m", "16"], vec![network("#net012", &[])]).is_ok());
        // Which of two is gone, the list does not say.
        let two = ["-nic", "user", "-nic", "user"];
        assert!(carried(&two, vec![network("#net012", &[port])]).is_err());
    }

    #[test]
    fn a_network_without_a_list_is_named() {
        let now = Now {
            networks: vec![Network {
                name: "n".to_owned(),
                kind: "user".to_owned(),
                about: String::new(),
            }],
            ..Now::default()
        };
        let mut work = Work {
            now: &now,
            machine: "pc",
            rest: Vec::new(),
            disks: Vec::new(),
            reasons: Vec::new(),
        };
        carry(&mut work);
        assert!(
            work.reasons.len() == 1 && work.reasons[0].contains("the network n"),
            "{:?}",
            work.reasons
        );
    }
}
