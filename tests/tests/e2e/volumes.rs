//! Volumes of containers: a program that appends records to a file on one, each with fsync, and says which are there for good
//! (`tests/programs/records.py`).

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use serde_json::Value;
use verbatim_e2e::{Finished, Instance, ROLLED_BACK, TestLab, Traffic, eventually, left_behind, patience};

use crate::Test;

const PROGRAM: &str = include_str!("../../programs/records.py");
const LIMIT: Duration = Duration::from_secs(60);
const NAME: &str = "db";
const HOSTS: &[&str] = &["src", "dst"];
const VOLUME: &str = "data";
/// The bytes of a file on it.
const NOISE: usize = 16 << 20;
/// The bytes of a record.
const RECORD: usize = 22;

/// All of them.
pub fn tests() -> Vec<Test> {
    vec![
        Test::new("volumes::lent", HOSTS, lent).with_volumes(),
        Test::new("volumes::given_back", &["src"], given_back).with_volumes(),
        Test::new("volumes::moves", HOSTS, moves).with_volumes(),
        Test::new("volumes::moves_by_rdma", HOSTS, moves_by_rdma).with_volumes_by("rdma"),
        Test::new("volumes::stays", HOSTS, stays)
            .with_volumes()
            .injecting_faults(),
        Test::new("volumes::daemons_die", HOSTS, daemons_die)
            .with_volumes()
            .injecting_faults(),
    ]
}

/// `verbatim volume …` in a host.
pub fn volume(lab: &TestLab, host: &str, arguments: &[&str]) -> anyhow::Result<Finished> {
    let program = lab
        .tools()
        .verbatim
        .to_str()
        .context("a path that is not UTF-8")?;
    lab.start_plain(host, &[&[program, "volume"], arguments].concat())?
        .wait(patience(LIMIT))
}

pub fn must(lab: &TestLab, host: &str, arguments: &[&str]) -> anyhow::Result<String> {
    let finished = volume(lab, host, arguments)?;
    if finished.code != 0 {
        bail!("`volume {}`: {}", arguments.join(" "), finished.output());
    }
    Ok(finished.stdout.trim().to_owned())
}

/// What the daemon of a host says of a volume.
pub fn row(lab: &TestLab, host: &str, name: &str) -> anyhow::Result<Value> {
    let text = must(lab, host, &["status", name, "--json"])?;
    serde_json::from_str(&text).context("no JSON")
}

fn run<'a>(lab: &'a TestLab, name: &str, volume: &str) -> anyhow::Result<Instance<'a>> {
    let options = ["--name", name, "--volume", volume, "--"];
    Instance::run(lab, "src", &options, &["python3", "-c", PROGRAM, "/srv/log"])
}

/// What `run` says that refuses.
fn refused(lab: &TestLab, name: &str, volume: &str) -> anyhow::Result<String> {
    lab.refused(&[
        "run", "--host", "src", "--name", name, "--volume", volume, "--", "sleep", "1000",
    ])
}

/// The last record that the program has said is there.
fn acknowledged(instance: &Instance) -> anyhow::Result<u64> {
    let output = instance.output()?;
    let last = output.lines().rev().find_map(|line| line.parse().ok());
    Ok(last.unwrap_or(0))
}

/// Waits until there are so many more records than `than`; how many there are.
fn more(instance: &Instance, than: u64) -> anyhow::Result<u64> {
    eventually("more records", patience(LIMIT), || {
        let now = acknowledged(instance)?;
        Ok((now >= than + 20).then_some(now))
    })
}

/// Whether a file has all records up to that one, each right, and then nothing but such.
fn must_have(file: &Path, acknowledged: u64) -> anyhow::Result<()> {
    let content = std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    let records = content.chunks_exact(RECORD);
    ensure!(
        records.len() as u64 >= acknowledged,
        "{} records are there of {acknowledged} that were written",
        records.len()
    );
    for (index, record) in records.enumerate() {
        let number = format!("{:012} ", index + 1);
        ensure!(
            record.starts_with(number.as_bytes()) && record.ends_with(b"\n"),
            "record {} is {:?}",
            index + 1,
            String::from_utf8_lossy(record)
        );
    }
    Ok(())
}

/// The file, as the instance's host sees it.
fn log(lab: &TestLab, host: &str, name: &str, volume: &str) -> anyhow::Result<std::path::PathBuf> {
    lab.path(host, &format!("/run/verbatim/disks/{name}/{volume}/log"))
}

/// Nothing of the instance has the volume any more.
fn is_free(lab: &TestLab, name: &str) -> anyhow::Result<()> {
    eventually("a volume that is given back", patience(LIMIT), || {
        let row = row(lab, "src", name)?;
        Ok((row["holder"].is_null() && row["device"].is_null()).then_some(()))
    })
}

/// Waits until the copy on a host is in this role.
fn becomes(lab: &TestLab, host: &str, role: &str) -> anyhow::Result<Value> {
    let mut last = Value::Null;
    eventually(
        &format!("a copy on {host} that is {role}"),
        patience(LIMIT),
        || {
            last = row(lab, host, VOLUME)?;
            Ok((last["role"] == role).then(|| last.clone()))
        },
    )
    .with_context(|| last.to_string())
}

/// The instance runs there with its volume, and every record is where it was said to be.
fn works(lab: &TestLab, instance: &Instance, host: &str) -> anyhow::Result<u64> {
    eventually("an instance that runs", patience(LIMIT), || {
        let row = instance.row()?;
        Ok((row.state == "running" && row.host == host).then_some(()))
    })?;
    let row = becomes(lab, host, "serving")?;
    ensure!(row["holder"] == NAME, "{row}");
    let now = acknowledged(instance)?;
    let now = more(instance, now)?;
    must_have(&log(lab, host, NAME, VOLUME)?, now)?;
    Ok(now)
}

/// An instance has a volume for itself, and what is refused is refused for a reason that helps.
fn lent(lab: &TestLab) -> anyhow::Result<()> {
    must(lab, "src", &["create", "data", "--size", "64M"])?;
    let unknown = refused(lab, "other", "nothing:/srv")?;
    ensure!(unknown.contains("there is no volume nothing"), "{unknown}");
    let nowhere = refused(lab, "other", "data:/no/such/folder")?;
    ensure!(
        nowhere.contains("there is no folder /no/such/folder"),
        "{nowhere}"
    );

    let instance = run(lab, NAME, "data:/srv")?;
    let first = more(&instance, 0)?;
    let status = row(lab, "src", "data")?;
    ensure!(status["holder"] == NAME && status["uri"].is_null(), "{status}");
    let taken = refused(lab, "other", "data:/srv")?;
    ensure!(taken.contains("in use by the instance db"), "{taken}");
    for order in [
        &["attach", "data"][..],
        &["detach", "data"],
        &["migrate", "data", "--to", "dst"],
    ] {
        let finished = volume(lab, "src", order)?;
        ensure!(
            finished.code == 1 && finished.stderr.contains("in use"),
            "{}",
            finished.output()
        );
    }
    let second = more(&instance, first)?;
    must_have(&log(lab, "src", NAME, "data")?, second)?;

    // What is on a volume is never written over.
    must(lab, "src", &["create", "strange", "--size", "16M"])?;
    let device = must(lab, "src", &["attach", "strange", "--device"])?;
    lab.start_plain("src", &["mkswap", &device])?
        .succeed(patience(LIMIT))?;
    let attached = refused(lab, "other", "strange:/srv")?;
    ensure!(attached.contains("attached for other clients"), "{attached}");
    must(lab, "src", &["detach", "strange"])?;
    let strange = refused(lab, "other", "strange:/srv")?;
    ensure!(strange.contains("there is swap on the volume"), "{strange}");
    is_free(lab, "strange")?;
    let left = lab.path("src", "/run/verbatim/disks/other")?;
    ensure!(!left.exists(), "{} is left", left.display());

    // Without its daemon it has no disk, and the next one is told nothing that is not so.
    lab.ask(&["stop", NAME])?;
    is_free(lab, "data")?;
    lab.lab().kill("src", "volumes")?;
    let nobody = refused(lab, NAME, "data:/srv")?;
    ensure!(nobody.contains("no volume daemon answers"), "{nobody}");
    Ok(())
}

/// The volume is given back when the instance ends, however that comes about, and has what was written.
fn given_back(lab: &TestLab) -> anyhow::Result<()> {
    must(lab, "src", &["create", "data", "--size", "64M"])?;
    let instance = run(lab, NAME, "data:/srv")?;
    let mut written = more(&instance, 0)?;
    // Its agent is another one.
    lab.restart("src", "agent")?;
    written = more(&instance, written)?;
    // Its volume daemon is another one: the program has waited for that.
    lab.restart("src", "volumes")?;
    written = more(&instance, written)?;
    let there = row(lab, "src", "data")?;
    ensure!(there["holder"] == NAME, "{there}");
    instance.kill()?;
    is_free(lab, "data")?;
    lab.ask(&["stop", NAME])?;

    // It ends while there is no agent.
    let instance = run(lab, NAME, "data:/srv")?;
    let said = eventually("a program that has begun", patience(LIMIT), || {
        Ok(Some(instance.output()?).filter(|said| said.contains('\n')))
    })?;
    ensure!(said.starts_with("found "), "{said}");
    written = more(&instance, written)?;
    let pid = instance.row()?.pid.context("it runs")?;
    lab.lab().kill("src", "agent")?;
    lab.start_plain("src", &["kill", "-KILL", &pid.to_string()])?
        .succeed(patience(LIMIT))?;
    lab.lab().start("src", "agent")?;
    is_free(lab, "data")?;
    ensure!(left_behind(lab, "src", NAME)?.is_empty());

    // Read-only, in a folder that is nowhere on the host.
    let options = ["--name", NAME, "--volume", "data:/run/data:ro", "--"];
    let words = "cat /run/data/log; touch /run/data/x || echo refused";
    let instance = Instance::run(lab, "src", &options, &["sh", "-c", words])?;
    let output = instance.succeed(LIMIT)?.stdout;
    ensure!(output.contains("refused\n"), "{output}");
    let last = format!("\n{written:012} ");
    ensure!(output.contains(&last), "record {written} is lost");
    is_free(lab, "data")
}

/// A volume moves with its container, there and back, while it is written to.
fn moves(lab: &TestLab) -> anyhow::Result<()> {
    must(lab, "src", &["create", VOLUME, "--size", "64M"])?;
    let instance = run(lab, NAME, "data:/srv")?;
    works(lab, &instance, "src")?;
    for (here, there) in [("src", "dst"), ("dst", "src"), ("src", "dst")] {
        let before = row(lab, here, VOLUME)?["generation"].as_u64();
        instance.moves(there)?;
        works(lab, &instance, there)?;
        let after = row(lab, there, VOLUME)?["generation"].as_u64();
        ensure!(after == before.map(|before| before + 1), "{before:?} {after:?}");
        let left = becomes(lab, here, "moved")?;
        ensure!(left["device"].is_null() && left["holder"].is_null(), "{left}");
        eventually("a host without leftovers", patience(LIMIT), || {
            Ok(left_behind(lab, here, NAME)?.is_empty().then_some(()))
        })
        .with_context(|| format!("{:?}", left_behind(lab, here, NAME)))?;
    }
    lab.ask(&["stop", NAME])?;
    let row = row(lab, "dst", VOLUME)?;
    ensure!(row["device"].is_null() && row["role"] == "serving", "{row}");
    // Where no daemon is that could have the volume, it is not moved.
    let instance = Instance::run(
        lab,
        "dst",
        &["--name", NAME, "--volume", "data:/srv", "--"],
        &["python3", "-c", PROGRAM, "/srv/log"],
    )?;
    lab.lab().kill("src", "volumes")?;
    let refused = instance.migrate("src")?;
    let why = refused.error.unwrap_or_default();
    ensure!(
        refused.outcome == ROLLED_BACK && why.contains("no volume daemon answers there"),
        "{}: {why}",
        refused.outcome
    );
    works(lab, &instance, "dst").map(drop)
}

/// A volume whose chunks go by RDMA moves with its container, and has all that was on it.
fn moves_by_rdma(lab: &TestLab) -> anyhow::Result<()> {
    must(lab, "src", &["create", VOLUME, "--size", "64M"])?;
    let instance = run(lab, NAME, "data:/srv")?;
    works(lab, &instance, "src")?;
    let noise_of = |host: &str| lab.path(host, &format!("/run/verbatim/disks/{NAME}/{VOLUME}/noise"));
    let mut noise = vec![0; NOISE];
    File::open("/dev/urandom")?.read_exact(&mut noise)?;
    let mut file = File::create(noise_of("src")?)?;
    file.write_all(&noise)?;
    file.sync_all()?;
    drop(file);
    let rnic = Traffic::of(lab, "dst")?;
    let before = rnic.counters().rx_payload_bytes;
    instance.moves("dst")?;
    let by_rdma = rnic.counters().rx_payload_bytes - before;
    works(lab, &instance, "dst")?;
    ensure!(
        std::fs::read(noise_of("dst")?)? == noise,
        "the file is another one"
    );
    ensure!(
        by_rdma >= NOISE as u64,
        "{by_rdma} bytes have come by RDMA, and the file alone has {NOISE}"
    );
    // Nothing of it is kept back at either side.
    lab.ask(&["stop", NAME])?;
    let row = row(lab, "dst", VOLUME)?;
    ensure!(row["device"].is_null() && row["role"] == "serving", "{row}");
    Ok(())
}

/// Moves that come to nothing: the instance goes on where it was, with its volume, and in the end it moves.
fn stays(lab: &TestLab) -> anyhow::Result<()> {
    must(lab, "src", &["create", VOLUME, "--size", "64M"])?;
    let instance = run(lab, NAME, "data:/srv")?;
    works(lab, &instance, "src")?;
    for (host, order) in [
        ("src", "source-transfer fail"),
        ("src", "source-restore fail"),
        ("dst", "destination-commit fail"),
        ("dst", "destination-commit exit"),
        ("src", "source-commit exit"),
    ] {
        let attempt = || {
            lab.order_faults(host, &format!("{order}\n"))?;
            let migrate = lab.verbatim(&["migrate", NAME, "--to", "dst", "--json"])?;
            if order.ends_with("exit") {
                lab.ended(host, "agent")?;
                lab.order_faults(host, "")?;
                lab.lab().start(host, "agent")?;
            }
            // What it says depends on who has died.
            let ended = migrate.wait(patience(LIMIT))?;
            ensure!(ended.code == 1, "{}", ended.output());
            lab.order_faults(host, "")?;
            // An agent that has just started may still ask what became of the session.
            eventually("an instance that runs", patience(LIMIT), || {
                Ok(instance.row().ok().filter(|row| row.state == "running").map(drop))
            })?;
            works(lab, &instance, "src")?;
            becomes(lab, "dst", "incomplete").map(drop)
        };
        attempt().with_context(|| format!("{host}: {order}"))?;
    }
    instance.moves("dst")?;
    works(lab, &instance, "dst").map(drop)
}

/// A volume daemon that is killed while a move is decided does what the session did.
fn daemons_die(lab: &TestLab) -> anyhow::Result<()> {
    must(lab, "src", &["create", VOLUME, "--size", "64M"])?;
    let instance = run(lab, NAME, "data:/srv")?;
    works(lab, &instance, "src")?;
    let waiting_at = |point: &str| {
        lab.order_faults("dst", &format!("{point} hang\n"))?;
        let reached = lab.path("dst", "/run/verbatim/faults.reached")?;
        let _ = std::fs::remove_file(&reached);
        let migrate = lab.verbatim(&["migrate", NAME, "--to", "dst", "--json"])?;
        eventually(point, patience(LIMIT), || Ok(reached.exists().then_some(())))?;
        anyhow::Ok(migrate)
    };

    // The destination's, before the decision: the tasks that were restored have lost their disk, and are not let go.
    let migrate = waiting_at("destination-commit")?;
    becomes(lab, "src", "held")?;
    becomes(lab, "dst", "ready")?;
    lab.lab().kill("dst", "volumes")?;
    lab.order_faults("dst", "")?;
    let ended = migrate.wait(patience(LIMIT))?;
    ensure!(ended.code == 1, "{}", ended.output());
    works(lab, &instance, "src")?;
    lab.lab().start("dst", "volumes")?;
    becomes(lab, "dst", "incomplete")?;

    // The source's, after it: what it comes back to is the destination's.
    let migrate = waiting_at("destination-committed")?;
    lab.restart("src", "volumes")?;
    becomes(lab, "src", "held")?;
    lab.order_faults("dst", "")?;
    let ended = migrate.wait(patience(LIMIT))?;
    ensure!(ended.code == 0, "{}", ended.output());
    works(lab, &instance, "dst")?;
    becomes(lab, "src", "moved").map(drop)
}
