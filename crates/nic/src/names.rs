//! Counters by the names under which people know them: those of `rdma statistic` (the kernel's `rxe_hw_counters.c` and
//! the congestion counters of hardware), where there is one.

use verbatim_roce::{Counters, MigrationCounters};

use crate::stats::NicCounters;

macro_rules! fields {
    ($($field:ident => $name:literal,)*) => {
        /// A queue pair's counters, with the totals that people look for first.
        pub fn qp_counters(counters: &Counters) -> Vec<(String, u64)> {
            let totals = [
                ("sent_pkts", counters.sent_requests + counters.sent_responses + counters.sent_acks),
                ("rcvd_pkts", counters.rcvd_requests + counters.rcvd_responses),
                ("sent_bytes", counters.sent_request_bytes + counters.sent_response_bytes),
                ("rcvd_bytes", counters.rcvd_request_bytes + counters.rcvd_response_bytes),
            ];
            let named = [$(($name, counters.$field),)*];
            totals.into_iter().chain(named).map(|(name, value)| (name.to_owned(), value)).collect()
        }

        /// Adds what a queue pair has counted since `before` to a sum.
        pub fn add(total: &mut Counters, counters: &Counters, before: &Counters) {
            $(total.$field += counters.$field - before.$field;)*
            total.sent_requests += counters.sent_requests - before.sent_requests;
            total.sent_responses += counters.sent_responses - before.sent_responses;
            total.sent_acks += counters.sent_acks - before.sent_acks;
            total.rcvd_requests += counters.rcvd_requests - before.rcvd_requests;
            total.rcvd_responses += counters.rcvd_responses - before.rcvd_responses;
            total.sent_request_bytes += counters.sent_request_bytes - before.sent_request_bytes;
            total.sent_response_bytes += counters.sent_response_bytes - before.sent_response_bytes;
            total.rcvd_request_bytes += counters.rcvd_request_bytes - before.rcvd_request_bytes;
            total.rcvd_response_bytes += counters.rcvd_response_bytes - before.rcvd_response_bytes;
        }

        fn named(counters: &Counters) -> impl Iterator<Item = (&'static str, u64)> {
            [$(($name, counters.$field),)*].into_iter()
        }
    };
}

fields! {
    retransmitted_requests => "completer_retry_err",
    local_ack_timeout_err => "local_ack_timeout_err",
    early_retransmits => "early_retransmits",
    spurious_retransmits => "spurious_retransmits",
    packet_seq_err => "rcvd_seq_err",
    implied_nak_seq_err => "implied_nak_seq_err",
    rcvd_rnr_nak => "rcvd_rnr_err",
    rnr_nak_retry_err => "retry_rnr_exceeded_err",
    retry_exceeded_err => "retry_exceeded_err",
    stale_responses => "stale_responses",
    rp_cnp_handled => "rp_cnp_handled",
    req_remote_access_errors => "req_remote_access_errors",
    req_remote_invalid_request => "req_remote_invalid_request",
    req_cqe_error => "req_cqe_error",
    req_cqe_flush_error => "req_cqe_flush_error",
    duplicate_request => "duplicate_request",
    out_of_sequence => "out_of_seq_request",
    early_kept => "early_kept",
    early_dropped => "early_dropped",
    early_aged => "early_aged",
    early_conflicts => "early_conflicts",
    refused_datagrams => "refused_datagrams",
    sent_rnr_nak => "send_rnr_err",
    rcvd_atomics => "rx_atomic_requests",
    out_of_buffer => "out_of_buffer",
    incomplete_messages => "incomplete_messages",
    resp_remote_access_errors => "resp_remote_access_errors",
    resp_local_length_error => "resp_local_length_error",
    resp_bad_length => "resp_bad_length",
    resp_remote_invalid_request => "resp_remote_invalid_request",
    resp_cqe_error => "resp_cqe_error",
    resp_cqe_flush_error => "resp_cqe_flush_error",
    dropped_packets => "dropped_packets",
    bad_pkey => "bad_pkey",
    bad_qkey => "bad_qkey",
}

/// The device's counters: what its sockets saw, the sum over all queue pairs there are and were, and what there is.
pub fn device_counters(
    nic: &NicCounters,
    all: &Counters,
    migration: &MigrationCounters,
) -> Vec<(String, u64)> {
    let wire = [
        ("sent_pkts", nic.tx_packets),
        ("rcvd_pkts", nic.rx_packets),
        ("sent_bytes", nic.tx_bytes),
        ("rcvd_bytes", nic.rx_bytes),
        ("sent_batches", nic.tx_batches),
        ("rcvd_batches", nic.rx_batches),
        ("send_err", nic.tx_errors),
        ("send_blocked", nic.tx_blocked),
        ("rcvd_err", nic.rx_errors),
        ("rx_icrc_encapsulated", nic.rx_icrc_errors),
        ("rx_malformed", nic.rx_malformed),
        ("rx_wrong_version", nic.rx_wrong_version),
        ("rx_unknown_opcode", nic.rx_unknown_opcode),
        ("rx_unknown_qp", nic.rx_unknown_qp),
        ("rx_wrong_source", nic.rx_wrong_source),
        ("rx_parked", nic.rx_parked),
    ];
    let objects = [
        ("contexts", nic.contexts),
        ("pds", nic.pds),
        ("mrs", nic.mrs),
        ("mws", nic.mws),
        ("cqs", nic.cqs),
        ("srqs", nic.srqs),
        ("qps", nic.qps),
        ("ahs", nic.ahs),
        ("mcast_groups", nic.groups),
        ("cq_overruns", nic.cq_overruns),
        ("bad_indices", nic.bad_indices),
        ("truncated_files", nic.truncated_files),
        ("tenant_refusals", nic.tenant_refusals),
        ("control_requests", nic.requests),
        ("control_refused", nic.refused_requests),
    ];
    wire.into_iter()
        .chain(named(all))
        .chain(migration.iter())
        .chain([("resumes_forwarded", nic.resumes_forwarded)])
        .chain(objects)
        .map(|(name, value)| (name.to_owned(), value))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_given_once_and_sums_are_sums() {
        let mut all = Counters {
            sent_requests: 3,
            bad_qkey: 1,
            ..Counters::default()
        };
        let one = all;
        let before = Counters {
            sent_requests: 1,
            ..Counters::default()
        };
        add(&mut all, &one, &before);
        let value = |list: &[(String, u64)], name: &str| {
            let found: Vec<_> = list.iter().filter(|(known, _)| known == name).collect();
            assert_eq!(found.len(), 1, "{name}");
            found[0].1
        };
        let named = qp_counters(&all);
        assert_eq!((value(&named, "sent_pkts"), value(&named, "bad_qkey")), (5, 2));
        let nic = NicCounters {
            tx_packets: 9,
            ..NicCounters::default()
        };
        let device = device_counters(&nic, &all, &MigrationCounters::default());
        for (name, _) in &device {
            value(&device, name);
        }
        assert_eq!((value(&device, "sent_pkts"), value(&device, "bad_qkey")), (9, 2));
    }
}
