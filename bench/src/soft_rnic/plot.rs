//! The plots, as SVG.

use std::path::Path;

use anyhow::{Context, anyhow};
use plotters::prelude::*;

/// A line of a plot.
pub struct Line {
    pub name: String,
    pub points: Vec<(f64, f64)>,
    /// Drawn as what it is compared with.
    pub peer: bool,
}

/// What is on the axes.
pub struct Axes<'a> {
    pub title: &'a str,
    pub x: &'a str,
    pub y: &'a str,
    pub scale: Scale,
}

/// What the values of x are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    Linear,
    /// Message sizes: powers of two at equal distances.
    Sizes,
    /// Counts: likewise.
    Counts,
}

const COLOURS: [RGBColor; 6] = [
    RGBColor(0x1b, 0x6c, 0xa8),
    RGBColor(0xc4, 0x4e, 0x23),
    RGBColor(0x2e, 0x8b, 0x57),
    RGBColor(0x7a, 0x4f, 0xa3),
    RGBColor(0xb8, 0x86, 0x0b),
    RGBColor(0x46, 0x82, 0x8d),
];
const PEER: RGBColor = RGBColor(0x80, 0x80, 0x80);

/// Draws the lines into a file.
pub fn draw(path: &Path, axes: &Axes<'_>, lines: &[Line]) -> anyhow::Result<()> {
    let place = |x: f64| if axes.scale == Scale::Linear { x } else { x.log2() };
    let points = || lines.iter().flat_map(|line| &line.points);
    let (least, most) = points().fold((f64::MAX, f64::MIN), |(least, most), (x, _)| {
        (least.min(place(*x)), most.max(place(*x)))
    });
    let top = points().fold(0.0, |top: f64, (_, y)| top.max(*y)) * 1.05;
    let failed = |error: &dyn std::fmt::Display| anyhow!("cannot draw {}: {error}", path.display());

    let root = SVGBackend::new(path, (860, 460)).into_drawing_area();
    root.fill(&WHITE).map_err(|error| failed(&error))?;
    let mut chart = ChartBuilder::on(&root)
        .caption(axes.title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(42)
        .y_label_area_size(60)
        .build_cartesian_2d(least..most, 0.0..top)
        .map_err(|error| failed(&error))?;
    let label = |x: &f64| match axes.scale {
        Scale::Linear => format!("{x:.1}"),
        Scale::Sizes => size(x.exp2()),
        Scale::Counts => format!("{:.0}", x.exp2()),
    };
    chart
        .configure_mesh()
        .x_desc(axes.x)
        .y_desc(axes.y)
        .x_label_formatter(&label)
        .light_line_style(WHITE)
        .draw()
        .map_err(|error| failed(&error))?;
    for (index, line) in lines.iter().enumerate() {
        let colour = if line.peer {
            PEER
        } else {
            COLOURS[index % COLOURS.len()]
        };
        let style = colour.stroke_width(if line.peer { 1 } else { 2 });
        let placed = line.points.iter().map(|(x, y)| (place(*x), *y));
        chart
            .draw_series(LineSeries::new(placed.clone(), style))
            .map_err(|error| failed(&error))?
            .label(&line.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
        if !line.peer {
            let marks = placed.map(|point| Circle::new(point, 3, colour.filled()));
            chart.draw_series(marks).map_err(|error| failed(&error))?;
        }
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.85))
        .border_style(PEER)
        .draw()
        .map_err(|error| failed(&error))?;
    root.present()
        .with_context(|| format!("cannot write {}", path.display()))
}

/// A message size for people.
pub fn size(bytes: f64) -> String {
    match bytes.round() as u64 {
        bytes if bytes >= 1 << 20 => format!("{} MiB", bytes >> 20),
        bytes if bytes >= 1 << 10 => format!("{} KiB", bytes >> 10),
        bytes => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_has_its_lines_and_names() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("plot.svg");
        let axes = Axes {
            title: "a title",
            x: "size",
            y: "Gbit/s",
            scale: Scale::Sizes,
        };
        let line = Line {
            name: "a line".to_owned(),
            points: vec![(8.0, 1.0), (1024.0, 5.0)],
            peer: false,
        };
        draw(&path, &axes, &[line]).unwrap();
        let svg = std::fs::read_to_string(path).unwrap();
        for text in ["a title", "a line", "polyline", "8 B"] {
            assert!(svg.contains(text), "{text} is missing");
        }
    }

    #[test]
    fn sizes_are_for_people() {
        assert_eq!([8.0, 65536.0, 8388608.0].map(size), ["8 B", "64 KiB", "8 MiB"]);
    }
}
