//! Objects that are made on trial: the same ones, and what refuses them.

use std::io::Write;

use verbatim_channel::{
    ChannelRecord, ContextRecord, CqRecord, Endpoint, MrRecord, PdRecord, QpRecord, SegmentRecord, SrqRecord,
};
use verbatim_device::control::{Access, QpAttr, QpState, SrqAttr};

use super::*;
use crate::trial;

const BASE: u64 = 0x7000_0000_0000;

fn queue_pair_of(qpn: u32, state: QpState) -> QpRecord {
    QpRecord {
        qpn,
        pd: 1,
        send_cq: 3,
        recv_cq: 3,
        srq: None,
        qp_type: QpType::Rc,
        cap: CAP,
        attr: QpAttr {
            state,
            ..QpAttr::default()
        },
        groups: Vec::new(),
        physical_qpn: qpn,
        local_gid: None,
        remote: Some(Endpoint {
            gid: [7; 16],
            qpn: 99,
        }),
        paused: false,
    }
}

/// Of each kind one, and two queue pairs.
fn record() -> ContextRecord {
    let segment = |address, length, offset| SegmentRecord {
        address,
        length,
        offset: Some(offset),
    };
    ContextRecord {
        id: 5,
        gids: Vec::new(),
        pds: vec![PdRecord { pd: 1 }],
        mrs: vec![MrRecord {
            lkey: 0x100,
            rkey: 0x101,
            physical_lkey: 0x100,
            physical_rkey: 0x101,
            pd: 1,
            address: BASE + 16,
            length: 8192,
            iova: BASE + 16,
            access: Access::LOCAL_WRITE,
            // The file has the pages the other way round.
            segments: vec![
                segment(BASE + 16, 4080, 8192 + 16),
                segment(BASE + 4096, 4096, 4096),
                segment(BASE + 8192, 16, 0),
            ],
        }],
        channels: vec![ChannelRecord { channel: 2 }],
        cqs: vec![CqRecord {
            cq: 3,
            entries: 100,
            channel: Some(2),
        }],
        srqs: vec![SrqRecord {
            srq: 4,
            pd: 1,
            attr: SrqAttr {
                max_wr: 8,
                max_sge: 1,
                limit: 0,
            },
        }],
        qps: vec![
            queue_pair_of(0x11, QpState::Rts),
            queue_pair_of(0x12, QpState::Sqe),
        ],
        ..ContextRecord::default()
    }
}

fn tried(fake: &Fake, record: &ContextRecord) -> Result<(), String> {
    let outcome = trial::make_at(fake.open(), record, None);
    outcome.map(drop).map_err(|error| error.to_string())
}

#[test]
fn all_is_made_as_the_process_will_make_it_and_goes_again() {
    let fake = Fake::new();
    let mut file = tempfile::tempfile().unwrap();
    for page in [[3u8; 4096], [2; 4096], [1; 4096]] {
        file.write_all(&page).unwrap();
    }
    let before = fake.get(|knobs| knobs.live);
    let made = trial::make_at(fake.open(), &record(), Some(&file)).unwrap();
    // The context, a protection domain, a region, a channel, a queue of each kind, two queue pairs.
    assert_eq!(fake.get(|knobs| knobs.live) - before, 8);
    // Both in the states in which they are parked: INIT as they are made, then each to RTR and RTS.
    assert_eq!(fake.get(|knobs| knobs.states) % 1_000_000, 112_323);
    // Pinned where the file's pages are, in the order that the program sees.
    let address = fake.get(|knobs| knobs.registered);
    let seen = |at: u64| {
        let mut byte = [0];
        assert!(crate::sys::read_own_memory(address - 16 + at, &mut byte));
        byte[0]
    };
    assert_eq!([seen(16), seen(4096), seen(8192)], [1, 2, 3]);
    drop(made);
    assert_eq!(fake.get(|knobs| knobs.live), before);
}

#[test]
fn what_is_refused_is_named_with_what_it_asked_for() {
    let fake = Fake::new();
    let refused = |change: fn(&mut ContextRecord)| {
        let mut record = record();
        change(&mut record);
        tried(&fake, &record).unwrap_err()
    };
    let text = refused(|record| record.qps[1].cap.max_send_wr = 200);
    assert!(
        text.starts_with("queue pair 0x12 (number 2 of 2), Rc with max_send_wr 200, max_recv_wr 8"),
        "{text}"
    );
    assert!(text.contains("create_qp was refused"), "{text}");
    let text = refused(|record| record.cqs[0].entries = 300);
    assert!(
        text.starts_with("completion queue 3 (number 1 of 1) with 300 entries"),
        "{text}"
    );
    let text = refused(|record| record.mrs[0].access = Access::REMOTE_WRITE);
    assert!(
        text.starts_with("memory region 0x100 (number 1 of 1) of 8192 bytes, 8192 bytes up to it: reg_mr"),
        "{text}"
    );
}

#[test]
fn memory_that_cannot_be_mapped_is_refused_and_not_touched() {
    let fake = Fake::new();
    let mut outside = record();
    outside.mrs[0].segments[2].address = BASE + (1 << 30);
    let file = tempfile::tempfile().unwrap();
    let text = trial::make_at(fake.open(), &outside, Some(&file)).map(drop);
    let text = text.unwrap_err().to_string();
    assert!(text.contains("a segment outside of its region"), "{text}");
    let mut beyond = record();
    beyond.mrs[0].length = u64::MAX;
    let text = tried(&fake, &beyond).unwrap_err();
    assert!(text.contains("end of the address space"), "{text}");
}
