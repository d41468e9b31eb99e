//! Memory regions.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;

use parking_lot::Mutex;
use verbatim_adopt::{AdoptError, Backing, Token};
use verbatim_channel::{MrRecord, SegmentRecord};
use verbatim_device::control::Access;

use crate::backend::{Device, PhysicalMemory, PhysicalMrChange, PhysicalMrInit};
use crate::context::Context;
use crate::dm::Dm;
use crate::error::VerbsError;
use crate::nap;
use crate::pd::Pd;
use crate::process::Process;
use crate::tables::key_slot;

/// How often an object is made anew because its keys collide with virtual ones.
const MAX_COLLISIONS: usize = 64;

/// A memory region.
#[derive(Debug)]
pub struct Mr {
    lkey: u32,
    rkey: u32,
    /// The RNIC's local key.
    pub(crate) physical_lkey: AtomicU32,
    /// Its remote key.
    pub(crate) physical_rkey: AtomicU32,
    /// What re-registering can change.
    now: Mutex<Now>,
}

#[derive(Debug)]
struct Now {
    pd: Arc<Pd>,
    access: Access,
    memory: Memory,
}

/// Where a region's bytes are.
#[derive(Debug)]
struct Memory {
    address: u64,
    length: u64,
    iova: u64,
    segments: Vec<SegmentRecord>,
    /// The claim on the pages in the memory file; taken when the region goes.
    token: Option<Token>,
    /// It is on-chip memory.
    dm: Option<Arc<Dm>>,
    /// The file that it is mapped from, where the program has said so: nothing is adopted.
    file: Option<OwnedFd>,
}

/// What is to change in a region (ibv_rereg_mr(3)).
#[derive(Debug, Clone, Copy, Default)]
pub struct MrChange<'a> {
    /// Another protection domain.
    pub pd: Option<&'a Arc<Pd>>,
    /// Another start and length in the program's address space.
    pub memory: Option<(u64, u64)>,
    /// Other rights.
    pub access: Option<Access>,
}

impl Mr {
    /// The virtual local key.
    pub fn lkey(&self) -> u32 {
        self.lkey
    }

    /// The virtual remote key.
    pub fn rkey(&self) -> u32 {
        self.rkey
    }

    /// Its protection domain.
    pub fn pd(&self) -> Arc<Pd> {
        self.now.lock().pd.clone()
    }

    /// Start in the program's address space; of on-chip memory, where this process has it mapped.
    pub fn address(&self) -> u64 {
        self.now.lock().memory.address
    }

    /// Length in bytes.
    pub fn length(&self) -> u64 {
        self.now.lock().memory.length
    }

    /// As the road map tells it.
    pub(crate) fn describe(&self) -> MrRecord {
        let now = self.now.lock();
        MrRecord {
            lkey: self.lkey,
            rkey: self.rkey,
            physical_lkey: self.physical_lkey.load(SeqCst),
            physical_rkey: self.physical_rkey.load(SeqCst),
            pd: now.pd.number(),
            address: now.memory.address,
            length: now.memory.length,
            iova: now.memory.iova,
            access: now.access,
            segments: now.memory.segments.clone(),
        }
    }

    pub(crate) fn register(
        pd: &Arc<Pd>,
        address: u64,
        length: u64,
        iova: u64,
        access: Access,
    ) -> Result<Arc<Self>, VerbsError> {
        let process = pd.context.process();
        let _pass = process.control.enter();
        let device = pd.context.device()?;
        // Addresses from 0 on are all that the flag means for a region.
        let iova = if access.contains(Access::ZERO_BASED) {
            0
        } else {
            iova
        };
        let memory = Memory::of_process(process, &*device, address, length, iova)?;
        Self::make(pd, &*device, access - Access::ZERO_BASED, memory)
    }

    /// Of memory that is mapped, shared, from a file on tmpfs, from `offset` on. It stays there.
    pub(crate) fn register_file(
        pd: &Arc<Pd>,
        (file, offset): (BorrowedFd<'_>, u64),
        (address, length): (u64, u64),
        access: Access,
    ) -> Result<Arc<Self>, VerbsError> {
        let process = pd.context.process();
        let _pass = process.control.enter();
        let device = pd.context.device()?;
        let file = file
            .try_clone_to_owned()
            .map_err(|source| VerbsError::Os { call: "dup", source })?;
        let memory = Memory {
            address,
            length,
            iova: address,
            segments: vec![SegmentRecord {
                address,
                length,
                offset: Some(offset),
            }],
            token: None,
            dm: None,
            file: Some(file),
        };
        Self::make(pd, &*device, access - Access::ZERO_BASED, memory)
    }

    /// Of on-chip memory: addresses are offsets from `offset`.
    pub(crate) fn register_dm(
        pd: &Arc<Pd>,
        dm: &Arc<Dm>,
        offset: u64,
        length: u64,
        access: Access,
    ) -> Result<Arc<Self>, VerbsError> {
        let process = pd.context.process();
        let _pass = process.control.enter();
        if !Arc::ptr_eq(dm.context(), &pd.context) {
            return Err(VerbsError::Invalid(
                "the on-chip memory is another device's".to_owned(),
            ));
        }
        dm.check(offset, length)?;
        let device = pd.context.device()?;
        let memory = Memory {
            dm: Some(dm.clone()),
            ..Memory::of_process(process, &*device, dm.address() + offset, length, 0)?
        };
        dm.users.fetch_add(1, SeqCst);
        Self::make(pd, &*device, access - Access::ZERO_BASED, memory)
    }

    /// As [`Self::register`], with that key, local and remote. The caller is alone with the context, or has entered its gate.
    pub(crate) fn register_as(
        pd: &Arc<Pd>,
        (address, length, iova): (u64, u64, u64),
        access: Access,
        key: u32,
    ) -> Result<Arc<Self>, VerbsError> {
        let process = pd.context.process();
        let device = pd.context.device()?;
        let memory = Memory::of_process(process, &*device, address, length, iova)?;
        Self::make_with(pd, access, memory, |memory| {
            let register = |memory: Option<PhysicalMemory<'_>>| {
                let init = PhysicalMrInit {
                    pd: pd.physical.load(SeqCst),
                    access,
                    memory: memory.expect("it was given"),
                };
                device.reg_mr_as(&init, key)
            };
            claim_keys(process, key, key)?;
            if let Err(error) = with_physical(process, Some(memory), register) {
                unclaim_keys(process, key, key);
                return Err(error);
            }
            Ok((key, key))
        })
    }

    fn make(
        pd: &Arc<Pd>,
        device: &dyn Device,
        access: Access,
        memory: Memory,
    ) -> Result<Arc<Self>, VerbsError> {
        Self::make_with(pd, access, memory, |memory| {
            register_physically(pd, device, access, memory)
        })
    }

    fn make_with(
        pd: &Arc<Pd>,
        access: Access,
        mut memory: Memory,
        register: impl FnOnce(&Memory) -> Result<(u32, u32), VerbsError>,
    ) -> Result<Arc<Self>, VerbsError> {
        let process = pd.context.process();
        let (lkey, rkey) = match register(&memory) {
            Ok(keys) => keys,
            Err(error) => {
                memory.give_back(process);
                return Err(error);
            }
        };
        let mr = Arc::new(Self {
            lkey,
            rkey,
            physical_lkey: AtomicU32::new(lkey),
            physical_rkey: AtomicU32::new(rkey),
            now: Mutex::new(Now {
                pd: pd.clone(),
                access,
                memory,
            }),
        });
        pd.context.lkeys.set(lkey, lkey);
        mr.tell_shift(&pd.context);
        let mut objects = pd.context.objects.lock();
        objects.mrs.insert(lkey, mr.clone());
        pd.users.fetch_add(1, SeqCst);
        drop(objects);
        process.changed();
        Ok(mr)
    }

    /// For who looks at what has arrived in it.
    fn tell_shift(&self, context: &Context) {
        let now = self.now.lock();
        let shift = now.memory.address.wrapping_sub(now.memory.iova);
        context.datagrams.set_shift(self.lkey, shift);
    }

    /// Registers the same memory at another RNIC: the keys there.
    pub(crate) fn register_again(
        &self,
        process: &Process,
        device: &dyn Device,
        physical_pd: u32,
    ) -> Result<(u32, u32), VerbsError> {
        let now = self.now.lock();
        with_physical(process, Some(&now.memory), |memory| {
            device.reg_mr(&PhysicalMrInit {
                pd: physical_pd,
                access: now.access,
                memory: memory.expect("it was given"),
            })
        })
    }

    /// Changes it under its keys (ibv_rereg_mr(3)). If that fails, it is as it was.
    pub fn rereg(&self, change: &MrChange<'_>) -> Result<(), VerbsError> {
        let context = self.pd().context.clone();
        let process = context.process();
        let _pass = process.control.enter();
        let device = context.device()?;
        let mut now = self.now.lock();
        if change.pd.is_some_and(|pd| !Arc::ptr_eq(&pd.context, &context)) {
            return Err(VerbsError::Invalid(
                "the protection domain is another device's".to_owned(),
            ));
        }
        if change.memory.is_some() && now.memory.dm.is_some() {
            return Err(VerbsError::Unsupported(
                "a region of on-chip memory keeps its memory; register another".to_owned(),
            ));
        }
        let zero_based = now.memory.iova == 0 && now.memory.address != 0;
        // The new pages first: they may be partly those of before, which must not go back and forth.
        let mut memory = match change.memory {
            Some((address, length)) => {
                let iova = if zero_based { 0 } else { address };
                Some(Memory::of_process(process, &*device, address, length, iova)?)
            }
            None => None,
        };
        let access = change.access.map(|access| access - Access::ZERO_BASED);
        let physical_lkey = self.physical_lkey.load(SeqCst);
        let outcome = with_physical(process, memory.as_ref(), |memory| {
            let change = PhysicalMrChange {
                pd: change.pd.map(|pd| pd.physical.load(SeqCst)),
                access,
                memory,
            };
            device.rereg_mr(physical_lkey, &change)
        });
        if let Err(error) = outcome {
            if let Some(memory) = &mut memory {
                memory.give_back(process);
            }
            return Err(error);
        }
        if let Some(memory) = memory {
            std::mem::replace(&mut now.memory, memory).give_back(process);
        }
        now.access = access.unwrap_or(now.access);
        if let Some(pd) = change.pd {
            let _objects = context.objects.lock();
            pd.users.fetch_add(1, SeqCst);
            now.pd.users.fetch_sub(1, SeqCst);
            now.pd = pd.clone();
        }
        drop(now);
        self.tell_shift(&context);
        process.changed();
        Ok(())
    }

    /// Deregisters it and gives its pages back to the program.
    pub fn dereg(&self) -> Result<(), VerbsError> {
        let pd = self.pd();
        let context = &pd.context;
        let process = context.process();
        let _pass = process.control.enter();
        let removed = context.objects.lock().mrs.remove(&self.lkey);
        let removed = removed.ok_or_else(|| VerbsError::Gone {
            object: format!("memory region {:#x}", self.lkey),
        })?;
        let physical_lkey = self.physical_lkey.load(SeqCst);
        if let Err(error) = context.destroy_physically(|device| device.dereg_mr(physical_lkey)) {
            context.objects.lock().mrs.insert(self.lkey, removed);
            return Err(error);
        }
        context.lkeys.remove(self.lkey);
        context.datagrams.set_shift(self.lkey, 0);
        if context.is_movable() {
            let mut registry = process.registry.lock();
            registry.lkey_slots.remove(&key_slot(self.lkey));
            // The keys of a region that has moved stay taken, see `Registry::rkey_slots`.
            if physical_lkey == self.lkey {
                registry.rkey_slots.remove(&key_slot(self.rkey));
            }
        }
        // Another thread may have given it another one since.
        self.pd().users.fetch_sub(1, SeqCst);
        self.give_pages_back(process);
        process.changed();
        Ok(())
    }

    /// Turns the region's pages into the program's private memory again.
    pub(crate) fn give_pages_back(&self, process: &Process) {
        self.now.lock().memory.give_back(process);
    }
}

impl Memory {
    /// Of the process's own; its pages are adopted where they can be.
    fn of_process(
        process: &Process,
        device: &dyn Device,
        address: u64,
        length: u64,
        iova: u64,
    ) -> Result<Self, VerbsError> {
        let (segments, token) = adopt(process, device, address, length)?;
        Ok(Self {
            address,
            length,
            iova,
            segments,
            token,
            dm: None,
            file: None,
        })
    }

    fn give_back(&mut self, process: &Process) {
        release(process, self.token.take());
        if let Some(dm) = self.dm.take() {
            dm.users.fetch_sub(1, SeqCst);
        }
    }
}

/// Moves the region's pages into the memory file, where that is possible.
fn adopt(
    process: &Process,
    device: &dyn Device,
    address: u64,
    length: u64,
) -> Result<(Vec<SegmentRecord>, Option<Token>), VerbsError> {
    let as_it_is = || {
        let segment = SegmentRecord {
            address,
            length,
            offset: None,
        };
        (vec![segment], None)
    };
    if length == 0 || !device.adopts_memory() {
        return Ok(as_it_is());
    }
    let Some(adopter) = process.adopter() else {
        return Ok(as_it_is());
    };
    match nap::while_asleep(adopter, |adopter| {
        adopter.adopt(address as usize, length as usize)
    }) {
        Ok(adoption) => {
            let segments = adoption
                .segments
                .into_iter()
                .map(|(range, backing)| SegmentRecord {
                    address: range.start,
                    length: range.end - range.start,
                    offset: match backing {
                        Backing::File { offset } => Some(offset),
                        Backing::Process => None,
                    },
                });
            Ok((segments.collect(), Some(adoption.token)))
        }
        Err(error)
            if (error.leaves_process_access() || device.checks_memory())
                && !matches!(error, AdoptError::Closed) =>
        {
            Ok(as_it_is())
        }
        Err(error) => Err(VerbsError::Memory(error)),
    }
}

fn release(process: &Process, token: Option<Token>) {
    if let (Some(adopter), Some(token)) = (process.adopter_in_use(), token) {
        nap::while_asleep(adopter, |adopter| adopter.release(token));
    }
}

/// Gives `take` the memory as the RNIC is told of it.
fn with_physical<T>(
    process: &Process,
    memory: Option<&Memory>,
    take: impl FnOnce(Option<PhysicalMemory<'_>>) -> Result<T, VerbsError>,
) -> Result<T, VerbsError> {
    let Some(memory) = memory else { return take(None) };
    let adopted = match process.adopter_in_use().filter(|_| memory.token.is_some()) {
        Some(adopter) => adopter.open_file().map_err(VerbsError::Memory)?,
        None => None,
    };
    take(Some(PhysicalMemory {
        address: memory.address,
        length: memory.length,
        iova: memory.iova,
        segments: &memory.segments,
        file: memory.file.as_ref().or(adopted.as_ref()).map(AsFd::as_fd),
    }))
}

/// Registers at the RNIC, again and again until the keys collide with no virtual ones.
fn register_physically(
    pd: &Pd,
    device: &dyn Device,
    access: Access,
    memory: &Memory,
) -> Result<(u32, u32), VerbsError> {
    let process = pd.context.process();
    with_physical(process, Some(memory), |memory| {
        let init = PhysicalMrInit {
            pd: pd.physical.load(SeqCst),
            access,
            memory: memory.expect("it was given"),
        };
        until_keys_are_free(
            "reg_mr",
            || device.reg_mr(&init),
            |(lkey, rkey)| {
                if !pd.context.is_movable() {
                    return true;
                }
                let mut registry = process.registry.lock();
                let free = registry.keys_are_free(*lkey, *rkey);
                if free {
                    registry.lkey_slots.insert(key_slot(*lkey));
                    registry.rkey_slots.insert(key_slot(*rkey));
                }
                free
            },
            |(lkey, _)| _ = device.dereg_mr(lkey),
        )
    })
}

/// Keeps these keys for an object that is about to be made with them.
pub(crate) fn claim_keys(process: &Process, lkey: u32, rkey: u32) -> Result<(), VerbsError> {
    let mut registry = process.registry.lock();
    if !registry.keys_are_free(lkey, rkey) {
        return Err(VerbsError::Refused {
            verb: "restore_object",
            errno: libc::EEXIST,
            message: format!("key {rkey:#x} is that of another region or window of this process"),
        });
    }
    registry.lkey_slots.insert(key_slot(lkey));
    registry.rkey_slots.insert(key_slot(rkey));
    Ok(())
}

/// Takes [`claim_keys`] back.
pub(crate) fn unclaim_keys(process: &Process, lkey: u32, rkey: u32) {
    let mut registry = process.registry.lock();
    registry.lkey_slots.remove(&key_slot(lkey));
    registry.rkey_slots.remove(&key_slot(rkey));
}

/// Makes something at the RNIC until `claim` says that its keys are those of nothing else here; takes the others back.
pub(crate) fn until_keys_are_free<K>(
    verb: &'static str,
    mut make: impl FnMut() -> Result<K, VerbsError>,
    claim: impl Fn(&K) -> bool,
    unmake: impl Fn(K),
) -> Result<K, VerbsError> {
    let mut collided = Vec::new();
    let outcome = loop {
        match make() {
            Ok(keys) if claim(&keys) => break Ok(keys),
            Ok(keys) => collided.push(keys),
            Err(error) => break Err(error),
        }
        if collided.len() == MAX_COLLISIONS {
            break Err(VerbsError::Refused {
                verb,
                errno: libc::ENOMEM,
                message: format!("{MAX_COLLISIONS} keys in a row are those of regions that have moved"),
            });
        }
    };
    // Nobody has seen these; if the RNIC will not let go of one, it keeps it until the context is closed.
    collided.into_iter().for_each(unmake);
    outcome
}
