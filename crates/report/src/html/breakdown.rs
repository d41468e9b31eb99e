//! The communication blackout of each move as a stacked bar of its phases.

use std::fmt::Write;

use super::markup::{escape, tag};
use crate::model::{Run, phase_names};
use crate::scale::{step, ticks};
use crate::text::milliseconds;

const WIDTH: f64 = 880.0;
const ROW: f64 = 40.0;
const BAR: f64 = 26.0;
const FOOT: f64 = 34.0;
/// The colours in `page.css`.
const COLOURS: usize = 7;

/// A figure; empty if no move had a blackout.
pub fn breakdown(run: &Run) -> String {
    let total = |index: usize| {
        run.moves[index]
            .blackout_phases()
            .map(|phase| phase.time.as_secs_f64())
            .sum::<f64>()
            * 1e3
    };
    let longest = (0..run.moves.len()).map(total).fold(0.0, f64::max);
    if longest <= 0.0 {
        return String::new();
    }
    let left = if run.moves.len() > 1 { 96.0 } else { 2.0 };
    let scale = (WIDTH - left - 10.0) / longest;
    let names: Vec<_> = phase_names(&run.moves)
        .into_iter()
        .filter(|name| {
            run.moves
                .iter()
                .any(|one| one.blackout_phases().any(|phase| phase.name == *name))
        })
        .collect();
    let colour = |name: &str| names.iter().position(|known| *known == name).unwrap_or(0) % COLOURS;

    let mut svg = String::new();
    let mut words = String::new();
    let bottom = run.moves.len() as f64 * ROW;
    for tick in ticks(0.0, longest, step(longest, 10)) {
        let x = left + tick * scale;
        let _ = writeln!(
            svg,
            "<line class=\"grid\" x1=\"{x:.1}\" y1=\"0\" x2=\"{x:.1}\" y2=\"{bottom}\"/>"
        );
        let _ = writeln!(
            svg,
            "<text class=\"mark\" x=\"{x:.1}\" y=\"{}\" text-anchor=\"{}\">{tick:.0}</text>",
            bottom + 14.0,
            if tick == 0.0 && left < 10.0 {
                "start"
            } else {
                "middle"
            }
        );
    }
    for (index, one) in run.moves.iter().enumerate() {
        let y = index as f64 * ROW + (ROW - BAR) / 2.0;
        if run.moves.len() > 1 {
            let title = escape(&run.move_title(index));
            let _ = writeln!(
                svg,
                "<text class=\"label\" x=\"0\" y=\"{}\">{title}</text>",
                y + BAR / 2.0 + 4.0
            );
        }
        let mut passed = 0.0;
        for phase in one.blackout_phases() {
            let time = phase.time.as_secs_f64() * 1e3;
            let (x, width) = (left + passed * scale, time * scale);
            passed += time;
            let text = format!("{} {}", phase.name, milliseconds(phase.time));
            let _ = write!(words, "{}: {text}. ", run.move_title(index));
            let text = escape(&text);
            let _ = writeln!(
                svg,
                "<rect class=\"p{}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{BAR}\"><title>{text}</title></rect>",
                colour(&phase.name),
                (width - 1.0).max(0.6)
            );
            if width >= 34.0 {
                let _ = writeln!(
                    svg,
                    "<text class=\"inside\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{time:.1}</text>",
                    x + width / 2.0,
                    y + BAR / 2.0 + 4.0
                );
            }
        }
    }
    let height = bottom + FOOT;
    let _ = writeln!(
        svg,
        "<text class=\"mark\" x=\"{}\" y=\"{}\" text-anchor=\"end\">milliseconds</text>",
        WIDTH - 8.0,
        height - 3.0
    );
    let legend: String = names
        .iter()
        .map(|name| {
            let swatch = format!(
                "<svg class=\"swatch\" viewBox=\"0 0 10 10\" aria-hidden=\"true\"><rect class=\"p{}\" width=\"10\" height=\"10\"/></svg>",
                colour(name)
            );
            tag("li", "", &(swatch + &escape(name)))
        })
        .collect();
    let id = format!("phases-{}", run.number);
    let drawing = format!(
        "<svg class=\"bars\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-labelledby=\"{id}-t {id}-d\">\n\
         <title id=\"{id}-t\">The communication blackout by phases</title>\n<desc id=\"{id}-d\">{}</desc>\n{svg}</svg>\n",
        escape(words.trim_end())
    );
    tag(
        "figure",
        "",
        &(tag("figcaption", "", "The communication blackout, phase by phase")
            + &drawing
            + &tag("ul", "class=\"legend\"", &legend)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{report, run};

    #[test]
    fn segments_fill_the_bar_and_follow_each_other() {
        let svg = breakdown(&run());
        let number = |text: &str, key: &str| -> f64 {
            text.split(&format!("{key}=\""))
                .nth(1)
                .unwrap()
                .split('"')
                .next()
                .unwrap()
                .parse()
                .unwrap()
        };
        let segments: Vec<_> = svg
            .split("<rect class=\"p")
            .skip(1)
            .filter(|part| part.contains("<title>"))
            .map(|part| (number(part, " x"), number(part, "width")))
            .collect();
        assert_eq!(segments.len(), 7);
        assert!(
            segments
                .windows(2)
                .all(|pair| pair[0].0 + pair[0].1 <= pair[1].0 + 0.1),
            "{segments:?}"
        );
        let last = segments.last().unwrap();
        assert!((last.0 + last.1 - (WIDTH - 10.0)).abs() < 2.0);
    }

    #[test]
    fn several_moves_share_a_scale_and_a_legend() {
        let svg = breakdown(&report().runs[1]);
        assert_eq!(svg.matches("class=\"legend\"").count(), 1);
        assert_eq!(svg.matches("class=\"swatch\"").count(), 7);
        assert!(svg.contains("4. dst → src"));
    }
}
