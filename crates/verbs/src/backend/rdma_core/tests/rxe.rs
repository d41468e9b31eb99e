//! What a move needs, on the kernel's rxe, of which no fake knows all. They are run in a virtual machine (docs/testbed.md):
//! this machine has no `rxe0`.

use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::OFlags;
use verbatim_device::control::{Access, AddressVector, MwType, QpAttr, QpState, SrqAttr};
use verbatim_device::layout::{self, SendWqe};
use verbatim_device::ring::Body;
use verbatim_device::transitions::steps;

use super::*;
use crate::backend::{CompletionRing, EventChannel, PhysicalMemory, PhysicalMrInit, QpEnds};
use crate::process::Process;
use crate::work::{RECV_BIT, RecvWr, SendOpcode, SendWr, UdAddress, Wc};
use crate::{Context, Cq, Mr, Pd, Qp, QpInit};

const DEVICE: &str = "rxe0";
const QKEY: u32 = 0x1111_1111;
const LIMIT: Duration = Duration::from_secs(20);

fn open() -> Arc<dyn Device> {
    RdmaCoreProvider::default().open(DEVICE).unwrap()
}

/// The attributes of a queue pair that is connected to `dest` of the same port.
fn attributes(way: &AddressVector, dest: u32, access: Access) -> QpAttr {
    QpAttr {
        path_mtu: 3,
        qkey: QKEY,
        rq_psn: 5,
        sq_psn: 5,
        dest_qpn: dest,
        access,
        av: *way,
        port_num: 1,
        max_rd_atomic: 1,
        max_dest_rd_atomic: 1,
        min_rnr_timer: 1,
        timeout: 14,
        retry_cnt: 7,
        rnr_retry: 7,
        ..QpAttr::default()
    }
}

fn cap() -> QpCap {
    QpCap {
        max_send_wr: 16,
        max_recv_wr: 16,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline_data: 0,
    }
}

/// Waits until it is so.
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < LIMIT, "{what}");
        std::thread::yield_now();
    }
}

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
    let way = super::super::port::way_to_itself(context.port_attr());
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
    program.send(78, crate::work::SEND_SIGNALED, length, ah);
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
fn rxe_memory_is_a_files_while_it_is_registered() {
    let mut program = program(QpType::Rc, Access::REMOTE_WRITE);
    assert!(super::through_the_objects::is_shared(program.memory.address()));
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
    assert!(!super::through_the_objects::is_shared(program.memory.address()));
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
    assert!(super::through_the_objects::is_shared(address));
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

/// A device with a channel, a pair of connected queue pairs, and one for datagrams.
struct Rig {
    device: Arc<dyn Device>,
    channel: Arc<dyn EventChannel>,
    pd: u32,
    cq: CqPlace,
    rc: [QpPlace; 2],
    ud: QpPlace,
    ah: u32,
    memory: Pages,
    lkey: u32,
}

impl Rig {
    /// With this channel of the program, or one of its own.
    fn new(channel: Option<Arc<dyn EventChannel>>) -> Self {
        let device = open();
        let made = device.create_comp_channel().unwrap();
        let number = made.number();
        let channel = match channel {
            Some(channel) => {
                drop(made);
                device.attach_comp_channel(number, &*channel).unwrap();
                channel
            }
            None => made,
        };
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(64, Some((number, EVENT))).unwrap();
        let init = |qp_type| PhysicalQpInit {
            pd,
            send_cq: cq.cq,
            recv_cq: cq.cq,
            srq: None,
            qp_type,
            cap: cap(),
        };
        let create = |qp_type| device.create_qp(&init(qp_type)).unwrap();
        let (rc, ud) = ([create(QpType::Rc), create(QpType::Rc)], create(QpType::Ud));
        let way = super::super::port::way_to_itself(device.attributes().1);
        let bring_up = |qp: &QpPlace, qp_type, dest| {
            for (state, mask) in steps(qp_type, QpState::Rts).unwrap() {
                let attr = attributes(&way, dest, Access::LOCAL_WRITE);
                device.modify_qp(qp.qpn, mask, &QpAttr { state, ..attr }).unwrap();
            }
        };
        bring_up(&rc[0], QpType::Rc, rc[1].qpn);
        bring_up(&rc[1], QpType::Rc, rc[0].qpn);
        bring_up(&ud, QpType::Ud, 0);
        let ah = device.create_ah(pd, &way).unwrap();
        let mut memory = Pages::new(2);
        let (address, length) = (memory.address() as u64, memory.bytes().len() as u64);
        let memory_of = PhysicalMemory {
            address,
            length,
            iova: address,
            segments: &[],
            file: None,
        };
        let init = PhysicalMrInit {
            pd,
            access: Access::LOCAL_WRITE,
            memory: memory_of,
        };
        let (lkey, _) = device.reg_mr(&init).unwrap();
        Self {
            device,
            channel,
            pd,
            cq,
            rc,
            ud,
            ah,
            memory,
            lkey,
        }
    }

    fn ends(&self, qp: &QpPlace) -> QpEnds {
        self.device.qp_ends(qp).unwrap()
    }

    fn end(&self) -> Box<dyn CompletionRing> {
        self.device.cq_end(&self.cq).unwrap()
    }

    fn sge(&self, offset: u64, length: u32) -> Sge {
        Sge {
            address: self.memory.address() as u64 + offset,
            length,
            lkey: self.lkey,
        }
    }

    fn recv(&self, qp: &QpPlace, position: u64) {
        let mut recv = self.ends(qp).recv;
        recv.push(position | RECV_BIT, &[self.sge(4096, 200)]);
        recv.publish().unwrap();
    }

    /// A signaled SEND, on the connection or to the datagram queue pair `to`.
    fn send(&self, qp: &QpPlace, position: u64, to: u32) {
        let mut send = self.ends(qp).send;
        let wqe = SendWqe {
            wr_id: position,
            opcode: SendOpcode::Send as u8,
            flags: layout::SEND_SIGNALED,
            ah: self.ah,
            remote_qpn: to,
            remote_qkey: QKEY,
            ..SendWqe::default()
        };
        send.push(&wqe, Body::Sges(&[self.sge(0, 100)]));
        send.publish().unwrap();
    }

    /// The next completions: their queue pairs and `wr_id`s.
    fn completed(&self, end: &mut dyn CompletionRing, count: usize) -> Vec<(u32, u64)> {
        let mut found = Vec::new();
        until("completions are missing", || {
            found.extend(end.pop().map(|cqe| {
                assert_eq!(cqe.status, 0);
                (cqe.qpn, cqe.wr_id)
            }));
            found.len() == count
        });
        found.sort_unstable();
        found
    }
}

#[test]
#[ignore = "needs rxe0"]
fn rxe_a_parked_device_goes_on_and_takes_no_datagrams_meanwhile() {
    let mut rig = Rig::new(None);
    let other = Rig::new(None);
    let mut end = rig.end();
    for position in 0..3 {
        rig.recv(&rig.ud, position);
        rig.recv(&rig.rc[1], position);
    }
    other.send(&other.ud, 0, rig.ud.qpn);
    assert_eq!(rig.completed(&mut *end, 1), [(rig.ud.qpn, RECV_BIT)]);
    end.arm(false);
    rig.send(&rig.rc[0], 0, 0);
    assert_eq!(
        rig.completed(&mut *end, 2),
        [(rig.rc[0].qpn, 0), (rig.rc[1].qpn, RECV_BIT)]
    );
    drop(end);
    let device = rig.device.clone();
    let mut parked = device.park().unwrap();
    assert_eq!(rig.channel.next().unwrap(), EVENT, "it was unread");
    rig.memory.bytes()[4096..].fill(0xee);
    other.send(&other.ud, 1, rig.ud.qpn);
    other.completed(&mut *other.end(), 2);
    let again = (parked.reopen)(parked.connection).unwrap();
    assert!(Arc::ptr_eq(&again, &parked.kept.take().unwrap()));
    assert_eq!(again.lost_recvs(), [rig.ud.qpn]);
    let mut end = rig.end();
    assert_eq!(end.pop(), None);
    assert!(rig.memory.bytes()[4096..].iter().all(|byte| *byte == 0xee));
    // The RECVs of the connection are still there, those for datagrams are given again.
    end.arm(false);
    rig.send(&rig.rc[0], 1, 0);
    assert_eq!(
        rig.completed(&mut *end, 2),
        [(rig.rc[0].qpn, 1), (rig.rc[1].qpn, RECV_BIT | 1)]
    );
    assert_eq!(rig.channel.next().unwrap(), EVENT);
    rig.recv(&rig.ud, 1);
    other.send(&other.ud, 2, rig.ud.qpn);
    assert_eq!(rig.completed(&mut *end, 1), [(rig.ud.qpn, RECV_BIT | 1)]);
    rig.send(&rig.ud, 0, other.ud.qpn);
    assert_eq!(rig.completed(&mut *end, 1), [(rig.ud.qpn, 0)]);
}

/// Those of RNICs.
fn descriptors() -> Vec<RawFd> {
    let open = std::fs::read_dir("/proc/self/fd").unwrap();
    let known = open.flatten().filter(|entry| {
        let target = std::fs::read_link(entry.path()).unwrap_or_default();
        let target = target.to_string_lossy();
        target.contains("/infiniband/uverbs") || target.contains("[infinibandevent]")
    });
    known
        .map(|entry| entry.file_name().to_str().unwrap().parse().unwrap())
        .collect()
}

/// Makes of a process what it is where it was restored (`tests/vm/probes/rnic_plugin.c`).
fn put_placeholders(numbers: &[RawFd]) {
    for number in numbers {
        let placeholder = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        // SAFETY: the library's descriptor, which it only uses as one.
        unsafe { libc::dup3(placeholder.as_raw_fd(), *number, libc::O_CLOEXEC) };
    }
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    for line in maps
        .lines()
        .filter(|line| line.contains("/dev/infiniband/uverbs"))
    {
        let (range, _) = line.split_once(' ').unwrap();
        let (start, end) = range.split_once('-').unwrap();
        let [start, end] = [start, end].map(|address| usize::from_str_radix(address, 16).unwrap());
        // SAFETY: queues of a device that nobody uses any more.
        unsafe {
            let pages = libc::memfd_create(c"rnic".as_ptr(), libc::MFD_CLOEXEC);
            assert_eq!(libc::ftruncate(pages, (end - start) as i64), 0);
            let mapped = libc::mmap(
                start as *mut c_void,
                end - start,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_FIXED,
                pages,
                0,
            );
            assert_ne!(mapped, libc::MAP_FAILED);
            libc::close(pages);
        }
    }
}

/// Bytes that the library's own C library has given out.
fn allocated() -> usize {
    let provider = RdmaCoreProvider::default();
    let address = provider.library().unwrap().symbol(c"mallinfo2");
    assert!(!address.is_null());
    // SAFETY: that function.
    unsafe {
        std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> libc::mallinfo2>(address)().uordblks
    }
}

#[test]
#[ignore = "needs rxe0"]
fn rxe_an_abandoned_device_leaves_nothing_behind_and_the_channel_goes_on_with_the_next() {
    let mut channel = None;
    let mut number = None;
    let mut sizes = Vec::new();
    let others = descriptors();
    for round in 0..4 {
        let rig = Rig::new(channel.take());
        let mut end = rig.end();
        end.arm(false);
        rig.recv(&rig.rc[1], 0);
        rig.send(&rig.rc[0], 0, 0);
        rig.completed(&mut *end, 2);
        assert_eq!(rig.channel.next().unwrap(), EVENT);
        assert_eq!(
            *number.get_or_insert(rig.channel.fd().as_raw_fd()),
            rig.channel.fd().as_raw_fd()
        );
        rig.device.alloc_mw(rig.pd, MwType::Two).unwrap();
        let attr = SrqAttr {
            max_wr: 8,
            max_sge: 1,
            limit: 0,
        };
        rig.device.create_srq(rig.pd, &attr).unwrap();
        drop(end);

        let Rig {
            device,
            channel: mine,
            ..
        } = rig;
        let mut known = descriptors();
        known.retain(|fd| !others.contains(fd));
        assert_eq!(known.len(), 3, "commands, asynchronous events, the channel");
        let parked = device.park().unwrap();
        put_placeholders(&known);
        parked.kept.unwrap().abandon();
        drop(parked.reopen);
        for fd in known {
            // SAFETY: asks only.
            assert_eq!(
                unsafe { libc::fcntl(fd, libc::F_GETFD) },
                -1,
                "round {round}: {fd} is open"
            );
        }
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        assert!(!maps.contains("memfd:rnic"), "{maps}");
        sizes.push(allocated());
        rustix::fs::fcntl_setfl(mine.fd(), OFlags::NONBLOCK).unwrap();
        assert_eq!(mine.next().unwrap_err().errno(), libc::EAGAIN);
        rustix::fs::fcntl_setfl(mine.fd(), OFlags::empty()).unwrap();
        channel = Some(mine);
    }
    assert_eq!(sizes[2], sizes[3], "{sizes:?}");
}
