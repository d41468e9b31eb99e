//! Our structures against the installed `<infiniband/verbs.h>`, by asking a C compiler.

use std::fmt::Write as _;
use std::mem::offset_of;

use super::*;

/// The name, the size (0: only the beginning is declared here) and the fields' offsets.
type Layout = (&'static str, usize, Vec<(&'static str, usize)>);

macro_rules! layout {
    ($size:expr, $name:ident: $($field:ident)+) => {
        (stringify!($name), $size, vec![$((stringify!($field), offset_of!(ffi::$name, $field)),)+])
    };
    (whole $name:ident: $($field:ident)+) => {
        layout!(size_of::<ffi::$name>(), $name: $($field)+)
    };
}

fn layouts() -> Vec<Layout> {
    let mut layouts = vec![
        layout!(0, ibv_device: node_type transport_type name),
        layout!(0, ibv_context: device ops cmd_fd async_fd num_comp_vectors),
        layout!(0, ibv_comp_channel: context fd),
        layout!(0, ibv_cq: context channel cq_context handle cqe),
        layout!(0, ibv_srq: context srq_context),
        layout!(0, ibv_qp: context qp_context pd send_cq recv_cq srq handle qp_num),
        layout!(whole ibv_mr: context pd addr length handle lkey rkey),
        layout!(whole ibv_mw: context pd rkey handle r#type),
        layout!(whole ibv_context_ops: alloc_mw bind_mw dealloc_mw poll_cq req_notify_cq post_srq_recv post_send
            post_recv),
        layout!(whole ibv_mw_bind_info: mr addr length mw_access_flags),
        layout!(whole ibv_mw_bind: wr_id send_flags bind_info),
        layout!(whole ibv_send_wr: wr_id next sg_list num_sge opcode send_flags imm_data wr bind_mw),
        layout!(whole ibv_recv_wr: wr_id next sg_list num_sge),
        layout!(whole ibv_qp_cap: max_send_wr max_recv_wr max_send_sge max_recv_sge max_inline_data),
        layout!(whole ibv_qp_init_attr: qp_context send_cq recv_cq srq cap qp_type sq_sig_all),
        layout!(whole ibv_global_route: dgid flow_label sgid_index hop_limit traffic_class),
        layout!(whole ibv_gid_entry: gid gid_index port_num gid_type ndev_ifindex),
        layout!(whole ibv_ah_attr: grh dlid sl src_path_bits static_rate is_global port_num),
        layout!(whole ibv_qp_attr: qp_state cur_qp_state path_mtu path_mig_state qkey rq_psn sq_psn dest_qp_num
            qp_access_flags cap ah_attr alt_ah_attr pkey_index alt_pkey_index en_sqd_async_notify sq_draining
            max_rd_atomic max_dest_rd_atomic min_rnr_timer port_num timeout retry_cnt rnr_retry alt_port_num
            alt_timeout rate_limit),
        layout!(whole ibv_srq_attr: max_wr max_sge srq_limit),
        layout!(whole ibv_srq_init_attr: srq_context attr),
        layout!(whole ibv_async_event: element event_type),
        layout!(whole ibv_device_attr: fw_ver node_guid max_mr_size vendor_id max_qp max_qp_wr device_cap_flags
            max_sge max_cq max_cqe max_mr max_pd max_qp_rd_atom max_qp_init_rd_atom max_mw max_mcast_grp
            max_mcast_qp_attach max_ah max_srq max_srq_wr max_srq_sge max_pkeys phys_port_cnt),
        layout!(whole ibv_port_attr: state max_mtu active_mtu gid_tbl_len max_msg_sz link_layer port_cap_flags2),
    ];
    // Members of unions.
    let target = offset_of!(ffi::ibv_send_wr, wr);
    let bind = offset_of!(ffi::ibv_send_wr, bind_mw);
    layouts.push((
        "ibv_send_wr",
        size_of::<ffi::ibv_send_wr>(),
        vec![
            ("wr.rdma.rkey", target + offset_of!(ffi::ibv_send_wr_rdma, rkey)),
            (
                "wr.atomic.swap",
                target + offset_of!(ffi::ibv_send_wr_atomic, swap),
            ),
            (
                "wr.atomic.rkey",
                target + offset_of!(ffi::ibv_send_wr_atomic, rkey),
            ),
            (
                "wr.ud.remote_qkey",
                target + offset_of!(ffi::ibv_send_wr_ud, remote_qkey),
            ),
            ("bind_mw.rkey", bind + offset_of!(ffi::ibv_send_wr_bind, rkey)),
            (
                "bind_mw.bind_info",
                bind + offset_of!(ffi::ibv_send_wr_bind, bind_info),
            ),
        ],
    ));
    layouts
}

#[test]
fn structures_are_those_of_the_header() {
    let mut c = String::from(
        "#include <stdio.h>\n#include <stddef.h>\n#include <infiniband/verbs.h>\nint main(void) {\n",
    );
    let mut ours = String::new();
    for (name, size, fields) in layouts() {
        if size > 0 {
            writeln!(c, "printf(\"{name} %zu\\n\", sizeof(struct {name}));").unwrap();
            writeln!(ours, "{name} {size}").unwrap();
        }
        for (field, offset) in fields {
            let field = field.strip_prefix("r#").unwrap_or(field);
            writeln!(
                c,
                "printf(\"{name}.{field} %zu\\n\", offsetof(struct {name}, {field}));"
            )
            .unwrap();
            writeln!(ours, "{name}.{field} {offset}").unwrap();
        }
    }
    c.push_str("return 0; }\n");
    let folder = tempfile::tempdir().unwrap();
    let [source, program] = ["layout.c", "layout"].map(|name| folder.path().join(name));
    std::fs::write(&source, c).unwrap();
    let compiled = Command::new("cc").arg(&source).arg("-o").arg(&program).status();
    assert!(compiled.unwrap().success());
    let theirs = Command::new(&program).output().unwrap();
    pretty_compare(&ours, &String::from_utf8(theirs.stdout).unwrap());
}

fn pretty_compare(ours: &str, theirs: &str) {
    for (ours, theirs) in ours.lines().zip(theirs.lines()) {
        assert_eq!(ours, theirs);
    }
    assert_eq!(ours.lines().count(), theirs.lines().count());
}
