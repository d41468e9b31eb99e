//! The report for a terminal.

mod chart;
mod paint;
mod waterfall;

use std::fmt::Write;

use crate::model::{Report, Run, table};
use crate::text::exit_status;
use paint::{Colour, Paint};

/// What the terminal can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terminal {
    /// Columns; fewer than 72 are taken for 72.
    pub width: usize,
    /// Whether to use colours (ANSI escapes).
    pub colour: bool,
}

/// How tall the chart of a run's only move is; several share the space.
const CHART_ROWS: usize = 7;

/// Shows a report.
pub fn terminal(report: &Report, terminal: Terminal) -> String {
    let width = terminal.width.clamp(72, 160);
    let paint = Paint(terminal.colour);
    let mut out = String::new();
    for run in &report.runs {
        show_run(&mut out, run, width, paint);
    }
    for problem in &report.problems {
        push(
            &mut out,
            &paint.bold(Colour::Red, &format!("✗ {}", clean(problem))),
        );
    }
    let line = if report.is_ok() {
        paint.bold(Colour::Green, "✓ nothing was lost, and every program ended well")
    } else {
        paint.bold(Colour::Red, "✗ failed")
    };
    push(&mut out, &line);
    out
}

fn show_run(out: &mut String, run: &Run, width: usize, paint: Paint) {
    let verdict = if run.is_ok() {
        paint.bold(Colour::Green, "ok")
    } else {
        paint.bold(Colour::Red, "failed")
    };
    let head = format!("Run {} · {}", run.number, clean(&run.title));
    let gap = width
        .saturating_sub(head.chars().count() + if run.is_ok() { 2 } else { 6 })
        .max(2);
    push(
        out,
        &format!("{}{}{verdict}", paint.bold(Colour::Plain, &head), " ".repeat(gap)),
    );
    push(out, &paint.dim(&"─".repeat(width)));
    for line in wrap(&clean(&run.story), width) {
        push(out, &line);
    }
    push(out, "");
    let rows = if run.moves.len() > 1 {
        CHART_ROWS / 2 + 1
    } else {
        CHART_ROWS
    };
    for index in 0..run.moves.len() {
        if let Some(lines) = chart::chart(run, index, width, rows, paint) {
            lines.iter().for_each(|line| push(out, line));
            push(out, "");
        }
    }
    if let [only] = run.moves.as_slice() {
        let lines = waterfall::waterfall(only, width, paint);
        if !lines.is_empty() {
            lines.iter().for_each(|line| push(out, line));
            push(out, "");
        }
    }
    show_table(out, run, paint);
    for output in &run.outputs {
        let head = format!("{}: {}", clean(&output.program), exit_status(output.exit_status));
        push(out, &paint.bold(Colour::Plain, &head));
        for line in clean(&output.text).lines() {
            let letters: Vec<_> = line.trim_end().chars().collect();
            letters
                .chunks(width - 2)
                .for_each(|part| push(out, &format!("  {}", String::from_iter(part))));
        }
    }
    for problem in &run.problems {
        push(out, &paint.bold(Colour::Red, &format!("✗ {}", clean(problem))));
    }
    push(out, "");
}

fn show_table(out: &mut String, run: &Run, paint: Paint) {
    if run.moves.is_empty() {
        return;
    }
    let head: Vec<_> = run.moves.iter().map(|one| clean(&one.title())).collect();
    let rows = table(&run.moves);
    let first = rows
        .iter()
        .map(|(name, _)| name.chars().count())
        .max()
        .unwrap_or(0);
    let cells = rows.iter().flat_map(|(_, cells)| cells).chain(&head);
    let wide = cells.map(|cell| cell.chars().count()).max().unwrap_or(0);
    let line = |name: &str, cells: &[String]| {
        let mut line = format!("  {name:<first$}");
        for cell in cells {
            let _ = write!(line, "  {cell:>wide$}");
        }
        line
    };
    push(out, &paint.dim(&line("", &head)));
    for (name, cells) in &rows {
        let text = line(&clean(name), cells);
        push(
            out,
            &if name.contains("blackout") && !name.contains("sent") {
                paint.bold(Colour::Plain, &text)
            } else {
                text
            },
        );
    }
    for one in run.moves.iter().filter(|one| !one.committed) {
        push(
            out,
            &paint.bold(Colour::Red, &format!("  {} was rolled back", clean(&one.title()))),
        );
    }
    push(out, "");
}

fn push(out: &mut String, line: &str) {
    out.push_str(line.trim_end());
    out.push('\n');
}

/// Text of others, without what would steer the terminal.
fn clean(text: &str) -> String {
    text.replace('\t', "    ")
        .chars()
        .filter(|c| !c.is_control() || *c == '\n')
        .collect()
}

/// Lines of at most `width` columns, broken between words.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{report, run};

    const PLAIN: Terminal = Terminal {
        width: 100,
        colour: false,
    };

    #[test]
    fn it_shows_charts_phases_and_results() {
        let text = terminal(&report(), PLAIN);
        for expected in [
            "Run 1 · the sender moves",
            "src → dst",
            "Gbit/s",
            "communication blackout",
            "WaitBeforeStop",
            "exit status 0",
            "#bytes",
            "✓ nothing was lost",
        ] {
            assert!(text.contains(expected), "{expected:?} is missing in\n{text}");
        }
        assert!(!text.contains('\u{1b}'));
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    }

    #[test]
    fn every_width_is_kept_to() {
        for width in [0, 72, 80, 133, 10_000] {
            let mut report = report();
            report.runs[1].outputs[0].text = "a long line ".repeat(100);
            let text = terminal(&report, Terminal { width, colour: false });
            let most = text.lines().map(|line| line.chars().count()).max().unwrap();
            assert!(
                most <= width.clamp(72, 160),
                "{most} columns at width {width}:\n{text}"
            );
        }
    }

    #[test]
    fn nothing_is_shown_of_nothing() {
        let text = terminal(&Report::default(), PLAIN);
        assert_eq!(text, "✗ failed\n");
        let text = terminal(
            &Report {
                runs: vec![Run::default()],
                ..Report::default()
            },
            PLAIN,
        );
        assert!(text.contains("Run 0"));
    }

    #[test]
    fn a_failure_says_what_failed() {
        let mut bad = run();
        bad.problems.push("the receiver ended with status 1".into());
        bad.moves[0].committed = false;
        bad.outputs[0].text = "\u{1b}[2Jerror".into();
        let text = terminal(
            &Report {
                runs: vec![bad],
                ..Report::default()
            },
            PLAIN,
        );
        assert!(text.contains("✗ the receiver ended with status 1"));
        assert!(text.contains("was rolled back"));
        assert!(text.contains("✗ failed"));
        assert!(!text.contains('\u{1b}'), "a program's output steers the terminal");
    }

    #[test]
    fn colours_are_switched_off_again() {
        let text = terminal(
            &report(),
            Terminal {
                width: 100,
                colour: true,
            },
        );
        for line in text.lines() {
            let on = line.matches("\u{1b}[").count();
            assert_eq!(line.matches("\u{1b}[0m").count() * 2, on, "{line:?}");
        }
    }
}
