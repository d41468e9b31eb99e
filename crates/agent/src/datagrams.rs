//! The datagram queue pairs of the cluster that are elsewhere than programs think.
//!
//! Anybody may send to a datagram queue pair, so when one has moved, every agent is told, and tells its programs; those
//! that come later ask when they make an address handle.
//!
//! Who tells is the host where the queue pair is now, and it is not believed for that: it could take datagrams that are
//! for others. Where a queue pair that left a host is now, the host says that it has left ([`Agent::confirmed`]):
//!
//! - the one where it was last, as far as is known here, and nobody else if that one answers;
//! - else the host whose GID programs know it by, and then each that it went to, as for any endpoint.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tonic::Status;
use verbatim_channel::{Endpoint, MovedEndpoint, Order};

use crate::agent::{Agent, Shared};
use crate::directory::HostEntry;
use crate::proto::MovedRequest;
use crate::quotas;
use crate::session::{encode, in_time};

/// How long a host is told again whose word on where queue pairs were is not to be had.
const CONFIRMING_TIMEOUT: Duration = Duration::from_secs(10 * 60);

/// The pause before it is told again.
const CONFIRMING_PAUSE: Duration = Duration::from_millis(500);

/// No instance moves more often. A host that says so wants that nobody is believed after it.
const MOST_MOVES: u32 = 1 << 24;

/// How long a program waits that has made one, until all hosts know of it.
const TELLING_TIMEOUT: Duration = Duration::from_secs(1);

/// What one agent knows of them.
#[derive(Debug, Default)]
pub struct Datagrams(Mutex<HashMap<Endpoint, MovedEndpoint>>);

impl Datagrams {
    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Endpoint, MovedEndpoint>> {
        self.0.lock().expect("no panic under this lock")
    }

    /// Notes where queue pairs are now, and returns that as programs are to be told it. Programs take a higher number of moves
    /// for the newer place; what is noted here is newer, whatever it says.
    pub fn learn(&self, moved: &[MovedEndpoint]) -> Vec<MovedEndpoint> {
        let mut known = self.lock();
        let mut learned = Vec::with_capacity(moved.len());
        for entry in moved {
            let earlier = known.get(&entry.known).copied();
            if earlier.is_none() && known.len() >= quotas::MOVED {
                tracing::warn!("too many datagram queue pairs have moved; one more is not noted");
                continue;
            }
            let mut entry = *entry;
            if let Some(earlier) = earlier {
                entry.moves = match earlier.now == entry.now {
                    true => entry.moves.max(earlier.moves),
                    false => entry.moves.max(earlier.moves.saturating_add(1)),
                };
            }
            known.insert(entry.known, entry);
            learned.push(entry);
        }
        learned
    }

    /// Where the queue pair that programs know as this is, as far as was told.
    pub fn now(&self, known: &Endpoint) -> Option<Endpoint> {
        self.lock().get(known).map(|entry| entry.now)
    }

    /// Those that programs know under this GID.
    pub fn under(&self, gid: [u8; 16]) -> Vec<MovedEndpoint> {
        let known = self.lock();
        let under = known.values().filter(|entry| entry.known.gid == gid);
        under.copied().collect()
    }

    /// All of them.
    pub fn all(&self) -> Vec<MovedEndpoint> {
        self.lock().values().copied().collect()
    }
}

/// What became of what a host has told.
#[derive(Debug, PartialEq, Eq)]
pub enum Told {
    /// The hosts on the way say the same.
    Confirmed,
    /// They say something else.
    Denied,
    /// One of them is out of reach.
    Unknown,
}

impl Agent {
    /// Is the queue pair at `caller`, as that says?
    pub async fn confirmed(&self, caller: &HostEntry, moved: &MovedEndpoint) -> Told {
        if moved.moves > MOST_MOVES {
            return Told::Denied;
        }
        let last = self.datagrams.now(&moved.known);
        let is_there = |host: &HostEntry, at: Endpoint| host.name == caller.name && at.qpn == moved.now.qpn;
        for start in last.into_iter().chain([moved.known]) {
            let followed = self.follow(start, None, is_there).await;
            let is_there = followed
                .at
                .is_some_and(|host| is_there(host, followed.resolved.endpoint));
            match (is_there, followed.lost) {
                (true, _) => return Told::Confirmed,
                // Its word is the last.
                (false, None) => return Told::Denied,
                (false, Some(error)) => {
                    tracing::debug!(error = format!("{error:#}"), "not known yet where datagrams go")
                }
            }
        }
        Told::Unknown
    }

    /// What another host tells: programs hear of what the hosts on the way confirm.
    pub async fn told_of_datagrams(
        &self,
        caller: &HostEntry,
        moved: Vec<MovedEndpoint>,
    ) -> Result<(), Status> {
        if moved.len() > quotas::MOVED_AT_ONCE {
            return Err(Status::resource_exhausted(format!(
                "{} queue pairs in one message, and {} are the most",
                moved.len(),
                quotas::MOVED_AT_ONCE
            )));
        }
        let found = join_all(moved.iter().map(|moved| self.confirmed(caller, moved))).await;
        let with = |what: Told| moved.iter().zip(&found).filter(move |(_, told)| **told == what);
        let confirmed: Vec<_> = with(Told::Confirmed).map(|(moved, _)| *moved).collect();
        let (denied, unknown) = (with(Told::Denied).count(), with(Told::Unknown).count());
        if !confirmed.is_empty() {
            self.datagrams_moved(confirmed).await;
        }
        match (denied, unknown) {
            (0, 0) => Ok(()),
            (0, _) => Err(Status::unavailable(format!(
                "where {unknown} of the queue pairs went cannot be asked now"
            ))),
            _ => {
                let host = &caller.name;
                tracing::warn!(host, denied, "says that it has queue pairs that did not go there");
                Err(Status::permission_denied(format!(
                    "{denied} of the queue pairs are not known to have gone to {host}"
                )))
            }
        }
    }

    /// Tells the programs of this host. One that does not take it sends where nobody is, and datagrams may be lost.
    pub async fn datagrams_moved(&self, endpoints: Vec<MovedEndpoint>) {
        let endpoints = self.datagrams.learn(&endpoints);
        let told = self.guests.all().into_iter().map(|guest| {
            let endpoints = endpoints.clone();
            async move {
                let order = guest.order(Order::Moved { endpoints }, Vec::new());
                if let Err(error) = in_time("telling where datagrams go", order).await {
                    tracing::debug!(
                        error = format!("{error:#}"),
                        pid = guest.pid,
                        "not told where datagrams go"
                    );
                }
            }
        });
        join_all(told).await;
    }
}

/// Tells all hosts, this one included; each in a task of its own, so that one that is out of reach keeps nobody waiting.
pub fn tell_all(agent: &Shared, endpoints: &[MovedEndpoint]) -> Vec<tokio::task::JoinHandle<()>> {
    let hosts = match endpoints {
        [] => Vec::new(),
        _ => agent.peers.directory().all().to_vec(),
    };
    let tell = |host: HostEntry| {
        let (agent, endpoints) = (agent.clone(), endpoints.to_vec());
        tokio::spawn(async move { tell_host(&agent, &host, &endpoints).await })
    };
    hosts.into_iter().map(tell).collect()
}

/// The same, and waits for those that answer within [`TELLING_TIMEOUT`].
pub async fn tell(agent: &Agent, endpoints: &[MovedEndpoint]) {
    let hosts = agent.peers.directory().all().iter();
    let told = hosts.map(|host| tokio::time::timeout(TELLING_TIMEOUT, tell_host(agent, host, endpoints)));
    join_all(told).await;
}

async fn tell_host(agent: &Agent, host: &HostEntry, endpoints: &[MovedEndpoint]) {
    if host.name == agent.name() {
        return agent.datagrams_moved(endpoints.to_vec()).await;
    }
    let endpoints = encode(&endpoints);
    let begun = Instant::now();
    loop {
        let endpoints = endpoints.clone();
        let told = async {
            let mut peer = agent.peers.connect(&host.name).await?;
            Ok(peer.moved(MovedRequest { endpoints }).await?)
        };
        let told: anyhow::Result<_> = told.await;
        let Err(error) = told else { return };
        // It asks the hosts where they were, and one of them has no agent for a moment.
        let status = error.downcast_ref::<Status>().map(Status::code);
        if status == Some(tonic::Code::Unavailable) && begun.elapsed() < CONFIRMING_TIMEOUT {
            tokio::time::sleep(CONFIRMING_PAUSE).await;
            continue;
        }
        tracing::warn!(
            host = host.name,
            error = format!("{error:#}"),
            "its programs are not told where datagrams go; those that they send to the moved instance are lost"
        );
        return;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Authority, TestHost};

    #[test]
    fn what_is_learned_later_is_newer_to_programs() {
        let end = |host, qpn| Endpoint { gid: [host; 16], qpn };
        let moved = |now, moves| MovedEndpoint {
            known: end(1, 7),
            now,
            moves,
        };
        let known = Datagrams::default();
        assert_eq!(known.learn(&[moved(end(3, 9), 2)]), [moved(end(3, 9), 2)]);
        // Told once more, it is no move.
        assert_eq!(known.learn(&[moved(end(3, 9), 1)]), [moved(end(3, 9), 2)]);
        // Whatever a host said that has it no more.
        assert_eq!(known.learn(&[moved(end(2, 8), 1)]), [moved(end(2, 8), 3)]);
        assert_eq!(known.under([1; 16]), [moved(end(2, 8), 3)]);
        assert_eq!(known.now(&end(1, 7)), Some(end(2, 8)));
        assert!(known.under([3; 16]).is_empty());
        assert_eq!(known.all().len(), 1);
    }

    /// A host that is in the directory, and whose agent does not run.
    const ABSENT: &str = "absent";

    /// Agents of hosts that reach each other, on addresses that nobody else is likely to have.
    async fn hosts<const N: usize>(names: [&str; N]) -> [TestHost; N] {
        let authority = Authority::new();
        let net = format!(
            "127.{}.{}",
            rand::random_range(100..250),
            rand::random_range(1..250)
        );
        let addresses: Vec<String> = (1..=N + 1).map(|host| format!("{net}.{host}")).collect();
        let all = names.iter().copied().chain([ABSENT]);
        let all: Vec<_> = all.zip(addresses.iter().map(String::as_str)).collect();
        let mut started = Vec::new();
        for (name, address) in &all[..N] {
            let at = (address.parse::<std::net::IpAddr>().unwrap(), crate::PORT).into();
            started.push(TestHost::start(&authority, &all, name, at).await);
        }
        started
            .try_into()
            .unwrap_or_else(|_| unreachable!("as many as names"))
    }

    fn at(host: &TestHost, qpn: u32) -> Endpoint {
        let gid = host.agent.gid();
        Endpoint { gid, qpn }
    }

    /// The queue pair `qpn` of a host has left it.
    fn leaves(host: &TestHost, qpn: u32, to: Endpoint) {
        let keys = Vec::new();
        let forward = crate::forwarding::Forward { endpoint: to, keys };
        host.agent.forwarding.insert([(qpn, forward)]);
    }

    /// A host tells another one.
    async fn tell(from: &TestHost, to: &TestHost, moved: MovedEndpoint) -> Result<(), tonic::Code> {
        let mut peer = from.agent.peers.connect(to.agent.name()).await.unwrap();
        let endpoints = encode(&[moved].as_slice());
        let told = peer.moved(MovedRequest { endpoints }).await;
        told.map(drop).map_err(|status| status.code())
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn only_hosts_that_a_queue_pair_has_left_say_where_it_is() {
        use tonic::Code::{PermissionDenied, Unavailable};

        let [home, b, c, listener] = hosts(["home", "b", "c", "listener"]).await;
        let known = at(&home, 7);
        let now = |now, moves| MovedEndpoint { known, now, moves };
        let learned = |listener: &TestHost| listener.agent.datagrams.now(&known);

        // It is at home, whoever says what.
        assert_eq!(
            tell(&c, &listener, now(at(&c, 9), 1)).await,
            Err(PermissionDenied)
        );
        assert_eq!(
            tell(&c, &listener, now(at(&b, 9), 1)).await,
            Err(PermissionDenied)
        );
        assert_eq!(learned(&listener), None);

        // Its home says that it has gone to b, and that is not c.
        leaves(&home, 7, at(&b, 8));
        assert_eq!(
            tell(&c, &listener, now(at(&c, 9), 9)).await,
            Err(PermissionDenied)
        );
        assert_eq!(
            tell(&b, &listener, now(at(&b, 88), 1)).await,
            Err(PermissionDenied)
        );
        assert_eq!(tell(&b, &listener, now(at(&b, 8), 1)).await, Ok(()));
        assert_eq!(learned(&listener), Some(at(&b, 8)));

        // On from there, as b says; its home has nothing more to say, and may not call it back.
        assert_eq!(
            tell(&home, &listener, now(at(&home, 7), 5)).await,
            Err(PermissionDenied)
        );
        leaves(&b, 8, at(&c, 9));
        assert_eq!(
            tell(&home, &listener, now(at(&home, 7), 5)).await,
            Err(PermissionDenied)
        );
        assert_eq!(tell(&c, &listener, now(at(&c, 9), MOST_MOVES)).await, Ok(()));
        assert_eq!(learned(&listener), Some(at(&c, 9)));

        // c has counted its moves up, so that nobody would be believed after it; that does not help it.
        leaves(&c, 9, at(&home, 70));
        assert_eq!(tell(&home, &listener, now(at(&home, 70), 3)).await, Ok(()));
        assert_eq!(learned(&listener), Some(at(&home, 70)));

        // Who has not heard of it yet follows it from its home, with the number that it had there first.
        assert_eq!(tell(&home, &b, now(at(&home, 70), 3)).await, Ok(()));

        // As long as one on its way cannot be asked, it is not decided.
        let absent = Endpoint {
            gid: listener.agent.peers.directory().host(ABSENT).unwrap().gid(),
            qpn: 80,
        };
        leaves(&home, 70, absent);
        listener.agent.datagrams.learn(&[now(absent, 4)]);
        assert_eq!(tell(&c, &listener, now(at(&c, 90), 5)).await, Err(Unavailable));
        assert_eq!(learned(&listener), Some(absent));
    }
}
