//! What a migration carries of each verbs object, in bytes, beside the paper's table 1. The same in each run.
//!
//! Of a connection that is paused that is its image (`roce::RcImage`), which holds requests that were taken off the ring, and
//! its line of the road map; of the other objects the line alone, from which they are made again (`channel::RoadMap`). What numbers and
//! lengths there are is written with as many bytes as it needs, so that the sizes are those of plausible ones: keys and numbers that
//! RNICs give, addresses of 47 bits.

use std::path::Path;

use anyhow::ensure;
use serde::Serialize;
use verbatim_channel::{CqRecord, Endpoint, MrRecord, PdRecord, QpRecord, SegmentRecord, SrqRecord};
use verbatim_device::control::{Access, QpAttr, QpCap, QpState, QpType, SrqAttr};
use verbatim_roce::{QpConfig, RcImage, ReceiveRequest, Time};

use super::transport::pair::{End, ends, piece, request};
use crate::migrrdma::write;

const REQUESTS: usize = 16;
const REQUEST_BYTES: u32 = 4096;
/// Of three packets.
const MESSAGE_BYTES: u32 = 3 * 4096;

#[derive(Debug, Serialize)]
struct Report {
    unit: &'static str,
    rows: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    object: &'static str,
    /// Its line of the road map.
    road_map: usize,
    /// The image of a connection.
    image: Option<usize>,
    /// The paper's table 1.
    paper: Option<u32>,
}

/// Counts, prints and writes.
pub fn run(out: &Path) -> anyhow::Result<()> {
    let rows = rows()?;
    println!("what a migration carries of an object, bytes");
    println!(
        "{:36} {:>9} {:>7} {:>7} | {:>7}",
        "", "road map", "image", "sum", "paper"
    );
    for row in &rows {
        let optional = |value: Option<usize>| value.map_or_else(|| "-".to_owned(), |value| value.to_string());
        println!(
            "{:36} {:>9} {:>7} {:>7} | {:>7}",
            row.object,
            row.road_map,
            optional(row.image),
            row.road_map + row.image.unwrap_or(0),
            optional(row.paper.map(|bytes| bytes as usize)),
        );
    }
    write(&Report { unit: "B", rows }, out)
}

fn rows() -> anyhow::Result<Vec<Row>> {
    let object = |object, road_map, paper| Row {
        object,
        road_map,
        image: None,
        paper: Some(paper),
    };
    let connection = |object, shared, image, paper| {
        Ok::<_, anyhow::Error>(Row {
            object,
            road_map: bytes(&qp_record(shared))?,
            image: Some(image),
            paper,
        })
    };
    let pd = PdRecord { pd: 1 };
    let cq = CqRecord {
        cq: 1,
        entries: 1024,
        channel: None,
    };
    let srq = SrqRecord {
        srq: 1,
        pd: 1,
        attr: SrqAttr {
            max_wr: 1024,
            max_sge: 1,
            limit: 0,
        },
    };
    Ok(vec![
        object("PD", bytes(&pd)?, 12),
        object("MR", bytes(&mr_record())?, 48),
        object("CQ", bytes(&cq)?, 64),
        object("SRQ", bytes(&srq)?, 68),
        connection("QP, idle", false, idle(false)?.encode().len(), Some(271))?,
        connection(
            "QP, 16 requests outstanding",
            false,
            outstanding()?.encode().len(),
            None,
        )?,
        connection("QP with SRQ, idle", true, idle(true)?.encode().len(), None)?,
        connection(
            "QP with SRQ, in the midst of a RECV",
            true,
            receiving()?.encode().len(),
            Some(823),
        )?,
    ])
}

fn bytes(record: &impl Serialize) -> anyhow::Result<usize> {
    Ok(postcard::to_stdvec(record)?.len())
}

fn mr_record() -> MrRecord {
    const ADDRESS: u64 = 0x7f12_3456_7000;
    const LENGTH: u64 = 1 << 20;
    MrRecord {
        lkey: 0x0123_4567,
        rkey: 0x0123_4567,
        physical_lkey: 0x0123_4567,
        physical_rkey: 0x0123_4567,
        pd: 1,
        address: ADDRESS,
        length: LENGTH,
        iova: ADDRESS,
        access: Access::LOCAL_WRITE | Access::REMOTE_WRITE,
        segments: vec![SegmentRecord {
            address: ADDRESS,
            length: LENGTH,
            offset: Some(LENGTH),
        }],
    }
}

fn qp_record(shared: bool) -> QpRecord {
    const GID: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 77, 0, 1];
    let attr = QpAttr {
        state: QpState::Rts,
        cur_state: QpState::Rts,
        path_mtu: 5,
        rq_psn: 0x0012_3456,
        sq_psn: 0x0012_3456,
        dest_qpn: 0x0001_2345,
        ..QpAttr::default()
    };
    QpRecord {
        qpn: 0x0001_2345,
        pd: 1,
        send_cq: 1,
        recv_cq: 1,
        srq: shared.then_some(1),
        qp_type: QpType::Rc,
        cap: QpCap {
            max_send_wr: 128,
            max_recv_wr: 128,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        },
        attr,
        groups: Vec::new(),
        physical_qpn: 0x0001_2345,
        local_gid: Some(GID),
        remote: Some(Endpoint {
            gid: GID,
            qpn: 0x0001_2345,
        }),
        paused: false,
    }
}

fn connected(shared: bool) -> [End; 2] {
    let config = QpConfig {
        shared_receive_queue: shared,
        ..QpConfig::default()
    };
    ends(MESSAGE_BYTES, config, true)
}

fn save(end: &mut End) -> anyhow::Result<RcImage> {
    ensure!(end.qp.halt(NOW), "it is not stopped");
    Ok(end.qp.save().expect("it is stopped"))
}

const NOW: Time = Time::from_nanos(1_000_000);

fn idle(shared: bool) -> anyhow::Result<RcImage> {
    let [mut end, _] = connected(shared);
    save(&mut end)
}

/// Sent, and not acknowledged.
fn outstanding() -> anyhow::Result<RcImage> {
    let [mut sender, mut receiver] = connected(false);
    for wr_id in 0..REQUESTS as u64 {
        let write = request(wr_id, false, piece(REQUEST_BYTES));
        sender.host.sends.push_back(write);
    }
    sender.carry(NOW, &mut receiver, 2 * REQUESTS);
    let image = save(&mut sender)?;
    ensure!(image.requests().count() == REQUESTS, "{image:?}");
    Ok(image)
}

/// One of three packets of a SEND has come.
fn receiving() -> anyhow::Result<RcImage> {
    let [mut sender, mut receiver] = connected(true);
    let sges = piece(MESSAGE_BYTES);
    receiver.host.receives.push_back(ReceiveRequest {
        wr_id: 1,
        sges: sges.clone(),
    });
    sender.host.sends.push_back(request(1, true, sges));
    sender.carry(NOW, &mut receiver, 1);
    let image = save(&mut receiver)?;
    ensure!(image.receive().is_some(), "{image:?}");
    Ok(image)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_under_way_makes_an_image_larger() {
        let rows = rows().unwrap();
        let image = |object: &str| {
            rows.iter()
                .find(|row| row.object == object)
                .unwrap()
                .image
                .unwrap()
        };
        let idle = image("QP, idle");
        assert!(idle > 100, "{rows:?}");
        assert!(image("QP, 16 requests outstanding") > idle + 16 * 10, "{rows:?}");
        assert!(
            image("QP with SRQ, in the midst of a RECV") > image("QP with SRQ, idle") + 10,
            "{rows:?}"
        );
    }
}
