//! What each tenant has at this RNIC, over all its contexts and processes, and what it may have.
//!
//! Limits of a context keep a program from being a burden by mistake. They keep nobody from taking everything: who may open
//! one context may open many. So all that a host's RNIC has a bounded number of is counted by tenant, too: an instance, or
//! else a user of the host. No tenant has more than its share ([`crate::TenantLimits`]), however many processes ask, and a
//! reserve is left for what root of the host makes: the objects of instances that arrive.

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::ops::Deref;
use std::rc::{Rc, Weak};
use std::time::{Duration, Instant};

use crate::account;
use crate::config::{Limits, TenantLimits};
use crate::error::Refused;

/// A tenant that is refused again and again is logged so often.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Tenants that are remembered although they may have nothing.
const MOST_IDLE: usize = 64;

/// Who is charged for an object.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Tenant {
    /// The instance at whose listener a connection came in, or for which root of the host has opened a context.
    Instance(String),
    /// A user of the host, by number.
    User(u32),
}

impl fmt::Display for Tenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Tenant::Instance(name) => write!(f, "instance {name}"),
            Tenant::User(uid) => write!(f, "user {uid}"),
        }
    }
}

/// What is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Connections,
    Pds,
    Regions,
    Windows,
    Cqs,
    Channels,
    Qps,
    Srqs,
    Ahs,
}

const KINDS: usize = 9;

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Connections => "connections",
            Kind::Pds => "protection domains",
            Kind::Regions => "memory regions",
            Kind::Windows => "memory windows",
            Kind::Cqs => "completion queues",
            Kind::Channels => "completion channels",
            Kind::Qps => "queue pairs",
            Kind::Srqs => "shared receive queues",
            Kind::Ahs => "address handles",
        }
    }
}

fn most_of(limits: &Limits) -> [u32; KINDS] {
    let mut most = [0; KINDS];
    for (kind, limit) in [
        (Kind::Connections, limits.max_contexts),
        (Kind::Pds, limits.max_pd),
        (Kind::Regions, limits.max_mr),
        (Kind::Windows, limits.max_mw),
        (Kind::Cqs, limits.max_cq),
        (Kind::Channels, limits.max_cq),
        (Kind::Qps, limits.max_qp),
        (Kind::Srqs, limits.max_srq),
        (Kind::Ahs, limits.max_ah),
    ] {
        most[kind as usize] = limit;
    }
    most
}

/// What all tenants have together.
#[derive(Debug)]
struct Totals {
    have: [Cell<u32>; KINDS],
    most: [u32; KINDS],
    limits: TenantLimits,
    mapped: Rc<account::Account>,
    refusals: Cell<u64>,
}

/// What one tenant has.
#[derive(Debug)]
struct Account {
    tenant: Tenant,
    have: [Cell<u32>; KINDS],
    mapped: Rc<account::Account>,
    totals: Rc<Totals>,
    logged: Cell<Option<Instant>>,
}

impl Account {
    /// Notes that the tenant does not get more, and says so in the log, now and then.
    fn note_refusal(&self, refused: &Refused) {
        let refusals = &self.totals.refusals;
        refusals.set(refusals.get() + 1);
        let lately = |logged: Instant| logged.elapsed() < LOG_INTERVAL;
        if !self.logged.get().is_some_and(lately) {
            self.logged.set(Some(Instant::now()));
            tracing::warn!(tenant = %self.tenant, "a tenant has its share: {}", refused.message);
        }
    }
}

/// All tenants that have something.
#[derive(Debug)]
pub struct Tenants {
    known: HashMap<Tenant, Weak<Account>>,
    totals: Rc<Totals>,
}

impl Tenants {
    /// `mapped` is the RNIC's own account of mapped files.
    pub fn new(limits: &Limits, mapped: Rc<account::Account>) -> Self {
        Self {
            known: HashMap::new(),
            totals: Rc::new(Totals {
                have: Default::default(),
                most: most_of(limits),
                limits: limits.tenants.clone(),
                mapped,
                refusals: Cell::new(0),
            }),
        }
    }

    /// Who pays for what a tenant makes, or what root of the host makes for it, which may take from the reserve.
    pub fn payer(&mut self, tenant: Tenant, of_host_root: bool) -> Payer {
        let known = self.known.get(&tenant).and_then(Weak::upgrade);
        let account = known.unwrap_or_else(|| {
            if self.known.len() >= MOST_IDLE {
                self.known.retain(|_, known| known.strong_count() > 0);
            }
            let share = |all| self.totals.limits.share(all);
            let mapped = self.totals.mapped.part(tenant.to_string(), share);
            let account = Rc::new(Account {
                tenant: tenant.clone(),
                have: Default::default(),
                mapped: Rc::new(mapped),
                totals: Rc::clone(&self.totals),
                logged: Cell::new(None),
            });
            self.known.insert(tenant, Rc::downgrade(&account));
            account
        });
        Payer {
            account,
            of_host_root,
        }
    }

    /// How often a tenant did not get what it asked for because of what it or all have.
    pub fn refusals(&self) -> u64 {
        self.totals.refusals.get()
    }
}

/// A tenant, for whatever is to be charged to it.
#[derive(Debug, Clone)]
pub struct Payer {
    account: Rc<Account>,
    of_host_root: bool,
}

impl Payer {
    /// Who pays.
    pub fn tenant(&self) -> &Tenant {
        &self.account.tenant
    }

    /// Whether there may be one more object of a kind.
    pub(crate) fn check(&self, kind: Kind) -> Result<(), Refused> {
        let Account {
            tenant, have, totals, ..
        } = &*self.account;
        let (have, all, most) = (
            have[kind as usize].get(),
            totals.have[kind as usize].get(),
            totals.most[kind as usize],
        );
        let share = totals.limits.share(most.into()) as u32;
        let usable = match self.of_host_root {
            true => most,
            false => most - totals.limits.reserve(most.into()) as u32,
        };
        let what = kind.name();
        let message = if have >= share {
            format!("{tenant} has {have} {what} in all its contexts, and may have no more")
        } else if all >= usable {
            format!("the RNIC has {all} {what} of {most}, and none is left for {tenant}")
        } else {
            return Ok(());
        };
        let refused = Refused::new(libc::ENOMEM, message);
        self.account.note_refusal(&refused);
        Err(refused)
    }

    /// Whether there may be one more mapping, of so many bytes, of the tenant and of all.
    pub(crate) fn check_mapping(&self, bytes: u64) -> Result<(), Refused> {
        let totals = &self.account.totals;
        let reserve = |all| match self.of_host_root {
            true => 0,
            false => totals.limits.reserve(all),
        };
        let checked = self.account.mapped.check(bytes);
        checked
            .and_then(|()| totals.mapped.check_leaving(bytes, reserve))
            .inspect_err(|refused| self.account.note_refusal(refused))
    }

    /// The accounts of mapped files to which a mapping is charged: the tenant's, and the RNIC's.
    pub fn mapped(&self) -> [Rc<account::Account>; 2] {
        [&self.account.mapped, &self.account.totals.mapped].map(Rc::clone)
    }

    /// Of somebody with the default limits.
    #[cfg(test)]
    pub fn of_test() -> Self {
        let limits = Limits::default();
        let mapped = Rc::new(account::Account::of_all(&limits, false));
        Tenants::new(&limits, mapped).payer(Tenant::User(0), false)
    }

    fn begin(&self, kind: Kind) {
        for have in [&self.account.have, &self.account.totals.have] {
            have[kind as usize].set(have[kind as usize].get() + 1);
        }
    }

    fn end(&self, kind: Kind, count: u32) {
        for have in [&self.account.have, &self.account.totals.have] {
            have[kind as usize].set(have[kind as usize].get() - count);
        }
    }
}

/// A connection, charged to a tenant for as long as it is there.
#[derive(Debug)]
pub struct Seat(Payer);

impl Seat {
    /// One more connection, if the tenant may have it.
    pub(crate) fn take(payer: Payer) -> Result<Self, Refused> {
        payer.check(Kind::Connections)?;
        payer.begin(Kind::Connections);
        Ok(Self(payer))
    }

    pub fn payer(&self) -> &Payer {
        &self.0
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.end(Kind::Connections, 1);
    }
}

/// The numbers of a context's objects of one kind, charged to its tenant for as long as they are here.
#[derive(Debug)]
pub struct Owned {
    kind: Kind,
    payer: Payer,
    numbers: HashSet<u32>,
}

impl Owned {
    pub fn new(kind: Kind, payer: &Payer) -> Self {
        Self {
            kind,
            payer: payer.clone(),
            numbers: HashSet::new(),
        }
    }

    /// Whether there may be one more, of `most` in this context.
    pub(crate) fn check(&self, most: u32) -> Result<(), Refused> {
        if self.numbers.len() >= most as usize {
            let (have, what) = (self.numbers.len(), self.kind.name());
            let message = format!("this program has {have} {what}, and may have no more");
            return Err(Refused::new(libc::ENOMEM, message));
        }
        self.payer.check(self.kind)
    }

    pub fn insert(&mut self, number: u32) {
        if self.numbers.insert(number) {
            self.payer.begin(self.kind);
        }
    }

    /// Says whether it was there.
    pub fn remove(&mut self, number: u32) -> bool {
        let was_there = self.numbers.remove(&number);
        if was_there {
            self.payer.end(self.kind, 1);
        }
        was_there
    }
}

impl Deref for Owned {
    type Target = HashSet<u32>;
    fn deref(&self) -> &HashSet<u32> {
        &self.numbers
    }
}

impl<'a> IntoIterator for &'a Owned {
    type Item = &'a u32;
    type IntoIter = std::collections::hash_set::Iter<'a, u32>;
    fn into_iter(self) -> Self::IntoIter {
        self.numbers.iter()
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        self.payer.end(self.kind, self.numbers.len() as u32);
    }
}
