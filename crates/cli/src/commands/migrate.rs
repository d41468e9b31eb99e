//! `verbatim migrate`.

use std::process::ExitCode;
use std::time::Duration;

use indicatif::{BinaryBytes, ProgressBar, ProgressStyle};
use serde_json::json;
use verbatim_agent::client::MigrationEvent;
use verbatim_agent::proto::{MigrateRequest, PreCopyRound};
use verbatim_agent::report::Phase;

use crate::args::MigrateArguments;
use crate::hosts::Hosts;
use crate::output::table;

/// Moves an instance, shows the phases while they pass, and reports.
pub async fn run(lab: &str, arguments: MigrateArguments) -> anyhow::Result<ExitCode> {
    let hosts = Hosts::connect(lab).await?;
    let (host, instance) = hosts.of_instance(&arguments.name).await?;
    let request = MigrateRequest {
        name: arguments.name.clone(),
        destination: arguments.to.clone(),
        drain_timeout_ms: Some(u32::try_from(arguments.drain_timeout.as_millis()).unwrap_or(u32::MAX)),
        max_blackout_ms: arguments.max_blackout.unwrap_or(0),
        max_pre_copy_ms: u32::try_from(arguments.max_precopy_time.as_millis()).unwrap_or(u32::MAX),
        strict: arguments.strict,
        method: arguments.method.clone(),
        max_bytes_per_second: u64::from(arguments.max_bandwidth.unwrap_or(0)) << 20,
        memory_transport: arguments.memory_transport.clone(),
        memory_tuning: arguments.memory_tuning.clone(),
        post_copy: arguments.post_copy,
        no_reset: arguments.no_reset,
    };
    // Shows itself on a terminal only.
    let spinner = ProgressBar::new_spinner()
        .with_style(ProgressStyle::with_template("{spinner} {prefix}: {msg}").expect("a valid template"))
        .with_prefix(format!("{}  {} → {}", instance.name, instance.host, arguments.to));
    spinner.enable_steady_tick(Duration::from_millis(100));
    let name = instance.name.clone();
    let migration = host.migrate(request, |event| {
        if arguments.json_lines {
            println!("{}", line(&event));
        }
        match event {
            MigrationEvent::Phase(phase) => spinner.set_message(phase),
            MigrationEvent::Note(note) => spinner.println(format!("  {note}")),
            MigrationEvent::PreCopy(round) => {
                if round.complete {
                    spinner.println(format!("  {}", round_in_words(&round)));
                }
                spinner.set_message(format!("PreCopy, {}", round_in_words(&round)));
            }
            MigrationEvent::Report(_) => {}
        }
    });
    // What has been begun is heard to its end: also a rollback has a report.
    let interrupted = async {
        interrupt().await?;
        eprintln!(
            "cancelling; Ctrl-C again leaves, and the migration goes on to its end without this command"
        );
        if let Err(error) = host.cancel(&name).await {
            eprintln!("{error:#}");
        }
        interrupt().await?;
        anyhow::bail!("left; `verbatim sessions` shows how it goes on, `verbatim ps` where the instance is")
    };
    let report = tokio::select! {
        report = migration => report,
        left = interrupted => left,
    };
    spinner.finish_and_clear();
    let report = report?;
    let value: serde_json::Value = serde_json::from_str(&report)?;
    if arguments.json {
        println!("{report}");
    } else if !arguments.json_lines {
        print!("{}", readable(&value));
    }
    let committed = value["outcome"] == "committed" && value["error"].is_null();
    Ok(if committed {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(1)
    })
}

/// An event as `--json-lines` shows it.
fn line(event: &MigrationEvent) -> serde_json::Value {
    match event {
        MigrationEvent::Phase(phase) => json!({"event": "phase", "phase": phase}),
        MigrationEvent::Note(text) => json!({"event": "note", "text": text}),
        MigrationEvent::PreCopy(round) => json!({
            "event": "pre_copy",
            "round": round.round,
            "sent_bytes": round.sent_bytes,
            "dirty_bytes": round.dirty_bytes,
            "bytes_per_second": round.bytes_per_second,
            "predicted_blackout_ms": round.predicted_blackout_ms,
            "complete": round.complete,
            "private": round.private,
        }),
        MigrationEvent::Report(report) => {
            let report: serde_json::Value = serde_json::from_str(report).unwrap_or_default();
            json!({"event": "report", "report": report})
        }
    }
}

/// A round of pre-copy in one line.
fn round_in_words(round: &PreCopyRound) -> String {
    let mut text = format!(
        "{} {}: {} sent, {}/s",
        if round.private { "pre-dump" } else { "round" },
        round.round,
        BinaryBytes(round.sent_bytes),
        BinaryBytes(round.bytes_per_second)
    );
    if !round.complete && round.round > 1 {
        text += &format!(
            ", {} written during the round before",
            BinaryBytes(round.dirty_bytes)
        );
    }
    if let Some(blackout) = round.predicted_blackout_ms {
        text += &format!(", blackout about {blackout} ms");
    }
    text
}

async fn interrupt() -> anyhow::Result<()> {
    Ok(tokio::signal::ctrl_c().await?)
}

fn readable(report: &serde_json::Value) -> String {
    let text = |key: &str| report[key].as_str().unwrap_or("?").to_owned();
    let mut out = match text("outcome").as_str() {
        "committed" => format!(
            "{} has moved from {} to {}\n",
            text("instance"),
            text("source"),
            text("destination")
        ),
        _ => format!("{} stays on {}\n", text("instance"), text("source")),
    };
    if let Some(error) = report["error"].as_str() {
        out += &format!("because: {error}\n");
    }
    let began = |phase: &str| report["phases_ms"][phase].as_f64().is_some_and(|ms| ms > 0.0);
    if report["outcome"] != "committed" && !Phase::ALL.map(Phase::name).into_iter().any(began) {
        // It was refused: nothing was begun that could be counted, but for the dump that was tried.
        if let Some(ms) = report["deep_check_ms"].as_f64() {
            out += &format!(
                "it stood still for {ms:.1} ms while CRIU tried to write it down, before anything was sent\n"
            );
        }
        return out;
    }
    let milliseconds = |value: &serde_json::Value| format!("{:>10.1} ms", value.as_f64().unwrap_or_default());
    let mut rows: Vec<Vec<String>> = Vec::new();
    for phase in Phase::ALL.map(Phase::name) {
        rows.push(vec![phase.to_owned(), milliseconds(&report["phases_ms"][phase])]);
    }
    for (name, key) in [
        ("service blackout", "service_blackout_ms"),
        ("communication blackout", "communication_blackout_ms"),
        ("total", "total_ms"),
    ] {
        rows.push(vec![name.to_owned(), milliseconds(&report[key])]);
    }
    for (name, value) in [
        (
            "sent ahead",
            format!(
                "{:>10} KiB",
                report["bytes"]["pre_copy"].as_u64().unwrap_or(0) / 1024
            ),
        ),
        (
            "sent in the blackout",
            format!(
                "{:>10} KiB",
                report["bytes"]["stop_and_copy"].as_u64().unwrap_or(0) / 1024
            ),
        ),
        (
            "rounds ahead",
            format!(
                "{:>10}{}",
                report["pre_copy"]["rounds"].as_array().map_or(0, Vec::len),
                match report["pre_copy"]["converged"].as_bool() {
                    Some(false) => ", did not converge",
                    _ => "",
                }
            ),
        ),
        ("private memory", private_memory(&report["pre_copy"])),
        (
            "memory transport",
            format!(
                "{:>10}: {}",
                text("memory_transport"),
                text("memory_transport_reason")
            ),
        ),
        ("connections", format!("{:>10}", report["connections"])),
        (
            "requests intercepted",
            format!("{:>10}", report["intercepted_wrs"]),
        ),
        ("requests replayed", format!("{:>10}", report["replayed_wrs"])),
    ] {
        rows.push(vec![name.to_owned(), value]);
    }
    if let Some(ms) = report["deep_check_ms"].as_f64() {
        let value = format!("{ms:>10.1} ms, before anything was sent: beside the blackout");
        rows.push(vec!["stood still for CRIU's try".to_owned(), value]);
    }
    if let Some(reset) = report["reset_connections"].as_u64().filter(|count| *count > 0) {
        let value =
            format!("{reset:>10}: no process had accepted them, or they were closed with data unsent");
        rows.push(vec!["TCP connections reset".to_owned(), value]);
    }
    let unfinished = |key: &str| report[key].as_u64().unwrap_or(0);
    let (again, executed) = (
        unfinished("unfinished_replayed_wrs"),
        unfinished("unfinished_completed_wrs"),
    );
    if again + executed > 0 {
        let value = format!("{again:>10} replayed, {executed} had been executed");
        rows.push(vec!["not drained in time".to_owned(), value]);
    }
    out + &table(&["", ""], &rows)
}

/// How it went: the count of pre-dumps, or why there was none.
fn private_memory(pre_copy: &serde_json::Value) -> String {
    let pre_dumps = pre_copy["pre_dumps"].as_array().map_or(0, Vec::len);
    match pre_copy["private_in_one_piece"].as_str() {
        Some(why) => format!("{:>10}, in one piece: {why}", 0),
        None => format!("{pre_dumps:>10} pre-dumps"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rolled_back_migration_says_why() {
        let report = serde_json::json!({
            "instance": "web", "source": "a", "destination": "b", "outcome": "rolled-back", "error": "b is down",
            "phases_ms": {"PreCopy": 1.25}, "service_blackout_ms": 0, "communication_blackout_ms": 0, "total_ms": 2,
            "bytes": {"pre_copy": 4096, "stop_and_copy": 0}, "connections": 1, "intercepted_wrs": 0, "replayed_wrs": 0,
        });
        let text = readable(&report);
        assert!(text.contains("web stays on a\nbecause: b is down"));
        assert!(text.contains("PreCopy"));
        assert!(text.contains("4 KiB"));
        assert!(text.contains("0 pre-dumps"));
        let why = "the kernel does not say";
        let one_piece = private_memory(&json!({"pre_dumps": [], "private_in_one_piece": why}));
        assert_eq!(one_piece.trim_start(), "0, in one piece: the kernel does not say");
        assert!(!text.contains("converge") && !text.contains("drained"));
    }

    #[test]
    fn a_deep_check_counts_beside_the_blackout() {
        let report = serde_json::json!({
            "instance": "web", "source": "a", "destination": "b", "outcome": "committed", "error": null,
            "phases_ms": {"PreCopy": 1.25}, "service_blackout_ms": 40, "bytes": {}, "deep_check_ms": 12.25,
        });
        assert!(readable(&report).contains("12.2 ms, before anything was sent"));
        let refused = serde_json::json!({"outcome": "rolled-back", "error": "why", "deep_check_ms": 12.25});
        assert!(readable(&refused).contains("it stood still for 12.2 ms while CRIU tried to write it down"));
        let without = serde_json::json!({"outcome": "committed", "deep_check_ms": null});
        assert!(!readable(&without).contains("before anything was sent"));
    }

    #[test]
    fn a_refused_migration_says_why_and_no_more() {
        let report = serde_json::json!({
            "instance": "web", "source": "a", "destination": "b", "outcome": "rolled-back", "error": "b is down",
            "phases_ms": {"PreCopy": 0.0, "Drain": 0.0}, "service_blackout_ms": 0.0, "communication_blackout_ms": 0.0,
            "total_ms": 1.5, "bytes": {"pre_copy": 0, "stop_and_copy": 0}, "connections": 0,
        });
        assert_eq!(readable(&report), "web stays on a\nbecause: b is down\n");
    }

    #[test]
    fn rounds_are_told_in_words_and_as_lines() {
        let round = PreCopyRound {
            round: 2,
            sent_bytes: 3 << 20,
            dirty_bytes: 8 << 20,
            bytes_per_second: 1 << 30,
            predicted_blackout_ms: Some(70),
            complete: false,
            private: false,
        };
        assert_eq!(
            round_in_words(&round),
            "round 2: 3.00 MiB sent, 1.00 GiB/s, 8.00 MiB written during the round before, blackout about 70 ms"
        );
        let private = PreCopyRound {
            private: true,
            ..round
        };
        assert!(round_in_words(&private).starts_with("pre-dump 2: 3.00 MiB sent"));
        assert_eq!(line(&MigrationEvent::PreCopy(private))["private"], true);
        let value = line(&MigrationEvent::PreCopy(round));
        assert_eq!(
            (&value["event"], &value["dirty_bytes"]),
            (&json!("pre_copy"), &json!(8 << 20))
        );
        let value = line(&MigrationEvent::Report("{\"outcome\": \"committed\"}".into()));
        assert_eq!(value["report"]["outcome"], "committed");
    }
}
