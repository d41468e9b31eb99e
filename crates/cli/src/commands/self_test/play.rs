//! The program starts, sends to itself, is moved, and sends to itself again.

use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::Value;
use verbatim_agent::client::{Client, MigrationEvent};
use verbatim_agent::proto::{MigrateRequest, RunRequest};

use super::result::SelfTest;
use super::stage::{HOSTS, Stage};

/// The instance.
pub const NAME: &str = "self-test";
/// The program's word for a round that went well; the count follows.
pub const ROUND: &str = "round ";

/// How often its output is looked at.
const INTERVAL: Duration = Duration::from_millis(100);
/// What was sent before the move is nothing to wait for long.
const PRE_COPY_MS: u32 = 1000;

/// Steps of a migration, by the phase of its report: what it is to an operator, and what to do where it fails.
const PHASES: [(&str, &str, &str); 5] = [
    (
        "PreSetup",
        "objects-on-trial",
        "the message names the object and the limit that refuses it",
    ),
    (
        "DumpRDMA",
        "context-at-rest",
        "send the file with a bug report; the program was not touched",
    ),
    (
        "DumpOthers",
        "criu-dump",
        "the agent's log in the file has CRIU's words; another CRIU may do (VERBATIM_CRIU names one)",
    ),
    (
        "FullRestore",
        "criu-restore",
        "the agent's log in the file has CRIU's words; another CRIU may do (VERBATIM_CRIU names one)",
    ),
    (
        "RestoreRDMA",
        "objects-made-again",
        "the device refuses what it has allowed on trial: send the file with a bug report",
    ),
];

/// Plays it; what fails is told in the result.
pub async fn play(stage: &Stage, test: &mut SelfTest) {
    let [here, there] = stage.agents() else {
        unreachable!("there are two hosts")
    };
    let device = test.device.clone();
    let first = async {
        start(here, &device).await?;
        rounds(here, 2).await
    };
    let remedy = "the guest library, libibverbs or the device refuses it without any move: does `ibv_rc_pingpong` work on it?";
    if test.step("program", remedy, first).await.is_none() {
        return;
    }
    let blockers = async {
        let found = here.check(NAME, HOSTS[1], false).await?;
        match found.blockers.first() {
            Some(blocker) => bail!("{blocker}"),
            None => anyhow::Ok(()),
        }
    };
    let remedy = "the message says what stands in the way";
    if test.step("conditions", remedy, blockers).await.is_none() {
        return;
    }
    if !moved(here, test).await {
        return;
    }
    let remedy = "what was made again does not work: send the file with a bug report";
    let goes_on = async {
        // What it has done up to now may have been before the move.
        let before = rounds(there, 0).await?;
        rounds(there, before + 2).await
    };
    test.step("program-goes-on", remedy, goes_on).await;
}

async fn start(agent: &Client, device: &str) -> anyhow::Result<()> {
    let program = std::env::current_exe()?.into_os_string().into_string();
    let program = program.ok().context("this program's path is not UTF-8")?;
    let request = RunRequest {
        name: NAME.to_owned(),
        command: vec![program, super::ROLE.to_owned(), device.to_owned()],
        rnics: vec![device.to_owned()],
        ..RunRequest::default()
    };
    agent.run(request).await.map(drop)
}

/// Waits until the program has sent and received so often; how often it has.
async fn rounds(agent: &Client, least: u64) -> anyhow::Result<u64> {
    loop {
        let mut output = Vec::new();
        let said = agent.logs(NAME, false, |part| {
            output.extend_from_slice(part);
            Ok(())
        });
        said.await?;
        let text = String::from_utf8_lossy(&output);
        match count(&text)? {
            done if done >= least => return Ok(done),
            _ => {}
        }
        let all = agent.list().await?;
        let own = all.iter().find(|instance| instance.name == NAME);
        if let Some(status) = own.and_then(|own| own.exit_status) {
            bail!(
                "the program has ended with status {status}: {}",
                text.lines().next_back().unwrap_or_default()
            );
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

/// The last round that it tells.
fn count(output: &str) -> anyhow::Result<u64> {
    if let Some(failure) = output.lines().find(|line| line.starts_with("failed: ")) {
        bail!("{failure}");
    }
    // The last line may be half written.
    let whole = output.rfind('\n').map_or("", |end| &output[..end]);
    let mut rounds = whole.lines().filter_map(|line| line.strip_prefix(ROUND));
    Ok(rounds.next_back().map_or(Ok(0), str::parse::<u64>)?)
}

/// Moves it, and notes the steps. Whether it is there.
async fn moved(agent: &Client, test: &mut SelfTest) -> bool {
    let request = MigrateRequest {
        name: NAME.to_owned(),
        destination: HOSTS[1].to_owned(),
        max_pre_copy_ms: PRE_COPY_MS,
        ..MigrateRequest::default()
    };
    let mut phase = String::new();
    let report = agent.migrate(request, |event| {
        if let MigrationEvent::Phase(begun) = event {
            phase = begun;
        }
    });
    let report = report
        .await
        .and_then(|text| Ok(serde_json::from_str::<Value>(&text)?));
    let report = match report {
        Ok(report) => report,
        Err(error) => {
            test.failed(
                "move",
                "the agents' logs are in the file",
                format!("{error:#}"),
                None,
            );
            return false;
        }
    };
    let ended = judge(&report, &phase);
    for step in ended.steps {
        match step.error {
            None => test.passed(step.name, step.ms),
            Some(error) => test.failed(step.name, step.remedy, error, step.ms),
        }
    }
    test.migration = Some(report);
    ended.committed
}

/// What a report says.
struct Judged {
    steps: Vec<Judgement>,
    committed: bool,
}

struct Judgement {
    name: &'static str,
    remedy: &'static str,
    ms: Option<f64>,
    error: Option<String>,
}

/// `last` is the phase that began last.
fn judge(report: &Value, last: &str) -> Judged {
    let committed = report["outcome"] == "committed";
    let error = report["error"].as_str().map(ToOwned::to_owned);
    let mut steps = Vec::new();
    let mut named = false;
    for (phase, name, remedy) in PHASES {
        let ms = report["phases_ms"][phase].as_f64().filter(|ms| *ms > 0.0);
        let here = !committed && phase == last;
        if ms.is_none() && !here {
            continue;
        }
        named |= here;
        steps.push(Judgement {
            name,
            remedy,
            ms,
            error: here.then(|| error.clone().unwrap_or_else(|| "no reason was given".to_owned())),
        });
    }
    if !named && (!committed || error.is_some()) {
        steps.push(Judgement {
            name: "move",
            remedy: "the agents' logs are in the file",
            ms: report["total_ms"].as_f64(),
            error: Some(error.unwrap_or_else(|| format!("it ended in {last}"))),
        });
    }
    Judged { steps, committed }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn rounds_are_counted_and_a_failure_is_told() {
        assert_eq!(count("").unwrap(), 0);
        assert_eq!(count("opened rxe0\nround 1\nround 2\nround 3").unwrap(), 2);
        let error = count("round 1\nfailed: ibv_post_send\n").unwrap_err().to_string();
        assert_eq!(error, "failed: ibv_post_send");
    }

    #[test]
    fn the_phase_that_began_last_is_the_step_that_failed() {
        let report = json!({
            "outcome": "rolled-back", "error": "rxe0 refuses", "total_ms": 9.0,
            "phases_ms": {"PreSetup": 7.5, "DumpOthers": 0.0},
        });
        let judged = judge(&report, "PreSetup");
        assert!(!judged.committed);
        let [step] = &judged.steps[..] else {
            panic!("one step")
        };
        assert_eq!(
            (step.name, step.error.as_deref()),
            ("objects-on-trial", Some("rxe0 refuses"))
        );
        // One that no step stands for.
        let judged = judge(&report, "Transfer");
        let names: Vec<_> = judged.steps.iter().map(|step| step.name).collect();
        assert_eq!(names, ["objects-on-trial", "move"]);
    }

    #[test]
    fn after_a_move_each_step_has_its_time() {
        let report = json!({
            "outcome": "committed", "error": null, "total_ms": 9.0,
            "phases_ms": {"PreSetup": 7.5, "DumpRDMA": 1.0, "DumpOthers": 2.0, "FullRestore": 3.0, "RestoreRDMA": 4.0},
        });
        let judged = judge(&report, "Replay");
        assert!(judged.committed && judged.steps.iter().all(|step| step.error.is_none()));
        assert_eq!(judged.steps.len(), 5);
    }
}
