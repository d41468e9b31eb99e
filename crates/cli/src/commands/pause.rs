//! `verbatim pause` and `verbatim resume`.

use std::process::ExitCode;

use serde::Serialize;
use verbatim_agent::proto::PauseReply;

use crate::args::{PauseArguments, PauseTarget, ResumeArguments};
use crate::hosts::Hosts;
use crate::output::table;

/// A connection as `--json` shows it.
#[derive(Serialize)]
struct Row<'a> {
    /// As the other commands take it.
    connection: String,
    host: &'a str,
    qpn: u32,
    partner_host: &'a str,
    partner_qpn: u32,
}

fn rows<'a>(name: &str, reply: &'a PauseReply) -> Vec<Row<'a>> {
    let links = reply.links.iter().map(|link| Row {
        connection: format!("{name}/{:#x}", link.qpn),
        host: &reply.host,
        qpn: link.qpn,
        partner_host: &link.partner_host,
        partner_qpn: link.partner_qpn,
    });
    links.collect()
}

fn show(target: &PauseTarget, reply: &PauseReply, done: &str, json: bool) -> anyhow::Result<()> {
    let rows = rows(&target.name, reply);
    if json {
        let all = serde_json::json!({ "connections": rows, "notes": reply.notes });
        println!("{}", serde_json::to_string_pretty(&all)?);
        return Ok(());
    }
    if !rows.is_empty() {
        let lines: Vec<_> = rows
            .iter()
            .map(|row| {
                vec![
                    row.connection.clone(),
                    row.host.to_owned(),
                    row.partner_host.to_owned(),
                    format!("{:#x}", row.partner_qpn),
                ]
            })
            .collect();
        let head = ["CONNECTION", "HOST", "PARTNER", "ITS QP"];
        print!("{}", table(&head, &lines));
    }
    for note in &reply.notes {
        eprintln!("note: {note}");
    }
    eprintln!("{}: {} connection(s) {done}", target.name, rows.len());
    Ok(())
}

/// Pauses the connections of an instance, or one of them.
pub async fn pause(lab: &str, arguments: PauseArguments) -> anyhow::Result<ExitCode> {
    let target = &arguments.target;
    let hosts = Hosts::connect(lab).await?;
    let (host, _) = hosts.of_instance(&target.name).await?;
    let reply = host.pause(&target.name, target.qpn, arguments.limit).await?;
    let done = format!("paused, for {} s at most", arguments.limit);
    show(target, &reply, &done, arguments.json)?;
    Ok(ExitCode::SUCCESS)
}

/// Lets them go on.
pub async fn resume(lab: &str, arguments: ResumeArguments) -> anyhow::Result<ExitCode> {
    let target = &arguments.target;
    let hosts = Hosts::connect(lab).await?;
    let (host, _) = hosts.of_instance(&target.name).await?;
    let reply = host.resume(&target.name, target.qpn, arguments.force).await?;
    let done = match reply.links.is_empty() {
        true => "resumed: none was paused",
        false => "resumed",
    };
    show(target, &reply, done, arguments.json)?;
    Ok(ExitCode::SUCCESS)
}
