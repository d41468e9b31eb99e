//! Programs with connections by address and port go on at another RNIC: nobody but the RNICs takes part.

mod support;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};

use support::cm::*;
use support::program::gid;
use support::{Program, Server};
use verbatim_device::control::{
    CmDetails, CmEvent, CmNews, CmReply, CmRequest, QpState, Reply, Request, VERSION,
};
use verbatim_seqpacket::{Carried, Socket};

/// Bytes that an RNIC has said, in a descriptor if they are long.
fn bytes(program: &Program, request: CmRequest) -> Vec<u8> {
    let received = program
        .socket
        .call::<_, Reply>(&Request::Cm(request), &[])
        .unwrap();
    let Reply::Cm(CmReply::Bytes(bytes)) = received.message else {
        panic!("{:?}", received.message);
    };
    let mut fds: Vec<OwnedFd> = received.fds;
    bytes.take(&mut fds, u64::MAX).unwrap()
}

fn reserve(program: &Program, needs: &[u8], from: &Server) -> Result<(), i32> {
    let request = CmRequest::Reserve {
        needs: Carried::Here(needs.to_vec()),
        from: gid(from.address),
    };
    let reserved = program.ask(&Request::Cm(request), &[]);
    reserved.map(drop).map_err(|(errno, _)| errno)
}

/// Moves a caller with all it has; its program keeps its socket.
fn go(caller: Caller, from: &Server, to: &Server) -> Caller {
    let needs = bytes(&caller.program, CmRequest::Describe);
    let program = Program::connect(&to.socket(), "destination");
    reserve(&program, &needs, from).unwrap();
    program.call(Request::ParkContext);
    caller.program.call(Request::ParkContext);
    let image = bytes(&caller.program, CmRequest::Dump);
    let send_on = CmRequest::SendOn { to: gid(to.address) };
    caller.call(send_on);
    program.call(Request::AttachContext { version: VERSION });
    let image = Carried::Here(image);
    let adopted = program.call(Request::Cm(CmRequest::Adopt { image }));
    let Reply::Cm(CmReply::Adopted { channels }) = adopted else {
        panic!("{adopted:?}");
    };
    let channels: BTreeMap<u32, u32> = channels.into_iter().collect();
    let channel = channels[&caller.channel];
    // What the old RNIC has said is still in the old socket.
    let said = caller.take_news();
    let (news, theirs) = Socket::pair().unwrap();
    news.set_nonblocking(true).unwrap();
    let attach = Request::Cm(CmRequest::AttachChannel { channel });
    let attached = program.ask(&attach, &[theirs.as_fd()]);
    let Ok(Reply::Cm(CmReply::Attached { waiting })) = attached else {
        panic!("{attached:?}");
    };
    assert_eq!(waiting, said, "a channel with events is readable");
    if waiting {
        theirs.send(&CmNews { channel }, &[]).unwrap();
    }
    Caller {
        program,
        channel,
        news,
    }
}

fn route(caller: &Caller, id: u32) -> verbatim_device::control::CmRoute {
    match caller.call(CmRequest::Query { id }) {
        CmReply::Route(route) => route,
        other => panic!("{other:?}"),
    }
}

/// Asks for a connection of a queue pair that has no other one.
fn ask(client: &Caller, id: u32) {
    let parameters = parameters(0x1000 + id, b"hello");
    client.call(CmRequest::Connect { id, parameters });
}

fn accept(server: &Caller, client: &Caller, request: &CmEvent, id: u32) {
    server.call(CmRequest::Accept {
        id: request.id,
        uid: 33,
        parameters: Some(parameters(0x2000 + request.id, b"welcome")),
    });
    client.expect(CONNECT_RESPONSE);
    let (uid, parameters) = (0, None);
    client.call(CmRequest::Accept { id, uid, parameters });
    assert_eq!(server.expect(ESTABLISHED).uid, 33);
}

/// A server moves, and comes back: with its listener, a connection, and a request that it has not seen.
#[test]
fn a_server_goes_and_comes_back() {
    let servers = [1, 2, 3].map(|host| Server::start([127, 7, 98, host]));
    let [a, b, c] = &servers;
    let (client, server) = (Caller::new(a), Caller::new(b));
    let listener = server.listen(at(b, 7471));
    let (old, peer) = established(&client, &server, at(b, 7471));
    let asking = client.resolve(12, TCP, at(b, 7471));
    ask(&client, asking);
    let known = (route(&server, listener), route(&server, peer));
    support::wait_for("the request", || {
        let mut fds = [rustix::event::PollFd::new(
            &server.news,
            rustix::event::PollFlags::IN,
        )];
        let now = rustix::event::Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        (rustix::event::poll(&mut fds, Some(&now)) == Ok(1)).then_some(())
    });
    let server = go(server, b, c);

    // What the program knows is what it was.
    assert_eq!((route(&server, listener), route(&server, peer)), known);
    let request = server.expect(CONNECT_REQUEST);
    assert_eq!(request.uid, 7);
    accept(&server, &client, &request, asking);
    let (_, ours) = client.attributes(asking, QpState::Rtr);
    let (_, theirs) = server.attributes(request.id, QpState::Rtr);
    assert_eq!(
        (ours.dest_qpn, ours.av.dgid),
        (0x2000 + request.id, gid(b.address))
    );
    assert_eq!(
        (theirs.dest_qpn, theirs.av.dgid),
        (0x1000 + asking, gid(a.address))
    );

    // By the address that it had, and had told; nobody knows it under the other one.
    let new = client.resolve(13, TCP, at(b, 7471));
    ask(&client, new);
    let request = server.expect(CONNECT_REQUEST);
    accept(&server, &client, &request, new);
    assert_eq!(route(&server, request.id).source, Some(at(b, 7471)));
    // Its old place has never heard of that connection.
    client.call(CmRequest::Disconnect { id: new });
    assert_eq!(server.expect(DISCONNECTED).id, request.id);
    client.expect(DISCONNECTED);
    let nobody = client.resolve(14, TCP, at(c, 7471));
    ask(&client, nobody);
    client.expect(REJECTED);

    // Its own new requests go by its old address, too.
    let back = client.listen(at(a, 7472));
    let asks = server.resolve(15, TCP, at(a, 7472));
    assert_eq!(route(&server, asks).source.unwrap().ip(), b.address);
    ask(&server, asks);
    let request = client.expect(CONNECT_REQUEST);
    assert_eq!(route(&client, request.id).destination.unwrap().ip(), b.address);
    accept(&client, &server, &request, asks);
    let (_, attr) = client.attributes(request.id, QpState::Rtr);
    assert_eq!(attr.av.dgid, gid(b.address));

    let server = go(server, c, b);
    client.call(CmRequest::Disconnect { id: old });
    assert_eq!(server.expect(DISCONNECTED).id, peer);
    assert_eq!(client.expect(DISCONNECTED).id, old);
    // Of the one to which the old place did not lead.
    server.call(CmRequest::Disconnect { id: asks });
    assert_eq!(client.expect(DISCONNECTED).id, request.id);
    server.expect(DISCONNECTED);
    assert_eq!(server.reported(CmRequest::DestroyId { id: listener }), 3);
    client.reported(CmRequest::DestroyId { id: back });
}

/// Who asks moves while nobody answers, and so does who is asked for a queue pair of datagrams.
#[test]
fn who_asks_goes() {
    let servers = [4, 5, 6].map(|host| Server::start([127, 7, 98, host]));
    let [a, b, c] = &servers;
    let (client, server) = (Caller::new(a), Caller::new(b));
    server.listen(at(b, 7471));
    let id = client.resolve(1, TCP, at(b, 7471));
    ask(&client, id);
    let request = server.expect(CONNECT_REQUEST);
    let client = go(client, a, c);
    accept(&server, &client, &request, id);
    let (_, attr) = server.attributes(request.id, QpState::Rtr);
    assert_eq!(attr.av.dgid, gid(a.address), "as it is known");

    let listener = server.id(7, UDP);
    let address = at(b, 7473);
    server.call(CmRequest::Bind {
        id: listener,
        address,
    });
    server.call(CmRequest::Listen {
        id: listener,
        backlog: 0,
    });
    let id = client.resolve(2, UDP, at(b, 7473));
    ask(&client, id);
    let request = server.expect(CONNECT_REQUEST);
    let server = go(server, b, a);
    let client = go(client, c, b);
    server.call(CmRequest::Accept {
        id: request.id,
        uid: 9,
        parameters: Some(parameters(0x333, b"me")),
    });
    let CmDetails::Datagrams(told) = client.expect(ESTABLISHED).details else {
        panic!("no datagrams");
    };
    assert_eq!((told.qp_num, told.av.dgid), (0x333, gid(b.address)));
}

#[test]
fn what_is_taken_at_the_destination_is_refused_and_nothing_of_it_is_kept() {
    let (a, b) = (Server::start([127, 7, 98, 7]), Server::start([127, 7, 98, 8]));
    let caller = Caller::new(&a);
    let any = "0.0.0.0:7471".parse().unwrap();
    caller.listen("0.0.0.0:7470".parse().unwrap());
    let listener = caller.listen(any);
    let other = Caller::new(&b);
    let id = other.listen(any);
    let needs = bytes(&caller.program, CmRequest::Describe);
    let program = Program::connect(&b.socket(), "destination");
    assert_eq!(reserve(&program, &needs, &a), Err(libc::EADDRNOTAVAIL));
    other.listen("0.0.0.0:7470".parse().unwrap());
    other.reported(CmRequest::DestroyId { id });
    let mut wrong = needs.clone();
    wrong[0] += 1;
    assert_eq!(reserve(&program, &wrong, &a), Err(libc::EPROTO));
    assert_eq!(
        reserve(&program, &needs[..needs.len() - 1], &a),
        Err(libc::EINVAL)
    );
    assert_eq!(reserve(&program, &needs, &a), Err(libc::EADDRNOTAVAIL), "7470");
    assert_eq!(caller.errno(CmRequest::Dump), libc::EBUSY, "it runs");
    let send_on = CmRequest::SendOn { to: gid(b.address) };
    assert_eq!(caller.errno(send_on), libc::EBUSY);
    let image = Carried::Here(vec![1]);
    assert_eq!(
        caller.errno(CmRequest::Adopt { image }),
        libc::EINVAL,
        "nobody is expected"
    );
    caller.reported(CmRequest::DestroyId { id: listener });
}

/// A program whose move is undone goes on: what was sent meanwhile comes again.
#[test]
fn parked_and_attached_again_all_goes_on() {
    let (a, b) = (Server::start([127, 7, 98, 9]), Server::start([127, 7, 98, 10]));
    let (client, server) = (Caller::new(&a), Caller::new(&b));
    server.listen(at(&b, 7471));
    let (old, peer) = established(&client, &server, at(&b, 7471));
    server.program.call(Request::ParkContext);
    let image = bytes(&server.program, CmRequest::Dump);
    client.call(CmRequest::Disconnect { id: old });
    let new = client.resolve(13, TCP, at(&b, 7471));
    ask(&client, new);
    // Nobody takes them in.
    assert_eq!(bytes(&server.program, CmRequest::Dump), image);
    server.call(CmRequest::SendOn { to: gid(a.address) });
    server.program.call(Request::AttachContext { version: VERSION });
    let told = [server.event(), server.event()];
    let kinds: BTreeMap<u32, u32> = told.iter().map(|event| (event.event, event.id)).collect();
    assert_eq!(kinds[&DISCONNECTED], peer);
    assert!(kinds.contains_key(&CONNECT_REQUEST));
    client.expect(DISCONNECTED);
}

#[test]
fn an_image_may_be_anything() {
    let (a, b) = (Server::start([127, 7, 98, 11]), Server::start([127, 7, 98, 12]));
    let (client, server) = (Caller::new(&a), Caller::new(&b));
    server.listen(at(&b, 7471));
    established(&client, &server, at(&b, 7471));
    server.program.call(Request::ParkContext);
    let good = bytes(&server.program, CmRequest::Dump);
    // Those that are taken up end their connections, which takes time: so nothing is kept free for the next.
    let nothing = [1, 0, 0, 0];
    for at in (0..good.len()).step_by(5) {
        let program = Program::connect(&a.socket(), "destination");
        reserve(&program, &nothing, &b).unwrap();
        let mut image = good.clone();
        image[at] ^= 0x55;
        let image = Carried::Here(image);
        // Refused or taken, it does not end the RNIC.
        let _ = program.ask(&Request::Cm(CmRequest::Adopt { image }), &[]);
    }
    Caller::new(&a).resolve(77, TCP, support::cm::at(&b, 1));
}
