//! A lease that goes to another host, with the instance that has its disk.
//!
//! ```text
//!  owner                         server                              the other host
//!    Offer {to, by}     ───►       `to` may adopt it
//!                                  a second queue pair, not connected   ◄───  Adopt {by}
//!    (writes no more)
//!    Deposit {map}      ───►       kept beside the lease
//!          the session `by` is decided by the agents; before that the owner may go on (Withdraw)
//!                                  the owner's queue pair is destroyed  ◄───  TakeOver {by}
//!    Gone               ◄───       the second is connected              ───►  Taken {map}
//! ```
//!
//! One queue pair at a time reaches the memory. From the takeover on, the RNIC refuses all further writes of
//! the earlier owner, whether that owner knows of the decision or not; and its token finds no lease any more.

use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use tokio::io::{AsyncWrite, AsyncWriteExt};
use verbatim_far::{Buffer, Connection, End, Options};
use verbatim_lease::Map;
use verbatim_volume::wire::{frame, send};

use super::{Server, WINDOW};
use crate::block::PAGE_BYTES;
use crate::wire::{PIECE, Session, ToOwner, ToServer, Token};

/// An offer to adopt a lease.
pub(super) struct Offer {
    to: String,
    by: Session,
    /// The map, as far as it has come.
    map: Vec<u8>,
    second: Option<Second>,
}

impl Offer {
    /// The host that has adopted the lease, if it has.
    pub(super) fn adopted_by(&self) -> Option<String> {
        self.second.as_ref().map(|_| self.to.clone())
    }
}

/// The queue pair of the host that has adopted the lease.
struct Second {
    token: Token,
    visit: u64,
    theirs: End,
    // Dropped in this order: the queue pair goes before the memory.
    connection: Connection,
    memory: Arc<Buffer>,
}

/// A lease's arrival at its owner.
pub(super) struct Arrived {
    by: Session,
    /// The map, until the owner has it.
    map: Vec<u8>,
    /// The tokens of earlier owners.
    before: Vec<Token>,
}

impl Server {
    /// The host that has the lease now, if it was that of this token.
    pub(super) fn gone_to(&self, token: Token) -> Option<String> {
        let leases = self.lock();
        let is_it = |arrived: &Arrived| arrived.before.contains(&token);
        let mut all = leases.of.values();
        all.find(|lease| lease.arrived.as_ref().is_some_and(is_it))
            .map(|lease| lease.host.clone())
    }

    /// Makes a second queue pair for the lease that comes to this host. `None` if none does.
    pub(super) fn adopt(
        &self,
        (host, name, bytes): (String, String, u64),
        theirs: End,
        by: Session,
        resume: Option<Token>,
    ) -> anyhow::Result<Option<(Token, u64, ToOwner)>> {
        let device = self.device()?;
        let is_its_own = resume.is_some_and(|token| {
            let leases = self.lock();
            let arrived = leases.of.get(&token).and_then(|lease| lease.arrived.as_ref());
            arrived.is_some_and(|arrived| arrived.by == by)
        });
        if is_its_own {
            return self.grant((host, name, bytes), &theirs, resume).map(Some);
        }
        let (owner, visit, memory, old) = {
            let mut leases = self.lock();
            leases.visits += 1;
            let visit = leases.visits;
            let found = leases.of.iter_mut().find(|(_, lease)| {
                let is_it = |offer: &Offer| offer.to == host && offer.by == by;
                (&lease.name, lease.bytes) == (&name, bytes) && lease.offer.as_ref().is_some_and(is_it)
            });
            let Some((owner, lease)) = found else {
                return Ok(None);
            };
            let Some(memory) = lease.memory.clone() else {
                return Ok(None);
            };
            let old = lease.offer.as_mut().and_then(|offer| offer.second.take());
            (*owner, visit, memory, old)
        };
        // The queue pair of a connection that was lost.
        drop(old);
        let options = Options {
            window_requests: WINDOW,
            ..Options::default()
        };
        let connection = device.connection(options)?;
        let memory = connection.share(&memory)?;
        let token = Token(rand::random());
        let answer = ToOwner::Granted {
            token,
            end: connection.end(),
            memory: memory.exposed(),
            kept: true,
        };
        let second = Second {
            token,
            visit,
            theirs,
            connection,
            memory,
        };
        let mut leases = self.lock();
        let lease = leases.of.get_mut(&owner);
        let offer = lease.and_then(|lease| lease.offer.as_mut());
        match offer.filter(|offer| offer.by == by && offer.to == host) {
            Some(offer) => {
                let replaced = offer.second.replace(second);
                drop(leases);
                drop(replaced);
                Ok(Some((token, visit, answer)))
            }
            None => Ok(None),
        }
    }

    /// The connection of the adopting host has ended. Does nothing for an owner's connection.
    pub(super) fn unadopt(&self, token: Token, visit: u64) {
        let mut leases = self.lock();
        let mut offers = leases.of.values_mut().filter_map(|lease| lease.offer.as_mut());
        let is_it = |second: &Second| second.token == token && second.visit == visit;
        let found = offers.find(|offer| offer.second.as_ref().is_some_and(is_it));
        let second = found.and_then(|offer| offer.second.take());
        drop(leases);
        if second.is_some() {
            drop(second);
            self.ended.send_modify(|count| *count += 1);
        }
    }

    /// Waits while another host has adopted the lease, which then outlives its owner's connection.
    pub(super) async fn while_adopted(&self, token: Token, visit: u64) {
        let mut ended = self.ended.subscribe();
        loop {
            let is_adopted = {
                let leases = self.lock();
                let lease = leases.of.get(&token).filter(|lease| lease.visit == visit);
                lease
                    .and_then(|lease| lease.offer.as_ref())
                    .is_some_and(|offer| offer.second.is_some())
            };
            if !is_adopted || ended.changed().await.is_err() {
                return;
            }
        }
    }

    /// Handles messages about a lease that goes to another host.
    pub(super) async fn moves(
        self: &Arc<Self>,
        writer: &mut (impl AsyncWrite + Unpin),
        token: Token,
        visit: u64,
        message: ToServer,
        data: &[u8],
    ) -> anyhow::Result<()> {
        match message {
            ToServer::Offer { to, by } => {
                self.offer(token, visit, to, by)?;
                Ok(send(writer, &ToOwner::Offered { by }).await?)
            }
            ToServer::Withdraw { by } => {
                self.withdraw(token, visit, by);
                Ok(())
            }
            ToServer::Deposit { by, at, total } => match self.deposit(token, visit, by, (at, total), data)? {
                true => Ok(send(writer, &ToOwner::Deposited { by }).await?),
                false => Ok(()),
            },
            ToServer::TakeOver { by } => {
                let server = self.clone();
                let taken = tokio::task::spawn_blocking(move || server.take_over(token, by)).await??;
                let Some(map) = taken else {
                    return Ok(send(writer, &ToOwner::NotOffered).await?);
                };
                let total = map.len() as u64;
                let mut at = 0;
                loop {
                    let piece = &map[at as usize..][..PIECE.min(map.len() - at as usize)];
                    let taken = ToOwner::Taken { by, at, total };
                    writer.write_all(&frame(&taken, piece.len())).await?;
                    writer.write_all(piece).await?;
                    at += piece.len() as u64;
                    if at == total {
                        return Ok(writer.flush().await?);
                    }
                }
            }
            ToServer::HasMap { by } => {
                let mut leases = self.lock();
                let arrived = leases.of.get_mut(&token).and_then(|lease| lease.arrived.as_mut());
                if let Some(arrived) = arrived.filter(|arrived| arrived.by == by) {
                    arrived.map = Vec::new();
                }
                Ok(())
            }
            _ => bail!("it says what does not belong here"),
        }
    }

    fn offer(&self, token: Token, visit: u64, to: String, by: Session) -> anyhow::Result<()> {
        let mut leases = self.lock();
        let lease = leases.of.get_mut(&token).filter(|lease| lease.visit == visit);
        let lease = lease.context("it offers what it does not have")?;
        let is_it = |offer: &Offer| (&offer.to, offer.by) == (&to, by);
        let old = match lease.offer.as_ref().is_some_and(is_it) {
            // The owner has reconnected.
            true => None,
            false => lease.offer.replace(Offer {
                to,
                by,
                map: Vec::new(),
                second: None,
            }),
        };
        drop(leases);
        drop(old);
        Ok(())
    }

    fn withdraw(&self, token: Token, visit: u64, by: Session) {
        let mut leases = self.lock();
        let lease = leases.of.get_mut(&token).filter(|lease| lease.visit == visit);
        let old = lease.and_then(|lease| lease.offer.take_if(|offer| offer.by == by));
        drop(leases);
        drop(old);
        self.ended.send_modify(|count| *count += 1);
    }

    /// Stores a piece of the map; returns whether the map is complete.
    fn deposit(
        &self,
        token: Token,
        visit: u64,
        by: Session,
        (at, total): (u64, u64),
        piece: &[u8],
    ) -> anyhow::Result<bool> {
        let mut leases = self.lock();
        let lease = leases.of.get_mut(&token).filter(|lease| lease.visit == visit);
        let lease = lease.context("it speaks of a lease that it does not have")?;
        ensure!(
            total == Map::bytes_of(lease.bytes / PAGE_BYTES),
            "a map of another length"
        );
        let offer = lease.offer.as_mut().filter(|offer| offer.by == by);
        let offer = offer.context("it speaks of a lease that it does not offer")?;
        if at == 0 {
            offer.map.clear();
        }
        let fits = at == offer.map.len() as u64 && at + piece.len() as u64 <= total;
        ensure!(fits, "a piece of a map that does not fit");
        offer.map.extend(piece);
        Ok(offer.map.len() as u64 == total)
    }

    /// Gives the lease to the host that has adopted it by this token; returns the map of the pages. `None` if
    /// the lease no longer exists.
    fn take_over(&self, token: Token, by: Session) -> anyhow::Result<Option<Vec<u8>>> {
        let (old, theirs, mut connection, memory) = {
            let mut leases = self.lock();
            if let Some(arrived) = leases.of.get(&token).and_then(|lease| lease.arrived.as_ref()) {
                return Ok((arrived.by == by).then(|| arrived.map.clone()));
            }
            let is_it = |offer: &Offer| {
                let second = offer.second.as_ref();
                offer.by == by && second.is_some_and(|second| second.token == token)
            };
            let found = leases
                .of
                .iter()
                .find(|(_, lease)| lease.offer.as_ref().is_some_and(is_it));
            let Some(before) = found.map(|(token, _)| *token) else {
                return Ok(None);
            };
            let mut lease = leases.of.remove(&before).expect("it was just found");
            let Offer { to, map, second, .. } = lease.offer.take().expect("it was just found");
            let Second {
                visit,
                theirs,
                connection,
                memory,
                ..
            } = second.expect("it was just found");
            tracing::info!(
                "the lease of {} for {} is that of {to} now",
                lease.host,
                lease.name
            );
            let old = (lease.connection.take(), lease.memory.take());
            let mut all = lease
                .arrived
                .take()
                .map(|arrived| arrived.before)
                .unwrap_or_default();
            all.push(before);
            lease.host = to;
            lease.visit = visit;
            lease.is_connected = true;
            lease.arrived = Some(Arrived { by, map, before: all });
            leases.of.insert(token, lease);
            (old, theirs, connection, memory)
        };
        // The fence: nothing of the earlier owner lands from here on.
        drop(old);
        connection.connect(&theirs)?;
        let mut leases = self.lock();
        let lease = leases
            .of
            .get_mut(&token)
            .context("the lease has ended meanwhile")?;
        lease.connection = Some(connection);
        lease.memory = Some(memory);
        let map = lease.arrived.as_ref().map(|arrived| arrived.map.clone());
        drop(leases);
        self.ended.send_modify(|count| *count += 1);
        Ok(map)
    }
}
