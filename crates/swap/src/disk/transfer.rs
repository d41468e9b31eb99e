//! Transfers between slots and the file.

use verbatim_lease::{Copy, Event, Extent, SlotId};

use super::Disk;
use crate::backup::Job;
use crate::block::place;

impl Disk {
    pub(super) fn read_file(&mut self, slot: SlotId, extent: Extent) {
        let file = self.file.as_mut().expect("it is a copy that is there");
        match file.spares.pop() {
            Some(block) => file.backup.submit(Job::Read(slot, extent, block)),
            None => file.waiting.push((slot, extent)),
        }
    }

    /// Handles the results of the file's threads.
    pub(super) fn file_done(&mut self) {
        while let Some(file) = &mut self.file {
            let Some(done) = file.backup.take() else {
                return;
            };
            let (slot, extent, result) = (done.slot, done.extent, done.result);
            if let Err(errno) = result {
                file.error = Some(errno);
            }
            let copy = Copy::Second;
            let Some(block) = done.read else {
                self.event(Event::WriteDone { slot, copy, result });
                continue;
            };
            if result.is_ok() {
                let first = self.in_use(slot).extent.page;
                self.block(slot)[place(first, extent)]
                    .copy_from_slice(&block.bytes()[place(extent.page, extent)]);
            }
            let file = self.file.as_mut().expect("it is there");
            match file.waiting.pop() {
                Some((slot, extent)) => file.backup.submit(Job::Read(slot, extent, block)),
                None => file.spares.push(block),
            }
            self.event(Event::ReadDone { slot, copy, result });
        }
    }
}
