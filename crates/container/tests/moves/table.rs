//! The parts of the blackout, move by move.

use std::time::Duration;

use verbatim_container::Timings;

/// The parts of one move, in ms.
pub type Row = Vec<(String, f64)>;

/// What happened after the decision.
pub fn after_commit(timings: &Timings) -> Timings {
    let commit = timings
        .marks
        .iter()
        .position(|mark| mark.name == "commit")
        .unwrap();
    Timings {
        marks: timings.marks[commit..].to_vec(),
    }
}

/// Notes the time from each moment to the next.
pub fn note_steps(note: &mut impl FnMut(&str, Duration), of: &str, timings: &Timings) {
    for (step, time) in timings.steps() {
        note(&format!("  {of} {step}"), time);
    }
}

/// Prints one line for each part.
pub fn print_table(table: &[Row]) {
    println!(
        "{:>28} {:>8} {:>8} {:>8}  ({} moves, ms)",
        "",
        "min",
        "median",
        "max",
        table.len()
    );
    for (column, (what, _)) in table[0].iter().enumerate() {
        let mut values: Vec<f64> = table
            .iter()
            .filter_map(|row| row.get(column))
            .map(|cell| cell.1)
            .collect();
        values.sort_by(f64::total_cmp);
        let median = values[values.len() / 2];
        println!(
            "{what:>28} {:>8.2} {median:>8.2} {:>8.2}",
            values[0],
            values[values.len() - 1]
        );
    }
}
