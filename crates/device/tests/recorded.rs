//! What programs and RNICs of this version say to each other, and what lies where in their memory, is what is recorded.

use std::mem::{align_of, offset_of, size_of};

use verbatim_device::control::{
    AsyncEvent, CM_MAX_PRIVATE_DATA, Captured, CmNews, CompletionEvent, FIRST_PUBLISHED_QPN, KEYS_PER_HOST,
    MAX_OWNERS, MAX_PEER_PAIRS, MOST_QPS, PeerNews, QPNS_PER_HOST, QpCap, Reply, Request, SOCKET_NAME,
    SrqAttr, VERSION,
};
use verbatim_device::image::QpImage;
use verbatim_device::layout::*;
use verbatim_recorded::Recording;

fn open(file: &str) -> Recording {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recorded");
    Recording::open(format!("{folder}/{file}"), VERSION)
}

#[test]
fn messages_are_as_recorded() {
    let mut recording = open("device.txt");
    recording.check::<Request>("Request");
    recording.check::<Reply>("Reply");
    recording.check::<Vec<QpImage>>("QpImages");
    recording.check::<AsyncEvent>("AsyncEvent");
    recording.check::<CompletionEvent>("CompletionEvent");
    recording.check::<Captured>("Captured");
    recording.check::<CmNews>("CmNews");
    recording.check::<PeerNews>("PeerNews");
    recording.check_text("SOCKET_NAME", SOCKET_NAME);
    recording.check_text("MOST_QPS", &MOST_QPS.to_string());
    recording.check_text("MAX_OWNERS", &MAX_OWNERS.to_string());
    recording.check_text("MAX_PEER_PAIRS", &MAX_PEER_PAIRS.to_string());
    recording.check_text("CM_MAX_PRIVATE_DATA", &CM_MAX_PRIVATE_DATA.to_string());
    for (name, value) in [
        ("FIRST_PUBLISHED_QPN", FIRST_PUBLISHED_QPN),
        ("QPNS_PER_HOST", QPNS_PER_HOST),
        ("KEYS_PER_HOST", KEYS_PER_HOST),
    ] {
        recording.check_text(name, &value.to_string());
    }
    recording.finish();
}

/// Checks where the fields of a structure are.
macro_rules! fields {
    ($recording:ident, $type:ident: $($field:ident),+) => {{
        let size = format!("{} bytes, aligned to {}", size_of::<$type>(), align_of::<$type>());
        $recording.check_text(stringify!($type), &size);
        $($recording.check_text(
            concat!(stringify!($type), ".", stringify!($field)),
            &format!("at {}", offset_of!($type, $field)),
        );)+
    }};
}

/// Checks constants.
macro_rules! values {
    ($recording:ident, $($name:ident),+) => {
        $($recording.check_text(stringify!($name), &$name.to_string());)+
    };
}

#[test]
fn shared_memory_is_as_recorded() {
    let mut recording = open("layout.txt");
    fields!(recording, ContextPage: nic_sleeping, summary, doorbells);
    fields!(recording, Signs: starved);
    fields!(recording, QpHeader: sq_producer, rq_producer, sq_completed, rq_consumed);
    fields!(recording, CqHeader: producer, consumer, armed);
    fields!(recording, Sge: address, length, lkey);
    fields!(
        recording,
        SendWqe: wr_id, opcode, flags, num_sge, imm, remote_address, rkey, inline_bytes, compare_add, swap, remote_qpn,
        remote_qkey, ah, reserved
    );
    fields!(recording, RecvWqe: wr_id, num_sge, reserved);
    fields!(
        recording,
        Cqe: wr_id, timestamp_ns, status, opcode, vendor_err, byte_len, imm, qpn, src_qpn, wc_flags, sl, solicited
    );
    values!(
        recording,
        CONTEXT_BYTES,
        SIGNS_OFFSET,
        DOORBELL_WORDS,
        CQE_STRIDE,
        CQ_ARMED,
        CQ_ARMED_SOLICITED
    );
    values!(
        recording,
        SEND_SIGNALED,
        SEND_SOLICITED,
        SEND_INLINE,
        SEND_FENCE,
        SEND_EXECUTED
    );
    values!(recording, WR_LOCAL_INV, WR_BIND_MW, WR_ATOMIC_WRITE);
    // Both sides compute these from the limits.
    for cap in [
        [0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0],
        [3, 5, 1, 2, 28],
        [128, 512, 4, 1, 220],
        [1000, 1000, 30, 30, 0],
    ] {
        let [
            max_send_wr,
            max_recv_wr,
            max_send_sge,
            max_recv_sge,
            max_inline_data,
        ] = cap;
        let layout = QpLayout::new(&QpCap {
            max_send_wr,
            max_recv_wr,
            max_send_sge,
            max_recv_sge,
            max_inline_data,
        });
        recording.check_text(&format!("QpLayout{cap:?}"), &format!("{layout:?}"));
    }
    for [max_wr, max_sge] in [[0, 0], [1, 1], [5, 3], [512, 30]] {
        let attr = SrqAttr {
            max_wr,
            max_sge,
            limit: 0,
        };
        let layout = RecvLayout::shared(&attr);
        recording.check_text(&format!("RecvLayout[{max_wr},{max_sge}]"), &format!("{layout:?}"));
    }
    for entries in [0, 1, 2, 3, 1000] {
        let layout = CqLayout::new(entries);
        recording.check_text(&format!("CqLayout[{entries}]"), &format!("{layout:?}"));
    }
    recording.finish();
}
