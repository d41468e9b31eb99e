use verbatim_device::control::QpOwner;

use super::*;

fn forward(qpn: u32) -> Forward {
    Forward {
        endpoint: Endpoint { gid: [7; 16], qpn },
        keys: vec![KeyPair {
            virtual_key: 1,
            physical_key: 2,
            any_tag: false,
        }],
    }
}

#[test]
fn published_numbers_are_new_and_not_those_of_the_rnic() {
    let folder = tempfile::tempdir().unwrap();
    let forwarding = Forwarding::open(&folder.path().join("forwarding"), SystemTime::now()).unwrap();
    forwarding.lock().next = QPNS - 2;
    forwarding.insert([(FIRST_PUBLISHED_QPN, forward(9))]);
    let given: Vec<_> = (0..4)
        .map(|qpn| forwarding.publish(forward(qpn), "a").unwrap())
        .collect();
    let first = FIRST_PUBLISHED_QPN;
    assert_eq!(given, [QPNS - 2, QPNS - 1, first + 1, first + 2]);
    assert_eq!(forwarding.get(first), Some(forward(9)));
    assert_eq!(forwarding.get(first + 1), Some(forward(2)));
}

#[test]
fn the_file_is_nobody_elses_to_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("forwarding");
    // An earlier release has left it.
    std::fs::write(&path, "").unwrap();
    std::fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
    let forwarding = Forwarding::open(&path, SystemTime::now()).unwrap();
    forwarding.insert([(1, forward(1))]);
    assert_eq!(
        std::fs::metadata(&path).unwrap().permissions().mode() & 0o777,
        0o600
    );
}

#[test]
fn entries_outlive_the_agent_and_expire() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("forwarding");
    let now = SystemTime::now();
    let forwarding = Forwarding::open(&path, now).unwrap();
    forwarding.insert([1, 2, 3].map(|qpn| (qpn, forward(qpn + 10))));
    forwarding.remove(2);
    forwarding.insert([(3, forward(33))]);
    drop(forwarding);
    // A line that a crash has cut off.
    let mut file = OpenOptions::new().append(true).open(&path).unwrap();
    file.write_all(b"{\"qpn\":9,\"forw").unwrap();

    let forwarding = Forwarding::open(&path, now).unwrap();
    assert_eq!(forwarding.get(1), Some(forward(11)));
    assert_eq!(forwarding.get(2), None);
    assert_eq!(forwarding.get(3), Some(forward(33)));
    assert_eq!(forwarding.get(9), None);
    let later = now + LIFETIME + Duration::from_secs(60);
    assert_eq!(forwarding.get_at(1, later), None);
    drop(forwarding);
    let forwarding = Forwarding::open(&path, later).unwrap();
    assert_eq!(forwarding.get(3), None);
    assert_eq!(
        std::fs::read(&path).unwrap(),
        b"",
        "what has expired is forgotten"
    );
}

#[test]
fn a_number_is_another_one_s_when_the_rnic_gives_it_again_and_not_before() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("forwarding");
    let open = || Forwarding::open(&path, SystemTime::now()).unwrap();
    let forwarding = open();
    forwarding.insert([1, 2, 3].map(|qpn| (qpn, forward(qpn + 10))));
    let (frozen, newcomer, agent) = (
        QpOwner::Process(-7),
        QpOwner::Process(-8),
        QpOwner::Process(std::process::id().cast_signed()),
    );
    for qpn in [1, 2, 3] {
        forwarding.is_whose(qpn, frozen);
        assert_eq!(forwarding.get(qpn), Some(forward(qpn + 10)));
    }
    forwarding.are_destroyed([1, 9].into_iter());
    forwarding.is_whose(2, QpOwner::None);
    // It has left once more, and where it is changes nothing about its number here.
    let moved = Moved {
        from: at(7, 12),
        to: at(8, 5),
        keys: None,
    };
    assert_eq!(forwarding.retarget(&[moved]), 1);
    drop(forwarding);

    let forwarding = open();
    assert!(forwarding.get(1).is_some() && forwarding.get(2).is_some());
    let left = || [1, 2, 3].map(|qpn| forwarding.get(qpn).is_some());
    for (qpn, owner, expected) in [
        (1, agent, [true; 3]),
        (1, QpOwner::Unknown, [true; 3]),
        (1, newcomer, [false, true, true]),
        (2, newcomer, [false, false, true]),
        (3, frozen, [false, false, true]),
    ] {
        forwarding.is_whose(qpn, owner);
        assert_eq!(left(), expected, "{qpn} is {owner:?}'s");
    }
    // The newcomer leaves, too: it is the one that has the number until it is destroyed.
    forwarding.insert([(1, forward(99))]);
    forwarding.is_whose(1, newcomer);
    assert_eq!(forwarding.get(1), Some(forward(99)));
    drop(forwarding);
    assert_eq!(open().get(2), None);
}

fn at(host: u8, qpn: u32) -> Endpoint {
    Endpoint { gid: [host; 16], qpn }
}

/// An instance with one queue pair moves to and fro among hosts; its program published number 1 of host 0.
#[test]
fn to_and_fro_leaves_no_chain_and_no_growth() {
    const HOSTS: u8 = 3;
    let folder = tempfile::tempdir().unwrap();
    let path = |host: u8| folder.path().join(host.to_string());
    let now = SystemTime::now();
    let open = |host| Forwarding::open(&path(host), now).unwrap();
    let hosts: Vec<_> = (0..HOSTS).map(open).collect();
    let mut place = at(0, 1);
    for step in 1..500u32 {
        let there = at((place.gid[0] + 1 + (step % 2) as u8) % HOSTS, 100 + step);
        let moved = [Moved {
            from: place,
            to: there,
            keys: (step % 3 == 0).then(Vec::new),
        }];
        let request = encode(&moved);
        assert_eq!(decode(request, place.gid).unwrap(), moved);
        let source = &hosts[usize::from(place.gid[0])];
        let forward = Forward {
            endpoint: there,
            keys: Vec::new(),
        };
        source.insert([(place.qpn, forward)]);
        for host in &hosts {
            host.retarget(&moved);
        }
        source.prune(&HashMap::from([(there, [1, place.qpn])]));
        place = there;
        assert_eq!(
            hosts[0].get(1).unwrap().endpoint,
            place,
            "one hop from where it was published"
        );
        for host in &hosts {
            let entries = host.lock().entries.len();
            assert!(entries <= 2, "{entries} entries after {step} moves");
        }
    }
    drop(hosts);
    assert_eq!(open(0).get(1).unwrap().endpoint, place);
}

#[test]
fn only_the_host_that_an_entry_leads_to_says_where_it_leads_next() {
    let folder = tempfile::tempdir().unwrap();
    let forwarding = Forwarding::open(&folder.path().join("forwarding"), SystemTime::now()).unwrap();
    forwarding.insert([(1, forward(11))]);
    let moved = |from| Moved {
        from,
        to: at(7, 99),
        keys: None,
    };
    // Another host, and another queue pair of the right one.
    assert_eq!(forwarding.retarget(&[moved(at(8, 11)), moved(at(7, 12))]), 0);
    assert_eq!(forwarding.get(1), Some(forward(11)));
    assert_eq!(forwarding.retarget(&[moved(at(7, 11))]), 1);
    assert_eq!(forwarding.get(1), Some(forward(99)));
}

#[test]
fn the_file_does_not_grow_for_ever() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("forwarding");
    let forwarding = Forwarding::open(&path, SystemTime::now()).unwrap();
    for _ in 0..40_000 {
        forwarding.insert([(1, forward(11))]);
    }
    assert!(std::fs::metadata(&path).unwrap().len() <= COMPACT_BYTES);
    drop(forwarding);
    let forwarding = Forwarding::open(&path, SystemTime::now()).unwrap();
    assert_eq!(forwarding.get(1), Some(forward(11)));
}
