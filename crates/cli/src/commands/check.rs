//! `verbatim check`.

use std::process::ExitCode;

use anyhow::Context;

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
    instance(lab, &name, &to, arguments.json).await
}

/// Prints what stands in the way of a migration, and what is to be known of how it would go.
async fn instance(lab: &str, name: &str, to: &str, json: bool) -> anyhow::Result<ExitCode> {
    let hosts = Hosts::connect(lab).await?;
    let (host, _) = hosts.of_instance(name).await?;
    let found = host.check(name, to).await?;
    let (blockers, notes) = (found.blockers, found.notes);
    if json {
        println!("{}", serde_json::json!({ "blockers": blockers, "notes": notes }));
    } else {
        if blockers.is_empty() {
            eprintln!("nothing stands in the way of moving {name} to {to}");
        }
        for blocker in &blockers {
            println!("{blocker}");
        }
        for note in &notes {
            eprintln!("note: {note}");
        }
    }
    Ok(if blockers.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(1)
    })
}
