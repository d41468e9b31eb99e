//! A process starts, looks for its copy, and opens its data.

use verbatim_mirror::decision::{Record, Sidecar};
use verbatim_mirror::opening::{self, Age, Found, Kind, Noted, Opening};
use verbatim_mirror::trust::{self, First, Trust};

use super::{Disk, Folder, ID, Medium, Path, Poison, Process, Quirk, Row, Rules, World, within};

impl World {
    fn found(&self, host: usize) -> Found {
        match &self.hosts[host].place {
            None => Found::Missing,
            Some(disk) => Found::Data {
                kind: Kind::File,
                identity: Some(if disk.is_it { "it" } else { "another" }.into()),
                length: u64::from(disk.length) + u64::from(disk.has_rest),
            },
        }
    }

    /// Whether the data on this host are the copy's, and are opened. `to_read`: also where they cannot be written.
    pub fn opens(&mut self, host: usize, length: u64, to_read: bool, rules: &Rules) -> bool {
        if self.hosts[host].path != Path::There {
            // They are open.
            return true;
        }
        if self.hosts[host].medium == Medium::ReadOnly && !to_read {
            return false;
        }
        let noted = Noted {
            kind: Some(Kind::File),
            identity: (rules.quirk != Some(Quirk::OpenTakesAnother)).then(|| "it".into()),
        };
        let fresh = Disk::zeros(length as u8);
        match (rules.quirk, &mut self.hosts[host].place) {
            (Some(Quirk::OpenMakes), place @ None) => *place = Some(fresh),
            (Some(Quirk::OpenCuts), Some(disk)) if disk.has_rest => {
                disk.has_rest = false;
                self.wrong = Some("what lies behind the volume is gone".into());
            }
            (Some(Quirk::OpenLengthens), Some(disk)) if u64::from(disk.length) < length => {
                disk.length = length as u8;
            }
            _ => {}
        }
        matches!(
            opening::open(&noted, length, &self.found(host)),
            Opening::Serve { .. }
        )
    }

    /// Starts a process.
    pub fn start(&mut self, host: usize, rules: &Rules) {
        // Without a flush that was cut off nothing is compared.
        self.hosts[host].is_dropped &= self.hosts[host].is_flushing;
        self.hosts[host].process = Some(Process {
            row: Row::Unknown,
            is_open: false,
            told: 0,
            grows: false,
            trust: Trust::new(&Sidecar::new(ID, 1)),
            moving: None,
            filling: None,
            poison: Poison::None,
        });
        self.look(host, rules);
    }

    /// A process with an unknown copy, or without its data, looks (again).
    pub fn look(&mut self, host: usize, rules: &Rules) {
        let place = &mut self.hosts[host];
        let process = place.process.as_mut().expect("it runs");
        if process.row == Row::Unknown {
            if place.folder == Folder::Broken {
                return;
            }
            if rules.quirk == Some(Quirk::RewritesAtStart)
                && place.record.is_some()
                && place.folder != Folder::Good
            {
                return;
            }
            let with_data = place.place.as_ref().filter(|disk| disk.is_it).map(|_| 2);
            let in_sidecar = if place.is_old { 1 } else { 2 };
            let is_seen = with_data.is_some() || !matches!(place.record, Some(Record::Copy(_)));
            let age = opening::age(in_sidecar, with_data);
            let believes = rules.quirk == Some(Quirk::BelievesOldSidecar);
            // Beside data that are away, the daemon believes a restored sidecar until they come, and promises
            // nothing. Here it is not believed, so that the world goes on.
            if !believes && (age == Age::Old || !is_seen && place.is_old) {
                return;
            }
            // The folder is from before the volume came there, and the data are elsewhere: nothing on this
            // host shows that there was more. It decides nothing (`NotKnown`), like a host with new disks.
            place.has_forgotten |= place.is_old && with_data.is_none();
            process.row = Row::Known(place.record.clone());
        }
        self.open(host, rules);
    }

    /// Opens the data of a copy that serves, or is about to.
    pub fn open(&mut self, host: usize, rules: &Rules) {
        let Some(mut sidecar) = self.copy(host).cloned() else {
            return;
        };
        if !sidecar.may_serve() || self.process(host).is_some_and(|it| it.is_open) {
            return;
        }
        if !self.opens(host, sidecar.length, sidecar.suspect, rules) {
            return;
        }
        if !self.first(host, &sidecar, rules) {
            sidecar = trust::failed(&sidecar).expect("it was not");
            // Where the folder takes no mark, the note in the runtime folder stays.
            let is_marked = self.put(host, Some(Record::Copy(sidecar.clone())), true);
            self.hosts[host].is_flushing = !is_marked;
            self.process_mut(host).row = Row::Known(Some(Record::Copy(sidecar.clone())));
        }
        // What a power failure has left is what there is.
        let dropped = self.hosts[host].dropped;
        let cache = self.disk(host).cache;
        let owed = std::array::from_fn(|cell| cache[cell].max(dropped[cell]));
        self.acknowledged = within(owed, sidecar.length);
        let process = self.process_mut(host);
        process.is_open = true;
        process.told = sidecar.length as u8;
        process.trust = Trust::new(&sidecar);
        if rules.quirk == Some(Quirk::ForgetsAtReopen) {
            process.trust.is_accepted();
        }
    }

    /// The first action on the page cache, and whether the cache equals the disk. If not, the note stays until the copy
    /// is marked.
    pub fn first(&mut self, host: usize, sidecar: &Sidecar, rules: &Rules) -> bool {
        let was_cut_off = std::mem::take(&mut self.hosts[host].is_flushing);
        if rules.quirk == Some(Quirk::ForgetsCutOffFlush)
            || trust::first(sidecar, was_cut_off) == First::Nothing
        {
            return true;
        }
        let disk = self.disk(host);
        disk.flush(true);
        let is_same = disk.cache == disk.durable;
        let were_kept = !self.hosts[host].is_dropped || rules.quirk == Some(Quirk::ComparesDroppedCache);
        let is_sound = trust::stays_sound(were_kept, Some(is_same));
        self.hosts[host].is_flushing = !is_sound;
        self.hosts[host].is_dropped &= !is_sound;
        is_sound
    }

    /// The same for a copy that is filled: one that is not sound is written down as suspect. False where it cannot be.
    pub fn first_to_fill(&mut self, host: usize, rules: &Rules) -> bool {
        let here = self.copy(host).expect("it is filled").clone();
        if self.first(host, &here, rules) {
            return true;
        }
        let suspect = trust::failed(&here).expect("it was not");
        let is_noted = self.put(host, Some(Record::Copy(suspect)), true);
        self.hosts[host].is_flushing = !is_noted;
        is_noted
    }
}
