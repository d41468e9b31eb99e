//! Real packets, and the properties that the search for the identification relies on.

use super::*;
use proptest::prelude::*;

fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.chunks(2).map(byte).collect()
}

fn flow(source: &str, destination: &str) -> Flow {
    Flow::new(source.parse().unwrap(), destination.parse().unwrap()).unwrap()
}

/// A congestion notification from a ConnectX-4 Lx, captured on the wire (in Scapy's tests, `roce.uts`): 10.0.17.1 to
/// 10.0.18.1, identification 0x718c.
#[test]
fn packet_captured_from_hardware() {
    let datagram = unhex("8100ffff40000118 0000000000000000 0000000000000000 00000000 82fd002a");
    let flow = flow("10.0.17.1:0", "10.0.18.1:4791");
    assert_eq!(flow.verify(&datagram, 0x718c), Verdict::Expected);
    assert_eq!(flow.verify(&datagram, 0), Verdict::Identification(0x718c));
    assert_eq!(flow.verify(&datagram, 0xffff), Verdict::Identification(0x718c));
}

/// A UC SEND Only with payload and padding (in Scapy's tests, `roce.uts`): 192.168.0.7 to itself, identification 1144.
#[test]
fn packet_with_payload() {
    let datagram = unhex("2460ffff000000d3 00cf1710 4630818b e28935d9 0e9a9550 5401be88 5e500000 78f353f3");
    let flow = flow("192.168.0.7:49152", "192.168.0.7:4791");
    assert_eq!(flow.verify(&datagram, 1144), Verdict::Expected);
    assert_eq!(flow.verify(&datagram, 0), Verdict::Identification(1144));
    for byte in 0..datagram.len() {
        let mut damaged = datagram.clone();
        damaged[byte] ^= 0x10;
        let expected = if byte == RESV8A_OFFSET {
            Verdict::Expected
        } else {
            Verdict::Damaged
        };
        assert_eq!(flow.verify(&damaged, 1144), expected, "byte {byte}");
    }
}

#[test]
fn mapped_addresses_are_ipv4() {
    assert_eq!(
        flow("[::ffff:10.0.0.1]:1", "10.0.0.2:2"),
        flow("10.0.0.1:1", "10.0.0.2:2")
    );
    assert!(Flow::new("[::1]:1".parse().unwrap(), "10.0.0.2:2".parse().unwrap()).is_err());
}

/// The same packet over IPv6, with the ICRC as zlib gives it for: eight ones; version 6, traffic class, flow label and
/// hop limit all ones, the lengths, next header 17 and the addresses; the ports, the length and a checksum of ones; the
/// packet with `resv8a` all ones.
#[test]
fn packet_over_ipv6() {
    let datagram = unhex("2460ffff000000d3 00cf1710 4630818b e28935d9 0e9a9550 5401be88 5e500000 f8e3ff24");
    let good = flow("[2001:db8::1]:49152", "[2001:db8:0:1::2]:4791");
    assert_eq!(good.verify(&datagram, 0), Verdict::Expected);
    for other in [
        flow("[2001:db8::2]:49152", "[2001:db8:0:1::2]:4791"),
        flow("[2001:db8::1]:49153", "[2001:db8:0:1::2]:4791"),
    ] {
        assert_eq!(other.verify(&datagram, 0), Verdict::Damaged);
    }
}

#[test]
fn ipv6_has_no_identification() {
    let flow = flow("[fe80::1]:4791", "[fe80::2]:4791");
    let mut datagram = vec![5; 100];
    let icrc = flow.icrc(&datagram, 0);
    assert_eq!(icrc, flow.icrc(&datagram, 9));
    datagram.extend(icrc.to_le_bytes());
    assert_eq!(flow.verify(&datagram, 3), Verdict::Expected);
    datagram[50] ^= 1;
    assert_eq!(flow.verify(&datagram, 3), Verdict::Damaged);
}

#[test]
fn random_damage_passes_as_another_identification_once_in_65536() {
    use rand::{RngCore, SeedableRng};
    let mut rng = rand::rngs::StdRng::seed_from_u64(1);
    let flow = flow("10.0.0.1:4791", "10.0.0.2:4791");
    let mut datagram = [0; 64];
    let mut passed = 0;
    for _ in 0..400_000 {
        rng.fill_bytes(&mut datagram);
        passed += u32::from(flow.verify(&datagram, 0).is_good());
    }
    assert!((1..20).contains(&passed), "about 6 are expected, {passed} passed");
}

proptest! {
    #[test]
    fn any_identification_is_found(
        body in proptest::collection::vec(any::<u8>(), 0..5000),
        sent: u16,
        expected: u16,
    ) {
        let flow = flow("10.0.0.1:4791", "10.0.0.2:4791");
        let mut datagram = body;
        datagram.extend(flow.icrc(&datagram, sent).to_le_bytes());
        let verdict = if sent == expected { Verdict::Expected } else { Verdict::Identification(sent) };
        prop_assert_eq!(flow.verify(&datagram, expected), verdict);
    }

    #[test]
    fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
        flow("10.0.0.1:4791", "10.0.0.2:4791").verify(&bytes, 0);
        flow("[fe80::1]:4791", "[fe80::2]:4791").verify(&bytes, 0);
    }
}
