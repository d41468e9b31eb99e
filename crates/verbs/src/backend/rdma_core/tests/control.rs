use rustix::event::{PollFd, PollFlags, Timespec};
use verbatim_device::control::{
    Access, AddressVector, AsyncEvent, AsyncEventType, QpAttr, QpAttrMask, QpState, SrqAttr,
};
use verbatim_device::ring::Armed;

use super::*;
use crate::backend::{PhysicalMemory, PhysicalMrChange, PhysicalMrInit};

fn memory(length: u64) -> PhysicalMemory<'static> {
    PhysicalMemory {
        address: 0x10000,
        length,
        iova: 0,
        segments: &[],
        file: None,
    }
}

fn reg_mr(device: &dyn Device, pd: u32, access: Access) -> Result<(u32, u32), crate::VerbsError> {
    device.reg_mr(&PhysicalMrInit {
        pd,
        access,
        memory: memory(4096),
    })
}

#[test]
fn a_device_tells_what_it_is() {
    let fake = Fake::new();
    let listed: Vec<_> = fake.provider().devices();
    assert_eq!(
        listed.iter().map(|device| &*device.name).collect::<Vec<_>>(),
        ["fake0", "fake1"]
    );
    assert_eq!(listed[1].guid, [2, 2, 3, 4, 5, 6, 7, 8]);
    let device = fake.open();
    let (attr, port) = device.attributes();
    assert_eq!(
        (&*attr.name, &*attr.fw_ver, attr.max_qp_wr),
        ("fake0", "1.2.3", 127)
    );
    assert_eq!(attr.max_sge, 32, "no more than there is room for above");
    assert_eq!(attr.max_qp_rd_atom, 255);
    assert_eq!(
        (port.active_mtu, port.max_mtu, port.max_msg_bytes),
        (3, 5, 1 << 30)
    );
    assert_eq!(port.gids.len(), 2, "index 1 is the last");
    assert_eq!(port.netdev, "lo");
    assert!(device.adopts_memory());
    assert_eq!(device.blocker(), None);
    let by = device.made_again().unwrap();
    assert_eq!((by.name.as_str(), by.driver), ("fake0", None));
}

#[test]
fn only_ethernet_is_opened() {
    let fake = Fake::new();
    let error = fake.provider().open("fake1").unwrap_err();
    assert_eq!(error.errno(), libc::EOPNOTSUPP);
    assert!(error.to_string().contains("fake1"), "{error}");
    assert_eq!(fake.get(|knobs| knobs.closed), 1, "it is closed again");
}

#[test]
fn errors_of_the_library_come_out_with_their_errno() {
    let fake = Fake::new();
    let device = fake.open();
    let pd = device.alloc_pd().unwrap();
    assert_eq!(
        reg_mr(&*device, pd, Access::REMOTE_WRITE).unwrap_err().errno(),
        libc::EINVAL
    );
    assert_eq!(
        reg_mr(&*device, pd + 1, Access::empty()).unwrap_err().errno(),
        libc::EINVAL
    );
    let (_, cq, qp) = queue_pair(&*device, QpType::Rc, None);
    assert_eq!(device.destroy_cq(cq.cq).unwrap_err().errno(), libc::EBUSY);
    let rts = QpAttr {
        state: QpState::Rts,
        ..QpAttr::default()
    };
    assert_eq!(
        device
            .modify_qp(qp.qpn, QpAttrMask::STATE, &rts)
            .unwrap_err()
            .errno(),
        libc::EINVAL
    );
    device
        .modify_qp(qp.qpn, QpAttrMask::STATE | QpAttrMask::SQ_PSN, &rts)
        .unwrap();
    assert_eq!(device.query_qp(qp.qpn).unwrap().state, QpState::Rts);
    device.destroy_qp(qp.qpn).unwrap();
    device.destroy_cq(cq.cq).unwrap();
    assert_eq!(
        device.destroy_cq(cq.cq).unwrap_err().errno(),
        libc::EINVAL,
        "it is gone"
    );
}

#[test]
fn everything_goes_with_the_device_and_its_parts_before_it() {
    let fake = Fake::new();
    let device = fake.open();
    let channel = device.create_comp_channel().unwrap();
    let (pd, cq, qp) = queue_pair(&*device, QpType::Ud, Some(channel.number()));
    reg_mr(&*device, pd, Access::ZERO_BASED).unwrap();
    device.alloc_mw(pd, MwType::Two).unwrap();
    device.create_ah(pd, &AddressVector::default()).unwrap();
    let attr = SrqAttr {
        max_wr: 4,
        max_sge: 1,
        limit: 0,
    };
    let srq = device.create_srq(pd, &attr).unwrap();
    device.modify_srq(srq.srq, 3).unwrap();
    assert_eq!(device.query_srq(srq.srq).unwrap().limit, 3);
    device.attach_mcast(qp.qpn, [0xff; 16]).unwrap();
    assert_eq!(
        device.attach_mcast(qp.qpn, [1; 16]).unwrap_err().errno(),
        libc::EINVAL
    );
    device.detach_mcast(qp.qpn, [0xff; 16]).unwrap();
    let ends = (device.qp_ends(&qp).unwrap(), device.cq_end(&cq).unwrap());
    drop((device, channel));
    assert_eq!(fake.get(|knobs| knobs.closed), 0, "ends keep what they need");
    drop(ends);
    assert_eq!(fake.get(|knobs| (knobs.closed, knobs.live)), (1, 0));
}

#[test]
fn a_region_changes_under_its_keys() {
    let fake = Fake::new();
    let device = fake.open();
    let [first, second] = [device.alloc_pd().unwrap(), device.alloc_pd().unwrap()];
    let (lkey, _) = reg_mr(&*device, first, Access::empty()).unwrap();
    let change = |memory| PhysicalMrChange {
        pd: Some(second),
        access: None,
        memory,
    };
    device.rereg_mr(lkey, &change(Some(memory(8192)))).unwrap();
    let refused = device.rereg_mr(lkey, &change(Some(memory(0)))).unwrap_err();
    assert_eq!(
        refused.errno(),
        libc::EINVAL,
        "its own error numbers are not errnos"
    );
}

#[test]
fn events_come_through_the_kernels_descriptors_and_are_acknowledged_below() {
    let fake = Fake::new();
    let device = fake.open();
    let channel = device.create_comp_channel().unwrap();
    let (_, cq, qp) = queue_pair(&*device, QpType::Rc, Some(channel.number()));
    let mut end = device.cq_end(&cq).unwrap();
    let mut recv = device.qp_ends(&qp).unwrap().recv;
    assert!(!end.arm(true) && !end.arm(false));
    assert_eq!(end.disarm(), Some(Armed::Any), "the stronger wish");
    end.arm(true);
    recv.push(crate::work::RECV_BIT, &[]);
    recv.publish().unwrap();
    assert!(fake.receive(qp.qpn, 1, false));
    let mut ready = [PollFd::from_borrowed_fd(channel.fd(), PollFlags::IN)];
    assert_eq!(rustix::event::poll(&mut ready, Some(&Timespec::default())), Ok(1));
    assert_eq!(channel.next().unwrap(), super::EVENT);
    assert_eq!(fake.get(|knobs| knobs.acked_cq), 1);
    assert_eq!(end.disarm(), None, "its event has come");
    channel.inject(77);
    assert_eq!(channel.next().unwrap(), 77);
    rustix::fs::fcntl_setfl(channel.fd(), rustix::fs::OFlags::NONBLOCK).unwrap();
    assert_eq!(channel.next().unwrap_err().errno(), libc::EAGAIN);
}

#[test]
fn asynchronous_events_name_their_objects_and_the_last_is_the_end() {
    let fake = Fake::new();
    let device = fake.open();
    let (pd, cq, qp) = queue_pair(&*device, QpType::Rc, None);
    let srq = device.create_srq(pd, &SrqAttr::default()).unwrap();
    assert_eq!(device.next_async_event(), None, "and it does not wait");
    let of = fake.qp(qp.qpn);
    // SAFETY: the fake's queue pair is alive.
    let (context, of_cq) = unsafe { ((*of).context, (*of).send_cq) };
    let send = |event_type, element: *mut c_void| {
        type Send = extern "C" fn(*mut ffi::ibv_context, *const ffi::ibv_async_event) -> c_int;
        let event = ffi::ibv_async_event { element, event_type };
        // SAFETY: the fake's function of that name, and its context.
        let sent = unsafe { fake.function::<Send>(c"fake_async_event")(context, &event) };
        assert_eq!(sent, 0);
    };
    let port = std::ptr::without_provenance_mut(1);
    send(0, of_cq.cast());
    send(16, of.cast());
    send(11, port);
    send(9, port);
    send(8, std::ptr::null_mut());
    let next = || {
        device
            .next_async_event()
            .map(|AsyncEvent { event, object }| (event, object))
    };
    assert_eq!(next(), Some((AsyncEventType::CqErr, cq.cq)));
    assert_eq!(next(), Some((AsyncEventType::QpLastWqeReached, qp.qpn)));
    assert_eq!(
        next(),
        Some((AsyncEventType::PortActive, 1)),
        "a change of LID is left out"
    );
    assert!(!device.is_gone());
    assert_eq!(next(), None);
    assert!(device.is_gone());
    assert_eq!(fake.get(|knobs| knobs.acked_async), 5);
    let _ = srq;
}
