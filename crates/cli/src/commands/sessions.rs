//! `verbatim sessions`, `session show`, `session resolve` and `cancel`.

use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::bail;
use serde::Serialize;
use verbatim_agent::proto::resolve_session_request::Keep as Kept;
use verbatim_agent::proto::{ForgetSessionRequest, ResolveSessionRequest, Session};

use crate::args::{ForgetArguments, Keep, ResolveArguments, SessionCommand};
use crate::hosts::Hosts;
use crate::output::table;

/// A host's part in a session, as `--json` shows it. Times in milliseconds since 1970.
#[derive(Serialize)]
struct Row<'a> {
    id: &'a str,
    instance: &'a str,
    from: &'a str,
    to: &'a str,
    host: &'a str,
    role: &'a str,
    step: &'a str,
    since_unix_ms: u64,
    state: &'a str,
    partners: &'a [String],
    steps: Vec<Step<'a>>,
    pre_copy_bytes: u64,
    stop_and_copy_bytes: u64,
    error: Option<&'a str>,
}

#[derive(Serialize)]
struct Step<'a> {
    name: &'a str,
    unix_ms: u64,
}

impl<'a> From<&'a Session> for Row<'a> {
    fn from(session: &'a Session) -> Self {
        let steps: Vec<_> = session
            .steps
            .iter()
            .map(|step| Step {
                name: &step.name,
                unix_ms: step.unix_ms,
            })
            .collect();
        let last = steps.last();
        Self {
            id: &session.id,
            instance: &session.instance,
            from: &session.source,
            to: &session.destination,
            host: &session.host,
            role: &session.role,
            step: last.map_or("", |step| step.name),
            since_unix_ms: last.map_or(0, |step| step.unix_ms),
            state: &session.state,
            partners: &session.partners,
            pre_copy_bytes: session.pre_copy_bytes,
            stop_and_copy_bytes: session.stop_and_copy_bytes,
            error: Some(session.error.as_str()).filter(|error| !error.is_empty()),
            steps,
        }
    }
}

fn has_ended(session: &Session) -> bool {
    matches!(session.state.as_str(), "committed" | "rolled back")
}

/// Lists the migrations.
pub async fn list(lab: &str, all: bool, json: bool) -> anyhow::Result<ExitCode> {
    let mut sessions = Hosts::connect(lab).await?.sessions().await?;
    sessions.retain(|session| all || !has_ended(session));
    let rows: Vec<_> = sessions.iter().map(Row::from).collect();
    if json {
        println!("{}", serde_json::to_string_pretty(&rows)?);
        return Ok(ExitCode::SUCCESS);
    }
    let now = SystemTime::now();
    let cells: Vec<_> = rows
        .iter()
        .map(|row| {
            let cells = [
                row.id,
                row.instance,
                row.from,
                row.to,
                row.host,
                row.role,
                row.step,
            ];
            let mut cells: Vec<_> = cells.iter().map(ToString::to_string).collect();
            cells.extend([ago(now, row.since_unix_ms), row.state.to_owned()]);
            cells
        })
        .collect();
    let head = [
        "ID", "INSTANCE", "FROM", "TO", "HOST", "ROLE", "STEP", "SINCE", "STATE",
    ];
    print!("{}", table(&head, &cells));
    Ok(ExitCode::SUCCESS)
}

/// How long ago a moment was, in its largest unit.
fn ago(now: SystemTime, unix_ms: u64) -> String {
    let then = UNIX_EPOCH + Duration::from_millis(unix_ms);
    let seconds = now.duration_since(then).unwrap_or_default().as_secs();
    match seconds {
        0..60 => format!("{seconds} s ago"),
        60..3600 => format!("{} min ago", seconds / 60),
        3600..86_400 => format!("{} h ago", seconds / 3600),
        _ => format!("{} d ago", seconds / 86_400),
    }
}

/// Shows or decides one.
pub async fn one(lab: &str, command: SessionCommand) -> anyhow::Result<ExitCode> {
    let hosts = Hosts::connect(lab).await?;
    match command {
        SessionCommand::Show { id, json } => {
            let parts = find(hosts.sessions().await?, &id)?;
            if json {
                let rows: Vec<_> = parts.iter().map(Row::from).collect();
                println!("{}", serde_json::to_string_pretty(&rows)?);
            } else {
                print!("{}", readable(&parts));
            }
        }
        SessionCommand::Resolve(arguments) => resolve(&hosts, arguments).await?,
        SessionCommand::Forget(arguments) => forget(&hosts, arguments).await?,
    }
    Ok(ExitCode::SUCCESS)
}

async fn forget(hosts: &Hosts, arguments: ForgetArguments) -> anyhow::Result<()> {
    let parts = find(hosts.sessions().await?, &arguments.id)?;
    let is_meant = |part: &&Session| match &arguments.host {
        Some(host) => part.host == *host,
        None => !has_ended(part),
    };
    let meant: Vec<_> = parts.iter().filter(is_meant).collect();
    let part = match (&meant[..], &arguments.host) {
        ([part], _) => part,
        ([], Some(host)) => bail!(
            "{host} has no part in session {}, or its agent is out of reach",
            parts[0].id
        ),
        ([], None) => bail!("session {} is over at all hosts that can be reached", parts[0].id),
        (_, _) => {
            let hosts: Vec<_> = meant.iter().map(|part| part.host.as_str()).collect();
            bail!(
                "session {} has not ended on {}; say with --host where it is to end",
                parts[0].id,
                hosts.join(" and ")
            );
        }
    };
    let request = ForgetSessionRequest {
        session: part.id.clone(),
        force: arguments.force,
    };
    let done = hosts.host(Some(&part.host))?.forget(request).await?;
    if arguments.json {
        println!(
            "{}",
            serde_json::json!({ "session": part.id, "host": part.host, "done": done })
        );
    } else {
        eprintln!("{done}");
    }
    Ok(())
}

async fn resolve(hosts: &Hosts, arguments: ResolveArguments) -> anyhow::Result<()> {
    let parts = find(hosts.sessions().await?, &arguments.id)?;
    let Some(source) = parts.iter().find(|part| part.role == "source") else {
        bail!(
            "session {} begins on {}, whose agent is out of reach; it is decided there, where the instance is frozen",
            parts[0].id,
            parts[0].source
        );
    };
    let request = ResolveSessionRequest {
        session: source.id.clone(),
        keep: match arguments.keep {
            Keep::Source => Kept::Source,
            Keep::Destination => Kept::Destination,
        }
        .into(),
        force: arguments.force,
    };
    let done = hosts.host(Some(&source.host))?.resolve(request).await?;
    if arguments.json {
        println!("{}", serde_json::json!({ "session": source.id, "done": done }));
    } else {
        eprintln!("{done}");
    }
    Ok(())
}

/// All parts of the session whose number begins with `id`.
fn find(sessions: Vec<Session>, id: &str) -> anyhow::Result<Vec<Session>> {
    let digits = id.to_ascii_lowercase();
    let found: Vec<_> = sessions
        .into_iter()
        .filter(|session| session.id.starts_with(&digits))
        .collect();
    let Some(first) = found.first() else {
        bail!("there is no session {id}; `verbatim sessions --all` lists those that are known");
    };
    if let Some(other) = found.iter().find(|other| other.id != first.id) {
        bail!(
            "{id} is the beginning of {} and of {}, at least; give more digits",
            first.id,
            other.id
        );
    }
    Ok(found)
}

fn readable(parts: &[Session]) -> String {
    let first = &parts[0];
    let mut text = format!(
        "session {}: {} from {} to {}\n",
        first.id, first.instance, first.source, first.destination
    );
    for part in parts {
        text += &format!("\n{} ({}): {}\n", part.host, part.role, part.state);
        if !part.partners.is_empty() {
            text += &format!("partners: {}\n", part.partners.join(", "));
        }
        let bytes = [part.pre_copy_bytes, part.stop_and_copy_bytes];
        if bytes != [0, 0] {
            text += &format!(
                "sent ahead: {} KiB, in the blackout: {} KiB\n",
                bytes[0] / 1024,
                bytes[1] / 1024
            );
        }
        if !part.error.is_empty() {
            text += &format!("last error: {}\n", part.error);
        }
        let begun = part.steps.first().map_or(0, |step| step.unix_ms);
        let rows: Vec<_> = part
            .steps
            .iter()
            .map(|step| {
                let since = step.unix_ms.saturating_sub(begun);
                vec![step.name.clone(), format!("{since:>8} ms")]
            })
            .collect();
        text += &table(&["STEP", "BEGAN AFTER"], &rows);
    }
    text
}

/// Rolls a migration back.
pub async fn cancel(lab: &str, name: &str, json: bool) -> anyhow::Result<ExitCode> {
    let hosts = Hosts::connect(lab).await?;
    let (host, _) = hosts.of_instance(name).await?;
    let stays = host.cancel(name).await?;
    if json {
        println!("{}", serde_json::json!({ "instance": name, "host": stays }));
    } else {
        eprintln!("cancelled: {name} stays on {stays}");
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use verbatim_agent::proto::SessionStep;

    fn session(id: &str, host: &str) -> Session {
        Session {
            id: id.to_owned(),
            host: host.to_owned(),
            instance: "web".to_owned(),
            source: "a".to_owned(),
            destination: "b".to_owned(),
            role: "source".to_owned(),
            state: "rolled back".to_owned(),
            steps: [("Open", 1000), ("PreCopy", 1250)]
                .map(|(name, unix_ms)| SessionStep {
                    name: name.to_owned(),
                    unix_ms,
                })
                .to_vec(),
            error: "b is down".to_owned(),
            ..Session::default()
        }
    }

    #[test]
    fn a_session_is_found_by_the_first_digits_of_its_number() {
        let all = || vec![session("3f2a", "a"), session("3f2a", "b"), session("3f99", "a")];
        assert_eq!(find(all(), "3F2").unwrap().len(), 2);
        let error = find(all(), "3f").unwrap_err().to_string();
        assert!(error.contains("3f2a and of 3f99"), "{error}");
        assert!(
            find(all(), "7")
                .unwrap_err()
                .to_string()
                .contains("sessions --all")
        );
    }

    #[test]
    fn a_session_is_told_with_its_steps_and_its_error() {
        let text = readable(&[session("3f2a", "a")]);
        for part in [
            "web from a to b",
            "a (source): rolled back",
            "last error: b is down",
            "250 ms",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn times_are_told_in_their_largest_unit() {
        let now = UNIX_EPOCH + Duration::from_secs(100_000);
        let told = [99_990_000, 99_000_000, 90_000_000, 1000].map(|unix_ms| ago(now, unix_ms));
        assert_eq!(told, ["10 s ago", "16 min ago", "2 h ago", "1 d ago"]);
        assert_eq!(ago(now, 200_000_000), "0 s ago");
    }
}
