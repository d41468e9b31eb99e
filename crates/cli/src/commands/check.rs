//! `verbatim check`.

use std::process::ExitCode;

use crate::hosts::Hosts;

/// Prints what stands in the way of a migration.
pub async fn run(lab: &str, name: &str, to: &str, json: bool) -> anyhow::Result<ExitCode> {
    let hosts = Hosts::connect(lab).await?;
    let (host, _) = hosts.of_instance(name).await?;
    let blockers = host.check(name, to).await?;
    if json {
        println!("{}", serde_json::json!({ "blockers": blockers }));
    } else if blockers.is_empty() {
        eprintln!("nothing stands in the way of moving {name} to {to}");
    } else {
        for blocker in &blockers {
            println!("{blocker}");
        }
    }
    Ok(if blockers.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(1)
    })
}
