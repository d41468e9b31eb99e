//! Contents that come by one-sided RDMA: fetched if need be, compared with their fingerprints, and put in their places.
//!
//! One thread does that for a call, so that runs are fetched while those before them are written.

use std::collections::VecDeque;
use std::sync::Arc;

use anyhow::Context;
use tokio::sync::{Mutex, mpsc};
use tonic::Status;
use verbatim_bulk::{Incoming, Landed, Operation, QpClass};

use super::Destination;
use crate::agent::status;
use crate::memory::others::Others;
use crate::proto::{self, FilePart, Freed};
use crate::session::decode;

/// Parts that are taken ahead of the one that is written, at most.
const AHEAD: usize = 64;

impl Destination {
    /// Makes this host's end of the session's connection; returns what the source must know.
    pub async fn offer_bulk(&mut self, offer: &[u8]) -> anyhow::Result<Vec<u8>> {
        self.home()?;
        let offer = decode(offer).context("a malformed offer")?;
        let rnic = Arc::clone(&self.agent.rnic);
        let accepted = tokio::task::spawn_blocking(move || {
            let device = rnic.device()?;
            Incoming::accept(&device, &offer)
        });
        let (incoming, accepted) = accepted.await.context("making a connection panicked")??;
        self.bulk = Some(incoming);
        Ok(postcard::to_allocvec(&accepted)?)
    }

    /// For one call, which gives it back.
    pub fn lend_bulk(&mut self) -> Option<Incoming> {
        self.bulk.take()
    }

    /// It is of use for the next call.
    pub fn take_bulk_back(&mut self, incoming: Option<Incoming>) {
        self.bulk = self.bulk.take().or(incoming);
    }
}

/// A part, and its content if that has to be looked for.
struct Pending {
    part: FilePart,
    landed: Option<(Landed, Option<verbatim_bulk::Ticket>)>,
}

/// Places all parts that come, in their order. Whatever is in the ring is freed when it was taken out of it.
pub fn place_all(
    destination: &Mutex<Destination>,
    incoming: &mut Option<Incoming>,
    parts: &mut mpsc::Receiver<FilePart>,
    answers: &mpsc::Sender<Result<Freed, Status>>,
    mut others: Others,
    mut is_to_damage: bool,
) -> Result<(), Status> {
    if let Some(incoming) = incoming.as_ref() {
        others.without(incoming.number());
    }
    let mut pending: VecDeque<Pending> = VecDeque::new();
    let mut content = Vec::new();
    loop {
        // All that are there, so that they are fetched at the same time.
        let next = match pending.len() {
            0 => parts.blocking_recv(),
            AHEAD.. => None,
            _ => parts.try_recv().ok(),
        };
        if let Some(part) = next {
            pending.push_back(fetch(incoming, part)?);
            continue;
        }
        let Some(Pending { part, landed }) = pending.pop_front() else {
            return Ok(());
        };
        let Some((landed, fetched)) = landed else {
            let placed = destination.blocking_lock().place(&part, None);
            placed.map_err(|error| status(&error))?;
            continue;
        };
        let incoming = incoming.as_mut().ok_or_else(nowhere)?;
        if landed.operation == Operation::Write && std::mem::take(&mut is_to_damage) {
            incoming.damage(&landed).map_err(lost)?;
        }
        incoming.take(&landed, fetched, &mut content).map_err(lost)?;
        // It was copied: the source may use that room again. If it is gone, the next part does not come.
        let freed = Freed {
            position: landed.end(),
            others_bytes_per_second: others.bytes_per_second(),
        };
        let _ = answers.blocking_send(Ok(freed));
        let placed = destination.blocking_lock().place(&part, Some(&content));
        placed.map_err(|error| status(&error))?;
    }
}

#[allow(clippy::result_large_err, reason = "tonic's own type")]
fn fetch(incoming: &mut Option<Incoming>, mut part: FilePart) -> Result<Pending, Status> {
    let Some(landed) = &mut part.landed else {
        return Ok(Pending { part, landed: None });
    };
    let run = Landed {
        position: landed.position,
        length: landed.length,
        fingerprints: std::mem::take(&mut landed.fingerprints),
        operation: operation(landed),
    };
    let class = match landed.background {
        true => QpClass::Background,
        false => QpClass::User,
    };
    let incoming = incoming.as_mut().ok_or_else(nowhere)?;
    incoming.set_class(class).map_err(lost)?;
    let fetched = incoming.fetch(&run).map_err(lost)?;
    Ok(Pending {
        part,
        landed: Some((run, fetched)),
    })
}

fn operation(landed: &proto::Landed) -> Operation {
    match landed.fetch {
        true => Operation::Read,
        false => Operation::Write,
    }
}

fn nowhere() -> Status {
    Status::failed_precondition("content that came by RDMA, in a session without a connection")
}

fn lost(error: verbatim_bulk::Error) -> Status {
    Status::data_loss(error.to_string())
}
