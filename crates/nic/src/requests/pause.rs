//! Pause and resume: a connection stands still, is dumped, and goes on here or at another RNIC (`docs/wire-extension.md`).

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use verbatim_device::control::{AsyncEventType, ForwardedQp, QpSecret, Reply, RestoredQp};
use verbatim_device::image::{self, QpImage};
use verbatim_roce::icrc::Flow;
use verbatim_roce::{
    ImageError, Location, MAX_INLINE, MAX_SGE, QpAttributes, QpState, Qpn, RcImage, RcQp, Secret, SecretEnd,
    Standing, Time, UDP_PORT,
};

use super::qp::at_most;
use super::{Desk, path};
use verbatim_seqpacket::Carried;

use crate::error::Refused;
use crate::objects::Objects;
use crate::qp::{Effects, QueuePair, Rings, Route, Scratch};

impl Desk<'_> {
    pub(super) fn set_qp_secret(
        &mut self,
        id: u32,
        qpn: u32,
        secret: Option<QpSecret>,
    ) -> Result<Reply, Refused> {
        let qp = self.own_qp(qpn, id)?;
        let secret = secret.map(|QpSecret { key, first }| {
            let end = if first {
                SecretEnd::First
            } else {
                SecretEnd::Second
            };
            Secret::new(key, end)
        });
        connection(qp)?.set_secret(secret);
        Ok(Reply::Done)
    }

    pub(super) fn pause_qp(&mut self, id: u32, qpn: u32, limit: Option<Duration>) -> Result<(), Refused> {
        let now = self.now;
        let qp = self.own_qp(qpn, id)?;
        if qp.stopped {
            return Err(Refused::new(
                libc::EBUSY,
                "the queue pair is stopped: let it go on first",
            ));
        }
        let state = qp.transport.state();
        let transport = connection(qp)?;
        if transport.standing() != Standing::Stopped && !transport.halt(now) {
            return Err(Refused::invalid(format!(
                "nothing can be paused of a queue pair in {state:?}"
            )));
        }
        transport.limit_halt(now, limit.map(|limit| now + limit));
        self.changed_qps.push(qpn);
        Ok(())
    }

    pub(super) fn dump_qps(
        &mut self,
        id: u32,
        qpns: &[u32],
        attached: &mut Option<OwnedFd>,
    ) -> Result<Reply, Refused> {
        at_most(qpns.len())?;
        let (mut images, mut bytes) = (Vec::new(), 0);
        for qpn in qpns {
            if bytes >= image::ENOUGH {
                break;
            }
            let image = self.dump_qp(id, *qpn)?;
            bytes += image.image.len();
            images.push(image);
        }
        let (carried, memory) =
            image::carry(&images).map_err(|error| Refused::new(error.errno(), error.to_string()))?;
        *attached = memory;
        Ok(Reply::QpImages(carried))
    }

    fn dump_qp(&mut self, id: u32, qpn: u32) -> Result<QpImage, Refused> {
        let image = connection(self.own_qp(qpn, id)?)?
            .save()
            .ok_or_else(|| Refused::new(libc::EBUSY, "the queue pair runs: pause it first"))?;
        Ok(QpImage {
            image: image.encode(),
            requests: image.requests().collect(),
            receive: image.receive(),
        })
    }

    pub(super) fn resume_qp(&mut self, id: u32, qpn: u32) -> Result<(), Refused> {
        let now = self.now;
        let transport = connection(self.own_qp(qpn, id)?)?;
        if transport.standing() != Standing::Stopped {
            return Ok(());
        }
        transport.resume(now);
        self.objects.names_its_partner(qpn, now);
        self.objects.went_on(qpn, self.effects, now);
        self.changed_qps.push(qpn);
        Ok(())
    }

    pub(super) fn forward_qp(&mut self, id: u32, qp: &ForwardedQp, time: Duration) -> Result<(), Refused> {
        let qpn = qp.qpn;
        if !self.own_qp(qpn, id)?.is_paused() {
            return Err(Refused::new(
                libc::EBUSY,
                "the queue pair runs: nothing of it is forwarded",
            ));
        }
        let to = Location {
            address: path::address(qp.to_gid),
            qpn: Qpn::new(qp.to_qpn),
        };
        if !to.is_plausible() {
            return Err(Refused::invalid(format!(
                "there can be no queue pair {} at {}",
                to.qpn, to.address
            )));
        }
        let now = self.now;
        let forwarding = &mut self.objects.forwarding;
        if !forwarding.insert(now, Qpn::new(qpn), to, now + time) {
            return Err(Refused::new(
                libc::ENOMEM,
                "there are too many forwarding entries",
            ));
        }
        Ok(())
    }

    pub(super) fn restore_qps(
        &mut self,
        id: u32,
        qps: &[RestoredQp],
        images: Carried,
        fds: &mut Vec<OwnedFd>,
    ) -> Result<Reply, Refused> {
        at_most(qps.len())?;
        // What is longer than a message is the image of one.
        let most = match qps {
            [one] => most_image_bytes(&self.own_qp(one.qpn, id)?.rings),
            _ => 0,
        };
        let images = images
            .take(fds, most)
            .map_err(|error| Refused::invalid(error.to_string()))?;
        let told: u64 = qps.iter().map(|qp| u64::from(qp.image_bytes)).sum();
        if told != images.len() as u64 {
            return Err(Refused::invalid(format!(
                "there are {} bytes of images, and not {told}",
                images.len()
            )));
        }
        let (mut refused, mut message) = (Vec::new(), String::new());
        let mut rest = &images[..];
        for (index, qp) in (0..).zip(qps) {
            let (image, after) = rest.split_at(qp.image_bytes as usize);
            rest = after;
            if let Err(why) = self.restore_qp(id, qp.qpn, image, qp.sgid_index) {
                if refused.is_empty() {
                    message = why.message;
                }
                refused.push((index, why.errno));
            }
        }
        Ok(Reply::QpsRestored { refused, message })
    }

    fn restore_qp(&mut self, id: u32, qpn: u32, image: &[u8], sgid_index: u8) -> Result<(), Refused> {
        let invalid = |error: ImageError| Refused::invalid(error.to_string());
        let mut image = RcImage::decode(image).map_err(invalid)?;
        image.set_sgid_index(sgid_index);
        let limits = &self.device.limits;
        let attributes = *image.attributes();
        let beyond = [attributes.max_rd_atomic, attributes.max_dest_rd_atomic]
            .iter()
            .any(|wanted| wanted.unwrap_or(0) > limits.max_rd_atomic);
        let mtu = attributes.path_mtu.unwrap_or_default() as u8;
        if beyond || mtu > self.device.port.active_mtu && attributes.path_mtu.is_some() {
            return Err(Refused::invalid(
                "the image has attributes that this RNIC cannot give",
            ));
        }
        let way = self.way(&attributes, image.peer())?;
        let config = {
            let qp = self.own_qp(qpn, id)?;
            connection(qp)?;
            if qp.transport.state() != QpState::Reset {
                return Err(Refused::new(
                    libc::EBUSY,
                    "only a queue pair in RESET can be given another state",
                ));
            }
            qp.config
        };
        let (requests, receive): (Vec<u64>, _) = (image.requests().collect(), image.receive());
        let transport = RcQp::restore(Qpn::new(qpn), config, image).map_err(invalid)?;
        let Self {
            objects,
            changed_qps,
            now,
            ..
        } = self;
        let Objects { qps, shared, .. } = &mut **objects;
        let qp = qps.get_mut(qpn).expect("its owner was checked");
        let own_receive = receive.filter(|_| qp.srq.is_none());
        take_posted(&mut qp.rings, &mut shared.scratch, &requests, own_receive)?;
        qp.transport = verbatim_roce::Qp::Rc(transport);
        qp.counted = *qp.transport.counters();
        if let Some((flow, port, traffic)) = way {
            let remote = flow.destination().ip();
            let route = Route {
                remote,
                port,
                peer: objects.peers.begin(remote),
                flow,
                traffic,
            };
            objects.set_route(qpn, Some(route));
        }
        objects.other_end_changed(qpn, None, *now);
        changed_qps.push(qpn);
        Ok(())
    }

    /// The way to the partner: by the attributes that the program has set, or to where the partner has gone since.
    fn way(
        &self,
        attributes: &QpAttributes,
        peer: Option<Location>,
    ) -> Result<Option<(Flow, u8, verbatim_roce::Traffic)>, Refused> {
        let Some(av) = attributes.av else { return Ok(None) };
        let path = path::resolve(self.device, &super::qp::address_vector(&av))?;
        let destination = peer.map_or(path.destination, |peer| peer.address);
        let end = |address| SocketAddr::new(address, UDP_PORT);
        let flow = Flow::new(end(path.source), end(destination)).map_err(|_| {
            Refused::invalid(format!("there is no way from {} to {destination}", path.source))
        })?;
        if destination.is_multicast() {
            return Err(Refused::invalid("a connection has one partner"));
        }
        Ok(Some((flow, av.sgid_index, path.traffic)))
    }
}

impl Objects {
    /// A queue pair that was paused goes on, since it was told to or its limit has passed.
    pub fn went_on(&mut self, qpn: u32, effects: &mut Effects, now: Time) {
        // It has not left after all, if it was to.
        self.forwarding.remove(Qpn::new(qpn));
        let Some(qp) = self.qps.get_mut(qpn) else { return };
        if std::mem::take(&mut qp.doomed) {
            let context = qp.context;
            let (transport, mut host) = qp.split(&mut self.shared, effects, now);
            let to_error = QpAttributes {
                state: Some(QpState::Err),
                ..QpAttributes::default()
            };
            transport
                .modify(&to_error, &mut host)
                .expect("there is a way to ERR from every state");
            effects.tell(context, AsyncEventType::QpFatal, qpn);
        }
    }
}

/// Takes off the rings what is in an image, if all of it is there. What the program changes meanwhile is its own affair: the
/// requests are executed as the image has them.
fn take_posted(
    rings: &mut Rings,
    scratch: &mut Scratch,
    requests: &[u64],
    receive: Option<u64>,
) -> Result<(), Refused> {
    let missing = || {
        Refused::invalid("the rings do not begin with the requests that are in the image: post those first")
    };
    for (index, wr_id) in (0..).zip(requests) {
        if rings.ends.send.peek(index) != Ok(Some(*wr_id)) {
            return Err(missing());
        }
    }
    if receive.is_some() && rings.ends.recv.peek() != Ok(receive) {
        return Err(missing());
    }
    for _ in requests {
        if rings.ends.send.pop(&mut scratch.wqe) != Ok(true) {
            rings.broken = true;
            return Err(missing());
        }
    }
    if receive.is_some() && !matches!(rings.ends.recv.pop(&mut scratch.sges), Ok(Some(_))) {
        rings.broken = true;
        return Err(missing());
    }
    Ok(())
}

/// No image of a queue pair with these rings is longer, in bytes: a request has its numbers, its pieces (of up to ten, five and five
/// bytes each) and its inline data.
fn most_image_bytes(rings: &Rings) -> u64 {
    const HEAD: u64 = 64 << 10;
    const REQUEST: usize = 128 + 20 * MAX_SGE + MAX_INLINE;
    HEAD + u64::from(rings.cap.max_send_wr) * REQUEST as u64
}

fn connection(qp: &mut QueuePair) -> Result<&mut RcQp, Refused> {
    qp.transport
        .as_rc_mut()
        .ok_or_else(|| Refused::invalid("only a reliable connection can be paused, and go on elsewhere"))
}
