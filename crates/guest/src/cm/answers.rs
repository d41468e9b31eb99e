//! What the RNIC has answered, in the structures of `rdma_user_cm.h`.

use verbatim_verbs::{
    AddressVector, CmDatagrams, CmDetails, CmEvent, CmParameters, CmPath, CmRoute, QpAttr, QpAttrMask,
};

use super::address;
use super::plain::Plain;
use crate::abi::*;

/// `ibdev_index` of a device that the kernel does not know: librdmacm then finds it by its GUID.
const NO_INDEX: u32 = u32::MAX;

/// The only port.
const PORT: u8 = 1;

/// The default partition key, network byte order.
const PKEY: u16 = u16::MAX;

/// `IB_SA_EQ`: exactly that.
const EXACTLY: u8 = 2;

/// `IBV_RATE_10_GBPS`, and 2 to the power of that many times 4.096 µs: nobody uses either on RoCE.
const RATE: u8 = 3;
const LIFE_TIME: u8 = 18;

fn fill_private_data(bytes: &[u8], to: &mut [u8; RDMA_MAX_PRIVATE_DATA]) -> u8 {
    // The kernel's structure can say no more than 255.
    let length = bytes.len().min(u8::MAX.into());
    to[..length].copy_from_slice(&bytes[..length]);
    length as u8
}

fn connection(parameters: &CmParameters) -> rdma_ucm_conn_param {
    let mut c = rdma_ucm_conn_param::zeroed();
    c.qp_num = parameters.qp_num;
    c.qkey = parameters.qkey;
    c.private_data_len = fill_private_data(&parameters.private_data, &mut c.private_data);
    c.srq = parameters.srq.into();
    c.responder_resources = parameters.responder_resources;
    c.initiator_depth = parameters.initiator_depth;
    c.flow_control = parameters.flow_control;
    c.retry_count = parameters.retry_count;
    c.rnr_retry_count = parameters.rnr_retry_count;
    c
}

fn datagrams(datagrams: &CmDatagrams) -> rdma_ucm_ud_param {
    let mut c = rdma_ucm_ud_param::zeroed();
    c.qp_num = datagrams.qp_num;
    c.qkey = datagrams.qkey;
    c.ah_attr = address_vector(&datagrams.av);
    c.private_data_len = fill_private_data(&datagrams.private_data, &mut c.private_data);
    c
}

fn address_vector(av: &AddressVector) -> ib_uverbs_ah_attr {
    let mut c = ib_uverbs_ah_attr::zeroed();
    c.grh.dgid = av.dgid;
    c.grh.flow_label = av.flow_label;
    c.grh.sgid_index = av.sgid_index;
    c.grh.hop_limit = av.hop_limit;
    c.grh.traffic_class = av.traffic_class;
    c.sl = av.sl;
    c.is_global = u8::from(av.dgid != [0; 16]);
    c.port_num = av.port_num;
    c
}

/// An event.
pub fn event(event: &CmEvent) -> rdma_ucm_event_resp {
    let mut c = rdma_ucm_event_resp::zeroed();
    c.uid = event.uid;
    c.id = event.id;
    c.event = event.event;
    c.status = event.status as u32;
    c.param = match &event.details {
        CmDetails::None => rdma_ucm_ud_param::zeroed(),
        // The shorter member of the union.
        CmDetails::Connection(parameters) => rdma_ucm_ud_param::from_bytes(connection(parameters).bytes()),
        CmDetails::Datagrams(parameters) => datagrams(parameters),
    };
    c
}

/// For `ibv_modify_qp`.
pub fn qp_attr(mask: QpAttrMask, attr: &QpAttr) -> ib_uverbs_qp_attr {
    let mut c = ib_uverbs_qp_attr::zeroed();
    c.qp_attr_mask = mask.bits();
    c.qp_state = attr.state as u32;
    c.cur_qp_state = attr.cur_state as u32;
    c.path_mtu = attr.path_mtu.into();
    c.qkey = attr.qkey;
    c.rq_psn = attr.rq_psn;
    c.sq_psn = attr.sq_psn;
    c.dest_qp_num = attr.dest_qpn;
    c.qp_access_flags = attr.access.bits();
    c.ah_attr = address_vector(&attr.av);
    c.pkey_index = attr.pkey_index;
    c.max_rd_atomic = attr.max_rd_atomic;
    c.max_dest_rd_atomic = attr.max_dest_rd_atomic;
    c.min_rnr_timer = attr.min_rnr_timer;
    c.port_num = attr.port_num;
    c.timeout = attr.timeout;
    c.retry_cnt = attr.retry_cnt;
    c.rnr_retry = attr.rnr_retry;
    c
}

fn path_record(path: &CmPath) -> ib_user_path_rec {
    let mut c = ib_user_path_rec::zeroed();
    c.dgid = path.dgid;
    c.sgid = path.sgid;
    c.pkey = PKEY;
    if path.resolved {
        c.reversible = 1;
        c.mtu = path.mtu.into();
        c.hop_limit = path.hop_limit;
        c.traffic_class = path.traffic_class;
        c.numb_path = 1;
        c.mtu_selector = EXACTLY;
        c.rate_selector = EXACTLY;
        c.rate = RATE;
        c.packet_life_time_selector = EXACTLY;
        c.packet_life_time = LIFE_TIME;
    }
    c
}

/// The bytes of an array of words, to be written to.
fn words<T: Copy, const N: usize>(words: &mut [T; N], bytes: &[u8])
where
    [T; N]: Filled,
{
    words.fill_from(bytes);
}

/// An array of words, written as bytes.
trait Filled {
    fn fill_from(&mut self, bytes: &[u8]);
}

macro_rules! filled {
    ($($word:ty),+) => {$(
        impl<const N: usize> Filled for [$word; N] {
            fn fill_from(&mut self, bytes: &[u8]) {
                for (word, part) in self.iter_mut().zip(bytes.chunks_exact(size_of::<$word>())) {
                    *word = <$word>::from_ne_bytes(part.try_into().expect("exact chunks"));
                }
            }
        }
    )+};
}

filled!(u32, u64);

/// `RDMA_USER_CM_CMD_QUERY_ROUTE`.
pub fn query_route(route: &CmRoute) -> rdma_ucm_query_route_resp {
    let mut c = rdma_ucm_query_route_resp::zeroed();
    let mut bytes = [0; 32];
    address::to_c(route.source, &mut bytes);
    words(&mut c.src_addr, &bytes);
    bytes = [0; 32];
    address::to_c(route.destination, &mut bytes);
    words(&mut c.dst_addr, &bytes);
    c.ibdev_index = NO_INDEX;
    if let Some(path) = &route.path {
        c.node_guid = u64::from_ne_bytes(path.node_guid);
        c.port_num = PORT;
        c.num_paths = path.resolved.into();
        c.ib_route[0] = path_record(path);
    }
    c
}

/// `RDMA_USER_CM_QUERY_ADDR`.
pub fn query_address(route: &CmRoute) -> rdma_ucm_query_addr_resp {
    let mut bytes = [[0; 128]; 2];
    let source = address::to_c(route.source, &mut bytes[0]);
    let destination = address::to_c(route.destination, &mut bytes[1]);
    addresses(route, (source, &bytes[0]), (destination, &bytes[1]))
}

/// `RDMA_USER_CM_QUERY_GID`.
pub fn query_gid(route: &CmRoute) -> rdma_ucm_query_addr_resp {
    let (sgid, dgid) = route
        .path
        .map_or_else(Default::default, |path| (path.sgid, path.dgid));
    let mut bytes = [[0; 128]; 2];
    let source = address::gid_to_c(sgid, &mut bytes[0]);
    let destination = address::gid_to_c(dgid, &mut bytes[1]);
    addresses(route, (source, &bytes[0]), (destination, &bytes[1]))
}

fn addresses(
    route: &CmRoute,
    source: (usize, &[u8; 128]),
    destination: (usize, &[u8; 128]),
) -> rdma_ucm_query_addr_resp {
    let mut c = rdma_ucm_query_addr_resp::zeroed();
    c.src_size = source.0 as u16;
    c.dst_size = destination.0 as u16;
    words(&mut c.src_addr, source.1);
    words(&mut c.dst_addr, destination.1);
    c.ibdev_index = NO_INDEX;
    if let Some(path) = &route.path {
        c.node_guid = u64::from_ne_bytes(path.node_guid);
        c.port_num = PORT;
        c.pkey = PKEY;
    }
    c
}

/// `RDMA_USER_CM_QUERY_PATH`.
pub fn query_path(route: &CmRoute) -> rdma_ucm_query_path_resp {
    let mut c = rdma_ucm_query_path_resp::zeroed();
    let Some(path) = route.path.filter(|path| path.resolved) else {
        return c;
    };
    c.num_paths = 1;
    c.path_data.flags = IB_PATH_GMP | IB_PATH_PRIMARY | IB_PATH_BIDIRECTIONAL;
    // A path record as subnet managers have it (IBA Vol 1 §15.2.5.16).
    let mut record = [0; 64];
    record[8..24].copy_from_slice(&path.dgid);
    record[24..40].copy_from_slice(&path.sgid);
    record[47] = path.hop_limit;
    record[48] = path.traffic_class;
    record[49] = 0x80 | 1;
    record[50..52].copy_from_slice(&PKEY.to_be_bytes());
    record[54] = EXACTLY << 6 | path.mtu;
    record[55] = EXACTLY << 6 | RATE;
    record[56] = EXACTLY << 6 | LIFE_TIME;
    words(&mut c.path_data.path_rec, &record);
    c
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_lies_where_the_header_says() {
        let told = CmEvent {
            uid: 0x1122,
            id: 3,
            event: 9,
            status: -110,
            details: CmDetails::Connection(CmParameters {
                qp_num: 17,
                private_data: b"hello".to_vec(),
                retry_count: 7,
                ..CmParameters::default()
            }),
        };
        let c = event(&told);
        let bytes = c.bytes();
        assert_eq!(bytes[..8], 0x1122_u64.to_ne_bytes());
        assert_eq!(bytes[16..20], (-110_i32).to_ne_bytes());
        assert_eq!(bytes[20..24], 17_u32.to_ne_bytes());
        assert_eq!(&bytes[28..33], b"hello");
        assert_eq!(bytes[20 + 8 + 256], 5);
        assert_eq!(bytes[20 + 8 + 256 + 5], 7, "retry_count");
    }

    #[test]
    fn an_id_without_a_device_has_no_guid_and_one_with_a_way_has_one_path() {
        let mut route = CmRoute {
            source: Some("10.0.0.1:7".parse().unwrap()),
            destination: None,
            path: None,
        };
        let c = query_route(&route);
        assert_eq!((c.node_guid, c.num_paths, c.port_num), (0, 0, 0));
        assert_eq!(
            address::from_c(c.bytes().get(8 + 128..).unwrap()),
            Ok(route.source.unwrap())
        );
        route.path = Some(CmPath {
            node_guid: [1, 2, 3, 4, 5, 6, 7, 8],
            sgid: [1; 16],
            dgid: [2; 16],
            resolved: true,
            mtu: 5,
            hop_limit: 64,
            traffic_class: 0,
        });
        let c = query_route(&route);
        assert_eq!(c.node_guid.to_ne_bytes(), [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!((c.num_paths, c.ib_route[0].mtu, c.ib_route[0].pkey), (1, 5, PKEY));
        assert_eq!(query_path(&route).num_paths, 1);
        assert_eq!(query_gid(&route).src_size, 48);
        assert_eq!(query_address(&route).src_size, 16);
    }
}
