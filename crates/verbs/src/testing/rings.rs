//! The program's ends of the queues.

use verbatim_device::layout::{Cqe, SendWqe, Sge};
use verbatim_device::ring::{Armed, Body};
use verbatim_roce::{Lkey, ReceiveRequest, SendData, SgeList};

use super::Wire;
use super::rnic::{Posted, Queues, WireCq, WireSrq};
use crate::backend::{CompletionRing, RecvRing, Refused, SendRing};

/// An end of a queue pair's queue.
#[derive(Debug)]
pub struct QpEnd {
    pub(super) wire: Wire,
    pub(super) device: u8,
    pub(super) qpn: u32,
}

/// The end of a shared receive queue.
#[derive(Debug)]
pub struct SrqEnd {
    pub(super) wire: Wire,
    pub(super) device: u8,
    pub(super) srq: u32,
}

/// The end of a completion queue.
#[derive(Debug)]
pub struct CqEnd {
    pub(super) wire: Wire,
    pub(super) device: u8,
    pub(super) cq: u32,
}

impl QpEnd {
    fn with<T>(&self, run: impl FnOnce(&mut Queues) -> T) -> T {
        self.wire.with_rnic(self.device, |rnic| {
            run(&mut rnic.qps.get_mut(&self.qpn).expect("a live queue pair").queues)
        })
    }
}

impl SrqEnd {
    fn with<T>(&self, run: impl FnOnce(&mut WireSrq) -> T) -> T {
        let srq = self.srq;
        self.wire.with_rnic(self.device, |rnic| {
            run(rnic.shared.srqs.get_mut(&srq).expect("a live queue"))
        })
    }
}

impl CqEnd {
    fn with<T>(&self, run: impl FnOnce(&mut WireCq) -> T) -> T {
        let cq = self.cq;
        self.wire.with_rnic(self.device, |rnic| {
            run(rnic.shared.cqs.get_mut(&cq).expect("a live queue"))
        })
    }
}

/// No test posts a RECV to memory that its RNIC does not know.
fn check_keys(wire: &Wire, device: u8, sges: &[Sge]) {
    wire.with_rnic(device, |rnic| {
        let known = |sge: &Sge| rnic.shared.memory.regions.contains_key(&sge.lkey);
        assert!(
            sges.iter().all(known),
            "keys that device {device} knows: {sges:x?}"
        );
    });
}

fn list(sges: &[Sge]) -> SgeList {
    let sges: Vec<_> = sges
        .iter()
        .map(|sge| verbatim_roce::Sge {
            addr: sge.address,
            len: sge.length,
            lkey: Lkey(sge.lkey),
        })
        .collect();
    SgeList::new(&sges).expect("few entries")
}

impl SendRing for QpEnd {
    fn room(&self) -> u32 {
        if self.wire.frees_late() {
            return 0;
        }
        self.with(|queues| {
            queues.init.cap.max_send_wr - (queues.unfinished.len() + queues.pushed.len()) as u32
        })
    }

    fn push(&mut self, wqe: &SendWqe, body: Body<'_>) {
        let data = match body {
            Body::Sges(sges) => SendData::Sges(list(sges)),
            Body::Inline(pieces) => SendData::inline(&pieces.concat()).expect("few bytes"),
        };
        let posted = Posted { wqe: *wqe, data };
        self.with(|queues| queues.pushed.push(posted));
    }

    fn unpush(&mut self, count: u32) {
        self.with(|queues| queues.pushed.truncate(queues.pushed.len() - count as usize));
    }

    fn publish(&mut self) -> Result<(), Refused> {
        self.with(|queues| {
            queues.unfinished.extend(queues.pushed.iter().cloned());
            queues.sends.extend(std::mem::take(&mut queues.pushed));
        });
        Ok(())
    }

    fn for_each_unfinished(&self, take: &mut dyn FnMut(&SendWqe, Body<'_>)) {
        let unfinished = self.with(|queues| queues.unfinished.clone());
        for Posted { wqe, data } in unfinished {
            match data {
                SendData::Inline(bytes) => take(&wqe, Body::Inline(&[&bytes])),
                SendData::Sges(list) => {
                    let sges = list.as_slice().iter().map(|sge| Sge {
                        address: sge.addr,
                        length: sge.len,
                        lkey: sge.lkey.0,
                    });
                    take(&wqe, Body::Sges(&sges.collect::<Vec<_>>()));
                }
            }
        }
    }

    fn unfinished(&self) -> u32 {
        // Whoever waits for the RNICs lets them work.
        self.wire.step();
        self.with(|queues| queues.unfinished.len() as u32)
    }

    fn reset(&mut self) {}
}

impl RecvRing for QpEnd {
    fn room(&self) -> u32 {
        self.with(|queues| {
            queues.init.cap.max_recv_wr - (queues.recvs.len() + queues.pushed_recvs.len()) as u32
        })
    }

    fn push(&mut self, wr_id: u64, sges: &[Sge]) {
        check_keys(&self.wire, self.device, sges);
        let sges = list(sges);
        self.with(|queues| queues.pushed_recvs.push(ReceiveRequest { wr_id, sges }));
    }

    fn publish(&mut self) -> Result<(), Refused> {
        self.with(|queues| queues.recvs.extend(std::mem::take(&mut queues.pushed_recvs)));
        Ok(())
    }

    fn reset(&mut self) {}
}

impl RecvRing for SrqEnd {
    fn room(&self) -> u32 {
        self.with(|srq| srq.attr.max_wr - (srq.recvs.len() + srq.pushed.len()) as u32)
    }

    fn push(&mut self, wr_id: u64, sges: &[Sge]) {
        check_keys(&self.wire, self.device, sges);
        let sges = list(sges);
        self.with(|srq| srq.pushed.push(ReceiveRequest { wr_id, sges }));
    }

    fn publish(&mut self) -> Result<(), Refused> {
        self.with(|srq| srq.recvs.extend(std::mem::take(&mut srq.pushed)));
        Ok(())
    }

    fn reset(&mut self) {}
}

impl CompletionRing for CqEnd {
    fn pop(&mut self) -> Option<Cqe> {
        self.with(|cq| cq.entries.pop_front())
    }

    fn arm(&mut self, solicited_only: bool) -> bool {
        self.with(|cq| {
            *cq.armed.get_or_insert_default() |= !solicited_only;
            !cq.entries.is_empty()
        })
    }

    fn disarm(&mut self) -> Option<Armed> {
        let any = self.with(|cq| cq.armed.take())?;
        Some(if any { Armed::Any } else { Armed::Solicited })
    }
}
