//! How far a connection is brought before a test goes on with it.
#![allow(dead_code, reason = "each test uses a part")]

use verbatim_cm::{CommId, Event, PortSpace};

use super::{Faults, OWNER, World, accept, connect, gid, listen};

pub const REQ: u8 = 0x10;
pub const MRA: u8 = 0x11;
pub const REJ: u8 = 0x12;
pub const REP: u8 = 0x13;
pub const RTU: u8 = 0x14;
pub const DREQ: u8 = 0x15;
pub const DREP: u8 = 0x16;
pub const SIDR_REQ: u8 = 0x17;
pub const SIDR_REP: u8 = 0x18;

pub fn starts_with(data: &[u8], start: &[u8], room: usize) {
    assert_eq!(data.len(), room);
    assert_eq!(&data[..start.len()], start);
    assert!(data[start.len()..].iter().all(|byte| *byte == 0));
}

/// Until the listener has the request: both ids.
pub fn asked(world: &mut World) -> (CommId, CommId) {
    let active = world.hosts[0]
        .connect(world.now, OWNER, &connect(0, 1, 0x11))
        .unwrap();
    world.settle();
    let notice = world.event(1).expect("a request");
    assert!(matches!(notice.event, Event::ConnectRequest(_)));
    world.hosts[1].taken(notice.id);
    (active, notice.id)
}

/// Until the reply has come.
pub fn accepted(world: &mut World) -> (CommId, CommId) {
    let (active, passive) = asked(world);
    world.hosts[1].accept(world.now, passive, &accept(0x22)).unwrap();
    world.settle();
    assert!(matches!(world.event(0).unwrap().event, Event::ConnectResponse(_)));
    (active, passive)
}

pub fn established(world: &mut World) -> (CommId, CommId) {
    let (active, passive) = accepted(world);
    world.hosts[0].establish(world.now, active, b"ready").unwrap();
    world.settle();
    let Event::Established { private_data } = world.event(1).unwrap().event else {
        panic!("the RTU has come");
    };
    starts_with(&private_data, b"ready", 224);
    world.queue_pairs[0].to(0x11, gid(1), 0x22);
    world.queue_pairs[1].to(0x22, gid(0), 0x11);
    (active, passive)
}

pub fn world() -> (World, CommId) {
    let mut world = World::new(2, Faults::default(), 0);
    let listener = world.hosts[1].listen(OWNER, &listen(PortSpace::TCP)).unwrap();
    (world, listener)
}

pub fn messages(world: &World) -> Vec<(usize, u8)> {
    world.sent.clone()
}
