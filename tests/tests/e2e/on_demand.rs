//! Tests that run only on demand (`make e2e`), beside those that their modules name: each takes 5 to 40 s, and adds little to
//! one that is in every run, in most cases the same with the other side moved.

use crate::Test;

const NAMES: &[&str] = &[
    "programs::ib_write_bw_all_sizes",
    "migration::ib_write_bw_receiver",
    "migration::partner_outside_of_instances",
    "migration::send_bw_events_client",
    "migration::send_bw_events_server",
    "migration::send_bw_srq_client",
    "migration::send_bw_srq_server",
    "migration::send_bw_srq_events_server",
    "migration::atomic_bw_client",
    "migration::send_bw_ud_client",
    "migration::send_bw_ud_server",
    "migration::send_bw_uc_client",
    "migration::send_bw_uc_server",
    "migration::write_bw_uc_client",
    "migration::write_bw_uc_server",
    "migration::vcheck_send_server",
    "migration::vcheck_write_client",
    "migration::vcheck_write-imm_server",
    "migration::vcheck_read_client",
    "objects::messages_ud_server",
    "objects::messages_uc_client",
    "objects::messages_ud_srq_client",
    "objects::messages_uc_srq_server",
    "objects::windows_server",
    "objects::set_up_while_moved_client",
    "objects::changes_all_the_time_server",
    "drain::with_a_shared_receive_queue",
    "rollback::destination_refuses_pre_setup",
    "rollback::destination_refuses_to_commit",
    "rollback::partner_refuses",
    "rollback::partner_fails_when_suspended",
    "rdma_cm::moves_client",
    "rdma_cm::moves_iomapped",
    "pause::the_same_cut_without",
    "pause::ib_write_bw",
    "pause_resume::server",
    "pause_resume::by_turns_with_the_other_method",
    "pause_resume::ib_write_bw",
    "pause_resume::ib_atomic_bw",
    "pause_resume::source_pause_fail",
    "pause_resume::partner_suspend_fail",
    "gids::link_local_pause",
    "lost_rnic::destination_claim_wait_before_stop",
    "many::instances_move_at_once",
    "soak::moves_in_a_row",
];

/// Marks them.
pub fn mark(tests: Vec<Test>) -> Vec<Test> {
    if let Some(unknown) = NAMES
        .iter()
        .find(|name| tests.iter().all(|test| test.name != **name))
    {
        panic!("{unknown} is named as on demand, and there is no such test");
    }
    let mark = |test: Test| {
        let only_on_demand = test.only_on_demand || NAMES.contains(&test.name.as_str());
        test.only_on_demand(only_on_demand)
    };
    tests.into_iter().map(mark).collect()
}
