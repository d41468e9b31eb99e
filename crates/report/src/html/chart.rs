//! Throughput around a move as SVG, both blackouts shaded.

use std::fmt::Write;

use super::markup::{escape, tag};
use crate::model::{Move, Run};
use crate::scale::{RateAxis, step, ticks};
use crate::text::milliseconds;
use crate::trace::Rate;

// The drawing's measures, in its own units.
const WIDTH: f64 = 880.0;
const HEIGHT: f64 = 268.0;
const LEFT: f64 = 46.0;
const RIGHT: f64 = WIDTH - 8.0;
const TOP: f64 = 56.0;
const BOTTOM: f64 = HEIGHT - 40.0;
/// Room for the label of a blackout.
const LABEL: f64 = 250.0;
/// More samples than this are not drawn one by one.
const MOST: usize = 2000;

/// A figure; empty if there is nothing to show.
pub fn chart(run: &Run, index: usize) -> String {
    let Some((one, (from, to))) = run.moves.get(index).and_then(|one| Some((one, one.window()?))) else {
        return String::new();
    };
    let rates = samples(run, from, to);
    let highest = rates.iter().map(|rate| rate.bits).fold(0.0, f64::max);
    let (true, Some(zero)) = (!rates.is_empty() && to > from, one.communication.begun) else {
        return String::new();
    };
    let zero = zero.as_secs_f64();
    let axis = RateAxis::new(highest, 5);
    let x = |at: f64| LEFT + ((at - from) / (to - from)).clamp(0.0, 1.0) * (RIGHT - LEFT);
    let y = |bits: f64| BOTTOM - axis.place(bits) * (BOTTOM - TOP);

    let mut svg = String::new();
    for (span, class) in [
        (one.communication.seconds(), "communication"),
        (one.service.seconds(), "service"),
    ] {
        if let Some((begin, end)) = span {
            let (begin, width) = (x(begin), (x(end) - x(begin)).max(1.0));
            let height = BOTTOM - TOP;
            let _ = writeln!(
                svg,
                "<rect class=\"{class}\" x=\"{begin:.1}\" y=\"{TOP}\" width=\"{width:.1}\" height=\"{height}\"/>"
            );
        }
    }
    grid(&mut svg, &axis, (from - zero) * 1e3, (to - zero) * 1e3);
    let _ = writeln!(svg, "<path class=\"area\" d=\"{}\"/>", area(&rates, &x, &y));
    let _ = writeln!(svg, "<path class=\"line\" d=\"{}\"/>", outline(&rates, &x, &y));
    brackets(&mut svg, one, &x);
    let title = format!(
        "{}: throughput of the partner {}",
        run.move_title(index),
        run.partner
    );
    figure(
        &svg,
        &title,
        &description(run, one, &axis, highest),
        run.number,
        index,
    )
}

/// Samples of the trace; means over as many equal parts where there are too many.
fn samples(run: &Run, from: f64, to: f64) -> Vec<Rate> {
    let rates = run.trace.rates(from, to);
    if rates.len() <= MOST {
        return rates;
    }
    let width = (to - from) / MOST as f64;
    (0..MOST)
        .filter_map(|part| {
            let begin = from + part as f64 * width;
            Some(Rate {
                from: begin,
                to: begin + width,
                bits: run.trace.mean(begin, begin + width)?,
            })
        })
        .collect()
}

/// Lines across with the rates, marks below with milliseconds from the suspension.
fn grid(svg: &mut String, axis: &RateAxis, from: f64, to: f64) {
    for tick in axis.ticks() {
        let y = BOTTOM - tick / axis.top * (BOTTOM - TOP);
        let _ = writeln!(
            svg,
            "<line class=\"grid\" x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{RIGHT}\" y2=\"{y:.1}\"/>"
        );
        let _ = writeln!(
            svg,
            "<text class=\"mark\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LEFT - 8.0,
            y + 4.0,
            axis.label(tick)
        );
    }
    for tick in ticks(from, to, step(to - from, 9)) {
        let x = LEFT + (tick - from) / (to - from) * (RIGHT - LEFT);
        let label = if tick == 0.0 {
            "0".to_owned()
        } else {
            format!("{tick:+.0}").replace('-', "−")
        };
        let _ = writeln!(
            svg,
            "<line class=\"tick\" x1=\"{x:.1}\" y1=\"{BOTTOM}\" x2=\"{x:.1}\" y2=\"{}\"/>",
            BOTTOM + 5.0
        );
        let _ = writeln!(
            svg,
            "<text class=\"mark\" x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{label}</text>",
            BOTTOM + 19.0
        );
    }
    let _ = writeln!(
        svg,
        "<text class=\"mark\" x=\"0\" y=\"{}\">{}</text>",
        TOP - 14.0,
        axis.unit
    );
    let _ = writeln!(
        svg,
        "<text class=\"mark\" x=\"{RIGHT}\" y=\"{}\" text-anchor=\"end\">milliseconds from the suspension of the \
         connections</text>",
        HEIGHT - 4.0
    );
}

/// The samples as steps.
fn outline(rates: &[Rate], x: &impl Fn(f64) -> f64, y: &impl Fn(f64) -> f64) -> String {
    let mut path = String::new();
    for (index, rate) in rates.iter().enumerate() {
        let letter = if index == 0 { 'M' } else { 'L' };
        let _ = write!(
            path,
            "{letter}{:.1} {:.1}H{:.1}",
            x(rate.from),
            y(rate.bits),
            x(rate.to)
        );
    }
    path
}

fn area(rates: &[Rate], x: &impl Fn(f64) -> f64, y: &impl Fn(f64) -> f64) -> String {
    let (Some(first), Some(last)) = (rates.first(), rates.last()) else {
        return String::new();
    };
    format!(
        "{}L{:.1} {BOTTOM}L{:.1} {BOTTOM}Z",
        outline(rates, x, y),
        x(last.to),
        x(first.from)
    )
}

/// Above the plot: how far each blackout reaches, with its length.
fn brackets(svg: &mut String, one: &Move, x: &impl Fn(f64) -> f64) {
    let rows = [
        (
            one.communication,
            "communication blackout",
            "communication",
            TOP - 34.0,
        ),
        (one.service, "service blackout", "service", TOP - 10.0),
    ];
    for (blackout, name, class, y) in rows {
        let Some((begin, end)) = blackout.seconds() else {
            continue;
        };
        let (begin, end) = (x(begin), x(end).max(x(begin) + 1.0));
        let (up, down) = (y - 4.0, y + 4.0);
        let _ = writeln!(
            svg,
            "<path class=\"bracket {class}\" d=\"M{begin:.1} {up}V{down}M{begin:.1} {y}H{end:.1}M{end:.1} {up}V{down}\"/>"
        );
        // Beside the bracket where there is room, else on it.
        let (at, anchor) = if end + LABEL < WIDTH {
            (end + 8.0, "start")
        } else if begin > LABEL {
            (begin - 8.0, "end")
        } else {
            let middle = (begin + end) / 2.0;
            let left = middle - LABEL / 2.0;
            let _ = writeln!(
                svg,
                "<rect class=\"paper\" x=\"{left:.1}\" y=\"{up}\" width=\"{LABEL}\" height=\"8\"/>"
            );
            (middle, "middle")
        };
        let _ = writeln!(
            svg,
            "<text class=\"label\" x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\">{name} <tspan class=\"strong\">{}</tspan></text>",
            y + 4.0,
            milliseconds(blackout.time)
        );
    }
}

/// What the chart shows, for those who do not see it.
fn description(run: &Run, one: &Move, axis: &RateAxis, highest: f64) -> String {
    let mean = |span: Option<(f64, f64)>| {
        span.and_then(|(from, to)| run.trace.mean(from, to)).map_or_else(
            || "unknown".to_owned(),
            |bits| format!("{:.1} {}", bits / axis.scale, axis.unit),
        )
    };
    let window = one.window();
    let blackout = one.communication.seconds();
    let before = window.zip(blackout).map(|((from, _), (begin, _))| (from, begin));
    let after = window
        .zip(blackout)
        .map(|((_, to), (_, end))| (end + 0.05, to - 0.01));
    format!(
        "Mean before the move {}, after it {}, highest sample {:.1} {}. Communication blackout {}, in it the service \
         blackout {}.",
        mean(before),
        mean(after),
        highest / axis.scale,
        axis.unit,
        milliseconds(one.communication.time),
        milliseconds(one.service.time)
    )
}

fn figure(svg: &str, title: &str, description: &str, number: u32, index: usize) -> String {
    let (title, description) = (escape(title), escape(description));
    let id = format!("chart-{number}-{index}");
    let drawing = format!(
        "<svg class=\"chart\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-labelledby=\"{id}-t {id}-d\">\n\
         <title id=\"{id}-t\">{title}</title>\n<desc id=\"{id}-d\">{description}</desc>\n{svg}</svg>\n"
    );
    tag(
        "figure",
        "",
        &(tag("figcaption", "", &title) + &drawing + &tag("p", "class=\"quiet\"", &description)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Blackout;
    use crate::testing::run;

    #[test]
    fn both_blackouts_are_shaded_where_they_are() {
        let svg = chart(&run(), 0);
        let left = |class: &str| -> f64 {
            let rect = svg
                .split(&format!("<rect class=\"{class}\" x=\""))
                .nth(1)
                .unwrap();
            rect.split('"').next().unwrap().parse().unwrap()
        };
        // The window is 200 ms before to 400 ms after a blackout of 99 ms.
        let expected = LEFT + 200.0 / 699.0 * (RIGHT - LEFT);
        assert!((left("communication") - expected).abs() < 0.2);
        assert!(left("service") > left("communication"));
    }

    #[test]
    fn the_description_has_the_numbers() {
        let svg = chart(&run(), 0);
        assert!(svg.contains("Mean before the move 12."), "{svg}");
        assert!(svg.contains("Communication blackout 99.0 ms"));
    }

    #[test]
    fn labels_stay_within_the_drawing() {
        for (begun, time) in [(1, 50), (1000, 50), (1000, 5_000), (100, 60_000)] {
            let mut run = run();
            let ms = std::time::Duration::from_millis;
            run.moves[0].communication = Blackout {
                begun: Some(ms(begun)),
                time: ms(time),
            };
            run.moves[0].service = Blackout {
                begun: Some(ms(begun + time / 10 * 9)),
                time: ms(time / 10),
            };
            let svg = chart(&run, 0);
            for label in svg.split("class=\"label\" x=\"").skip(1) {
                let at: f64 = label.split('"').next().unwrap().parse().unwrap();
                let width = match label
                    .split("text-anchor=\"")
                    .nth(1)
                    .unwrap()
                    .split('"')
                    .next()
                    .unwrap()
                {
                    "start" => (0.0, LABEL - 8.0),
                    "end" => (LABEL - 8.0, 0.0),
                    _ => (LABEL / 2.0, LABEL / 2.0),
                };
                assert!(
                    at - width.0 >= 0.0 && at + width.1 <= WIDTH,
                    "{time} ms: a label at {at} as {width:?}"
                );
            }
        }
    }

    #[test]
    fn many_samples_are_thinned() {
        let mut run = run();
        run.trace = Default::default();
        for index in 0..200_000_u64 {
            run.trace
                .push(std::time::Duration::from_micros(index * 10), index * 1000);
        }
        assert!(chart(&run, 0).len() < 200_000);
    }

    #[test]
    fn nothing_to_show_is_nothing() {
        assert_eq!(chart(&run(), 7), "");
        let mut run = run();
        run.moves[0].communication.begun = None;
        assert_eq!(chart(&run, 0), "");
    }
}
