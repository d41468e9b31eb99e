//! Programs that go, and programs that come.
//!
//! ```text
//!  source                                        destination
//!   Describe: what its ids need ───────────────►  Reserve: kept free on a context that is made for it
//!   (parked) Dump: all of them  ──┐
//!   SendOn: where it goes         └── (with it) ─► Adopt, AttachChannel
//!   the context's end: what comes for its ids is passed on ──► queue pair 1, by PASS_ON_QKEY
//! ```
//!
//! While a context is parked its ids are out of the communication manager: no message, no timer changes them, and nobody is
//! answered, as if packets were lost. Attached again, they go on.

use std::collections::HashMap;
use std::os::fd::OwnedFd;

use verbatim_cm::{Gid, IdImage, Outcome, Owner, QueuePairs};
use verbatim_device::control::{CmDetails, CmReply, CmRequest, MOST_CM_BYTES, MOST_CM_BYTES_HERE};
use verbatim_roce::Time;
use verbatim_seqpacket::Carried;

use super::Manager;
use super::channels::{Channel, Waiting};
use super::ids::{Id, Stage};
use super::image::{self, Image, Needs};
use super::notices::event;
use super::ports::Holder;
use super::programs::{Kind, Reserved};
use super::requests::Asking;
use super::ways::{Known, stands_for};
use crate::error::Refused;
use crate::outbox::Outbox;

/// The queue key of datagrams to queue pair 1 in which a host passes a management datagram on; of those that programs cannot have.
pub const PASS_ON_QKEY: u32 = 0x8056_4d01;

/// A message that is passed on comes to its end after so many hosts.
const MOST_HOPS: u8 = 8;

/// Hops, zeroes, and the GIDs from which and to which it was sent; the message follows.
const HEAD_BYTES: usize = 36;

/// Hosts of which programs have come, at most.
const MOST_TRUSTED: usize = 4096;

/// More GIDs than an RNIC has.
const MOST_GIDS: usize = 4096;

/// Events that an id has been told, at most: programs do not count further.
const MOST_REPORTED: u32 = 1 << 30;

/// Where a message came from, and by which way.
#[derive(Debug, Clone, Copy)]
pub struct PassedOn {
    from: Gid,
    /// The own GID that it came to, or that stands for that.
    to: Gid,
    hops: u8,
}

impl PassedOn {
    /// By nobody.
    pub fn direct(from: Gid, to: Gid) -> Self {
        Self { from, to, hops: 0 }
    }
}

/// A message to pass on.
#[derive(Debug)]
pub struct PassingOn {
    /// The own GID that it came to.
    pub own: Gid,
    /// The host where its id is.
    pub to: Gid,
    pub bytes: Vec<u8>,
}

fn taken(bytes: Carried, fds: &mut Vec<OwnedFd>) -> Result<Vec<u8>, Refused> {
    let bytes = bytes.take(fds, MOST_CM_BYTES);
    bytes.map_err(|error| Refused::invalid(error.to_string()))
}

fn carried(bytes: Vec<u8>, attached: &mut Option<OwnedFd>) -> Result<Carried, Refused> {
    if bytes.len() as u64 > MOST_CM_BYTES {
        return Err(Refused::new(libc::EFBIG, "the program has too many ids"));
    }
    let (carried, memory) = Carried::new(bytes, MOST_CM_BYTES_HERE)
        .map_err(|error| Refused::new(error.errno(), error.to_string()))?;
    *attached = memory;
    Ok(carried)
}

impl Manager {
    pub(super) fn move_program(
        &mut self,
        request: CmRequest,
        fds: &mut Vec<OwnedFd>,
        attached: &mut Option<OwnedFd>,
        asking: &Asking<'_>,
    ) -> Result<CmReply, Refused> {
        match request {
            CmRequest::Know { node_guid, gids } => self.know(Known { node_guid, gids }, asking),
            CmRequest::Describe => {
                let needs = image::encode(&self.needs(asking.context))?;
                Ok(CmReply::Bytes(carried(needs, attached)?))
            }
            CmRequest::Reserve { needs, from } => {
                let needs = image::decode(&taken(needs, fds)?)?;
                self.reserve(needs, Gid(from), asking.context)
            }
            CmRequest::Dump => {
                let image = image::encode(&self.image(asking)?)?;
                Ok(CmReply::Bytes(carried(image, attached)?))
            }
            CmRequest::Adopt { image } => {
                let image = image::decode(&taken(image, fds)?)?;
                self.adopt(image, asking)
            }
            CmRequest::AttachChannel { channel } => {
                let outbox = Outbox::new(fds)?;
                let channel = self.own_channel(channel, asking.context)?;
                if channel.outbox.is_some() {
                    return Err(Refused::invalid("the channel has its end"));
                }
                channel.outbox = Some(outbox);
                let waiting = !channel.waiting().is_empty();
                Ok(CmReply::Attached { waiting })
            }
            CmRequest::SendOn { to } => {
                let program = self.programs.get_mut(asking.context);
                if let Some(program) = program {
                    if program.held.is_none() {
                        return Err(Refused::new(libc::EBUSY, "the program's ids are in use here"));
                    }
                    program.goes_to = Some(Gid(to));
                }
                Ok(CmReply::Done)
            }
            _ => unreachable!("answered by others"),
        }
    }

    fn know(&mut self, known: Known, asking: &Asking<'_>) -> Result<CmReply, Refused> {
        if self.programs.count(asking.context) > 0 || known.gids.len() > MOST_GIDS {
            return Err(Refused::invalid("the program has ids already"));
        }
        self.programs.of(asking.context).known = elsewhere(known, asking);
        Ok(CmReply::Done)
    }

    /// What a program's ids need elsewhere.
    fn needs(&self, context: u32) -> Needs {
        let ids = self.ids.iter().filter(|(_, id)| id.context == context);
        let mut needs = Needs::default();
        for (_, id) in ids {
            needs.ids += 1;
            needs.numbers.extend(id.comm);
            // The port of one that asks for a connection is only its name.
            let is_found = matches!(id.stage, Stage::Bound | Stage::Listening);
            if let (true, Some(_), Some(source)) = (is_found, id.port, id.source) {
                needs.ports.push((id.space, source, id.sharing));
            }
        }
        needs
    }

    /// Keeps all of it free for a context, or nothing.
    fn reserve(&mut self, needs: Needs, from: Gid, context: u32) -> Result<CmReply, Refused> {
        let program = self.programs.of(context);
        if program.reserved.is_some() || self.programs.count(context) > 0 {
            return Err(Refused::invalid("the context has ids, or is to have some"));
        }
        let room = self.machine.room(Owner(context.into())).min(self.most_of_context);
        if needs.ids as usize > room {
            return Err(Refused::new(
                libc::ENOMEM,
                format!(
                    "the program has {} rdma_cm ids, and there is room for {room} more",
                    needs.ids
                ),
            ));
        }
        let mut reserved = Reserved::default();
        let all = self.reserve_all(needs, context, &mut reserved);
        if let Err(refused) = all {
            self.release(context, reserved);
            return Err(refused);
        }
        self.programs.of(context).reserved = Some(reserved);
        if self.trusted.len() < MOST_TRUSTED {
            self.trusted.insert(from);
        }
        Ok(CmReply::Done)
    }

    fn reserve_all(&mut self, needs: Needs, context: u32, reserved: &mut Reserved) -> Result<(), Refused> {
        for (space, address, sharing) in needs.ports {
            if address.port() == 0 {
                return Err(Refused::invalid("port 0 cannot be kept free"));
            }
            let holder = Holder::Context(context);
            let port = self
                .ports
                .take(space, holder, address, sharing)
                .map_err(|refused| {
                    let message = format!(
                        "{address} of rdma_cm is another program's here ({})",
                        refused.message
                    );
                    Refused::new(refused.errno, message)
                })?;
            reserved.ports.push((space, port));
        }
        for number in needs.numbers {
            self.machine
                .reserve(number)
                .map_err(|error| Refused::new(libc::EADDRINUSE, error.to_string()))?;
            reserved.numbers.push(number);
        }
        Ok(())
    }

    fn release(&mut self, context: u32, reserved: Reserved) {
        for (space, port) in reserved.ports {
            self.ports.release(space, Holder::Context(context), port);
        }
        for number in reserved.numbers {
            self.machine.unreserve(number);
        }
    }

    /// A program's ids stand still.
    pub fn park(&mut self, now: Time, context: u32) {
        let Some(program) = self.programs.get_mut(context) else {
            return;
        };
        if program.held.is_none() {
            program.held = Some(self.machine.hold(now, Owner(context.into())));
        }
    }

    /// They go on.
    pub fn unpark(&mut self, now: Time, context: u32, gids: &[[u8; 16]]) {
        let held = self.programs.get_mut(context).and_then(|program| {
            program.goes_to = None;
            program.held.take()
        });
        if let Some(held) = held {
            self.machine.give_back(now, Owner(context.into()), held);
            self.take_notices(now, gids);
        }
    }

    /// A context is gone, and its channels before it. What comes for ids that stood still is for where they have gone.
    pub fn remove_program(&mut self, context: u32) {
        let Some(program) = self.programs.remove(context) else {
            return;
        };
        if let Some(reserved) = program.reserved {
            self.release(context, reserved);
        }
        let held = program.held.into_iter().flatten();
        self.machine
            .let_go(held.map(|image| image.comm_id()), program.goes_to);
    }

    fn image(&self, asking: &Asking<'_>) -> Result<Image, Refused> {
        let context = asking.context;
        let program = self.programs.get(context);
        let held = program.and_then(|program| program.held.as_ref());
        let held =
            held.ok_or_else(|| Refused::new(libc::EBUSY, "the program's ids are in use: park its context"))?;
        let by_comm: HashMap<_, _> = held.iter().map(|image| (image.comm_id(), image)).collect();
        let ways = self.ways(asking);
        let ids = self.ids.iter().filter(|(_, id)| id.context == context);
        let memberships = self.memberships.iter();
        let memberships = memberships.filter(|(_, membership)| membership.context == context);
        let channels = self
            .channels
            .iter()
            .filter(|(_, channel)| channel.context == context);
        Ok(Image {
            known: Known {
                node_guid: ways.node_guid(),
                gids: ways.gids(),
            },
            gids: asking.device.port.gid_table(),
            channels: channels
                .map(|(number, channel)| (number, channel.waiting().iter().cloned().collect()))
                .collect(),
            ids: ids
                .map(|(number, id)| {
                    let image = id.comm.and_then(|comm| by_comm.get(&comm));
                    (number, id.clone(), image.map(|image| image.encode()))
                })
                .collect(),
            memberships: memberships
                .map(|(number, membership)| (number, membership.clone()))
                .collect(),
        })
    }

    /// Takes a program up, on a context that was made for it.
    fn adopt(&mut self, image: Image, asking: &Asking<'_>) -> Result<CmReply, Refused> {
        let mut channels = HashMap::new();
        let adopted = self.adopt_all(image, &mut channels, asking);
        if adopted.is_err() {
            for channel in channels.into_values() {
                self.remove_channel(asking.now, channel);
            }
            return adopted.map(|()| CmReply::Done);
        }
        Ok(CmReply::Adopted {
            channels: channels.into_iter().collect(),
        })
    }

    fn adopt_all(
        &mut self,
        image: Image,
        channels: &mut HashMap<u32, u32>,
        asking: &Asking<'_>,
    ) -> Result<(), Refused> {
        let context = asking.context;
        check(&image)?;
        let room = self.machine.room(Owner(context.into())).min(self.most_of_context);
        if image.ids.len() > room {
            return Err(Refused::new(libc::ENOMEM, "the program has too many rdma_cm ids"));
        }
        let program = self.programs.of(context);
        let reserved = program.reserved.take();
        let reserved = reserved.ok_or_else(|| Refused::invalid("nobody is expected on this context"))?;
        program.known = elsewhere(image.known, asking);
        self.release(context, reserved);
        for (number, _) in &image.channels {
            let channel = Channel::new(context, None);
            let new = self.channels.insert_with(|_, _| channel);
            let new = new.ok_or_else(|| Refused::new(libc::ENOMEM, "no rdma_cm channel is left"))?;
            channels.insert(*number, new);
        }
        let mut ids = HashMap::new();
        for (number, id, of_machine) in image.ids {
            let id = Id {
                context,
                channel: channels[&id.channel],
                ..id
            };
            let new = self.adopt_id(id, of_machine, &image.gids, asking)?;
            ids.insert(number, new);
        }
        let mut memberships = HashMap::new();
        for (number, mut membership) in image.memberships {
            let Some(id) = ids.get(&membership.id).copied() else {
                continue;
            };
            (membership.id, membership.context) = (id, context);
            membership.reported = membership.reported.min(MOST_REPORTED);
            let name = membership.name;
            let Some(new) = self.memberships.insert_with(|_, _| membership) else {
                continue;
            };
            self.programs.name(context, Kind::Membership, name, new);
            memberships.insert(number, new);
            if let Some(id) = self.ids.get_mut(id) {
                id.memberships.push(new);
            }
        }
        for (number, waiting) in image.channels {
            let waiting = waiting.into_iter().filter_map(|waiting| {
                Some(Waiting {
                    id: *ids.get(&waiting.id)?,
                    counts: *ids.get(&waiting.counts)?,
                    membership: waiting
                        .membership
                        .and_then(|number| memberships.get(&number).copied()),
                    ..waiting
                })
            });
            let waiting = waiting.collect();
            if let Some(channel) = self.channels.get_mut(channels[&number]) {
                // What has been told of ids meanwhile comes after it.
                let mut all: std::collections::VecDeque<_> = waiting;
                all.extend(channel.waiting().iter().cloned());
                channel.set_waiting(all);
            }
        }
        Ok(())
    }

    fn adopt_id(
        &mut self,
        mut id: Id,
        of_machine: Option<Vec<u8>>,
        gids: &[[u8; 16]],
        asking: &Asking<'_>,
    ) -> Result<u32, Refused> {
        let context = asking.context;
        let (space, sharing, source) = (id.space, id.sharing, id.source);
        let (port, comm) = (id.port.take(), id.comm.take());
        id.memberships = Vec::new();
        id.reported = id.reported.min(MOST_REPORTED);
        let number = self.add_id(id)?;
        if let (Some(port), Some(mut address)) = (port, source) {
            address.set_port(port);
            // Of one that asks for a connection the port is another program's as well, where it cannot have it alone.
            if self
                .ports
                .take(space, Holder::Id(number), address, sharing)
                .is_ok()
            {
                self.own_id(number, context)?.port = Some(port);
            }
        }
        if comm.is_none() {
            return Ok(number);
        }
        let adopted = of_machine
            .ok_or_else(|| "it has no image".to_owned())
            .and_then(|bytes| self.adopt_comm(&bytes, gids, asking));
        match adopted {
            Ok(comm) => {
                self.own_id(number, context)?.comm = Some(comm);
                self.by_comm.insert(comm, number);
            }
            Err(error) => {
                tracing::warn!(number, error, "a connection of rdma_cm is lost");
                self.tell_id(number, event::DEVICE_REMOVAL, 0, CmDetails::None);
            }
        }
        Ok(number)
    }

    fn adopt_comm(
        &mut self,
        bytes: &[u8],
        gids: &[[u8; 16]],
        asking: &Asking<'_>,
    ) -> Result<verbatim_cm::CommId, String> {
        let image = IdImage::decode(bytes).map_err(|error| error.to_string())?;
        let here = asking.device.port.gid_table();
        let local = image.local().and_then(|local| stands_for(gids, local, &here));
        let owner = Owner(asking.context.into());
        let adopted = self.machine.adopt(asking.now, owner, image, local);
        adopted.map_err(|error| error.to_string())
    }

    /// A message has come, perhaps for an id that has gone.
    pub(super) fn arrived(
        &mut self,
        now: Time,
        way: PassedOn,
        bytes: &[u8],
        gids: &[[u8; 16]],
        queue_pairs: &dyn QueuePairs,
    ) -> Outcome {
        let outcome = self.machine.handle_mad(now, way.from, way.to, bytes, queue_pairs);
        if let Outcome::Away(id) = outcome
            && way.hops < MOST_HOPS
            && let Some(to) = self.machine.place_of(id)
        {
            let mut passed = vec![way.hops + 1, 0, 0, 0];
            passed.extend(way.from.0);
            passed.extend(way.to.0);
            passed.extend(bytes);
            self.passing_on.push(PassingOn {
                own: way.to,
                to,
                bytes: passed,
            });
        }
        self.take_notices(now, gids);
        outcome
    }

    /// Another host passes a message on, which it sends from `by`. `None` if it is not believed.
    pub fn handle_passed_on(
        &mut self,
        now: Time,
        by: [u8; 16],
        bytes: &[u8],
        gids: &[[u8; 16]],
        queue_pairs: &dyn QueuePairs,
    ) -> Option<Outcome> {
        if !self.trusted.contains(&Gid(by)) || bytes.len() <= HEAD_BYTES {
            return None;
        }
        let (head, bytes) = bytes.split_at(HEAD_BYTES);
        let from = Gid(head[4..20].try_into().ok()?);
        let to = Gid(head[20..36].try_into().ok()?);
        let to = stands_for(&[to.0], to, gids)?;
        let way = PassedOn {
            from,
            to,
            hops: head[0],
        };
        Some(self.arrived(now, way, bytes, gids, queue_pairs))
    }

    /// The next message to pass on.
    pub fn next_passing_on(&mut self) -> Option<PassingOn> {
        self.passing_on.pop()
    }
}

/// What a program knows, if that is not this RNIC.
fn elsewhere(known: Known, asking: &Asking<'_>) -> Option<Known> {
    let is_here =
        known.node_guid == asking.device.attr.node_guid && known.gids == asking.device.port.gid_table();
    (!is_here).then_some(known)
}

/// Whether an image holds together.
fn check(image: &Image) -> Result<(), Refused> {
    let unless = |condition: bool, what: &str| match condition {
        true => Ok(()),
        false => Err(Refused::invalid(format!("an image of ids: {what}"))),
    };
    let of = |gids: &Vec<[u8; 16]>| gids.len() <= MOST_GIDS;
    unless(of(&image.known.gids) && of(&image.gids), "too many GIDs")?;
    let channels: std::collections::HashSet<_> = image.channels.iter().map(|(number, _)| *number).collect();
    unless(channels.len() == image.channels.len(), "two channels are one")?;
    let mut names = std::collections::HashSet::new();
    let mut numbers = std::collections::HashSet::new();
    for (number, id, _) in &image.ids {
        unless(channels.contains(&id.channel), "an id has no channel")?;
        unless((1..=65_535).contains(&id.name), "an id's name is none")?;
        unless(
            names.insert(id.name) && numbers.insert(*number),
            "two ids are one",
        )?;
        unless(id.port != Some(0), "an id has port 0")?;
    }
    let mut names = std::collections::HashSet::new();
    for (_, membership) in &image.memberships {
        unless(
            (1..=65_535).contains(&membership.name),
            "a membership's name is none",
        )?;
        unless(names.insert(membership.name), "two memberships are one")?;
    }
    Ok(())
}
