//! The report as one HTML page.

mod breakdown;
mod chart;
mod markup;

use crate::model::{Report, Run, table};
use crate::text::{exit_status, milliseconds};
use markup::{escape, tag};

const STYLE: &str = include_str!("page.css");

/// The whole page, in need of nothing else.
pub fn html(report: &Report) -> String {
    let verdict = if report.is_ok() {
        tag(
            "p",
            "class=\"verdict ok\"",
            "✓ Nothing was lost, and every program ended well.",
        )
    } else {
        tag(
            "p",
            "class=\"verdict failed\"",
            "✗ Failed; the runs below say where.",
        )
    };
    let mut body = tag(
        "header",
        "",
        &format!(
            "<p class=\"name\">Verbatim</p><h1>Running RDMA programs moved to another host</h1>{verdict}{}",
            tag("p", "class=\"quiet\"", &escape(&report.machine))
        ),
    );
    body += &problems(&report.problems);
    body += &summary(report);
    for run in &report.runs {
        body += &section(run);
    }
    body += &tag("footer", "class=\"quiet\"", FOOTER);
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>Verbatim: moved while running</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n{body}</main>\n</body>\n</html>\n"
    )
}

const FOOTER: &str = "\
<p><b>Service blackout</b>: the moved program’s threads do not run. <b>Communication blackout</b>: from suspending its \
connections until they carry data again; it contains the service blackout, and begins \
with waiting for what is in flight, which the charts show arriving.</p>\
<p>Throughput counts payload bytes in both directions at the RNIC of the host that stays, read every 5 ms. The times of \
phases are those of the source’s agent; in the charts they are placed by when this command heard of them.</p>";

fn problems(problems: &[String]) -> String {
    let items: String = problems
        .iter()
        .map(|problem| tag("li", "", &escape(problem)))
        .collect();
    if items.is_empty() {
        items
    } else {
        tag("ul", "class=\"problems\"", &items)
    }
}

/// Both blackouts of each migration.
fn summary(report: &Report) -> String {
    let mut rows = String::new();
    for run in &report.runs {
        for (index, one) in run.moves.iter().enumerate() {
            let first = if index == 0 {
                let head = format!("<a href=\"#run-{}\">{}</a>", run.number, escape(&run.title));
                tag(
                    "th",
                    &format!("scope=\"rowgroup\" rowspan=\"{}\"", run.moves.len()),
                    &head,
                )
            } else {
                String::new()
            };
            let outcome = if one.committed { "moved" } else { "rolled back" };
            let cells = [
                tag("td", "", &escape(&one.title())),
                tag("td", "class=\"number\"", &milliseconds(one.service.time)),
                tag("td", "class=\"number\"", &milliseconds(one.communication.time)),
                tag("td", "", outcome),
            ];
            rows += &tag("tr", "", &(first + &cells.concat()));
        }
    }
    if rows.is_empty() {
        return rows;
    }
    let heads: String = [
        ("Run", ""),
        ("Move", ""),
        ("Service blackout", " class=\"number\""),
        ("Communication blackout", " class=\"number\""),
        ("Outcome", ""),
    ]
    .iter()
    .map(|(name, class)| tag("th", &format!("scope=\"col\"{class}"), name))
    .collect();
    wide_table("Both blackouts of every move", &heads, &rows)
}

fn wide_table(caption: &str, heads: &str, rows: &str) -> String {
    let table = format!(
        "{}{}{}",
        tag("caption", "", &escape(caption)),
        tag("thead", "", &tag("tr", "", heads)),
        tag("tbody", "", rows)
    );
    tag("div", "class=\"scroll\"", &tag("table", "", &table))
}

fn section(run: &Run) -> String {
    let number = run.number;
    let state = if run.is_ok() {
        ("ok", "✓ ok")
    } else {
        ("failed", "✗ failed")
    };
    let mut out = tag(
        "h2",
        "",
        &format!(
            "<span class=\"quiet\">Run {number}</span> {} <span class=\"badge {}\">{}</span>",
            escape(&run.title),
            state.0,
            state.1
        ),
    );
    out += &tag("p", "", &escape(&run.story));
    out += &problems(&run.problems);
    for index in 0..run.moves.len() {
        out += &chart::chart(run, index);
    }
    out += &breakdown::breakdown(run);
    out += &phases(run);
    for output in &run.outputs {
        let head = format!("{}: {}", output.program, exit_status(output.exit_status));
        out += &tag(
            "figure",
            "",
            &(tag("figcaption", "", &escape(&head)) + &tag("pre", "", &escape(output.text.trim_end()))),
        );
    }
    tag("section", &format!("id=\"run-{number}\""), &out)
}

fn phases(run: &Run) -> String {
    if run.moves.is_empty() {
        return String::new();
    }
    let mut heads = tag("td", "", "");
    for index in 0..run.moves.len() {
        heads += &tag(
            "th",
            "scope=\"col\" class=\"number\"",
            &escape(&run.move_title(index)),
        );
    }
    let rows: String = table(&run.moves)
        .iter()
        .map(|(name, cells)| {
            let cells: String = cells
                .iter()
                .map(|cell| tag("td", "class=\"number\"", &escape(cell)))
                .collect();
            let class = if name.ends_with(" blackout") && !name.starts_with("sent") {
                "class=\"main\""
            } else {
                ""
            };
            tag("tr", class, &(tag("th", "scope=\"row\"", &escape(name)) + &cells))
        })
        .collect();
    wide_table("Phases, in the order in which they pass", &heads, &rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{report, run};
    use markup::testing::check;

    #[test]
    fn the_page_is_well_formed_and_whole() {
        let page = html(&report());
        check(&page);
        assert_eq!(page.matches("<section").count(), 2);
        assert_eq!(page.matches("class=\"chart\"").count(), 5, "a chart per move");
        for expected in [
            "<h1>",
            "WaitBeforeStop",
            "#bytes",
            "12.0",
            "Both blackouts",
            "exit status 0",
        ] {
            assert!(page.contains(expected), "{expected:?} is missing");
        }
    }

    #[test]
    fn nothing_is_loaded_and_nothing_runs() {
        let page = html(&report());
        for forbidden in [
            "<script", "src=", "url(", "@import", "<link", "http:", "https:", "onload",
        ] {
            assert!(!page.contains(forbidden), "{forbidden}");
        }
    }

    #[test]
    fn what_programs_said_stays_text() {
        let mut bad = run();
        bad.title = "<script>alert(1)</script>".into();
        bad.outputs[0].text = "</pre><img src=x onerror=1>\u{1b}[1m\u{0}&".into();
        bad.moves[0].source = "\"><b>".into();
        bad.partner = "a&b".into();
        bad.problems.push("<i>".into());
        let page = html(&Report {
            runs: vec![bad],
            machine: "<u>".into(),
            problems: vec!["<s>".into()],
        });
        check(&page);
        for forbidden in ["<script", "<img", "<b>\"", "<i>", "<u>", "<s>", "\u{1b}", "\u{0}"] {
            assert!(!page.contains(forbidden), "{forbidden:?}");
        }
        assert!(page.contains("a&amp;b"));
    }

    #[test]
    fn empty_data_makes_a_page_that_says_failed() {
        let page = html(&Report::default());
        check(&page);
        assert!(page.contains("verdict failed"));
        check(&html(&Report {
            runs: vec![Run::default()],
            ..Report::default()
        }));
    }

    #[test]
    fn huge_values_stay_within_the_page() {
        let mut run = run();
        let one = &mut run.moves[0];
        one.communication.time = std::time::Duration::MAX;
        one.service.time = std::time::Duration::MAX;
        one.bytes_pre_copy = u64::MAX;
        one.phases[3].time = std::time::Duration::MAX;
        run.trace
            .push(std::time::Duration::from_secs(4_000_000_000), u64::MAX);
        let page = html(&Report {
            runs: vec![run],
            ..Report::default()
        });
        check(&page);
        assert!(
            !page.contains("NaN") && !page.contains("inf"),
            "a number that SVG does not know"
        );
        assert!(page.len() < 400_000);
    }
}
