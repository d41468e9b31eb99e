//! `verbatim migrate`.

use std::process::ExitCode;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use verbatim_agent::client::MigrationEvent;
use verbatim_agent::proto::MigrateRequest;
use verbatim_agent::report::Phase;

use crate::args::MigrateArguments;
use crate::hosts::Hosts;
use crate::output::table;

/// Moves an instance, shows the phases while they pass, and reports.
pub async fn run(lab: &str, arguments: MigrateArguments) -> anyhow::Result<ExitCode> {
    let hosts = Hosts::connect(lab).await?;
    let (host, instance) = hosts.of_instance(&arguments.name).await?;
    let request = MigrateRequest {
        name: arguments.name,
        destination: arguments.to.clone(),
        drain_timeout_ms: arguments.drain_timeout.as_millis() as u32,
    };
    // Shows itself on a terminal only.
    let spinner = ProgressBar::new_spinner()
        .with_style(ProgressStyle::with_template("{spinner} {prefix}: {msg}").expect("a valid template"))
        .with_prefix(format!("{}  {} → {}", instance.name, instance.host, arguments.to));
    spinner.enable_steady_tick(Duration::from_millis(100));
    // Dropping the request cancels it at the agent, as long as nothing is committed.
    let report = tokio::select! {
        report = host.migrate(request, |event| match event {
            MigrationEvent::Phase(phase) => spinner.set_message(phase),
            MigrationEvent::Note(note) => spinner.println(format!("  {note}")),
            MigrationEvent::Report(_) => {}
        }) => report,
        _ = tokio::signal::ctrl_c() => {
            spinner.finish_and_clear();
            anyhow::bail!("cancelled; `verbatim ps` shows where the instance is");
        }
    };
    spinner.finish_and_clear();
    let report = report?;
    let value: serde_json::Value = serde_json::from_str(&report)?;
    if arguments.json {
        println!("{report}");
    } else {
        print!("{}", readable(&value));
    }
    let committed = value["outcome"] == "committed" && value["error"].is_null();
    Ok(if committed {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(1)
    })
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
        ("connections", format!("{:>10}", report["connections"])),
        (
            "requests intercepted",
            format!("{:>10}", report["intercepted_wrs"]),
        ),
        ("requests replayed", format!("{:>10}", report["replayed_wrs"])),
    ] {
        rows.push(vec![name.to_owned(), value]);
    }
    out + &table(&["", ""], &rows)
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
    }
}
