//! Contexts that the instance's processes make again where it moves to, as the agents know them (`verbatim_channel::MadeAgain`).
//!
//! Nobody can make them ahead of the decision, so what is connected before it of other contexts is connected after it of these:
//!
//! ```text
//!   before:  the partners make standby queue pairs, and are told which of them wait
//!   after:   destination: MakeAgain, ConnectMade, Claim ─► driver ─► partners: PartnerConnect, PartnerSwitch
//! ```

use std::collections::{BTreeMap, HashMap};

use anyhow::Context;
use serde::{Deserialize, Serialize};
use verbatim_channel::{ContextRecord, Endpoint, KeyPair, MadeContext, MadePeer, MovedEndpoint, StandbyPeer};
use verbatim_device::control::QpType;
use verbatim_device::gids::counterpart;

use super::{ProcessKeys, encode};
use crate::proto::{MadeConnection, MadeEnd, NewQp};

/// A connection of such a context, as the destination must know it until it is connected.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Made {
    connection: u32,
    /// The instance's end, by process and virtual number.
    own: (u32, u32),
    /// It is connected.
    connected: bool,
    /// The host whose standby queue pair is at the other end, if one is.
    partner: Option<String>,
    other: Other,
    /// The PSN with which the other end starts to send.
    sq_psn: u32,
    /// Both ends may have sent something: new PSNs.
    sends: bool,
}

/// The other end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Other {
    /// It is here.
    Known(Endpoint),
    /// It is made again, too.
    Own(u32, u32),
}

impl TryFrom<MadeConnection> for Made {
    type Error = anyhow::Error;

    fn try_from(told: MadeConnection) -> anyhow::Result<Self> {
        Ok(Self {
            connection: told.connection,
            own: (told.pid, told.qpn),
            connected: told.connected,
            partner: (!told.partner.is_empty()).then_some(told.partner),
            other: match told.remote {
                Some(remote) => Other::Known(remote.try_into()?),
                None => Other::Own(told.other_pid, told.other_qpn),
            },
            sq_psn: told.sq_psn,
            sends: told.sends,
        })
    }
}

/// A context of which nothing was made ahead.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MadeRecord {
    pid: u32,
    id: u32,
    gids: Vec<[u8; 16]>,
    moves: u32,
    /// Queue pairs of datagrams.
    datagrams: Vec<u32>,
}

impl MadeRecord {
    pub fn new(pid: u32, record: &ContextRecord) -> Self {
        let datagrams = record.qps.iter().filter(|qp| qp.qp_type == QpType::Ud);
        Self {
            pid,
            id: record.id,
            gids: record.gids.clone(),
            moves: record.moves,
            datagrams: datagrams.map(|qp| qp.qpn).collect(),
        }
    }
}

/// All that a session's destination knows of such contexts.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct ToMake {
    pub connections: Vec<Made>,
    pub records: Vec<MadeRecord>,
}

impl ToMake {
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// The processes that have such contexts.
    pub fn pids(&self) -> Vec<u32> {
        let mut pids: Vec<_> = self.records.iter().map(|record| record.pid).collect();
        pids.dedup();
        pids
    }
}

/// What all processes have made.
#[derive(Debug, Clone, Default)]
pub struct AllMade {
    contexts: Vec<(u32, MadeContext)>,
}

impl AllMade {
    pub fn add(&mut self, pid: u32, contexts: Vec<MadeContext>) {
        self.contexts
            .extend(contexts.into_iter().map(|context| (pid, context)));
    }

    fn qps(&self) -> HashMap<(u32, u32), (Endpoint, u32)> {
        let of_context = |(pid, context): &(u32, MadeContext)| {
            let pid = *pid;
            let qps = context.qps.iter();
            qps.map(move |qp| ((pid, qp.qpn), (qp.own, qp.sq_psn)))
                .collect::<Vec<_>>()
        };
        self.contexts.iter().flat_map(of_context).collect()
    }

    /// To what each process's queue pairs are to be connected. Those whose other end was lost stay unconnected.
    pub fn peers(&self, to_make: &ToMake, tables: &HashMap<u32, u32>) -> BTreeMap<u32, Vec<MadePeer>> {
        let qps = self.qps();
        let mut peers: BTreeMap<u32, Vec<MadePeer>> = BTreeMap::new();
        for made in to_make.connections.iter().filter(|made| made.connected) {
            let (pid, qpn) = made.own;
            let (remote, psn, key_table) = match made.other {
                Other::Known(remote) => (remote, made.sq_psn, None),
                Other::Own(pid, qpn) => match qps.get(&(pid, qpn)) {
                    Some((own, psn)) => (*own, *psn, tables.get(&pid).copied()),
                    None => continue,
                },
            };
            peers.entry(pid).or_default().push(MadePeer {
                peer: StandbyPeer {
                    qpn,
                    remote,
                    rq_psn: made.sends.then_some(psn),
                },
                key_table,
            });
        }
        peers
    }

    /// What the partners' hosts are to be told. Also of what could not be made: else they would wait for it.
    pub fn ends(&self, to_make: &ToMake) -> Vec<MadeEnd> {
        let qps = self.qps();
        let connections = to_make.connections.iter();
        let ends = connections.filter_map(|made| {
            let own = qps.get(&made.own);
            Some(MadeEnd {
                partner: made.partner.clone()?,
                connection: made.connection,
                remote: own.map(|(own, _)| (*own).into()),
                rq_psn: own.filter(|_| made.sends).map(|(_, psn)| *psn),
                pid: made.own.0,
            })
        });
        ends.collect()
    }

    /// Where the queue pairs are found.
    pub fn new_qps(&self) -> Vec<NewQp> {
        let qps = self.qps().into_iter();
        let new = qps.map(|((pid, qpn), (own, sq_psn))| NewQp {
            pid,
            qpn,
            physical_qpn: own.qpn,
            sq_psn,
            gid: own.gid.to_vec(),
        });
        new.collect()
    }

    /// Adds the processes' keys.
    pub fn keys_into(&self, keys: &mut ProcessKeys) {
        for (pid, context) in &self.contexts {
            if let Some((_, of_process)) = keys.iter_mut().find(|(owner, _)| owner == pid) {
                let known: Vec<u32> = of_process.iter().map(|pair| pair.virtual_key).collect();
                let new = context.keys.iter();
                let new = new.filter(|pair| !known.contains(&pair.virtual_key));
                let new: Vec<KeyPair> = new.copied().collect();
                of_process.extend(new);
            }
        }
    }

    /// Queue pairs of datagrams, which anybody may send to: under each GID that programs know.
    pub fn moved(&self, to_make: &ToMake) -> Vec<MovedEndpoint> {
        let qps = self.qps();
        let mut moved = Vec::new();
        for record in &to_make.records {
            let made = self.contexts.iter();
            let mut made = made.filter(|(pid, context)| (*pid, context.id) == (record.pid, record.id));
            let Some((_, context)) = made.next() else { continue };
            for known in &record.gids {
                let Some(index) = counterpart(&record.gids, *known, &context.gids) else {
                    continue;
                };
                let now = record.datagrams.iter().filter_map(|qpn| {
                    let (own, _) = qps.get(&(record.pid, *qpn))?;
                    Some(MovedEndpoint {
                        known: Endpoint {
                            gid: *known,
                            qpn: *qpn,
                        },
                        now: Endpoint {
                            gid: context.gids[index],
                            qpn: own.qpn,
                        },
                        moves: record.moves + 1,
                    })
                });
                moved.extend(now);
            }
        }
        moved
    }
}

/// What one partner's host is told before it switches, from what the destination has said of all.
pub fn partner_request(
    session: u64,
    host: &str,
    ends: &[MadeEnd],
    keys: &ProcessKeys,
) -> anyhow::Result<Option<crate::proto::PartnerConnectRequest>> {
    let ends: Vec<_> = ends.iter().filter(|end| end.partner == host).collect();
    if ends.is_empty() {
        return Ok(None);
    }
    let (mut peers, mut tables) = (Vec::new(), Vec::new());
    for end in ends {
        if end.remote.is_some() {
            let table = keys.iter().position(|(pid, _)| *pid == end.pid);
            let table = table.context("a connection of a process without keys")?;
            tables.push(crate::proto::PartnerTable {
                connection: end.connection,
                table: table as u32,
            });
        }
        peers.push(crate::proto::PartnerPeer {
            connection: end.connection,
            remote: end.remote.clone(),
            rq_psn: end.rq_psn,
        });
    }
    Ok(Some(crate::proto::PartnerConnectRequest {
        session,
        peers,
        keys: encode(&keys.iter().map(|(_, keys)| keys).collect::<Vec<_>>()),
        tables,
        made_again: Vec::new(),
        marks: false,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PSN: u32 = 77;

    fn made(connection: u32, qpn: u32) -> Made {
        Made {
            connection,
            own: (1, qpn),
            connected: true,
            partner: Some("b".to_owned()),
            other: Other::Known(endpoint(900)),
            sq_psn: 5,
            sends: true,
        }
    }

    fn endpoint(qpn: u32) -> Endpoint {
        Endpoint { gid: [1; 16], qpn }
    }

    #[test]
    fn partners_are_told_of_what_was_made_and_of_what_was_lost() {
        let to_make = ToMake {
            connections: vec![made(3, 17), made(4, 18)],
            records: Vec::new(),
        };
        let mut all = AllMade::default();
        let qp = verbatim_channel::MadeQp {
            qpn: 17,
            own: endpoint(40),
            sq_psn: PSN,
        };
        all.add(
            1,
            vec![MadeContext {
                id: 0,
                gids: Vec::new(),
                qps: vec![qp],
                keys: Vec::new(),
            }],
        );
        let ends = all.ends(&to_make);
        let told: Vec<_> = ends
            .iter()
            .map(|end| {
                (
                    end.connection,
                    end.remote.as_ref().map(|remote| remote.qpn),
                    end.rq_psn,
                )
            })
            .collect();
        assert_eq!(told, [(3, Some(40), Some(PSN)), (4, None, None)]);

        // Of a process whose only context is lost nobody has keys.
        let request = partner_request(9, "b", &ends, &vec![(1, Vec::new())])
            .unwrap()
            .unwrap();
        assert_eq!((request.peers.len(), request.tables.len()), (2, 1));
        let request = partner_request(9, "b", &AllMade::default().ends(&to_make), &Vec::new());
        assert_eq!(request.unwrap().unwrap().tables.len(), 0);
        assert!(partner_request(9, "c", &ends, &Vec::new()).unwrap().is_none());
    }
}
