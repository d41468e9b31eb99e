//! Unreliable datagrams and unreliable connections, over IPv4 and IPv6, to one and to many.

mod support;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use support::objects::{QKEY, av, datagram};
use support::program::{ALL_ACCESS, CAP, gid, send, write, write_with_imm};
use support::{End, Server, Ud};
use verbatim_device::control::{AddressVector, QpAttr, QpAttrMask, QpType, Request};
use verbatim_device::layout::SendWqe;

const SUCCESS: u32 = 0;
const LOC_QP_OP_ERR: u32 = 2;
const WC_GRH: u32 = 1;
const WC_WITH_IMM: u32 = 2;
const GRH: usize = 40;

fn exchange(left: &mut Ud, right: &mut Ud, av: AddressVector) -> Vec<u8> {
    let mut from = left.program.adopted(8192, ALL_ACCESS);
    from.fill(|index| index as u8);
    let into = right.program.adopted(8192, ALL_ACCESS);
    right.program.post_recv(&mut right.qp, 7, &[into.sge(0, 8192)]);
    let ah = left.ah(av);
    let request = SendWqe {
        opcode: 3,
        imm: 0x0403_0201,
        ..datagram(1, ah, right.qp.qpn)
    };
    left.send(request, from.sge(100, 1000));
    let sent = left.queue.wait();
    assert_eq!((sent.wr_id, sent.status, sent.opcode), (1, SUCCESS, 0));
    let received = right.queue.wait();
    assert_eq!(
        (received.wr_id, received.status, received.byte_len, received.imm),
        (7, SUCCESS, 1040, 0x0403_0201)
    );
    assert_eq!(
        (received.src_qpn, received.qpn, received.wc_flags),
        (left.qp.qpn, right.qp.qpn, WC_GRH | WC_WITH_IMM)
    );
    assert_eq!(into.as_slice()[GRH..1040], from.as_slice()[100..1100]);
    into.as_slice()[..GRH].to_vec()
}

#[test]
fn a_datagram_arrives_behind_the_header_that_brought_it() {
    let (a, b) = (Server::start([127, 7, 40, 1]), Server::start([127, 7, 40, 2]));
    let (mut left, mut right) = (Ud::new(&a, CAP), Ud::new(&b, CAP));
    let marked = AddressVector {
        traffic_class: 0x20,
        hop_limit: 9,
        ..av(b.address)
    };
    for (av, class, hops) in [(marked, 0x20, 9), (av(b.address), 0, 64)] {
        let grh = exchange(&mut left, &mut right, av);
        let ip = &grh[20..];
        assert_eq!((ip[0], ip[1], ip[8], ip[9]), (0x45, class, hops, 17));
        assert_eq!(ip[12..20], [127, 7, 40, 1, 127, 7, 40, 2]);
        let sum: u32 = ip
            .chunks(2)
            .map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1]))
            .sum();
        assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff, "the header's checksum");
    }
    // To its own address.
    let mut other = Ud::new(&a, CAP);
    exchange(&mut left, &mut other, av(a.address));
}

#[test]
fn one_queue_pair_sends_to_many() {
    let sender = Server::start([127, 7, 41, 1]);
    let receivers = [2, 3, 4].map(|host| Server::start([127, 7, 41, host]));
    let mut left = Ud::new(&sender, CAP);
    let mut rights = receivers.each_ref().map(|server| Ud::new(server, CAP));
    let mut from = left.program.adopted(1 << 16, ALL_ACCESS);
    from.fill(|index| (index / 64) as u8);
    let memories = rights.each_mut().map(|right| {
        let memory = right.program.adopted(1 << 16, ALL_ACCESS);
        for n in 0..30 {
            right
                .program
                .post_recv(&mut right.qp, n, &[memory.sge(n * 128, 128)]);
        }
        memory
    });
    let ahs = receivers.each_ref().map(|server| left.ah_to(server.address));
    for n in 0..90u64 {
        let to = (n % 3) as usize;
        left.send(datagram(n, ahs[to], rights[to].qp.qpn), from.sge(n * 64, 64));
    }
    for n in 0..90 {
        assert_eq!((left.queue.wait().wr_id, left.qp.send.posted()), (n, 90));
    }
    for (to, right) in rights.iter_mut().enumerate() {
        for n in 0..30 {
            let received = right.queue.wait();
            assert_eq!(
                (received.wr_id, received.status, received.byte_len),
                (n, SUCCESS, 104)
            );
            let sent = n as usize * 3 + to;
            let at = n as usize * 128 + GRH;
            assert!(
                memories[to].as_slice()[at..at + 64]
                    .iter()
                    .all(|byte| usize::from(*byte) == sent)
            );
        }
    }
}

/// The RNIC itself speaks with controlled queue keys, to queue pair 1 of others: no program gets one, and none reaches that.
#[test]
fn a_program_does_not_speak_in_the_name_of_its_host() {
    let (a, b) = (Server::start([127, 7, 47, 1]), Server::start([127, 7, 47, 2]));
    let (mut left, mut right) = (Ud::new(&a, CAP), Ud::new(&b, CAP));
    // The communication manager's, that of messages that RNICs pass on, and the first and the last of them.
    for qkey in [0x8001_0000, 0x8056_4d01, 0x8000_0000, 0xffff_ffff] {
        let attr = QpAttr {
            qkey,
            ..QpAttr::default()
        };
        let change = Request::ModifyQp {
            qpn: left.qp.qpn,
            mask: QpAttrMask::QKEY,
            attr,
        };
        assert_eq!(left.program.errno(change), libc::EPERM, "{qkey:#x}");
    }
    let from = left.program.adopted(8192, ALL_ACCESS);
    let into = right.program.adopted(8192, ALL_ACCESS);
    right.program.post_recv(&mut right.qp, 1, &[into.sge(0, 100)]);
    let ah = left.ah_to(b.address);
    for (wr_id, remote_qkey) in [(1, QKEY), (2, 0x8001_0000), (3, 0x8056_4d01)] {
        let management = SendWqe {
            remote_qkey,
            ..datagram(wr_id, ah, 1)
        };
        left.send(management, from.sge(0, 8));
    }
    // A controlled key in a request stands for the queue pair's own: this one arrives.
    let own_key = SendWqe {
        remote_qkey: 0x8001_0000,
        ..datagram(4, ah, right.qp.qpn)
    };
    left.send(own_key, from.sge(0, 8));
    assert_eq!(right.queue.wait().byte_len, 48);
    for wr_id in 1..5 {
        let sent = left.queue.wait();
        assert_eq!((sent.wr_id, sent.status), (wr_id, SUCCESS));
    }
    b.wait_for("one packet, and none for queue pair 1", |counters| {
        counters.rx_packets == 1
    });
}

#[test]
fn what_is_not_meant_for_a_queue_pair_is_dropped_and_counted() {
    let (a, b) = (Server::start([127, 7, 42, 1]), Server::start([127, 7, 42, 2]));
    let (mut left, mut right) = (Ud::new(&a, CAP), Ud::new(&b, CAP));
    let from = left.program.adopted(8192, ALL_ACCESS);
    let into = right.program.adopted(8192, ALL_ACCESS);
    let ah = left.ah_to(b.address);
    left.send(datagram(1, ah, right.qp.qpn), from.sge(0, 8));
    assert_eq!(left.queue.wait().status, SUCCESS, "nobody tells a sender");
    b.wait_for("a datagram without a RECV", |counters| {
        counters.rx_no_receive == 1
    });
    right.program.post_recv(&mut right.qp, 1, &[into.sge(0, 100)]);
    let wrong_qkey = SendWqe {
        remote_qkey: QKEY + 1,
        ..datagram(2, ah, right.qp.qpn)
    };
    left.send(wrong_qkey, from.sge(0, 8));
    left.send(datagram(3, ah, right.qp.qpn ^ 1), from.sge(0, 8));
    b.wait_for("a wrong key and a wrong number", |counters| {
        counters.rx_wrong_qkey == 1 && counters.rx_unknown_qp == 1
    });
    left.send(datagram(4, ah, right.qp.qpn), from.sge(0, 8));
    assert_eq!(right.queue.wait().byte_len, 48);
    for wr_id in 2..5 {
        assert_eq!(left.queue.wait().wr_id, wr_id);
    }
    // The address handle is gone, or somebody else's.
    left.program.call(Request::DestroyAh { ah });
    left.send(datagram(5, ah, right.qp.qpn), from.sge(0, 8));
    assert_eq!(left.queue.wait().status, LOC_QP_OP_ERR);
    for wrong in [
        av([0, 0, 0, 0].into()),
        av([255, 255, 255, 255].into()),
        av(Ipv6Addr::LOCALHOST.into()),
        AddressVector {
            sgid_index: 9,
            ..av(b.address)
        },
        AddressVector {
            port_num: 2,
            ..av(b.address)
        },
    ] {
        let request = Request::CreateAh {
            pd: left.program.pd,
            av: wrong,
        };
        assert_eq!(left.program.errno(request), libc::EINVAL);
    }
}

#[test]
fn a_group_reaches_those_that_are_attached() {
    let servers = [1, 2].map(|host| Server::start([127, 7, 43, host]));
    let mut sender = Ud::new(&servers[0], CAP);
    let from = sender.program.adopted(4096, ALL_ACCESS);
    let mut members = [0, 0, 1].map(|server| Ud::new(&servers[server], CAP));
    let memories = members.each_mut().map(|member| {
        let memory = member.program.adopted(4096, ALL_ACCESS);
        for n in 0..4 {
            member
                .program
                .post_recv(&mut member.qp, n, &[memory.sge(n * 256, 256)]);
        }
        memory
    });
    // As rdma_cm maps the group for RoCEv2, and as it does for RoCEv1: the same one.
    let v4 = Ipv4Addr::new(239, 7, 43, 1);
    let mapped = gid(v4.into());
    let mut prefixed = mapped;
    prefixed[..2].copy_from_slice(&[0xff, 0x0e]);
    let groups = [mapped, mapped, prefixed];
    for (member, gid) in members.iter().zip(groups) {
        member.program.call(Request::AttachMcast {
            qpn: member.qp.qpn,
            gid,
        });
        member.program.call(Request::AttachMcast {
            qpn: member.qp.qpn,
            gid,
        });
    }
    let ah = sender.ah_to(v4.into());
    sender.send(datagram(1, ah, 0xff_ffff), from.sge(0, 100));
    assert_eq!(sender.queue.wait().status, SUCCESS);
    for (member, memory) in members.iter_mut().zip(&memories) {
        let received = member.queue.wait();
        assert_eq!((received.wr_id, received.byte_len), (0, 140));
        assert_eq!(
            memory.as_slice()[32..40],
            [127, 7, 43, 1, 239, 7, 43, 1],
            "the header's addresses"
        );
    }
    // One is detached, one is parked: only the third has the next one.
    let detach = Request::DetachMcast {
        qpn: members[0].qp.qpn,
        gid: mapped,
    };
    members[0].program.call(detach.clone());
    assert_eq!(members[0].program.errno(detach), libc::EINVAL);
    members[1].program.call(Request::ParkContext);
    sender.send(datagram(2, ah, 0xff_ffff), from.sge(0, 100));
    assert_eq!(members[2].queue.wait().wr_id, 1);
    servers[0].wait_for("the parked one", |counters| counters.rx_parked == 1);
    assert!(members[0].queue.poll().is_none() && members[1].queue.poll().is_none());

    let not_a_group = Request::AttachMcast {
        qpn: members[0].qp.qpn,
        gid: gid([10, 0, 0, 1].into()),
    };
    assert_eq!(members[0].program.errno(not_a_group), libc::EINVAL);
    let connected = End::new(&servers[0]);
    let wrong_type = Request::AttachMcast {
        qpn: connected.qp.qpn,
        gid: mapped,
    };
    assert_eq!(connected.program.errno(wrong_type), libc::EINVAL);
    assert_eq!(servers[1].stats.read().groups, 1);
    drop(members);
    for server in &servers {
        server.wait_for("the end of the groups", |counters| counters.groups == 0);
    }
}

#[test]
fn an_unreliable_connection_sends_and_writes() {
    let (a, b) = (Server::start([127, 7, 44, 1]), Server::start([127, 7, 44, 2]));
    let (mut left, mut right) = (End::of_type(&a, QpType::Uc), End::of_type(&b, QpType::Uc));
    left.program.connect_uc(&left.qp, b.address, right.qp.qpn);
    right.program.connect_uc(&right.qp, a.address, left.qp.qpn);
    let mut from = left.program.adopted(1 << 20, ALL_ACCESS);
    from.fill(|index| (index * 7 / 5) as u8);
    let into = right.program.adopted(1 << 20, ALL_ACCESS);
    right.program.post_recv(&mut right.qp, 1, &[into.sge(0, 100_000)]);
    left.program.post(&mut left.qp, send(1), &[from.sge(0, 50_000)]);
    let received = right.queue.wait();
    assert_eq!(
        (received.wr_id, received.status, received.byte_len),
        (1, SUCCESS, 50_000)
    );
    assert_eq!(into.as_slice()[..50_000], from.as_slice()[..50_000]);
    assert_eq!(left.queue.wait().status, SUCCESS);

    right.program.post_recv(&mut right.qp, 2, &[]);
    let length = 300_000;
    left.program
        .post(&mut left.qp, write(2, &into, 0), &[from.sge(1000, length)]);
    let last = write_with_imm(3, &into, u64::from(length), 5);
    left.program.post(&mut left.qp, last, &[from.sge(0, 64)]);
    assert_eq!((right.queue.wait().wr_id, left.queue.wait().wr_id), (2, 2));
    assert_eq!(
        into.as_slice()[..length as usize],
        from.as_slice()[1000..][..length as usize]
    );

    let read = support::program::read(4, &into, 0);
    left.queue.wait();
    left.program.post(&mut left.qp, read, &[from.sge(0, 8)]);
    assert_eq!(
        left.queue.wait().status,
        LOC_QP_OP_ERR,
        "unreliable connections have no READ"
    );
}

#[test]
fn ipv6_carries_everything() {
    // An interface with addresses of all kinds, in a network namespace of its own.
    const NETWORK: &[&str] = &[
        "ip link set lo up",
        "ip link add v0 mtu 9000 type veth peer name v1",
        "ip address add 10.7.45.1/24 dev v0",
        "ip -6 address add fd00:7:45::1/64 dev v0 nodad",
        "ip link set v0 addrgenmode none; ip -6 address add fe80::7:45/64 dev v0 nodad",
        "ip link set v1 up; ip link set v0 up",
    ];
    let server = Server::start_in([10, 7, 45, 1].into(), NETWORK, |_| {});
    let (mut left, mut right) = (End::new(&server), End::new(&server));
    let gids = left.program.port.gids.clone();
    let addresses: Vec<_> = gids.iter().map(|entry| Ipv6Addr::from(entry.gid)).collect();
    let v6 = IpAddr::V6("fd00:7:45::1".parse().expect("an address"));
    assert_eq!(addresses.len(), 3, "{addresses:?}");
    assert_eq!(
        (addresses[0], addresses[1]),
        (
            "::ffff:10.7.45.1".parse().unwrap(),
            "fd00:7:45::1".parse().unwrap()
        )
    );
    assert!(addresses[2].is_unicast_link_local() && gids.iter().all(|entry| entry.ifindex > 1));
    let index = 1;
    let over_v6 = |attr: &mut verbatim_device::control::QpAttr| attr.av.sgid_index = index;
    left.program.connect_qp_with(&left.qp, v6, right.qp.qpn, over_v6);
    right.program.connect_qp_with(&right.qp, v6, left.qp.qpn, over_v6);
    let mut from = left.program.adopted(1 << 20, ALL_ACCESS);
    from.fill(|index| (index / 3) as u8);
    let into = right.program.adopted(1 << 20, ALL_ACCESS);
    left.program
        .post(&mut left.qp, write(1, &into, 0), &[from.sge(0, 1 << 20)]);
    assert_eq!(left.queue.wait().status, SUCCESS);
    assert!(into.as_slice() == from.as_slice());
    right.program.post_recv(&mut right.qp, 1, &[into.sge(0, 64)]);
    left.program.post(&mut left.qp, send(2), &[from.sge(0, 64)]);
    assert_eq!(
        (right.queue.wait().status, left.queue.wait().status),
        (SUCCESS, SUCCESS)
    );

    let (mut left, mut right) = (Ud::new(&server, CAP), Ud::new(&server, CAP));
    let way = AddressVector {
        sgid_index: index,
        traffic_class: 0x48,
        hop_limit: 11,
        ..av(v6)
    };
    let grh = exchange(&mut left, &mut right, way);
    assert_eq!(
        (grh[0] >> 4, grh[0] << 4 | grh[1] >> 4, grh[6], grh[7]),
        (6, 0x48, 17, 11)
    );
    assert_eq!((&grh[8..24], &grh[24..]), (&gid(v6)[..], &gid(v6)[..]));

    let local = AddressVector {
        sgid_index: 2,
        ..av(addresses[2].into())
    };
    exchange(&mut left, &mut right, local);

    // A group of IPv6.
    let group: Ipv6Addr = "ff02::7:45".parse().expect("an address");
    let attach = Request::AttachMcast {
        qpn: right.qp.qpn,
        gid: group.octets(),
    };
    right.program.call(attach);
    let to_all = AddressVector {
        sgid_index: index,
        ..av(group.into())
    };
    let ah = left.ah(to_all);
    let into = right.program.adopted(4096, ALL_ACCESS);
    let from = left.program.adopted(4096, ALL_ACCESS);
    right.program.post_recv(&mut right.qp, 3, &[into.sge(0, 4096)]);
    left.send(datagram(3, ah, 0xff_ffff), from.sge(0, 10));
    assert_eq!(
        (left.queue.wait().status, right.queue.wait().byte_len),
        (SUCCESS, 50)
    );
    assert_eq!(server.stats.read().rx_icrc_errors, 0);
}

#[test]
fn a_program_is_a_member_of_so_many_groups_and_no_more() {
    let server = Server::start_with([127, 7, 49, 1], |config| {
        config.limits.per_program.max_mcast_attach = 3;
    });
    let (one, other) = (Ud::new(&server, CAP), Ud::new(&server, CAP));
    assert_eq!(
        (
            one.program.device.max_mcast_grp,
            one.program.device.max_mcast_qp_attach
        ),
        (3, 3)
    );
    let attach = |last, qpn| Request::AttachMcast {
        qpn,
        gid: gid([239, 7, 49, last].into()),
    };
    for last in 1..=3 {
        one.program.call(attach(last, one.qp.qpn));
    }
    // What it has already takes nothing; another queue pair of its own in the same group does.
    one.program.call(attach(3, one.qp.qpn));
    let second = one.program.qp_with(&one.queue, CAP, QpType::Ud, None).qpn;
    for (last, qpn) in [(4, one.qp.qpn), (1, second)] {
        assert_eq!(one.program.errno(attach(last, qpn)), libc::ENOMEM);
    }
    other.program.call(attach(4, other.qp.qpn));
    one.program.call(Request::DetachMcast {
        qpn: one.qp.qpn,
        gid: gid([239, 7, 49, 2].into()),
    });
    one.program.call(attach(1, second));
    one.program.call(Request::DestroyQp { qpn: one.qp.qpn });
    one.program.call(attach(4, second));
}
