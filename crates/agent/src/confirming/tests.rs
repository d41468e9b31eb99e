use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use verbatim_seqpacket::Listener;

use verbatim_device::control::{Reply, Request};

use super::*;
use crate::testing::{Authority, TestHost};

/// Nobody is at the last one. Tests run at once, each with hosts of its own.
const HOSTS: [(&str, &str); 3] = [("a", "127.88.1.1"), ("b", "127.88.1.2"), ("c", "127.88.1.3")];
const OTHERS: [(&str, &str); 3] = [("a", "127.88.2.1"), ("b", "127.88.2.2"), ("c", "127.88.2.3")];

fn qp_end(address: [u8; 4], qpn: u32) -> QpEnd {
    let gid = std::net::Ipv4Addr::from(address).to_ipv6_mapped().octets();
    QpEnd { gid, qpn }
}

fn question(qpn: u32) -> PeerQuestion {
    PeerQuestion {
        number: 3,
        pair: PeerPair {
            own: qp_end([127, 88, 1, 1], 7),
            other: qp_end([127, 88, 1, 2], qpn),
        },
        tenant: "instance web".to_owned(),
        again: false,
    }
}

/// An RNIC whose queue pairs stand so, by their numbers; it notes what it is asked.
fn rnic(path: &Path, standings: HashMap<u32, PeerStanding>) -> Arc<Mutex<Vec<PeerPair>>> {
    let listener = Listener::bind(path).unwrap();
    let asked = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&asked);
    std::thread::spawn(move || {
        while let Ok(client) = listener.accept() {
            while let Ok(request) = client.recv::<Request>() {
                let (reply, pairs) = match request.message {
                    Request::MeetPeers { pairs } => {
                        let standing = |pair: &PeerPair| standings[&pair.own.qpn];
                        let standings = pairs.iter().map(standing).collect();
                        (Reply::PeerStandings(standings), pairs)
                    }
                    Request::PeersGone { pairs } | Request::PeersHeard { pairs } => (Reply::Done, pairs),
                    _ => panic!("asked for something else"),
                };
                noted.lock().unwrap().extend(pairs);
                client.send(&reply, &[]).unwrap();
            }
        }
    });
    asked
}

async fn hosts(hosts: &'static [(&str, &str); 3]) -> (TestHost, TestHost) {
    let authority = Authority::new();
    let at = |address: &str| format!("{address}:{}", crate::PORT).parse().unwrap();
    let a = TestHost::start(&authority, hosts, "a", at(hosts[0].1)).await;
    let b = TestHost::start(&authority, hosts, "b", at(hosts[1].1)).await;
    (a, b)
}

fn verdicts(answers: Vec<PeerAnswer>) -> Vec<PeerVerdict> {
    answers.into_iter().map(|answer| answer.verdict).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_other_host_answers_from_its_own_rnic() {
    use PeerVerdict as V;
    let (a, b) = hosts(&HOSTS).await;
    // Without an RNIC there is nothing to be connected to.
    assert_eq!(verdicts(ask(&a.agent, "b", &[question(1)]).await), [V::NotYet]);
    let standings = [
        (1, PeerStanding::Named),
        (2, PeerStanding::Unconnected),
        (3, PeerStanding::Elsewhere),
        (4, PeerStanding::Missing),
        (5, PeerStanding::Foreign),
    ];
    let asked = rnic(&b.agent.config.nic_socket(), standings.into());
    let questions: Vec<_> = (1..=5).map(question).collect();
    let answers = ask(&a.agent, "b", &questions).await;
    assert!(
        answers
            .iter()
            .zip(&questions)
            .all(|(answer, asked)| answer.pair == asked.pair)
    );
    let wanted = [V::Confirmed, V::NotYet, V::Refused, V::Refused, V::Confirmed];
    assert_eq!(verdicts(answers), wanted);
    // Each host's own end is the one that it is asked about.
    let turned: Vec<_> = questions.iter().map(|question| question.pair.turned()).collect();
    assert_eq!(*asked.lock().unwrap(), turned);

    // A host asks for queue pairs of its own only, and one question that is refused is nothing to the others.
    let mut of_b = question(1);
    of_b.pair.own = qp_end([127, 88, 1, 2], 9);
    assert_eq!(verdicts(ask(&a.agent, "b", &[of_b.clone()]).await), [V::NotYet]);
    let mixed = [question(1), of_b, question(3), question(5)];
    let wanted = [V::Confirmed, V::NotYet, V::Refused, V::Confirmed];
    assert_eq!(verdicts(ask(&a.agent, "b", &mixed).await), wanted);
    assert_eq!(verdicts(ask(&a.agent, "c", &[question(1)]).await), [V::NotYet]);
    // An RNIC of the kernel's on the same host.
    assert_eq!(verdicts(ask(&a.agent, "a", &[question(1)]).await), [V::Confirmed]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_other_host_hears_of_ends_that_are_gone_and_the_rnic_here_that_it_has() {
    let (a, b) = hosts(&OTHERS).await;
    let pair = |host, qpn| PeerPair {
        own: qp_end([127, 88, 2, 1], 7),
        other: qp_end([127, 88, 2, host], qpn),
    };
    let here = rnic(&a.agent.config.nic_socket(), HashMap::new());
    // Nothing was confirmed to an RNIC that is not there: that host has heard. Of one that nobody can ask nothing is known.
    tell_gone(a.agent.clone(), vec![pair(2, 1), pair(3, 2)]).await;
    assert_eq!(std::mem::take(&mut *here.lock().unwrap()), [pair(2, 1)]);
    let there = rnic(&b.agent.config.nic_socket(), HashMap::new());
    tell_gone(a.agent.clone(), vec![pair(2, 3), pair(3, 4), pair(2, 5)]).await;
    assert_eq!(*there.lock().unwrap(), [pair(2, 3).turned(), pair(2, 5).turned()]);
    assert_eq!(*here.lock().unwrap(), [pair(2, 3), pair(2, 5)]);
}
