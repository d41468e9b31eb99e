//! As programs see it: draining what nobody signals, and memory.

use std::collections::HashMap;

use verbatim_channel::MrRecord;
use verbatim_device::control::{QpAttrMask, QpState};
use verbatim_device::ring::Body;
use verbatim_device::transitions::steps;

use super::super::super::port::way_to_itself;
use super::super::through_the_objects::is_shared;
use super::*;
use crate::described;
use crate::maker::Made;
use crate::process::Process;
use crate::work::{RecvWr, SEND_SIGNALED, SendOpcode, SendWr, UdAddress, Wc};
use crate::{Context, Cq, Mr, Pd, Qp, QpInit};

/// Two queue pairs of a program, connected to each other or able to reach each other.
struct Program {
    context: Arc<Context>,
    pd: Arc<Pd>,
    cqs: [Arc<Cq>; 2],
    qps: [Arc<Qp>; 2],
    memory: Pages,
    mr: Arc<Mr>,
    way: AddressVector,
    _runtime: tempfile::TempDir,
}

const PAGES: usize = 128;
/// The second half is the receiver's.
const HALF: usize = PAGES * 4096 / 2;

fn program(qp_type: QpType, access: Access) -> Program {
    let runtime = tempfile::tempdir().unwrap();
    let process = Process::new(runtime.path());
    program_of(process, runtime, qp_type, access)
}

fn program_of(process: Arc<Process>, runtime: tempfile::TempDir, qp_type: QpType, access: Access) -> Program {
    let context = process
        .open_on(|| RdmaCoreProvider::default().open(DEVICE))
        .unwrap();
    let pd = context.alloc_pd().unwrap();
    let cqs = [(); 2].map(|()| context.create_cq(64, None).unwrap());
    let qps = [0, 1].map(|end| {
        let init = QpInit {
            send_cq: cqs[end].clone(),
            recv_cq: cqs[end].clone(),
            qp_type,
            cap: cap(),
            signal_all: false,
            srq: None,
        };
        pd.create_qp(&init).unwrap()
    });
    let way = way_to_itself(context.port_attr());
    for (qp, other) in [(&qps[0], &qps[1]), (&qps[1], &qps[0])] {
        let attr = attributes(&way, other.number(), access);
        for (state, mask) in steps(qp_type, QpState::Rts).unwrap() {
            qp.modify(mask, &QpAttr { state, ..attr }).unwrap();
        }
    }
    let mut memory = Pages::new(PAGES);
    let (address, length) = (memory.address() as u64, memory.bytes().len() as u64);
    let mr = pd
        .reg_mr(
            address,
            length,
            address,
            Access::LOCAL_WRITE | Access::REMOTE_WRITE,
        )
        .unwrap();
    Program {
        context,
        pd,
        cqs,
        qps,
        memory,
        mr,
        way,
        _runtime: runtime,
    }
}

impl Program {
    fn sge(&self, offset: usize, length: u32) -> Sge {
        Sge {
            address: self.memory.address() as u64 + offset as u64,
            length,
            lkey: self.mr.lkey(),
        }
    }

    fn recv(&self, wr_id: u64, offset: usize, length: u32) {
        let sges = [self.sge(offset, length)];
        self.qps[1].post_recv([RecvWr { wr_id, sges: &sges }]).unwrap();
    }

    fn send(&self, wr_id: u64, flags: u32, length: u32, ah: u32) {
        let sges = [self.sge(0, length)];
        let request = SendWr {
            wr_id,
            opcode: SendOpcode::Send,
            flags,
            imm: 0,
            remote_address: 0,
            rkey: 0,
            compare_add: 0,
            swap: 0,
            ud: UdAddress {
                ah,
                remote_qpn: self.qps[1].number(),
                remote_qkey: QKEY,
            },
            body: Body::Sges(&sges),
        };
        self.qps[0].post_send([request]).unwrap();
    }

    fn poll(&self, end: usize) -> Vec<Wc> {
        let mut found = [Wc::default(); 32];
        let count = self.cqs[end].poll(&mut found);
        found[..count].to_vec()
    }
}

/// Sends without asking for completions, and drains.
fn drains(qp_type: QpType, length: u32, ah: impl Fn(&Program) -> u32, grh: usize) {
    const COUNT: usize = 10;
    let mut program = program(qp_type, Access::LOCAL_WRITE);
    let ah = ah(&program);
    program.memory.bytes()[..HALF].fill(0x5a);
    let step = length as usize + grh;
    for index in 0..COUNT {
        program.recv(index as u64, HALF + index * step, step as u32);
    }
    for index in 0..COUNT {
        program.send(index as u64, 0, length, ah);
    }
    let [from, to] = &program.qps;
    assert!(!from.send.lock().is_idle());
    assert!(from.allow_markers().unwrap() && to.allow_markers().unwrap());
    let shown = to.query().unwrap().0.access;
    assert_eq!(shown, to.control.lock().attr.access, "as the program has set it");
    until("it never drains", || {
        from.mark();
        program.cqs[0].queue.lock().sweep();
        from.send.lock().is_idle()
    });
    assert_eq!(program.poll(0), [], "the program sees nothing of it");
    let mut arrived = 0;
    until("not all have arrived", || {
        let found = program.poll(1);
        assert!(found.iter().all(|wc| wc.status == 0));
        arrived += found.len();
        arrived == COUNT
    });
    let bytes = program.memory.bytes();
    for index in 0..COUNT {
        let first = HALF + index * step + grh;
        assert!(
            bytes[first..first + length as usize]
                .iter()
                .all(|byte| *byte == 0x5a)
        );
    }
    let [from, to] = &program.qps;
    from.disallow_markers().unwrap();
    to.disallow_markers().unwrap();
    // It goes on as ever.
    program.recv(77, HALF, step as u32);
    program.send(78, SEND_SIGNALED, length, ah);
    let mut seen = Vec::new();
    until("nothing comes any more", || {
        seen.extend(
            program
                .poll(0)
                .iter()
                .chain(&program.poll(1))
                .map(|wc| (wc.wr_id, wc.status)),
        );
        seen.len() == 2
    });
    seen.sort_unstable();
    assert_eq!(seen, [(77, 0), (78, 0)]);
}

#[test]
#[ignore = "needs rxe0"]
fn rxe_a_reliable_connection_drains_without_a_signal() {
    drains(QpType::Rc, 20_000, |_| 0, 0);
}

#[test]
#[ignore = "needs rxe0"]
fn rxe_an_unreliable_connection_drains_without_a_signal() {
    drains(QpType::Uc, 3000, |_| 0, 0);
}

#[test]
#[ignore = "needs rxe0"]
fn rxe_datagrams_drain_without_a_signal() {
    let ah = |program: &Program| {
        let ah = program.pd.create_ah(&program.way).unwrap();
        ah.number()
    };
    drains(QpType::Ud, 1000, ah, 40);
}

#[test]
#[ignore = "needs rxe0"]
fn rxe_a_queue_pair_that_has_failed_is_made_again_as_failed() {
    let program = program(QpType::Rc, Access::empty());
    let failed = QpAttr {
        state: QpState::Err,
        ..QpAttr::default()
    };
    program.qps[0].modify(QpAttrMask::STATE, &failed).unwrap();
    let mut record = described::kept(&program.context);
    record.mrs.clear();
    let device = open();
    let mut register = |_: &dyn Device, _: &MrRecord, _: u32| unreachable!("there is none");
    let made = Made::make(device.clone(), &record, &HashMap::new(), &mut register).unwrap();
    let states = program.qps.each_ref().map(|qp| {
        let mut claimed = made.claimed.qps.iter();
        let claimed = claimed.find(|claimed| claimed.qpn == qp.number()).unwrap();
        device.query_qp(claimed.physical_qpn).unwrap().state
    });
    assert_eq!(states, [QpState::Err, QpState::Init]);
}

#[test]
#[ignore = "needs rxe0"]
fn rxe_memory_is_a_files_while_it_is_registered() {
    let mut program = program(QpType::Rc, Access::REMOTE_WRITE);
    assert!(is_shared(program.memory.address()));
    // What the RNIC writes is what the program sees, and what it keeps.
    program.memory.bytes()[..4096].fill(9);
    program.recv(1, HALF, 4096);
    program.send(2, 0, 4096, 0);
    until("it does not arrive", || !program.poll(1).is_empty());
    assert!(
        program.memory.bytes()[HALF..HALF + 4096]
            .iter()
            .all(|byte| *byte == 9)
    );
    let mr = program.mr.clone();
    mr.dereg().unwrap();
    assert!(!is_shared(program.memory.address()));
    assert!(
        program.memory.bytes()[HALF..HALF + 4096]
            .iter()
            .all(|byte| *byte == 9)
    );
    program.context.close().unwrap();
}

#[test]
#[ignore = "needs rxe0"]
fn rxe_a_forked_child_has_its_own_memory_and_the_rnic_writes_to_the_parents() {
    let runtime = tempfile::tempdir().unwrap();
    // What the handlers of a fork look after is the process's own. SAFETY: these tests run one after the other.
    unsafe { std::env::set_var(verbatim_channel::RUNTIME_DIR_VARIABLE, runtime.path()) };
    let process = Process::global().clone();
    let mut program = program_of(process, runtime, QpType::Rc, Access::empty());
    let address = program.memory.address();
    assert!(is_shared(address));
    program.memory.bytes().fill(0x5a);
    program.recv(1, HALF, 4096);
    crate::before_fork();
    // SAFETY: the child calls its handler, writes to memory, and ends without running anything else.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        crate::after_fork_in_child();
        let bytes = program.memory.bytes();
        let seen = bytes.iter().all(|byte| *byte == 0x5a);
        bytes.fill(0xcc);
        // SAFETY: as above.
        unsafe { libc::_exit((!seen).into()) };
    }
    crate::after_fork_in_parent();
    let mut status = -1;
    // SAFETY: our own child.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    assert_eq!(status, 0, "the child sees what there was");
    assert!(program.memory.bytes().iter().all(|byte| *byte == 0x5a));
    program.memory.bytes()[..4096].fill(0x77);
    program.send(2, 0, 4096, 0);
    until("it does not arrive", || !program.poll(1).is_empty());
    assert!(
        program.memory.bytes()[HALF..HALF + 4096]
            .iter()
            .all(|byte| *byte == 0x77)
    );
}
