//! Points that a daemon passes, at which a test can end it. The shipped program has a hook that does nothing.

/// A point in the daemon's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Point {
    /// The source is about to offer the volume.
    Offering,
    /// The destination has its sidecar for the offer.
    Prepared,
    /// The source has sent a chunk.
    ChunkSent,
    /// The destination has written received data.
    Written,
    /// The destination has all data for the first time.
    Mirrored,
    /// The source holds the tenant.
    Held,
    /// The source has written that it is deciding.
    Deciding,
    /// The source has sent the question.
    Asked,
    /// The destination has the question.
    Question,
    /// The destination is about to commit.
    Committing,
    /// The destination has committed, and not answered.
    Committed,
    /// The source has the answer, and has not written it.
    Answered,
    /// The source has written that the volume has moved.
    Moved,
    /// The destination has read a chunk by RDMA, and not reported it.
    Fetched,
    /// The source is about to send by TLS a chunk that did not come by RDMA.
    Again,
    /// A volume has grown durably, and its clients do not know yet.
    Grown,
    /// A flush has failed, and the failure is not noted.
    FlushFailed,
    /// A volume is about to become a block device.
    Device,
    /// The kernel has asked how long that is, and has no answer.
    Attributes,
}

/// The points of a move, except those of RDMA.
pub const POINTS: [Point; 13] = [
    Point::Offering,
    Point::Prepared,
    Point::ChunkSent,
    Point::Written,
    Point::Mirrored,
    Point::Held,
    Point::Deciding,
    Point::Asked,
    Point::Question,
    Point::Committing,
    Point::Committed,
    Point::Answered,
    Point::Moved,
];

/// The points that are only passed when chunks go by RDMA.
pub const RDMA_POINTS: [Point; 2] = [Point::Fetched, Point::Again];

/// The fault that a test wants at a point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Nothing.
    None,
    /// At [`Point::Fetched`]: the chunk is damaged.
    Damage,
    /// At [`Point::Device`]: the kernel is one that does not send requests again.
    NoResend,
}

/// The function that is called at each point.
pub type Hook = fn(Point) -> Fault;

/// Does nothing.
pub fn none(_: Point) -> Fault {
    Fault::None
}
