//! The RNICs of the system: whatever its own libibverbs drives.
//!
//! ```text
//!  program ─► libverbatim.so ─► objects above (crate verbs) ─► this backend
//!                                                                 │ dlmopen: a namespace of its own
//!                                                                 ▼
//!                                            libibverbs.so.1 ─► its driver (libmlx5, librxe, …) ─► RNIC, kernel
//! ```
//!
//! - [`library`]: why a namespace of its own, and what follows. [`locate`]: which file.
//! - [`device`] is the control path, one verb of the library for each of ours (with [`memory`] and [`queues`]); [`live`]
//!   and [`objects`] see to it that nothing is used after it was destroyed.
//! - [`sends`], [`recvs`] and [`completions`] are the data path. Requests are translated into the header's structures and
//!   posted when they are published, and what the library refuses is told to whoever posts. The queues of verbs are
//!   below, so room and what is unfinished follow from completions ([`progress`]).
//! - Memory is adopted first and then registered where the program sees it. What the program waits on for completion events
//!   has the kernel's descriptor in it ([`channel`], [`wait`]).
//! - [`doorbell`]: librxe's, where restored threads ring it.
//! - Below a move: [`markers`] end a drain, [`park`] keeps all as it is beside a dump, [`abandon`] lets go of it elsewhere, and [`ahead`] goes on
//!   with what was made there before.
//!
//! Left out, each with a clear error: ports other than the first, link layers other than
//! Ethernet, on-chip memory, extensions that the objects above do not have.

#![allow(unsafe_code)]

mod abandon;
pub mod ahead;
mod channel;
mod completions;
mod convert;
mod device;
#[cfg(any(test, feature = "measure"))]
pub mod direct;
mod doorbell;
mod drivers;
mod events;
mod ffi;
mod functions;
mod library;
mod live;
mod locate;
mod markers;
mod memory;
mod objects;
mod park;
mod port;
mod progress;
mod queues;
mod recvs;
mod sends;
#[cfg(test)]
mod tests;
mod uverbs;
mod wait;
mod windows;

use std::path::Path;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

pub use self::completions::Completions as SystemCompletions;
use self::device::RdmaCoreDevice;
use self::library::{Library, LoadError};
use self::live::Opened;
pub use self::recvs::Recvs as SystemRecvs;
pub use self::sends::Sends as SystemSends;
use super::{Device, Provider};
use crate::backend::DeviceInfo;
use crate::error::VerbsError;

/// Where the kernel lists RDMA devices.
const CLASS: &str = "/sys/class/infiniband";

/// Whether the kernel has an RDMA device at all.
pub fn has_devices() -> bool {
    std::fs::read_dir(Path::new(CLASS)).is_ok_and(|mut devices| devices.next().is_some())
}

/// The system's devices.
#[derive(Debug, Default)]
pub struct RdmaCoreProvider {
    /// Loaded when it is first needed.
    library: OnceLock<Result<Arc<Library>, LoadError>>,
}

impl RdmaCoreProvider {
    /// Of a library that is loaded already.
    #[cfg(test)]
    fn of(library: Arc<Library>) -> Self {
        Self {
            library: OnceLock::from(Ok(library)),
        }
    }

    fn library(&self) -> Result<&Arc<Library>, LoadError> {
        /// One for the process: a namespace is never given back, and there are few.
        static SYSTEMS: OnceLock<Result<Arc<Library>, LoadError>> = OnceLock::new();
        let load = || {
            SYSTEMS
                .get_or_init(|| Library::load_systems().map(Arc::new))
                .clone()
        };
        self.library.get_or_init(load).as_ref().map_err(Clone::clone)
    }
}

impl Provider for RdmaCoreProvider {
    /// None where there is no library; who opens a device by name is told why.
    fn devices(&self) -> Vec<DeviceInfo> {
        let Ok(library) = self.library() else {
            return Vec::new();
        };
        DeviceList::get(library)
            .map_or_else(|_| Vec::new(), |list| list.iter().map(|(_, info)| info).collect())
    }

    fn open(&self, name: &str) -> Result<Arc<dyn Device>, VerbsError> {
        open(self.library()?, name)
    }
}

#[cfg(any(test, feature = "measure"))]
pub use self::direct::{Loaded, load};

fn open(library: &Arc<Library>, name: &str) -> Result<Arc<dyn Device>, VerbsError> {
    let opened: Arc<dyn Device> = open_device(library, name)?;
    Ok(opened)
}

fn open_device(library: &Arc<Library>, name: &str) -> Result<Arc<RdmaCoreDevice>, VerbsError> {
    let list = DeviceList::get(library)?;
    let (device, _) = list.iter().find(|(_, info)| info.name == name).ok_or_else(|| {
        VerbsError::Unsupported(format!("{} has no device {name}", library.path().display()))
    })?;
    // The drivers are loaded with the list.
    let doorbells = library.lead_doorbells();
    if ahead::is_needed() {
        ahead::attach(library).map_err(VerbsError::Unsupported)?;
    }
    // SAFETY: of a list that was not given back.
    let context = unsafe { (library.functions().ibv_open_device)(device.as_ptr()) };
    let context = library.made("open_device", context)?;
    // SAFETY: just opened.
    let opened = unsafe { Opened::new(library.clone(), context) };
    Ok(Arc::new(RdmaCoreDevice::new(name, opened, doorbells.err())?))
}

/// Opens a device by the libibverbs that this program itself has: with the guest library preloaded, by that.
pub fn open_as_program(name: &str) -> Result<Arc<dyn Device>, VerbsError> {
    open(&Arc::new(Library::of_program()?), name)
}

/// The address of a device's port, by which its queue pairs reach each other.
pub use self::port::way_to_itself;

/// The name of the driver of a device that has hardware behind it.
fn driver_of(device: &str) -> Option<String> {
    let link = std::fs::read_link(Path::new(CLASS).join(device).join("device/driver"));
    Some(link.ok()?.file_name()?.to_str()?.to_owned())
}

/// The library's list of devices, given back when dropped.
struct DeviceList<'a> {
    library: &'a Library,
    devices: NonNull<*mut ffi::ibv_device>,
    count: usize,
}

impl<'a> DeviceList<'a> {
    fn get(library: &'a Library) -> Result<Self, VerbsError> {
        /// A driver registers itself with the library when it is loaded, where nobody may look meanwhile.
        static LOOKS: Mutex<()> = Mutex::new(());
        let _alone = LOOKS.lock();
        let list = Self::look(library)?;
        let has = |name: &str| list.iter().any(|(_, info)| info.name == name);
        match library.drivers() {
            Some(drivers) if drivers.load_the_rest(has) => Self::look(library),
            _ => Ok(list),
        }
    }

    fn look(library: &'a Library) -> Result<Self, VerbsError> {
        let mut count = 0;
        // SAFETY: room for a number.
        let devices = unsafe { (library.functions().ibv_get_device_list)(&mut count) };
        Ok(Self {
            library,
            devices: library.made("get_device_list", devices)?,
            count: usize::try_from(count).unwrap_or(0),
        })
    }

    fn iter(&self) -> impl Iterator<Item = (NonNull<ffi::ibv_device>, DeviceInfo)> {
        (0..self.count).filter_map(|index| {
            // SAFETY: the library's list, with so many entries, which are good until it is given back.
            unsafe {
                let device = NonNull::new(*self.devices.as_ptr().add(index))?;
                let guid = (self.library.functions().ibv_get_device_guid)(device.as_ptr());
                let info = DeviceInfo {
                    name: convert::text(&device.as_ref().name),
                    guid: guid.to_ne_bytes(),
                };
                Some((device, info))
            }
        })
    }
}

impl Drop for DeviceList<'_> {
    fn drop(&mut self) {
        // SAFETY: got by `get`, given back once.
        unsafe { (self.library.functions().ibv_free_device_list)(self.devices.as_ptr()) };
    }
}
