//! When to tell programs that the RNIC has to wait for a core.
//!
//! On a machine with few cores programs that poll keep the RNIC from its core, and then poll for what it cannot do. That it
//! waits now and then is no harm: a core that has just been given to somebody comes back within a slice. So only waits
//! that are longer than that count. They make a debt, which time pays off slowly; programs are told from some debt on, and
//! until it is paid. So a sign stays for several times as long as the RNIC has waited, and over any longer time such waits are a small
//! part of it.

use std::time::Duration;

use verbatim_roce::Time;

/// How often the RNIC looks, while it does not sleep.
const EVERY: Duration = Duration::from_millis(1);

/// Who waits for so long between two looks does not merely take turns with others.
const LONG: Duration = Duration::from_millis(2);

/// Programs are told from so much debt on.
const ENOUGH: Duration = Duration::from_millis(8);

/// One part in so many of the time pays off.
const PART: u32 = 16;

/// The largest debt: the sign stays for ten seconds at most.
const MOST: Duration = Duration::from_millis(640);

#[derive(Debug, Default)]
pub struct Starvation {
    /// When the RNIC has looked, and for how long it had waited in its life.
    last: Option<(Time, Duration)>,
    debt: Duration,
    starved: bool,
    /// How often it became so.
    times: u64,
}

impl Starvation {
    /// Whether it is time to look.
    #[inline]
    pub fn is_due(&self, now: Time) -> bool {
        self.last
            .is_none_or(|(last, _)| now.saturating_since(last) >= EVERY)
    }

    /// A look at the time for which the RNIC has waited in its life. Whether it is starved.
    pub fn look(&mut self, now: Time, waited: Duration) -> bool {
        let Some((last, before)) = self.last.replace((now, waited)) else {
            return false;
        };
        let wait = waited.saturating_sub(before);
        self.debt = self.debt.saturating_sub(now.saturating_since(last) / PART);
        if wait >= LONG {
            self.debt = (self.debt + wait).min(MOST);
        }
        let was_starved = self.starved;
        self.starved = match was_starved {
            true => !self.debt.is_zero(),
            false => self.debt >= ENOUGH,
        };
        self.times += u64::from(self.starved && !was_starved);
        self.starved
    }

    pub fn is_starved(&self) -> bool {
        self.starved
    }

    /// When it ends, if the RNIC does not have to wait any more.
    pub fn end(&self) -> Option<Time> {
        let (last, _) = self.last.filter(|_| self.starved)?;
        Some(last + self.debt * PART)
    }

    pub fn times(&self) -> u64 {
        self.times
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An RNIC that is looked at, with its clock.
    #[derive(Default)]
    struct Rnic {
        starvation: Starvation,
        micros: u64,
        waited: u64,
    }

    impl Rnic {
        /// So many µs later it has waited for so many of them.
        fn after(&mut self, micros: u64, waited: u64) -> bool {
            self.micros += micros;
            self.waited += waited;
            let now = Time::from_nanos(self.micros * 1000);
            self.starvation.look(now, Duration::from_micros(self.waited))
        }

        fn new() -> Self {
            let mut rnic = Self::default();
            // What was before the first look does not count.
            assert!(!rnic.after(1_000_000, 900_000));
            rnic
        }
    }

    #[test]
    fn who_takes_turns_is_not_starved_however_busy_the_cores_are() {
        let mut rnic = Rnic::new();
        assert!((0..10_000).all(|_| !rnic.after(2_500, 1_900)));
        assert_eq!(rnic.starvation.times(), 0);
    }

    #[test]
    fn a_long_wait_now_and_then_is_no_starvation() {
        let mut rnic = Rnic::new();
        for _ in 0..100 {
            assert!(!rnic.after(6_000, 5_000));
            assert!((0..80).all(|_| !rnic.after(1_000, 100)));
        }
    }

    #[test]
    fn long_waits_are_told_and_the_sign_stays_for_sixteen_times_as_long() {
        let mut rnic = Rnic::new();
        assert!(!rnic.after(5_000, 4_500));
        assert!(rnic.after(5_000, 4_500), "two slices in a row");
        let told = (1..).find(|_| !rnic.after(1_000, 100)).unwrap();
        assert_eq!(told, 16 * 9 - 5, "less what the second wait has paid itself");
        assert_eq!(rnic.starvation.times(), 1);
    }

    #[test]
    fn one_wait_may_be_enough_and_the_sign_does_not_stay_for_ever() {
        let mut rnic = Rnic::new();
        assert!(rnic.after(4_000_000, 4_000_000));
        let told = (1..).find(|_| !rnic.after(1_000, 0)).unwrap();
        assert_eq!(told, 10_240);
    }

    #[test]
    fn a_sign_is_renewed_while_the_waits_go_on() {
        let mut rnic = Rnic::new();
        assert!(rnic.after(10_000, 10_000));
        assert!((0..100).all(|_| rnic.after(50_000, 10_000)));
        assert_eq!(rnic.starvation.times(), 1);
    }

    #[test]
    fn an_rnic_that_sleeps_knows_when_to_take_it_back() {
        let mut rnic = Rnic::new();
        assert_eq!(rnic.starvation.end(), None);
        assert!(rnic.after(10_000, 10_000));
        let end = rnic.starvation.end().unwrap();
        assert_eq!(end.as_nanos(), rnic.micros * 1000 + 160_000_000);
        assert!(rnic.after(159_000, 0));
        assert!(!rnic.after(1_000, 0), "it has woken then");
        assert_eq!(rnic.starvation.end(), None);
    }

    #[test]
    fn looks_are_rare() {
        let mut starvation = Starvation::default();
        let at = |micros: u64| Time::from_nanos(micros * 1000);
        assert!(starvation.is_due(at(5)));
        starvation.look(at(5), Duration::ZERO);
        assert!(!starvation.is_due(at(1004)) && starvation.is_due(at(1005)));
    }
}
