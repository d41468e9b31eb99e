//! Each message against bytes that were put together by hand, at the offsets of the standard's tables (IBA §12.6 and §12.11): first
//! the number of the byte in the MAD, then what is there. All other bytes are zero.

use proptest::prelude::*;
use verbatim_cm::wire::{
    Drep, Dreq, IpHeader, IpHeaderError, MAD_BYTES, Mad, Message, Mra, ParseError, Recipient, Rej,
    RejectReason, Rejected, Rep, Rtu, SidrRep, SidrStatus,
};
use verbatim_cm::{
    Cm, CommId, Config, Connect, Gid, Mtu, Owner, Path, PortSpace, Psn, Qpn, Resolve, ServiceId, Time,
    Transport,
};

const GUID: u64 = 0x0102_0304_0506_0708;
const ID: u32 = 0x1122_3344;
const PEER: u32 = 0x5566_7788;

fn bytes(parts: &[(usize, &str)]) -> [u8; MAD_BYTES] {
    let mut bytes = [0; MAD_BYTES];
    for (at, hex) in parts {
        let digits: Vec<u8> = hex.bytes().filter(|byte| *byte != b' ').collect();
        for (place, pair) in digits.chunks(2).enumerate() {
            let pair = std::str::from_utf8(pair).unwrap();
            bytes[at + place] = u8::from_str_radix(pair, 16).unwrap();
        }
    }
    bytes
}

/// What is sent is as expected, and what is expected is read as it was meant.
fn check(message: Message, parts: &[(usize, &str)]) {
    let mad = Mad {
        tid: 0xa1a2_a3a4_a5a6_a7a8,
        message,
    };
    let mut expected = bytes(&[(0, "01 07 02 03 00000000 a1a2a3a4a5a6a7a8")]);
    let body = bytes(parts);
    expected[16..].copy_from_slice(&body[16..]);
    assert_eq!(hex(&mad.emit()), hex(&expected));
    assert_eq!(Mad::parse(&expected), Ok(mad));
}

fn hex(bytes: &[u8]) -> String {
    let lines = bytes.chunks(16).map(|line| {
        let line: Vec<String> = line.iter().map(|byte| format!("{byte:02x}")).collect();
        line.join(" ")
    });
    lines.collect::<Vec<_>>().join("\n")
}

fn gid(address: &str) -> Gid {
    address.parse::<std::net::IpAddr>().unwrap().into()
}

fn path() -> Path {
    Path {
        traffic_class: 0x68,
        flow_label: 0x1_2345,
        sl: 3,
        ..Path::new(gid("10.0.0.1"), gid("10.0.0.2"), Mtu::Mtu1024)
    }
}

fn ip() -> IpHeader {
    IpHeader {
        source: "10.0.0.1".parse().unwrap(),
        source_port: 0xc001,
        destination: "10.0.0.2".parse().unwrap(),
    }
}

fn padded<const N: usize>(start: &[u8]) -> [u8; N] {
    let mut padded = [0; N];
    padded[..start.len()].copy_from_slice(start);
    padded
}

/// As Linux's rdma_cm asks on RoCE: both LIDs permissive, the GIDs mapped from IPv4, the addresses in front of the private data.
#[test]
fn req() {
    let mut cm = Cm::new(Config::new(GUID, ID));
    let connect = Connect {
        ip: Some(ip()),
        responder_resources: 16,
        initiator_depth: 4,
        flow_control: true,
        srq: true,
        private_data: vec![0xd1, 0xd2],
        ..Connect::new(
            ServiceId::of_port(PortSpace::TCP, 7471),
            path(),
            Qpn::new(0xab_cdef),
            Psn::new(0x12_3456),
        )
    };
    cm.connect(Time::ZERO, Owner(1), &connect).unwrap();
    let sent = cm.poll_transmit().unwrap();
    assert_eq!(
        (sent.from, sent.to, sent.pkey),
        (gid("10.0.0.1"), gid("10.0.0.2"), 0xffff)
    );
    assert_eq!(
        (sent.traffic_class, sent.flow_label, sent.hop_limit),
        (0x68, 0x1_2345, 64)
    );
    let expected = bytes(&[
        (0, "01 07 02 03 00000000"),
        (8, "00000000 11223344"),    // transaction
        (16, "0010 0000 00000000"),  // attribute REQ
        (24, "11223344"),            // local comm ID
        (32, "00000000 01 06 1d2f"), // service: prefix, TCP, port
        (40, "0102030405060708"),    // CA GUID
        (56, "abcdef 10"),           // QPN, responder resources
        (63, "04"),                  // initiator depth
        (67, "a1"),                  // remote response timeout 20, RC, flow control
        (68, "123456 a7"),           // PSN, local response timeout 20, retry count 7
        (72, "ffff"),                // partition
        (74, "37"),                  // MTU 1024, RNR retry count 7
        (75, "f8"),                  // 15 CM retries, SRQ
        (76, "ffff ffff"),           // LIDs
        (80, "00000000000000000000 ffff 0a000001"),
        (96, "00000000000000000000 ffff 0a000002"),
        (112, "12345 003"),   // flow label, rate
        (116, "68 40 30 98"), // traffic class, hop limit, SL, ACK timeout 19
        (164, "00 40 c001"),  // IP CM service: version 0, IPv4, source port
        (168, "000000000000000000000000 0a000001"),
        (184, "000000000000000000000000 0a000002"),
        (200, "d1d2"),
    ]);
    assert_eq!(hex(&*sent.bytes), hex(&expected));
    let Ok(Mad {
        message: Message::Req(req),
        ..
    }) = Mad::parse(&expected)
    else {
        panic!("it is a REQ");
    };
    assert_eq!(IpHeader::parse(req.private_data.first_chunk().unwrap()), Ok(ip()));
    assert_eq!((req.primary.local_gid, req.primary.rate), (gid("10.0.0.1"), 3));
    assert_eq!((req.mtu, req.max_cm_retries, req.transport), (3, 15, 0));
}

/// UC without a router on the way, IPv6, no shared receive queue.
#[test]
fn req_of_ipv6_and_uc() {
    let mut cm = Cm::new(Config::new(GUID, ID));
    let path = Path {
        hop_limit: 1,
        ..Path::new(gid("fd00::1"), gid("fd00::2"), Mtu::Mtu4096)
    };
    let connect = Connect {
        ip: Some(IpHeader {
            source: "fd00::1".parse().unwrap(),
            source_port: 1,
            destination: "fd00::2".parse().unwrap(),
        }),
        transport: Transport::Uc,
        ..Connect::new(ServiceId(0xfeed), path, Qpn::new(2), Psn::new(3))
    };
    cm.connect(Time::ZERO, Owner(1), &connect).unwrap();
    let sent = cm.poll_transmit().unwrap().bytes;
    assert_eq!(sent[67], 0xa2, "response timeout 20, UC, no flow control");
    assert_eq!(sent[74..76], [0x57, 0xf0], "MTU 4096, no SRQ");
    assert_eq!(sent[76..80], [0; 4], "no LIDs");
    assert_eq!(sent[118], 0x08, "subnet local");
    assert_eq!(sent[164..168], [0, 0x60, 0, 1]);
    assert_eq!(sent[168..184], gid("fd00::1").0);
}

#[test]
fn alternate_path() {
    let mut frame = bytes(&[(0, "01 07 02 03"), (16, "0010")]);
    frame[120..122].copy_from_slice(&[0x12, 0x34]);
    frame[136..140].copy_from_slice(&[9, 8, 7, 6]);
    frame[163] = 0x88;
    let Ok(Mad {
        message: Message::Req(req),
        ..
    }) = Mad::parse(&frame)
    else {
        panic!("it is a REQ");
    };
    assert_eq!((req.alternate.local_lid, req.alternate.ack_timeout), (0x1234, 17));
    assert_eq!(req.alternate.local_gid.0[12..], [9, 8, 7, 6]);
}

#[test]
fn rep() {
    let rep = Rep {
        local_comm_id: CommId(ID),
        remote_comm_id: CommId(PEER),
        qkey: 0,
        qpn: Qpn::new(0xab_cdef),
        starting_psn: Psn::new(0x12_3456),
        responder_resources: 5,
        initiator_depth: 6,
        target_ack_delay: 15,
        failover_accepted: 1,
        flow_control: true,
        rnr_retry_count: 7,
        srq: true,
        local_guid: GUID,
        private_data: padded(&[0xd1, 0xd2]),
    };
    check(
        Message::Rep(Box::new(rep)),
        &[
            (16, "0013"),
            (24, "11223344 55667788"),
            (36, "abcdef 00"),
            (44, "123456 00"),
            (48, "05 06 7b f0"),
            (52, "0102030405060708"),
            (60, "d1d2"),
        ],
    );
}

#[test]
fn mra_rej_rtu_dreq_drep() {
    let (local_comm_id, remote_comm_id) = (CommId(ID), CommId(PEER));
    let mra = Mra {
        local_comm_id,
        remote_comm_id,
        message: Rejected::REP,
        service_timeout: 24,
        private_data: padded(&[0xd1]),
    };
    check(
        Message::Mra(Box::new(mra)),
        &[(16, "0011"), (24, "11223344 55667788 40 c0 d1")],
    );
    let rej = Rej {
        local_comm_id,
        remote_comm_id,
        message: Rejected::OTHER,
        additional_length: 8,
        reason: RejectReason::TIMEOUT,
        additional: padded(&GUID.to_be_bytes()),
        private_data: padded(&[0xd1]),
    };
    assert_eq!(rej.additional(), GUID.to_be_bytes());
    let mad = Mad {
        tid: 1,
        message: Message::Rej(Box::new(rej.clone())),
    };
    let peer = Recipient::Peer {
        remote_guid: GUID,
        remote: CommId(ID),
    };
    assert_eq!(mad.recipient(), peer);
    check(
        Message::Rej(Box::new(rej)),
        &[
            (16, "0012"),
            (24, "11223344 55667788 80 10 0004 0102030405060708"),
            (108, "d1"),
        ],
    );
    let rtu = Rtu {
        local_comm_id,
        remote_comm_id,
        private_data: padded(&[0xd1]),
    };
    check(
        Message::Rtu(Box::new(rtu)),
        &[(16, "0014"), (24, "11223344 55667788 d1")],
    );
    let dreq = Dreq {
        local_comm_id,
        remote_comm_id,
        remote_qpn: Qpn::new(0xab_cdef),
        private_data: padded(&[0xd1]),
    };
    check(
        Message::Dreq(Box::new(dreq)),
        &[(16, "0015"), (24, "11223344 55667788 abcdef 00 d1")],
    );
    let drep = Drep {
        local_comm_id,
        remote_comm_id,
        private_data: padded(&[0xd1]),
    };
    check(
        Message::Drep(Box::new(drep)),
        &[(16, "0016"), (24, "11223344 55667788 d1")],
    );
}

#[test]
fn sidr() {
    let mut cm = Cm::new(Config::new(GUID, ID));
    let resolve = Resolve {
        ip: Some(ip()),
        private_data: vec![0xd1],
        ..Resolve::new(ServiceId::of_port(PortSpace::UDP, 7471), path())
    };
    cm.resolve(Time::ZERO, Owner(1), &resolve).unwrap();
    let expected = bytes(&[
        (0, "01 07 02 03"),
        (12, "11223344"),
        (16, "0017"),
        (24, "11223344 ffff 0000 00000000 01 11 1d2f"),
        (40, "00 40 c001"),
        (56, "0a000001"),
        (72, "0a000002"),
        (76, "d1"),
    ]);
    assert_eq!(hex(&*cm.poll_transmit().unwrap().bytes), hex(&expected));
    let rep = SidrRep {
        request_id: CommId(PEER),
        status: SidrStatus::REJECTED,
        additional_length: 1,
        qpn: Qpn::new(0xab_cdef),
        service: ServiceId(0x0111_1d2f),
        qkey: 0x0123_4567,
        additional: padded(&[0xe1]),
        private_data: padded(&[0xd1]),
    };
    check(
        Message::SidrRep(Box::new(rep)),
        &[
            (16, "0018"),
            (24, "55667788 02 01 0000 abcdef 00"),
            (36, "00000000 01111d2f 01234567 e1"),
            (120, "d1"),
        ],
    );
}

#[test]
fn what_is_no_message() {
    let good = bytes(&[(0, "01 07 02 03"), (16, "0014")]);
    assert!(Mad::parse(&good).is_ok());
    assert_eq!(Mad::parse(&good[..255]), Err(ParseError::Length(255)));
    assert_eq!(Mad::parse(&[]), Err(ParseError::Length(0)));
    for at in 0..4 {
        let mut other = good;
        other[at] ^= 1;
        assert!(
            matches!(Mad::parse(&other), Err(ParseError::Class { .. })),
            "byte {at}"
        );
    }
    for (attribute, name) in [(0x19, "LAP"), (0x1a, "APR"), (0x01, "ClassPortInfo")] {
        let mut other = good;
        other[17] = attribute;
        assert_eq!(
            Mad::parse(&other),
            Err(ParseError::Unsupported(u16::from(attribute))),
            "{name}"
        );
    }
}

#[test]
fn headers_of_the_ip_cm_service() {
    for (first, error) in [
        (
            [0x10, 0x40],
            IpHeaderError {
                version: 0x10,
                ip_version: 4,
            },
        ),
        (
            [0x00, 0x50],
            IpHeaderError {
                version: 0,
                ip_version: 5,
            },
        ),
        (
            [0x00, 0x00],
            IpHeaderError {
                version: 0,
                ip_version: 0,
            },
        ),
    ] {
        assert_eq!(IpHeader::parse(&padded(&first)), Err(error));
    }
}

/// Random bytes under a good header.
fn any_mad() -> impl Strategy<Value = Vec<u8>> {
    (prop::collection::vec(any::<u8>(), MAD_BYTES), 0x10u8..0x1c).prop_map(|(mut bytes, attribute)| {
        bytes[..4].copy_from_slice(&[1, 7, 2, 3]);
        bytes[16..18].copy_from_slice(&[0, attribute]);
        bytes
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_was_read_and_written_is_read_the_same(bytes in any_mad()) {
        if let Ok(mad) = Mad::parse(&bytes) {
            prop_assert_eq!(Mad::parse(&mad.emit()), Ok(mad));
        }
    }

    #[test]
    fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        let _: Result<Mad, ParseError> = Mad::parse(&bytes);
    }
}
