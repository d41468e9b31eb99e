//! Failures that are not one step's: hosts that lose each other, an operator who decides, tools and hosts that do not do
//! their part, and what is refused before anything is touched.

use std::time::Duration;

use anyhow::{Context, ensure};
use rustix::process::Signal;
use verbatim_e2e::{MOVED, Migration, ROLLED_BACK, Running, TestLab, VCHECK_PORT, eventually, left_behind};

use crate::Test;
use crate::migration::Check;
use crate::robustness::blockers;

const HOSTS: &[&str] = &["src", "dst", "peer"];
const LIMIT: Duration = Duration::from_secs(60);
const OPTIONS: &[&str] = &["--op", "mix", "-q", "2", "-s", "16384", "--bidirectional"];

/// All of them.
pub fn tests() -> Vec<Test> {
    let tests = [
        Test::new("failures::the_answer_is_lost", HOSTS, the_answer_is_lost),
        Test::new("failures::the_question_is_lost", HOSTS, the_question_is_lost),
        Test::new("failures::an_operator_decides", HOSTS, an_operator_decides),
        Test::new("failures::ctrl_c_is_answered", HOSTS, ctrl_c_is_answered),
        Test::new("failures::criu_cannot_dump", HOSTS, criu_cannot_dump),
        Test::new("failures::no_space_there", HOSTS, no_space_there),
        Test::new("failures::another_authority", HOSTS, another_authority),
        Test::new("failures::an_older_agent", HOSTS, an_older_agent),
        Test::new(
            "failures::a_partner_without_library",
            HOSTS,
            a_partner_without_library,
        ),
        Test::new(
            "failures::an_agent_dies_before_it_resumes",
            HOSTS,
            an_agent_dies_before_it_resumes,
        ),
        Test::new(
            "failures::a_taken_over_instance_tells_its_status",
            &["src"],
            a_taken_over_instance_tells_its_status,
        ),
    ];
    tests.into_iter().map(Test::injecting_faults).collect()
}

/// A host's part in a session, of `verbatim sessions --json`.
#[derive(Debug, serde::Deserialize)]
pub struct Session {
    pub id: String,
    pub host: String,
    role: String,
    pub state: String,
    error: Option<String>,
}

pub fn sessions(lab: &TestLab) -> anyhow::Result<Vec<Session>> {
    let listed = lab.ask(&["sessions", "--all", "--json"])?;
    serde_json::from_str(&listed.stdout).context("`verbatim sessions --json` prints no JSON")
}

/// Waits until a host's part in the latest session is in a state.
fn comes_to(lab: &TestLab, host: &str, state: &str) -> anyhow::Result<Session> {
    eventually(&format!("a session that is {state} on {host}"), LIMIT, || {
        let latest = sessions(lab)?.into_iter().find(|session| session.host == host);
        Ok(latest.filter(|session| session.state == state))
    })
    .with_context(|| format!("{:?}", sessions(lab)))
}

/// Cuts the link between two hosts until this is dropped.
struct Cut<'a> {
    lab: &'a TestLab,
    host: &'static str,
}

impl<'a> Cut<'a> {
    fn between(lab: &'a TestLab, host: &'static str, other: &str) -> anyhow::Result<Self> {
        let other = lab.address(other)?;
        let rules = format!(
            "add table ip cut\n\
             add chain ip cut in {{ type filter hook input priority 0; }}\n\
             add chain ip cut out {{ type filter hook output priority 0; }}\n\
             add rule ip cut in ip saddr {other} drop\n\
             add rule ip cut out ip daddr {other} drop\n"
        );
        lab.start_plain(host, &["nft", &rules])?.succeed(LIMIT)?;
        Ok(Self { lab, host })
    }

    fn heal(self) {}
}

impl Drop for Cut<'_> {
    fn drop(&mut self) {
        let healed = self
            .lab
            .start_plain(self.host, &["nft", "delete table ip cut"])
            .and_then(|running| running.succeed(LIMIT));
        if let Err(error) = healed {
            eprintln!("{error:#}");
        }
    }
}

/// Starts a migration that waits at a point of a host.
pub fn waiting_at(lab: &TestLab, host: &str, point: &str) -> anyhow::Result<Running> {
    lab.order_faults(host, &format!("{point} hang\n"))?;
    let migrate = lab.verbatim(&["migrate", "client", "--to", "dst", "--json"])?;
    let reached = lab.path(host, "/run/verbatim/faults.reached")?;
    eventually(point, LIMIT, || Ok(reached.exists().then_some(())))?;
    Ok(migrate)
}

/// The instance is where it should be, runs, and can be moved on.
fn goes_on(lab: &TestLab, check: Check<'_>, here: &str) -> anyhow::Result<()> {
    let there = if here == "src" { "dst" } else { "src" };
    eventually("an instance that runs", LIMIT, || {
        let row = check.client.row()?;
        ensure!(row.host == here, "{row:?}");
        Ok((row.state == "running" && row.connections > 0).then_some(()))
    })?;
    check.flows(here)?;
    check.flows("peer")?;
    eventually("a host without leftovers", LIMIT, || {
        Ok(left_behind(lab, there, "client")?.is_empty().then_some(()))
    })
    .with_context(|| format!("{:?}", left_behind(lab, there, "client")))?;
    check.client.moves(there)?;
    check.flows(there)?;
    check.end()?;
    Ok(())
}

fn the_answer_is_lost(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    let migrate = waiting_at(lab, "dst", "destination-running")?;
    let cut = Cut::between(lab, "dst", "src")?;
    lab.order_faults("dst", "")?;
    let session = comes_to(lab, "src", "in doubt")?;
    ensure!(session.role == "source", "{session:?}");
    let error = session.error.unwrap_or_default();
    ensure!(error.contains("dst is out of reach"), "{error}");
    let late = lab.refused(&["cancel", "client"])?;
    ensure!(late.contains("too late"), "{late}");
    let refused = lab.refused(&["session", "resolve", &session.id, "--keep", "source"])?;
    for word in ["--force", "runs twice", "is lost"] {
        ensure!(refused.contains(word), "{refused}");
    }
    cut.heal();
    let report = Migration::of(&migrate.wait(LIMIT)?)?;
    ensure!(report.outcome == MOVED, "{report:?}");
    let shown = lab.ask(&["session", "show", &session.id])?.stdout;
    for word in [
        "src (source): committed",
        "dst (destination): committed",
        "Replay",
    ] {
        ensure!(shown.contains(word), "{shown}");
    }
    goes_on(lab, check, "dst")
}

fn the_question_is_lost(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    let migrate = waiting_at(lab, "src", "source-ask")?;
    let cut = Cut::between(lab, "dst", "src")?;
    lab.order_faults("src", "")?;
    // The destination notices that it has lost the source, which it was not asked by.
    comes_to(lab, "dst", "rolled back")?;
    comes_to(lab, "src", "in doubt")?;
    cut.heal();
    let report = Migration::of(&migrate.wait(LIMIT)?)?;
    ensure!(report.outcome == ROLLED_BACK, "{report:?}");
    goes_on(lab, check, "src")
}

fn an_operator_decides(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    let migrate = waiting_at(lab, "src", "source-ask")?;
    let cut = Cut::between(lab, "dst", "src")?;
    lab.order_faults("src", "")?;
    comes_to(lab, "dst", "rolled back")?;
    let session = comes_to(lab, "src", "in doubt")?;
    // As an operator would make sure of it: it is not there.
    let row = check.client.row()?;
    ensure!(row.host == "src" && row.state == "in doubt", "{row:?}");
    lab.ask(&[
        "session",
        "resolve",
        &session.id[..6],
        "--keep",
        "source",
        "--force",
    ])?;
    let report = Migration::of(&migrate.wait(LIMIT)?)?;
    report.must_be_rolled_back(&["an operator decided"])?;
    check.flows("src")?;
    cut.heal();
    goes_on(lab, check, "src")
}

/// Ctrl-C is heard to its end: the command says where the instance stays, or that it is too late.
fn ctrl_c_is_answered(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    let migrate = waiting_at(lab, "src", "source-transfer")?;
    migrate.signal(Signal::INT)?;
    let finished = migrate.wait(LIMIT)?;
    lab.order_faults("src", "")?;
    let report = Migration::of(&finished)?;
    report.must_be_rolled_back(&["cancelled"])?;
    ensure!(finished.stderr.contains("cancelling"), "{}", finished.stderr);
    let idle = lab.refused(&["cancel", "client"])?;
    ensure!(idle.contains("is not being moved"), "{idle}");
    std::fs::remove_file(lab.path("src", "/run/verbatim/faults.reached")?)?;

    let migrate = waiting_at(lab, "src", "source-switch")?;
    migrate.signal(Signal::INT)?;
    eventually("that it is too late", LIMIT, || {
        Ok(migrate.stderr()?.contains("too late").then_some(()))
    })?;
    lab.order_faults("src", "")?;
    let report = Migration::of(&migrate.wait(LIMIT)?)?;
    report.must_be_committed()?;
    goes_on(lab, check, "dst")
}

fn criu_cannot_dump(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    lab.order_faults("src", "source-freeze damage\n")?;
    check
        .client
        .migrate("dst")?
        .must_be_rolled_back(&["checkpoint"])?;
    lab.order_faults("src", "")?;
    goes_on(lab, check, "src")
}

/// Leaves `kib` free in the destination's runtime folder; `None`: what there was.
fn room(lab: &TestLab, kib: Option<u32>) -> anyhow::Result<()> {
    let size = match kib {
        Some(kib) => format!("$(( $(df -k --output=used /run | tail -n 1) + {kib} ))k"),
        None => "50%".to_owned(),
    };
    let command = format!("mount -o remount,size={size} /run");
    lab.start_plain("dst", &["sh", "-c", &command])?.succeed(LIMIT)?;
    Ok(())
}

fn no_space_there(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    room(lab, Some(1024))?;
    let found = blockers(lab, "client", "dst")?.join("; ");
    ensure!(
        found.contains("MiB are needed") && found.contains("enlarge"),
        "{found}"
    );
    check
        .client
        .migrate("dst")?
        .must_be_rolled_back(&["MiB are needed"])?;
    ensure!(left_behind(lab, "dst", "client")?.is_empty());
    room(lab, None)?;
    let found = blockers(lab, "client", "dst")?;
    ensure!(found.is_empty(), "{found:?}");

    // It was there, and is gone when the pages come. They lie in a file system of the instance's own; what is made beside it does not.
    let migrate = waiting_at(lab, "dst", "destination-place")?;
    room(lab, Some(16))?;
    lab.order_faults("dst", "")?;
    let report = Migration::of(&migrate.wait(LIMIT)?)?;
    report.must_be_rolled_back(&[])?;
    // Whoever notices first, the agent or runc and CRIU: the folder is named.
    let error = report.error.as_deref().unwrap_or_default();
    let names_it = [
        "the file system of /run/",
        "has no room",
        "make room there, or enlarge it",
    ];
    ensure!(names_it.iter().all(|words| error.contains(words)), "{error}");
    room(lab, None)?;
    goes_on(lab, check, "src")
}

fn another_authority(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    let other = TestLab::up(lab.tools(), &["dst"])?;
    let files = ["ca.pem", "cert.pem", "key.pem"].map(|name| format!("/run/verbatim/tls/{name}"));
    let mut ours = Vec::new();
    for file in &files {
        let path = lab.path("dst", file)?;
        ours.push((path.clone(), std::fs::read(&path)?));
        std::fs::write(path, std::fs::read(other.path("dst", file)?)?)?;
    }
    other.down()?;
    lab.lab().kill("dst", "agent")?;
    lab.lab().start("dst", "agent")?;
    let found = blockers(lab, "client", "dst")?.join("; ");
    ensure!(
        found.contains("the agent of dst") && found.contains("does not answer"),
        "{found}"
    );
    check.client.migrate("dst")?.must_be_rolled_back(&["dst"])?;
    for (path, content) in ours {
        std::fs::write(path, content)?;
    }
    lab.lab().kill("dst", "agent")?;
    lab.lab().start("dst", "agent")?;
    goes_on(lab, check, "src")
}

fn an_older_agent(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    for (host, word) in [("dst", "the agent of dst"), ("peer", "a partner is out of reach")] {
        lab.order_faults(host, "hello damage\n")?;
        let found = blockers(lab, "client", "dst")?.join("; ");
        for word in [word, "of the agent contract", "upgrade the agent of"] {
            ensure!(found.contains(word), "{found}");
        }
        check
            .client
            .migrate("dst")?
            .must_be_rolled_back(&["of the agent contract", "upgrade the agent of"])?;
        lab.order_faults(host, "")?;
    }
    // A partner's host without an agent.
    lab.lab().kill("peer", "agent")?;
    let found = blockers(lab, "client", "dst")?.join("; ");
    ensure!(
        found.contains("a partner is out of reach") && found.contains("peer"),
        "{found}"
    );
    lab.lab().start("peer", "agent")?;
    eventually("a partner that is back", LIMIT, || {
        Ok(blockers(lab, "client", "dst")?.is_empty().then_some(()))
    })?;
    goes_on(lab, check, "src")
}

/// A partner that runs beside the agent, which does not know it.
fn a_partner_without_library(lab: &TestLab) -> anyhow::Result<()> {
    let alone = "mkdir /run/alone && ln -s /run/verbatim/nic.sock /run/alone/nic.sock";
    lab.start_plain("peer", &["sh", "-c", alone])?.succeed(LIMIT)?;
    let program = lab.tools().vcheck.display().to_string();
    let server = lab.start("peer", &["env", "VERBATIM_RUNTIME=/run/alone", &program])?;
    lab.listens("peer", 1, VCHECK_PORT)?;
    let address = lab.address("peer")?;
    let argv = [&[program.as_str(), "-D", "600"], OPTIONS, &[&address]].concat();
    let client = lab.instance("src", "client", &argv)?;
    verbatim_e2e::Traffic::of(lab, "src")?.flows(1 << 20, LIMIT)?;
    let found = blockers(lab, "client", "dst")?.join("; ");
    ensure!(
        found.contains("do not use the guest library") && found.contains("LD_PRELOAD"),
        "{found}"
    );
    for method in ["wait-before-stop", "pause-resume"] {
        client
            .migrate_with("dst", &["--method", method])?
            .must_be_rolled_back(&["do not use the guest library"])?;
    }
    let refusal = lab.refused(&["pause", "client"])?;
    ensure!(refusal.contains("do not use the guest library"), "{refusal}");
    verbatim_e2e::Traffic::of(lab, "src")?.flows(1 << 20, LIMIT)?;
    client.interrupt()?;
    let client = client.succeed(LIMIT)?;
    verbatim_e2e::CheckReport::both_clean(&client, &server.succeed(LIMIT)?)?;
    Ok(())
}

/// The agent that comes after is asked to resume before it has given the processes their contexts: it does that first.
fn an_agent_dies_before_it_resumes(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    lab.order_faults("dst", "destination-resume exit\n")?;
    let migrate = lab.verbatim(&["migrate", "client", "--to", "dst", "--json"])?;
    lab.ended("dst", "agent")?;
    // While it cannot claim, the source asks again and again.
    lab.order_faults("dst", "destination-claim fail\n")?;
    let reached = lab.path("dst", "/run/verbatim/faults.reached")?;
    std::fs::remove_file(&reached)?;
    lab.lab().start("dst", "agent")?;
    eventually("several claims", LIMIT, || {
        let claims = std::fs::read_to_string(&reached)
            .unwrap_or_default()
            .lines()
            .count();
        Ok((claims >= 4).then_some(()))
    })?;
    lab.order_faults("dst", "")?;
    let migration = Migration::of(&migrate.wait(LIMIT)?)?;
    ensure!(migration.outcome == MOVED, "{migration:?}");
    check.flows("dst")?;
    check.end()?;
    Ok(())
}

fn a_taken_over_instance_tells_its_status(lab: &TestLab) -> anyhow::Result<()> {
    let script = "trap 'exit 7' INT; echo ready; while :; do sleep 0.05; done";
    let instance = lab.instance("src", "web", &["sh", "-c", script])?;
    eventually("a shell that is ready", LIMIT, || {
        Ok(instance.output()?.contains("ready").then_some(()))
    })?;
    lab.lab().kill("src", "agent")?;
    lab.lab().start("src", "agent")?;
    instance.interrupt()?;
    let waited = lab.verbatim(&["wait", "web"])?.wait(LIMIT)?;
    ensure!(waited.code == 7, "status {}{}", waited.code, waited.output());
    Ok(())
}
