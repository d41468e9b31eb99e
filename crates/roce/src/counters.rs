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
    pub sent_rnr_nak: u64,
    pub resp_remote_access_errors: u64,
    pub resp_local_length_error: u64,
    pub resp_remote_invalid_request: u64,
    pub resp_cqe_error: u64,
    pub resp_cqe_flush_error: u64,

    /// Packets that the queue pair's state, partition or number did not let in.
    pub dropped_packets: u64,
}
