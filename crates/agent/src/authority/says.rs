//! What messages say of their senders.

use tonic::Status;
use verbatim_channel::{Endpoint, MovedEndpoint};

use crate::agent::status;
use crate::caller;
use crate::proto::*;
use crate::session::decode;

/// What a message says of its sender.
pub trait Says {
    /// The session that it belongs to.
    fn session(&self) -> Option<u64> {
        None
    }

    /// The host that it calls the source of a move, and that must be the sender.
    fn source(&self) -> Option<&str> {
        None
    }

    /// The queue pairs that it speaks for, and that must be on the sender's host.
    #[allow(clippy::result_large_err, reason = "tonic's own type")]
    fn ends(&self) -> Result<Vec<Endpoint>, Status> {
        Ok(Vec::new())
    }
}

macro_rules! nothing {
    ($($message:ty),+) => {
        $(impl Says for $message {})+
    };
}

macro_rules! session {
    ($($message:ty),+) => {
        $(impl Says for $message {
            fn session(&self) -> Option<u64> {
                Some(self.session)
            }
        })+
    };
}

nothing!(HelloRequest, GidsRequest, ResolveRequest, RetargetRequest);
session!(
    SessionId,
    FilePart,
    OfferBulkRequest,
    PreSetupRequest,
    ConnectRequest,
    PartnerConnectRequest,
    DrainRequest,
    StopRequest,
    SettleRequest,
    LetGoRequest,
    LackRequest,
    ReadBehindRequest,
    LendBehindRequest
);

impl Says for OpenRequest {
    fn session(&self) -> Option<u64> {
        Some(self.session)
    }

    fn source(&self) -> Option<&str> {
        Some(&self.source)
    }
}

impl Says for PartnerPrepareRequest {
    fn session(&self) -> Option<u64> {
        Some(self.session)
    }

    fn source(&self) -> Option<&str> {
        Some(&self.source)
    }

    fn ends(&self) -> Result<Vec<Endpoint>, Status> {
        caller::moving_ends(&self.connections)
    }
}

impl Says for MeasureDrainRequest {
    fn session(&self) -> Option<u64> {
        self.session.as_ref().and_then(Says::session)
    }

    fn source(&self) -> Option<&str> {
        // Nobody's name is nobody's.
        Some(self.session.as_ref().map_or("", |session| &session.source))
    }

    fn ends(&self) -> Result<Vec<Endpoint>, Status> {
        self.session.as_ref().map_or_else(|| Ok(Vec::new()), Says::ends)
    }
}

impl Says for PublishRequest {
    fn ends(&self) -> Result<Vec<Endpoint>, Status> {
        caller::ends([self.now.as_ref()].into_iter())
    }
}

impl Says for MovedRequest {
    fn ends(&self) -> Result<Vec<Endpoint>, Status> {
        let moved: Vec<MovedEndpoint> = decode(&self.endpoints).map_err(|error| status(&error))?;
        Ok(moved.iter().map(|moved| moved.now).collect())
    }
}

impl Says for FindPartnersRequest {
    fn ends(&self) -> Result<Vec<Endpoint>, Status> {
        caller::ends(self.ends.iter().map(Some))
    }
}

impl Says for LinksRequest {
    fn ends(&self) -> Result<Vec<Endpoint>, Status> {
        caller::asking_ends(&self.links)
    }
}
