//! The same, seen by a program: through contexts, regions and queue pairs.

use verbatim_device::control::{Access, QpAttr, QpAttrMask, QpState};

use super::*;
use crate::error::PostError;
use crate::process::Process;
use crate::work::{Body, RecvWr, SEND_SIGNALED, SendOpcode, SendWr, UdAddress, Wc};
use crate::{Context, Cq, Qp, QpInit};

pub struct Program {
    process: Arc<Process>,
    context: Arc<Context>,
    pub cq: Arc<Cq>,
    pub qp: Arc<Qp>,
    _runtime: Option<tempfile::TempDir>,
}

pub fn program(fake: &Fake) -> Program {
    let runtime = tempfile::tempdir().unwrap();
    let process = Process::new(runtime.path());
    Program {
        _runtime: Some(runtime),
        ..program_of(fake, process)
    }
}

/// As [`program`], one more device of a process.
fn program_of(fake: &Fake, process: Arc<Process>) -> Program {
    let context = process.open_on(|| fake.provider().open("fake0")).unwrap();
    let pd = context.alloc_pd().unwrap();
    let cq = context.create_cq(100, None).unwrap();
    let init = QpInit {
        send_cq: cq.clone(),
        recv_cq: cq.clone(),
        srq: None,
        qp_type: QpType::Rc,
        cap: CAP,
        signal_all: false,
    };
    let qp = pd.create_qp(&init).unwrap();
    for (state, mask) in [
        (QpState::Init, QpAttrMask::STATE),
        (QpState::Rtr, QpAttrMask::STATE),
        (QpState::Rts, QpAttrMask::STATE | QpAttrMask::SQ_PSN),
    ] {
        let attr = QpAttr {
            state,
            ..QpAttr::default()
        };
        qp.modify(mask, &attr).unwrap();
    }
    Program {
        process,
        context,
        cq,
        qp,
        _runtime: None,
    }
}

pub fn send(wr_id: u64, flags: u32) -> SendWr<'static> {
    SendWr {
        wr_id,
        opcode: SendOpcode::Send,
        flags,
        imm: 0,
        remote_address: 0,
        rkey: 0,
        compare_add: 0,
        swap: 0,
        ud: UdAddress::default(),
        body: Body::Sges(&[]),
    }
}

fn completed(cq: &Cq) -> Vec<u64> {
    let mut wcs = [Wc::default(); 32];
    let count = cq.poll(&mut wcs);
    wcs[..count].iter().map(|wc| wc.wr_id).collect()
}

#[test]
fn requests_complete_under_the_programs_names() {
    let fake = Fake::new();
    let Program { cq, qp, .. } = program(&fake);
    qp.post_send([send(100, 0), send(200, SEND_SIGNALED), send(300, SEND_SIGNALED)])
        .unwrap();
    qp.post_recv([RecvWr {
        wr_id: 400,
        sges: &[],
    }])
    .unwrap();
    assert!(fake.receive(qp.number(), 5, false));
    assert_eq!(completed(&cq), [200, 300, 400]);
}

#[test]
fn a_program_that_signals_nothing_has_a_full_queue_as_on_hardware() {
    let fake = Fake::new();
    let Program { cq, qp, .. } = program(&fake);
    for n in 0..8 {
        qp.post_send([send(n, 0)]).unwrap();
    }
    assert_eq!(qp.post_send([send(8, 0)]), Err((0, PostError::Full)));
    assert_eq!(completed(&cq), [0u64; 0]);
}

#[test]
fn the_program_is_told_which_request_the_library_refuses() {
    let fake = Fake::new();
    let Program { cq, qp, .. } = program(&fake);
    fake.refuse(2, libc::EOPNOTSUPP);
    let outcome = qp.post_send((0..4).map(|n| send(n, SEND_SIGNALED)));
    assert_eq!(outcome, Err((2, PostError::Refused(libc::EOPNOTSUPP))));
    assert_eq!(PostError::Refused(libc::EOPNOTSUPP).errno(), libc::EOPNOTSUPP);
    let outcome = qp.post_recv((0..4).map(|wr_id| RecvWr { wr_id, sges: &[] }));
    assert_eq!(outcome, Err((2, PostError::Refused(libc::EOPNOTSUPP))));
    fake.refuse(-1, 0);
    assert_eq!(completed(&cq), [0, 1]);
    // What was not posted left nothing behind: the next ones are as many as fit, and come in order.
    qp.post_send((10..18).map(|n| send(n, SEND_SIGNALED))).unwrap();
    assert_eq!(completed(&cq), (10..18).collect::<Vec<_>>());
    let mut batch = qp.batch();
    batch.push(&send(20, SEND_SIGNALED)).unwrap();
    fake.refuse(0, libc::EINVAL);
    assert_eq!(batch.complete(), Err((1, PostError::Refused(libc::EINVAL))));
}

#[test]
fn where_two_rnics_give_the_same_numbers_the_program_sees_two() {
    let fake = Fake::new();
    let first = program(&fake);
    // SAFETY: the fake's function of that name: it starts its numbers anew, as another RNIC does.
    unsafe { fake.function::<extern "C" fn()>(c"fake_renumber")() };
    let second = program_of(&fake, first.process.clone());
    assert_ne!(first.qp.number(), second.qp.number());
    second.qp.post_send([send(5, SEND_SIGNALED)]).unwrap();
    assert_eq!((completed(&first.cq), completed(&second.cq)), (vec![], vec![5]));
    second.qp.destroy().unwrap();
    first.qp.post_send([send(6, 0)]).unwrap();
    let register = |program: &Program| {
        let pd = program.qp.pd();
        pd.reg_mr(0x10000, 4096, 0x10000, Access::empty()).unwrap().lkey()
    };
    let [one, other] = [&first, &second].map(|program| {
        // SAFETY: as above.
        unsafe { fake.function::<extern "C" fn()>(c"fake_renumber")() };
        register(program)
    });
    assert_ne!(one, other);
}

/// Whether the page at `address` is one that is shared, of a file.
pub fn is_shared(address: usize) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps.lines().find(|line| {
        let (range, _) = line.split_once(' ').unwrap();
        let (start, end) = range.split_once('-').unwrap();
        let [start, end] = [start, end].map(|end| usize::from_str_radix(end, 16).unwrap());
        (start..end).contains(&address)
    });
    line.unwrap().split(' ').nth(1).unwrap().ends_with('s')
}

#[test]
fn memory_is_moved_to_a_file_first_and_back_after_it_was_deregistered() {
    let fake = Fake::new();
    let Program {
        process, context, qp, ..
    } = program(&fake);
    let mut buffer = Pages::new(4);
    buffer.bytes().fill(7);
    let (address, length) = (buffer.address(), buffer.bytes().len());
    let mr = qp
        .pd()
        .reg_mr(address as u64, length as u64, address as u64, Access::empty())
        .unwrap();
    assert!(is_shared(address));
    assert_eq!(
        fake.get(|knobs| knobs.registered),
        address as u64,
        "where the program sees it"
    );
    assert!(buffer.bytes().iter().all(|byte| *byte == 7));
    // The RNIC refuses to let go of it: the pages stay.
    fake.set(|knobs| knobs.keep_errno = libc::EBUSY);
    assert_eq!(mr.dereg().unwrap_err().errno(), libc::EBUSY);
    assert!(is_shared(address));
    fake.set(|knobs| knobs.keep_errno = 0);
    mr.dereg().unwrap();
    assert!(!is_shared(address));
    assert!(buffer.bytes().iter().all(|byte| *byte == 7));

    // What is not there is the library's business.
    assert!(crate::road_map::blockers(&process, verbatim_channel::VERSION).is_empty());
    let nowhere = qp.pd().reg_mr(0, u64::MAX, 0, Access::empty()).unwrap();
    assert_eq!(fake.get(|knobs| knobs.registered), 0);
    let blockers = crate::road_map::blockers(&process, verbatim_channel::VERSION);
    assert!(
        blockers.iter().any(|blocker| blocker.contains("fake0")),
        "{blockers:?}"
    );
    nowhere.dereg().unwrap();
    context.close().unwrap();
}

#[test]
fn a_region_changes_its_pages_and_those_of_before_go_back() {
    let fake = Fake::new();
    let Program { qp, .. } = program(&fake);
    let (mut first, mut second) = (Pages::new(2), Pages::new(2));
    first.bytes().fill(1);
    second.bytes().fill(2);
    let of = |pages: &mut Pages| (pages.address() as u64, pages.bytes().len() as u64);
    let (address, length) = of(&mut first);
    let mr = qp.pd().reg_mr(address, length, address, Access::empty()).unwrap();
    let change = crate::MrChange {
        memory: Some(of(&mut second)),
        ..crate::MrChange::default()
    };
    mr.rereg(&change).unwrap();
    assert!(!is_shared(first.address()) && is_shared(second.address()));
    assert!(first.bytes().iter().all(|byte| *byte == 1));
    assert!(second.bytes().iter().all(|byte| *byte == 2));
    mr.dereg().unwrap();
    assert!(!is_shared(second.address()));
}

#[test]
fn the_end_of_the_rnic_flushes_what_is_outstanding() {
    let fake = Fake::new();
    let Program { context, cq, qp, .. } = program(&fake);
    fake.set(|knobs| knobs.hold = 1);
    qp.post_send([send(1, 0), send(2, SEND_SIGNALED)]).unwrap();
    // SAFETY: the fake's queue pair is alive.
    let of = unsafe { (*fake.qp(qp.number())).context };
    let event = ffi::ibv_async_event {
        element: std::ptr::null_mut(),
        event_type: 8,
    };
    type Send = extern "C" fn(*mut ffi::ibv_context, *const ffi::ibv_async_event) -> c_int;
    // SAFETY: the fake's function of that name, and its context.
    let sent = unsafe { fake.function::<Send>(c"fake_async_event")(of, &event) };
    assert_eq!(sent, 0);
    let event = context.get_async_event().unwrap();
    assert_eq!(event.event, crate::AsyncEventType::DeviceFatal);
    assert_eq!(completed(&cq), [1, 2]);
    qp.destroy().unwrap();
    cq.destroy().unwrap();
}

#[test]
fn a_completion_is_given_the_time_at_which_it_was_taken() {
    let fake = Fake::new();
    let program = program(&fake);
    let sges = [Sge {
        address: 4096,
        length: 64,
        lkey: 1,
    }];
    program
        .qp
        .post_send([SendWr {
            wr_id: 5,
            opcode: SendOpcode::Write,
            flags: SEND_SIGNALED,
            imm: 0,
            remote_address: 0,
            rkey: 0,
            compare_add: 0,
            swap: 0,
            ud: UdAddress::default(),
            body: Body::Sges(&sges),
        }])
        .unwrap();
    let before = crate::sys::monotonic_ns();
    let completion = program.cq.poll_one().unwrap();
    assert_eq!(completion.wc.wr_id, 5);
    assert!((before..=crate::sys::monotonic_ns()).contains(&completion.timestamp_ns));
}

/// While it exists no command reaches the RNIC.
struct Refusing {
    commands: i32,
    kept: std::os::fd::OwnedFd,
}

impl Refusing {
    fn new(commands: i32) -> Self {
        // SAFETY: the fake's descriptor, which is open.
        let kept = unsafe { std::os::fd::BorrowedFd::borrow_raw(commands) };
        let kept = kept.try_clone_to_owned().unwrap();
        let unwritable = std::fs::File::open("/dev/null").unwrap();
        put(&unwritable, commands);
        Self { commands, kept }
    }
}

impl Drop for Refusing {
    fn drop(&mut self) {
        put(&self.kept, self.commands);
    }
}

fn put(file: &impl std::os::fd::AsRawFd, at: i32) {
    // SAFETY: a number of the fake's, which goes on with the other file.
    assert_eq!(unsafe { libc::dup2(file.as_raw_fd(), at) }, at);
}

#[test]
fn what_the_rnic_does_not_destroy_goes_on() {
    let fake = Fake::new();
    let Program { qp, cq, .. } = &program(&fake);
    let mut wc = [Wc::default(); 4];
    // SAFETY: the fake's queue pair is alive.
    let commands = unsafe { (*(*fake.qp(qp.number())).context).cmd_fd };
    let refusing = Refusing::new(commands);
    assert_eq!(qp.destroy().unwrap_err().errno(), libc::EBADF);
    qp.post_send([send(5, SEND_SIGNALED)]).unwrap();
    qp.post_recv([RecvWr { wr_id: 6, sges: &[] }]).unwrap();
    assert!(fake.receive(qp.number(), 1, false));
    assert_eq!(cq.poll(&mut wc), 2);
    assert_eq!([wc[0].wr_id, wc[1].wr_id], [5, 6]);
    drop(refusing);
    qp.post_send([send(7, SEND_SIGNALED)]).unwrap();
    qp.destroy().unwrap();
    let refusing = Refusing::new(commands);
    assert_eq!(cq.destroy().unwrap_err().errno(), libc::EBADF);
    assert_eq!(cq.poll(&mut wc), 0, "what it has goes with the queue pair");
    drop(refusing);
    cq.destroy().unwrap();
}
