//! One namespace is made what another one was, by this machine's kernel. Needs root, ip(8) and nft(8).

use std::net::{SocketAddrV6, TcpListener, TcpStream};
use std::process::Command;
use std::sync::mpsc;

use rustix::thread::{UnshareFlags, gettid, unshare_unsafe};
use verbatim_netns::{Found, Reader, State, place, read};

/// The Ethernet address of both instances' links.
const MAC: &str = "02:76:0a:4d:01:14";

fn leave() {
    // SAFETY: only descriptors (`FILES`) and signal state are unsafe to unshare; a network namespace is neither.
    unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.unwrap();
}

fn sh(commands: &str) {
    for command in commands.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let output = Command::new("sh").args(["-ec", command]).output().unwrap();
        assert!(
            output.status.success(),
            "{command}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
}

/// What a command says.
fn said(command: &str) -> String {
    let output = Command::new("sh").args(["-c", command]).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// Runs `work` in a namespace like that of an instance, whose link is down at the other end. Nothing where namespaces cannot be made.
fn in_instance<T: Send>(work: impl FnOnce() -> T + Send) -> Option<T> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return None;
    }
    std::thread::scope(|scope| {
        let (ready, host) = mpsc::channel();
        let (end, ends) = mpsc::channel::<()>();
        scope.spawn(move || {
            leave();
            ready.send(gettid()).unwrap();
            // Until the instance's thread has ended.
            let _ = ends.recv();
        });
        let host = host.recv().unwrap().as_raw_nonzero();
        let worked = scope.spawn(move || {
            leave();
            sh(&format!(
                "ip link set lo up
                 ip link add eth0 address {MAC} mtu 9000 type veth peer name vb0 netns {host}
                 ip address add 10.77.1.20/16 dev eth0
                 ip link set eth0 up"
            ));
            work()
        });
        let worked = worked.join();
        drop(end);
        Some(worked.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}

/// What programs with `CAP_NET_ADMIN` do, as in a script of theirs.
const CHANGES: &str = "
    ip address add 10.77.200.5/16 dev eth0
    ip address add 10.78.0.1/24 broadcast 10.78.0.255 dev eth0 label eth0:1
    ip address add 192.0.2.77 peer 192.0.2.78 dev eth0
    ip address add 127.0.0.2/8 dev lo
    ip -6 address add fd00:5::5/64 dev eth0 nodad
    ip -6 address add fd00:6::5/128 dev lo
    ip link set eth0 mtu 1400 txqueuelen 77 alias of-a-program
    ip route add 198.51.100.0/24 via 10.77.0.3 metric 7 mtu 1300
    ip route add 203.0.113.0/24 nexthop via 10.77.0.3 weight 2 nexthop via 10.77.0.4
    ip route add unreachable 100.64.0.0/10
    ip route add local 198.18.0.0/15 dev lo
    ip route add default via 10.77.0.1 table 100
    ip route add 10.99.0.0/16 via 10.77.0.9 onlink dev eth0 src 10.77.200.5
    ip -6 route add 2001:db8:1::/48 via fd00:5::1
    ip -6 route add blackhole 2001:db8:2::/48
    ip rule add from 10.77.200.5 table 100
    ip rule add fwmark 7 iif eth0 priority 300 lookup 100
    ip rule add not to 10.0.0.0/8 uidrange 5-9 priority 301 prohibit
    ip -6 rule add from fd00:5::/64 table 100
    ip neighbour add 10.77.0.250 lladdr 02:00:00:00:00:01 dev eth0 nud permanent
    ip neighbour add proxy 10.77.0.251 dev eth0
    ip -6 neighbour add fd00:5::9 lladdr 02:00:00:00:00:02 dev eth0 nud permanent
    echo 1 > /proc/sys/net/ipv4/ip_forward
    echo 0 > /proc/sys/net/ipv4/ip_unprivileged_port_start
    echo 777 > /proc/sys/net/core/somaxconn
    echo '20000 21000' > /proc/sys/net/ipv4/ip_local_port_range
    echo 8080,9090 > /proc/sys/net/ipv4/ip_local_reserved_ports
    echo 2 > /proc/sys/net/ipv4/conf/eth0/rp_filter
    echo 1 > /proc/sys/net/ipv4/conf/all/arp_ignore
    echo 7 > /proc/sys/net/ipv6/conf/eth0/hop_limit
    echo 5 > /proc/sys/net/ipv6/conf/default/hop_limit
    echo 33 > /proc/sys/net/unix/max_dgram_qlen
    nft add table inet t
    nft add set inet t s '{ type ipv4_addr; flags interval; elements = { 1.2.3.0/24, 5.6.7.8 }; }'
    nft add chain inet t c '{ type filter hook input priority 0; policy accept; }'
    nft add chain inet t d
    nft add rule inet t c tcp dport 9999 counter drop
    nft add rule inet t c ip saddr @s jump d comment \\\"a comment\\\"
    nft add rule inet t d meta l4proto '{ tcp, udp }' counter accept
";

/// As an operator sees it, but for what each namespace numbers by itself, and that an address that has come was not asked for (`nodad`).
fn dump() -> String {
    let says = [
        "ip -o address show | sed 's/ nodad//; s/ [0-9]*sec//g'",
        "ip -4 route show table all",
        "ip -6 route show table all proto boot",
        "ip rule; ip -6 rule",
        "ip neighbour show nud permanent; ip neighbour show proxy",
        "ip -o link show dev eth0 | sed 's/@[^:]*//; s/link-netnsid [0-9]*//'",
        "nft list ruleset",
        "cd /proc/sys/net; grep -rH . ipv4 ipv6 core unix 2>/dev/null | sort",
    ];
    says.map(said).concat()
}

#[test]
fn a_namespace_is_made_what_another_one_was() {
    let Some(Some((wanted, before))) = in_instance(|| {
        let mut reader = Reader::new().unwrap();
        let made = reader.read().unwrap();
        reader.knows(&made);
        // Read again, by the sysctls that it knows, it is the same.
        assert_eq!(reader.read().unwrap(), made);
        let Found { state, obstacles, .. } = reader.read().unwrap();
        assert_eq!(obstacles, Vec::<String>::new());
        assert!(state.is_as_made([10, 77, 1, 20].into()));
        sh(CHANGES);
        let found = reader.read().unwrap();
        assert_eq!(found.obstacles, Vec::<String>::new());
        assert!(!found.state.is_as_made([10, 77, 1, 20].into()));
        Some((found.state.encode().unwrap(), dump()))
    }) else {
        return;
    };
    let wanted = State::decode(&wanted).unwrap();
    let there = in_instance(|| {
        // Its links may have other numbers there.
        let own = read().unwrap().state;
        place(&wanted, &own).unwrap();
        let reader = Reader::new().unwrap();
        (reader.read().unwrap().state, dump())
    });
    let (state, after) = there.unwrap();
    for (before, after) in before.lines().zip(after.lines()) {
        assert_eq!(before, after);
    }
    assert_eq!(before, after);
    assert_eq!(state, wanted);
}

/// Rules and routes that every namespace has, and that were deleted, stay so.
#[test]
fn what_was_deleted_is_not_there_afterwards() {
    let changes = "
        ip rule del priority 32767
        ip route del 10.77.0.0/16 dev eth0
        ip address del 127.0.0.1/8 dev lo";
    let Some(wanted) = in_instance(|| {
        sh(changes);
        (read().unwrap().state, dump())
    }) else {
        return;
    };
    let there = in_instance(|| {
        let own = read().unwrap().state;
        place(&wanted.0, &own).unwrap();
        dump()
    });
    assert_eq!(there.unwrap(), wanted.1);
}

#[test]
fn what_is_not_moved_is_named() {
    let cases = [
        ("ip link add dum0 type dummy", "dum0 (dummy)"),
        (
            "ip link add link eth0 name eth0.5 type vlan id 5",
            "eth0.5 (vlan)",
        ),
        ("ip link add link eth0 name mac0 type macvlan", "mac0 (macvlan)"),
        ("ip link add one type veth peer name two", "one (veth)"),
        ("ip link add br7 type bridge", "br7 (bridge)"),
        ("ip tuntap add tun7 mode tun", "tun7 (tun)"),
        ("tc qdisc add dev eth0 root pfifo", "pfifo of eth0"),
        ("ip nexthop add id 5 via 10.77.0.3 dev eth0", "nexthop objects"),
        (
            "ip xfrm policy add dir out src 10.0.0.0/8 dst 10.0.0.0/8",
            "IPsec",
        ),
        ("ip link set eth0 down", "eth0 is set down"),
        (
            "iptables-legacy -A INPUT -p tcp -j DROP",
            "iptables-legacy (filter)",
        ),
        (
            "iptables-nft -A INPUT -m length --length 7 -j DROP",
            "extension of iptables's",
        ),
    ];
    let mut tried = 0;
    for (command, expected) in cases {
        let found = in_instance(|| {
            let output = Command::new("sh").args(["-ec", command]).output().unwrap();
            if !output.status.success() {
                // This machine's kernel, or its programs, cannot do it.
                eprintln!(
                    "not tried: {command}: {}",
                    String::from_utf8_lossy(&output.stderr)
                );
                return None;
            }
            Some(read().unwrap().obstacles)
        });
        let Some(Some(obstacles)) = found else {
            continue;
        };
        tried += 1;
        assert!(
            obstacles.iter().any(|obstacle| obstacle.contains(expected)),
            "{command}: {obstacles:?}"
        );
    }
    assert!(tried > 3 || !rustix::process::geteuid().is_root(), "{tried}");
}

/// CRIU binds a connection by a link-local address without its link, which the kernel refuses. A listener moves.
#[test]
fn connections_by_link_local_addresses_are_named() {
    let found = in_instance(|| {
        sh("ip -6 address add fe80::7/64 dev eth0 nodad");
        let socket = rustix::net::socket(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::DGRAM,
            None,
        );
        let link = rustix::net::netdevice::name_to_index(socket.unwrap(), "eth0").unwrap();
        let own = SocketAddrV6::new("fe80::7".parse().unwrap(), 7007, 0, link);
        let listener = TcpListener::bind(own).unwrap();
        let before = read().unwrap().obstacles;
        let _connection = TcpStream::connect(own).unwrap();
        let _accepted = listener.accept().unwrap();
        (before, read().unwrap().obstacles)
    });
    let Some((listening, connected)) = found else {
        return;
    };
    assert_eq!(listening, Vec::<String>::new());
    let named = connected
        .iter()
        .filter(|obstacle| obstacle.contains("[fe80::7]:"));
    assert_eq!(named.count(), 2, "{connected:?}");
}

/// Rules of iptables-nft that nft(8) can say are as good as its own.
#[test]
fn rules_of_iptables_move() {
    let found = in_instance(|| {
        let rules = "iptables-nft -A INPUT -s 10.9.0.0/16 -j DROP && iptables-nft -t nat -A OUTPUT -d 10.8.0.1 -j ACCEPT";
        let output = Command::new("sh").args(["-ec", rules]).output().unwrap();
        output.status.success().then(|| {
            let found = read().unwrap();
            assert_eq!(found.obstacles, Vec::<String>::new());
            (found.state, said("iptables-nft-save | grep -v '^#'"))
        })
    });
    let Some(Some((wanted, before))) = found else {
        eprintln!("skipped: no iptables-nft");
        return;
    };
    assert!(before.contains("-A INPUT -s 10.9.0.0/16 -j DROP"), "{before}");
    let after = in_instance(|| {
        let own = read().unwrap().state;
        place(&wanted, &own).unwrap();
        said("iptables-nft-save | grep -v '^#'")
    });
    assert_eq!(after.unwrap(), before);
}

/// Tables of Verbatim's own hold connections back while an instance moves: they stay where they are, on both sides.
#[test]
fn own_tables_stay_where_they_are() {
    const OWN: &str = "nft add table inet verbatim_arrivals
        nft add chain inet verbatim_arrivals input '{ type filter hook input priority -400; }'";
    let wanted = in_instance(|| {
        sh(OWN);
        let nothing = read().unwrap().state;
        sh("nft add table ip6 t; nft add table inet t");
        (nothing, read().unwrap().state)
    });
    let Some((nothing, wanted)) = wanted else {
        return;
    };
    let after = in_instance(|| {
        let own = read().unwrap().state;
        assert_eq!(own, nothing);
        sh("nft add table inet verbatim_loopback; nft add table ip given");
        let own = read().unwrap().state;
        place(&wanted, &own).unwrap();
        said("nft list tables")
    });
    let after = after.unwrap();
    let mut tables: Vec<_> = after.lines().collect();
    tables.sort_unstable();
    assert_eq!(
        tables,
        ["table inet t", "table inet verbatim_loopback", "table ip6 t"]
    );
}

/// Entries of connection tracking stay behind, which is noted.
#[test]
fn tracked_connections_are_noted() {
    let notes = in_instance(|| {
        sh("nft add table inet t
            nft add chain inet t c '{ type filter hook input priority 0; }'
            nft add rule inet t c ct state established accept");
        let before = read().unwrap().notes;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let _connection = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (before, read().unwrap().notes)
    });
    let Some((before, after)) = notes else {
        return;
    };
    assert_eq!(before, Vec::<String>::new());
    assert!(
        after.iter().any(|note| note.contains("connection tracking")),
        "{after:?}"
    );
}

/// What cannot be put in place is an error that names it.
#[test]
fn what_cannot_be_there_is_named() {
    let Some((routed, sysctl)) = in_instance(|| {
        sh("ip route add 198.51.100.0/24 via 10.77.0.3 dev eth0");
        let state = read().unwrap().state;
        let text = String::from_utf8(state.encode().unwrap()).unwrap();
        // A gateway that nobody reaches, and a name that is no sysctl's.
        let gateway = text.replace("[10,77,0,3]", "[172,16,0,3]");
        let sysctl = text.replace("\"set\":{}", "\"set\":{\"core/../../kernel/hostname\":\"x\"}");
        assert!(gateway != text && sysctl != text);
        (gateway, sysctl)
    }) else {
        return;
    };
    let refused = |text: &str| {
        let wanted = State::decode(text.as_bytes()).unwrap();
        in_instance(|| {
            let own = read().unwrap().state;
            place(&wanted, &own).unwrap_err().to_string()
        })
        .unwrap()
    };
    let error = refused(&routed);
    assert!(
        error.contains("the route to 198.51.100.0/24 via 172.16.0.3"),
        "{error}"
    );
    let error = refused(&sysctl);
    assert!(error.contains("kernel.hostname"), "{error}");
}
