//! Throughput around a move, in block characters, both blackouts shaded.

use super::clean;
use super::paint::{Colour, Paint};
use crate::model::{Move, Run};
use crate::scale::{RateAxis, step, ticks};
use crate::text::milliseconds;

/// Columns of the labels of the upright axis, the axis included.
const MARGIN: usize = 9;
const EIGHTHS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// What a column shows.
#[derive(Debug, Clone, Copy)]
struct Column {
    bits: Option<f64>,
    shade: char,
    colour: Colour,
}

/// The lines of the chart of the move at `index`; `None` if there is nothing to show.
pub fn chart(run: &Run, index: usize, width: usize, rows: usize, paint: Paint) -> Option<Vec<String>> {
    let one = run.moves.get(index)?;
    let (from, to) = one.window()?;
    let count = width - MARGIN;
    let columns = columns(run, one, from, to, count);
    let highest = columns
        .iter()
        .filter_map(|column| column.bits)
        .fold(None, |most: Option<f64>, bits| {
            Some(most.map_or(bits, |most| most.max(bits)))
        })?;
    let axis = RateAxis::new(highest, rows.div_ceil(2) + 1);
    let title = format!(
        "{}  {} at {}, from 5 ms samples",
        run.move_title(index),
        axis.unit,
        run.partner
    );
    let mut lines = vec![paint.bold(Colour::Plain, &clean(&title))];
    for row in (0..rows).rev() {
        lines.push(line(&columns, &axis, row, rows, paint));
    }
    let zero = one.communication.begun?.as_secs_f64();
    lines.extend(feet(from - zero, to - zero, count, paint));
    lines.push(legend(one, paint));
    Some(lines)
}

fn columns(run: &Run, one: &Move, from: f64, to: f64, count: usize) -> Vec<Column> {
    let width = (to - from) / count as f64;
    let service = one.service.seconds();
    let communication = one.communication.seconds();
    let within = |span: Option<(f64, f64)>, at: f64| span.is_some_and(|(begin, end)| begin <= at && at < end);
    (0..count)
        .map(|index| {
            let begin = from + index as f64 * width;
            let (shade, colour) = match begin + width / 2.0 {
                at if within(service, at) => ('▒', Colour::Red),
                at if within(communication, at) => ('░', Colour::Yellow),
                _ => (' ', Colour::Cyan),
            };
            Column {
                bits: run.trace.mean(begin, begin + width),
                shade,
                colour,
            }
        })
        .collect()
}

/// One row of cells, the lowest being 0.
fn line(columns: &[Column], axis: &RateAxis, row: usize, rows: usize, paint: Paint) -> String {
    // A mark is written in the row in which its rate ends.
    let label = axis
        .ticks()
        .into_iter()
        .find(|tick| (tick / axis.top * rows as f64).ceil() as usize == row + 1)
        .map(|tick| axis.label(tick));
    let mut text = match &label {
        Some(label) => paint.dim(&format!("{label:>7} ┤")),
        None => paint.dim(&format!("{:>7} │", "")),
    };
    // Neighbours of one colour are painted together.
    let mut span = String::new();
    let mut colour = None;
    for column in columns {
        let (cell, cell_colour) = cell(*column, axis, row, rows);
        if colour != Some(cell_colour) {
            text += &colour.map_or_else(String::new, |colour| paint.colour(colour, &span));
            span.clear();
            colour = Some(cell_colour);
        }
        span.push(cell);
    }
    text + &colour.map_or_else(String::new, |colour| paint.colour(colour, &span))
}

fn cell(column: Column, axis: &RateAxis, row: usize, rows: usize) -> (char, Colour) {
    let bits = column.bits.unwrap_or(0.0);
    let mut eighths = (axis.place(bits) * (rows * 8) as f64).round() as usize;
    if bits > 0.0 {
        eighths = eighths.max(1);
    }
    match eighths.saturating_sub(row * 8).min(8) {
        0 => (column.shade, column.colour),
        filled => (EIGHTHS[filled], Colour::Cyan),
    }
}

/// The time axis: its line, and its labels in milliseconds from the suspension.
fn feet(from: f64, to: f64, count: usize, paint: Paint) -> [String; 2] {
    let (from, to) = (from * 1e3, to * 1e3);
    let mut line = vec!['─'; count];
    let mut labels = vec![' '; count + MARGIN];
    let mut free = 0;
    for tick in ticks(from, to, step(to - from, count / 12)) {
        let column = (((tick - from) / (to - from)) * count as f64) as usize;
        let Some(mark) = line.get_mut(column) else {
            continue;
        };
        *mark = '┬';
        let label = if tick == 0.0 {
            "0 ms".to_owned()
        } else {
            format!("{tick:+.0}")
        };
        let begin = (MARGIN + column).saturating_sub(label.chars().count() / 2);
        if begin >= free && begin + label.chars().count() <= labels.len() {
            for (place, letter) in labels[begin..].iter_mut().zip(label.chars()) {
                *place = letter;
            }
            free = begin + label.chars().count() + 1;
        }
    }
    let line: String = line.into_iter().collect();
    let labels: String = labels.into_iter().collect();
    [paint.dim(&format!("{:>7} └{line}", "0")), paint.dim(&labels)]
}

fn legend(one: &Move, paint: Paint) -> String {
    format!(
        "{:MARGIN$}{} communication blackout {}   {} service blackout {}",
        "",
        paint.colour(Colour::Yellow, "░"),
        milliseconds(one.communication.time),
        paint.colour(Colour::Red, "▒"),
        milliseconds(one.service.time),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Blackout;
    use crate::testing::run;
    use std::time::Duration;

    #[test]
    fn the_gap_is_where_the_blackout_is() {
        let run = run();
        let lines = chart(&run, 0, 100, 7, Paint(false)).unwrap();
        let top = &lines[1..8]
            .iter()
            .map(|line| line.chars().skip(MARGIN).collect::<Vec<_>>())
            .collect::<Vec<_>>();
        let (from, to) = run.moves[0].window().unwrap();
        let (begin, end) = run.moves[0].communication.seconds().unwrap();
        let at = |time: f64| ((time - from) / (to - from) * 91.0) as usize;
        let lowest = top.last().unwrap();
        assert!(
            lowest[2..at(begin) - 1].iter().all(|cell| *cell == '█'),
            "{lines:#?}"
        );
        assert!(
            lowest[at(begin) + 2..at(end) - 2]
                .iter()
                .all(|cell| "░▒".contains(*cell)),
            "{lines:#?}"
        );
        assert!(lowest.contains(&'▒'));
        assert!(
            lowest[at(end) + 2..88].iter().all(|cell| *cell == '█'),
            "{lines:#?}"
        );
    }

    #[test]
    fn without_samples_or_suspension_there_is_no_chart() {
        let mut run = run();
        run.moves.push(Move::default());
        assert!(chart(&run, 1, 80, 7, Paint(false)).is_none());
        run.trace = Default::default();
        assert!(chart(&run, 0, 80, 7, Paint(false)).is_none());
    }

    #[test]
    fn a_blackout_without_end_is_still_drawn() {
        let mut run = run();
        run.moves[0].communication = Blackout {
            begun: run.moves[0].communication.begun,
            time: Duration::MAX,
        };
        assert!(chart(&run, 0, 80, 7, Paint(false)).is_none_or(|lines| lines.len() == 11));
    }
}
