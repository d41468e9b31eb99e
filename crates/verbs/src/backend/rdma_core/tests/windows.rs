//! What windows open is known, and made again.

use verbatim_device::control::{Access, MwBound, MwState, QpAttr, QpAttrMask, QpState};
use verbatim_device::layout::{self, SEND_SIGNALED, SendWqe};
use verbatim_device::ring::Body;
use verbatim_device::transitions::steps;

use super::*;
use crate::backend::{PhysicalMemory, PhysicalMrInit, QpEnds};
use crate::work::{RECV_BIT, SendOpcode, WC_IP_CSUM_OK, WC_WITH_IMM, WC_WITH_INV};

/// A device with a region, a window of each type and a queue pair.
struct Site {
    device: Arc<dyn Device>,
    cq: CqPlace,
    qp: QpPlace,
    lkey: u32,
    one: u32,
    two: u32,
}

impl Site {
    fn new(fake: &Fake) -> Self {
        let device = fake.open();
        let (pd, cq, qp) = queue_pair(&*device, QpType::Rc, None);
        let memory = PhysicalMemory {
            address: 0x10000,
            length: 4096,
            iova: 0x10000,
            segments: &[],
            file: None,
        };
        let access = Access::MW_BIND;
        let (lkey, _) = device.reg_mr(&PhysicalMrInit { pd, access, memory }).unwrap();
        let [one, two] = [MwType::One, MwType::Two].map(|mw_type| device.alloc_mw(pd, mw_type).unwrap());
        let site = Self {
            device,
            cq,
            qp,
            lkey,
            one,
            two,
        };
        for (state, mask) in steps(QpType::Rc, QpState::Rts).unwrap() {
            site.take_to(state, mask);
        }
        site
    }

    fn take_to(&self, state: QpState, mask: QpAttrMask) {
        let attr = QpAttr {
            state,
            ..QpAttr::default()
        };
        self.device.modify_qp(self.qp.qpn, mask, &attr).unwrap();
    }

    fn ends(&self) -> QpEnds {
        self.device.qp_ends(&self.qp).unwrap()
    }

    fn bind(&self, wr_id: u64, window: u32, length: u64) -> SendWqe {
        SendWqe {
            wr_id,
            opcode: layout::WR_BIND_MW,
            flags: SEND_SIGNALED,
            rkey: window,
            imm: window + 1,
            remote_address: 0x10010,
            compare_add: length,
            swap: u64::from(self.lkey) | 2 << 32,
            ..SendWqe::default()
        }
    }

    fn bound(&self, qpn: Option<u32>) -> Option<MwBound> {
        Some(MwBound {
            lkey: self.lkey,
            address: 0x10010,
            length: 64,
            access: Access::REMOTE_WRITE,
            qpn,
        })
    }

    fn states(&self) -> [MwState; 2] {
        [self.one, self.two].map(|rkey| self.device.query_mw(rkey).unwrap())
    }

    /// Binds both.
    fn bind_both(&self, ends: &mut QpEnds) {
        ends.send.push(&self.bind(0, self.one, 64), Body::Sges(&[]));
        ends.send.push(&self.bind(1, self.two, 64), Body::Sges(&[]));
        ends.send.publish().unwrap();
    }
}

#[test]
fn what_was_bound_is_known() {
    let fake = Fake::new();
    let site = Site::new(&fake);
    let mut ends = site.ends();
    let unbound = |rkey| MwState { rkey, bound: None };
    assert_eq!(site.states(), [unbound(site.one), unbound(site.two)]);
    site.bind_both(&mut ends);
    let one = MwState {
        rkey: site.one + 1,
        bound: site.bound(None),
    };
    let two = MwState {
        rkey: site.two + 1,
        bound: site.bound(Some(site.qp.qpn)),
    };
    assert_eq!(site.states(), [one, two]);
    assert_eq!(site.device.blocker(), None);
    assert!(site.device.keeps_queue_pair(site.qp.qpn).is_some());

    // By the program; with a key of a bind before, it is refused where it is executed, and changes nothing.
    let invalidate = |wr_id, imm| SendWqe {
        wr_id,
        opcode: layout::WR_LOCAL_INV,
        flags: SEND_SIGNALED,
        imm,
        ..SendWqe::default()
    };
    let send = &mut ends.send;
    send.push(&invalidate(2, site.two), Body::Sges(&[]));
    send.publish().unwrap();
    assert_eq!(site.states(), [one, two]);
    send.push(&invalidate(3, site.two + 1), Body::Sges(&[]));
    send.publish().unwrap();
    assert_eq!(site.states(), [one, unbound(site.two + 1)]);
    assert_eq!(site.device.keeps_queue_pair(site.qp.qpn), None);

    // Among others, and refused in the middle of them.
    let again = SendWqe {
        imm: site.two + 2,
        ..site.bind(5, site.two + 1, 64)
    };
    send.push(&invalidate(4, 0x7700), Body::Sges(&[]));
    send.push(&again, Body::Sges(&[]));
    fake.refuse(1, libc::ENOMEM);
    assert_eq!(send.publish().unwrap_err().count, 1);
    assert_eq!(site.states()[1], unbound(site.two + 1));
    fake.refuse(-1, 0);
    send.push(&again, Body::Sges(&[]));
    send.push(&invalidate(6, 0x7700), Body::Sges(&[]));
    send.publish().unwrap();
    assert_eq!(site.states()[1].bound, two.bound);

    // By a peer, and by one as the kernel's rxe tells it.
    let mut end = site.device.cq_end(&site.cq).unwrap();
    while end.pop().is_some() {}
    for (position, flags) in (0..).zip([WC_WITH_INV, WC_IP_CSUM_OK]) {
        let key = site.states()[1].rkey;
        assert_eq!(site.states()[1].bound, two.bound);
        let mut told = |key, flags| {
            ends.recv.push(position | RECV_BIT, &[]);
            ends.recv.publish().unwrap();
            fake.set(|knobs| (knobs.invalidates, knobs.invalidation) = (key, flags));
            assert!(fake.receive(site.qp.qpn, 0, false));
            end.pop().unwrap().wc_flags
        };
        assert_eq!(told(0x7700, WC_IP_CSUM_OK), WC_IP_CSUM_OK, "of no window");
        assert_eq!(
            told(key, WC_IP_CSUM_OK | WC_WITH_IMM),
            WC_IP_CSUM_OK | WC_WITH_IMM
        );
        assert_eq!(site.states()[1].bound, two.bound);
        assert_eq!(told(key, flags), WC_WITH_INV);
        assert_eq!(site.states()[1], unbound(key));
        let again = SendWqe {
            imm: key + 1,
            ..site.bind(7 + position, key, 64)
        };
        ends.send.push(&again, Body::Sges(&[]));
        ends.send.publish().unwrap();
        while end.pop().is_some() {}
    }
    // No bytes: to nothing.
    ends.send.push(
        &SendWqe {
            imm: site.one + 2,
            ..site.bind(9, site.one + 1, 0)
        },
        Body::Sges(&[]),
    );
    ends.send.publish().unwrap();
    assert_eq!(site.states()[0], unbound(site.one + 2));
}

#[test]
fn of_a_queue_pair_that_has_failed_nobody_knows() {
    let fake = Fake::new();
    let site = Site::new(&fake);
    site.bind_both(&mut site.ends());
    let two = site.states()[1].rkey;
    site.take_to(QpState::Sqd, QpAttrMask::STATE);
    let blocker = site.device.blocker().unwrap();
    assert!(blocker.contains("in the state in which that is"), "{blocker}");
    site.take_to(QpState::Err, QpAttrMask::STATE);
    let blocker = site.device.blocker().unwrap();
    assert!(blocker.contains("failed or is gone"), "{blocker}");
    assert!(site.device.query_mw(site.one).is_err());
    let unbound = MwState {
        rkey: two,
        bound: None,
    };
    assert_eq!(
        site.device.query_mw(site.two).unwrap(),
        unbound,
        "nobody gets in by that queue pair"
    );
}

/// The states of both windows at a new device, where the one of type 1 has the tag before the known one.
fn moved(from: &Site, to: &Site) -> [MwState; 2] {
    let [one, two] = from.states();
    let bound = |state: MwState| {
        let qpn = state.bound.unwrap().qpn.map(|_| to.qp.qpn);
        let lkey = to.lkey;
        state.bound.map(|bound| MwBound { lkey, qpn, ..bound })
    };
    let tag = |known: u32, found: u32| found & !0xff | known & 0xff;
    [
        MwState {
            rkey: tag(one.rkey, to.one),
            bound: bound(one),
        },
        MwState {
            rkey: tag(two.rkey, to.two),
            bound: bound(two),
        },
    ]
}

#[test]
fn a_window_is_bound_again_and_nobody_sees_it() {
    let fake = Fake::new();
    let from = Site::new(&fake);
    from.bind_both(&mut from.ends());
    let to = Site::new(&fake);
    let states = moved(&from, &to);
    for state in &states {
        to.device.restore_mw(state).unwrap();
    }
    assert_eq!(fake.get(|knobs| (knobs.binds, knobs.mw_rkey_seen)), (2, to.two));
    let request = fake.last(1)[0].wr;
    assert_eq!(
        (request.opcode, request.send_flags),
        (SendOpcode::BindMw as u32, 2)
    );
    let bind = request.bind_mw;
    assert_eq!(
        (bind.rkey, bind.bind_info.addr, bind.bind_info.length),
        (states[1].rkey, 0x10010, 64)
    );
    assert_eq!(bind.bind_info.mw_access_flags, 2);
    // SAFETY: the region is alive.
    assert_eq!(unsafe { (*bind.bind_info.mr).lkey }, to.lkey);
    assert_eq!(to.states(), states, "so that it can move again");
    let mut end = to.device.cq_end(&to.cq).unwrap();
    assert_eq!(end.pop(), None);
    let mut send = to.ends().send;
    assert_eq!((send.room(), send.unfinished()), (8, 0));
    // The next binds go on from there.
    for (wr_id, state) in (0..).zip(states) {
        send.push(&to.bind(wr_id, state.rkey, 64), Body::Sges(&[]));
        send.publish().unwrap();
        assert_eq!(end.pop().unwrap().wr_id, wr_id);
    }
    assert_eq!(fake.get(|knobs| knobs.mw_rkey_seen), states[1].rkey);
}

#[test]
fn a_bind_that_fails_is_told() {
    let fake = Fake::new();
    let from = Site::new(&fake);
    from.bind_both(&mut from.ends());
    let to = Site::new(&fake);
    let [one, two] = moved(&from, &to);
    let far = MwState {
        rkey: one.rkey + 5,
        ..one
    };
    let error = to.device.restore_mw(&far).unwrap_err().to_string();
    assert!(error.contains("was bound to key"), "{error}");
    fake.refuse(0, libc::ENOMEM);
    assert_eq!(to.device.restore_mw(&two).unwrap_err().errno(), libc::ENOMEM);
    fake.refuse(-1, 0);
    fake.set(|knobs| knobs.status = 6);
    assert_eq!(to.device.restore_mw(&two).unwrap_err().errno(), libc::EIO);
    to.take_to(QpState::Err, QpAttrMask::STATE);
    let error = to.device.restore_mw(&two).unwrap_err().to_string();
    assert!(error.contains("the queue pair"), "{error}");
}
