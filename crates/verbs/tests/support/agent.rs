//! The agents of a test: they order the guest libraries about and prepare contexts at RNICs.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};

use verbatim_channel::{
    Answer, ClaimedContext, ClaimedCq, ClaimedMr, ClaimedPd, ClaimedQp, Endpoint, GATE_NAME, Gate, Greeting,
    MEMORY_DIR, MovedEndpoint, Order, RoadMap, SOCKET_NAME, StandbyQp,
};
use verbatim_device::control::{Backing, Reply, Request, SOCKET_NAME as NIC_SOCKET, Segment, VERSION};
use verbatim_seqpacket::{Listener, Socket};
use verbatim_verbs::{QpAttr, QpState};

use super::Nic;
use super::end::STEPS;

/// One process's agent.
pub struct Agent {
    listener: Listener,
    pub gate: Gate,
    socket: Option<Socket>,
}

impl Agent {
    /// Before the program opens its device.
    pub fn new(nic: &Nic) -> Self {
        Self {
            listener: Listener::bind(&nic.path().join(SOCKET_NAME)).unwrap(),
            gate: Gate::open(&nic.path().join(GATE_NAME), true).unwrap(),
            socket: None,
        }
    }

    /// Takes the guest library's connection, after the question by which it learns the version; whether it waits for its claim.
    pub fn accept(&mut self) -> bool {
        loop {
            let socket = self.listener.accept().unwrap();
            match verbatim_channel::recv::<Greeting>(&socket).unwrap().0 {
                Greeting::Ways { .. } => {
                    verbatim_channel::send(&socket, &Vec::<MovedEndpoint>::new(), &[]).unwrap();
                }
                greeting => {
                    self.socket = Some(socket);
                    return matches!(greeting, Greeting::Process { quiesced: true, .. });
                }
            }
        }
    }

    /// Answers the one question of where an endpoint is: where it was.
    pub fn resolve(&self) {
        let socket = self.listener.accept().unwrap();
        let (greeting, _) = verbatim_channel::recv::<Greeting>(&socket).unwrap();
        let Greeting::Resolve { endpoint, .. } = greeting else {
            panic!("{greeting:?}")
        };
        let resolved = verbatim_channel::Resolved {
            endpoint,
            keys: Vec::new(),
        };
        verbatim_channel::send(&socket, &resolved, &[]).unwrap();
    }

    pub fn order(&self, order: &Order) -> Answer {
        self.order_with(order, &[]).0
    }

    /// Gives an order that is refused; why it is.
    pub fn refused(&self, order: &Order) -> String {
        let socket = self.socket.as_ref().unwrap();
        verbatim_channel::send(socket, order, &[]).unwrap();
        match verbatim_channel::recv(socket).unwrap().0 {
            Answer::Error { message } => message,
            answer => panic!("{order:?}: {answer:?}"),
        }
    }

    pub fn order_with(&self, order: &Order, fds: &[OwnedFd]) -> (Answer, Vec<OwnedFd>) {
        let socket = self.socket.as_ref().unwrap();
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        verbatim_channel::send(socket, order, &fds).unwrap();
        let (answer, fds) = verbatim_channel::recv(socket).unwrap();
        if let Answer::Error { message } = answer {
            panic!("{message}");
        }
        (answer, fds)
    }

    /// After `Quiesced`: waits for the end of the connection, as before a freeze.
    pub fn wait_for_end(&mut self) {
        let end = verbatim_channel::recv::<Answer>(&self.socket.take().unwrap()).unwrap_err();
        assert!(matches!(end, verbatim_seqpacket::Error::Closed), "{end}");
    }
}

/// A context at another RNIC with the same objects, numbered differently.
pub struct Replacement {
    connection: Socket,
    pub claimed: ClaimedContext,
}

impl Replacement {
    /// Makes the objects of a road map; the memory is in the files of `home`, where the process runs.
    pub fn prepare(nic: &Nic, home: &Nic, map: &RoadMap) -> Self {
        let [context] = &map.contexts[..] else {
            panic!("one context")
        };
        let connection = Socket::connect(&nic.path().join(NIC_SOCKET)).unwrap();
        let open = Request::OpenContext {
            version: VERSION,
            name: "replacement".to_owned(),
        };
        call(&connection, &open, None);
        let Reply::Pd { pd } = call(&connection, &Request::AllocPd, None) else {
            panic!("no PD")
        };
        let file = home.path().join(MEMORY_DIR).join(map.pid.to_string());
        let file = File::options().read(true).write(true).open(file).ok();
        let mrs = context.mrs.iter().map(|mr| {
            let segments = mr.segments.iter().map(|segment| Segment {
                address: segment.address,
                length: segment.length,
                backing: match segment.offset {
                    Some(offset) => Backing::File { fd_index: 0, offset },
                    None => Backing::Process,
                },
            });
            let request = Request::RegMr {
                pd,
                address: mr.address,
                length: mr.length,
                iova: mr.iova,
                access: mr.access,
                segments: segments.collect(),
                key: None,
            };
            // Twice, so that the keys are not the old ones.
            call(&connection, &request, file.as_ref());
            let Reply::Mr { lkey, rkey } = call(&connection, &request, file.as_ref()) else {
                panic!("no MR")
            };
            ClaimedMr {
                lkey: mr.lkey,
                physical_lkey: lkey,
                physical_rkey: rkey,
            }
        });
        let mrs = mrs.collect();
        let cqs = context.cqs.iter().map(|cq| {
            let request = Request::CreateCq {
                entries: cq.entries,
                channel: None,
                event: None,
            };
            let reply = call(&connection, &request, None);
            let Reply::Cq {
                cq: physical_cq,
                entries,
                offset,
            } = reply
            else {
                panic!("{reply:?}")
            };
            ClaimedCq {
                cq: cq.cq,
                physical_cq,
                entries,
                offset,
            }
        });
        let cqs: Vec<ClaimedCq> = cqs.collect();
        let physical_cq = |cq| cqs.iter().find(|claimed| claimed.cq == cq).unwrap().physical_cq;
        let qps = context.qps.iter().map(|qp| {
            let request = Request::CreateQp {
                pd,
                send_cq: physical_cq(qp.send_cq),
                recv_cq: physical_cq(qp.recv_cq),
                qp_type: qp.qp_type,
                cap: qp.cap,
                srq: None,
                qpn: None,
            };
            call(&connection, &request, None);
            let reply = call(&connection, &request, None);
            let Reply::Qp {
                qpn,
                cap,
                slot,
                offset,
            } = reply
            else {
                panic!("{reply:?}")
            };
            ClaimedQp {
                qpn: qp.qpn,
                physical_qpn: qpn,
                cap,
                slot,
                offset,
                remote: None,
                sgid_index: None,
                key_table: None,
            }
        });
        let qps = qps.collect();
        Self {
            claimed: ClaimedContext {
                id: context.id,
                pds: vec![ClaimedPd {
                    pd: context.pds[0].pd,
                    physical_pd: pd,
                }],
                mrs,
                cqs,
                mws: Vec::new(),
                channels: Vec::new(),
                srqs: Vec::new(),
                qps,
            },
            connection,
        }
    }

    /// Connects its only queue pair to a partner's standby.
    pub fn connect(&mut self, map: &RoadMap, partner: &Nic, standby: &StandbyQp, sq_psn: u32) {
        let attr = map.contexts[0].qps[0].attr;
        let remote = Endpoint {
            gid: partner.gid(),
            qpn: standby.physical_qpn,
        };
        assert_eq!(attr.state, QpState::Rts);
        let qp = &mut self.claimed.qps[0];
        for (state, mask) in STEPS {
            let mut attr = QpAttr { state, ..attr };
            attr.av.dgid = remote.gid;
            attr.dest_qpn = remote.qpn;
            attr.rq_psn = standby.sq_psn;
            attr.sq_psn = sq_psn;
            let request = Request::ModifyQp {
                qpn: qp.physical_qpn,
                mask,
                attr,
            };
            call(&self.connection, &request, None);
        }
        qp.remote = Some(remote);
    }

    pub fn into_parts(self) -> (OwnedFd, ClaimedContext) {
        (self.connection.into_fd(), self.claimed)
    }
}

fn call(connection: &Socket, request: &Request, file: Option<&File>) -> Reply {
    let fds: Vec<_> = file.iter().map(|file| file.as_fd()).collect();
    match connection.call::<_, Reply>(request, &fds).unwrap().message {
        Reply::Error { errno, message } => panic!("{request:?}: {errno}: {message}"),
        reply => reply,
    }
}
