//! Below the objects: a device that is parked, and one that is abandoned.

use std::os::fd::{AsFd, AsRawFd, RawFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::OFlags;
use verbatim_device::control::{QpState, SrqAttr};
use verbatim_device::layout::{self, SendWqe};
use verbatim_device::ring::Body;
use verbatim_device::transitions::steps;

use super::super::super::port::way_to_itself;
use super::*;
use crate::backend::{CompletionRing, EventChannel, PhysicalMemory, PhysicalMrInit, QpEnds};
use crate::work::{RECV_BIT, SendOpcode};

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
        let way = way_to_itself(device.attributes().1);
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

/// Whether a library whose file's name begins so is loaded.
fn is_loaded(name: &str) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.contains(&format!("/{name}"))
}

#[test]
#[ignore = "needs rxe0"]
fn rxe_drivers_of_rnics_that_are_not_there_are_loaded_only_when_one_has_none() {
    let provider = RdmaCoreProvider::default();
    let drivers = provider.library().unwrap().drivers().unwrap();
    let before = provider.devices();
    assert!(is_loaded("librxe-rdmav"));
    assert!(!is_loaded("libmlx5") && !is_loaded("libsiw-rdmav"));
    assert!(
        !drivers.load_the_rest(|name| name == "rxe0"),
        "all devices have one"
    );
    assert!(drivers.load_the_rest(|_| false));
    assert!(is_loaded("libmlx5") && is_loaded("libsiw-rdmav"));
    assert!(!drivers.load_the_rest(|_| false), "nothing is left");
    let names = |devices: Vec<crate::backend::DeviceInfo>| {
        devices.into_iter().map(|device| device.name).collect::<Vec<_>>()
    };
    assert_eq!(names(provider.devices()), names(before));
}

#[test]
#[ignore = "needs rxe0"]
fn rxe_an_abandoned_device_leaves_nothing_behind_and_the_channel_goes_on_with_the_next() {
    /// The C library keeps a few freed pieces of each size at hand, and counts them as given out.
    const ROUNDS: usize = 16;
    let mut channel = None;
    let mut number = None;
    let mut sizes = Vec::new();
    let others = descriptors();
    for round in 0..ROUNDS {
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
        // An agent's terminal, or one that the process makes.
        let dead = (round % 2 == 0).then(|| verbatim_channel::hung_up_terminal().unwrap());
        parked.kept.unwrap().abandon(dead.as_ref().map(AsFd::as_fd));
        drop(parked.reopen);
        for fd in known {
            // SAFETY: asks only.
            let flags = unsafe { libc::fcntl(fd, libc::F_GETFD) };
            assert_eq!(flags, -1, "round {round}: {fd} is open");
        }
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        assert!(!maps.contains("memfd:rnic"), "{maps}");
        sizes.push(allocated());
        rustix::fs::fcntl_setfl(mine.fd(), OFlags::NONBLOCK).unwrap();
        assert_eq!(mine.next().unwrap_err().errno(), libc::EAGAIN);
        rustix::fs::fcntl_setfl(mine.fd(), OFlags::empty()).unwrap();
        channel = Some(mine);
    }
    assert_eq!(sizes[ROUNDS - 2], sizes[ROUNDS - 1], "{sizes:?}");
}
