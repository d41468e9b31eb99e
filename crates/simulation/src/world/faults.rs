//! What goes wrong.

use verbatim_session::decision::{destination, partner, source};

use super::source::Proxy;
use super::{Common, Message, Quirk, Steps, Tasks, Who, World};

/// Messages are lost at any time, for nothing: whoever needs an answer asks again.
pub(super) fn loss(steps: &mut Steps<'_>) {
    for (message, what) in [
        (Message::Quiesce, "loses Quiesce"),
        (Message::Restore, "loses Restore"),
        (Message::Commit, "loses Commit"),
        (Message::Settle, "loses Settle"),
        (Message::Abort, "loses Abort"),
        (Message::Claim, "loses Claim"),
        (Message::Switch, "loses Switch"),
        (Message::SwitchInstead, "loses Switch by the destination"),
    ] {
        if steps.world.mail.has(message) {
            steps.may(what, |world| world.mail.take(message));
        }
    }
}

pub(super) fn steps(steps: &mut Steps<'_>) {
    source_faults(steps);
    destination_faults(steps);
    partner_faults(steps);
    steps.who = Who::Network;
    if !steps.world.mail.has(Message::ForgedCommit)
        && steps
            .world
            .destination
            .agent
            .is_some_and(|agent| !super::source::is_over(agent.machine.state()))
    {
        steps.fault("a stranger asks the destination to commit", |world| {
            world.mail.send(Message::ForgedCommit)
        });
    }
}

/// Whether damage to the journal would be seen by an agent that starts.
fn can_be_damaged(common: &Common) -> bool {
    common
        .journal
        .is_some_and(|standing| standing.damaged() != standing)
}

/// Faults that every host has.
fn common(steps: &mut Steps<'_>, common: Common, of: fn(&mut World) -> &mut Common) {
    let quirks = steps.quirks;
    if common.nic {
        steps.fault("the RNIC dies", move |world| {
            let common = of(world);
            common.nic = false;
            common.listeners &= !quirks.has(Quirk::LostListeners);
            // Its contexts are gone. Those that count before the decision are the destination's.
            world.destination.contexts &= world.destination.common.nic;
        });
    }
    // Without the quirk it is cut off, and as if it had never been.
    if quirks.has(Quirk::Glue) && common.writes[0].is_some() && !common.torn {
        steps.fault("a record is torn", move |world| of(world).torn = true);
    }
}

fn source_faults(steps: &mut Steps<'_>) {
    steps.who = Who::Source;
    let host = steps.world.source;
    if host.agent.is_some() {
        steps.fault("the agent dies", |world| {
            world.source.agent = None;
            world.source.common.forget();
        });
        if can_be_damaged(&host.common) {
            steps.fault("the agent dies, and its journal is damaged", |world| {
                world.source.agent = None;
                world.source.common.forget();
                world.source.common.damage();
            });
        }
    }
    if host.criu {
        steps.fault("CRIU is killed", |world| world.source.criu = false);
    }
    if host.proxy != Proxy::None {
        // CRIU gets no answer, and lets the tasks go on. The cgroup stays as it is.
        steps.fault("the proxy is killed", |world| {
            world.source.proxy = Proxy::None;
            world.source.criu = false;
        });
    }
    if host.common.writes[0].is_some() {
        steps.fault("the disk refuses a record", |world| {
            if let Some((mark, written)) = world.source.common.not_written() {
                super::source::handle(world, source::Event::Written(mark, written));
            }
        });
    }
    common(steps, host.common, |world| &mut world.source.common);
    let quirks = steps.quirks;
    let reboots = |world: &mut World| {
        let host = &mut world.source;
        (host.agent, host.criu, host.frozen, host.proxy) = (None, false, false, Proxy::None);
        host.tasks = Tasks::Gone;
        host.knows_nothing = false;
        host.common.reboot(quirks);
    };
    steps.fault("the host reboots", reboots);
    if can_be_damaged(&host.common) {
        steps.fault("the host reboots, and its journal is damaged", |world| {
            reboots(world);
            world.source.common.damage();
        });
    }
}

fn destination_faults(steps: &mut Steps<'_>) {
    steps.who = Who::Destination;
    let host = steps.world.destination;
    if host.agent.is_some() {
        steps.fault("the agent dies", |world| {
            world.destination.agent = None;
            world.destination.common.forget();
        });
        if can_be_damaged(&host.common) {
            steps.fault("the agent dies, and its journal is damaged", |world| {
                world.destination.agent = None;
                world.destination.common.forget();
                world.destination.common.damage();
            });
        }
    }
    if host.criu {
        steps.fault("CRIU or its proxy is killed", |world| {
            let host = &mut world.destination;
            host.criu = false;
            if host.tasks == Tasks::Held {
                host.tasks = Tasks::Gone;
            }
            super::destination::released(world, destination::Event::ReleaseFailed);
        });
    }
    if host.common.writes[0].is_some() {
        steps.fault("the disk refuses a record", |world| {
            if let Some((mark, written)) = world.destination.common.not_written() {
                super::destination::handle(world, destination::Event::Written(mark, written));
            }
        });
    }
    common(steps, host.common, |world| &mut world.destination.common);
    let quirks = steps.quirks;
    let reboots = |world: &mut World| {
        let host = &mut world.destination;
        host.agent = None;
        (host.criu, host.ordered, host.marker, host.contexts) = (false, false, false, false);
        if host.tasks != Tasks::None {
            host.tasks = Tasks::Gone;
        }
        host.knows_nothing = false;
        host.common.reboot(quirks);
    };
    steps.fault("the host reboots", reboots);
    if can_be_damaged(&host.common) {
        steps.fault("the host reboots, and its journal is damaged", |world| {
            reboots(world);
            world.destination.common.damage();
        });
    }
}

fn partner_faults(steps: &mut Steps<'_>) {
    steps.who = Who::Partner;
    let host = steps.world.partner;
    if host.agent.is_some() {
        steps.fault("the agent dies", |world| {
            world.partner.agent = None;
            world.partner.common.forget();
        });
        if can_be_damaged(&host.common) {
            steps.fault("the agent dies, and its journal is damaged", |world| {
                world.partner.agent = None;
                world.partner.common.forget();
                world.partner.common.damage();
            });
        }
    }
    if host.common.writes[0].is_some() {
        steps.fault("the disk refuses a record", |world| {
            if let Some((mark, written)) = world.partner.common.not_written() {
                super::partner::handle(world, partner::Event::Written(mark, written));
            }
        });
    }
    common(steps, host.common, |world| &mut world.partner.common);
}
