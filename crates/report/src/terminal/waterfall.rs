//! The communication blackout, phase after phase: a stacked bar, unrolled.

use super::clean;
use super::paint::{Colour, Paint};
use crate::model::Move;
use crate::text::milliseconds;

/// A line per phase, its bar where it lies within the blackout.
pub fn waterfall(one: &Move, width: usize, paint: Paint) -> Vec<String> {
    let total: f64 = one.blackout_phases().map(|phase| phase.time.as_secs_f64()).sum();
    if total <= 0.0 {
        return Vec::new();
    }
    let names = one
        .blackout_phases()
        .map(|phase| phase.name.chars().count())
        .max()
        .unwrap_or(0);
    let room = width.saturating_sub(2 + names + 2 + 12);
    let mut lines = vec![paint.bold(Colour::Plain, "The communication blackout, phase by phase")];
    let mut passed = 0.0;
    for phase in one.blackout_phases() {
        let seconds = phase.time.as_secs_f64();
        let begin = (passed / total * room as f64).round() as usize;
        let end = ((passed + seconds) / total * room as f64).round() as usize;
        passed += seconds;
        let begin = begin.min(room - 1);
        let bar = if end > begin {
            "█".repeat(end - begin)
        } else {
            "▏".to_owned()
        };
        let rest = " ".repeat(room.saturating_sub(begin + bar.chars().count()));
        lines.push(format!(
            "  {:<names$}  {}{}{rest}{:>12}",
            clean(&phase.name),
            " ".repeat(begin),
            paint.colour(Colour::Yellow, &bar),
            milliseconds(phase.time),
        ));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::run;

    #[test]
    fn bars_follow_each_other() {
        let lines = waterfall(&run().moves[0], 100, Paint(false));
        let bars: Vec<_> = lines[1..]
            .iter()
            .map(|line| {
                let cells: Vec<_> = line.chars().collect();
                let begin = cells.iter().position(|cell| "█▏".contains(*cell)).unwrap();
                (
                    begin,
                    begin + cells.iter().filter(|cell| "█▏".contains(**cell)).count(),
                )
            })
            .collect();
        assert!(bars.len() >= 5);
        assert!(bars.windows(2).all(|pair| pair[1].0 + 1 >= pair[0].1), "{bars:?}");
        assert!(lines.iter().all(|line| line.chars().count() <= 100));
    }

    #[test]
    fn no_blackout_no_bars() {
        assert!(waterfall(&Move::default(), 100, Paint(false)).is_empty());
    }
}
