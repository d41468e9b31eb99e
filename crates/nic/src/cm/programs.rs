//! What there is of a program beside its channels, ids and memberships: their names, and what it is when it moves.

use std::collections::HashMap;

use verbatim_cm::{CommId, Gid, IdImage, PortSpace};

use super::ways::Known;

/// librdmacm finds ids by their names, and has no room for larger ones.
const MOST_NAME: u32 = 65_535;

/// What has a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    Id,
    Membership,
}

/// One program, by its context.
#[derive(Debug, Default)]
pub struct Program {
    ids: usize,
    last: u32,
    /// What it knows, if that is another RNIC.
    pub known: Option<Known>,
    /// It stands still: its ids of the communication manager.
    pub held: Option<Vec<IdImage>>,
    /// Where messages for its ids are to be passed on, when it does not come back.
    pub goes_to: Option<Gid>,
    /// What is kept free for it, before it comes.
    pub reserved: Option<Reserved>,
}

/// What is kept free.
#[derive(Debug, Default)]
pub struct Reserved {
    pub numbers: Vec<CommId>,
    pub ports: Vec<(PortSpace, u16)>,
}

/// All of them. Names are a program's own: it keeps them where it moves.
#[derive(Debug, Default)]
pub struct Programs {
    all: HashMap<u32, Program>,
    names: HashMap<(u32, Kind, u32), u32>,
}

impl Programs {
    pub fn get(&self, context: u32) -> Option<&Program> {
        self.all.get(&context)
    }

    pub fn get_mut(&mut self, context: u32) -> Option<&mut Program> {
        self.all.get_mut(&context)
    }

    /// That of a context, which may have none yet.
    pub fn of(&mut self, context: u32) -> &mut Program {
        self.all.entry(context).or_default()
    }

    pub fn remove(&mut self, context: u32) -> Option<Program> {
        self.all.remove(&context)
    }

    /// How many ids it has.
    pub fn count(&self, context: u32) -> usize {
        self.get(context).map_or(0, |program| program.ids)
    }

    /// A name that nothing has; the one after the latest, if that is free. There are fewer ids than names.
    pub fn free_name(&mut self, context: u32, kind: Kind) -> u32 {
        let last = self.of(context).last;
        let names = (last..MOST_NAME).chain(0..last).map(|name| name + 1);
        let free = names
            .into_iter()
            .find(|name| !self.names.contains_key(&(context, kind, *name)));
        let name = free.unwrap_or(MOST_NAME);
        self.of(context).last = name;
        name
    }

    pub fn name(&mut self, context: u32, kind: Kind, name: u32, number: u32) {
        self.names.insert((context, kind, name), number);
        if kind == Kind::Id {
            self.of(context).ids += 1;
        }
    }

    pub fn forget(&mut self, context: u32, kind: Kind, name: u32) {
        let known = self.names.remove(&(context, kind, name)).is_some();
        if let Some(program) = self.all.get_mut(&context).filter(|_| known && kind == Kind::Id) {
            program.ids -= 1;
        }
    }

    pub fn find(&self, context: u32, kind: Kind, name: u32) -> Option<u32> {
        self.names.get(&(context, kind, name)).copied()
    }
}
