//! What each program said, and whether all is well.

use serde_json::{Value, json};

use super::play::Played;
use super::scenario::{Kind, Scenario, Side};

/// Each side's RNIC must carry this many bytes after the last move: far more than a handshake, far less than a second.
const LEAST_BYTES: u64 = 1 << 20;
/// Lines of a failed program's output that are shown.
const TAIL_LINES: usize = 20;
/// How perftest's lines about each queue pair begin.
const PER_QUEUE_PAIR: [&str; 3] = ["local address:", "remote address:", "GID:"];
/// What vcheck counts of defects.
const DEFECTS: [&str; 4] = ["lost", "duplicated", "out_of_order", "corrupted"];

/// A run, judged.
#[derive(Debug)]
pub struct Verdict {
    /// For report.json.
    pub check: Value,
    /// What sender and receiver said, as far as a person wants to know.
    pub said: [String; 2],
    /// What is not well.
    pub problems: Vec<String>,
}

/// Judges a run.
pub fn judge(scenario: &Scenario, played: &Played) -> Verdict {
    let mut problems: Vec<String> = played.broken_off.clone().into_iter().collect();
    let mut check = json!({});
    let said = Side::BOTH.map(|side| {
        let end = &played.ends[side as usize];
        match end.exit_status {
            Some(0) => {}
            Some(status) => problems.push(format!("the {} ended with status {status}", side.name())),
            None => problems.push(format!("the {} did not end", side.name())),
        }
        let result = match scenario.kind {
            Kind::Perftest => perftest_result(&end.output).map(|text| (json!({ "result": &text }), text)),
            Kind::Vcheck => vcheck_result(&end.output),
        };
        let Some((value, text)) = result else {
            // perftest's server need not print a result; its client must.
            if scenario.kind == Kind::Vcheck || side == Side::Sender {
                problems.push(format!("the {} printed no result", side.name()));
            }
            return tail(&end.output);
        };
        if scenario.kind == Kind::Vcheck {
            problems.extend(defects(&value).map(|defect| format!("the {} found: {defect}", side.name())));
        }
        check[side.name()] = value;
        if end.exit_status == Some(0) {
            text
        } else {
            tail(&end.output)
        }
    });
    if played.broken_off.is_none() {
        problems.extend(unmoved(scenario, played));
    }
    if let Some([sender, receiver]) = played.bytes_after {
        check["bytes_after_last_move"] = json!({"sender": sender, "receiver": receiver});
    }
    Verdict {
        check,
        said,
        problems,
    }
}

/// What is wrong about the moves and what came after them.
fn unmoved(scenario: &Scenario, played: &Played) -> Vec<String> {
    let mut problems = Vec::new();
    if played.moves.len() != scenario.destinations.len() {
        problems.push(format!(
            "{} of {} moves were made",
            played.moves.len(),
            scenario.destinations.len()
        ));
    }
    for (side, bytes) in Side::BOTH.iter().zip(played.bytes_after.unwrap_or_default()) {
        if bytes < LEAST_BYTES {
            problems.push(format!(
                "after the last move only {bytes} bytes passed the RNIC of the {}",
                side.name()
            ));
        }
    }
    problems
}

/// The head and the lines of perftest's result.
fn perftest_result(output: &str) -> Option<String> {
    let lines: Vec<_> = output
        .lines()
        .skip_while(|line| !line.trim_start().starts_with("#bytes"))
        .take_while(|line| !line.starts_with("---"))
        .collect();
    (lines.len() > 1).then(|| lines.join("\n"))
}

/// vcheck's line, read and as it is.
fn vcheck_result(output: &str) -> Option<(Value, String)> {
    let line = output.lines().rfind(|line| line.starts_with('{'))?;
    Some((serde_json::from_str(line).ok()?, line.to_owned()))
}

/// What vcheck found to be wrong.
fn defects(result: &Value) -> impl Iterator<Item = String> {
    let counted = DEFECTS
        .into_iter()
        .filter(|name| result[*name] != 0)
        .map(|name| format!("{name} {}", result[name]));
    let verdict =
        (result["verdict"] != "ok").then(|| format!("verdict {}, {}", result["verdict"], result["error"]));
    let idle = (result["completed"] == 0 && result["received"] == 0).then(|| "no message at all".to_owned());
    counted.chain(verdict).chain(idle).collect::<Vec<_>>().into_iter()
}

/// The last lines of an output, without the pages that perftest prints about each queue pair.
fn tail(output: &str) -> String {
    let tells = |line: &&str| {
        !PER_QUEUE_PAIR
            .iter()
            .any(|start| line.trim_start().starts_with(start))
    };
    let lines: Vec<_> = output.lines().filter(tells).collect();
    lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::demo::play::{End, Moved};
    use crate::commands::demo::timeline::Timeline;
    use std::time::Duration;

    const PERFTEST: &str = "\
---------------------------------------------------------------------------------------
                    RDMA_Write BW Test
---------------------------------------------------------------------------------------
 local address: LID 0000 QPN 0x0011 PSN 0x123456
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 65536      342000           0.00               11.96              0.022811
---------------------------------------------------------------------------------------
";

    fn vcheck(lost: u64) -> String {
        let line = json!({"role": "client", "posted": 9, "completed": 9, "received": 3, "lost": lost, "duplicated": 0,
            "out_of_order": 0, "corrupted": 0, "verdict": if lost == 0 { "ok" } else { "defect" }, "error": null});
        format!("a word on stderr\n{line}\n")
    }

    fn scenario(kind: Kind) -> Scenario {
        Scenario {
            number: 1,
            title: String::new(),
            story: String::new(),
            program: "program",
            kind,
            command: Vec::new(),
            port: 1,
            moved: Side::Sender,
            hosts: ["src", "peer"],
            destinations: vec!["dst"],
            duration: Duration::ZERO,
            lead: Duration::ZERO,
        }
    }

    fn played(output: &str) -> Played {
        let end = || End {
            host: "src".into(),
            exit_status: Some(0),
            output: output.into(),
        };
        Played {
            moves: vec![Moved {
                report: json!({}),
                timeline: Timeline::default(),
            }],
            ends: [end(), end()],
            bytes_after: Some([1 << 30, 1 << 30]),
            ..Played::default()
        }
    }

    #[test]
    fn perftest_is_quoted_by_its_result_lines() {
        let verdict = judge(&scenario(Kind::Perftest), &played(PERFTEST));
        assert_eq!(verdict.problems, Vec::<String>::new());
        assert_eq!(verdict.said[0].lines().count(), 2);
        assert!(verdict.said[0].contains("11.96"));
        assert_eq!(verdict.check["bytes_after_last_move"]["receiver"], 1 << 30);
    }

    #[test]
    fn what_vcheck_lost_is_a_problem() {
        assert_eq!(
            judge(&scenario(Kind::Vcheck), &played(&vcheck(0))).problems,
            Vec::<String>::new()
        );
        let verdict = judge(&scenario(Kind::Vcheck), &played(&vcheck(2)));
        assert!(verdict.problems[0].contains("lost 2"), "{:?}", verdict.problems);
        assert_eq!(verdict.check["sender"]["lost"], 2);
    }

    #[test]
    fn each_way_to_fail_is_noticed() {
        let problem = |change: &dyn Fn(&mut Played)| {
            let mut played = played(PERFTEST);
            change(&mut played);
            judge(&scenario(Kind::Perftest), &played).problems.join("; ")
        };
        assert!(
            problem(&|played| played.ends[1].exit_status = Some(1)).contains("receiver ended with status 1")
        );
        assert!(problem(&|played| played.ends[0].exit_status = None).contains("sender did not end"));
        assert!(problem(&|played| played.ends[0].output.clear()).contains("sender printed no result"));
        assert!(problem(&|played| played.moves.clear()).contains("0 of 1 moves"));
        assert!(problem(&|played| played.bytes_after = Some([1 << 30, 5])).contains("only 5 bytes"));
        assert!(problem(&|played| played.bytes_after = None).contains("RNIC of the sender"));
        assert!(problem(&|played| played.broken_off = Some("rolled back".into())).contains("rolled back"));
    }

    #[test]
    fn a_failed_program_is_quoted_by_its_tail() {
        let mut played = played(
            &(0..100)
                .map(|line| format!("line {line}\n GID: {line}\n"))
                .collect::<String>(),
        );
        played.ends[0].exit_status = Some(1);
        let verdict = judge(&scenario(Kind::Perftest), &played);
        assert_eq!(verdict.said[0].lines().count(), TAIL_LINES);
        assert!(verdict.said[0].ends_with("line 99"));
    }
}
