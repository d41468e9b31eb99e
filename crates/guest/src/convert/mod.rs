//! Between the header's structures and the core's.

mod access;
mod address;
mod device;
mod qp;

pub use access::{qp_access, region_access, window_access};
pub use address::{address_from_c, address_to_c};
pub use device::{device_attr, device_attr_ex, gid_table_entries, port_attr};
pub use qp::{cap_from_c, cap_to_c, modification, qp_attr, qp_type};
