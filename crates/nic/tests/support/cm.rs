//! Programs that connect by address and port.

use std::net::SocketAddr;
use std::os::fd::AsFd;

use verbatim_device::control::{
    CmDetails, CmEvent, CmNews, CmParameters, CmReply, CmRequest, QpAttrMask, QpState, Reply, Request,
};
use verbatim_seqpacket::Socket;

use super::{Program, Server, wait_for};

pub const TCP: u16 = 0x0106;
pub const UDP: u16 = 0x0111;
pub const RC: u8 = 2;

/// `enum rdma_cm_event_type`
pub const ADDR_RESOLVED: u32 = 0;
pub const ADDR_ERROR: u32 = 1;
pub const ROUTE_RESOLVED: u32 = 2;
pub const CONNECT_REQUEST: u32 = 4;
pub const CONNECT_RESPONSE: u32 = 5;
pub const UNREACHABLE: u32 = 7;
pub const REJECTED: u32 = 8;
pub const ESTABLISHED: u32 = 9;
pub const DISCONNECTED: u32 = 10;

/// A program with a channel.
pub struct Caller {
    pub program: Program,
    pub channel: u32,
    pub news: Socket,
}

impl Caller {
    pub fn new(server: &Server) -> Self {
        Self::of(Program::connect(&server.socket(), "caller"))
    }

    pub fn of(program: Program) -> Self {
        let (news, theirs) = Socket::pair().unwrap();
        news.set_nonblocking(true).unwrap();
        let request = Request::Cm(CmRequest::CreateChannel);
        let reply = program.ask(&request, &[theirs.as_fd()]).unwrap();
        let Reply::Cm(CmReply::Channel { channel }) = reply else {
            panic!("{reply:?}");
        };
        Self {
            program,
            channel,
            news,
        }
    }

    pub fn call(&self, request: CmRequest) -> CmReply {
        match self.program.call(Request::Cm(request)) {
            Reply::Cm(reply) => reply,
            other => panic!("{other:?}"),
        }
    }

    pub fn errno(&self, request: CmRequest) -> i32 {
        self.program.errno(Request::Cm(request))
    }

    pub fn id(&self, uid: u64, port_space: u16) -> u32 {
        let (channel, qp_type) = (self.channel, RC);
        match self.call(CmRequest::CreateId {
            channel,
            uid,
            port_space,
            qp_type,
        }) {
            CmReply::Id { id } => id,
            other => panic!("{other:?}"),
        }
    }

    /// Whether the channel says that it has events, and takes the message out if so.
    pub fn take_news(&self) -> bool {
        self.news.recv::<CmNews>().is_ok()
    }

    pub fn event(&self) -> CmEvent {
        let channel = self.channel;
        let next = || match self
            .program
            .ask(&Request::Cm(CmRequest::GetEvent { channel }), &[])
        {
            Ok(Reply::Cm(CmReply::Event { event, quiet })) => Some((event, quiet)),
            Ok(other) => panic!("{other:?}"),
            Err((libc::EAGAIN, _)) => None,
            Err(error) => panic!("{error:?}"),
        };
        let (event, quiet) = wait_for("an event", next);
        if quiet {
            assert!(self.take_news(), "a channel with events is readable");
        }
        event
    }

    pub fn expect(&self, kind: u32) -> CmEvent {
        let event = self.event();
        assert_eq!(event.event, kind, "{event:?}");
        event
    }

    pub fn listen(&self, address: SocketAddr) -> u32 {
        let id = self.id(7, TCP);
        self.call(CmRequest::Bind { id, address });
        self.call(CmRequest::Listen { id, backlog: 10 });
        id
    }

    /// An id with a resolved route.
    pub fn resolve(&self, uid: u64, port_space: u16, destination: SocketAddr) -> u32 {
        let id = self.id(uid, port_space);
        self.call(CmRequest::ResolveAddress {
            id,
            source: None,
            destination,
            timeout_ms: 1000,
        });
        assert_eq!(self.expect(ADDR_RESOLVED).uid, uid);
        self.call(CmRequest::ResolveRoute { id, timeout_ms: 1000 });
        self.expect(ROUTE_RESOLVED);
        id
    }

    pub fn connect(&self, id: u32, private_data: &[u8]) {
        let parameters = parameters(0x111, private_data);
        self.call(CmRequest::Connect { id, parameters });
    }

    pub fn attributes(&self, id: u32, state: QpState) -> (QpAttrMask, verbatim_device::control::QpAttr) {
        match self.call(CmRequest::InitQpAttr { id, state }) {
            CmReply::QpAttr { mask, attr } => (mask, attr),
            other => panic!("{other:?}"),
        }
    }

    pub fn reported(&self, request: CmRequest) -> u32 {
        match self.call(request) {
            CmReply::Reported { events, quiet } => {
                if quiet {
                    assert!(self.take_news(), "a channel with events was readable");
                }
                events
            }
            other => panic!("{other:?}"),
        }
    }
}

pub fn parameters(qp_num: u32, private_data: &[u8]) -> CmParameters {
    CmParameters {
        qp_num,
        private_data: private_data.to_vec(),
        responder_resources: 3,
        initiator_depth: 2,
        retry_count: 5,
        rnr_retry_count: 6,
        ..CmParameters::default()
    }
}

pub fn connection(event: &CmEvent) -> &CmParameters {
    match &event.details {
        CmDetails::Connection(parameters) => parameters,
        other => panic!("{other:?}"),
    }
}

pub fn at(server: &Server, port: u16) -> SocketAddr {
    SocketAddr::new(server.address, port)
}

/// A connection between two callers: both its ids.
pub fn established(client: &Caller, server: &Caller, to: SocketAddr) -> (u32, u32) {
    let id = client.resolve(11, TCP, to);
    client.connect(id, b"hello");
    let request = server.expect(CONNECT_REQUEST);
    assert_eq!(request.uid, 7, "the listener's");
    let asked = connection(&request);
    assert_eq!((asked.qp_num, &asked.private_data[..5]), (0x111, &b"hello"[..]));
    // What one side takes the other may have under way.
    assert_eq!((asked.responder_resources, asked.initiator_depth), (2, 3));
    let peer = request.id;
    server.call(CmRequest::Accept {
        id: peer,
        uid: 22,
        parameters: Some(parameters(0x222, b"welcome")),
    });
    let response = client.expect(CONNECT_RESPONSE);
    let told = connection(&response);
    assert_eq!((told.qp_num, &told.private_data[..7]), (0x222, &b"welcome"[..]));
    client.call(CmRequest::Accept {
        id,
        uid: 0,
        parameters: None,
    });
    let event = server.expect(ESTABLISHED);
    assert_eq!((event.uid, event.id), (22, peer));
    (id, peer)
}
