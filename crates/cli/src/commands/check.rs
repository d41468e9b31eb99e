//! `verbatim check`.

use std::process::ExitCode;

use anyhow::{Context, bail};
use serde_json::json;
use verbatim_agent::proto::{CheckReply, DeepCheck};

use super::self_test;
use crate::args::CheckArguments;
use crate::hosts::Hosts;

/// Asks about an instance, or tests an RNIC.
pub async fn run(lab: &str, arguments: CheckArguments) -> anyhow::Result<ExitCode> {
    if arguments.self_test.is_some() {
        return self_test::run(arguments).await;
    }
    let given = "without --self-test it is demanded";
    let (name, to) = (arguments.name.context(given)?, arguments.to.context(given)?);
    instance(lab, &name, &to, arguments.deep, arguments.json).await
}

/// Prints what stands in the way of a migration, and what is to be known of how it would go.
async fn instance(lab: &str, name: &str, to: &str, deep: bool, json: bool) -> anyhow::Result<ExitCode> {
    let hosts = Hosts::connect(lab).await?;
    let (host, instance) = hosts.of_instance(name).await?;
    let mut found = host.check(name, to, false).await?;
    if deep && found.blockers.is_empty() {
        if found.expected_pause_ms > 0.0 {
            eprintln!(
                "{name} is expected to stand still for {:.0} ms: CRIU writes it down, without its memory, and lets it go on",
                found.expected_pause_ms
            );
        }
        found = host.check(name, to, true).await?;
        if found.deep.is_none() {
            bail!(
                "the agent of {} does not know deep checks; upgrade it",
                instance.host
            );
        }
    }
    if json {
        println!("{}", as_json(&found));
    } else {
        for line in in_words(&found, name, to) {
            match line {
                Line::Blocker(text) => println!("{text}"),
                Line::Other(text) => eprintln!("{text}"),
            }
        }
    }
    let was_tried = found.deep.as_ref().is_none_or(|deep| deep.not_tried.is_empty());
    Ok(match found.blockers.is_empty() && was_tried {
        true => ExitCode::SUCCESS,
        false => ExitCode::from(1),
    })
}

/// A line of the answer: blockers go to the standard output, all else to the other one.
#[derive(Debug, PartialEq)]
enum Line {
    Blocker(String),
    Other(String),
}

fn in_words(found: &CheckReply, name: &str, to: &str) -> Vec<Line> {
    let mut lines = Vec::new();
    if found.blockers.is_empty() {
        lines.push(Line::Other(format!(
            "nothing stands in the way of moving {name} to {to}"
        )));
    }
    lines.extend(found.blockers.iter().cloned().map(Line::Blocker));
    lines.extend(
        found
            .notes
            .iter()
            .map(|note| Line::Other(format!("note: {note}"))),
    );
    let Some(deep) = &found.deep else { return lines };
    if !deep.not_tried.is_empty() {
        lines.push(Line::Other(format!(
            "CRIU was not tried to its end: {}",
            deep.not_tried
        )));
    }
    if deep.pause_ms > 0.0 || deep.communication_pause_ms > 0.0 {
        lines.push(Line::Other(format!(
            "no task of {name} ran for {:.1} ms, and no connection by RDMA carried data for {:.1} ms",
            deep.pause_ms, deep.communication_pause_ms
        )));
    }
    if !deep.log.is_empty() {
        lines.push(Line::Other(format!("CRIU's log: {}", deep.log)));
    }
    lines
}

fn as_json(found: &CheckReply) -> serde_json::Value {
    let text = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    let deep = found.deep.as_ref().map(|deep| {
        let DeepCheck {
            not_tried,
            pause_ms,
            communication_pause_ms,
            log,
        } = deep;
        json!({
            "not_tried": text(not_tried),
            "pause_ms": pause_ms,
            "communication_pause_ms": communication_pause_ms,
            "log": text(log),
        })
    });
    json!({
        "blockers": found.blockers,
        "notes": found.notes,
        "expected_pause_ms": (found.expected_pause_ms > 0.0).then_some(found.expected_pause_ms),
        "deep": deep,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused() -> CheckReply {
        CheckReply {
            blockers: vec!["process 7 (web): x; do y".to_owned()],
            notes: vec!["n".to_owned()],
            expected_pause_ms: 20.0,
            deep: Some(DeepCheck {
                not_tried: String::new(),
                pause_ms: 12.34,
                communication_pause_ms: 20.0,
                log: "/run/verbatim/criu/web/deep-check.log".to_owned(),
            }),
        }
    }

    #[test]
    fn what_criu_refuses_is_one_line_and_its_log_is_named_last() {
        let lines = in_words(&refused(), "web", "dst");
        assert_eq!(lines[0], Line::Blocker("process 7 (web): x; do y".to_owned()));
        let Some(Line::Other(last)) = lines.last() else {
            panic!("{lines:?}")
        };
        assert_eq!(last, "CRIU's log: /run/verbatim/criu/web/deep-check.log");
        assert!(
            lines
                .iter()
                .any(|line| matches!(line, Line::Other(text) if text.contains("12.3 ms")))
        );
    }

    #[test]
    fn programs_see_what_was_tried() {
        let json = as_json(&refused());
        assert_eq!(json["deep"]["pause_ms"], 12.34);
        assert_eq!(json["deep"]["not_tried"], serde_json::Value::Null);
        assert_eq!(json["expected_pause_ms"], 20.0);
        let plain = as_json(&CheckReply::default());
        assert!(
            plain["deep"].is_null() && plain["expected_pause_ms"].is_null(),
            "{plain}"
        );
    }
}
