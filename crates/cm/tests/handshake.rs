//! Stories of one connection, message by message, and what is refused.

mod world;

use std::time::Duration;

use verbatim_cm::wire::RejectReason;
use verbatim_cm::{
    Accepts, CommId, Error, Event, Listen, ListenAddress, Owner, PortSpace, Psn, Qpn, ServiceId, State,
    Transport,
};
use world::story::{DREP, DREQ, MRA, REJ, REP, REQ, RTU, accepted, asked, messages, starts_with, world};
use world::{Faults, OWNER, PORT, World, accept, address, connect, gid, header, listen};

#[test]
fn a_connection_and_its_end() {
    let (mut world, listener) = world();
    let active = world.hosts[0]
        .connect(world.now, OWNER, &connect(0, 1, 0x11))
        .unwrap();
    assert_eq!(world.hosts[0].state(active), Some(State::ReqSent));
    world.settle();

    let notice = world.event(1).unwrap();
    let passive = notice.id;
    let Event::ConnectRequest(request) = notice.event else {
        panic!("a request");
    };
    assert_eq!((request.listener, notice.owner), (listener, OWNER));
    assert_eq!(request.service, ServiceId::of_port(PortSpace::TCP, PORT));
    assert_eq!(request.ip, Some(header(0, 1)));
    assert_eq!((request.remote_guid, request.transport), (0x1000, Transport::Rc));
    assert_eq!((request.path.local, request.path.remote), (gid(1), gid(0)));
    assert_eq!(
        (request.remote_qpn, request.starting_psn),
        (Qpn::new(0x11), Psn::new(1017))
    );
    assert_eq!(
        (request.responder_resources, request.initiator_depth),
        (2, 3),
        "the other way round"
    );
    starts_with(&request.private_data, b"request", 56);

    world.hosts[1].taken(passive);
    world.hosts[1].accept(world.now, passive, &accept(0x22)).unwrap();
    world.settle();
    let Event::ConnectResponse(response) = world.event(0).unwrap().event else {
        panic!("a response");
    };
    assert_eq!(
        (response.remote_guid, response.remote_qpn),
        (0x1001, Qpn::new(0x22))
    );
    assert_eq!((response.responder_resources, response.initiator_depth), (1, 2));
    assert_eq!((response.rnr_retry_count, response.failover_accepted), (6, 0));
    starts_with(&response.private_data, b"reply", 196);

    world.hosts[0].establish(world.now, active, b"ready").unwrap();
    world.settle();
    assert!(matches!(world.event(1).unwrap().event, Event::Established { .. }));
    let ends = [
        world.hosts[0].connection(active).unwrap(),
        world.hosts[1].connection(passive).unwrap(),
    ];
    assert_eq!(
        (ends[0].state, ends[1].state),
        (State::Established, State::Established)
    );
    for (own, other) in [(0, 1), (1, 0)] {
        assert_eq!(ends[own].remote_qpn, ends[other].local_qpn);
        assert_eq!(ends[own].send_psn, ends[other].receive_psn);
        assert_eq!(ends[own].responder_resources, ends[other].initiator_depth);
        assert_eq!(ends[own].path.remote, ends[other].path.local);
    }
    assert_eq!(
        (ends[0].rnr_retry_count, ends[1].rnr_retry_count),
        (6, 7),
        "what the other end asks for"
    );
    assert_eq!((ends[0].ack_timeout, ends[1].ack_timeout), (16, 16));

    world.hosts[0].disconnect(world.now, active, b"bye").unwrap();
    assert_eq!(world.hosts[0].state(active), Some(State::DreqSent));
    world.settle();
    let Event::Disconnected {
        private_data,
        timed_out: false,
    } = world.event(1).unwrap().event
    else {
        panic!("the DREQ has come");
    };
    starts_with(&private_data, b"bye", 220);
    assert!(matches!(
        world.event(0).unwrap().event,
        Event::Disconnected { timed_out: false, .. }
    ));
    for (host, id) in [(0, active), (1, passive)] {
        assert_eq!(world.hosts[host].state(id), Some(State::TimeWait));
        assert_eq!(
            world.hosts[host].disconnect(world.now, id, &[]),
            Ok(()),
            "it has ended already"
        );
    }
    let begun = world.now;
    while world.step() {}
    // 4.096 µs × 2^16, seen from the DREP's coming.
    assert!(
        world.now - begun <= Duration::from_millis(269),
        "{:?}",
        world.now - begun
    );
    for (host, id) in [(0, active), (1, passive)] {
        assert_eq!(world.event(host).unwrap().event, Event::TimeWaitExit);
        assert_eq!(world.hosts[host].state(id), Some(State::Closed));
        world.hosts[host].destroy(world.now, id).unwrap();
        assert_eq!(world.hosts[host].destroy(world.now, id), Err(Error::NoSuchId));
    }
    assert_eq!(
        messages(&world),
        [(0, REQ), (1, REP), (0, RTU), (0, DREQ), (1, DREP)]
    );
    world.assert_over(1);
}

#[test]
fn a_reject_has_its_reason() {
    let (mut world, _) = world();
    let (active, passive) = asked(&mut world);
    world.hosts[1]
        .reject(world.now, passive, RejectReason::CONSUMER, b"no")
        .unwrap();
    world.settle();
    let Event::Rejected {
        reason,
        additional,
        private_data,
    } = world.event(0).unwrap().event
    else {
        panic!("rejected");
    };
    assert_eq!((reason, additional), (RejectReason::CONSUMER, vec![]));
    starts_with(&private_data, b"no", 148);
    assert_eq!(world.hosts[0].state(active), Some(State::Closed));
    assert_eq!(world.hosts[1].state(passive), Some(State::Closed));
    assert_eq!(
        world.hosts[1].accept(world.now, passive, &accept(1)),
        Err(Error::WrongState(State::Closed))
    );
    while world.step() {}
    assert_eq!(messages(&world), [(0, REQ), (1, REJ)]);
    world.hosts[0].destroy(world.now, active).unwrap();
    world.hosts[1].destroy(world.now, passive).unwrap();
    world.assert_over(1);
}

/// Neither asks a program.
#[test]
fn nobody_listens() {
    let (mut world, listener) = world();
    let mut elsewhere = connect(0, 1, 0x11);
    elsewhere.service = ServiceId::of_port(PortSpace::TCP, PORT + 1);
    world.hosts[0].connect(world.now, OWNER, &elsewhere).unwrap();
    world.hosts[1].destroy(world.now, listener).unwrap();
    let mut one = listen(PortSpace::TCP);
    one.address = ListenAddress::One("10.9.9.9".parse().unwrap());
    world.hosts[1].listen(OWNER, &one).unwrap();
    world.hosts[0]
        .connect(world.now, OWNER, &connect(0, 1, 0x12))
        .unwrap();
    world.settle();
    for reason in [RejectReason::INVALID_SERVICE_ID, RejectReason::CONSUMER] {
        let event = world.event(0).unwrap().event;
        assert!(
            matches!(event, Event::Rejected { reason: other, .. } if other == reason),
            "{event:?}"
        );
    }
    assert_eq!((world.hosts[1].len(), world.hosts[1].counters().rejected), (1, 2));
}

#[test]
fn the_best_listener_takes_it() {
    let mut world = World::new(2, Faults::default(), 0);
    let mut owner = 10;
    let mut listener = |world: &mut World, address, accepts| {
        owner += 1;
        let listen = Listen {
            address,
            accepts,
            ..listen(PortSpace::TCP)
        };
        world.hosts[1].listen(Owner(owner), &listen).unwrap()
    };
    let native = listener(&mut world, ListenAddress::Native, Accepts::Both);
    let any = listener(&mut world, ListenAddress::Any, Accepts::Both);
    let four = listener(&mut world, ListenAddress::AnyV4, Accepts::Connections);
    let six = listener(&mut world, ListenAddress::AnyV6, Accepts::Connections);
    let here = listener(
        &mut world,
        ListenAddress::One(world::address(1)),
        Accepts::Datagrams,
    );
    let ask = |world: &mut World, ip| {
        let mut request = connect(0, 1, 0x11);
        request.ip = ip;
        let id = world.hosts[0].connect(world.now, OWNER, &request).unwrap();
        world.settle();
        let notice = world.event(1).unwrap();
        assert!(notice.owner.0 > 10, "the listener's owner has it");
        let Event::ConnectRequest(request) = notice.event else {
            panic!("a request");
        };
        world.hosts[0].destroy(world.now, id).unwrap();
        world.settle();
        while world.event(1).is_some() {}
        request.listener
    };
    let six_header = verbatim_cm::wire::IpHeader {
        source: "fd00::1".parse().unwrap(),
        source_port: 1,
        destination: "fd00::2".parse().unwrap(),
    };
    assert_eq!(
        ask(&mut world, Some(header(0, 1))),
        four,
        "the one at the address takes datagrams only"
    );
    assert_eq!(ask(&mut world, Some(six_header)), six);
    assert_eq!(ask(&mut world, None), native);
    world.hosts[1].destroy(world.now, four).unwrap();
    assert_eq!(ask(&mut world, Some(header(0, 1))), any);
    assert!(world.hosts[1].state(here).is_some());
    let again = world.hosts[1].listen(
        OWNER,
        &Listen {
            address: ListenAddress::Any,
            ..listen(PortSpace::TCP)
        },
    );
    assert_eq!(again, Err(Error::InUse));
}

/// A host says that nobody is there, each time: the request is unreachable after a second. Others are none of its business.
#[test]
fn nobody_is_there() {
    let (mut world, _) = world();
    world.mute = Some(0);
    let begun = world.now;
    let active = world.hosts[0]
        .connect(world.now, OWNER, &connect(0, 1, 0x11))
        .unwrap();
    world.hosts[0].refused(world.now, address(2));
    for time in 0..3 {
        world.hosts[0].refused(world.now, address(1));
        assert!(world.step(), "it is sent again");
        assert_eq!(world.now - begun, (time + 1) * Duration::from_millis(250));
        assert!(world.event(0).is_none());
    }
    world.hosts[0].refused(world.now, address(1));
    while world.step() {}
    assert_eq!(world.event(0).unwrap().event, Event::Unreachable);
    assert_eq!(world.now - begun, Duration::from_secs(1));
    assert_eq!(
        messages(&world)
            .iter()
            .filter(|(_, message)| *message == REQ)
            .count(),
        4
    );
    world.hosts[0].refused(world.now, address(1));
    world.hosts[0].destroy(world.now, active).unwrap();
}

/// A host says so once, and the RNIC is there a moment later.
#[test]
fn somebody_comes() {
    let (mut world, _) = world();
    world.mute = Some(0);
    let active = world.hosts[0]
        .connect(world.now, OWNER, &connect(0, 1, 0x11))
        .unwrap();
    world.transmit();
    world.hosts[0].refused(world.now, address(1));
    world.mute = None;
    world.run_for(Duration::from_millis(300));
    let notice = world.event(1).expect("a request");
    assert!(matches!(notice.event, Event::ConnectRequest(_)));
    world.hosts[1].taken(notice.id);
    world.hosts[1]
        .accept(world.now, notice.id, &accept(0x22))
        .unwrap();
    world.settle();
    // What has an answer does not wait for one.
    world.hosts[0].refused(world.now, address(1));
    world.run_for(Duration::from_millis(300));
    let notice = world.event(0).expect("a response");
    assert!(matches!(notice.event, Event::ConnectResponse(_)) && notice.id == active);
    assert!(world.event(0).is_none());
}

/// All that is sent gets lost: 16 times in all, an interval of both ways and the response timeout apart.
#[test]
fn nobody_answers() {
    let (mut world, _) = world();
    world.mute = Some(0);
    let begun = world.now;
    let active = world.hosts[0]
        .connect(world.now, OWNER, &connect(0, 1, 0x11))
        .unwrap();
    while world.step() {}
    assert_eq!(world.event(0).unwrap().event, Event::Unreachable);
    assert_eq!(
        world.now - begun,
        16 * Duration::from_nanos(4096 * ((1 << 16) + (1 << 16)))
    );
    let sent = messages(&world);
    assert_eq!(sent.iter().filter(|(_, message)| *message == REQ).count(), 16);
    assert_eq!(
        sent.last(),
        Some(&(0, REJ)),
        "and then that it does not wait any more"
    );
    assert_eq!(world.hosts[0].counters().resent, 15);
    world.hosts[0].destroy(world.now, active).unwrap();
    world.assert_over(1);
}

/// The program takes its time: the peer's repetition is answered by an MRA, and there is no other.
#[test]
fn a_slow_program() {
    let (mut world, _) = world();
    let (active, passive) = asked(&mut world);
    world.run_for(Duration::from_secs(20));
    assert_eq!(messages(&world), [(0, REQ), (0, REQ), (1, MRA)]);
    assert_eq!(world.hosts[0].state(active), Some(State::MraReqReceived));
    assert_eq!(world.hosts[1].state(passive), Some(State::MraReqSent));
    world.hosts[1].accept(world.now, passive, &accept(0x22)).unwrap();
    world.settle();
    assert!(matches!(world.event(0).unwrap().event, Event::ConnectResponse(_)));
    world.run_for(Duration::from_secs(20));
    assert_eq!(messages(&world)[3..], [(1, REP), (1, REP), (0, MRA)]);
    assert_eq!(world.hosts[1].state(passive), Some(State::MraRepReceived));
    assert_eq!(world.hosts[0].state(active), Some(State::MraRepSent));
    world.hosts[0].establish(world.now, active, &[]).unwrap();
    world.settle();
    assert!(matches!(world.event(1).unwrap().event, Event::Established { .. }));
}

/// By the program itself, with a time of its own.
#[test]
fn mra_before_it_is_asked_for() {
    let (mut world, _) = world();
    let (active, passive) = asked(&mut world);
    world.hosts[1].mra(world.now, passive, 20, b"wait").unwrap();
    assert_eq!(
        world.hosts[1].mra(world.now, passive, 20, &[]),
        Err(Error::WrongState(State::MraReqSent))
    );
    world.settle();
    assert_eq!(world.hosts[0].state(active), Some(State::MraReqReceived));
    world.run_for(Duration::from_secs(4));
    assert_eq!(messages(&world), [(0, REQ), (1, MRA)]);
    world.run_for(Duration::from_secs(1));
    assert_eq!(
        messages(&world)[2..],
        [(0, REQ), (1, MRA)],
        "4.3 s and the interval later"
    );
}

/// The RTU is lost, and traffic comes.
#[test]
fn traffic_establishes() {
    let (mut world, _) = world();
    let (active, passive) = accepted(&mut world);
    world.mute = Some(0);
    world.hosts[0].establish(world.now, active, &[]).unwrap();
    world.settle();
    world.mute = None;
    world.hosts[1].notify_established(passive).unwrap();
    assert_eq!(
        world.event(1).unwrap().event,
        Event::Established { private_data: vec![] }
    );
    assert_eq!(
        world.hosts[1].notify_established(passive),
        Err(Error::WrongState(State::Established))
    );
    world.run_for(Duration::from_secs(60));
    assert_eq!((world.event(0), world.event(1)), (None, None));
    assert_eq!(
        messages(&world),
        [(0, REQ), (1, REP), (0, RTU)],
        "the REP is not sent again"
    );
}

/// The RTU is lost, and the REP comes again.
#[test]
fn a_lost_rtu_comes_again() {
    let (mut world, _) = world();
    let (active, _) = accepted(&mut world);
    world.mute = Some(0);
    world.hosts[0].establish(world.now, active, b"ready").unwrap();
    world.settle();
    world.mute = None;
    world.run_for(Duration::from_secs(2));
    assert_eq!(messages(&world)[2..], [(0, RTU), (1, REP), (0, RTU)]);
    let Event::Established { private_data } = world.event(1).unwrap().event else {
        panic!("established");
    };
    starts_with(&private_data, b"ready", 224);
    assert_eq!((world.event(0), world.event(1)), (None, None));
}

/// Both ends at one RNIC.
#[test]
fn with_oneself() {
    let mut world = World::new(1, Faults::default(), 0);
    world.hosts[0].listen(OWNER, &listen(PortSpace::TCP)).unwrap();
    let active = world.hosts[0]
        .connect(world.now, OWNER, &connect(0, 0, 0x11))
        .unwrap();
    world.settle();
    let passive = world.event(0).unwrap().id;
    world.hosts[0].accept(world.now, passive, &accept(0x22)).unwrap();
    world.settle();
    assert_eq!(world.event(0).unwrap().id, active);
    world.hosts[0].establish(world.now, active, &[]).unwrap();
    world.settle();
    let notice = world.event(0).unwrap();
    assert!(notice.id == passive && matches!(notice.event, Event::Established { .. }));
    world.hosts[0].destroy(world.now, active).unwrap();
    world.settle();
    assert!(matches!(
        world.event(0).unwrap().event,
        Event::Disconnected { .. }
    ));
    world.hosts[0].destroy(world.now, passive).unwrap();
    while world.step() {}
    world.assert_over(1);
}

#[test]
fn what_does_not_fit_is_refused() {
    let (mut world, listener) = world();
    let mut long = connect(0, 1, 0x11);
    long.private_data = vec![1; 57];
    let host = &mut world.hosts[0];
    let refused = host.connect(world.now, OWNER, &long);
    assert_eq!(refused, Err(Error::PrivateData { given: 57, most: 56 }));
    long.ip = None;
    long.private_data = vec![1; 93];
    let refused = host.connect(world.now, OWNER, &long);
    assert_eq!(refused, Err(Error::PrivateData { given: 93, most: 92 }));
    let mut mixed = connect(0, 1, 0x11);
    mixed.ip.as_mut().unwrap().destination = "fd00::1".parse().unwrap();
    assert!(matches!(
        host.connect(world.now, OWNER, &mixed),
        Err(Error::Invalid(_))
    ));
    assert_eq!(host.len(), 0);
    let (active, passive) = asked(&mut world);
    let mut long = accept(1);
    long.private_data = vec![1; 197];
    let refused = world.hosts[1].accept(world.now, passive, &long);
    assert_eq!(
        refused,
        Err(Error::PrivateData {
            given: 197,
            most: 196
        })
    );
    assert_eq!(world.hosts[1].state(passive), Some(State::ReqReceived));
    let refused = world.hosts[1].accept(world.now, listener, &accept(1));
    assert_eq!(refused, Err(Error::WrongState(State::Listening)));
    let refused = world.hosts[0].establish(world.now, active, &[]);
    assert_eq!(refused, Err(Error::WrongState(State::ReqSent)));
    assert_eq!(
        world.hosts[0].disconnect(world.now, CommId(9), &[]),
        Err(Error::NoSuchId)
    );
}
