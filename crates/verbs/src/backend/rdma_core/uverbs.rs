//! The kernel's ioctl(2) for RNICs (`rdma/rdma_user_ioctl_cmds.h`, `rdma/ib_user_ioctl_cmds.h`), as far as it is looked into here.

use std::ffi::c_long;

pub const RDMA_VERBS_IOCTL: c_long = 0xc018_1b01;

pub const OBJECT_DEVICE: u16 = 0;
pub const METHOD_INVOKE_WRITE: u16 = 0;
pub const ATTR_CORE_IN: u16 = 0;
pub const ATTR_CORE_OUT: u16 = 1;
pub const ATTR_WRITE_CMD: u16 = 2;

pub const ATTR_F_MANDATORY: u16 = 1;
/// The kernel has written what the attribute leads to.
pub const ATTR_F_VALID_OUTPUT: u16 = 2;

pub const RDMA_DRIVER_RXE: u32 = 14;

/// `struct ib_uverbs_ioctl_hdr`
#[derive(Debug)]
#[repr(C)]
pub struct Header {
    pub bytes: u16,
    pub object: u16,
    pub method: u16,
    pub attributes: u16,
    pub reserved: u64,
    pub driver: u32,
    pub reserved_too: u32,
}

/// `struct ib_uverbs_attr`
#[derive(Debug, Clone)]
#[repr(C)]
pub struct Attribute {
    pub id: u16,
    /// Up to eight of what is given lie in `data`; else, and of what is answered, `data` leads there.
    pub bytes: u16,
    pub flags: u16,
    pub reserved: u16,
    pub data: u64,
}

impl Attribute {
    pub fn new(id: u16, bytes: u16, data: u64) -> Self {
        Self {
            id,
            bytes,
            flags: ATTR_F_MANDATORY,
            reserved: 0,
            data,
        }
    }
}

/// A command that a library has put together.
#[derive(Debug)]
pub struct Command<'a> {
    pub header: &'a Header,
    pub attributes: &'a mut [Attribute],
}

impl Command<'_> {
    /// # Safety
    /// `argument` is what libibverbs gives to ioctl(2) with [`RDMA_VERBS_IOCTL`], which nobody else uses meanwhile.
    pub unsafe fn at<'a>(argument: *mut std::ffi::c_void) -> Command<'a> {
        let header = argument.cast::<Header>();
        // SAFETY: the caller's contract: a header, with as many attributes behind it as it says.
        unsafe {
            let attributes = header.add(1).cast::<Attribute>();
            Command {
                header: &*header,
                attributes: std::slice::from_raw_parts_mut(attributes, (*header).attributes.into()),
            }
        }
    }

    /// The command of write(2) that it stands for.
    pub fn write_command(&self) -> Option<u64> {
        let is_invoke = self.header.object == OBJECT_DEVICE && self.header.method == METHOD_INVOKE_WRITE;
        let named = self
            .attributes
            .iter()
            .find(|attribute| attribute.id == ATTR_WRITE_CMD);
        named.filter(|_| is_invoke).map(|attribute| attribute.data)
    }
}
