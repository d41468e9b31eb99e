//! Requests become datagrams, each with a path of its own.

use std::net::SocketAddr;

use crate::gather::{check_data, execute_local, gather, retire};
use crate::link::{Outlet, SendError};
use crate::shell::Shell;
use crate::wire::deth::Deth;
use crate::wire::opcode::Opcode;
use crate::wire::packet::Head;
use crate::{
    Completion, Counters, Flow, Host, Operation, Path, Psn, Queue, SendRequest, Transmit, TxBatch, UDP_PORT,
    WcStatus,
};

/// A Q_Key in a request with this bit stands for the queue pair's own (IBA §10.2.5).
const OWN_QKEY: u32 = 1 << 31;

/// Numbers below this one are those of management queue pairs, which are the hosts' own (IBA §10.2.4).
const FIRST_QPN_OF_PROGRAMS: u32 = 2;

/// The sender's half of a datagram queue pair.
#[derive(Debug, Default)]
pub(super) struct Sender {
    /// A request whose packet did not fit into the batch, or had another path.
    waiting: Option<Box<SendRequest>>,
    next: Psn,
    failed: bool,
}

/// Why a datagram is not in the batch.
enum Unsent {
    /// The batch has to go first.
    Full,
    /// The request fails.
    Failed(WcStatus),
}

impl From<SendError> for Unsent {
    fn from(error: SendError) -> Unsent {
        match error {
            SendError::Full => Unsent::Full,
            SendError::Access => Unsent::Failed(WcStatus::LocProtErr),
        }
    }
}

impl Sender {
    pub fn start(&mut self, first: Psn) {
        self.next = first;
    }

    pub fn is_drained(&self) -> bool {
        self.waiting.is_none()
    }

    /// Has a request failed since the last call?
    pub fn take_failure(&mut self) -> bool {
        std::mem::take(&mut self.failed)
    }

    /// Completes what waits, without sending it.
    pub fn flush(&mut self, host: &mut impl Host, counters: &mut Counters) {
        if let Some(request) = self.waiting.take() {
            counters.req_cqe_flush_error += 1;
            let opcode = request.operation.wc_opcode();
            retire(&request, opcode, WcStatus::WrFlushErr, 0, host);
        }
        *self = Sender::default();
    }

    pub fn transmit(
        &mut self,
        may_start: bool,
        shell: &mut Shell,
        host: &mut impl Host,
        batch: &mut TxBatch,
        budget: usize,
    ) -> Transmit {
        for _ in 0..budget {
            let request = match self.waiting.take() {
                Some(request) => *request,
                None if !may_start => return Transmit::Idle,
                None => match host.next_send() {
                    None => return Transmit::Idle,
                    Some(Ok(request)) => request,
                    Some(Err(bad)) => {
                        self.failed = true;
                        shell.counters.req_cqe_error += 1;
                        host.retire_sends(1);
                        let status = WcStatus::LocQpOpErr;
                        host.complete(Completion::new(Queue::Send, bad.wr_id, status, bad.opcode, 0));
                        return Transmit::Idle;
                    }
                },
            };
            let opcode = request.operation.wc_opcode();
            match self.send(&request, shell, host, batch) {
                Ok(len) => retire(&request, opcode, WcStatus::Success, len, host),
                Err(Unsent::Full) => {
                    self.waiting = Some(Box::new(request));
                    return Transmit::Full;
                }
                Err(Unsent::Failed(status)) => {
                    self.failed = true;
                    shell.counters.req_cqe_error += 1;
                    retire(&request, opcode, status, 0, host);
                    return Transmit::Idle;
                }
            }
        }
        Transmit::More
    }

    /// Sends a request, or executes it if it needs no packet; gives the length of the message.
    fn send(
        &mut self,
        request: &SendRequest,
        shell: &mut Shell,
        host: &mut impl Host,
        batch: &mut TxBatch,
    ) -> Result<u32, Unsent> {
        let opcode = match request.operation {
            Operation::Send { imm: None } => Opcode::UD_SEND_ONLY,
            Operation::Send { imm: Some(_) } => Opcode::UD_SEND_ONLY_IMM,
            Operation::LocalInvalidate { .. } | Operation::Bind(_) => {
                return execute_local(request, host).map(|()| 0).map_err(Unsent::Failed);
            }
            _ => return Err(Unsent::Failed(WcStatus::LocQpOpErr)),
        };
        let destination = request.destination.ok_or(Unsent::Failed(WcStatus::LocQpOpErr))?;
        check_data(request, host).map_err(Unsent::Failed)?;
        let len = request.data.len_bytes() as u32;
        if len > shell.link.mtu.bytes() {
            // IBA C10-93.1.1: nothing is emitted, and no error is generated.
            shell.counters.overlong_datagrams += 1;
            return Ok(len);
        }
        if destination.qpn.get() < FIRST_QPN_OF_PROGRAMS {
            // The host there would take it for a message of this host. It is lost, as one with a wrong key is on hardware.
            shell.counters.refused_datagrams += 1;
            return Ok(len);
        }
        direct(batch, &destination.path)?;
        let own_qkey = shell.attributes.qkey.unwrap_or_default();
        let Shell {
            link, counters, qpn, ..
        } = shell;
        let mut bth = link.bth(opcode, self.next);
        bth.dest_qpn = destination.qpn;
        bth.solicited = request.solicited;
        let head = Head {
            deth: Some(Deth {
                qkey: match destination.qkey & OWN_QKEY {
                    0 => destination.qkey,
                    _ => own_qkey,
                },
                source_qpn: *qpn,
            }),
            imm: request.operation.imm(),
            ..Head::new(bth)
        };
        let mut outlet = Outlet {
            link,
            batch,
            counters,
            budget: 1,
        };
        outlet.send(&head, len, |payload| gather(&request.data, 0, payload, host))?;
        counters.sent_requests += 1;
        counters.sent_request_bytes += u64::from(len);
        self.next = self.next.next();
        Ok(len)
    }
}

/// Makes the batch one for this path.
fn direct(batch: &mut TxBatch, path: &Path) -> Result<(), Unsent> {
    let source = SocketAddr::new(path.source, path.source_port);
    let destination = SocketAddr::new(path.destination, UDP_PORT);
    let flow = Flow::new(source, destination).map_err(|_| Unsent::Failed(WcStatus::LocQpOpErr))?;
    if *batch.flow() == flow && batch.traffic() == path.traffic {
        return Ok(());
    }
    if !batch.is_empty() {
        return Err(Unsent::Full);
    }
    batch.restart_with(flow, path.traffic);
    Ok(())
}
