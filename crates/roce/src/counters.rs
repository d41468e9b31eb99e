//! What a queue pair counts: the data path counts instead of logging.

/// Counters of one queue pair, named as `rdma statistic` names them where it does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the kernel's; the groups are explained")]
pub struct Counters {
    // Requester: requests out, responses in.
    pub sent_requests: u64,
    /// Message bytes in them; a READ request has none.
    pub sent_request_bytes: u64,
    pub retransmitted_requests: u64,
    pub rcvd_responses: u64,
    /// Message bytes in them.
    pub rcvd_response_bytes: u64,
    /// NAK "PSN sequence error" received.
    pub packet_seq_err: u64,
    /// READ response or ACK that showed an earlier READ response to be lost.
    pub implied_nak_seq_err: u64,
    pub local_ack_timeout_err: u64,
    /// RNR NAKs received.
    pub rcvd_rnr_nak: u64,
    /// Requests given up because the partner had no RECV for too long.
    pub rnr_nak_retry_err: u64,
    /// Requests given up because the partner did not answer.
    pub retry_exceeded_err: u64,
    /// Responses that fit no outstanding request: dropped.
    pub stale_responses: u64,
    pub req_remote_access_errors: u64,
    pub req_remote_invalid_request: u64,
    /// Packets sent again to find out how things are, before the local ACK timeout.
    pub early_retransmits: u64,
    /// Early retransmissions that found nothing lost.
    pub spurious_retransmits: u64,
    /// Acknowledgements with end-to-end credits, which are not needed: a missing RECV is reported by RNR NAK.
    pub limited_credits: u64,
    /// Congestion notifications received.
    pub rp_cnp_handled: u64,
    /// Datagrams longer than the port's MTU: never sent.
    pub overlong_datagrams: u64,
    /// Datagrams to a management queue pair: never sent.
    pub refused_datagrams: u64,
    pub req_cqe_error: u64,
    pub req_cqe_flush_error: u64,

    // Responder: requests in, responses out.
    pub rcvd_requests: u64,
    /// Message bytes in them.
    pub rcvd_request_bytes: u64,
    pub sent_responses: u64,
    /// Message bytes in them.
    pub sent_response_bytes: u64,
    pub sent_acks: u64,
    pub duplicate_request: u64,
    pub out_of_sequence: u64,
    /// Packets kept that came before one that is missing, answers included. More than are released, if some are forged.
    pub early_kept: u64,
    /// Such packets that were not kept: too far ahead, out of the partner's order, or without room.
    pub early_dropped: u64,
    /// Packets that were kept for too long and dropped.
    pub early_aged: u64,
    /// PSNs for which two packets came that are not the same: one of the two is forged.
    pub early_conflicts: u64,
    pub sent_rnr_nak: u64,
    /// Messages of UC and UD for which there was no RECV: dropped.
    pub out_of_buffer: u64,
    /// Messages of UC that were dropped because a packet was missing or wrong.
    pub incomplete_messages: u64,
    pub rcvd_atomics: u64,
    pub resp_remote_access_errors: u64,
    pub resp_local_length_error: u64,
    /// Requests whose payload is not as long as their position in the message wants.
    pub resp_bad_length: u64,
    pub resp_remote_invalid_request: u64,
    pub resp_cqe_error: u64,
    pub resp_cqe_flush_error: u64,

    /// Packets that the queue pair did not let in: the sum of the next six.
    pub dropped_packets: u64,
    /// In RESET, INIT and ERR, or stopped; or an answer in RTR, or while the partner is stopped.
    pub dropped_by_state: u64,
    /// The opcode is one of another transport service.
    pub dropped_wrong_service: u64,
    pub dropped_wrong_qpn: u64,
    /// Another partition key, or two limited members.
    pub bad_pkey: u64,
    /// Datagrams with another queue key.
    pub bad_qkey: u64,
    /// Opcodes that are not defined.
    pub bad_opcode: u64,
}

macro_rules! migration_counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What a reliable connection counts of pause and resume. Apart from the others, because it hardly ever changes: the NIC
        /// learns of each change by [`crate::Host::count_migration`], and need not look.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct MigrationCounters {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl MigrationCounters {
            /// Names and values.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }

            /// Adds what another one has counted.
            pub fn add(&mut self, other: &MigrationCounters) {
                $(self.$name += other.$name;)*
            }

            /// What was counted since `before`.
            #[must_use]
            pub fn since(&self, before: &MigrationCounters) -> MigrationCounters {
                MigrationCounters { $($name: self.$name - before.$name,)* }
            }
        }
    };
}

migration_counters! {
    /// NAKs "stopped" sent.
    sent_stop_naks,
    /// NAKs "stopped" received.
    rcvd_stop_naks,
    /// RESUMEs sent, repeated ones included.
    sent_resumes,
    /// RESUMEs received, repeated ones included.
    rcvd_resumes,
    /// Acknowledgements of RESUME sent.
    sent_resume_acks,
    /// Acknowledgements of RESUME received.
    rcvd_resume_acks,
    /// How often the partner was found stopped.
    pauses,
    /// Connections that have waited too long for their partner.
    pause_limit_exceeded,
    /// Messages that are not the partner's RNIC's, or of another version: ignored.
    migration_forged,
    /// Messages that came before, or after a later one: ignored.
    migration_replayed,
    /// Messages of the partner's RNIC with a place or PSNs that cannot be: ignored.
    migration_refused,
}
