//! The copy that serves: writes, noted failures, a new size.

use verbatim_mirror::decision::{Record, Sidecar};
use verbatim_mirror::resize::{self, Lengths};
use verbatim_mirror::trust::{self, May};

use super::{CELLS, Medium, Poison, Quirk, Rules, World};

impl World {
    /// A client writes. A write that fails is not acknowledged.
    pub(super) fn write(&mut self, host: usize, rules: &Rules) {
        self.writes -= 1;
        self.values += 1;
        let value = self.values;
        let process = self.process_mut(host);
        let cell = usize::from(process.told) - 1;
        let moving = process.moving.clone();
        let is_good = self.hosts[host].takes(cell, value);
        if is_good {
            self.disk(host).write(cell, value);
            self.acknowledged[cell] = value;
        }
        if let Some(moving) = moving {
            let has = moving.is_linked && moving.has[cell] && self.fills(moving.to, moving.session);
            if has && !self.arrives((host, moving.to), cell, value, rules) {
                return;
            }
            let moving = self.process_mut(host).moving.as_mut().expect("it moves");
            // A change that has failed here is copied again.
            (moving.has[cell], moving.is_flushed) = (has && is_good, false);
        }
    }

    /// Notes that the copy is suspect; the waiting requests fail.
    pub(super) fn note(&mut self, host: usize, rules: &Rules) {
        let Some(sidecar) = self.copy(host) else {
            self.process_mut(host).poison = Poison::Noted;
            self.hosts[host].is_flushing = false;
            return;
        };
        if let Some(suspect) = trust::failed(sidecar)
            && rules.quirk != Some(Quirk::ForgetsAtReopen)
            && rules.quirk != Some(Quirk::ComparesWithTheCache)
            && !self.put(host, Some(Record::Copy(suspect)), true)
        {
            return;
        }
        self.hosts[host].is_flushing = false;
        let process = self.process_mut(host);
        if process.trust.flushed() == May::Wait {
            process.trust.noted();
        }
        if process.poison == Poison::Unnoted {
            process.poison = Poison::Noted;
            let session = process.filling.as_ref().map(|filling| filling.session);
            // The source learns it, if they are connected.
            for source in 0..self.hosts.len() {
                if let Some(process) = &mut self.hosts[source].process
                    && let Some(moving) = &process.moving
                    && moving.is_linked
                    && Some(moving.session) == session
                {
                    process.moving = None;
                }
            }
        }
    }

    pub(super) fn grow(&mut self, host: usize, rules: &Rules) {
        let sidecar = self.copy(host).expect("it serves").clone();
        let process = self.process_mut(host);
        process.grows = true;
        if rules.quirk == Some(Quirk::TellsSizeFirst) {
            process.told = 2;
        }
        let now = Lengths {
            told: process.told.into(),
            sidecar: sidecar.length,
            data: self.disk(host).length.into(),
        };
        let step = match resize::next(now, 2) {
            resize::Step::Done if sidecar.length < 2 => resize::Step::WriteSidecar,
            step => step,
        };
        match step {
            resize::Step::GrowData if self.hosts[host].medium == Medium::ReadOnly => {}
            resize::Step::GrowData => (self.disk(host).length, self.disk(host).has_rest) = (2, false),
            resize::Step::WriteSidecar => {
                let next = Sidecar { length: 2, ..sidecar };
                if self.put(host, Some(Record::Copy(next)), false) {
                    let rest = self.disk(host).cache[CELLS - 1];
                    self.acknowledged[CELLS - 1] = self.acknowledged[CELLS - 1].max(rest);
                }
            }
            resize::Step::Announce => self.process_mut(host).told = 2,
            resize::Step::Done => {}
        }
        let (told, length) = (
            self.process(host).expect("it runs").told,
            self.copy(host).expect("it serves").length,
        );
        self.process_mut(host).grows = told < 2 || length < 2;
    }
}
