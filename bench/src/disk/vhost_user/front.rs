//! A front end of vhost-user-blk in one thread: what QEMU and a guest's driver do, the same for whoever serves.
//!
//! As a Linux guest of QEMU does it asks by a table of descriptors for each request, kicks when it is to be kicked, and sleeps until it is called.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use vhost::vhost_user::message::{VhostUserInflight, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

use super::super::fio::{Half, Load, Run};

/// VIRTIO_F_VERSION_1, VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC.
const NEEDED: u64 = 1 << 32 | 1 << 29 | 1 << 28;
/// VIRTIO_BLK_F_FLUSH: writes are not durable when they are answered.
const FLUSH: u64 = 1 << 9;
/// VHOST_USER_F_PROTOCOL_FEATURES.
const PROTOCOL: u64 = 1 << 30;

/// Descriptors, as QEMU's disks have by default.
const SIZE: u16 = 128;
const BLOCK: u64 = 4096;
const SECTOR: u64 = 512;

/// Where the memory begins, for the guest and for the front end.
const BASE: u64 = 1 << 30;
const LENGTH: usize = 1 << 20;
const TABLE: u64 = BASE;
const AVAILABLE: u64 = BASE + 0x1000;
const USED: u64 = BASE + 0x2000;
const HEADS: u64 = BASE + 0x3000;
const ANSWERS: u64 = BASE + 0x4000;
const INNER: u64 = BASE + 0x8000;
const DATA: u64 = BASE + 0x1_0000;

const NEXT: u16 = 1;
const WRITABLE: u16 = 2;
const INDIRECT: u16 = 4;

/// So long an answer may take.
const LIMIT: Duration = Duration::from_secs(30);

/// What is under way in a slot.
#[derive(Clone, Copy)]
struct Begun {
    at: Instant,
    writes: bool,
}

/// One that is connected, and whose queue works.
pub struct Front {
    frontend: Frontend,
    memory: GuestMemoryMmap<()>,
    kick: EventFd,
    call: EventFd,
    /// Of the requests that were made available.
    available: u16,
    /// Of the answers that were seen.
    seen: u16,
    blocks: u64,
    begun: Vec<Begun>,
    random: StdRng,
}

impl Front {
    /// At a disk of `length` bytes, for so many requests at once.
    pub fn connect(socket: &Path, length: u64, depth: u32) -> anyhow::Result<Self> {
        let file = File::from(memfd_create("front", MemfdFlags::CLOEXEC)?);
        file.set_len(LENGTH as u64)?;
        let range = (
            GuestAddress(BASE),
            LENGTH,
            Some(FileOffset::new(file.try_clone()?, 0)),
        );
        let memory = GuestMemoryMmap::from_ranges_with_files([range])?;
        let event = || EventFd::new(0).context("an eventfd");
        let (kick, call) = (event()?, event()?);
        let mut frontend = Frontend::connect(socket, 1).context("nobody is at the socket")?;
        frontend.set_owner()?;
        let offered = frontend.get_features()?;
        ensure!(
            offered & (NEEDED | PROTOCOL) == NEEDED | PROTOCOL,
            "it offers {offered:#x}"
        );
        let wanted = VhostUserProtocolFeatures::CONFIG | VhostUserProtocolFeatures::INFLIGHT_SHMFD;
        let protocol = frontend.get_protocol_features()? & wanted;
        frontend.set_protocol_features(protocol)?;
        frontend.set_features(offered & (NEEDED | PROTOCOL | FLUSH))?;
        if protocol.contains(VhostUserProtocolFeatures::INFLIGHT_SHMFD) {
            let (given, file) = frontend.get_inflight_fd(&VhostUserInflight::new(0, 0, 1, SIZE))?;
            frontend.set_inflight_fd(&given, std::os::fd::AsRawFd::as_raw_fd(&file))?;
        }
        frontend.set_mem_table(&[VhostUserMemoryRegionInfo {
            guest_phys_addr: BASE,
            memory_size: LENGTH as u64,
            userspace_addr: BASE,
            mmap_offset: 0,
            mmap_handle: std::os::fd::AsRawFd::as_raw_fd(&file),
        }])?;
        frontend.set_vring_num(0, SIZE)?;
        frontend.set_vring_base(0, 0)?;
        frontend.set_vring_addr(
            0,
            &VringConfigData {
                queue_max_size: SIZE,
                queue_size: SIZE,
                flags: 0,
                desc_table_addr: TABLE,
                used_ring_addr: USED,
                avail_ring_addr: AVAILABLE,
                log_addr: None,
            },
        )?;
        frontend.set_vring_call(0, &call)?;
        frontend.set_vring_kick(0, &kick)?;
        frontend.set_vring_enable(0, true)?;
        let begun = Begun {
            at: Instant::now(),
            writes: false,
        };
        let mut front = Self {
            frontend,
            memory,
            kick,
            call,
            available: 0,
            seen: 0,
            blocks: length / BLOCK,
            begun: vec![begun; depth as usize],
            random: StdRng::seed_from_u64(0x5eed),
        };
        for slot in 0..depth as u16 {
            front.lay_out(slot)?;
        }
        Ok(front)
    }

    /// What of a request is the same each time.
    fn lay_out(&mut self, slot: u16) -> anyhow::Result<()> {
        let number = u64::from(slot);
        let inner = INNER + 64 * number;
        self.descriptor(TABLE + 16 * number, inner, 48, INDIRECT, 0)?;
        self.descriptor(inner, HEADS + 16 * number, 16, NEXT, 1)?;
        self.descriptor(inner + 32, ANSWERS + number, 1, WRITABLE, 0)?;
        let noise: Vec<u8> = (0..BLOCK).map(|_| self.random.random()).collect();
        self.memory
            .write_slice(&noise, GuestAddress(DATA + BLOCK * number))?;
        Ok(())
    }

    fn descriptor(&self, at: u64, address: u64, length: u32, flags: u16, next: u16) -> anyhow::Result<()> {
        let (address, length) = (address.to_le_bytes(), length.to_le_bytes());
        let bytes = [&address[..], &length, &flags.to_le_bytes(), &next.to_le_bytes()].concat();
        Ok(self.memory.write_slice(&bytes, GuestAddress(at))?)
    }

    /// Begins a request somewhere on the disk; the server does not know yet.
    fn begin(&mut self, slot: u16, writes: bool) -> anyhow::Result<()> {
        let number = u64::from(slot);
        let block = self.random.random_range(0..self.blocks);
        let sector = block * (BLOCK / SECTOR);
        let access = if writes { NEXT } else { NEXT | WRITABLE };
        self.descriptor(
            INNER + 64 * number + 16,
            DATA + BLOCK * number,
            BLOCK as u32,
            access,
            2,
        )?;
        let put = |value: u64, at: u64| self.memory.write_obj(value, GuestAddress(at));
        // Type, and four reserved bytes.
        put(u64::from(writes), HEADS + 16 * number)?;
        put(sector, HEADS + 16 * number + 8)?;
        self.memory.write_obj(0xffu8, GuestAddress(ANSWERS + number))?;
        let entry = AVAILABLE + 4 + 2 * u64::from(self.available % SIZE);
        self.memory.write_obj(slot, GuestAddress(entry))?;
        self.available = self.available.wrapping_add(1);
        self.begun[usize::from(slot)] = Begun {
            at: Instant::now(),
            writes,
        };
        Ok(())
    }

    /// Tells of what was begun since `before`.
    fn publish(&self, before: u16) -> anyhow::Result<()> {
        let index = GuestAddress(AVAILABLE + 2);
        self.memory.store(self.available, index, Ordering::Release)?;
        fence(Ordering::SeqCst);
        let event = GuestAddress(USED + 4 + 8 * u64::from(SIZE));
        let event: u16 = self.memory.load(event, Ordering::Relaxed)?;
        let (since_event, since_before) = (
            self.available.wrapping_sub(event).wrapping_sub(1),
            self.available.wrapping_sub(before),
        );
        if since_event < since_before {
            self.kick.write(1)?;
        }
        Ok(())
    }

    fn used(&self) -> anyhow::Result<u16> {
        Ok(self.memory.load(GuestAddress(USED + 2), Ordering::Acquire)?)
    }

    /// Until there is an answer.
    fn wait(&self) -> anyhow::Result<()> {
        loop {
            if self.used()? != self.seen {
                return Ok(());
            }
            let event = GuestAddress(AVAILABLE + 4 + 2 * u64::from(SIZE));
            self.memory.store(self.seen, event, Ordering::Relaxed)?;
            fence(Ordering::SeqCst);
            if self.used()? != self.seen {
                return Ok(());
            }
            let mut ends = [PollFd::from_borrowed_fd(fd(&self.call), PollFlags::IN)];
            let called = poll(&mut ends, Some(&LIMIT.try_into()?))?;
            ensure!(called == 1, "the server does not answer");
            self.call.read()?;
        }
    }

    /// Requests of 4 KiB at random for a while.
    pub fn run(&mut self, load: Load) -> anyhow::Result<Run> {
        let share = match load.pattern {
            "randread" => 0.0,
            "randwrite" => 1.0,
            _ => 0.3,
        };
        let mut times = [Vec::new(), Vec::new()];
        let began = Instant::now();
        let length = Duration::from_secs(load.seconds.into());
        let before = self.available;
        for slot in 0..self.begun.len() as u16 {
            let writes = self.random.random_bool(share);
            self.begin(slot, writes)?;
        }
        self.publish(before)?;
        let mut under_way = self.begun.len();
        while under_way > 0 {
            self.wait()?;
            let (before, used) = (self.available, self.used()?);
            while self.seen != used {
                let entry = USED + 4 + 8 * u64::from(self.seen % SIZE);
                let slot: u32 = self.memory.read_obj(GuestAddress(entry))?;
                self.seen = self.seen.wrapping_add(1);
                let slot = u16::try_from(slot)?;
                let status: u8 = self.memory.read_obj(GuestAddress(ANSWERS + u64::from(slot)))?;
                ensure!(status == 0, "a request has failed: {status}");
                let begun = self.begun[usize::from(slot)];
                times[usize::from(begun.writes)].push(begun.at.elapsed().as_secs_f64() * 1e6);
                under_way -= 1;
                if began.elapsed() < length {
                    let writes = self.random.random_bool(share);
                    self.begin(slot, writes)?;
                    under_way += 1;
                }
            }
            if self.available != before {
                self.publish(before)?;
            }
        }
        let seconds = began.elapsed().as_secs_f64();
        let [reads, writes] = times.map(|times| half(times, seconds));
        Ok(Run { reads, writes })
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        // The server may have gone.
        let _ = self.frontend.get_vring_base(0);
    }
}

fn fd(event: &EventFd) -> std::os::fd::BorrowedFd<'_> {
    // SAFETY: it is open for as long as it is borrowed.
    unsafe { std::os::fd::BorrowedFd::borrow_raw(std::os::fd::AsRawFd::as_raw_fd(event)) }
}

fn half(mut times: Vec<f64>, seconds: f64) -> Option<Half> {
    times.sort_by(f64::total_cmp);
    let most = *times.last()?;
    let at = |share: f64| times[((times.len() as f64 * share) as usize).min(times.len() - 1)];
    Some(Half {
        requests: times.len() as u64,
        iops: times.len() as f64 / seconds,
        mean: times.iter().sum::<f64>() / times.len() as f64,
        p90: at(0.9),
        p99: at(0.99),
        most,
    })
}
