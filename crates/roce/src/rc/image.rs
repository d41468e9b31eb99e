//! The image of a reliable connection: the whole state of its protocol at one end, to go on with elsewhere.
//!
//! ```text
//!  0..4     "VBRC"
//!  4..6     version, little-endian
//!  6..8     zero
//!  8..12    length of the body in bytes, little-endian
//! 12..      body: `RcImage`, in postcard's encoding
//!  ..+32    BLAKE3 of all before
//! ```
//!
//! It holds the secret of the connection: it is to be kept like one. The checksum finds damage; it proves nothing about who
//! has made the image.

use serde::{Deserialize, Serialize};

use super::RcQp;
use super::migration::{Migration, MigrationImage};
use super::requester::{Requester, RequesterImage};
use super::responder::{Responder, ResponderImage};
use crate::shell::{Phase, Shell};
use crate::{Location, QpAttributes, QpConfig, QpState, QpType, Qpn};

const MAGIC: [u8; 4] = *b"VBRC";

/// The version of images that are written here. Version 1 is the first.
pub const IMAGE_VERSION: u16 = 1;

/// No image is longer: 65,536 requests with the most pieces, and then some.
const MOST_BYTES: usize = 64 << 20;

const HEAD_BYTES: usize = 12;
const CHECKSUM_BYTES: usize = blake3::OUT_LEN;

/// Why bytes are not an image that a queue pair can go on from.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// Too short, too long, or something else altogether.
    #[error("{0} bytes are no image of a queue pair")]
    NoImage(usize),
    /// Made by a later release, or by one that is too old.
    #[error("the image has version {0}, and version {IMAGE_VERSION} is known")]
    Version(u16),
    /// Some bytes are not those that were written.
    #[error("the image is damaged: its checksum is wrong")]
    Damaged,
    /// The checksum is right, and yet the content cannot be.
    #[error("the image cannot be restored: {0}")]
    Invalid(&'static str),
    /// A shared receive queue here and none there, or the other way round.
    #[error("the image is of a queue pair {with} shared receive queue", with = if *shared { "with a" } else { "without a" })]
    ReceiveQueue {
        /// Is it of one with a shared receive queue?
        shared: bool,
    },
}

impl ImageError {
    pub(super) fn unless(condition: bool, what: &'static str) -> Result<(), ImageError> {
        if condition {
            Ok(())
        } else {
            Err(ImageError::Invalid(what))
        }
    }
}

/// The state of one end of a reliable connection.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RcImage {
    qpn: Qpn,
    state: QpState,
    attributes: QpAttributes,
    shared_receive_queue: bool,
    pkey: u16,
    notify_drained: bool,
    established: bool,
    peer: Option<Location>,
    requester: RequesterImage,
    responder: ResponderImage,
    migration: MigrationImage,
}

impl RcImage {
    /// Its number where it was saved.
    pub fn qpn(&self) -> Qpn {
        self.qpn
    }

    /// The state that the program sees.
    pub fn state(&self) -> QpState {
        self.state
    }

    /// The attributes that the program has set.
    pub fn attributes(&self) -> &QpAttributes {
        &self.attributes
    }

    /// The index of the own GID is another one at the RNIC that takes it up.
    pub fn set_sgid_index(&mut self, sgid_index: u8) {
        if let Some(av) = &mut self.attributes.av {
            av.sgid_index = sgid_index;
        }
    }

    /// Where the partner is, if that is not what the attributes say.
    pub fn peer(&self) -> Option<Location> {
        self.peer
    }

    /// The `wr_id`s of the send requests that were taken off the ring and are not complete, oldest first: they are in the
    /// image, and not to be taken off the new ring.
    pub fn requests(&self) -> impl Iterator<Item = u64> {
        self.requester.wr_ids()
    }

    /// The `wr_id` of the RECV that a message of which only a part has come is put into: it is in the image, too.
    pub fn receive(&self) -> Option<u64> {
        self.responder.receive()
    }

    /// The bytes that [`RcImage::decode`] reads.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(IMAGE_VERSION.to_le_bytes());
        bytes.extend([0; HEAD_BYTES - 6]);
        let mut bytes = postcard::to_extend(self, bytes).expect("a vector takes everything");
        let body_bytes = (bytes.len() - HEAD_BYTES) as u32;
        bytes[8..HEAD_BYTES].copy_from_slice(&body_bytes.to_le_bytes());
        let checksum = blake3::hash(&bytes);
        bytes.extend(checksum.as_bytes());
        bytes
    }

    /// Reads an image. All of what the transport relies on is checked by [`RcQp::restore`].
    pub fn decode(bytes: &[u8]) -> Result<RcImage, ImageError> {
        let none = ImageError::NoImage(bytes.len());
        if bytes.len() < HEAD_BYTES + CHECKSUM_BYTES || bytes.len() > MOST_BYTES || !bytes.starts_with(&MAGIC)
        {
            return Err(none);
        }
        let (content, checksum) = bytes.split_at(bytes.len() - CHECKSUM_BYTES);
        let version = u16::from_le_bytes([bytes[4], bytes[5]]);
        if version != IMAGE_VERSION {
            return Err(ImageError::Version(version));
        }
        if blake3::hash(content).as_bytes() != checksum {
            return Err(ImageError::Damaged);
        }
        let (head, body) = content.split_at(HEAD_BYTES);
        if head[6..8] != [0; 2] || head[8..] != (body.len() as u32).to_le_bytes() {
            return Err(none);
        }
        match postcard::take_from_bytes(body) {
            Ok((image, [])) => Ok(image),
            Ok(_) => Err(ImageError::Invalid("there is more than the fields")),
            Err(_) => Err(ImageError::Invalid("a field cannot be read")),
        }
    }
}

impl RcQp {
    /// Saves the whole state, to go on elsewhere with [`RcQp::restore`]. Only of a queue pair that stands still: stopped by
    /// [`RcQp::halt`], or in a state in which nothing is sent or received.
    pub fn save(&self) -> Option<RcImage> {
        let still = match self.shell.phase {
            Phase::Stopped | Phase::Reset | Phase::Init | Phase::Sqe | Phase::Err => true,
            Phase::Rtr | Phase::Rts | Phase::Sqd | Phase::Waiting => false,
        };
        still.then(|| RcImage {
            qpn: self.shell.qpn,
            state: self.shell.state,
            attributes: self.shell.attributes,
            shared_receive_queue: self.shell.config.shared_receive_queue,
            pkey: self.shell.config.pkey,
            notify_drained: self.shell.notify_drained,
            established: self.shell.established,
            peer: self.shell.peer,
            requester: self.requester.save(),
            responder: self.responder.save(),
            migration: self.migration.save(),
        })
    }

    /// A queue pair with that state, stopped if it was live: [`RcQp::resume`] lets it go on. It may have another number.
    pub fn restore(qpn: Qpn, config: QpConfig, image: RcImage) -> Result<RcQp, ImageError> {
        image
            .attributes
            .check_values()
            .map_err(|_| ImageError::Invalid("an attribute is too large"))?;
        ImageError::unless(
            image.state != QpState::Sqe,
            "a reliable connection is never in SQE",
        )?;
        ImageError::unless(image.pkey == config.pkey, "the partition is another one")?;
        let (sends, receives) = match image.state {
            QpState::Rts | QpState::Sqd => (true, true),
            QpState::Rtr => (false, true),
            _ => (false, false),
        };
        let fits = (sends || image.requester.is_empty()) && (receives || image.responder.is_idle());
        ImageError::unless(fits, "there is more than its state allows")?;
        if image.shared_receive_queue != config.shared_receive_queue {
            return Err(ImageError::ReceiveQueue {
                shared: image.shared_receive_queue,
            });
        }
        let mut qp = RcQp::new(qpn, config);
        qp.requester = Requester::restore(image.requester, &image.attributes, config)?;
        qp.responder = Responder::restore(image.responder, &image.attributes)?;
        qp.migration = Migration::restore(image.migration);
        qp.shell = Shell {
            state: image.state,
            phase: Phase::of(image.state),
            attributes: image.attributes,
            peer: image.peer,
            notify_drained: image.notify_drained,
            established: image.established,
            ..Shell::new(QpType::Rc, qpn, config)
        };
        qp.shell.refresh_link();
        qp.stand_still();
        Ok(qp)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use verbatim_recorded::Recording;

    /// The RNIC that takes an image up may be of another release.
    #[test]
    fn images_are_as_recorded() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recorded/qp-image.txt");
        let mut recording = Recording::open(path, IMAGE_VERSION.into());
        recording.check::<RcImage>("RcImage");
        recording.finish();
    }
}
