//! A queue pair in any state, its program and its partner doing anything: the whole of the transport.
//!
//! The input is a story: each step posts, changes the queue pair, lets time pass, or has packets made up, damaged,
//! dropped or delivered. The surroundings are those of the transport's own tests.

#[path = "../../../crates/roce/tests/pair/mod.rs"]
#[allow(clippy::all, missing_docs, reason = "linted where it belongs")]
mod pair;

use std::time::Duration;

use arbitrary::Unstructured;
use pair::{End, Pair, Setup, Side, destination, qkey, qpn, sge};
use verbatim_roce::wire::bth::{BTH_BYTES, Bth};
use verbatim_roce::wire::opcode::{Opcode, Service};
use verbatim_roce::{
    AccessFlags, AtomicOp, BadRequest, Bind, Immediate, Lkey, Mtu, Operation, Packet, Psn, QpAttributes,
    QpConfig, QpState, QpType, Qpn, Queue, RcImage, Rkey, SendData, SgeList, Transmit, TxBatch, WcOpcode,
};

type Input<'a, 'b> = &'a mut Unstructured<'b>;

const GUARD: u8 = 0x5a;
/// Memory that everybody may use, and memory that nobody may.
const OPEN: (u32, u64) = (1, 0x1_0000);
const CLOSED: (u32, u64) = (3, 0x1_8000);
const REGION_BYTES: usize = 0x8000;
const MOST_STEPS: usize = 200;

/// Plays a story; says nothing unless something is wrong.
pub fn transport(input: &[u8]) {
    let mut input = Unstructured::new(input);
    let Ok(mut story) = Story::begin(&mut input) else {
        return;
    };
    for _ in 0..MOST_STEPS {
        if input.is_empty() || story.step(&mut input).is_err() {
            break;
        }
    }
    story.end();
}

struct Story {
    pair: Pair,
    /// What was posted so far: the next request's number, of A's sends, A's receives and B's sends.
    posted: [u64; 3],
}

impl Story {
    fn begin(input: Input<'_, '_>) -> arbitrary::Result<Self> {
        let setup = Setup {
            qp_type: *input.choose(&[QpType::Rc, QpType::Rc, QpType::Uc, QpType::Ud])?,
            mtu: *input.choose(&[Mtu::Mtu256, Mtu::Mtu1024, Mtu::Mtu4096])?,
            rnr_retry: input.int_in_range(0..=7)?,
            retry_cnt: input.int_in_range(0..=7)?,
            max_rd_atomic: input.int_in_range(0..=4)?,
            config: QpConfig {
                shared_receive_queue: input.ratio(1, 4)?,
                window_bytes: *input.choose(&[1, 4096, 512 * 1024])?,
                window_packets: *input.choose(&[1, 3, 256])?,
                max_outstanding_sends: *input.choose(&[1, 2, 256])?,
                hold_bytes: *input.choose(&[0, 3000, 512 * 1024])?,
                ..Setup::default().config
            },
            budget: input.int_in_range(1..=16)?,
            ..Setup::default()
        };
        let mut pair = Pair::new(setup);
        for side in [Side::A, Side::B] {
            let host = &mut pair.end(side).host;
            host.register(OPEN.0, OPEN.1, vec![1; REGION_BYTES]);
            host.register(CLOSED.0, CLOSED.1, vec![GUARD; REGION_BYTES]);
            host.region(CLOSED.0).access = AccessFlags::empty();
        }
        let mut this = Self { pair, posted: [0; 3] };
        for _ in 0..input.int_in_range(0..=4)? {
            this.post_receive(input)?;
            this.post_send(input)?;
        }
        this.partner_posts(input)?;
        Ok(this)
    }

    fn step(&mut self, input: Input<'_, '_>) -> arbitrary::Result<()> {
        match input.int_in_range(0..=11)? {
            0 | 1 => {
                self.pair.step();
            }
            2..=4 => self.invent_packet(input)?,
            5 => self.damage_packet(input)?,
            6 => self.post_send(input)?,
            7 => self.post_receive(input)?,
            8 => self.modify(input)?,
            9 => {
                let later = self.pair.now + Duration::from_micros(input.int_in_range(0..=20_000)?);
                self.pair.go_to(later);
            }
            10 => {
                let bytes = *input.choose(&[0, 1, 5000, u32::MAX])?;
                self.pair.a.qp.set_window(bytes);
                let (now, End { qp, host, .. }) = (self.pair.now, &mut self.pair.a);
                // What is sent here gets lost.
                let flow = verbatim_roce::Flow::new(pair::address(Side::A), pair::address(Side::B));
                let mut batch = TxBatch::new(flow.expect("both are IPv4"));
                let _: Transmit = qp.poll_transmit(now, host, &mut batch, input.int_in_range(0..=3)?);
            }
            _ => self.partner_posts(input)?,
        }
        Ok(())
    }

    /// Completions come once for each request and in order, no closed memory was written, and no more slots were given
    /// back than there were requests.
    fn end(mut self) {
        for _ in 0..2000 {
            if !self.pair.step() {
                break;
            }
        }
        for side in [Side::A, Side::B] {
            let host = &self.pair.end(side).host;
            let closed = host
                .regions
                .iter()
                .find(|region| (region.key, region.base) == CLOSED);
            if let Some(region) = closed {
                assert!(
                    region.bytes.iter().all(|byte| *byte == GUARD),
                    "closed memory was written"
                );
            }
            for queue in [Queue::Send, Queue::Receive] {
                let outcomes = host.outcomes(queue);
                let in_order = outcomes.windows(2).all(|two| two[0].0 < two[1].0);
                assert!(in_order, "{side:?} {queue:?}: {outcomes:?}");
            }
        }
        assert!(u64::from(self.pair.a.host.retired) <= self.posted[0]);
    }

    fn post_send(&mut self, input: Input<'_, '_>) -> arbitrary::Result<()> {
        let wr_id = self.posted[0];
        let host = &mut self.pair.a.host;
        if input.ratio(1, 16)? {
            let opcode = WcOpcode::Send;
            host.sends.push_back(Err(BadRequest { wr_id, opcode }));
        } else {
            let operation = operation(input)?;
            let data = match input.ratio(1, 4)? {
                true => SendData::inline(&[9; 256][..input.int_in_range(0..=256)?]).expect("it fits"),
                false => SendData::Sges(sges(input)?),
            };
            let (signaled, fence, solicited) = (input.arbitrary()?, input.arbitrary()?, input.arbitrary()?);
            let datagram = self.pair.setup.qp_type == QpType::Ud || input.ratio(1, 16)?;
            let to = datagram && input.ratio(15, 16)?;
            let mut to = to.then(|| destination(Side::B));
            if let Some(to) = to.as_mut().filter(|_| input.ratio(1, 8).unwrap_or(false)) {
                to.qkey = input.arbitrary()?;
                to.qpn = Qpn::new(input.int_in_range(0..=0xff_ffff)?);
            }
            host.post_with(wr_id, operation, data, |request| {
                (request.signaled, request.fence, request.solicited) = (signaled, fence, solicited);
                request.destination = to;
            });
        }
        self.posted[0] += 1;
        Ok(())
    }

    fn post_receive(&mut self, input: Input<'_, '_>) -> arbitrary::Result<()> {
        let sges = sges(input)?;
        self.pair.a.host.post_receive(self.posted[1], sges.as_slice());
        self.posted[1] += 1;
        Ok(())
    }

    /// The partner's program posts something that is right.
    fn partner_posts(&mut self, input: Input<'_, '_>) -> arbitrary::Result<()> {
        let host = &mut self.pair.b.host;
        let wr_id = self.posted[2];
        self.posted[2] += 1;
        let to = (self.pair.setup.qp_type == QpType::Ud).then(|| destination(Side::A));
        let length = input.int_in_range(0..=9000)?;
        let data = SendData::Sges(SgeList::new(&[sge(OPEN.0, OPEN.1, length)]).expect("one fits"));
        host.post_with(wr_id, pair::SEND, data, |request| {
            request.destination = to;
            request.signaled = false;
        });
        Ok(())
    }

    /// A packet that gets through the first checks more often than not.
    fn invent_packet(&mut self, input: Input<'_, '_>) -> arbitrary::Result<()> {
        let service = match self.pair.setup.qp_type {
            QpType::Rc => Service::Rc,
            QpType::Uc => Service::Uc,
            QpType::Ud => Service::Ud,
        };
        let known: Vec<_> = (0..=u8::MAX)
            .map(Opcode)
            .filter(|opcode| opcode.info().is_some_and(|info| info.service == service))
            .collect();
        let opcode = match input.ratio(15, 16)? {
            true => *input.choose(&known)?,
            false => Opcode(input.arbitrary()?),
        };
        let first = *input.choose(&[100u32, 200])?;
        let psn = match input.ratio(7, 8)? {
            true => first.wrapping_add(input.int_in_range(0..=40)?).wrapping_sub(8),
            false => input.arbitrary()?,
        };
        let mut packet = vec![0; BTH_BYTES];
        let bth = Bth {
            opcode,
            solicited: input.arbitrary()?,
            migrated: true,
            pad_count: input.int_in_range(0..=3)?,
            version: u8::from(input.ratio(1, 64)?),
            pkey: if input.ratio(1, 32)? {
                input.arbitrary()?
            } else {
                0xffff
            },
            fecn: false,
            becn: input.arbitrary()?,
            dest_qpn: qpn(Side::A),
            ack_request: input.arbitrary()?,
            psn: Psn::new(psn & 0xff_ffff),
        };
        bth.emit(packet.first_chunk_mut().expect("as long as a BTH"));
        if let Some(info) = opcode.info() {
            headers(&mut packet, info.headers, input)?;
            let payload = match input.int_in_range(0..=3)? {
                0 => 0,
                1 => self.pair.setup.mtu.bytes() as usize,
                _ => input.int_in_range(0..=1100)?,
            };
            if info.has_payload || input.ratio(1, 32)? {
                packet.resize(packet.len() + payload, 0xee);
            }
        }
        packet.extend([0; 4]);
        let (now, End { qp, host, .. }) = (self.pair.now, &mut self.pair.a);
        if let Ok(packet) = Packet::parse(&packet) {
            qp.handle_packet(now, &packet, host);
        }
        Ok(())
    }

    /// A packet of the partner, with one byte changed and an ICRC that is right, or lost.
    fn damage_packet(&mut self, input: Input<'_, '_>) -> arbitrary::Result<()> {
        for side in [Side::A, Side::B] {
            self.pair.transmit(side);
        }
        let Some(due) = self.pair.link.next_due() else {
            return Ok(());
        };
        self.pair.now = self.pair.now.max(due);
        let now = self.pair.now;
        let Some((side, mut bytes, _)) = self.pair.link.pop_due(due) else {
            return Ok(());
        };
        if input.ratio(1, 4)? {
            return Ok(());
        }
        let at = input.choose_index(bytes.len().min(48))?;
        bytes[at] ^= input.arbitrary::<u8>()?;
        let End { qp, host, .. } = self.pair.end(side);
        if let Ok(packet) = Packet::parse(&bytes) {
            qp.handle_packet(now, &packet, host);
        }
        Ok(())
    }

    fn modify(&mut self, input: Input<'_, '_>) -> arbitrary::Result<()> {
        let steps = pair::steps(&self.pair.setup, Side::A);
        let change = if input.ratio(1, 2)? {
            *input.choose(&steps)?
        } else {
            use QpState::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};
            let state = *input.choose(&[Reset, Init, Rtr, Rts, Sqd, Sqe, Err])?;
            QpAttributes {
                state: input.ratio(7, 8)?.then_some(state),
                cur_state: input.ratio(1, 8)?.then_some(Rts),
                en_sqd_async_notify: (state == Sqd).then_some(true),
                access_flags: match input.ratio(1, 8)? {
                    true => Some(AccessFlags::from_bits_retain(input.arbitrary()?)),
                    false => None,
                },
                qkey: input.ratio(1, 8)?.then_some(qkey(Side::B)),
                rnr_retry: input.ratio(1, 8)?.then_some(8),
                ..QpAttributes::default()
            }
        };
        let End { qp, host, .. } = &mut self.pair.a;
        let before = qp.state();
        let outcome = qp.modify(&change, host);
        let wanted = change.state.unwrap_or(before);
        assert_eq!(qp.state(), if outcome.is_ok() { wanted } else { before });
        Ok(())
    }
}

/// The extension headers of an opcode, that point near the memory there is.
fn headers(
    packet: &mut Vec<u8>,
    headers: verbatim_roce::wire::opcode::Headers,
    input: Input<'_, '_>,
) -> arbitrary::Result<()> {
    let start = packet.len();
    packet.resize(start + headers.bytes(), 0);
    for byte in &mut packet[start..] {
        *byte = input.arbitrary()?;
    }
    let mut at = start;
    if headers.deth && input.ratio(7, 8)? {
        packet[at..at + 4].copy_from_slice(&qkey(Side::A).to_be_bytes());
    }
    at += if headers.deth { 8 } else { 0 };
    if (headers.reth || headers.atomic_eth) && input.ratio(7, 8)? {
        let (key, base) = *input.choose(&[OPEN, OPEN, CLOSED])?;
        let address = base + u64::from(input.int_in_range(0..=0x8010u32)?);
        let length = input.int_in_range(0..=9000u32)?;
        packet[at..at + 8].copy_from_slice(&address.to_be_bytes());
        packet[at + 8..at + 12].copy_from_slice(&key.to_be_bytes());
        if headers.reth {
            packet[at + 12..at + 16].copy_from_slice(&length.to_be_bytes());
        }
    }
    Ok(())
}

fn sges(input: Input<'_, '_>) -> arbitrary::Result<SgeList> {
    let mut list = SgeList::default();
    for _ in 0..input.int_in_range(0..=3)? {
        let (key, base) = *input.choose(&[OPEN, OPEN, OPEN, OPEN, CLOSED])?;
        let offset = u64::from(input.int_in_range(0..=0x7000u32)?);
        let length = match input.ratio(15, 16)? {
            true => input.int_in_range(0..=5000)?,
            false => input.arbitrary()?,
        };
        assert!(list.push(sge(key, base + offset, length)), "three fit");
    }
    Ok(list)
}

fn operation(input: Input<'_, '_>) -> arbitrary::Result<Operation> {
    let (key, base) = *input.choose(&[OPEN, OPEN, OPEN, CLOSED])?;
    let remote_addr = base + u64::from(input.int_in_range(0..=0x2000u32)?);
    let rkey = Rkey(key);
    let imm = match input.arbitrary()? {
        true => Some(Immediate(input.arbitrary()?)),
        false => None,
    };
    let (compare, swap) = (input.arbitrary()?, input.arbitrary()?);
    Ok(match input.int_in_range(0..=9)? {
        0 | 1 => Operation::Send { imm },
        2 | 3 => Operation::Write {
            remote_addr,
            rkey,
            imm,
        },
        4 => Operation::Read { remote_addr, rkey },
        5 => Operation::Atomic {
            remote_addr: remote_addr & !7,
            rkey,
            op: AtomicOp::CompareSwap { compare, swap },
        },
        6 => Operation::Atomic {
            remote_addr,
            rkey,
            op: AtomicOp::FetchAdd { add: swap },
        },
        7 => Operation::AtomicWrite { remote_addr, rkey },
        8 => match input.arbitrary()? {
            true => Operation::SendInvalidate { rkey: Rkey(7) },
            false => Operation::LocalInvalidate { rkey: Rkey(7) },
        },
        _ => Operation::Bind(Bind {
            window: Rkey(7),
            rkey: Rkey(7),
            lkey: Lkey(key),
            addr: remote_addr,
            len: input.int_in_range(0..=4096)?,
            access: AccessFlags::from_bits_truncate(input.arbitrary()?),
        }),
    })
}

/// Noise long enough for whole stories.
pub fn seeds() -> Vec<Vec<u8>> {
    super::noise(24, 3000)
}

/// A reliable connection in the middle of requests in both directions, so many steps after they were posted: stopped, and saved.
pub fn image_after(steps: usize) -> Option<RcImage> {
    const LENGTH: u32 = 3000;
    let mut pair = Pair::new(Setup::default());
    for side in [Side::A, Side::B] {
        let host = &mut pair.end(side).host;
        host.register(OPEN.0, OPEN.1, vec![1; REGION_BYTES]);
        let part = |at| sge(OPEN.0, OPEN.1 + at, LENGTH);
        host.post_receive(0, &[part(0)]);
        host.post(0, pair::write(OPEN.1 + 0x2000, OPEN.0), &[part(0x1000)]);
        host.post(1, pair::read(OPEN.1 + 0x1000, OPEN.0), &[part(0x4000)]);
        let inline = SendData::inline(&[7; 100]).expect("it is short");
        host.post_with(2, pair::send_imm([1, 2, 3, 4]), inline, |request| {
            request.fence = true
        });
        host.post(
            3,
            pair::fetch_add(OPEN.1 + 0x6000, OPEN.0, 5),
            &[sge(OPEN.0, OPEN.1, 8)],
        );
    }
    for _ in 0..steps {
        pair.step();
    }
    let now = pair.now;
    let connection = pair.a.qp.as_rc_mut()?;
    connection.halt(now);
    connection.save()
}
