//! What a communication manager is told at its start.

/// `CMA_CM_RESPONSE_TIMEOUT` of Linux's rdma_cm: 4.3 s for an answer, not counting the way.
pub const RESPONSE_TIMEOUT: u8 = 20;
/// `CMA_MAX_CM_RETRIES` of Linux's rdma_cm.
pub const MAX_CM_RETRIES: u8 = 15;
/// `CMA_IBOE_PACKET_LIFETIME` of Linux's rdma_cm: 1.07 s for one way.
pub const PACKET_LIFETIME: u8 = 18;
/// The service timeout that Linux's rdma_cm puts into MRAs: 68.7 s.
pub const MRA_SERVICE_TIMEOUT: u8 = 24;

/// What does not change while a [`crate::Cm`] lives.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The GUID of the RNIC (the *CA GUID* of the messages). Peers know connections by it, so no two RNICs have the same.
    pub guid: u64,
    /// The first number given to an id; later ones count from it. Choose it at random: what comes from another RNIC keeps its
    /// number, and a peer that remembers an earlier life of this RNIC takes the same number for a duplicate.
    pub first_comm_id: u32,
    /// How long the RNIC takes to acknowledge (the *local CA ACK delay*), as an exponent.
    pub ack_delay: u8,
    /// The service timeout of the MRAs that answer duplicates of what the program has not answered yet.
    pub mra_service_timeout: u8,
    /// How much is kept.
    pub limits: Limits,
}

impl Config {
    /// With what Linux's rdma_cm and rxe have.
    pub fn new(guid: u64, first_comm_id: u32) -> Config {
        Config {
            guid,
            first_comm_id,
            ack_delay: 15,
            mra_service_timeout: MRA_SERVICE_TIMEOUT,
            limits: Limits::default(),
        }
    }
}

/// The most of each kind that is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Ids that have an owner, all together: beyond, commands fail and requests of peers are dropped (they come again).
    pub ids: usize,
    /// Ids of one owner, likewise.
    pub ids_per_owner: usize,
    /// Requests of peers that no program has taken yet ([`crate::Cm::taken`]), all listeners together: beyond, they are dropped.
    pub pending: usize,
    /// Ids without an owner, which end a connection or wait: beyond, the one that has waited longest is forgotten.
    pub lingering: usize,
    /// Ids that have gone to another place: beyond, the one that went first is forgotten.
    pub away: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            ids: 65_536,
            ids_per_owner: 16_384,
            pending: 4_096,
            lingering: 16_384,
            away: 65_536,
        }
    }
}
