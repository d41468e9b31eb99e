//! rdma-core's own test suite, in one host: its tests connect two queue pairs of one device.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, ensure};
use verbatim_e2e::{Expected, Outcome, SuiteReport, Table, TestLab, Verdict, table};

use crate::Test;

const HOSTS: &[&str] = &["src"];
/// Of the whole suite; each test has a limit of its own.
const LIMIT: Duration = Duration::from_secs(900);

/// The interface of a host's RNIC, for the tests of rdma_cm.
const NET: &str = "br0";

/// Of them there is one; the suite has hundreds.
pub fn tests() -> Vec<Test> {
    vec![Test::new("conformance::suite", HOSTS, suite)]
}

fn suite(lab: &TestLab) -> anyhow::Result<()> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("conformance");
    let expected: Table<Expected> = read(&here.join("expected.txt"))?;
    let reference: Table<Outcome> = read(&here.join("rxe.txt"))?;

    let folder = out()?;
    let (json, text) = (folder.join("suite.json"), folder.join("suite.txt"));
    let program = here.join("suite.py").display().to_string();
    let report = json.display().to_string();
    let finished = lab
        .start(
            "src",
            &[&program, "--dev", "verbatim0", "--net", NET, "--json", &report],
        )?
        .succeed(LIMIT)?;
    fs::write(&text, &finished.stdout).with_context(|| format!("cannot write {}", text.display()))?;
    let report: SuiteReport = serde_json::from_slice(&fs::read(&json)?)
        .with_context(|| format!("{} is not a report", json.display()))?;

    let verdict = Verdict::of(&report.tests, &expected, &reference);
    println!(
        "\nrdma-core's suite: {} (seed {}; see {})",
        verdict.counts,
        report.seed,
        text.display()
    );
    for note in &verdict.notes {
        println!("note: {note}");
    }
    ensure!(
        verdict.worse.is_empty(),
        "{}\n{}",
        verdict.counts,
        verdict.worse.join("\n")
    );
    ensure!(verdict.counts.pass > 0, "nothing ran");
    Ok(())
}

fn read<V: std::str::FromStr<Err = anyhow::Error>>(path: &Path) -> anyhow::Result<Table<V>> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    table(&text).with_context(|| path.display().to_string())
}

/// Where results go.
fn out() -> anyhow::Result<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../out/conformance");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    Ok(folder.canonicalize()?)
}
