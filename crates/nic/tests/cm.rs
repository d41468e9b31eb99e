//! Connections by address and port, over the device contract: two RNICs, and whatever programs ask of them.

mod support;

use std::net::SocketAddr;
use std::os::fd::AsFd;

use support::cm::*;
use support::{Server, wait_for};
use verbatim_device::control::{
    CM_MAX_PRIVATE_DATA, CmDetails, CmNews, CmReply, CmRequest, QpAttrMask, QpState, Reply, Request,
};
use verbatim_seqpacket::Socket;

#[test]
fn a_connection_is_made_and_ended_and_both_ends_have_what_queue_pairs_need() {
    let (a, b) = (Server::start([127, 7, 97, 1]), Server::start([127, 7, 97, 2]));
    let (client, server) = (Caller::new(&a), Caller::new(&b));
    let listener = server.listen(at(&b, 7471));
    let (id, peer) = established(&client, &server, at(&b, 7471));

    let (_, ours) = client.attributes(id, QpState::Rtr);
    let (_, theirs) = server.attributes(peer, QpState::Rts);
    assert_eq!((ours.dest_qpn, ours.rq_psn), (0x222, theirs.sq_psn));
    let (mask, theirs) = server.attributes(peer, QpState::Rtr);
    let (_, ours) = client.attributes(id, QpState::Rts);
    assert_eq!((theirs.dest_qpn, theirs.rq_psn), (0x111, ours.sq_psn));
    assert!(mask.contains(QpAttrMask::AV | QpAttrMask::RQ_PSN | QpAttrMask::MAX_DEST_RD_ATOMIC));
    assert_eq!((ours.rnr_retry, theirs.av.port_num), (6, 1));

    let CmReply::Route(route) = server.call(CmRequest::Query { id: peer }) else {
        panic!("no route");
    };
    assert_eq!(route.source, Some(at(&b, 7471)));
    assert_eq!(route.destination.unwrap().ip(), a.address);

    client.call(CmRequest::Disconnect { id });
    assert_eq!(server.expect(DISCONNECTED).id, peer);
    assert_eq!(client.expect(DISCONNECTED).status, 0);
    // Two of resolving, a response, the end.
    assert_eq!(client.reported(CmRequest::DestroyId { id }), 4);
    assert_eq!(server.reported(CmRequest::DestroyId { id: peer }), 2);
    assert_eq!(server.reported(CmRequest::DestroyId { id: listener }), 1);
    assert_eq!(server.errno(CmRequest::DestroyId { id: listener }), libc::ENOENT);
    assert!(!client.take_news() && !server.take_news());
}

#[test]
fn who_is_not_listened_to_is_rejected_and_so_is_who_is_not_wanted() {
    let (a, b) = (Server::start([127, 7, 97, 3]), Server::start([127, 7, 97, 4]));
    let (client, server) = (Caller::new(&a), Caller::new(&b));
    let nobody = client.resolve(1, TCP, at(&b, 1));
    client.connect(nobody, b"");
    // IBA Vol 1 table 111: invalid service id.
    assert_eq!(client.expect(REJECTED).status, 8);

    server.listen(at(&b, 7471));
    let id = client.resolve(2, TCP, at(&b, 7471));
    client.connect(id, b"");
    let request = server.expect(CONNECT_REQUEST);
    server.call(CmRequest::Reject {
        id: request.id,
        reason: 0,
        private_data: b"no".to_vec(),
    });
    let rejected = client.expect(REJECTED);
    assert_eq!(
        (rejected.status, &connection(&rejected).private_data[..2]),
        (28, &b"no"[..])
    );
}

/// The host is there, and no RNIC: its kernel says so. An RNIC would have been asked for more than a minute.
#[test]
fn where_no_rnic_is_requests_end_within_seconds() {
    let a = Server::start([127, 7, 97, 21]);
    let client = Caller::new(&a);
    let begun = std::time::Instant::now();
    for (uid, space) in [(1, TCP), (2, UDP)] {
        let nowhere = SocketAddr::new([127, 7, 97, 22].into(), 7471);
        let id = client.resolve(uid, space, nowhere);
        client.connect(id, b"");
        assert_eq!(client.expect(UNREACHABLE).id, id);
    }
    assert!(
        begun.elapsed() < std::time::Duration::from_secs(10),
        "{:?}",
        begun.elapsed()
    );
}

#[test]
fn a_program_that_dies_ends_its_connections_and_frees_its_ports() {
    let (a, b) = (Server::start([127, 7, 97, 5]), Server::start([127, 7, 97, 6]));
    let (client, server) = (Caller::new(&a), Caller::new(&b));
    server.listen(at(&b, 7471));
    established(&client, &server, at(&b, 7471));
    let other = Caller::new(&b);
    let id = other.id(1, TCP);
    let bind = || CmRequest::Bind {
        id,
        address: at(&b, 7471),
    };
    assert_eq!(other.errno(bind()), libc::EADDRINUSE);
    drop(server);
    client.expect(DISCONNECTED);
    wait_for("the port", || other.program.ask(&Request::Cm(bind()), &[]).ok());
}

#[test]
fn programs_do_not_reach_each_others_ids_and_have_so_many_only() {
    let server = Server::start_with([127, 7, 97, 7], |config| {
        config.limits.per_program.max_cm_ids = 3;
    });
    let (one, other) = (Caller::new(&server), Caller::new(&server));
    let id = one.id(1, TCP);
    assert_eq!(other.errno(CmRequest::DestroyId { id }), libc::ENOENT);
    assert_eq!(other.errno(CmRequest::Query { id }), libc::ENOENT);
    let channel = one.channel;
    assert_eq!(other.errno(CmRequest::DestroyChannel { channel }), libc::EINVAL);
    assert_eq!(other.errno(CmRequest::GetEvent { channel }), libc::EINVAL);
    let create = |port_space| CmRequest::CreateId {
        channel,
        uid: 1,
        port_space,
        qp_type: RC,
    };
    assert_eq!(one.errno(create(0x0002)), libc::EPROTONOSUPPORT);
    assert_eq!(one.errno(create(0x0999)), libc::EINVAL);
    let _ids = [one.id(2, TCP), one.id(3, UDP)];
    assert_eq!(one.errno(create(TCP)), libc::ENOMEM);
    one.reported(CmRequest::DestroyId { id });
    one.id(4, TCP);
}

#[test]
fn what_makes_no_sense_is_refused_as_by_the_kernel() {
    let server = Server::start([127, 7, 97, 8]);
    let caller = Caller::new(&server);
    let id = caller.id(1, TCP);
    let elsewhere = "127.7.97.99:1".parse().unwrap();
    assert_eq!(
        caller.errno(CmRequest::Bind {
            id,
            address: elsewhere
        }),
        libc::ENODEV
    );
    assert_eq!(
        caller.errno(CmRequest::ResolveRoute { id, timeout_ms: 1 }),
        libc::EINVAL
    );
    let too_long = parameters(1, &[0; CM_MAX_PRIVATE_DATA + 1]);
    let connect = |parameters| CmRequest::Connect { id, parameters };
    assert_eq!(caller.errno(connect(too_long)), libc::EINVAL);
    assert_eq!(
        caller.errno(connect(parameters(1, b""))),
        libc::EINVAL,
        "no route"
    );
    assert_eq!(caller.errno(CmRequest::Disconnect { id }), libc::EINVAL);
    let option = |name, value: &[u8]| CmRequest::SetOption {
        id,
        level: 0,
        name,
        value: value.to_vec(),
    };
    caller.call(option(0, &[8]));
    caller.call(option(1, &1_i32.to_ne_bytes()));
    assert_eq!(caller.errno(option(1, &[1])), libc::EINVAL);
    assert_eq!(caller.errno(option(9, &[1])), libc::ENOSYS);
    // Room for less than the RNIC's own words in front of them.
    let resolved = caller.resolve(2, TCP, at(&server, 9));
    let most = CmRequest::Connect {
        id: resolved,
        parameters: parameters(1, &[0; 57]),
    };
    assert_eq!(caller.errno(most), libc::EINVAL);
    // Of another family than any address of the RNIC.
    let id = caller.id(3, TCP);
    caller.call(CmRequest::ResolveAddress {
        id,
        source: None,
        destination: "[fd00::1]:1".parse().unwrap(),
        timeout_ms: 1,
    });
    assert!(caller.expect(ADDR_ERROR).status < 0);
}

#[test]
fn datagrams_learn_the_queue_pair_and_its_key() {
    let (a, b) = (Server::start([127, 7, 97, 9]), Server::start([127, 7, 97, 10]));
    let (client, server) = (Caller::new(&a), Caller::new(&b));
    let listener = server.id(7, UDP);
    server.call(CmRequest::Bind {
        id: listener,
        address: at(&b, 7471),
    });
    server.call(CmRequest::Listen {
        id: listener,
        backlog: 0,
    });
    let id = client.resolve(1, UDP, at(&b, 7471));
    client.connect(id, b"who?");
    let request = server.expect(CONNECT_REQUEST);
    server.call(CmRequest::Accept {
        id: request.id,
        uid: 9,
        parameters: Some(parameters(0x333, b"me")),
    });
    let CmDetails::Datagrams(told) = client.expect(ESTABLISHED).details else {
        panic!("no datagrams");
    };
    assert_eq!(
        (told.qp_num, told.qkey, &told.private_data[..2]),
        (0x333, 0x0123_4567, &b"me"[..])
    );
    let (mask, attr) = client.attributes(id, QpState::Init);
    assert!(mask.contains(QpAttrMask::QKEY) && attr.qkey == 0x0123_4567);
    let nobody = client.resolve(2, UDP, at(&b, 2));
    client.connect(nobody, b"");
    assert_eq!(client.expect(UNREACHABLE).status, 1, "unsupported service");
}

#[test]
fn an_id_takes_its_events_to_another_channel() {
    let server = Server::start([127, 7, 97, 11]);
    let caller = Caller::new(&server);
    let id = caller.id(5, TCP);
    caller.call(CmRequest::ResolveAddress {
        id,
        source: None,
        destination: at(&server, 9),
        timeout_ms: 1,
    });
    let (news, theirs) = Socket::pair().unwrap();
    news.set_nonblocking(true).unwrap();
    let created = caller
        .program
        .ask(&Request::Cm(CmRequest::CreateChannel), &[theirs.as_fd()]);
    let Ok(Reply::Cm(CmReply::Channel { channel })) = created else {
        panic!("{created:?}");
    };
    assert_eq!(caller.reported(CmRequest::MigrateId { id, channel }), 0);
    assert!(!caller.take_news(), "the channel where it was is quiet");
    let event = caller.call(CmRequest::GetEvent { channel });
    let CmReply::Event { event, quiet: true } = event else {
        panic!("{event:?}");
    };
    assert_eq!((event.uid, event.event), (5, ADDR_RESOLVED));
    assert!(news.recv::<CmNews>().is_ok());
    // What nobody has taken goes with the id.
    caller.call(CmRequest::ResolveRoute { id, timeout_ms: 1 });
    let gone = caller.call(CmRequest::DestroyId { id });
    assert_eq!(
        gone,
        CmReply::Reported {
            events: 1,
            quiet: true
        }
    );
}
