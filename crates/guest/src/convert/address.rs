//! `struct ibv_ah_attr`.

use verbatim_verbs::AddressVector;

use crate::abi::*;
use crate::ffi::{Errno, unsupported};

/// The way to another port. There is none without a GRH: its GIDs are what RoCEv2 makes IP addresses of (annex A17).
pub fn address_from_c(ah: &ibv_ah_attr) -> Result<AddressVector, Errno> {
    if ah.is_global == 0 {
        unsupported("an address without a GRH (is_global 0) on RoCE");
        return Err(Errno::INVALID);
    }
    Ok(AddressVector {
        dgid: ah.grh.dgid.raw,
        sgid_index: ah.grh.sgid_index,
        hop_limit: ah.grh.hop_limit,
        traffic_class: ah.grh.traffic_class,
        flow_label: ah.grh.flow_label,
        sl: ah.sl,
        port_num: ah.port_num,
    })
}

/// As `ibv_query_qp` tells it.
pub fn address_to_c(av: &AddressVector) -> ibv_ah_attr {
    ibv_ah_attr {
        grh: ibv_global_route {
            dgid: ibv_gid { raw: av.dgid },
            flow_label: av.flow_label,
            sgid_index: av.sgid_index,
            hop_limit: av.hop_limit,
            traffic_class: av.traffic_class,
        },
        dlid: 0,
        sl: av.sl,
        src_path_bits: 0,
        static_rate: 0,
        is_global: u8::from(av.dgid != [0; 16]),
        port_num: av.port_num,
    }
}
