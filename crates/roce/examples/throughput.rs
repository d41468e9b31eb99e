//! Two queue pairs in memory, 64 KiB WRITEs from one to the other: what the transport itself costs.
//!
//! `cargo run --release -p verbatim-roce --example throughput [BYTES [SECONDS]]` prints GB/s and packets per second of
//! one core that does the work of both ends: gather, ICRC, check of the ICRC, store, acknowledge.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use verbatim_roce::{
    AccessError, AccessFlags, AddressVector, BadRequest, Completion, Event, Flow, Host, Key, Lkey,
    LocalAccess, Mtu, Operation, Packet, Psn, QpAttributes, QpConfig, QpState, Qpn, RcQp, ReceiveRequest,
    RemoteAccess, Rkey, SendData, SendRequest, Sge, SgeList, Time, TxBatch, UDP_PORT,
};

const REGION: usize = 8 << 20;

/// One region of memory, and requests without end.
struct Bench {
    memory: Vec<u8>,
    message_bytes: u32,
    to_post: u64,
    posted: u64,
    completed: u64,
}

impl Bench {
    fn range(&self, addr: u64, len: usize) -> Result<std::ops::Range<usize>, AccessError> {
        let start = usize::try_from(addr).map_err(|_| AccessError)?;
        let end = start
            .checked_add(len)
            .filter(|end| *end <= self.memory.len())
            .ok_or(AccessError)?;
        Ok(start..end)
    }
}

impl Host for Bench {
    fn check_local(&mut self, _: Lkey, addr: u64, len: u32, _: LocalAccess) -> Result<(), AccessError> {
        self.range(addr, len as usize).map(|_| ())
    }
    fn check_remote(&mut self, _: Rkey, addr: u64, len: u32, _: RemoteAccess) -> Result<(), AccessError> {
        self.range(addr, len as usize).map(|_| ())
    }
    fn read(&mut self, _: Key, addr: u64, out: &mut [u8]) -> Result<(), AccessError> {
        out.copy_from_slice(&self.memory[self.range(addr, out.len())?]);
        Ok(())
    }
    fn write(&mut self, _: Key, addr: u64, data: &[u8]) -> Result<(), AccessError> {
        let range = self.range(addr, data.len())?;
        self.memory[range].copy_from_slice(data);
        Ok(())
    }
    fn next_send(&mut self) -> Option<Result<SendRequest, BadRequest>> {
        if self.posted == self.to_post {
            return None;
        }
        self.posted += 1;
        let addr = self.posted * u64::from(self.message_bytes) % (REGION as u64 / 2);
        let sge = Sge {
            addr,
            len: self.message_bytes,
            lkey: Lkey(1),
        };
        Some(Ok(SendRequest {
            wr_id: self.posted,
            operation: Operation::Write {
                remote_addr: addr,
                rkey: Rkey(1),
                imm: None,
            },
            data: SendData::Sges(SgeList::new(&[sge]).expect("one piece")),
            signaled: true,
            fence: false,
            solicited: false,
            destination: None,
        }))
    }
    fn next_receive(&mut self) -> Option<ReceiveRequest> {
        None
    }
    fn retire_sends(&mut self, _: u32) {}
    fn complete(&mut self, _: Completion) {
        self.completed += 1;
    }
    fn event(&mut self, _: Event) {}
}

struct End {
    qp: RcQp,
    host: Bench,
    batch: TxBatch,
    inbound: Flow,
}

fn end(own: u8, other: u8, message_bytes: u32, to_post: u64) -> End {
    let address = |host| SocketAddr::from(([10, 0, 0, host], UDP_PORT));
    let flow = |from, to| Flow::new(address(from), address(to)).expect("both are IPv4");
    let mut host = Bench {
        memory: vec![own; REGION],
        message_bytes,
        to_post,
        posted: 0,
        completed: 0,
    };
    let mut qp = RcQp::new(Qpn::new(own.into()), QpConfig::default());
    let init = QpAttributes {
        state: Some(QpState::Init),
        pkey_index: Some(0),
        port_num: Some(1),
        access_flags: Some(AccessFlags::REMOTE_WRITE),
        ..QpAttributes::default()
    };
    let rtr = QpAttributes {
        state: Some(QpState::Rtr),
        av: Some(AddressVector::default()),
        path_mtu: Some(Mtu::Mtu4096),
        dest_qpn: Some(Qpn::new(other.into())),
        rq_psn: Some(Psn::new(0)),
        max_dest_rd_atomic: Some(1),
        min_rnr_timer: Some(12),
        ..QpAttributes::default()
    };
    let rts = QpAttributes {
        state: Some(QpState::Rts),
        sq_psn: Some(Psn::new(0)),
        timeout: Some(14),
        retry_cnt: Some(7),
        rnr_retry: Some(7),
        max_rd_atomic: Some(1),
        ..QpAttributes::default()
    };
    for step in [init, rtr, rts] {
        qp.modify(&step, &mut host).expect("the steps are complete");
    }
    End {
        qp,
        host,
        batch: TxBatch::new(flow(own, other)),
        inbound: flow(other, own),
    }
}

/// Moves one batch; says whether there was one.
fn carry(now: Time, from: &mut End, to: &mut End) -> bool {
    from.batch.clear();
    from.qp.poll_transmit(now, &mut from.host, &mut from.batch, 64);
    for (segment, bytes) in from.batch.packets().enumerate() {
        assert!(to.inbound.verify(bytes, segment as u16).is_good());
        let packet = Packet::parse(bytes).expect("it was just built");
        to.qp.handle_packet(now, &packet, &mut to.host);
    }
    !from.batch.is_empty()
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let message_bytes: u32 = arguments
        .next()
        .map_or(65536, |text| text.parse().expect("BYTES is a number"));
    let seconds: u64 = arguments
        .next()
        .map_or(2, |text| text.parse().expect("SECONDS is a number"));
    let mut a = end(1, 2, message_bytes, u64::MAX);
    let mut b = end(2, 1, message_bytes, 0);
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(seconds) {
        for _ in 0..100 {
            let now = Time::from_nanos(start.elapsed().as_nanos() as u64);
            carry(now, &mut a, &mut b);
            carry(now, &mut b, &mut a);
        }
    }
    let elapsed = start.elapsed().as_secs_f64();
    let bytes = a.host.completed as f64 * f64::from(message_bytes);
    let packets = a.qp.counters().sent_requests as f64;
    println!(
        "{message_bytes} bytes per WRITE: {:.2} GB/s, {:.2} million messages/s, {:.2} million packets/s (both ends on one core)",
        bytes / elapsed / 1e9,
        a.host.completed as f64 / elapsed / 1e6,
        packets / elapsed / 1e6,
    );
}
