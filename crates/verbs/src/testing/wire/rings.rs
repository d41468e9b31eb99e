//! The program's ends of the queues.

use verbatim_device::layout::{Cqe, SendWqe, Sge};
use verbatim_device::ring::{Armed, Body};
use verbatim_roce::{Lkey, ReceiveRequest, SendData, SgeList};

use super::{Posted, Queues, State, Wire};
use crate::backend::{CompletionRing, RecvRing, Refused, SendRing};

/// An end of a queue pair's queue.
#[derive(Debug)]
pub struct QpEnd {
    pub(super) wire: Wire,
    pub(super) device: u8,
    pub(super) qpn: u32,
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
        let mut state = self.wire.0.lock();
        run(queues(&mut state, self.device, self.qpn))
    }
}

fn queues(state: &mut State, device: u8, qpn: u32) -> &mut Queues {
    let rnic = state.rnics.get_mut(&device).expect("an RNIC");
    &mut rnic.qps.get_mut(&qpn).expect("a live queue pair").queues
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
        self.with(|queues| queues.cap.max_send_wr - (queues.unfinished.len() + queues.pushed.len()) as u32)
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
        self.with(|queues| queues.cap.max_recv_wr - (queues.recvs.len() + queues.pushed_recvs.len()) as u32)
    }

    fn push(&mut self, wr_id: u64, sges: &[Sge]) {
        let sges = list(sges);
        self.with(|queues| queues.pushed_recvs.push(ReceiveRequest { wr_id, sges }));
    }

    fn publish(&mut self) -> Result<(), Refused> {
        self.with(|queues| queues.recvs.extend(std::mem::take(&mut queues.pushed_recvs)));
        Ok(())
    }

    fn reset(&mut self) {}
}

impl CompletionRing for CqEnd {
    fn pop(&mut self) -> Option<Cqe> {
        let mut state = self.wire.0.lock();
        state
            .rnics
            .get_mut(&self.device)?
            .cqs
            .get_mut(&self.cq)?
            .pop_front()
    }

    fn arm(&mut self, _: bool) -> bool {
        false
    }

    fn disarm(&mut self) -> Option<Armed> {
        None
    }
}
