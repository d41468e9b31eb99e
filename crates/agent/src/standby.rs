//! Contexts that stand ready at a software RNIC before their program is there (pre-setup, MigrRDMA §3.2).
//!
//! The agent is a client of its RNIC like any program, and makes the objects of the road map again on a connection of
//! its own; the connection is the context, and goes to the restored process with everything on it.
//!
//! All calls here block for as long as the RNIC takes to answer, which is some 10 µs each.

use std::collections::HashMap;
use std::fs::File;
use std::net::Ipv6Addr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use verbatim_channel::{
    CM_CONTEXT, ClaimedChannel, ClaimedContext, ClaimedCq, ClaimedMr, ClaimedMw, ClaimedPd, ClaimedQp,
    ClaimedSrq, ContextRecord, Endpoint, KeyPair, MrRecord, QpRecord,
};
use verbatim_device::Connection;
use verbatim_device::control::{
    self, AddressVector, Backing, CmRequest, MOST_CM_BYTES_HERE, QpAttr, QpAttrMask, QpState, QpType, Reply,
    Request, Segment,
};
use verbatim_device::transitions::steps;
use verbatim_seqpacket::{Carried, Socket};

/// A connection to the RNIC.
pub fn connect(nic: &Path) -> anyhow::Result<Socket> {
    Socket::connect(nic).with_context(|| unreachable_at(nic))
}

/// The same to an RNIC that may hang: no call on it waits for longer.
pub fn connect_within(nic: &Path, limit: Duration) -> anyhow::Result<Socket> {
    Socket::connect_within(nic, Some(limit)).with_context(|| unreachable_at(nic))
}

fn unreachable_at(nic: &Path) -> String {
    let nic = nic.display();
    format!("cannot reach the software RNIC at {nic}; is `verbatim nic` running?")
}

/// A context at the RNIC, and the RNIC's GID table.
fn open(nic: &Path, name: &str) -> anyhow::Result<(Connection, Vec<[u8; 16]>)> {
    let request = |version| Request::OpenContext {
        version,
        name: name.to_owned(),
    };
    let (connection, received) = Connection::begin(connect(nic)?, request, &[])?;
    match received.message {
        Reply::Context { port, .. } => Ok((connection, port.gid_table())),
        other => bail!("the RNIC opens no context: {other:?}"),
    }
}

/// The `active_mtu` of the RNIC's port, as `enum ibv_mtu` numbers it.
pub fn active_mtu(nic: &Path) -> anyhow::Result<u8> {
    let request = |version| Request::OpenContext {
        version,
        name: "agent".to_owned(),
    };
    let (_connection, received) = Connection::begin(connect(nic)?, request, &[])?;
    match received.message {
        Reply::Context { port, .. } => Ok(port.active_mtu),
        other => bail!("the RNIC opens no context: {other:?}"),
    }
}

/// The RNIC's GID table.
pub fn gids(nic: &Path) -> anyhow::Result<Vec<[u8; 16]>> {
    Ok(open(nic, "agent")?.1)
}

/// Which numbers and keys the objects of a standby context have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Numbers {
    /// Those that the RNIC gives.
    New,
    /// Those that they have where they are.
    Kept,
}

impl Numbers {
    fn keep(self, number: u32) -> Option<u32> {
        (self == Self::Kept).then_some(number)
    }
}

/// A number or key that was to be kept is another object's here.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Taken(String);

/// A queue pair that stands ready.
#[derive(Debug, Clone)]
pub struct StandbyQp {
    /// Its virtual number.
    pub qpn: u32,
    /// Its physical number.
    pub physical_qpn: u32,
    /// The PSN with which it starts to send.
    pub sq_psn: u32,
    /// The steps to its state that are left, from the one that connects it on.
    rest: Vec<(QpState, QpAttrMask)>,
    attr: QpAttr,
}

/// A context that stands ready.
#[derive(Debug)]
pub struct StandbyContext {
    connection: Connection,
    claimed: ClaimedContext,
    qps: Vec<StandbyQp>,
    keys: Vec<KeyPair>,
    /// The RNIC's GID table.
    gids: Vec<[u8; 16]>,
}

impl StandbyContext {
    /// Makes the objects of `record` at the RNIC; `memory` is the process's file of adopted memory. If asked to, with the
    /// numbers and keys that they have where they are: connected queue pairs then wait in RESET for their images.
    pub fn build(
        nic: &Path,
        name: &str,
        record: &ContextRecord,
        memory: Option<&File>,
        numbers: Numbers,
    ) -> anyhow::Result<Self> {
        let (connection, gids) = open(nic, name)?;
        let claimed = ClaimedContext {
            id: record.id,
            pds: Vec::new(),
            mrs: Vec::new(),
            mws: Vec::new(),
            channels: Vec::new(),
            cqs: Vec::new(),
            srqs: Vec::new(),
            qps: Vec::new(),
        };
        let mut this = Self {
            connection,
            claimed,
            qps: Vec::new(),
            keys: Vec::new(),
            gids,
        };
        let mut pds = HashMap::new();
        for pd in &record.pds {
            let Reply::Pd { pd: physical_pd } = this.call(&Request::AllocPd, &[])? else {
                bail!(confused())
            };
            pds.insert(pd.pd, physical_pd);
            this.claimed.pds.push(ClaimedPd {
                pd: pd.pd,
                physical_pd,
            });
        }
        for mr in &record.mrs {
            this.register(
                mr,
                *pds.get(&mr.pd).context("a memory region without its PD")?,
                memory,
                numbers,
            )?;
        }
        for mw in &record.mws {
            let request = Request::AllocMw {
                pd: *pds.get(&mw.pd).context("a memory window without its PD")?,
                mw_type: mw.mw_type,
                rkey: numbers.keep(mw.physical_rkey),
            };
            let Reply::Mw { rkey: physical_rkey } = this.call(&request, &[])? else {
                bail!(confused())
            };
            this.claimed.mws.push(ClaimedMw {
                rkey: mw.rkey,
                physical_rkey,
            });
            this.keys.push(KeyPair {
                virtual_key: mw.rkey,
                physical_key: physical_rkey,
                any_tag: true,
            });
        }
        let mut channels = HashMap::new();
        for channel in &record.channels {
            // Nobody is told of anything until the program gives the channel's own end.
            let (end, _) = socket_pair()?;
            let Reply::CompChannel {
                channel: physical_channel,
            } = this.call(&Request::CreateCompChannel, &[end.as_fd()])?
            else {
                bail!(confused())
            };
            channels.insert(channel.channel, physical_channel);
            this.claimed.channels.push(ClaimedChannel {
                channel: channel.channel,
                physical_channel,
            });
        }
        let mut cqs = HashMap::new();
        for cq in &record.cqs {
            let missing = "a completion queue without its channel";
            let channel = cq
                .channel
                .map(|channel| channels.get(&channel).copied().context(missing));
            let Reply::Cq {
                cq: physical_cq,
                entries,
                offset,
            } = this.call(
                &Request::CreateCq {
                    entries: cq.entries,
                    channel: channel.transpose()?,
                    event: Some(cq.cq),
                },
                &[],
            )?
            else {
                bail!(confused())
            };
            cqs.insert(cq.cq, physical_cq);
            this.claimed.cqs.push(ClaimedCq {
                cq: cq.cq,
                physical_cq,
                entries,
                offset,
            });
        }
        let mut srqs = HashMap::new();
        for srq in &record.srqs {
            let request = Request::CreateSrq {
                pd: *pds
                    .get(&srq.pd)
                    .context("a shared receive queue without its PD")?,
                attr: srq.attr,
            };
            let Reply::Srq {
                srq: physical_srq,
                attr,
                offset,
            } = this.call(&request, &[])?
            else {
                bail!(confused())
            };
            srqs.insert(srq.srq, physical_srq);
            this.claimed.srqs.push(ClaimedSrq {
                srq: srq.srq,
                physical_srq,
                attr,
                offset,
            });
        }
        for qp in &record.qps {
            this.create_qp(qp, &pds, &cqs, &srqs, numbers)?;
        }
        // Nothing arrives before somebody looks after it: datagrams of a group would.
        this.call(&Request::ParkContext, &[])?;
        Ok(this)
    }

    /// Makes a context for a process's ids of rdma_cm, at which all that they need is kept free for them. `from` is the host where they
    /// are.
    pub fn build_cm(nic: &Path, name: &str, needs: &[u8], from: [u8; 16]) -> anyhow::Result<Self> {
        let (connection, gids) = open(nic, name)?;
        if connection.version() < control::CM_VERSION {
            bail!(
                "the program has connections by rdma_cm, which the software RNIC does not know: upgrade it"
            );
        }
        let this = Self {
            connection,
            claimed: ClaimedContext {
                id: CM_CONTEXT,
                pds: Vec::new(),
                mrs: Vec::new(),
                mws: Vec::new(),
                channels: Vec::new(),
                cqs: Vec::new(),
                srqs: Vec::new(),
                qps: Vec::new(),
            },
            qps: Vec::new(),
            keys: Vec::new(),
            gids,
        };
        let (needs, memory) = Carried::new(needs.to_vec(), MOST_CM_BYTES_HERE)?;
        let fds: Vec<_> = memory.iter().map(AsFd::as_fd).collect();
        this.call(&Request::Cm(CmRequest::Reserve { needs, from }), &fds)?;
        this.call(&Request::ParkContext, &[])?;
        Ok(this)
    }

    fn call(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> anyhow::Result<Reply> {
        match self.connection.call(request, fds)?.message {
            Reply::Error { errno, message } => {
                let os = std::io::Error::from_raw_os_error(errno);
                match errno {
                    libc::EEXIST => Err(Taken(message).into()),
                    _ => bail!("the RNIC refuses: {message} ({os})"),
                }
            }
            reply => Ok(reply),
        }
    }

    fn register(
        &mut self,
        mr: &MrRecord,
        pd: u32,
        memory: Option<&File>,
        numbers: Numbers,
    ) -> anyhow::Result<()> {
        let segments: Vec<_> = mr
            .segments
            .iter()
            .map(|segment| Segment {
                address: segment.address,
                length: segment.length,
                backing: match segment.offset {
                    Some(offset) => Backing::File { fd_index: 0, offset },
                    None => Backing::Process,
                },
            })
            .collect();
        let adopted = segments.iter().any(|segment| segment.backing != Backing::Process);
        let fds = match (adopted, memory) {
            (true, Some(file)) => vec![file.as_fd()],
            (true, None) => bail!("the file of adopted memory is missing"),
            (false, _) => Vec::new(),
        };
        let request = Request::RegMr {
            pd,
            address: mr.address,
            length: mr.length,
            iova: mr.iova,
            access: mr.access,
            segments,
            key: numbers.keep(mr.physical_lkey),
        };
        let Reply::Mr { lkey, rkey } = self.call(&request, &fds)? else {
            bail!(confused())
        };
        self.claimed.mrs.push(ClaimedMr {
            lkey: mr.lkey,
            physical_lkey: lkey,
            physical_rkey: rkey,
        });
        self.keys.push(KeyPair {
            virtual_key: mr.rkey,
            physical_key: rkey,
            any_tag: false,
        });
        Ok(())
    }

    fn create_qp(
        &mut self,
        qp: &QpRecord,
        pds: &HashMap<u32, u32>,
        cqs: &HashMap<u32, u32>,
        srqs: &HashMap<u32, u32>,
        numbers: Numbers,
    ) -> anyhow::Result<()> {
        let missing = "a queue pair without its PD, CQ or SRQ";
        let srq = qp.srq.map(|srq| srqs.get(&srq).copied().context(missing));
        let request = Request::CreateQp {
            pd: *pds.get(&qp.pd).context(missing)?,
            send_cq: *cqs.get(&qp.send_cq).context(missing)?,
            recv_cq: *cqs.get(&qp.recv_cq).context(missing)?,
            qp_type: qp.qp_type,
            cap: qp.cap,
            srq: srq.transpose()?,
            qpn: numbers.keep(qp.physical_qpn),
        };
        let Reply::Qp {
            qpn: physical_qpn,
            cap,
            slot,
            offset,
        } = self.call(&request, &[])?
        else {
            bail!(confused())
        };
        let attr = &qp.attr;
        let whole = steps(qp.qp_type, attr.state).with_context(|| {
            format!(
                "queue pair {:#x} is in SQE after a failed request; it can be moved when the program has taken it back to RTS",
                qp.qpn
            )
        })?;
        // The rest of the way needs the other end.
        let alone = match (is_connected(qp), numbers) {
            (true, Numbers::New) => 1,
            (true, Numbers::Kept) => 0,
            (false, _) => whole.len(),
        };
        for (state, mask) in &whole[..alone] {
            self.modify(physical_qpn, *mask, attr, *state)?;
        }
        for gid in &qp.groups {
            let qpn = physical_qpn;
            self.call(&Request::AttachMcast { qpn, gid: *gid }, &[])?;
        }
        self.claimed.qps.push(ClaimedQp {
            qpn: qp.qpn,
            physical_qpn,
            cap,
            slot,
            offset,
            remote: None,
            sgid_index: None,
            key_table: None,
        });
        self.qps.push(StandbyQp {
            qpn: qp.qpn,
            physical_qpn,
            sq_psn: rand::random::<u32>() & 0xff_ffff,
            rest: whole[alone..].to_vec(),
            attr: *attr,
        });
        Ok(())
    }

    fn modify(&self, qpn: u32, mask: QpAttrMask, attr: &QpAttr, state: QpState) -> anyhow::Result<()> {
        self.call(
            &Request::ModifyQp {
                qpn,
                mask,
                attr: QpAttr { state, ..*attr },
            },
            &[],
        )?;
        Ok(())
    }

    /// One of the queue pairs is not connected here, but gets an image of one whose other end is at `remote`, and goes on by
    /// the GID `own`.
    pub fn expect_image(&mut self, physical_qpn: u32, own: [u8; 16], remote: Endpoint) -> anyhow::Result<()> {
        let sgid_index = self.gid_index(own)?;
        let mut claimed = self.claimed.qps.iter_mut();
        if let Some(qp) = claimed.find(|qp| qp.physical_qpn == physical_qpn) {
            (qp.remote, qp.sgid_index) = (Some(remote), Some(sgid_index));
        }
        Ok(())
    }

    fn gid_index(&self, gid: [u8; 16]) -> anyhow::Result<u8> {
        let index = self.gids.iter().position(|own| *own == gid);
        let index =
            index.with_context(|| format!("the RNIC has no GID {} (any more)", Ipv6Addr::from(gid)))?;
        Ok(u8::try_from(index)?)
    }

    /// Connects one of the queue pairs, by the GID `own`, to `remote`, which starts to send with `rq_psn`, or as the programs
    /// have agreed.
    pub fn connect(
        &mut self,
        physical_qpn: u32,
        own: [u8; 16],
        remote: Endpoint,
        rq_psn: Option<u32>,
    ) -> anyhow::Result<()> {
        let sgid_index = self.gid_index(own)?;
        let unknown = "no such standby queue pair";
        let qp = self
            .qps
            .iter()
            .find(|qp| qp.physical_qpn == physical_qpn)
            .context(unknown)?;
        let av = AddressVector {
            dgid: remote.gid,
            sgid_index,
            ..qp.attr.av
        };
        let mut attr = QpAttr {
            av,
            dest_qpn: remote.qpn,
            ..qp.attr
        };
        if let Some(rq_psn) = rq_psn {
            (attr.rq_psn, attr.sq_psn) = (rq_psn, qp.sq_psn);
        }
        for (state, mask) in &qp.rest {
            self.modify(physical_qpn, *mask, &attr, *state)?;
        }
        let claimed = self
            .claimed
            .qps
            .iter_mut()
            .find(|qp| qp.physical_qpn == physical_qpn)
            .context(unknown)?;
        (claimed.remote, claimed.sgid_index) = (Some(remote), Some(sgid_index));
        Ok(())
    }

    /// One of the queue pairs is connected to a process whose remote keys are in table `table` of the claim.
    pub fn set_key_table(&mut self, physical_qpn: u32, table: u32) {
        if let Some(qp) = self
            .claimed
            .qps
            .iter_mut()
            .find(|qp| qp.physical_qpn == physical_qpn)
        {
            qp.key_table = Some(table);
        }
    }

    /// The queue pairs, in the order of the road map.
    pub fn qps(&self) -> &[StandbyQp] {
        &self.qps
    }

    /// The RNIC's GID table.
    pub fn gids(&self) -> &[[u8; 16]] {
        &self.gids
    }

    /// The remote keys.
    pub fn keys(&self) -> &[KeyPair] {
        &self.keys
    }

    /// A copy of what the process needs: the connection, and how its objects are to be found. The context lives as long
    /// as any of the copies.
    pub fn hand_over(&self) -> anyhow::Result<(OwnedFd, ClaimedContext)> {
        let connection = self.connection.socket().as_fd().try_clone_to_owned()?;
        Ok((connection, self.claimed.clone()))
    }

    /// What [`Self::hand_over`] has given.
    pub fn take_over(connection: OwnedFd, claimed: ClaimedContext) -> Self {
        Self {
            connection: Connection::taken_over(Socket::from_fd(connection)),
            claimed,
            qps: Vec::new(),
            keys: Vec::new(),
            gids: Vec::new(),
        }
    }

    /// Whether its RNIC is still there.
    pub fn is_alive(&self) -> bool {
        is_open(self.connection.socket())
    }

    /// The physical numbers of its queue pairs.
    pub fn physical_qpns(&self) -> impl Iterator<Item = u32> {
        self.claimed.qps.iter().map(|qp| qp.physical_qpn)
    }
}

/// Whether the RNIC of a connection is still there.
pub fn is_open(socket: &Socket) -> bool {
    let mut ends = [PollFd::new(socket, PollFlags::empty())];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    matches!(rustix::event::poll(&mut ends, Some(&now)), Ok(0))
}

/// Whether a queue pair of a connection may still be connected, by either end.
pub fn is_unconnected(qp: &QpRecord) -> bool {
    qp.qp_type != QpType::Ud && matches!(qp.attr.state, QpState::Reset | QpState::Init)
}

/// Whether a queue pair may have sent something.
pub fn sends(qp: &QpRecord) -> bool {
    matches!(qp.attr.state, QpState::Rts | QpState::Sqd)
}

/// Whether a queue pair has another end that must be connected again.
pub fn is_connected(qp: &QpRecord) -> bool {
    qp.remote.is_some() && matches!(qp.attr.state, QpState::Rtr | QpState::Rts | QpState::Sqd)
}

fn socket_pair() -> anyhow::Result<(OwnedFd, OwnedFd)> {
    let (family, flags) = (AddressFamily::UNIX, SocketFlags::CLOEXEC);
    rustix::net::socketpair(family, SocketType::SEQPACKET, flags, None).context("socketpair")
}

fn confused() -> &'static str {
    "the RNIC answers something else than was asked; are agent and RNIC of the same version?"
}
