//! Messages of the communication manager that a peer, or anybody, sends to queue pair 1, and images of its ids.

use verbatim_cm::wire::{MAD_BYTES, Mad};
use verbatim_cm::{
    Accepts, Answer, Cm, Config, Connect, Event, Gid, IdImage, Listen, ListenAddress, Mtu, Owner, Path,
    PortSpace, Psn, Qpn, QueuePairs, Resolve, ServiceId, State, Time, wire::SidrStatus,
};

const OWNER: Owner = Owner(1);

/// Whether queue pairs are connected as a message says.
struct Says(bool);

impl QueuePairs for Says {
    fn are_connected(&self, _: Qpn, _: Gid, _: Qpn) -> bool {
        self.0
    }
}

fn gid(host: u8) -> Gid {
    std::net::IpAddr::from([10, 0, 0, host]).into()
}

fn service() -> ServiceId {
    ServiceId::of_port(PortSpace::TCP, 7471)
}

/// One that listens, asks for a connection and for a queue pair; its numbers are always the same.
fn manager(host: u8) -> Cm {
    let mut cm = Cm::new(Config::new(u64::from(host), 0x100));
    let listen = Listen {
        service: service(),
        address: ListenAddress::Native,
        accepts: Accepts::Both,
        backlog: 8,
    };
    cm.listen(OWNER, &listen).expect("nobody else does");
    let path = Path::new(gid(host), gid(3 - host), Mtu::Mtu1024);
    cm.connect(
        Time::ZERO,
        OWNER,
        &Connect::new(service(), path, Qpn::new(1), Psn::new(1)),
    )
    .expect("it fits");
    cm.resolve(Time::ZERO, OWNER, &Resolve::new(service(), path))
        .expect("it fits");
    cm
}

fn drain(cm: &mut Cm) -> Vec<[u8; MAD_BYTES]> {
    std::iter::from_fn(|| cm.poll_transmit())
        .map(|sent| *sent.bytes)
        .collect()
}

/// What a program does with an event: it agrees.
fn agree(cm: &mut Cm, now: Time) {
    while let Some(notice) = cm.poll_event() {
        let id = notice.id;
        let done = match (notice.event, cm.state(id)) {
            (Event::ConnectRequest(_), Some(State::ReqReceived | State::MraReqSent)) => {
                cm.taken(id);
                let accept = verbatim_cm::Accept {
                    qpn: Qpn::new(2),
                    starting_psn: Psn::new(2),
                    responder_resources: 1,
                    initiator_depth: 1,
                    flow_control: false,
                    rnr_retry_count: 7,
                    srq: false,
                    private_data: Vec::new(),
                };
                cm.accept(now, id, &accept)
            }
            (Event::ConnectResponse(_), Some(State::RepReceived | State::MraRepSent)) => {
                cm.establish(now, id, &[])
            }
            (Event::ResolveRequest(_), Some(State::SidrReqReceived)) => {
                let answer = Answer {
                    status: SidrStatus::VALID,
                    qpn: Qpn::new(3),
                    qkey: 1,
                    private_data: Vec::new(),
                };
                cm.answer(now, id, &answer)
            }
            _ => Ok(()),
        };
        assert_eq!(done, Ok(()), "the state allows it");
    }
}

/// What was read and written is read the same; a manager that gets it, piece by piece, keeps nothing in the end.
pub fn cm_messages(input: &[u8]) {
    let mut cm = manager(1);
    let mut now = Time::ZERO;
    for bytes in input.chunks(MAD_BYTES) {
        if let Ok(mad) = Mad::parse(bytes) {
            assert_eq!(Mad::parse(&mad.emit()), Ok(mad));
        }
        cm.handle_mad(
            now,
            gid(2),
            gid(1),
            bytes,
            &Says(bytes.last().is_some_and(|last| last & 2 == 2)),
        );
        agree(&mut cm, now);
        drain(&mut cm);
        if bytes.last().is_some_and(|last| last & 1 == 1)
            && let Some(due) = cm.next_deadline()
        {
            now = now.max(due);
            cm.handle_timeout(now);
        }
    }
    cm.destroy_owner(now, OWNER);
    for _ in 0..200 {
        let Some(due) = cm.next_deadline() else { break };
        cm.handle_timeout(due);
        drain(&mut cm);
    }
    assert!(cm.is_empty(), "{} ids are left", cm.len());
}

/// What two managers say to each other, and more and more of it in one input.
pub fn seeds() -> Vec<Vec<u8>> {
    let (mut one, mut other) = (manager(1), manager(2));
    let mut seeds = Vec::new();
    let mut story = Vec::new();
    for turn in 0..8 {
        agree(&mut one, Time::ZERO);
        if turn == 5 {
            one.destroy_owner(Time::ZERO, OWNER);
        }
        for mad in drain(&mut one) {
            other.handle_mad(Time::ZERO, gid(1), gid(2), &mad, &Says(true));
            seeds.push(mad.to_vec());
        }
        agree(&mut other, Time::ZERO);
        for mad in drain(&mut other) {
            one.handle_mad(Time::ZERO, gid(2), gid(1), &mad, &Says(true));
            seeds.push(mad.to_vec());
            story.extend(mad);
            seeds.push(story.clone());
        }
    }
    seeds
}

/// An image is refused, or goes on and ends.
pub fn cm_image(input: &[u8]) {
    let Ok(image) = postcard::from_bytes::<IdImage>(input) else {
        return;
    };
    super::round_trip(&image);
    let mut cm = Cm::new(Config::new(3, 1));
    let Ok(id) = cm.adopt(Time::ZERO, OWNER, image, Some(gid(9))) else {
        return;
    };
    agree(&mut cm, Time::ZERO);
    cm.destroy(Time::ZERO, id).expect("it is there");
    for _ in 0..100 {
        let Some(due) = cm.next_deadline() else { break };
        cm.handle_timeout(due);
        drain(&mut cm);
    }
    assert!(cm.is_empty(), "{} ids are left", cm.len());
}

/// One of each state that two managers come to.
pub fn image_seeds() -> Vec<Vec<u8>> {
    let (mut one, mut other) = (manager(1), manager(2));
    let mut seeds = Vec::new();
    for _ in 0..6 {
        for cm in [&one, &other] {
            let images = cm.ids_of(OWNER).into_iter().map(|id| cm.image(Time::ZERO, id));
            seeds.extend(images.map(|image| super::encoded(&image.expect("it is there"))));
        }
        for mad in drain(&mut one) {
            other.handle_mad(Time::ZERO, gid(1), gid(2), &mad, &Says(true));
        }
        for mad in drain(&mut other) {
            one.handle_mad(Time::ZERO, gid(2), gid(1), &mad, &Says(true));
        }
        agree(&mut one, Time::ZERO);
        agree(&mut other, Time::ZERO);
    }
    seeds
}
