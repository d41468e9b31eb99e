//! Questions for the queue pair behind a service.

mod world;

use verbatim_cm::wire::SidrStatus;
use verbatim_cm::{Answer, Event, PortSpace, Qpn, ServiceId};
use world::story::{SIDR_REP, SIDR_REQ, starts_with};
use world::{Faults, OWNER, World, gid, header, listen, resolve};

#[test]
fn datagrams() {
    let mut world = World::new(2, Faults::default(), 0);
    world.hosts[1].listen(OWNER, &listen(PortSpace::UDP)).unwrap();
    for status in [SidrStatus::VALID, SidrStatus::REJECTED] {
        let active = world.hosts[0].resolve(world.now, OWNER, &resolve(0, 1)).unwrap();
        world.settle();
        let notice = world.event(1).unwrap();
        let Event::ResolveRequest(request) = notice.event else {
            panic!("a question");
        };
        assert_eq!((request.local, request.remote), (gid(1), gid(0)));
        assert_eq!((request.ip, request.pkey), (Some(header(0, 1)), 0xffff));
        starts_with(&request.private_data, b"question", 180);
        world.hosts[1].taken(notice.id);
        let answer = Answer {
            status,
            qpn: Qpn::new(0x33),
            qkey: 0x1234_5678,
            private_data: b"answer".to_vec(),
        };
        if status == SidrStatus::VALID {
            world.hosts[1].answer(world.now, notice.id, &answer).unwrap();
            world.hosts[1].destroy(world.now, notice.id).unwrap();
        } else {
            world.hosts[1].destroy(world.now, notice.id).unwrap();
        }
        world.settle();
        let Event::ResolveResponse(response) = world.event(0).unwrap().event else {
            panic!("an answer");
        };
        assert_eq!(response.status, status);
        if status == SidrStatus::VALID {
            assert_eq!((response.qpn, response.qkey), (answer.qpn, answer.qkey));
            starts_with(&response.private_data, b"answer", 136);
        }
        world.hosts[0].destroy(world.now, active).unwrap();
    }
    let mut elsewhere = resolve(0, 1);
    elsewhere.service = ServiceId(1);
    let active = world.hosts[0].resolve(world.now, OWNER, &elsewhere).unwrap();
    world.settle();
    let event = world.event(0).unwrap().event;
    let Event::ResolveResponse(response) = event else {
        panic!("an answer");
    };
    assert_eq!(response.status, SidrStatus::UNSUPPORTED_SERVICE);
    world.hosts[0].destroy(world.now, active).unwrap();
    while world.step() {}
    assert_eq!(
        world.sent.iter().filter(|sent| **sent == (0, SIDR_REQ)).count(),
        3
    );
    assert_eq!(
        world.sent.iter().filter(|sent| **sent == (1, SIDR_REP)).count(),
        3
    );
    world.assert_over(1);
}

#[test]
fn a_question_that_nobody_answers() {
    let mut world = World::new(2, Faults::default(), 0);
    world.mute = Some(0);
    world.hosts[0].resolve(world.now, OWNER, &resolve(0, 1)).unwrap();
    while world.step() {}
    assert_eq!(world.event(0).unwrap().event, Event::Unreachable);
    assert_eq!(world.sent, [(0, SIDR_REQ); 16]);
}
