//! Verbs that we lack: each says so in its own convention, so that none of them reaches the system's libibverbs with an
//! object of ours, which it would take for one of its own.
//!
//! Their parameters are not looked at, so they are not declared: in the C calling conventions of Linux the caller
//! clears up after itself.

use crate::ffi::{Code, Count, Errno, MinusOne, Nothing, Pointer, verb};

macro_rules! refused {
    ($($answer:ty: $($name:ident)*;)*) => {
        $($(
            #[doc = concat!("`", stringify!($name), "`: refused.")]
            #[unsafe(no_mangle)]
            pub extern "C" fn $name() -> $answer {
                verb(stringify!($name), || Err(Errno::NOT_SUPPORTED))
            }
        )*)*

        /// The names of all of them.
        pub const REFUSED: &[&str] = &[$($(stringify!($name),)*)*];
    };
}

refused! {
    Pointer<std::ffi::c_void>:
        // objects of another process
        ibv_import_device
        ibv_import_dm
        ibv_import_mr
        ibv_import_pd
        // memory of other devices
        ibv_reg_dmabuf_mr
        // rdma-core 58 and later
        ibv_alloc_buf
        ibv_alloc_dmah
        ibv_create_comp_cntr
        ibv_reg_buf_mr
        ibv_reg_mr_ex;

    Code:
        ibv_set_ece
        _ibv_query_comp_cntr_caps
        ibv_dealloc_dmah
        ibv_destroy_comp_cntr
        ibv_inc_comp_cntr
        ibv_inc_err_comp_cntr
        ibv_qp_attach_comp_cntr
        ibv_query_port_speed
        ibv_read_comp_cntr
        ibv_read_err_comp_cntr
        ibv_set_comp_cntr
        ibv_set_err_comp_cntr;

    MinusOne:
        ibv_dm_export_dmabuf_fd
        ibv_export_buf_dmabuf_fd;

    Count:
        // 0, or a negative errno: the RNIC leaves Ethernet addresses to its host
        ibv_resolve_eth_l2_from_gid;

    Nothing:
        ibv_free_buf
        ibv_unimport_dm
        ibv_unimport_mr
        ibv_unimport_pd;
}
