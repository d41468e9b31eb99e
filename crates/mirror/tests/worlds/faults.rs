//! Faults.

use verbatim_mirror::Op;
use verbatim_mirror::decision::Role;
use verbatim_mirror::trust::May;

use super::{CELLS, Disk, Folder, Medium, Path, Process, Quirk, Rules, World};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    Kill(usize),
    /// The same, and nothing keeps the block device: its dirty pages are written, and all are dropped.
    KillAlone(usize),
    Power(usize),
    /// The connection to the destination fails.
    Link(usize),
    /// A flush of the copy that serves fails. Its pages are clean afterwards, and wrong.
    Flush(usize),
    FlushMirror(usize),
    /// A mount is missing, or the data were moved away.
    Hide(usize),
    /// Another disk has the name.
    Swap(usize),
    /// The data are cut.
    Cut(usize),
    /// The disk with the data is gone for good, and the daemon has ended with it.
    Lose(usize),
    /// The data are moved away while the daemon runs. Where it has them open, it goes on with them.
    MoveAway(usize),
    /// The data of a copy that has left, or is filled, are deleted while the daemon runs.
    Remove(usize),
    /// The disk of the data is full, or takes no writes.
    DataFull(usize),
    DataReadOnly(usize),
    /// A chunk cannot be read at the source.
    Unreadable {
        host: usize,
        cell: usize,
    },
    /// A resize gives up: the volume is never idle, and its clients are not told.
    NeverIdle(usize),
    Full(usize),
    ReadOnly(usize),
    /// The folder can neither be read nor written.
    Broken(usize),
    /// The state folder is restored from a backup while the daemon is away.
    Restore(usize),
    /// All disks of the host are new.
    Replace(usize),
}

impl World {
    pub fn faults(&self, rules: &Rules) -> Vec<Fault> {
        let mut faults = Vec::with_capacity(32);
        for host in 0..self.hosts.len() {
            let place = &self.hosts[host];
            if rules.media {
                self.faults_of_media(host, &mut faults);
            }
            if rules.losses && self.may_lose(host) {
                faults.push(Fault::Lose(host));
            }
            match &place.process {
                Some(process) => {
                    faults.push(Fault::Kill(host));
                    self.faults_by_hand(host, process, rules, &mut faults);
                    if rules.disks {
                        faults.push(Fault::Power(host));
                    }
                    // Without a flush in flight it is a kill like any other.
                    if rules.disks && place.is_flushing && place.place.is_some() {
                        faults.push(Fault::KillAlone(host));
                    }
                    if process.moving.as_ref().is_some_and(|moving| moving.is_linked) {
                        faults.push(Fault::Link(host));
                    }
                    let moves_together = process.moving.as_ref().filter(|moving| moving.is_linked);
                    if rules.disks
                        && let Some(moving) = moves_together
                        && self.fills(moving.to, moving.session)
                    {
                        faults.push(Fault::FlushMirror(host));
                    }
                    let is_dirty = place
                        .place
                        .as_ref()
                        .is_some_and(|disk| disk.is_dirty != [false; CELLS]);
                    if rules.disks && is_dirty && self.serves(host) && process.trust.may(Op::Flush) == May::Go
                    {
                        faults.push(Fault::Flush(host));
                    }
                }
                None => {
                    let is_copy = self.durable_copy(host).is_some();
                    if rules.disks && is_copy && place.place.as_ref().is_some_and(|disk| disk.is_it) {
                        faults.extend([Fault::Hide(host), Fault::Swap(host)]);
                        if place.place.as_ref().is_some_and(|disk| disk.length > 0) {
                            faults.push(Fault::Cut(host));
                        }
                    }
                    if rules.folders {
                        faults.push(Fault::Replace(host));
                        if place.backup.is_some()
                            && !place.is_old
                            && !place.has_other
                            && place.place.is_some()
                        {
                            faults.push(Fault::Restore(host));
                        }
                    }
                }
            }
            if rules.folders && place.folder == Folder::Good {
                faults.extend([Fault::Full(host), Fault::ReadOnly(host), Fault::Broken(host)]);
            }
        }
        faults
    }

    /// Whether the copy here is one that its data are needed for, and has them.
    fn may_lose(&self, host: usize) -> bool {
        let is_needed = self.durable_copy(host).is_some_and(|here| {
            matches!(
                here.role,
                Role::Serving | Role::Deciding { .. } | Role::Held { .. } | Role::Ready { .. }
            )
        });
        is_needed && self.own_data(host).is_some()
    }

    fn faults_of_media(&self, host: usize, faults: &mut Vec<Fault>) {
        let place = &self.hosts[host];
        if place.medium == Medium::Good && place.place.is_some() {
            faults.extend([Fault::DataFull(host), Fault::DataReadOnly(host)]);
        }
        let Some(process) = &place.process else {
            return;
        };
        if let Some(moving) = process.moving.as_ref().filter(|moving| moving.is_linked) {
            let left = (0..usize::from(process.told)).filter(|&cell| !moving.has[cell]);
            faults.extend(left.map(|cell| Fault::Unreadable { host, cell }));
        }
    }

    fn faults_by_hand(&self, host: usize, process: &Process, rules: &Rules, faults: &mut Vec<Fault>) {
        let Some(here) = self.copy(host) else {
            return;
        };
        if process.grows && process.told == 1 && here.length == 2 {
            faults.push(Fault::NeverIdle(host));
        }
        let place = &self.hosts[host];
        let is_there = place.path == Path::There && place.place.as_ref().is_some_and(|disk| disk.is_it);
        if !rules.disks || !is_there {
            return;
        }
        faults.push(Fault::MoveAway(host));
        let is_other = matches!(
            here.role,
            Role::Moved { .. } | Role::Incoming { .. } | Role::Incomplete
        );
        if is_other {
            faults.push(Fault::Remove(host));
        }
    }

    /// Whether the process has the data of its copy open.
    fn has_open(&self, host: usize) -> bool {
        let is_decided_later = self.copy(host).is_some_and(|here| {
            matches!(
                here.role,
                Role::Deciding { .. } | Role::Held { .. } | Role::Ready { .. }
            )
        });
        let process = self.process(host).expect("it runs");
        process.is_open || process.filling.is_some() || is_decided_later
    }

    pub fn fail(&mut self, fault: Fault, rules: &Rules) {
        self.faults -= 1;
        match fault {
            Fault::Kill(host) => self.end(host),
            Fault::KillAlone(host) => {
                let is_written = self.hosts[host].medium == Medium::Good;
                let acknowledged = self.serves(host).then_some(self.acknowledged);
                self.end(host);
                let place = &mut self.hosts[host];
                place.is_dropped = true;
                for disk in place.place.iter_mut().chain(&mut place.away) {
                    disk.flush(is_written);
                    disk.lose_power();
                }
                if let (Some(acknowledged), Some(disk)) = (acknowledged, &place.place) {
                    for (cell, value) in acknowledged.into_iter().enumerate() {
                        if disk.cache[cell] < value {
                            place.dropped[cell] = value;
                        }
                    }
                }
            }
            Fault::Power(host) => {
                self.end(host);
                let place = &mut self.hosts[host];
                (place.is_flushing, place.dropped) = (false, [0; CELLS]);
                for disk in place.place.iter_mut().chain(&mut place.away) {
                    disk.lose_power();
                }
            }
            Fault::Link(host) => self.unlink(host),
            Fault::Flush(host) => {
                self.disk(host).flush(false);
                self.hosts[host].is_flushing = true;
                let process = self.process_mut(host);
                process.trust.has_failed();
                if rules.quirk == Some(Quirk::AnswersBeforeNoted) {
                    process.trust.is_accepted();
                }
            }
            Fault::FlushMirror(host) => self.flush_mirror(host, false, rules),
            Fault::Hide(host) => self.hosts[host].away = self.hosts[host].place.take(),
            Fault::Swap(host) => {
                let place = &mut self.hosts[host];
                place.away = place.place.take();
                place.place = Some(Disk {
                    is_it: false,
                    ..Disk::zeros(2)
                });
            }
            Fault::Cut(host) => {
                let disk = self.hosts[host].place.as_mut().expect("it is there");
                (disk.length, disk.has_rest) = (disk.length - 1, false);
                for cell in usize::from(disk.length)..CELLS {
                    (disk.cache[cell], disk.durable[cell], disk.is_dirty[cell]) = (0, 0, false);
                }
                // The cut content is lost, and must not be served as if it were not.
            }
            Fault::Lose(host) => {
                self.end(host);
                let place = &mut self.hosts[host];
                (place.place, place.away) = (None, None);
            }
            Fault::MoveAway(host) => match self.has_open(host) {
                true => self.hosts[host].path = Path::Elsewhere,
                false => self.hosts[host].away = self.hosts[host].place.take(),
            },
            Fault::Remove(host) => match self.has_open(host) {
                true => self.hosts[host].path = Path::Nowhere,
                false => self.hosts[host].place = None,
            },
            Fault::DataFull(host) => self.hosts[host].medium = Medium::Full,
            Fault::DataReadOnly(host) => self.hosts[host].medium = Medium::ReadOnly,
            Fault::Unreadable { host, cell } => self.cannot_read(host, cell, rules),
            Fault::NeverIdle(host) => self.process_mut(host).grows = false,
            Fault::Full(host) => self.hosts[host].folder = Folder::Full,
            Fault::ReadOnly(host) => self.hosts[host].folder = Folder::ReadOnly,
            Fault::Broken(host) => self.hosts[host].folder = Folder::Broken,
            Fault::Restore(host) => {
                let place = &mut self.hosts[host];
                let before = place.backup.clone().expect("there is one");
                place.backup = Some(std::mem::replace(&mut place.record, before));
                place.is_old = true;
            }
            Fault::Replace(host) => {
                let here = self.hosts[host].last_copy();
                // If the host had the only copy that may serve, nothing is promised. A restored state folder
                // describes an earlier state, and not the state that was lost with the disks: a promise to a
                // session that is still committed, or the copy that serves.
                self.is_lost |= here.is_some_and(|here| {
                    !matches!(
                        here.role,
                        Role::Moved { .. } | Role::Incoming { .. } | Role::Incomplete
                    )
                });
                let place = &mut self.hosts[host];
                (place.record, place.backup, place.place, place.away) = (None, None, None, None);
                (place.is_old, place.is_flushing, place.has_forgotten) = (false, false, true);
                (place.is_dropped, place.dropped) = (false, [0; CELLS]);
                (place.has_other, place.medium) = (false, Medium::Good);
            }
        }
    }

    /// The process ends.
    fn end(&mut self, host: usize) {
        self.hosts[host].process = None;
        self.hosts[host].close();
        for source in 0..self.hosts.len() {
            if let Some(process) = &mut self.hosts[source].process
                && let Some(moving) = &mut process.moving
                && moving.to == host
            {
                (moving.is_linked, moving.keeps, moving.is_flushed) = (false, false, false);
            }
        }
    }
}
