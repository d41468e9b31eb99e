//! Questions about the device, its port and its tables.

use std::ffi::{c_int, c_uint};
use std::mem::offset_of;

use crate::abi::*;
use crate::convert;
use crate::ffi::{Answer, Code, Count, Errno, MinusOne, verb, write};
use crate::verbs::ContextHandle;

/// The only P_Key, in network byte order: full member of the default partition.
const DEFAULT_PKEY: u16 = 0xffff;

/// The only port.
fn check_port(port: u32) -> Result<(), Errno> {
    if port == 1 { Ok(()) } else { Err(Errno::INVALID) }
}

/// Writes as much of a structure as the program has room for, and zeroes beyond what we know.
///
/// # Safety
/// `to` is NULL or valid for writes of `room` bytes.
unsafe fn write_sized<T: Copy>(to: *mut T, room: usize, value: &T) -> Result<(), Errno> {
    if to.is_null() {
        return Err(Errno::INVALID);
    }
    let known = room.min(size_of::<T>());
    // SAFETY: the caller's contract; `value` has at least `known` bytes.
    unsafe {
        to.cast::<u8>()
            .copy_from_nonoverlapping(std::ptr::from_ref(value).cast(), known);
        to.cast::<u8>().add(known).write_bytes(0, room - known);
    }
    Ok(())
}

/// `ibv_query_device`(3)
///
/// # Safety
/// `context` is NULL or open, `attr` NULL or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> Code {
    verb("ibv_query_device", || {
        // SAFETY: the caller's contract.
        unsafe {
            write(
                attr,
                convert::device_attr(ContextHandle::lend(context)?.core().device_attr()),
            )
        }
    })
}

/// `ibv_query_device_ex`(3), through the context's table.
///
/// # Safety
/// As for [`ibv_query_device`]; `attr` has `room` bytes.
pub unsafe extern "C" fn query_device_ex(
    context: *mut ibv_context,
    _input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    room: usize,
) -> c_int {
    let code: Code = verb("ibv_query_device_ex", || {
        if room < size_of::<ibv_device_attr>() {
            return Err(Errno::INVALID);
        }
        // SAFETY: the caller's contract.
        unsafe {
            let value = convert::device_attr_ex(ContextHandle::lend(context)?.core().device_attr());
            write_sized(attr, room, &value)
        }
    });
    code.0
}

/// `ibv_query_port`(3) as old programs have it, without what was added behind `flags`.
///
/// # Safety
/// `context` is NULL or open, `attr` NULL or valid for writes of the older structure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
) -> Code {
    // SAFETY: the caller's contract.
    Code(unsafe { query_port(context, port, attr, offset_of!(ibv_port_attr, port_cap_flags2)) })
}

/// `ibv_query_port`(3), through the context's table.
///
/// # Safety
/// `context` is NULL or open, `attr` NULL or valid for writes of `room` bytes.
pub unsafe extern "C" fn query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
    room: usize,
) -> c_int {
    let code: Code = verb("ibv_query_port", || {
        check_port(port.into())?;
        // SAFETY: the caller's contract.
        unsafe {
            write_sized(
                attr,
                room,
                &convert::port_attr(ContextHandle::lend(context)?.core().port_attr()),
            )
        }
    });
    code.0
}

/// An entry of the GID table with all that is known of it; all are RoCEv2. Those behind the last address are empty:
/// `ENODATA`.
fn gid_entry(context: &ContextHandle, port: u32, index: u32) -> Result<ibv_gid_entry, Errno> {
    check_port(port)?;
    let attr = context.core().port_attr();
    match attr.gids.get(index as usize) {
        Some(entry) => Ok(ibv_gid_entry {
            gid: ibv_gid { raw: entry.gid },
            gid_index: index,
            port_num: port,
            gid_type: IBV_GID_TYPE_ROCE_V2,
            ndev_ifindex: entry.ifindex,
        }),
        None if (index as usize) < convert::gid_table_entries(attr) => Err(Errno::NO_DATA),
        None => Err(Errno::INVALID),
    }
}

/// What the older verbs make of an empty entry.
fn or_if_empty<T>(entry: Result<T, Errno>, empty: T) -> Result<T, Errno> {
    match entry {
        Err(Errno::NO_DATA) => Ok(empty),
        other => other,
    }
}

/// `ibv_query_gid`(3): zeros for an empty entry.
///
/// # Safety
/// `context` is NULL or open, `to` NULL or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_gid(
    context: *mut ibv_context,
    port: u8,
    index: c_int,
    to: *mut ibv_gid,
) -> MinusOne {
    verb("ibv_query_gid", || {
        let index = u32::try_from(index).map_err(|_| Errno::INVALID)?;
        // SAFETY: the caller's contract.
        let entry = gid_entry(unsafe { ContextHandle::lend(context) }?, port.into(), index);
        let gid = or_if_empty(entry.map(|entry| entry.gid), ibv_gid::default())?;
        // SAFETY: the caller's contract.
        unsafe { write(to, gid) }?;
        Ok(0)
    })
}

/// `ibv_query_gid_ex`(3)
///
/// # Safety
/// `context` is NULL or open, `to` NULL or valid for writes of `room` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _ibv_query_gid_ex(
    context: *mut ibv_context,
    port: u32,
    index: u32,
    to: *mut ibv_gid_entry,
    flags: u32,
    room: usize,
) -> Code {
    verb("ibv_query_gid_ex", || {
        if flags != 0 {
            return Err(Errno::NOT_SUPPORTED);
        }
        // SAFETY: the caller's contract.
        unsafe { write_sized(to, room, &gid_entry(ContextHandle::lend(context)?, port, index)?) }
    })
}

/// `ibv_query_gid_table`(3): all entries that are not empty, or `EINVAL` if there is no room for them.
///
/// # Safety
/// `context` is NULL or open, `to` NULL or valid for writes of `max_entries` entries of `entry_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _ibv_query_gid_table(
    context: *mut ibv_context,
    to: *mut ibv_gid_entry,
    max_entries: usize,
    flags: u32,
    entry_bytes: usize,
) -> Count {
    verb("ibv_query_gid_table", || {
        if flags != 0 {
            return Err(Errno::NOT_SUPPORTED);
        }
        // SAFETY: the caller's contract.
        let context = unsafe { ContextHandle::lend(context) }?;
        let entries = context.core().port_attr().gids.len();
        if entries > max_entries {
            return Err(Errno::INVALID);
        }
        for index in 0..entries {
            let at = to.cast::<u8>().wrapping_add(index * entry_bytes).cast();
            let entry = gid_entry(context, 1, index as u32)?;
            // SAFETY: the caller's contract; NULL has stayed NULL at index 0, where it is refused.
            unsafe { write_sized(at, entry_bytes, &entry) }?;
        }
        Ok(entries)
    })
}

/// `ibv_query_gid_type`, private to rdma-core and used by its `ibv_devinfo`: 0, or -1 with `errno`.
///
/// # Safety
/// `context` is NULL or open, `to` NULL or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_gid_type(
    context: *mut ibv_context,
    port: u8,
    index: c_uint,
    to: *mut c_uint,
) -> MinusOne {
    verb("ibv_query_gid_type", || {
        // SAFETY: the caller's contract.
        let entry = gid_entry(unsafe { ContextHandle::lend(context) }?, port.into(), index);
        let gid_type = or_if_empty(
            entry.map(|_| IBV_GID_TYPE_SYSFS_ROCE_V2),
            IBV_GID_TYPE_SYSFS_IB_ROCE_V1,
        )?;
        // SAFETY: the caller's contract.
        unsafe { write(to, gid_type) }?;
        Ok(0)
    })
}

/// `ibv_query_pkey`(3)
///
/// # Safety
/// `context` is NULL or open, `to` NULL or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_pkey(
    context: *mut ibv_context,
    port: u8,
    index: c_int,
    to: *mut u16,
) -> MinusOne {
    verb("ibv_query_pkey", || {
        check_port(port.into())?;
        if context.is_null() || index != 0 {
            return Err(Errno::INVALID);
        }
        // SAFETY: the caller's contract.
        unsafe { write(to, DEFAULT_PKEY) }?;
        Ok(0)
    })
}

/// `ibv_get_pkey_index`(3)
#[unsafe(no_mangle)]
pub extern "C" fn ibv_get_pkey_index(_context: *mut ibv_context, port: u8, pkey: u16) -> MinusOne {
    if port == 1 && pkey == DEFAULT_PKEY {
        MinusOne(0)
    } else {
        MinusOne::failure(Errno::INVALID)
    }
}
