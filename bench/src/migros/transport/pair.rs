//! Two ends of a connection in memory, which exchange messages one by one. No kernel takes part.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::ops::Range;
use std::time::Duration;

use verbatim_roce::{
    AccessError, AccessFlags, AddressVector, BadRequest, Completion, Event, Flow, Host, Key, Lkey,
    LocalAccess, Mtu, Operation, Packet, Psn, QpAttributes, QpConfig, QpState, Qpn, RcQp, ReceiveRequest,
    RemoteAccess, Rkey, Secret, SecretEnd, SendData, SendRequest, Sge, SgeList, Time, TxBatch, UDP_PORT,
    WcStatus,
};

/// Packets of one poll, as the RNIC polls.
const BUDGET: usize = 64;
const BETWEEN: Duration = Duration::from_micros(10);

/// One region of memory, the requests that were posted, and how many have completed.
pub struct Surroundings {
    memory: Vec<u8>,
    pub sends: VecDeque<SendRequest>,
    pub receives: VecDeque<ReceiveRequest>,
    completed: u64,
}

impl Surroundings {
    fn range(&self, addr: u64, len: usize) -> Result<Range<usize>, AccessError> {
        let start = usize::try_from(addr).map_err(|_| AccessError)?;
        let end = start
            .checked_add(len)
            .filter(|end| *end <= self.memory.len())
            .ok_or(AccessError)?;
        Ok(start..end)
    }
}

impl Host for Surroundings {
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
        self.sends.pop_front().map(Ok)
    }
    fn next_receive(&mut self) -> Option<ReceiveRequest> {
        self.receives.pop_front()
    }
    fn retire_sends(&mut self, _: u32) {}
    fn complete(&mut self, completion: Completion) {
        assert_eq!(completion.status, WcStatus::Success);
        self.completed += 1;
    }
    fn event(&mut self, event: Event) {
        assert_eq!(event, Event::CommunicationEstablished);
    }
}

/// One end.
pub struct End {
    pub qp: RcQp,
    pub host: Surroundings,
    batch: TxBatch,
    inbound: Flow,
    packets: u64,
}

impl End {
    /// In RTS, with so many bytes of memory. Numbers and addresses end in `own` and `other`.
    pub fn new(own: u8, other: u8, bytes: u32, config: QpConfig) -> Self {
        let address = |host| SocketAddr::from(([10, 0, 0, host], UDP_PORT));
        let flow = |from, to| Flow::new(address(from), address(to)).expect("both are IPv4");
        let mut host = Surroundings {
            memory: vec![own; bytes as usize],
            sends: VecDeque::new(),
            receives: VecDeque::new(),
            completed: 0,
        };
        let mut qp = RcQp::new(Qpn::new(own.into()), config);
        for step in steps(other) {
            qp.modify(&step, &mut host).expect("the steps are complete");
        }
        Self {
            qp,
            host,
            batch: TxBatch::new(flow(own, other)),
            inbound: flow(other, own),
            packets: 0,
        }
    }

    /// Sends what there is to send, at most `budget` packets; says whether there was something.
    pub fn carry(&mut self, now: Time, to: &mut Self, budget: usize) -> bool {
        self.batch.clear();
        self.qp
            .poll_transmit(now, &mut self.host, &mut self.batch, budget);
        for (segment, bytes) in self.batch.packets().enumerate() {
            self.packets += 1;
            assert!(to.inbound.verify(bytes, segment as u16).is_good());
            let packet = Packet::parse(bytes).expect("it was just built");
            to.qp.handle_packet(now, &packet, &mut to.host);
        }
        !self.batch.is_empty()
    }
}

fn steps(other: u8) -> [QpAttributes; 3] {
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
    [init, rtr, rts]
}

/// Both ends, which share a secret or do not.
pub fn ends(bytes: u32, config: QpConfig, secret: bool) -> [End; 2] {
    let mut ends = [(1, 2), (2, 1)].map(|(own, other)| End::new(own, other, bytes, config));
    if secret {
        for (end, which) in ends.iter_mut().zip([SecretEnd::First, SecretEnd::Second]) {
            end.qp.set_secret(Some(Secret::new([7; 32], which)));
        }
    }
    ends
}

/// The whole memory, or the beginning of it.
pub fn piece(bytes: u32) -> SgeList {
    let sge = Sge {
        addr: 0,
        len: bytes,
        lkey: Lkey(1),
    };
    SgeList::new(&[sge]).expect("one piece")
}

/// A SEND, or a WRITE, of that.
pub fn request(wr_id: u64, send: bool, sges: SgeList) -> SendRequest {
    SendRequest {
        wr_id,
        operation: if send {
            Operation::Send { imm: None }
        } else {
            Operation::Write {
                remote_addr: 0,
                rkey: Rkey(1),
                imm: None,
            }
        },
        data: SendData::Sges(sges),
        signaled: true,
        fence: false,
        solicited: false,
        destination: None,
    }
}

/// A connection, and the message that goes over it again and again.
pub struct Messages {
    sender: End,
    receiver: End,
    send: bool,
    sges: SgeList,
    now: Time,
}

impl Messages {
    /// SENDs or WRITEs of so many bytes, over a connection with or without a secret.
    pub fn new(send: bool, bytes: u32, secret: bool) -> Self {
        let [sender, receiver] = ends(bytes, QpConfig::default(), secret);
        Self {
            sender,
            receiver,
            send,
            sges: piece(bytes),
            now: Time::from_nanos(1_000_000),
        }
    }

    /// One message, and its acknowledgement.
    pub fn exchange(&mut self) {
        let Self {
            sender,
            receiver,
            sges,
            ..
        } = self;
        self.now = self.now + BETWEEN;
        if self.send {
            receiver.host.receives.push_back(ReceiveRequest {
                wr_id: 1,
                sges: sges.clone(),
            });
        }
        sender.host.sends.push_back(request(1, self.send, sges.clone()));
        let done = sender.host.completed + 1;
        while sender.host.completed < done {
            let sent = sender.carry(self.now, receiver, BUDGET);
            let answered = receiver.carry(self.now, sender, BUDGET);
            assert!(sent || answered, "nothing is lost here");
        }
    }

    /// Packets that both ends have sent so far.
    pub fn packets(&self) -> u64 {
        self.sender.packets + self.receiver.packets
    }
}
