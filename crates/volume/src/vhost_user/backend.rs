//! Requests of a front end's messages. A front end may send anything at any time: impossible requests are
//! refused, which ends the connection.

use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex};

use vhost::VhostUserMemoryRegionBase;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};
use virtio_queue::{Queue, QueueT};
use vm_memory::GuestAddress;

use super::config::{self, EVENT_IDX, FEATURES, FLUSH, MAX_QUEUE_SIZE, MAX_QUEUES, PROTOCOL_FEATURES};
use super::inflight::Inflight;
use super::length::Length;
use super::memory::Ram;
use super::request::ID;
use super::ring::{Ends, Ring, Running, call};
use crate::volume::Volume;

/// The refusal of a feature that was not offered.
const NOT_OFFERED: Error = Error::InvalidOperation("it was not offered");

/// A queue as the front end has described it so far.
#[derive(Default)]
struct Vring {
    size: u16,
    /// Descriptors, used and available, by the front end's addresses.
    places: Option<[u64; 3]>,
    base: u16,
    kick: Option<File>,
    call: Option<File>,
    error: Option<File>,
    is_enabled: bool,
    running: Option<(Running, Arc<Ends>)>,
}

impl Vring {
    fn stop(&mut self) {
        if let Some((running, ends)) = self.running.take() {
            self.base = running.stop();
            let take = |end: &Mutex<Option<File>>| end.lock().expect("no panic under this lock").take();
            (self.call, self.error) = (take(&ends.call), take(&ends.error));
        }
    }
}

/// One front end. When dropped, its queues stop, and none of its requests is in flight.
pub struct Backend {
    volume: Arc<Volume>,
    length: Arc<Length>,
    id: [u8; ID],
    features: u64,
    ram: Option<Arc<Ram>>,
    inflight: Option<Arc<Inflight>>,
    vrings: Vec<Vring>,
}

fn refused(why: impl Into<String>) -> Error {
    Error::ReqHandlerError(io::Error::other(why.into()))
}

impl Backend {
    /// A front end of this volume, whose size `length` has.
    pub fn new(volume: Arc<Volume>, name: &str, length: Arc<Length>) -> Self {
        let mut id = [0; ID];
        let letters = name.len().min(ID);
        id[..letters].copy_from_slice(&name.as_bytes()[..letters]);
        Self {
            volume,
            length,
            id,
            features: 0,
            ram: None,
            inflight: None,
            vrings: (0..MAX_QUEUES).map(|_| Vring::default()).collect(),
        }
    }

    fn vring(&mut self, index: u32) -> Result<&mut Vring> {
        self.vrings.get_mut(index as usize).ok_or(Error::InvalidParam)
    }

    /// Whether there are described queues, and all of them work.
    pub fn works(&self) -> bool {
        let mut described = self.vrings.iter().filter(|vring| vring.kick.is_some()).peekable();
        described.peek().is_some() && described.all(|vring| vring.running.is_some())
    }

    /// Stops all queues. None of their requests is in flight afterwards.
    pub fn stop(&mut self) {
        for vring in &mut self.vrings {
            vring.stop();
        }
    }

    /// Starts a queue if it is described, started and enabled.
    fn start(&mut self, index: u32) -> Result<()> {
        let is_durable = self.features & FLUSH == 0;
        let knows_events = self.features & EVENT_IDX != 0;
        let (volume, length, id) = (self.volume.clone(), self.length.bytes(), self.id);
        let (ram, inflight) = (self.ram.clone(), self.inflight.clone());
        let vring = self.vring(index)?;
        if vring.running.is_some() || !vring.is_enabled {
            return Ok(());
        }
        let (Some(ram), Some(places), Some(kick)) = (ram, vring.places, &vring.kick) else {
            return Ok(());
        };
        let queue = queue(&ram, vring.size, places, vring.base, knows_events);
        let queue = queue.ok_or_else(|| refused("a queue is not in the memory"))?;
        let noted = match inflight {
            None => None,
            Some(inflight) => {
                let noted = inflight.queue(index as u16, vring.size);
                Some(noted.ok_or_else(|| refused("requests under way of this queue have no place"))?)
            }
        };
        let ends = Arc::new(Ends {
            ram: Mutex::new(ram),
            call: Mutex::new(vring.call.take()),
            error: Mutex::new(vring.error.take()),
        });
        let ring = Ring {
            index: index as usize,
            queue,
            noted,
            kick: kick.try_clone().map_err(Error::ReqHandlerError)?,
            ends: ends.clone(),
            volume,
            length,
            id,
            is_durable,
        };
        let running = Running::start(ring).map_err(Error::ReqHandlerError)?;
        vring.running = Some((running, ends));
        Ok(())
    }

    fn start_all(&mut self) -> Result<()> {
        (0..u32::from(MAX_QUEUES)).try_for_each(|index| self.start(index))
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        self.stop();
    }
}

fn queue(ram: &Ram, size: u16, places: [u64; 3], base: u16, knows_events: bool) -> Option<Queue> {
    let [descriptors, used, available] = places;
    let mut queue = Queue::new(MAX_QUEUE_SIZE).ok()?;
    queue.try_set_size(size).ok()?;
    let place = |user: u64| -> Option<GuestAddress> { ram.guest_address(user) };
    queue.try_set_desc_table_address(place(descriptors)?).ok()?;
    queue.try_set_used_ring_address(place(used)?).ok()?;
    queue.try_set_avail_ring_address(place(available)?).ok()?;
    queue.set_event_idx(knows_events);
    queue.set_next_avail(base);
    Some(queue)
}

impl VhostUserBackendReqHandlerMut for Backend {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.reset_device()
    }

    fn reset_device(&mut self) -> Result<()> {
        self.stop();
        for vring in &mut self.vrings {
            *vring = Vring::default();
        }
        (self.features, self.inflight) = (0, None);
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(FEATURES)
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        if features & !FEATURES != 0 {
            return Err(Error::InvalidParam);
        }
        if features != self.features {
            self.stop();
            self.features = features;
        }
        if features & PROTOCOL_FEATURES == 0 {
            // Without protocol features there is no message that enables queues.
            for vring in &mut self.vrings {
                vring.is_enabled = true;
            }
        }
        self.start_all()
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        let ram = Arc::new(Ram::map(regions, files).map_err(refused)?);
        self.ram = Some(ram.clone());
        for vring in &self.vrings {
            if let Some((_, ends)) = &vring.running {
                *ends.ram.lock().expect("no panic under this lock") = ram.clone();
            }
        }
        self.start_all()?;
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let size = u16::try_from(num).ok();
        let size = size.filter(|size| *size <= MAX_QUEUE_SIZE && size.is_power_of_two());
        let vring = self.vring(index)?;
        vring.stop();
        vring.size = size.ok_or(Error::InvalidParam)?;
        self.start(index)
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _: u64,
    ) -> Result<()> {
        let vring = self.vring(index)?;
        vring.stop();
        vring.places = Some([descriptor, used, available]);
        self.start(index)
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let base = u16::try_from(base).map_err(|_| Error::InvalidParam)?;
        let vring = self.vring(index)?;
        vring.stop();
        vring.base = base;
        self.start(index)
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let vring = self.vring(index)?;
        vring.stop();
        vring.kick = None;
        Ok(VhostUserVringState::new(index, vring.base.into()))
    }

    fn set_vring_kick(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let file = file.ok_or_else(|| refused("queues are not polled: a kick needs a descriptor"))?;
        let vring = self.vring(index.into())?;
        vring.stop();
        vring.kick = Some(file);
        self.start(index.into())
    }

    fn set_vring_call(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let vring = self.vring(index.into())?;
        match &vring.running {
            Some((_, ends)) => {
                *ends.call.lock().expect("no panic under this lock") = file;
                // Earlier calls may have gone unheard.
                call(&ends.call);
            }
            None => vring.call = file,
        }
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let vring = self.vring(index.into())?;
        match &vring.running {
            Some((_, ends)) => *ends.error.lock().expect("no panic under this lock") = file,
            None => vring.error = file,
        }
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD)
    }

    fn set_protocol_features(&mut self, _: u64) -> Result<()> {
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(MAX_QUEUES.into())
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        let vring = self.vring(index)?;
        vring.is_enabled = enable;
        if !enable {
            vring.stop();
        }
        self.start(index)
    }

    fn get_config(&mut self, offset: u32, size: u32, _: VhostUserConfigFlags) -> Result<Vec<u8>> {
        let length = self.length.asked();
        config::read(length, offset, size).ok_or(Error::InvalidParam)
    }

    fn set_config(&mut self, _: u32, _: &[u8], _: VhostUserConfigFlags) -> Result<()> {
        Err(NOT_OFFERED)
    }

    fn set_gpu_socket(&mut self, _: GpuBackend) -> Result<()> {
        Err(NOT_OFFERED)
    }

    fn get_shared_object(&mut self, _: VhostUserSharedMsg) -> Result<File> {
        Err(NOT_OFFERED)
    }

    fn get_inflight_fd(&mut self, wanted: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        Inflight::make(wanted).map_err(refused)
    }

    fn set_inflight_fd(&mut self, given: &VhostUserInflight, file: File) -> Result<()> {
        self.stop();
        self.inflight = Some(Inflight::open(given, file).map_err(refused)?);
        self.start_all()
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Err(NOT_OFFERED)
    }

    fn add_mem_region(
        &mut self,
        _: &VhostUserSingleMemoryRegion,
        _: File,
        _: Option<bool>,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        Err(NOT_OFFERED)
    }

    fn remove_mem_region(&mut self, _: &VhostUserSingleMemoryRegion) -> Result<()> {
        Err(NOT_OFFERED)
    }

    fn set_device_state_fd(
        &mut self,
        _: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        _: File,
    ) -> Result<Option<File>> {
        Err(NOT_OFFERED)
    }

    fn check_device_state(&mut self) -> Result<()> {
        Err(NOT_OFFERED)
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(NOT_OFFERED)
    }

    fn set_log_base(&mut self, _: &VhostUserLog, _: File) -> Result<()> {
        Err(NOT_OFFERED)
    }
}
