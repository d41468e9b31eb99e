//! Structures of integers, as bytes.

use std::mem::MaybeUninit;

use crate::abi::*;

/// A structure that any bytes are a value of, and that has no padding but what its zeroes are.
///
/// # Safety
/// `#[repr(C)]`, of integers and arrays of them.
pub unsafe trait Plain: Copy {
    /// All zeroes.
    fn zeroed() -> Self {
        // SAFETY: the trait's contract.
        unsafe { MaybeUninit::zeroed().assume_init() }
    }

    /// From the beginning of `bytes`; what they lack is zero.
    fn from_bytes(bytes: &[u8]) -> Self {
        let mut value = Self::zeroed();
        let length = bytes.len().min(size_of::<Self>());
        // SAFETY: at most as many bytes as both have; any bytes are a value.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), (&raw mut value).cast::<u8>(), length) };
        value
    }

    /// Its bytes.
    fn bytes(&self) -> &[u8] {
        // SAFETY: values of these types are made of zeroes, so that every byte is initialised.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<Self>()) }
    }
}

macro_rules! plain {
    ($($name:ident),+ $(,)?) => {$(
        // SAFETY: of integers only, as the definitions in `abi::cm` show; tests compare their sizes with the header's.
        unsafe impl Plain for $name {}
    )+};
}

plain! {
    rdma_ucm_cmd_hdr, rdma_ucm_create_id, rdma_ucm_create_id_resp, rdma_ucm_destroy_id, rdma_ucm_destroy_id_resp,
    rdma_ucm_bind_ip, rdma_ucm_bind, rdma_ucm_resolve_ip, rdma_ucm_resolve_addr, rdma_ucm_resolve_route, rdma_ucm_query,
    rdma_ucm_query_route_resp, rdma_ucm_query_addr_resp, rdma_ucm_query_path_resp, rdma_ucm_conn_param, rdma_ucm_ud_param,
    rdma_ucm_connect, rdma_ucm_listen, rdma_ucm_accept, rdma_ucm_reject, rdma_ucm_disconnect, rdma_ucm_init_qp_attr,
    ib_uverbs_qp_attr, ib_user_path_rec, ib_uverbs_ah_attr, rdma_ucm_notify, rdma_ucm_join_ip_mcast, rdma_ucm_join_mcast,
    rdma_ucm_get_event, rdma_ucm_event_resp, rdma_ucm_set_option, rdma_ucm_migrate_id, rdma_ucm_migrate_resp,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_shorter_command_lacks_is_zero_and_what_a_longer_one_has_more_is_left() {
        let listen = rdma_ucm_listen::from_bytes(&[7, 0, 0, 0]);
        assert_eq!((listen.id, listen.backlog), (7, 0));
        let listen = rdma_ucm_listen::from_bytes(&[7, 0, 0, 0, 9, 0, 0, 0, 1, 2, 3]);
        assert_eq!((listen.id, listen.backlog), (7, 9));
        assert_eq!(listen.bytes(), [7, 0, 0, 0, 9, 0, 0, 0]);
    }
}
