//! The kernel's structures of addresses, paths and queue pairs as those of programs, and back (`<infiniband/marshall.h>`).
//!
//! What only one side has stays as it is, and so does `qp_state`: libibverbs leaves it alone.

use crate::abi::*;
use crate::ffi::{Errno, Nothing, read, verb};

/// Copies members of the same names; the others of the target, and its padding, stay as they are.
macro_rules! copy {
    ($to:expr, $from:expr, $($($field:ident).+)*) => {
        // SAFETY: the caller's contract: the target is valid for writes.
        $(unsafe { (&raw mut (*$to).$($field).+).write($from.$($field).+ as _) };)*
    };
}

/// An object to write to was given.
fn given<T>(to: *mut T) -> Result<(), Errno> {
    match to.is_null() {
        true => Err(Errno::INVALID),
        false => Ok(()),
    }
}

/// # Safety
/// `to` is valid for writes.
unsafe fn copy_ah_attr(to: *mut ibv_ah_attr, from: &ib_uverbs_ah_attr) {
    // SAFETY: the caller's contract.
    unsafe { (&raw mut (*to).grh.dgid.raw).write(from.grh.dgid) };
    copy!(to, from, grh.flow_label grh.sgid_index grh.hop_limit grh.traffic_class);
    copy!(to, from, dlid sl src_path_bits static_rate is_global port_num);
}

/// `ibv_copy_ah_attr_from_kern`
///
/// # Safety
/// Each is NULL or valid: `to` for writes, `from` for reads.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_copy_ah_attr_from_kern(
    to: *mut ibv_ah_attr,
    from: *const ib_uverbs_ah_attr,
) -> Nothing {
    verb("ibv_copy_ah_attr_from_kern", || {
        given(to)?;
        // SAFETY: the caller's contract.
        unsafe { copy_ah_attr(to, &read(from)?) };
        Ok(())
    })
}

/// `ibv_copy_qp_attr_from_kern`
///
/// # Safety
/// Each is NULL or valid: `to` for writes, `from` for reads.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_copy_qp_attr_from_kern(
    to: *mut ibv_qp_attr,
    from: *const ib_uverbs_qp_attr,
) -> Nothing {
    verb("ibv_copy_qp_attr_from_kern", || {
        given(to)?;
        // SAFETY: the caller's contract.
        let from = unsafe { read(from) }?;
        copy!(to, from, cur_qp_state path_mtu path_mig_state qkey rq_psn sq_psn dest_qp_num qp_access_flags);
        let cap = ibv_qp_cap {
            max_send_wr: from.max_send_wr,
            max_recv_wr: from.max_recv_wr,
            max_send_sge: from.max_send_sge,
            max_recv_sge: from.max_recv_sge,
            max_inline_data: from.max_inline_data,
        };
        // SAFETY: the caller's contract.
        unsafe {
            (&raw mut (*to).cap).write(cap);
            copy_ah_attr(&raw mut (*to).ah_attr, &from.ah_attr);
            copy_ah_attr(&raw mut (*to).alt_ah_attr, &from.alt_ah_attr);
        }
        copy!(to, from, pkey_index alt_pkey_index en_sqd_async_notify sq_draining);
        copy!(to, from, max_rd_atomic max_dest_rd_atomic min_rnr_timer port_num);
        copy!(to, from, timeout retry_cnt rnr_retry alt_port_num alt_timeout);
        Ok(())
    })
}

/// Copies a path record between structures that have the same members in other places, but for the GIDs.
macro_rules! copy_path {
    ($to:expr, $from:expr) => {
        copy!($to, $from, dlid slid raw_traffic flow_label reversible mtu pkey hop_limit traffic_class numb_path sl);
        copy!($to, $from, mtu_selector rate_selector rate packet_life_time_selector packet_life_time preference);
    };
}

/// `ibv_copy_path_rec_from_kern`
///
/// # Safety
/// Each is NULL or valid: `to` for writes, `from` for reads.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_copy_path_rec_from_kern(
    to: *mut ibv_sa_path_rec,
    from: *const ib_user_path_rec,
) -> Nothing {
    verb("ibv_copy_path_rec_from_kern", || {
        given(to)?;
        // SAFETY: the caller's contract.
        let from = unsafe { read(from) }?;
        // SAFETY: the caller's contract.
        unsafe {
            (&raw mut (*to).dgid.raw).write(from.dgid);
            (&raw mut (*to).sgid.raw).write(from.sgid);
        }
        copy_path!(to, from);
        Ok(())
    })
}

/// `ibv_copy_path_rec_to_kern`
///
/// # Safety
/// Each is NULL or valid: `to` for writes, `from` for reads.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_copy_path_rec_to_kern(
    to: *mut ib_user_path_rec,
    from: *const ibv_sa_path_rec,
) -> Nothing {
    verb("ibv_copy_path_rec_to_kern", || {
        given(to)?;
        // SAFETY: the caller's contract.
        let from = unsafe { read(from) }?;
        // SAFETY: the caller's contract.
        unsafe {
            (&raw mut (*to).dgid).write(from.dgid.raw);
            (&raw mut (*to).sgid).write(from.sgid.raw);
        }
        copy_path!(to, from);
        Ok(())
    })
}
