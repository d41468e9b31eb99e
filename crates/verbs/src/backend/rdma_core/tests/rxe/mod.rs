//! What a move needs, on the kernel's rxe, of which no fake knows all. They are run in a virtual machine (docs/testbed.md):
//! few machines have an `rxe0`.

mod ahead;
mod devices;
mod programs;

use std::time::{Duration, Instant};

use verbatim_device::control::{Access, AddressVector, QpAttr};

use super::*;

const DEVICE: &str = "rxe0";
const QKEY: u32 = 0x1111_1111;
const LIMIT: Duration = Duration::from_secs(20);

fn open() -> Arc<dyn Device> {
    RdmaCoreProvider::default().open(DEVICE).unwrap()
}

/// The attributes of a queue pair that is connected to `dest` of the same port.
fn attributes(way: &AddressVector, dest: u32, access: Access) -> QpAttr {
    QpAttr {
        path_mtu: 3,
        qkey: QKEY,
        rq_psn: 5,
        sq_psn: 5,
        dest_qpn: dest,
        access,
        av: *way,
        port_num: 1,
        max_rd_atomic: 1,
        max_dest_rd_atomic: 1,
        min_rnr_timer: 1,
        timeout: 14,
        retry_cnt: 7,
        rnr_retry: 7,
        ..QpAttr::default()
    }
}

fn cap() -> QpCap {
    QpCap {
        max_send_wr: 16,
        max_recv_wr: 16,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline_data: 0,
    }
}

/// Waits until it is so.
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < LIMIT, "{what}");
        std::thread::yield_now();
    }
}
