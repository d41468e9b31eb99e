//! CRIU's side: a connection over which the tasks' descriptors come.

use std::sync::atomic::Ordering;

use super::Worker;
use crate::images;
use crate::segments::{Segment, Segments};
use crate::source::Source;
use crate::sys::descriptors;

/// What CRIU sends at the end (`LAZY_PAGES_RESTORE_FINISHED`).
const FINISHED: u32 = 0x5253_5446;

impl Worker<'_> {
    /// Finds CRIU's connection if the worker before this one has only just accepted it, and goes on with what it has received.
    pub(super) fn take_up_criu(&mut self) {
        let number = self.numbers.criu();
        if !descriptors::is_open(number)
            && let Some(accepted) = descriptors::find_stream(self.numbers.low())
            && let Err(error) = descriptors::copy_to(accepted, number)
        {
            (self.say)(&format!("CRIU's connection cannot be kept: {error}"));
        }
        self.take_word();
    }

    /// From now on events say when CRIU connects, or sends something.
    pub(super) fn watch_criu(&self) {
        let (listener, criu) = (self.numbers.listener(), self.numbers.criu());
        if self.state.filling || self.is_refused() {
            descriptors::close(listener);
            descriptors::close(criu);
        } else if descriptors::is_open(criu) {
            self.waiter.add_criu(criu, true);
        } else if descriptors::is_open(listener) {
            self.waiter.add_criu(listener, false);
        }
    }

    pub(super) fn accept_criu(&mut self) {
        let (listener, criu) = (self.numbers.listener(), self.numbers.criu());
        if descriptors::is_open(criu) {
            return;
        }
        let flags = rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK;
        if let Ok(accepted) = rustix::net::accept_with(descriptors::at(listener), flags) {
            if let Err(error) = descriptors::place(accepted, criu) {
                return self.refuse(&format!("CRIU's connection cannot be kept: {error}"));
            }
            // There is one connection; who else connects is refused by the kernel.
            descriptors::close(listener);
            self.watch_criu();
        }
    }

    /// Receives what CRIU has sent. The kernel writes it to shared memory, so that the next worker finds it.
    pub(super) fn hear_criu(&mut self) {
        let criu = self.numbers.criu();
        while descriptors::is_open(criu) {
            let header = self.region.header();
            let received = match header.criu_word.load(Ordering::SeqCst) {
                0 => header
                    .receive_word(descriptors::at(criu))
                    .map(|some| some.map(|bytes| bytes == 4)),
                _ => header
                    .receive_descriptor(descriptors::at(criu))
                    .map(|some| some.map(|bytes| bytes == 1 && header.descriptor().is_some())),
            };
            match received {
                Ok(Some(true)) => self.take_word(),
                Ok(None) => return,
                Ok(Some(false)) => {
                    return self.end_criu(
                        "CRIU closed its connection, or sent something else than a task, before the end",
                    );
                }
                Err(error) => return self.end_criu(&format!("CRIU's connection fails: {error}")),
            }
        }
    }

    /// The connection ends before CRIU has said so.
    fn end_criu(&mut self, why: &str) {
        self.refuse(why);
        descriptors::close(self.numbers.criu());
    }

    /// What was received takes effect, once it is complete. Doing it twice has the effect of once.
    fn take_word(&mut self) {
        let header = self.region.header();
        match header.criu_word.load(Ordering::SeqCst) {
            0 => {}
            FINISHED => {
                self.state.filling = true;
                self.snapshot();
                header.descriptor_done();
                descriptors::close(self.numbers.criu());
                let _ = std::fs::remove_file(self.config.lazy_pages_socket());
            }
            // A zombie has no memory.
            word if (word as i32) < 0 => header.descriptor_done(),
            vpid => {
                let Some(descriptor) = header.descriptor() else {
                    // Its descriptor has been used, and only the number is still there: the next thing is another number.
                    if self.state.arrived.contains(&vpid) {
                        header.descriptor_done();
                    }
                    return;
                };
                self.task_came(vpid, descriptor);
                header.descriptor_done();
                descriptors::close(descriptor);
            }
        }
    }

    fn task_came(&mut self, vpid: u32, descriptor: i32) {
        if self.state.arrived.contains(&vpid) {
            return;
        }
        let segments = self.segments_of(vpid).unwrap_or_else(|why| {
            self.refuse(&why);
            // The descriptor is kept, so that the task waits where it lacks a page.
            Segments::default()
        });
        let placed = descriptors::copy_to(descriptor, self.numbers.task(self.state.free()));
        placed.expect("the number of a task is below the limit");
        let index = self.state.add(vpid, segments);
        if !self.snapshot() {
            self.refuse(
                "the tasks have more ranges of pages than there is room for; restore without lazy pages",
            );
        }
        let _ = rustix::io::ioctl_fionbio(descriptors::at(self.numbers.task(index)), true);
        if self.waiter.is_made() {
            self.waiter.add_task(index);
        }
        if self.is_refused() {
            descriptors::close(self.numbers.criu());
        }
    }

    /// What is to be filled of a task, checked against the cache.
    fn segments_of(&mut self, vpid: u32) -> Result<Segments, String> {
        let images = &self.config.images;
        let left = images::left_to_fill(images, vpid).map_err(|error| error.to_string())?;
        let mappings = images::mappings(images, vpid).map_err(|error| error.to_string())?;
        let mut segments = Segments::default();
        if left.is_empty() {
            return Ok(segments);
        }
        if !self.sources.contains_key(&vpid) {
            self.sources.insert(vpid, Source::open(&self.config.cache, vpid)?);
        }
        let source = &self.sources[&vpid];
        let mut mappings = mappings.into_iter().peekable();
        for range in left {
            source.check(&range)?;
            let mut at = range.start;
            while at < range.end {
                while mappings.next_if(|mapping| mapping.range.end <= at).is_some() {}
                let mapping = mappings.peek().filter(|mapping| mapping.range.start <= at);
                let mapping = mapping.ok_or_else(|| {
                    format!(
                        "{}: the page map of task {vpid} has a page at {at:#x}, where mm-{vpid}.img has no mapping; the images \
                         do not belong together",
                        images.display()
                    )
                })?;
                let end = range.end.min(mapping.range.end);
                segments.insert(Segment {
                    start: at,
                    end,
                    origin: at,
                    inherited: mapping.inherited,
                });
                at = end;
            }
        }
        Ok(segments)
    }
}
