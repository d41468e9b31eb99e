//! The image of a reliable connection: what is refused, and that no image whatever makes the transport panic.

mod pair;

use std::time::Duration;

use pair::world::{World, address};
use pair::{SEND, Setup, Side, fetch_add, read, send_imm, sge, write};
use proptest::prelude::*;
use verbatim_roce::{
    IMAGE_VERSION, ImageError, Location, Packet, QpConfig, QpState, Qpn, RcImage, RcQp, SendData, Standing,
    TxBatch,
};

const LEN: u32 = 3_000;
const CHECKSUM: usize = 32;

fn setup() -> Setup {
    Setup {
        budget: 1,
        psn: [0xff_fffa, 200],
        ..Setup::default()
    }
}

/// In the middle of requests of every kind, in both directions.
fn busy(steps: usize) -> World {
    let mut world = World::new(setup());
    for (side, key) in [(Side::A, 1), (Side::B, 2)] {
        let host = &mut world.end(side).host;
        let other = 3 - key;
        host.register(key, 0x10000, (0..0x8000u32).map(|at| at as u8).collect());
        for wr_id in 0..2 {
            host.post_receive(wr_id, &[sge(key, 0x14000, 1_000), sge(key, 0x15000, LEN)]);
        }
        host.post(0, write(0x11000, other), &[sge(key, 0x10000, LEN)]);
        host.post(1, read(0x12000, other), &[sge(key, 0x13000, LEN)]);
        host.post(2, fetch_add(0x16000, other, 5), &[sge(key, 0x16008, 8)]);
        host.post(3, SEND, &[sge(key, 0x10000, LEN)]);
        let inline = SendData::inline(&[7; 100]).expect("it is short");
        host.post_with(4, send_imm([1, 2, 3, 4]), inline, |request| request.fence = true);
    }
    for _ in 0..steps {
        world.step();
    }
    world
}

fn image(world: &mut World, side: Side) -> RcImage {
    let now = world.now;
    let end = world.end(side);
    assert!(end.qp.halt(now));
    end.qp.save().expect("it is stopped")
}

fn restore(bytes: &[u8]) -> Result<RcQp, ImageError> {
    RcQp::restore(Qpn::new(0x11), setup().config, RcImage::decode(bytes)?)
}

/// Bytes with this body and a right checksum.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.truncate(bytes.len() - CHECKSUM);
    let checksum = blake3::hash(&bytes);
    bytes.extend(checksum.as_bytes());
    bytes
}

#[test]
fn damage_is_noticed_wherever_it_is() {
    let bytes = image(&mut busy(30), Side::A).encode();
    assert!(restore(&bytes).is_ok());
    for at in 0..bytes.len() {
        let mut damaged = bytes.clone();
        damaged[at] ^= 0x10;
        assert!(restore(&damaged).is_err(), "byte {at}");
        assert!(restore(&bytes[..at]).is_err(), "{at} bytes");
    }
    let longer = [&bytes[..], &[0]].concat();
    assert_eq!(restore(&longer).err(), Some(ImageError::Damaged));
    assert_eq!(restore(b"").err(), Some(ImageError::NoImage(0)));
    let mut other = bytes.clone();
    other[4] = 2;
    assert_eq!(restore(&sealed(other)).err(), Some(ImageError::Version(2)));
}

#[test]
fn it_tells_what_was_taken_off_the_rings() {
    let mut halfway = 0;
    for steps in 0..120 {
        let mut world = busy(steps);
        for side in [Side::A, Side::B] {
            let left: Vec<u64> = world
                .end(side)
                .host
                .sends
                .iter()
                .map(|send| send.as_ref().unwrap().wr_id)
                .collect();
            let unreceived = world.end(side).host.receives.len();
            let done = world.end(side).host.retired as u64;
            let received = world.end(side).host.outcomes(verbatim_roce::Queue::Receive).len();
            let image = image(&mut world, side);
            let all: Vec<u64> = (0..done).chain(image.requests()).chain(left).collect();
            assert_eq!(all, [0, 1, 2, 3, 4]);
            assert_eq!(received + usize::from(image.receive().is_some()) + unreceived, 2);
            halfway += u32::from(image.receive().is_some());
            assert_eq!((image.qpn(), image.state()), (pair::qpn(side), QpState::Rts));
            assert_eq!(image.peer(), None);
            assert_eq!(image.attributes().dest_qpn, Some(pair::qpn(side.other())));
        }
    }
    assert!(halfway > 0);
}

#[test]
fn what_does_not_fit_here_is_refused() {
    let image = image(&mut busy(30), Side::A);
    let refused = |config: QpConfig| RcQp::restore(Qpn::new(5), config, image.clone()).err();
    let good = setup().config;
    assert_eq!(refused(good), None);
    let pkey = refused(QpConfig { pkey: 0x8001, ..good });
    assert_eq!(pkey, Some(ImageError::Invalid("the partition is another one")));
    let shared = refused(QpConfig {
        shared_receive_queue: true,
        ..good
    });
    assert_eq!(shared, Some(ImageError::ReceiveQueue { shared: false }));
}

#[test]
fn only_what_stands_still_is_saved() {
    let mut world = busy(10);
    assert!(world.end(Side::A).qp.save().is_none(), "it runs");
    let now = world.now;
    assert!(world.end(Side::A).qp.halt(now));
    world.run_for(Duration::from_millis(1));
    assert_eq!(world.end(Side::B).qp.standing(), Standing::Paused);
    assert!(world.end(Side::B).qp.save().is_none(), "it may be told to go on");
    let mut fresh = RcQp::new(Qpn::new(9), setup().config);
    assert!(!fresh.halt(now), "there is nothing to stop");
    let image = fresh.save().expect("nothing happens in RESET");
    let again = RcQp::restore(Qpn::new(9), setup().config, image).unwrap();
    assert_eq!(
        (again.state(), again.standing()),
        (QpState::Reset, Standing::Running)
    );
}

/// An image of the first version of the format, made by the release that had it.
#[test]
fn images_of_version_1_are_read() {
    let digits: Vec<u8> = include_str!("fixtures/rc-image-v1.hex")
        .bytes()
        .filter(u8::is_ascii_hexdigit)
        .collect();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    let bytes: Vec<u8> = digits.chunks(2).map(byte).collect();
    let image = RcImage::decode(&bytes).expect("it is not damaged");
    assert_eq!(IMAGE_VERSION, 1);
    assert_eq!(image.encode(), bytes, "and written the same");
    assert_eq!(image.requests().collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    assert_eq!(image.receive(), Some(0));
    let qp = RcQp::restore(Qpn::new(0x11), setup().config, image).expect("it fits here");
    assert_eq!((qp.state(), qp.standing()), (QpState::Rts, Standing::Stopped));
    let position = qp.position();
    assert_eq!(
        (position.acknowledged.get(), position.expected.get()),
        (0xff_fffa, 208)
    );
    assert_eq!(position.atomics.len(), 1);
    assert_eq!(position.requests.len(), 5);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(RcImage::decode(&bytes).is_err());
        let begun = [b"VBRC\x01\0\0\0", &bytes[..]].concat();
        if begun.len() > CHECKSUM {
            let _ = restore(&sealed(begun));
        }
    }

    /// Whoever makes an image may write what he wants, and a right checksum. It is refused, or it runs: no panic, no loop
    /// without end.
    #[test]
    fn no_content_panics(
        steps in 0usize..100,
        side in prop::sample::select(vec![Side::A, Side::B]),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut world = busy(steps);
        let mut moving = world.take_out(side);
        for (at, value) in changes {
            let len = moving.image.len() - CHECKSUM - 12;
            moving.image[12 + at.index(len)] = value;
        }
        let bytes = sealed(moving.image.clone());
        let good = RcImage::decode(&bytes).is_ok_and(|image| {
            let on_net = image.peer().is_none_or(|peer| peer.address.is_ipv4());
            on_net && RcQp::restore(Qpn::new(0x11), setup().config, image).is_ok()
        });
        if !good {
            return Ok(());
        }
        moving.image = bytes;
        let to = Location { address: address(9), qpn: Qpn::new(0x11) };
        moving.host.trusting = true;
        world.put_in(side, moving, to);
        for _ in 0..3000 {
            if !world.step() {
                break;
            }
        }
    }
}

/// Packets of RESUME and the like are whole packets like all others.
#[test]
fn resume_waits_for_room_in_the_batch() {
    let mut world = busy(20);
    let image = image(&mut world, Side::A);
    let mut qp = RcQp::restore(Qpn::new(0x11), setup().config, image).unwrap();
    let now = world.now;
    qp.resume(now);
    let mut batch = TxBatch::new(pair::world::flow(address(1), address(2)));
    let mut host = pair::TestHost::new();
    let outcome = qp.poll_transmit(now, &mut host, &mut batch, 16);
    assert_eq!((outcome, batch.segments()), (verbatim_roce::Transmit::Idle, 1));
    assert_eq!(batch.as_bytes().len(), 12 + 60 + 4);
    assert!(Packet::parse(batch.as_bytes()).is_ok());
}
