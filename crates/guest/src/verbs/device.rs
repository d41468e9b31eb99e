//! The list of devices.

use std::ffi::{c_char, c_int};
use std::ptr::NonNull;
use std::sync::Mutex;

use verbatim_verbs::DeviceInfo;

use crate::abi::*;
use crate::ffi::{Errno, MinusOne, Nothing, Pointer, fill, verb};
use crate::log::log;

/// A device as programs see it. It is never freed: a program may hold on to it for as long as it has it open, and there
/// are as many as the host has RNICs.
#[repr(C)]
#[derive(Debug)]
pub struct Device {
    c: ibv_device,
    tail: [u8; VERBS_DEVICE_TAIL_BYTES],
    info: DeviceInfo,
}

// SAFETY: written before it is shared; the pointers in it are NULL.
unsafe impl Sync for Device {}

impl std::fmt::Debug for ibv_device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ibv_device")
    }
}

impl Device {
    fn new(info: DeviceInfo, index: usize) -> Self {
        let mut c = ibv_device {
            _ops: [std::ptr::null(); 2],
            node_type: IBV_NODE_CA,
            transport_type: IBV_TRANSPORT_IB,
            name: [0; IBV_SYSFS_NAME_MAX],
            dev_name: [0; IBV_SYSFS_NAME_MAX],
            dev_path: [0; IBV_SYSFS_PATH_MAX],
            ibdev_path: [0; IBV_SYSFS_PATH_MAX],
        };
        fill(&mut c.name, &info.name);
        // Programs look for more about a device below these paths, and find none.
        fill(&mut c.dev_name, &format!("uverbs{index}"));
        fill(
            &mut c.dev_path,
            &format!("/sys/class/infiniband_verbs/uverbs{index}"),
        );
        fill(&mut c.ibdev_path, &format!("/sys/class/infiniband/{}", info.name));
        Self {
            c,
            tail: [0; VERBS_DEVICE_TAIL_BYTES],
            info,
        }
    }

    /// Its name, to open it by.
    pub fn name(&self) -> &str {
        &self.info.name
    }

    /// As a program has it.
    pub fn as_c(&'static self) -> *mut ibv_device {
        std::ptr::from_ref(self).cast_mut().cast()
    }

    /// # Safety
    /// NULL, or from [`ibv_get_device_list`].
    pub unsafe fn lend(pointer: *mut ibv_device) -> Result<&'static Self, Errno> {
        // SAFETY: the list holds nothing but pointers to the C part of leaked devices.
        unsafe { pointer.cast::<Self>().as_ref() }.ok_or(Errno::INVALID)
    }
}

/// The devices that there are now. Each is made once.
fn devices() -> Vec<&'static Device> {
    static KNOWN: Mutex<Vec<&'static Device>> = Mutex::new(Vec::new());
    let mut known = KNOWN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let present = verbatim_verbs::devices();
    if present.is_empty() {
        log!("there is no device: is the RNIC of this host running?");
    }
    let present = present.into_iter();
    present
        .map(|info| {
            let old = known.iter().copied().find(|device| device.info == info);
            old.unwrap_or_else(|| {
                let new: &'static Device = Box::leak(Box::new(Device::new(info, known.len())));
                known.push(new);
                new
            })
        })
        .collect()
}

/// `ibv_get_device_list`(3)
///
/// # Safety
/// `num_devices` is NULL or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_list(num_devices: *mut c_int) -> Pointer<*mut ibv_device> {
    verb("ibv_get_device_list", || {
        // librdmacm asks before it opens its own device.
        crate::cm::attach();
        let devices = devices();
        // From the C library, since only it knows at `ibv_free_device_list` how long it is.
        // SAFETY: plain allocation.
        let list = unsafe { libc::calloc(devices.len() + 1, size_of::<*mut ibv_device>()) };
        let list = NonNull::new(list.cast::<*mut ibv_device>()).ok_or(Errno::NO_MEMORY)?;
        for (index, device) in devices.iter().enumerate() {
            // SAFETY: one element more was allocated than there are devices; that one stays NULL.
            unsafe { list.add(index).write(device.as_c()) };
        }
        if !num_devices.is_null() {
            // SAFETY: the caller's contract.
            unsafe { num_devices.write(c_int::try_from(devices.len()).unwrap_or(c_int::MAX)) };
        }
        Ok(list)
    })
}

/// `ibv_free_device_list`(3)
///
/// # Safety
/// NULL, or from [`ibv_get_device_list`] and not freed yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) -> Nothing {
    // SAFETY: allocated by `calloc`.
    unsafe { libc::free(list.cast()) };
}

/// `ibv_get_device_name`(3)
///
/// # Safety
/// NULL, or from [`ibv_get_device_list`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    let name = verb::<Pointer<c_char>>("ibv_get_device_name", || {
        // SAFETY: the caller's contract.
        let device = unsafe { Device::lend(device) }?;
        Ok(NonNull::from(&device.c.name).cast())
    });
    name.raw()
}

/// `ibv_get_device_guid`(3): in network byte order, 0 for no device.
///
/// # Safety
/// NULL, or from [`ibv_get_device_list`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_guid(device: *mut ibv_device) -> u64 {
    // SAFETY: the caller's contract.
    unsafe { Device::lend(device) }.map_or(0, |device| u64::from_ne_bytes(device.info.guid))
}

/// `ibv_get_device_index`(3): -1, since the kernel has no index for a device that it does not know.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_get_device_index(_device: *mut ibv_device) -> MinusOne {
    verb("ibv_get_device_index", || Err(Errno::NOT_SUPPORTED))
}
