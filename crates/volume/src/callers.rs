//! Limits for connections: their number, and the time of each until it has proved its identity.
//!
//! Callers that have not proved their identity are bounded by address and in all; each has [`PROOF`] to do
//! so, or less if others come. Accepted connections are counted for each listener, each volume or host, and
//! in all: a part of the descriptors is always left for volumes, orders and sidecars ([`Descriptors`]).

use std::io;
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

/// Limit for a caller to prove its identity, and for a client to negotiate.
pub const PROOF: Duration = Duration::from_secs(10);

/// The most connections of one volume by one listener.
pub const CLIENTS: usize = 128;

/// The most connections of another host.
pub const PEERS: usize = 256;

/// The most callers that have not said yet which order they have.
pub const UNREAD: usize = 256;

/// The most orders about one volume that are carried out at a time.
pub const ORDERS_OF_ONE: usize = 32;

/// The most orders about volumes about which others are carried out already, all together.
const FURTHER: usize = 256;

/// The most volumes about which an order is carried out.
const FIRST: usize = 512;

/// The most orders about no volume, or all.
const GENERAL: usize = 64;

/// The most callers that have not proved themselves, and of those from one address.
const UNPROVEN: usize = 128;
const UNPROVEN_OF_ONE: usize = 32;

/// Descriptors of a client on this machine: its socket three times, and one on its way.
pub const OF_CLIENT: u32 = 4;

/// Descriptors of a client by TLS.
pub const OF_TLS: u32 = 2;

/// Descriptors of another host's connection: its socket, and a runtime.
pub const OF_PEER: u32 = 8;

/// Descriptors of a virtual machine by vhost-user: five for each of a few queues, and those of its memory.
/// Further queues take theirs from the reserve.
pub const OF_MACHINE: u32 = 64;

/// Reserve of the limit on descriptors: a quarter, within these bounds.
const KEPT: (u64, u64) = (64, 16 << 10);

/// Pause after a connection that could not be accepted.
const REFUSED: Duration = Duration::from_millis(100);

/// Least time between two equal messages.
const SAID: Duration = Duration::from_secs(60);

/// Limits the rate of a log message.
#[derive(Debug, Default)]
pub struct Saying(Mutex<Option<Instant>>);

impl Saying {
    /// A message that was not logged yet.
    pub const fn new() -> Self {
        Self(Mutex::new(None))
    }

    /// Logs the message, unless it was logged a short time ago.
    pub fn warn(&self, what: impl FnOnce() -> String) {
        let mut last = self.0.lock().expect("no panic under this lock");
        if last.is_none_or(|last| last.elapsed() > SAID) {
            *last = Some(Instant::now());
            tracing::warn!("{} (this is said once a minute)", what());
        }
    }
}

/// Messages about one thing that are said each: another one than before at once, the same one again a minute later if it still holds, and
/// never more than [`Self::MOST`] a minute.
#[derive(Debug, Default)]
pub struct Repeated(Vec<(String, Instant)>);

impl Repeated {
    /// Different ones in a minute: reasons that take turns may be many.
    const MOST: usize = 8;

    /// Whether that message is to be logged now.
    pub fn is_due(&mut self, what: &str) -> bool {
        self.is_due_at(Instant::now(), what)
    }

    fn is_due_at(&mut self, now: Instant, what: &str) -> bool {
        self.0.retain(|(_, at)| now.saturating_duration_since(*at) < SAID);
        if self.0.len() >= Self::MOST || self.0.iter().any(|(said, _)| said == what) {
            return false;
        }
        self.0.push((what.to_owned(), now));
        true
    }
}

/// Accepts the next connection. After an error (the caller has left, the process has too many open files) it
/// tries again.
pub async fn accepted<S, A, F>(accept: impl Fn() -> F) -> (S, A)
where
    F: Future<Output = io::Result<(S, A)>>,
{
    static REFUSING: Saying = Saying::new();
    loop {
        match accept().await {
            Ok(accepted) => return accepted,
            Err(error) => REFUSING.warn(|| format!("a connection could not be taken: {error}")),
        }
        tokio::time::sleep(REFUSED).await;
    }
}

/// A limit for connections or orders of one kind.
#[derive(Debug)]
pub struct Places {
    most: usize,
    taken: AtomicUsize,
    full: Saying,
}

/// One place, until it is dropped.
#[derive(Debug)]
pub struct Place(Arc<Places>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Places {
    /// A limit of `most`.
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Self {
            most,
            taken: AtomicUsize::new(0),
            full: Saying::new(),
        })
    }

    /// Whether no place is taken.
    pub fn is_empty(&self) -> bool {
        self.taken.load(Ordering::Relaxed) == 0
    }

    /// Takes a place, if one is left. `what` is the name of the kind for the log.
    pub fn take(self: &Arc<Self>, what: impl FnOnce() -> String) -> Option<Place> {
        let one_more = |taken: usize| (taken < self.most).then_some(taken + 1);
        match self
            .taken
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more)
        {
            Ok(_) => Some(Place(self.clone())),
            Err(_) => {
                self.full.warn(|| {
                    format!(
                        "{}: there are {} already, and no more are taken",
                        what(),
                        self.most
                    )
                });
                None
            }
        }
    }
}

/// Places for orders. The first order about a volume takes no place from the others: volumes with disks that
/// hang, and all the orders that wait for them, keep nobody from orders about other volumes.
#[derive(Debug)]
pub struct Orders {
    first: Arc<Places>,
    further: Arc<Places>,
    general: Arc<Places>,
}

impl Default for Orders {
    fn default() -> Self {
        let [first, further, general] = [FIRST, FURTHER, GENERAL].map(Places::new);
        Self {
            first,
            further,
            general,
        }
    }
}

impl Orders {
    /// Places for an order about the volume with these places, or about none.
    pub fn take(&self, volume: Option<(&str, &Arc<Places>)>) -> anyhow::Result<Vec<Place>> {
        let Some((name, of)) = volume else {
            let place = self.general.take(|| "orders".to_owned());
            return Ok(vec![place.ok_or_else(|| too_many(GENERAL, "orders"))?]);
        };
        let is_first = of.is_empty();
        let about = format!("orders about {name}");
        let turn = of.take(|| about.clone());
        let turn = turn.ok_or_else(|| too_many(ORDERS_OF_ONE, &about))?;
        let (all, most) = match is_first {
            true => (&self.first, FIRST),
            false => (&self.further, FURTHER),
        };
        let place = all.take(|| "orders".to_owned());
        Ok(vec![turn, place.ok_or_else(|| too_many(most, "orders"))?])
    }
}

fn too_many(most: usize, what: &str) -> anyhow::Error {
    anyhow::anyhow!("{most} {what} are waiting already: does a disk hang?")
}

/// Descriptors of this process for connections.
#[derive(Debug)]
pub struct Descriptors {
    all: Arc<Semaphore>,
    few: Saying,
}

/// The descriptors of this process. The first call raises the process' limit.
pub fn descriptors() -> &'static Descriptors {
    static ALL: LazyLock<Descriptors> = LazyLock::new(Descriptors::raise);
    &ALL
}

impl Descriptors {
    /// Raises the limit to the hard one: the usual 1024 is for programs with `select`, which is not used
    /// here.
    fn raise() -> Self {
        let mut limit = getrlimit(Resource::Nofile);
        limit.current = limit.maximum;
        if let Err(errno) = setrlimit(Resource::Nofile, limit) {
            tracing::warn!("the limit on descriptors stays as it is ({errno})");
        }
        Self::of(getrlimit(Resource::Nofile).current)
    }

    fn of(limit: Option<u64>) -> Self {
        let most = limit.unwrap_or(u64::MAX);
        let kept = (most / 4).clamp(KEPT.0, KEPT.1);
        let left = most.saturating_sub(kept).min(Semaphore::MAX_PERMITS as u64 / 2);
        Self {
            all: Arc::new(Semaphore::new(left as usize)),
            few: Saying::new(),
        }
    }

    /// Takes this many descriptors for a connection, if they are left.
    pub fn take(&self, descriptors: u32, what: &str) -> Option<OwnedSemaphorePermit> {
        let taken = self.all.clone().try_acquire_many_owned(descriptors).ok();
        if taken.is_none() {
            self.few.warn(|| {
                format!(
                    "{what} is not taken: there are too many connections for the limit on open files (`ulimit -Hn`, LimitNOFILE of a unit)"
                )
            });
        }
        taken
    }
}

/// Callers that have not proved their identity yet.
#[derive(Debug, Default)]
pub struct Unproven {
    callers: Mutex<Vec<Caller>>,
    numbers: AtomicUsize,
    full: Saying,
}

#[derive(Debug)]
struct Caller {
    number: usize,
    address: IpAddr,
    /// Dropping it closes the caller's connection.
    _stays: oneshot::Sender<()>,
}

/// One of these callers, until it is dropped.
#[derive(Debug)]
pub struct Proving {
    all: Arc<Unproven>,
    number: usize,
    /// Ends when another caller needs the place.
    sent_away: oneshot::Receiver<()>,
}

impl Drop for Proving {
    fn drop(&mut self) {
        let mut callers = self.all.callers.lock().expect("no panic under this lock");
        callers.retain(|caller| caller.number != self.number);
    }
}

impl Unproven {
    /// Adds a caller. If there are too many, the oldest is cut off: of that address, or of all.
    pub fn begin(self: &Arc<Self>, address: IpAddr) -> Proving {
        let (stays, sent_away) = oneshot::channel();
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let mut callers = self.callers.lock().expect("no panic under this lock");
        let of_address = callers.iter().filter(|caller| caller.address == address).count();
        let oldest = if of_address >= UNPROVEN_OF_ONE {
            callers.iter().position(|caller| caller.address == address)
        } else {
            (callers.len() >= UNPROVEN).then_some(0)
        };
        if let Some(oldest) = oldest {
            let gone = callers.remove(oldest);
            self.full.warn(|| {
                format!(
                    "many callers do not say who they are, some of them from {}: the oldest are cut off",
                    gone.address
                )
            });
        }
        callers.push(Caller {
            number,
            address,
            _stays: stays,
        });
        drop(callers);
        Proving {
            all: self.clone(),
            number,
            sent_away,
        }
    }
}

impl Proving {
    /// Awaits the proof within [`PROOF`].
    pub async fn within<T>(&mut self, proves: impl Future<Output = T>) -> anyhow::Result<T> {
        tokio::select! {
            proved = tokio::time::timeout(PROOF, proves) => match proved {
                Ok(proved) => Ok(proved),
                Err(_) => anyhow::bail!("it did not prove who it is within {} s", PROOF.as_secs()),
            },
            _ = &mut self.sent_away => anyhow::bail!("it did not prove who it is, and others came"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_descriptors_left_whatever_the_limit_is() {
        let left = |limit| Descriptors::of(limit).all.available_permits();
        assert_eq!(left(Some(1024)), 768);
        assert_eq!(left(Some(40)), 0);
        assert_eq!(left(Some(1 << 20)), (1 << 20) - (16 << 10));
        assert!(left(None) > 1 << 30);
        let few = Descriptors::of(Some(64 + 10));
        let held = few.take(8, "one").expect("there are ten");
        assert!(few.take(8, "another").is_none());
        drop(held);
        assert!(few.take(8, "another").is_some());
    }

    #[test]
    fn a_message_is_repeated_once_a_minute_and_many_are_few() {
        let mut repeated = Repeated::default();
        let began = Instant::now();
        let second = |number| began + Duration::from_secs(number);
        let asked_for_two_minutes = (0..120).flat_map(|at| [(at, "a"), (at, "b")]);
        let said: Vec<_> = asked_for_two_minutes
            .filter(|(at, what)| repeated.is_due_at(second(*at), what))
            .collect();
        assert_eq!(said, [(0, "a"), (0, "b"), (60, "a"), (60, "b")]);
        let many = (0..1000).filter(|number: &u32| repeated.is_due_at(second(200), &number.to_string()));
        assert_eq!(many.count(), Repeated::MOST);
        assert!(repeated.is_due_at(second(260), "a"));
    }

    #[test]
    fn places_are_given_back() {
        let places = Places::new(2);
        let held: Vec<_> = (0..3).map(|_| places.take(String::new)).collect();
        assert!(held[0].is_some() && held[1].is_some() && held[2].is_none());
        drop(held);
        assert!(places.take(String::new).is_some());
    }

    #[test]
    fn volumes_that_are_stuck_leave_places_for_orders_about_others() {
        let orders = Orders::default();
        let stuck: Vec<_> = (0..40).map(|_| Places::new(ORDERS_OF_ONE)).collect();
        let mut held = Vec::new();
        let mut refused = 0;
        for volume in &stuck {
            for _ in 0..=ORDERS_OF_ONE {
                match orders.take(Some(("stuck", volume))) {
                    Ok(place) => held.push(place),
                    Err(_) => refused += 1,
                }
            }
        }
        assert_eq!(
            (held.len(), refused),
            (FURTHER + 40, 40 * (ORDERS_OF_ONE + 1) - FURTHER - 40)
        );
        let other = Places::new(ORDERS_OF_ONE);
        let one = orders.take(Some(("other", &other))).expect("it is not stuck");
        orders.take(None).expect("about all");
        drop((one, held));
        assert!(stuck.iter().all(|volume| volume.is_empty()) && other.is_empty());
        let all: Vec<_> = (0..GENERAL)
            .map(|_| orders.take(None).expect("a place"))
            .collect();
        orders.take(None).expect_err("there are too many");
        drop(all);
    }

    #[tokio::test]
    async fn who_floods_sends_its_own_away_and_nobody_waits() {
        let all = Arc::new(Unproven::default());
        let (flood, host): (IpAddr, IpAddr) = ([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
        let mut first = all.begin(host);
        let mut many: Vec<_> = (0..=UNPROVEN_OF_ONE).map(|_| all.begin(flood)).collect();
        assert!(many[0].within(std::future::pending::<()>()).await.is_err());
        assert!(
            many[1]
                .sent_away
                .try_recv()
                .is_err_and(|error| error == oneshot::error::TryRecvError::Empty)
        );
        assert!(first.within(async {}).await.is_ok(), "another address is served");
        let others: Vec<_> = (0..2 * UNPROVEN)
            .map(|number| all.begin([10, 1, (number >> 8) as u8, number as u8].into()))
            .collect();
        assert!(all.callers.lock().expect("nobody panics").len() <= UNPROVEN);
        drop((first, many, others));
        assert!(all.callers.lock().expect("nobody panics").is_empty());
    }
}
