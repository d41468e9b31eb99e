//! Who may send which request: the one place that says so. The engine asks it before it looks at a request.
//!
//! A connection tells two things of whoever holds it: over which socket it came, and whether its context was handed over. Root
//! alone is not enough: root in a container is root to the kernel, and comes over its instance's listener, or over a
//! connection that an agent has opened and handed over.

use verbatim_device::control::{CmRequest, Request, RequestKind};

use crate::error::Refused;

/// The socket over which a connection came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// The RNIC's own control socket, which no container sees.
    Main,
    /// A listener of an instance.
    Instance,
}

/// What the sender of a request has on its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// No context yet.
    NoContext,
    /// A context that the sender's process has opened itself, and nobody has attached to.
    Opened,
    /// A context that another process has opened, or that was attached to.
    HandedOver,
}

/// Who sends a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caller {
    /// The kernel's word on the sender: user 0.
    pub root: bool,
    pub origin: Origin,
    pub stage: Stage,
}

/// What is asked of a caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    /// Anybody who has a connection.
    Anybody,
    /// Who has a context, however that came about: the request reaches what is in the context, and nothing else.
    Holder,
    /// Root of the host on a context of its own: it makes objects for a program that comes.
    Maker,
    /// Root of the host, on a connection without a context.
    HostRoot,
    /// Any user of the host, with or without a context; the answer depends on the user.
    HostUser,
}

/// Whoever adds a request decides here who may send it.
fn rule(request: &Request) -> Rule {
    use Request as R;
    match request {
        R::OpenContext { .. } => Rule::Anybody,
        R::AddListener { .. }
        | R::RemoveListener { .. }
        | R::QueryListeners { .. }
        | R::StartCapture { .. }
        | R::QueryOwners { .. }
        | R::TakePeerQuestions
        | R::AnswerPeerQuestions { .. }
        | R::MeetPeers { .. }
        | R::PeersGone { .. }
        | R::PeersHeard { .. } => Rule::HostRoot,
        R::QueryStatistics { .. } => Rule::HostUser,
        // Peers of somebody else may still send to a number or key that is chosen.
        R::RegMr { key: Some(_), .. }
        | R::AllocMw { rkey: Some(_), .. }
        | R::CreateQp { qpn: Some(_), .. }
        | R::Cm(CmRequest::Reserve { .. })
        | R::ServeHost => Rule::Maker,
        R::RegMr { key: None, .. }
        | R::AllocMw { rkey: None, .. }
        | R::CreateQp { qpn: None, .. }
        | R::AttachContext { .. }
        | R::ParkContext
        | R::AllocPd
        | R::DeallocPd { .. }
        | R::DeregMr { .. }
        | R::ReregMr { .. }
        | R::DeallocMw { .. }
        | R::QueryMw { .. }
        | R::RestoreMw { .. }
        | R::CreateCompChannel
        | R::AttachCompChannel { .. }
        | R::DestroyCompChannel { .. }
        | R::CreateCq { .. }
        | R::ResizeCq { .. }
        | R::DestroyCq { .. }
        | R::CreateSrq { .. }
        | R::ModifySrq { .. }
        | R::QuerySrq { .. }
        | R::DestroySrq { .. }
        | R::CreateAh { .. }
        | R::DestroyAh { .. }
        | R::AttachMcast { .. }
        | R::DetachMcast { .. }
        | R::ModifyQp { .. }
        | R::QueryQp { .. }
        | R::QueryQps { .. }
        | R::StopQp { .. }
        | R::RestartQp { .. }
        | R::SetQpSecret { .. }
        | R::SetQpClass { .. }
        | R::PauseQps { .. }
        | R::DumpQps { .. }
        | R::RestoreQps { .. }
        | R::ResumeQps { .. }
        | R::ForwardQps { .. }
        | R::DestroyQp { .. }
        | R::Cm(_) => Rule::Holder,
    }
}

/// Refuses a request of whom may not send it with `EPERM`, and one that has no meaning on its connection with `EINVAL`.
pub fn check(request: &Request, caller: Caller) -> Result<(), Refused> {
    let name: &str = RequestKind::from(request).into();
    let of_host = caller.origin == Origin::Main && caller.stage != Stage::HandedOver;
    let host_root = of_host && caller.root;
    let has_context = caller.stage != Stage::NoContext;
    let forbidden = |who: &str| Err(Refused::new(libc::EPERM, format!("{name}: only {who}")));
    let meaningless = |why: &str| Err(Refused::invalid(format!("{name}: {why}")));
    match rule(request) {
        Rule::HostUser if !of_host => forbidden(
            "users of the host, over the RNIC's own control socket and a connection that was not handed over",
        ),
        Rule::HostRoot if !host_root => forbidden(
            "root of the host, over the RNIC's own control socket and a connection that was not handed over",
        ),
        Rule::Maker if !host_root => forbidden(
            "root of the host may choose numbers and keys, over the RNIC's own control socket, before the context is \
             handed over",
        ),
        Rule::HostRoot if has_context => {
            meaningless("this connection has a context; make another connection")
        }
        Rule::Holder | Rule::Maker if !has_context => {
            meaningless("this connection has no context yet; open one first")
        }
        Rule::Anybody | Rule::Holder | Rule::Maker | Rule::HostRoot | Rule::HostUser => Ok(()),
    }
}
