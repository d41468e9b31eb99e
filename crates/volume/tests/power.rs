//! A host that loses its power says nothing, neither then nor when it is back. Another one that waits for its answer must find that out.

mod support;

use std::future::Future;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketType, bind, listen, socket};
use support::{Lab, sockets};
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use verbatim_volume::Hosts;

/// Less than a tenant is to be held for nothing. A kernel that looks after nothing finds out in hours, and its questions take minutes.
const SOON: Duration = Duration::from_secs(10);

/// Linux puts off an acknowledgement for 200 ms at most. Each that went later would be answered.
const PUT_OFF: Duration = Duration::from_secs(1);

fn hosts(lab: &Lab, host: usize) -> Hosts {
    Hosts::load(&lab.path(host, "config")).expect("a list")
}

/// What comes of it in time.
async fn soon<T>(what: &str, work: impl Future<Output = T>) -> T {
    let done = tokio::time::timeout(SOON, work).await;
    done.unwrap_or_else(|_| panic!("not within {} s: {what}", SOON.as_secs()))
}

#[tokio::test]
async fn a_connection_ends_when_the_other_host_has_lost_its_power_and_is_back() {
    let lab = Lab::without_daemons();
    let (a, b) = (hosts(&lab, 0), hosts(&lab, 1));
    let listener = TcpListener::bind(lab.peer_address(1)).await.expect("it is free");
    for is_the_caller in [false, true] {
        let accepting = async {
            let (stream, _) = listener.accept().await.expect("it is called");
            b.accept(stream).await
        };
        let (called, accepted) = tokio::join!(a.connect("b", lab.port()), accepting);
        let (mut called, mut accepted) = (called.expect("it is taken"), accepted.expect("it is proven"));
        tokio::time::sleep(PUT_OFF).await;
        // Its kernel knows of the connection no more, and nobody has heard of that.
        let is_silent = match is_the_caller {
            true => sockets::forget(called.get_ref().0),
            false => sockets::forget(accepted.get_ref().0),
        };
        if !is_silent {
            eprintln!("skipped: a connection can be forgotten by root only");
            return;
        }
        let mut byte = [0];
        let read = match is_the_caller {
            true => {
                drop(called);
                soon("the destination hears of it", accepted.read(&mut byte)).await
            }
            false => {
                drop(accepted);
                soon("the source hears of it", called.read(&mut byte)).await
            }
        };
        let error = read.expect_err("nothing was sent");
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}");
    }
}

#[tokio::test]
async fn a_call_that_no_kernel_answers_is_soon_made_again() {
    let lab = Lab::without_daemons();
    let a = hosts(&lab, 0);
    let address: std::net::SocketAddr = lab.peer_address(1).parse().expect("an address");
    let full = socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
    bind(&full, &address).expect("it is free");
    listen(&full, 0).expect("it listens");
    // There is room for one that nobody has accepted. Linux answers no other one, as if nobody were there.
    let _first = TcpStream::connect(address).await.expect("it is taken");
    let began = Instant::now();
    let called = soon("the caller gives up", a.connect("b", lab.port())).await;
    let error = called.expect_err("nobody answers");
    assert!(format!("{error:#}").contains("takes no connection"), "{error:#}");
    assert!(
        began.elapsed() > Duration::from_secs(1),
        "one lost packet is no reason"
    );
}
