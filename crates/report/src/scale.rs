//! Axes: round numbers that a person reads at a glance.

/// The step of 1, 2 or 5 times a power of ten that divides `range` into at most `most` parts.
pub fn step(range: f64, most: usize) -> f64 {
    if !(range.is_finite() && range > 0.0) {
        return 1.0;
    }
    let least = range / most.max(1) as f64;
    let power = 10f64.powf(least.log10().floor());
    // The slack keeps a range that divides evenly from being pushed to the next step by rounding.
    [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|factor| factor * power)
        .find(|step| *step >= least * (1.0 - 1e-9))
        .unwrap_or(10.0 * power)
}

/// The multiples of `step` in `from..=to`.
pub fn ticks(from: f64, to: f64, step: f64) -> Vec<f64> {
    let first = (from / step - 1e-9).ceil();
    let last = (to / step + 1e-9).floor();
    // No axis has hundreds of marks; this also bounds what a nonsensical range can cost.
    (0..200)
        .map(|index| (first + f64::from(index)) * step)
        .take_while(|tick| *tick <= last * step + step * 1e-6)
        .collect()
}

/// An axis of rates that begins at 0.
#[derive(Debug, Clone, PartialEq)]
pub struct RateAxis {
    /// The unit's name.
    pub unit: &'static str,
    /// The unit in bits per second.
    pub scale: f64,
    /// The upper end, in units.
    pub top: f64,
    /// The distance of its marks, in units.
    pub step: f64,
}

impl RateAxis {
    /// An axis for rates up to `highest` bits per second with at most `most` marks above 0.
    pub fn new(highest: f64, most: usize) -> Self {
        let highest = if highest.is_finite() && highest > 0.0 {
            highest
        } else {
            1e9
        };
        let (unit, scale) = [
            ("Pbit/s", 1e15),
            ("Tbit/s", 1e12),
            ("Gbit/s", 1e9),
            ("Mbit/s", 1e6),
            ("kbit/s", 1e3),
        ]
        .into_iter()
        .find(|(_, scale)| highest >= *scale)
        .unwrap_or(("bit/s", 1.0));
        let step = step(highest / scale, most);
        Self {
            unit,
            scale,
            top: (highest / scale / step - 1e-9).ceil() * step,
            step,
        }
    }

    /// The marks, in units.
    pub fn ticks(&self) -> Vec<f64> {
        ticks(0.0, self.top, self.step)
    }

    /// A mark's label.
    pub fn label(&self, tick: f64) -> String {
        let digits = usize::from(self.step < 0.999) + usize::from(self.step < 0.0999);
        format!("{tick:.digits$}")
    }

    /// Where a rate in bits per second lies: 0 at the bottom, 1 at the top.
    pub fn place(&self, bits: f64) -> f64 {
        (bits / self.scale / self.top).clamp(0.0, 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_round() {
        assert_eq!(step(700.0, 7), 100.0);
        assert_eq!(step(701.0, 7), 200.0);
        assert_eq!(step(4.0, 10), 0.5);
        assert_eq!(step(0.0, 5), 1.0);
        assert_eq!(step(f64::NAN, 5), 1.0);
        assert_eq!(step(f64::INFINITY, 5), 1.0);
    }

    #[test]
    fn ticks_are_within() {
        assert_eq!(ticks(-200.0, 410.0, 200.0), [-200.0, 0.0, 200.0, 400.0]);
        assert_eq!(ticks(0.0, 0.3, 0.1).len(), 4);
        assert!(ticks(0.0, 1e300, 1.0).len() <= 200);
    }

    #[test]
    fn the_unit_fits_the_rates() {
        let axis = RateAxis::new(17.3e9, 4);
        assert_eq!((axis.unit, axis.top, axis.step), ("Gbit/s", 20.0, 5.0));
        assert_eq!(axis.place(10e9), 0.5);
        assert_eq!(axis.ticks(), [0.0, 5.0, 10.0, 15.0, 20.0]);
        assert_eq!(axis.label(5.0), "5");
        assert_eq!(RateAxis::new(3e6, 4).unit, "Mbit/s");
        assert_eq!(
            RateAxis::new(0.0, 4).unit,
            "Gbit/s",
            "an idle line is drawn on the usual axis"
        );
        let huge = RateAxis::new(u64::MAX as f64 * 8e3, 4);
        assert!(huge.top.is_finite() && huge.ticks().len() < 12, "{huge:?}");
        assert_eq!(RateAxis::new(1.3e9, 4).label(0.5), "0.5");
    }
}
