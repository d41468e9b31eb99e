//! A server that hands its pages over to another one, while clients go on.
//!
//! ```text
//!  there is another copy:   the server ─ leaves ─► the other copy has all ─► its link asks the new server ─► that is filled from the other copy
//!  there is none:           the new server is the other copy, and is filled ─► the server leaves, and that one is the only copy
//! ```
//!
//! So at no time is a page only at one of two servers that could die. Until the server has gone, everything
//! can be undone.

use verbatim_lease::{Copy, Event};

use super::Disk;
use super::moving::Tenure;
use super::servers::Standing;
use crate::link::Wanted;

/// A hand-over in progress.
pub(super) struct Handing {
    /// The copy that leaves.
    copy: Copy,
    /// The server to which its pages go.
    to: String,
    /// The other copy was made for the hand-over, and one copy remains in the end.
    is_one: bool,
    /// The other copy has all pages.
    is_leaving: bool,
}

impl Disk {
    /// A server wants its pages handed over, or no longer wants it.
    pub(super) fn hand_over_to(&mut self, copy: Copy, to: Option<String>) {
        let Some(server) = &mut self.servers[copy.index()] else {
            return;
        };
        // Its link may have asked the other server already.
        server.hand_over = to.filter(|to| *to != server.host);
        let wanted = server.hand_over.clone();
        let handing = self.handing.as_ref();
        if handing.is_some_and(|handing| handing.copy == copy && Some(&handing.to) != wanted.as_ref()) {
            self.stays();
        }
    }

    /// Begins when the disk is served here, goes nowhere, and has no other hand-over.
    pub(super) fn look_at_handing(&mut self) {
        let is_quiet = matches!(self.tenure, Tenure::Serves) && self.leaving.is_none();
        if !is_quiet || self.handing.is_some() {
            return self.look_whether_all_have_it();
        }
        let wants = |copy: &Copy| Some((*copy, self.servers[copy.index()].as_ref()?.hand_over.clone()?));
        let Some((copy, to)) = Copy::BOTH.iter().find_map(wants) else {
            return;
        };
        if let Err(why) = self.begin_handing(copy, &to) {
            tracing::error!("nothing is handed over to {to}: {why}");
            if let Some(server) = &mut self.servers[copy.index()] {
                server.hand_over = None;
            }
        }
    }

    fn begin_handing(&mut self, copy: Copy, to: &str) -> Result<(), String> {
        let other = copy.other();
        let is_one = match &self.servers[other.index()] {
            Some(server) if server.host == to => {
                return Err("it stands in for the one that leaves".to_owned());
            }
            Some(_) => false,
            None => !(other == Copy::Second && self.file.is_some()),
        };
        if is_one {
            let server = (self.settings.connect)(to, other);
            self.servers[other.index()] = Some(server.map_err(|error| format!("{error:#}"))?);
        }
        self.handing = Some(Handing {
            copy,
            to: to.to_owned(),
            is_one,
            is_leaving: !is_one,
        });
        self.leaves_again(copy);
        Ok(())
    }

    /// Lets the server leave when the new one has all pages.
    fn look_whether_all_have_it(&mut self) {
        let Some(handing) = self.handing.as_mut().filter(|handing| !handing.is_leaving) else {
            return;
        };
        let copy = handing.copy;
        let other = Copy::BOTH.map(|one| one != copy);
        if self.engine.is_behind() || self.engine.stays_behind(other) > 0 {
            return;
        }
        match (self.is_there(copy), self.is_there(copy.other())) {
            (_, false) => {}
            (false, true) => self.drop_server(copy),
            (true, true) => {
                if let Some(handing) = &mut self.handing {
                    handing.is_leaving = true;
                }
                self.leaves_again(copy);
            }
        }
    }

    /// A server that hands its pages over is connected, perhaps again.
    pub(super) fn leaves_again(&mut self, copy: Copy) {
        let is_it = |handing: &Handing| handing.copy == copy && handing.is_leaving;
        if self.handing.as_ref().is_some_and(is_it)
            && let Some(server) = &mut self.servers[copy.index()]
        {
            server.is_leaving = true;
            self.event(Event::Leaving { copy });
        }
    }

    /// Ends the hand-over: the remaining pages stay at the server.
    fn stays(&mut self) {
        let Some(Handing { copy, is_one, .. }) = self.handing.take() else {
            return;
        };
        let Some(server) = &mut self.servers[copy.index()] else {
            return;
        };
        server.is_leaving = false;
        if is_one {
            // Pages that went to the new server come back, if the old one lacks any.
            self.handing = Some(Handing {
                copy: copy.other(),
                to: server.host.clone(),
                is_one,
                is_leaving: false,
            });
        }
        self.event(Event::Stays { copy });
    }

    fn is_there(&self, copy: Copy) -> bool {
        let server = &self.servers[copy.index()];
        server
            .as_ref()
            .is_some_and(|server| !matches!(server.standing, Standing::Down))
    }

    /// Whether a server that was to leave is no longer needed: it is back with other memory, and the other
    /// server is there.
    pub(super) fn needs_no_more(&self, copy: Copy) -> bool {
        let handing = self.handing.as_ref();
        handing.is_some_and(|handing| handing.copy == copy && handing.is_one) && self.is_there(copy.other())
    }

    /// Removes the server as a copy.
    pub(super) fn drop_server(&mut self, copy: Copy) {
        if let Some(server) = &self.servers[copy.index()] {
            server.want(Wanted::Goodbye);
            self.give_up(copy, "it has left".to_owned());
            self.servers[copy.index()] = None;
        }
        self.handing = None;
    }

    /// All pages of a copy are elsewhere. Returns whether a server had asked for that.
    pub(super) fn has_handed_over(&mut self, copy: Copy) -> bool {
        let Some(handing) = self.handing.take_if(|handing| handing.copy == copy) else {
            return false;
        };
        tracing::info!("all pages have left for {}", handing.to);
        if handing.is_one {
            self.drop_server(copy);
            return true;
        }
        if let Some(server) = &mut self.servers[copy.index()] {
            server.want(Wanted::LeaveFor(handing.to.clone()));
            server.host = handing.to;
            server.hand_over = None;
            self.give_up(copy, "it is asked for memory".to_owned());
        }
        true
    }
}
