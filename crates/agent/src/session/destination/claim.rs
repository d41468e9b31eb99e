//! After the commit: the restored processes take their contexts, and let their requests reach the RNIC.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use futures_util::future::join_all;
use verbatim_channel::{Answer, MadeContext, Order, hung_up_terminal};
use verbatim_session::Phase;
use verbatim_session::decision::CommitAnswer;
use verbatim_session::decision::destination::{Event, State};

use super::Destination;
use super::tried::handed;
use crate::allocator;
use crate::datagrams;
use crate::faults::Point;
use crate::guests::unexpected;
use crate::proto::CountReply;
use crate::session::made_again::AllMade;
use crate::session::members::{Member, Members};
use crate::session::{Resumed, encode, in_time};

/// How long the restored processes may take to come for their contexts.
const RETURN_TIMEOUT: Duration = Duration::from_secs(30);

/// How long the pause may be for those who send datagrams to the instance: who is slow to hear of the move loses some.
const TELLING_TIMEOUT: Duration = Duration::from_millis(200);

type MadeAndLost = (Vec<MadeContext>, Vec<String>);

fn made(answer: Answer) -> anyhow::Result<MadeAndLost> {
    match answer {
        Answer::Made { contexts, lost } => Ok((contexts, lost)),
        other => Err(unexpected(&other, "Made")),
    }
}

/// Says whether a process has gone on with regions of these keys, which were made ahead of it.
fn tell_whose(pid: u32, rkeys: &[u32], contexts: &[MadeContext]) {
    let made = contexts.iter().flat_map(|context| &context.keys);
    let made: HashSet<u32> = made.map(|key| key.physical_key).collect();
    match rkeys.iter().filter(|rkey| made.contains(rkey)).count() {
        _ if rkeys.is_empty() => {}
        taken if taken == rkeys.len() => {
            tracing::info!(
                pid,
                regions = taken,
                "the process goes on with what was made ahead of it"
            );
        }
        taken => tracing::info!(
            pid,
            regions = rkeys.len(),
            taken,
            "the process has made by itself what was made ahead of it: its library asks for something else"
        ),
    }
}

impl Destination {
    /// Gives the processes their contexts; says how many RECVs were posted again, and what the processes have made again. Those that
    /// have theirs are passed over.
    pub async fn claim(&mut self) -> anyhow::Result<CountReply> {
        if self.machine.state() == State::Asking {
            // Nobody asks for that who does not know that the session is committed.
            self.decide(Event::Answer(CommitAnswer::Runs)).await;
        }
        let count = self.give_contexts().await?;
        let made = self.made.as_ref();
        Ok(CountReply {
            count,
            lost_rnic: false,
            made: made.map(AllMade::new_qps).unwrap_or_default(),
            ends: made.map(|made| made.ends(&self.to_make)).unwrap_or_default(),
            keys: made.map(|_| encode(&self.keys)).unwrap_or_default(),
            nothing_left: false,
        })
    }

    /// Lets the processes make what nobody could make ahead of them, and connect it.
    async fn make_again(&mut self) -> anyhow::Result<()> {
        if self.to_make.is_empty() || self.made.is_some() {
            return Ok(());
        }
        let name = self.instance.as_ref().map(|instance| instance.name().to_owned());
        let mut guests = Vec::new();
        for pid in self.to_make.pids() {
            if self.lost.contains(&pid) {
                continue;
            }
            let came = self.agent.guests.present(name.as_deref(), pid);
            match tokio::time::timeout(RETURN_TIMEOUT, came).await {
                Ok(guest) => guests.push((pid, guest)),
                // Whoever asks again does not wait for a process that is gone.
                Err(_) => {
                    self.lost.push(pid);
                    tracing::error!(
                        pid,
                        "the process has not come back in {RETURN_TIMEOUT:?}; its connections are lost"
                    );
                }
            }
        }
        let session = self.session;
        let mut all = AllMade::default();
        let mut ahead = std::mem::take(&mut self.ahead);
        let rkeys: Vec<Vec<u32>> = guests
            .iter()
            .map(|(pid, _)| {
                let contexts = ahead.get(pid).map(|ahead| &ahead.contexts);
                let rkeys = contexts.into_iter().flatten().flat_map(|context| &context.rkeys);
                rkeys.copied().collect()
            })
            .collect();
        let with_ahead: Vec<_> = guests
            .iter()
            .map(|(pid, guest)| (guest, ahead.remove(pid)))
            .collect();
        let asked = with_ahead.into_iter().map(|(guest, ahead)| async move {
            // Without one the process keeps memory and mappings of what it had, which the next dump has to write down.
            let dead = hung_up_terminal().inspect_err(|error| {
                tracing::warn!("the process cannot forget its old RNIC's objects: /dev/ptmx: {error}")
            });
            let order = guest.order(Order::MakeAgain { session }, handed(dead.ok(), ahead));
            made(in_time("making contexts again", order).await?.0)
        });
        for (((pid, _), answer), rkeys) in guests.iter().zip(join_all(asked).await).zip(rkeys) {
            let (contexts, lost) = answer?;
            self.tell_lost(*pid, &lost);
            tell_whose(*pid, &rkeys, &contexts);
            all.add(*pid, contexts);
        }
        all.keys_into(&mut self.keys);
        let tables = (0u32..).zip(&self.keys).map(|(index, (pid, _))| (*pid, index));
        let mut peers = all.peers(&self.to_make, &tables.collect());
        let connected = guests.iter().map(|(pid, guest)| {
            let peers = peers.remove(pid).unwrap_or_default();
            async move {
                let order = guest.order(Order::ConnectMade { session, peers }, Vec::new());
                made(in_time("connecting what was made again", order).await?.0)
            }
        });
        let connected: Vec<_> = connected.collect();
        for ((pid, _), answer) in guests.iter().zip(join_all(connected).await) {
            self.tell_lost(*pid, &answer?.1);
        }
        self.moved.extend(all.moved(&self.to_make));
        self.made = Some(all);
        Ok(())
    }

    fn tell_lost(&mut self, pid: u32, lost: &[String]) {
        for lost in lost {
            self.lost_rnic = true;
            tracing::error!(
                session = format!("{:016x}", self.session),
                pid,
                "after the decision {lost}; the program sees it as the end of its RNIC, or of the connection"
            );
        }
    }

    /// See [`Destination::claim`].
    async fn give_contexts(&mut self) -> anyhow::Result<u64> {
        self.begin(Phase::Switch, "RestoreRDMA", Point::DestinationClaim)
            .await?;
        if self.instance.is_none() {
            // It has run, and has ended since.
            self.must_be_committed()?;
            self.guests = Some(Vec::new());
            return Ok(0);
        }
        self.make_again().await?;
        let mut by_process: BTreeMap<u32, Vec<_>> = BTreeMap::new();
        for (pid, context) in &self.contexts {
            let handed = context.hand_over()?;
            by_process.entry(*pid).or_default().push(handed);
        }
        for (pid, _) in self.keys.iter().filter(|(pid, _)| !self.lost.contains(pid)) {
            by_process.entry(*pid).or_default();
        }
        let key_tables: Vec<_> = self.keys.iter().map(|(_, keys)| keys.clone()).collect();
        let (agent, session) = (&self.agent, self.session);
        let name = self.instance.as_ref().map(|instance| instance.name().to_owned());
        let telling = join_all(datagrams::tell_all(agent, &self.moved));
        let claims = by_process.into_iter().map(|(pid, contexts)| {
            let (fds, contexts): (Vec<_>, Vec<_>) = contexts.into_iter().unzip();
            let name = name.clone();
            let key_tables = key_tables.clone();
            async move {
                let came = agent.guests.present(name.as_deref(), pid);
                let Ok(guest) = tokio::time::timeout(RETURN_TIMEOUT, came).await else {
                    let error =
                        anyhow::anyhow!("process {pid} has not come for its contexts in {RETURN_TIMEOUT:?}");
                    return Err((Some(pid), error));
                };
                if !guest.quiesced {
                    return Ok((guest, 0));
                }
                let order = Order::Claim {
                    session,
                    contexts,
                    key_tables,
                };
                let claimed = async {
                    match in_time("claiming contexts", guest.order(order, fds)).await?.0 {
                        Answer::Claimed { replayed_receives } => Ok(replayed_receives),
                        other => Err(unexpected(&other, "Claimed")),
                    }
                };
                let replayed_receives = claimed.await.map_err(|error| (None, error))?;
                agent.guests.claimed(&guest);
                // What it has missed while it was away, and what was known here before it came.
                let endpoints = agent.datagrams.all();
                if !endpoints.is_empty() {
                    let order = Order::Moved { endpoints };
                    let told = in_time("telling where datagrams go", guest.order(order, Vec::new()));
                    told.await.map_err(|error| (None, error))?;
                }
                Ok((guest, replayed_receives))
            }
        });
        let mut replayed = 0;
        let mut guests = Vec::new();
        let mut failed = None;
        for claimed in join_all(claims).await {
            match claimed {
                Ok((guest, receives)) => {
                    replayed += receives;
                    guests.push(guest);
                }
                Err((lost, error)) => {
                    // Whoever asks again does not wait for a process that is gone.
                    self.contexts.retain(|(pid, _)| Some(*pid) != lost);
                    self.lost.extend(lost);
                    failed = Some(error);
                }
            }
        }
        // Those that have their contexts are resumed, whatever became of the others.
        self.guests = Some(guests);
        let _ = tokio::time::timeout(TELLING_TIMEOUT, telling).await;
        if let Some(error) = failed {
            return Err(error);
        }
        Ok(replayed)
    }

    /// Lets the processes' requests reach the RNIC.
    pub async fn resume(&mut self) -> anyhow::Result<Resumed> {
        self.begin(Phase::Resume, "Replay", Point::DestinationResume)
            .await?;
        self.must_be_committed()?;
        if self.resumed {
            return Ok(Resumed::default());
        }
        if self.guests.is_none() {
            // An earlier agent may have asked them; this one has taken up the session since.
            self.claim().await?;
        }
        let guests = self.guests.iter().flatten();
        let members = guests.map(|guest| Member::here(guest, Vec::new())).collect();
        let members = Members::new(&self.agent, self.session, members);
        let mut resumed = members.resume().await?;
        resumed.lost_rnic |= self.lost_rnic || self.contexts_are_alive().is_err();
        if let Some(instance) = &self.instance {
            instance.settled().await;
            instance.end_move();
        }
        // The processes have them.
        self.contexts.clear();
        if let Some(keeper) = self.keeper.take() {
            keeper.end();
        }
        self.resumed = true;
        self.turn = None;
        // The instance may move on while its source waits for a partner.
        self._reservation = None;
        self.decide(Event::Finished).await;
        // Beside the answer, which ends a blackout.
        tokio::task::spawn_blocking(allocator::return_freed_memory);
        Ok(resumed)
    }
}
