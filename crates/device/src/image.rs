//! Images of paused connections, on their way between a program's side and the RNIC ([`Request::DumpQps`],
//! [`Request::RestoreQps`]).

use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};
use verbatim_seqpacket::{Carried, Error, MAX_MESSAGE_BYTES};

use crate::control::{MOST_QPS, Request, RestoredQp};

/// Longer ones travel in memory of their own. A program can have several requests under way without reading an answer: so many
/// answers fit into a socket's buffer, whose other end never waits for room.
const MOST_IN_ANSWER: usize = 3 << 10;

/// An answer that has images of so many bytes has no more of them: the RNIC does nothing else meanwhile.
pub const ENOUGH: usize = 1 << 20;

/// A request waits for room. So only an image that fits into no message needs a descriptor, which a program at its limit of them
/// does not get: at that time its connections are nowhere else any more.
const MOST_IN_REQUEST: usize = MAX_MESSAGE_BYTES - (1 << 10);

/// What a queue pair takes of a request beside its image: two numbers of up to five bytes, and one of one.
const RESTORED_BYTES: usize = 11;

/// What a program's side takes from its RNIC, which it trusts, in bytes.
const MOST: u64 = 256 << 20;

/// A connection that stands still.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpImage {
    /// For `RestoreQps`. It holds the connection's secret.
    pub image: Vec<u8>,
    /// The `wr_id`s of the send requests in it, oldest first: taken off the ring and not complete.
    pub requests: Vec<u64>,
    /// The `wr_id` of the RECV in it: taken for a message of which only a part has come.
    pub receive: Option<u64>,
}

impl std::fmt::Debug for QpImage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "QpImage {{ {} bytes, requests: {:?}, receive: {:?} }}",
            self.image.len(),
            self.requests,
            self.receive
        )
    }
}

/// What the answer to `DumpQps` carries, and the descriptor that goes with it.
pub fn carry(images: &[QpImage]) -> Result<(Carried, Option<OwnedFd>), Error> {
    let encoded = postcard::to_stdvec(images);
    let bytes = encoded.map_err(|source| Error::Malformed { bytes: 0, source })?;
    Carried::new(bytes, MOST_IN_ANSWER)
}

/// The same at the other end.
pub fn take(carried: Carried, fds: &mut Vec<OwnedFd>) -> Result<Vec<QpImage>, Error> {
    let bytes = carried.take(fds, MOST)?;
    postcard::from_bytes(&bytes).map_err(|source| Error::Malformed {
        bytes: bytes.len(),
        source,
    })
}

/// Images that are given to queue pairs, gathered into as few requests as they fit into.
#[derive(Default)]
pub struct Restoring {
    done: Vec<(Vec<RestoredQp>, Vec<u8>)>,
    qps: Vec<RestoredQp>,
    images: Vec<u8>,
}

impl Restoring {
    /// One more: the queue pair's number, its image, and the index of its GID.
    pub fn add(&mut self, qpn: u32, image: &[u8], sgid_index: u8) {
        let bytes = self.images.len() + image.len() + (self.qps.len() + 1) * RESTORED_BYTES;
        if self.qps.len() == MOST_QPS || (bytes > MOST_IN_REQUEST && !self.qps.is_empty()) {
            self.finish();
        }
        self.images.extend_from_slice(image);
        self.qps.push(RestoredQp {
            qpn,
            image_bytes: u32::try_from(image.len()).expect("an RNIC's images are shorter"),
            sgid_index,
        });
    }

    fn finish(&mut self) {
        let images = std::mem::take(&mut self.images);
        self.done.push((std::mem::take(&mut self.qps), images));
    }

    /// The requests, in the order in which images were added, each with the descriptor that goes with it, if it needs one.
    pub fn requests(mut self) -> impl Iterator<Item = Result<(Request, Option<OwnedFd>), Error>> {
        if !self.qps.is_empty() {
            self.finish();
        }
        self.done.into_iter().map(|(qps, images)| {
            let (images, memory) = Carried::new(images, MOST_IN_REQUEST)?;
            Ok((Request::RestoreQps { qps, images }, memory))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use verbatim_seqpacket::Socket;

    fn image(length: usize) -> Vec<u8> {
        (0..length).map(|index| (index * length) as u8).collect()
    }

    /// Images by the numbers of their queue pairs.
    type Numbered = Vec<(u32, Vec<u8>)>;

    /// The images that come at the RNIC with each request, with numbers from 0, and whether a descriptor was needed.
    fn over_a_socket(lengths: &[usize]) -> Vec<(Numbered, bool)> {
        let mut restoring = Restoring::default();
        for (qpn, length) in (0..).zip(lengths) {
            restoring.add(qpn, &image(*length), u8::MAX);
        }
        let requests = restoring.requests().map(|request| {
            let (request, memory) = request.unwrap();
            let (ours, theirs) = Socket::pair().unwrap();
            let fds: Vec<_> = memory.iter().map(AsFd::as_fd).collect();
            ours.send(&request, &fds).unwrap();
            let mut received = theirs.recv::<Request>().unwrap();
            let Request::RestoreQps { qps, images } = received.message else {
                panic!("another request");
            };
            let bytes = images.take(&mut received.fds, MOST).unwrap();
            let mut rest = &bytes[..];
            let each = qps.iter().map(|qp| {
                let (image, after) = rest.split_at(qp.image_bytes as usize);
                rest = after;
                (qp.qpn, image.to_vec())
            });
            (each.collect(), memory.is_some())
        });
        requests.collect()
    }

    #[test]
    fn images_are_taken_up_without_a_descriptor_as_long_as_they_fit_into_a_message() {
        let most = MOST_IN_REQUEST;
        for (length, has_descriptor) in [
            (0, false),
            (MOST_IN_ANSWER + 1, false),
            (most, false),
            (most + 1, true),
            (1 << 20, true),
        ] {
            let whole = vec![(vec![(0, image(length))], has_descriptor)];
            assert_eq!(over_a_socket(&[length]), whole, "{length} bytes");
        }
    }

    #[test]
    fn many_images_share_a_message_and_a_long_one_has_its_own() {
        assert_eq!(over_a_socket(&[]), []);
        let mut lengths = vec![185; 3000];
        lengths[1500] = 1 << 20;
        lengths[2000] = MOST_IN_REQUEST;
        let requests = over_a_socket(&lengths);
        let all: Vec<_> = requests.iter().flat_map(|(images, _)| images.clone()).collect();
        let wanted: Vec<_> = (0..)
            .zip(&lengths)
            .map(|(qpn, length)| (qpn, image(*length)))
            .collect();
        assert!(all == wanted, "in their order");
        let with_memory: Vec<_> = requests.iter().filter(|(_, memory)| *memory).collect();
        assert_eq!(with_memory.len(), 1);
        assert_eq!(with_memory[0].0.len(), 1);
        assert!(requests.len() <= 9, "{} requests", requests.len());
        assert_eq!(over_a_socket(&[0; MOST_QPS + 1]).len(), 2);
    }

    #[test]
    fn answers_are_taken_as_they_were_carried() {
        for (count, length, has_descriptor) in [
            (0, 0, false),
            (1, 100, false),
            (1, 1 << 20, true),
            (1000, 185, true),
        ] {
            let images: Vec<_> = (0..count)
                .map(|number| QpImage {
                    image: image(length),
                    requests: vec![number, u64::MAX],
                    receive: Some(number),
                })
                .collect();
            let (carried, memory) = carry(&images).unwrap();
            assert_eq!(memory.is_some(), has_descriptor);
            assert_eq!(take(carried, &mut Vec::from_iter(memory)).unwrap(), images);
        }
    }
}
