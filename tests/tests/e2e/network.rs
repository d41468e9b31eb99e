//! An instance's network namespace is the same after a move: what its programs, with `CAP_NET_ADMIN`, and its bundle have made of it.

use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use verbatim_e2e::{CheckReport, Instance, Migration, TestLab, Traffic, VCHECK_PORT, bundle_of, eventually};

use crate::Test;
use crate::failures::waiting_at;

const HOSTS: &[&str] = &["src", "dst"];
const WITH_A_PEER: &[&str] = &["src", "dst", "peer"];
const SOME_BYTES: u64 = 8 << 20;
/// An MTU at which `active_mtu` is 2048, and by which what agents say to each other on connections of before passes.
const NARROW: u32 = 3000;
const LIMIT: Duration = Duration::from_secs(60);
/// Given as an argument: an instance need not see this repository.
const SCRIPT: &str = include_str!("network.py");

/// All of them.
pub fn tests() -> Vec<Test> {
    vec![
        Test::new("network::stays_the_same", HOSTS, stays_the_same),
        Test::new("network::further_addresses", HOSTS, further_addresses),
        Test::new("network::what_is_not_moved", HOSTS, what_is_not_moved),
        Test::new("network::cannot_be_there", HOSTS, cannot_be_there),
        Test::new("network::multicast", HOSTS, multicast),
        Test::new("network::mtu_of_hosts", WITH_A_PEER, mtu_of_hosts).injecting_faults(),
    ]
}

/// Runs a shell's commands in an instance's network namespace, one a line; says what they say.
fn in_network(lab: &TestLab, instance: &Instance<'_>, commands: &str) -> anyhow::Result<String> {
    let row = instance.row()?;
    let pid = row.pid.context("it has ended")?;
    let network = format!("--net=/proc/{pid}/ns/net");
    let argv = ["nsenter", &network, "sh", "-ec", commands];
    Ok(lab.start_plain(&row.host, &argv)?.succeed(LIMIT)?.stdout)
}

/// What programs do.
const CHANGES: &str = "
    ip address add 10.77.200.5/16 dev eth0
    ip address add 10.78.0.1/24 broadcast 10.78.0.255 dev eth0 label eth0:1
    ip address add 127.0.0.2/8 dev lo
    ip -6 address add fd00:5::5/64 dev eth0 nodad
    ip link set eth0 mtu 1400
    ip route add 192.0.2.0/24 via 10.77.0.3 metric 7
    ip route add 203.0.113.0/24 nexthop via 10.77.0.3 weight 2 nexthop via 10.77.0.4
    ip route add default via 10.77.0.1 table 100
    ip -6 route add 2001:db8:1::/48 via fd00:5::1
    ip rule add from 10.77.200.5 table 100
    ip -6 rule add from fd00:5::/64 table 100
    ip neighbour add 10.77.0.250 lladdr 02:00:00:00:00:01 dev eth0 nud permanent
    ip -6 neighbour add fd00:5::9 lladdr 02:00:00:00:00:02 dev eth0 nud permanent
    echo 2 > /proc/sys/net/ipv4/conf/eth0/rp_filter
    echo 7 > /proc/sys/net/ipv6/conf/eth0/hop_limit
    nft add table inet t
    nft add set inet t s '{ type ipv4_addr; flags interval; elements = { 1.2.3.0/24 }; }'
    nft add chain inet t c '{ type filter hook input priority 0; policy accept; }'
    nft add rule inet t c tcp dport 9999 counter drop
    nft add rule inet t c ip saddr @s counter accept
";

/// As an operator sees it, but for counters, lifetimes, neighbours that come and go, numbers of links at the host, and that an address
/// which has come was not asked for (`nodad`).
const DUMP: &str = "
    ip -o address show | sed 's/ nodad//; s/ [0-9]*sec//g; s/ tentative//'
    ip -4 route show table all
    ip -6 route show table all | sort
    ip rule
    ip -6 rule
    ip neighbour show nud permanent
    ip -o link | sed 's/@[^:]*//; s/link-netnsid [0-9]*//'
    nft -s list ruleset
    cd /proc/sys/net
    grep -rH . . 2>/dev/null | grep -v nf_conntrack_count | sort
";

/// Sysctls of the bundle's own.
const SYSCTLS: [(&str, &str); 4] = [
    ("net.ipv4.ip_unprivileged_port_start", "0"),
    ("net.core.somaxconn", "12345"),
    ("net.ipv4.ip_local_port_range", "20000 21000"),
    ("net.ipv4.tcp_keepalive_time", "77"),
];

fn equal(before: &str, after: &str) -> anyhow::Result<()> {
    let differ = |one: &str, other: &str| -> Vec<String> {
        let lines = one.lines().filter(|line| !other.lines().any(|has| has == *line));
        lines.map(str::to_owned).collect()
    };
    let (gone, new) = (differ(before, after), differ(after, before));
    ensure!(
        gone.is_empty() && new.is_empty(),
        "gone: {gone:#?}\nnew: {new:#?}"
    );
    ensure!(before == after, "in another order: {before}\n{after}");
    Ok(())
}

/// All of it is there after a move, and after the way back.
fn stays_the_same(lab: &TestLab) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    bundle_of(folder.path(), &["sleep", "1000"], &lab.tools().library)?;
    let config = folder.path().join("config.json");
    let mut spec: Value = serde_json::from_slice(&std::fs::read(&config)?)?;
    for (name, value) in SYSCTLS {
        spec["linux"]["sysctl"][name] = json!(value);
    }
    std::fs::write(&config, serde_json::to_vec(&spec)?)?;
    let instance = lab.bundle("src", "changed", folder.path())?;
    let plain = lab.instance("src", "plain", &["sleep", "1000"])?;
    // Its link-local address is not tentative any more.
    for instance in [&instance, &plain] {
        eventually("addresses that are known to be nobody else's", LIMIT, || {
            let shown = in_network(lab, instance, "ip -6 address show dev eth0")?;
            Ok((shown.contains("fe80:") && !shown.contains("tentative")).then_some(()))
        })?;
    }
    in_network(lab, &instance, CHANGES)?;
    let before = in_network(lab, &instance, DUMP)?;
    for expected in [
        "10.77.200.5/16",
        "fd00:5::5/64",
        "tcp dport 9999",
        "./core/somaxconn:12345",
    ] {
        ensure!(before.contains(expected), "{expected}: {before}");
    }
    let before_plain = in_network(lab, &plain, DUMP)?;
    lab.ask(&["check", "changed", "--to", "dst"])?;
    for host in ["dst", "src"] {
        for (instance, before) in [(&instance, &before), (&plain, &before_plain)] {
            instance.migrate(host)?.must_be_committed()?;
            let after = in_network(lab, instance, DUMP)?;
            equal(before, &after).with_context(|| format!("{} on {host}", instance.name()))?;
        }
    }
    Ok(())
}

/// Connections by addresses that an instance has given itself, and listeners on them, go on.
fn further_addresses(lab: &TestLab) -> anyhow::Result<()> {
    let server = ["/usr/bin/python3", "-c", SCRIPT, "serve", "fd00:5::2", "7000"];
    let options = ["--name", "server", "--allow-address", "fd00:5::2", "--"];
    let server = Instance::run(lab, "dst", &options, &server)?;
    in_network(lab, &server, "ip -6 address add fd00:5::2/64 dev eth0 nodad")?;
    let client = ["/usr/bin/python3", "-c", SCRIPT, "ask", "fd00:5::2", "7000"];
    let options = [
        "--name",
        "client",
        "--allow-address",
        "fd00:5::1",
        "--allow-address",
        "10.77.201.5",
        "--",
    ];
    let client = Instance::run(lab, "src", &options, &client)?;
    in_network(
        lab,
        &client,
        "ip -6 address add fd00:5::1/64 dev eth0 nodad\nip address add 10.77.201.5/16 dev eth0",
    )?;
    let goes_on = || -> anyhow::Result<()> {
        let answers = |instance: &Instance<'_>| -> anyhow::Result<usize> {
            Ok(instance
                .output()?
                .lines()
                .filter(|line| line.starts_with("answer"))
                .count())
        };
        let before = answers(&client)?;
        eventually("answers", LIMIT, || {
            Ok((answers(&client)? > before + 2).then_some(()))
        })
        .with_context(|| client.output().unwrap_or_default())
    };
    goes_on()?;
    eventually("a listener on a second address", LIMIT, || {
        Ok(client.output()?.contains("listening").then_some(()))
    })?;
    lab.ask(&["check", "client", "--to", "dst"])?;
    client.migrate("dst")?.must_be_committed()?;
    goes_on()?;
    // A new connection to the address that it gave itself.
    let ask = "/usr/bin/python3 -c 'import socket; print(socket.create_connection((\"10.77.201.5\", 8000), 20).recv(9))'";
    let asked = in_network(lab, &server, ask)?;
    ensure!(asked.contains("second"), "{asked}: {}", client.output()?);
    server.migrate("src")?.must_be_committed()?;
    goes_on()?;
    client.migrate("src")?.must_be_committed()?;
    goes_on()
}

/// What does not move is named by `check`, and by `migrate` before it sends anything.
fn what_is_not_moved(lab: &TestLab) -> anyhow::Result<()> {
    let instance = lab.instance("src", "odd", &["sleep", "1000"])?;
    let octets = instance.address()?.parse::<std::net::Ipv4Addr>()?.octets();
    let [a, b, c, d] = octets.map(|octet| format!("{octet:02x}"));
    let own = format!("ip link set eth0 address 02:76:{a}:{b}:{c}:{d}");
    let cases = [
        (
            "ip link add one type veth peer name two",
            "ip link del one",
            "(veth) is not moved",
        ),
        (
            "tc qdisc add dev eth0 root pfifo",
            "tc qdisc del dev eth0 root",
            "pfifo of eth0",
        ),
        (
            "ip xfrm policy add dir out src 10.0.0.0/8 dst 10.0.0.0/8",
            "ip xfrm policy flush",
            "IPsec",
        ),
        (
            "ip link set eth0 address 02:00:00:00:00:07",
            &own,
            "Ethernet address of eth0",
        ),
    ];
    for (make, undo, expected) in cases {
        in_network(lab, &instance, make)?;
        let said = lab.verbatim(&["check", "odd", "--to", "dst"])?.wait(LIMIT)?;
        ensure!(
            said.code != 0 && said.output().contains(expected),
            "{make}: {}",
            said.output()
        );
        let migration = instance.migrate("dst")?;
        migration.must_be_rolled_back(&[expected])?;
        ensure!(migration.bytes.pre_copy == 0, "something was sent");
        in_network(lab, &instance, undo)?;
    }
    lab.ask(&["check", "odd", "--to", "dst"])?;
    instance.migrate("dst")?.must_be_committed()
}

/// A program's link is not wider than those of the destination.
fn cannot_be_there(lab: &TestLab) -> anyhow::Result<()> {
    let instance = lab.instance("src", "wide", &["sleep", "1000"])?;
    // Links of this lab take less.
    in_network(lab, &instance, "ip link set eth0 mtu 20000")?;
    let said = lab.verbatim(&["check", "wide", "--to", "dst"])?.wait(LIMIT)?;
    ensure!(
        said.code != 0 && said.output().contains("MTU of 20000"),
        "{}",
        said.output()
    );
    instance.migrate("dst")?.must_be_rolled_back(&["MTU of 20000"])?;
    in_network(lab, &instance, "ip link set eth0 mtu 1500")?;
    instance.migrate("dst")?.must_be_committed()
}

/// Sockets are members of their multicast groups after a move: of any source, of chosen ones, of IPv6.
fn multicast(lab: &TestLab) -> anyhow::Result<()> {
    let sender = lab.instance(
        "dst",
        "sender",
        &["/usr/bin/python3", "-c", SCRIPT, "tell", "-", "5007"],
    )?;
    let source = sender.address()?;
    let argv = ["/usr/bin/python3", "-c", SCRIPT, "hear", &source, "5007"];
    let hearer = lab.instance("src", "hearer", &argv)?;
    let heard = |what: &str| -> anyhow::Result<usize> {
        let text = format!("heard {what} ");
        Ok(hearer
            .output()?
            .lines()
            .filter(|line| line.starts_with(&text))
            .count())
    };
    let all_are_heard = || -> anyhow::Result<()> {
        for what in ["any", "chosen", "six"] {
            let before = heard(what)?;
            eventually(what, LIMIT, || Ok((heard(what)? > before + 3).then_some(())))
                .with_context(|| hearer.output().unwrap_or_default())?;
        }
        Ok(())
    };
    all_are_heard()?;
    let groups = "cat /proc/thread-self/net/igmp /proc/thread-self/net/igmp6 | grep -E '01024DEF|02024DEF|ff15' | awk '{print $1, $2, $3}'";
    let before = in_network(lab, &hearer, groups)?;
    lab.ask(&["check", "hearer", "--to", "dst"])?;
    for host in ["dst", "src"] {
        hearer.migrate(host)?.must_be_committed()?;
        all_are_heard().with_context(|| format!("on {host}"))?;
    }
    ensure!(in_network(lab, &hearer, groups)?.lines().count() == before.lines().count());
    // What was not chosen is not heard, nor anything of a group that nobody is in.
    ensure!(heard("other")? == 0, "{}", hearer.output()?);
    Ok(())
}

/// The RNIC follows the MTU of its link, and says so. A queue pair with a larger path MTU does not go there: `check` and `migrate` say
/// so, also where the link was made narrower after the queue pairs were made.
fn mtu_of_hosts(lab: &TestLab) -> anyhow::Result<()> {
    let program = lab.tools().vcheck.display().to_string();
    let server = lab.start("peer", &[&program])?;
    lab.listens("peer", 1, VCHECK_PORT)?;
    let address = lab.address("peer")?;
    let argv = [program.as_str(), "--op", "mix", "-q", "2", "-D", "600", &address];
    let client = lab.instance("src", "client", &argv)?;
    let flows = |host: &str| Traffic::of(lab, host)?.flows(SOME_BYTES, LIMIT);
    flows("src")?;
    let active_mtu = || -> anyhow::Result<u32> {
        let told = lab.start("dst", &["ibv_devinfo"])?.succeed(LIMIT)?.stdout;
        let line = told.lines().find(|line| line.contains("active_mtu"));
        let number = line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok());
        number.with_context(|| told.clone())
    };
    let wide = active_mtu()?;
    let set = |mtu: u32| -> anyhow::Result<()> {
        let mtu = mtu.to_string();
        lab.start_plain("dst", &["ip", "link", "set", "uplink", "mtu", &mtu])?
            .succeed(LIMIT)?;
        Ok(())
    };
    let shown = lab
        .start_plain("dst", &["ip", "-o", "link", "show", "uplink"])?
        .succeed(LIMIT)?
        .stdout;
    let link = shown.split_whitespace().skip_while(|word| *word != "mtu").nth(1);
    let link: u32 = link.context("a link has an MTU")?.parse()?;
    set(NARROW)?;
    eventually("the RNIC's lower MTU", LIMIT, || {
        Ok((active_mtu()? == 2048).then_some(()))
    })?;
    ensure!(
        lab.logs().contains("the MTU of the link has fallen"),
        "{}",
        lab.logs()
    );
    let said = lab.verbatim(&["check", "client", "--to", "dst"])?.wait(LIMIT)?;
    let expected = format!("path MTU of {wide} bytes");
    ensure!(
        said.code != 0 && said.output().contains(&expected),
        "{}",
        said.output()
    );
    client.migrate("dst")?.must_be_rolled_back(&[&expected])?;
    flows("src")?;
    // It falls after the queue pairs were made, and after the last page was sent.
    set(link)?;
    eventually("the RNIC's MTU", LIMIT, || {
        Ok((active_mtu()? == wide).then_some(()))
    })?;
    lab.ask(&["check", "client", "--to", "dst"])?;
    let migrate = waiting_at(lab, "src", "source-restore")?;
    set(NARROW)?;
    eventually("the RNIC's lower MTU", LIMIT, || {
        Ok((active_mtu()? == 2048).then_some(()))
    })?;
    lab.order_faults("src", "")?;
    Migration::of(&migrate.wait(LIMIT)?)?.must_be_rolled_back(&[&expected])?;
    flows("src")?;
    set(link)?;
    eventually("the RNIC's MTU", LIMIT, || {
        Ok((active_mtu()? == wide).then_some(()))
    })?;
    client.moves("dst")?;
    flows("dst")?;
    client.interrupt()?;
    CheckReport::both_clean(&client.succeed(LIMIT)?, &server.succeed(LIMIT)?)?;
    Ok(())
}
