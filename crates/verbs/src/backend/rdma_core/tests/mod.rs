//! The backend on a libibverbs that exists in memory only (`tests/fake_ibverbs`).

mod control;
mod cost;
mod data;
mod layout;
mod loopback;
mod moving;
mod namespace;
mod rxe;
mod through_the_objects;
mod trial;
mod windows;

use std::ffi::{CStr, c_int, c_uint, c_ulong, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use verbatim_device::control::{MwType, QpCap, QpType};
use verbatim_device::layout::Sge;

use super::ffi;
use super::library::Library;
use super::{Provider, RdmaCoreProvider};
use crate::backend::{CqPlace, Device, PhysicalQpInit, QpPlace};

const LOG: usize = 64;

/// `struct seen` of the fake.
#[repr(C)]
#[derive(Clone, Copy)]
struct Seen {
    wr: ffi::ibv_send_wr,
    sge: [Sge; 4],
    inline_data: [u8; 64],
    of: c_int,
    index: c_int,
}

/// `struct fake` of the fake.
#[repr(C)]
struct Knobs {
    refuse_at: c_int,
    refuse_errno: c_int,
    hold: c_int,
    status: c_uint,
    keep_errno: c_int,
    carry: c_int,
    invalidates: c_uint,
    invalidation: c_uint,
    live: c_int,
    posted: c_int,
    binds: c_int,
    acked_cq: c_int,
    acked_async: c_int,
    closed: c_int,
    mw_rkey_seen: c_uint,
    states: c_ulong,
    registered: u64,
    log: [Seen; LOG],
}

fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_ibverbs")
}

/// Compiles a shared library.
fn compile(source: &str, to: &Path, more: &[&Path]) {
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-Wl,-soname,libibverbs.so.1", "-o"])
        .arg(to);
    let status = cc.arg(sources().join(source)).args(more).status();
    assert!(status.expect("cc starts").success(), "{source} does not compile");
}

/// The one fake of this process: there are few namespaces, and none is ever given back. Whoever has it is alone with it.
struct Fake {
    library: Arc<Library>,
    _alone: MutexGuard<'static, ()>,
}

impl Fake {
    fn new() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        static LIBRARY: Mutex<Option<Arc<Library>>> = Mutex::new(None);
        let alone = ALONE.lock();
        let mut library = LIBRARY.lock();
        let library = library.get_or_insert_with(|| {
            let folder = tempfile::tempdir().unwrap();
            let file = folder.path().join("libfake.so");
            compile("fake_ibverbs.c", &file, &[]);
            Arc::new(Library::load(&file).unwrap())
        });
        let fake = Self {
            library: library.clone(),
            _alone: alone,
        };
        // SAFETY: the fake's function of that name.
        unsafe { fake.function::<extern "C" fn()>(c"fake_reset")() };
        fake
    }

    /// # Safety
    /// The fake has such a function of that type.
    unsafe fn function<F: Copy>(&self, name: &CStr) -> F {
        let address = self.library.symbol(name);
        assert!(!address.is_null());
        // SAFETY: the caller's promise; functions are pointers.
        unsafe { std::mem::transmute_copy(&address) }
    }

    fn knobs(&self) -> *mut Knobs {
        self.library.symbol(c"fake").cast()
    }

    fn set(&self, change: impl FnOnce(&mut Knobs)) {
        // SAFETY: the fake's variable; the lock makes this test its only user, and no call into it is under way.
        change(unsafe { &mut *self.knobs() });
    }

    fn get<T>(&self, read: impl FnOnce(&Knobs) -> T) -> T {
        // SAFETY: as above.
        read(unsafe { &*self.knobs() })
    }

    fn refuse(&self, at: c_int, errno: c_int) {
        self.set(|knobs| (knobs.refuse_at, knobs.refuse_errno) = (at, errno));
    }

    fn provider(&self) -> RdmaCoreProvider {
        RdmaCoreProvider::of(self.library.clone())
    }

    fn open(&self) -> Arc<dyn Device> {
        self.provider().open("fake0").unwrap()
    }

    /// The fake's queue pair of that number.
    fn qp(&self, number: u32) -> *mut ffi::ibv_qp {
        // SAFETY: the fake's function of that name.
        unsafe { self.function::<extern "C" fn(c_uint) -> *mut ffi::ibv_qp>(c"fake_qp")(number) }
    }

    /// Lets what is held complete.
    fn release(&self, qp: u32) {
        // SAFETY: the fake's function of that name, and its queue pair.
        unsafe { self.function::<extern "C" fn(*mut ffi::ibv_qp)>(c"fake_release")(self.qp(qp)) }
    }

    /// A message of so many bytes arrives. Whether there was a RECV.
    fn receive(&self, qp: u32, bytes: u32, newest: bool) -> bool {
        type Receive = extern "C" fn(*mut ffi::ibv_qp, c_uint, c_int) -> c_int;
        // SAFETY: the fake's function of that name, and its queue pair.
        unsafe { self.function::<Receive>(c"fake_receive")(self.qp(qp), bytes, newest.into()) == 0 }
    }

    /// The last `count` requests that the fake has taken, in order.
    fn last(&self, count: usize) -> Vec<Seen> {
        self.get(|knobs| {
            let posted = knobs.posted as usize;
            (posted - count..posted)
                .map(|index| knobs.log[index % LOG])
                .collect()
        })
    }
}

/// Pages of their own.
struct Pages {
    start: *mut c_void,
    length: usize,
}

impl Pages {
    fn new(count: usize) -> Self {
        let length = count * 4096;
        // SAFETY: new memory.
        let start = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                -1,
                0,
            )
        };
        assert_ne!(start, libc::MAP_FAILED);
        Self { start, length }
    }

    fn address(&self) -> usize {
        self.start as usize
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: mapped, and nobody else's.
        unsafe { std::slice::from_raw_parts_mut(self.start.cast(), self.length) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`.
        unsafe { libc::munmap(self.start, self.length) };
    }
}

const CAP: QpCap = QpCap {
    max_send_wr: 8,
    max_recv_wr: 8,
    max_send_sge: 4,
    max_recv_sge: 4,
    max_inline_data: 64,
};

/// What a completion queue's events say.
const EVENT: u32 = 4711;

/// A protection domain, a completion queue and a queue pair.
fn queue_pair(device: &dyn Device, qp_type: QpType, channel: Option<u32>) -> (u32, CqPlace, QpPlace) {
    let pd = device.alloc_pd().unwrap();
    let cq = device
        .create_cq(100, channel.map(|channel| (channel, EVENT)))
        .unwrap();
    let init = PhysicalQpInit {
        pd,
        send_cq: cq.cq,
        recv_cq: cq.cq,
        srq: None,
        qp_type,
        cap: CAP,
    };
    (pd, cq, device.create_qp(&init).unwrap())
}
