//! Median, best and worst of some measurements; mean and standard deviation.

use serde::Serialize;

/// What a number of measurements come to.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Summary {
    /// The middle one, or the mean of the two in the middle.
    pub median: f64,
    /// The smallest.
    pub least: f64,
    /// The largest.
    pub most: f64,
}

impl Summary {
    /// Of at least one measurement.
    pub fn of(measurements: impl IntoIterator<Item = f64>) -> Self {
        let mut sorted: Vec<f64> = measurements.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        let (Some(&least), Some(&most)) = (sorted.first(), sorted.last()) else {
            panic!("there is nothing to summarise");
        };
        let middle = sorted.len() / 2;
        let median = if sorted.len() % 2 == 1 {
            sorted[middle]
        } else {
            f64::midpoint(sorted[middle - 1], sorted[middle])
        };
        Self { median, least, most }
    }
}

/// Mean and standard deviation, as the papers have them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    /// The mean.
    pub mean: f64,
    /// The standard deviation of the sample; 0 of a single measurement.
    pub deviation: f64,
}

impl Spread {
    /// Of at least one measurement.
    pub fn of(measurements: impl IntoIterator<Item = f64>) -> Self {
        let all: Vec<f64> = measurements.into_iter().collect();
        assert!(!all.is_empty(), "there is nothing to summarise");
        let mean = all.iter().sum::<f64>() / all.len() as f64;
        let squares: f64 = all.iter().map(|one| (one - mean).powi(2)).sum();
        Self {
            mean,
            deviation: (squares / (all.len() - 1).max(1) as f64).sqrt(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_is_found_whatever_the_order() {
        assert_eq!(
            Summary::of([3.0, 1.0, 9.0]),
            Summary {
                median: 3.0,
                least: 1.0,
                most: 9.0
            }
        );
        assert_eq!(Summary::of([4.0, 1.0, 2.0, 9.0]).median, 3.0);
    }

    #[test]
    fn the_spread_is_that_of_a_sample() {
        let spread = Spread::of([2.0, 4.0, 4.0, 6.0]);
        assert_eq!(spread.mean, 4.0);
        assert!((spread.deviation - (8.0f64 / 3.0).sqrt()).abs() < 1e-12);
        assert_eq!(Spread::of([7.0]).deviation, 0.0);
    }
}
