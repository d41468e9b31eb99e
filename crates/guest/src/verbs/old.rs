//! What libibverbs has for programs of before 2007 (`IBVERBS_1.0`), whose structures are others: refused.
//!
//! None of them has an object that could be given to these, since the list of devices is one of them. They are here so that such a
//! program does not get functions that would read its structures as those of today.
//!
//! A symbol with a second version has to be named in assembly (`.symver`), which libverbatim.so alone is made with.

use crate::ffi::{Code, Errno, MinusOne, Nothing, Pointer, verb};

/// The refusal in each verb's convention.
const WHAT: &str = "a program of before 2007 (IBVERBS_1.0)";

#[unsafe(no_mangle)]
extern "C" fn verbatim_old_pointer() -> Pointer<std::ffi::c_void> {
    verb(WHAT, || Err(Errno::NOT_SUPPORTED))
}

#[unsafe(no_mangle)]
extern "C" fn verbatim_old_code() -> Code {
    verb(WHAT, || Err(Errno::NOT_SUPPORTED))
}

#[unsafe(no_mangle)]
extern "C" fn verbatim_old_minus_one() -> MinusOne {
    verb(WHAT, || Err(Errno::NOT_SUPPORTED))
}

#[unsafe(no_mangle)]
extern "C" fn verbatim_old_guid() -> u64 {
    0
}

#[unsafe(no_mangle)]
extern "C" fn verbatim_old_nothing() -> Nothing {}

macro_rules! old {
    ($($convention:literal: $($name:literal)*;)*) => {
        $($(std::arch::global_asm!(
            concat!(".globl verbatim_old_", $name),
            concat!(".type verbatim_old_", $name, ", @function"),
            concat!("verbatim_old_", $name, ":"),
            concat!(jump!(), " verbatim_old_", $convention),
            concat!(".size verbatim_old_", $name, ", . - verbatim_old_", $name),
            concat!(".symver verbatim_old_", $name, ", ", $name, "@IBVERBS_1.0"),
        );)*)*
    };
}

#[cfg(target_arch = "x86_64")]
macro_rules! jump {
    () => {
        "jmp"
    };
}

#[cfg(target_arch = "aarch64")]
macro_rules! jump {
    () => {
        "b"
    };
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
old! {
    "pointer":
        "ibv_alloc_pd" "ibv_create_ah" "ibv_create_cq" "ibv_create_qp" "ibv_create_srq" "ibv_get_device_list"
        "ibv_get_device_name" "ibv_open_device" "ibv_reg_mr";
    "code":
        "ibv_attach_mcast" "ibv_close_device" "ibv_dealloc_pd" "ibv_dereg_mr" "ibv_destroy_ah" "ibv_destroy_cq"
        "ibv_destroy_qp" "ibv_destroy_srq" "ibv_detach_mcast" "ibv_modify_qp" "ibv_modify_srq" "ibv_query_device"
        "ibv_query_port" "ibv_query_qp" "ibv_query_srq" "ibv_resize_cq";
    "minus_one":
        "ibv_get_async_event" "ibv_get_cq_event" "ibv_query_gid" "ibv_query_pkey";
    "guid":
        "ibv_get_device_guid";
    "nothing":
        "ibv_ack_async_event" "ibv_ack_cq_events" "ibv_free_device_list";
}
