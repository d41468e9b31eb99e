//! What a program gives to `ibv_restore_object`, and what of it goes on to the RNIC.

use verbatim_roce::{IMAGE_VERSION, QpConfig, Qpn, RcImage, RcQp, Time};
use verbatim_verbs::dump::{ObjectType, Record, check};

/// Bytes of a fuzzer: taken apart as they are, and as the body of a record of each kind with a right checksum. What can be read is
/// written the same.
pub fn context_dump(input: &[u8]) {
    let _ = check(input);
    let _ = Record::parse(input);
    let Some((kind, body)) = input.split_first() else {
        return;
    };
    let all = ObjectType::ALL;
    let object = all[usize::from(*kind) % all.len()];
    let sealed = Record::forge(object, 7, body).expect("it is short");
    if let Ok(record) = Record::parse(&sealed) {
        assert_eq!((record.object(), record.handle()), (object, 7));
        let encoded = record.encode().expect("what was read can be written");
        assert_eq!(Record::parse(&encoded), Ok(record));
    }
}

/// Bodies of each kind: zeroes are numbers, empty lists and absent options alike.
pub fn dump_seeds() -> Vec<Vec<u8>> {
    let zeroes = |length: usize| (0..8u8).map(move |kind| [&[kind][..], &vec![0; length]].concat());
    [0, 4, 16, 32, 64, 96, 128].into_iter().flat_map(zeroes).collect()
}

/// An image with this body and a right checksum, to a queue pair that goes on from it.
pub fn rc_image(input: &[u8]) {
    let _ = RcImage::decode(input);
    let mut bytes = b"VBRC".to_vec();
    bytes.extend(IMAGE_VERSION.to_le_bytes());
    bytes.extend([0; 2]);
    bytes.extend((input.len() as u32).to_le_bytes());
    bytes.extend(input);
    let checksum = blake3::hash(&bytes);
    bytes.extend(checksum.as_bytes());
    let Ok(image) = RcImage::decode(&bytes) else {
        return;
    };
    let again = RcImage::decode(&image.encode()).expect("what was read can be written");
    assert_eq!(again.encode(), image.encode());
    for shared_receive_queue in [false, true] {
        let config = QpConfig {
            shared_receive_queue,
            ..QpConfig::default()
        };
        if let Ok(mut qp) = RcQp::restore(Qpn::new(0x11), config, again.clone()) {
            qp.resume(Time::ZERO);
        }
    }
}

/// Bodies of images of real queue pairs: in RESET, and in the middle of their requests.
pub fn image_seeds() -> Vec<Vec<u8>> {
    const HEAD_BYTES: usize = 12;
    const CHECKSUM_BYTES: usize = 32;
    let body = |image: &RcImage| {
        let bytes = image.encode();
        bytes[HEAD_BYTES..bytes.len() - CHECKSUM_BYTES].to_vec()
    };
    let reset = RcQp::new(Qpn::new(5), QpConfig::default())
        .save()
        .expect("in RESET nothing moves");
    let busy = (0..40).step_by(5).filter_map(super::transport::image_after);
    std::iter::once(body(&reset))
        .chain(busy.map(|image| body(&image)))
        .collect()
}
