//! Programs that die, operators who err, labs side by side.

use std::time::Duration;

use anyhow::{Context, ensure};
use verbatim_e2e::{CheckReport, TestLab, Traffic, VCHECK_PORT, bundle_of, eventually};

use crate::Test;
use crate::migration::Check;
use crate::programs::between;

const HOSTS: &[&str] = &["src", "peer"];
const THREE_HOSTS: &[&str] = &["src", "dst", "peer"];
const LIMIT: Duration = Duration::from_secs(30);
const SOME_BYTES: u64 = 8 << 20;

/// All of them.
pub fn tests() -> Vec<Test> {
    vec![
        Test::new(
            "robustness::a_killed_program_leaves_nothing",
            HOSTS,
            a_killed_program_leaves_nothing,
        ),
        Test::new(
            "robustness::an_idle_rnic_sleeps",
            THREE_HOSTS,
            an_idle_rnic_sleeps,
        ),
        Test::new(
            "robustness::agents_may_be_restarted",
            THREE_HOSTS,
            agents_may_be_restarted,
        ),
        Test::new("robustness::errors_say_what_to_do", HOSTS, errors_say_what_to_do),
        Test::new(
            "robustness::what_cannot_be_started_does_not_run",
            HOSTS,
            what_cannot_be_started_does_not_run,
        ),
        Test::new(
            "robustness::check_names_every_blocker",
            THREE_HOSTS,
            check_names_every_blocker,
        ),
        Test::new(
            "robustness::a_bundle_runs_and_moves",
            THREE_HOSTS,
            a_bundle_runs_and_moves,
        ),
        Test::new("robustness::two_labs_at_once", HOSTS, two_labs_at_once),
        Test::new(
            "robustness::a_lab_goes_with_its_test",
            HOSTS,
            a_lab_goes_with_its_test,
        ),
    ]
}

fn a_killed_program_leaves_nothing(lab: &TestLab) -> anyhow::Result<()> {
    let rnics = [Traffic::of(lab, "src")?, Traffic::of(lab, "peer")?];
    let before = rnics.each_ref().map(Traffic::objects);
    let program = lab.tools().vcheck.display().to_string();
    let server = lab.start("peer", &[&program])?;
    lab.listens("peer", 1, VCHECK_PORT)?;
    let address = lab.address("peer")?;
    let client = lab.start(
        "src",
        &[&program, "--op", "mix", "-q", "8", "-D", "600", &address],
    )?;
    rnics[0].flows(SOME_BYTES, LIMIT)?;
    for (rnic, before) in rnics.iter().zip(before) {
        let now = rnic.objects();
        ensure!(
            now.iter().zip(before).all(|(now, before)| *now > before),
            "{now:?} after {before:?}"
        );
    }

    // The program dies with the process that stands in for it, of SIGKILL.
    drop(client);
    drop(server);
    for (rnic, before) in rnics.iter().zip(before) {
        eventually("an RNIC without the dead program's objects", LIMIT, || {
            Ok((rnic.objects() == before).then_some(()))
        })
        .with_context(|| format!("{:?} instead of {before:?}", rnic.objects()))?;
    }
    // And the RNICs work.
    between(lab, &["ibv_rc_pingpong", "-g", "0", "-n", "100"], 18515)?;
    Ok(())
}

/// What an instance leaves behind costs nothing: an RNIC that spins would take a core from everybody for ever.
fn an_idle_rnic_sleeps(lab: &TestLab) -> anyhow::Result<()> {
    let instance = lab.instance("src", "guest", &["sleep", "1000"])?;
    instance.moves("dst")?;
    instance.moves("src")?;
    for host in THREE_HOSTS {
        let window = Duration::from_millis(300);
        eventually(&format!("an RNIC of {host} that sleeps"), LIMIT, || {
            let before = lab.cpu_time(host, "nic")?;
            std::thread::sleep(window);
            Ok((lab.cpu_time(host, "nic")? - before < window / 10).then_some(()))
        })?;
    }
    Ok(())
}

/// An agent is not needed for anything but migrations: it may end and come back while programs run.
fn agents_may_be_restarted(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(
        lab,
        &[
            "--op",
            "mix",
            "-q",
            "4",
            "-s",
            "16384",
            "--random-size",
            "--bidirectional",
        ],
    )?;
    for host in THREE_HOSTS {
        lab.lab().kill(host, "agent")?;
    }
    check.flows("src")?;
    for host in THREE_HOSTS {
        lab.lab().start(host, "agent")?;
    }
    // The guest libraries notice and come back by themselves.
    eventually("both instances with their connections", LIMIT, || {
        let connections = [check.client.row()?.connections, check.server.row()?.connections];
        Ok((connections == [4, 4]).then_some(()))
    })?;
    for (instance, to) in [(&check.client, "dst"), (&check.server, "src")] {
        instance.moves(to)?;
        check.flows(to)?;
    }
    check.end()?;
    Ok(())
}

fn errors_say_what_to_do(lab: &TestLab) -> anyhow::Result<()> {
    lab.ask(&["run", "--host", "src", "--name", "taken", "--", "sleep", "1000"])?;
    let cases: [(&[&str], &[&str]); 9] = [
        (&["--lab", "no-such-lab", "ps"], &["no lab", "verbatim lab up"]),
        (
            &["--lab", "no-such-lab", "lab", "status"],
            &["no-such-lab", "verbatim lab up"],
        ),
        (&["lab", "up"], &["is up already", "verbatim lab down"]),
        (
            &["migrate", "ghost", "--to", "peer"],
            &["no instance ghost", "taken"],
        ),
        (
            &["run", "--host", "mars", "--name", "a", "--", "true"],
            &["mars", "src", "peer"],
        ),
        (
            &["run", "--host", "peer", "--name", "taken", "--", "true"],
            &["taken", "verbatim stop"],
        ),
        (
            &["run", "--host", "src", "--name", "../a", "--", "true"],
            &["../a"],
        ),
        (
            &["run", "--host", "src", "--name", "b", "--bundle", "/nonexistent"],
            &["/nonexistent/config.json"],
        ),
        (&["lab", "exec", "mars", "--", "true"], &["mars", "src, peer"]),
    ];
    for (arguments, expected) in cases {
        let said = lab.refused(arguments)?;
        for word in expected {
            ensure!(
                said.contains(word),
                "`verbatim {}` does not say {word:?}: {said}",
                arguments.join(" ")
            );
        }
        ensure!(
            !said.contains("panicked"),
            "`verbatim {}`: {said}",
            arguments.join(" ")
        );
    }
    // Wrong usage is another status than failure.
    let usage = lab.verbatim(&["migrate", "taken"])?.wait(LIMIT)?;
    ensure!(
        usage.code == 2 && usage.stderr.contains("--to"),
        "status {}{}",
        usage.code,
        usage.output()
    );
    // A program that does not exist is the instance's own end.
    lab.ask(&["stop", "taken"])?;
    let rows = lab.ask(&["ps", "--json"])?;
    ensure!(rows.stdout.trim() == "[]", "{}", rows.stdout);
    Ok(())
}

/// What `verbatim check` says.
pub fn blockers(lab: &TestLab, name: &str, to: &str) -> anyhow::Result<Vec<String>> {
    #[derive(serde::Deserialize)]
    struct Reply {
        blockers: Vec<String>,
    }
    let checked = lab
        .verbatim(&["check", name, "--to", to, "--json"])?
        .wait(LIMIT)?;
    let Reply { blockers } = serde_json::from_str(&checked.stdout).with_context(|| checked.output())?;
    ensure!(
        checked.code == i32::from(!blockers.is_empty()),
        "status {} with {blockers:?}",
        checked.code
    );
    Ok(blockers)
}

fn check_names_every_blocker(lab: &TestLab) -> anyhow::Result<()> {
    lab.ask(&[
        "run",
        "--host",
        "src",
        "--name",
        "web",
        "--address",
        "10.77.1.77/16",
        "--",
        "sleep",
        "1000",
    ])?;
    ensure!(
        blockers(lab, "web", "dst")?.is_empty(),
        "{:?}",
        blockers(lab, "web", "dst")?
    );

    let unknown = blockers(lab, "web", "mars")?.join("; ");
    ensure!(unknown.contains("mars") && unknown.contains("dst"), "{unknown}");
    let here = blockers(lab, "web", "src")?.join("; ");
    ensure!(here.contains("already"), "{here}");

    // Only within a host nobody sees that the name and the address are in use elsewhere.
    let verbatim = lab.tools().verbatim.display().to_string();
    let elsewhere = |name: &str, address: &str| {
        let argv = [
            &verbatim,
            "run",
            "--name",
            name,
            "--address",
            address,
            "--",
            "sleep",
            "1000",
        ];
        lab.start_plain("dst", &argv)?.succeed(LIMIT)
    };
    elsewhere("web", "10.77.2.1/16")?;
    let name = blockers(lab, "web", "dst")?.join("; ");
    ensure!(name.contains("name web is taken"), "{name}");
    lab.start_plain("dst", &[&verbatim, "stop", "web"])?
        .succeed(LIMIT)?;
    elsewhere("other", "10.77.1.77/16")?;
    let address = blockers(lab, "web", "dst")?.join("; ");
    ensure!(address.contains("address 10.77.1.77 is taken"), "{address}");
    lab.ask(&["stop", "other"])?;

    // A host whose agent is down.
    lab.lab().kill("dst", "agent")?;
    let down = blockers(lab, "web", "dst")?.join("; ");
    ensure!(down.contains("dst"), "{down}");
    lab.lab().start("dst", "agent")?;
    // One whose RNIC is.
    lab.lab().kill("dst", "nic")?;
    let dead = blockers(lab, "web", "dst")?.join("; ");
    ensure!(dead.contains("dst: cannot reach the software RNIC"), "{dead}");
    lab.lab().start("dst", "nic")?;

    // Nothing was touched: it can still be moved.
    ensure!(
        blockers(lab, "web", "dst")?.is_empty(),
        "{:?}",
        blockers(lab, "web", "dst")?
    );
    let moved = lab.ask(&["migrate", "web", "--to", "dst"])?;
    ensure!(
        moved.stdout.contains("web has moved from src to dst"),
        "{}",
        moved.stdout
    );
    Ok(())
}

fn what_cannot_be_started_does_not_run(lab: &TestLab) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let text = folder.path().join("text");
    std::fs::write(&text, "no program")?;
    let script = folder.path().join("script");
    std::fs::write(&script, "#!/no/such/interpreter\n")?;
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    let (text, script) = (text.display().to_string(), script.display().to_string());
    let image = folder.path().join("image");
    std::fs::create_dir(&image)?;
    bundle_of(&image, &["sleep", "1000"], &lab.tools().library)?;
    let config = image.join("config.json");
    let spec = std::fs::read_to_string(&config)?;
    std::fs::write(
        &config,
        spec.replace("/usr/bin/sleep", "/usr/bin/no-such-program"),
    )?;
    let image = image.display().to_string();
    let cases: [(&[&str], &str); 5] = [
        (&["--", "no-such-program"], "no-such-program"),
        (&["--", "/no/such/program", "argument"], "/no/such/program"),
        (&["--", &text], "text"),
        (&["--", &script], "script"),
        (&["--bundle", &image], "no-such-program"),
    ];
    for (what, named) in cases {
        // The name is free each time.
        let arguments = [&["run", "--host", "src", "--name", "a"], what].concat();
        let said = lab.refused(&arguments)?;
        ensure!(
            said.contains("cannot be started") && said.contains(named),
            "{arguments:?}: {said}"
        );
        let rows = lab.ask(&["ps", "--json"])?;
        ensure!(rows.stdout.trim() == "[]", "{arguments:?}: {}", rows.stdout);
    }
    // What ends at once was started, whatever it ends with.
    for (name, what) in [("b", "true"), ("c", "exit 127")] {
        lab.ask(&["run", "--host", "src", "--name", name, "--", "sh", "-c", what])?;
        let ended = lab.verbatim(&["wait", name])?.wait(LIMIT)?;
        ensure!(
            ended.code == if name == "b" { 0 } else { 127 },
            "{}",
            ended.output()
        );
        lab.ask(&["stop", name])?;
    }
    Ok(())
}

fn a_bundle_runs_and_moves(lab: &TestLab) -> anyhow::Result<()> {
    let program = lab.tools().vcheck.display().to_string();
    let server = lab.start("peer", &[&program])?;
    lab.listens("peer", 1, VCHECK_PORT)?;
    let address = lab.address("peer")?;
    let folder = tempfile::tempdir()?;
    let argv = [program.as_str(), "--op", "mix", "-q", "2", "-D", "600", &address];
    bundle_of(folder.path(), &argv, &lab.tools().library)?;
    let client = lab.bundle("src", "image", folder.path())?;
    let words = || client.output().unwrap_or_default();
    Traffic::of(lab, "src")?
        .flows(SOME_BYTES, LIMIT)
        .with_context(words)?;
    client.moves("dst").with_context(words)?;
    Traffic::of(lab, "dst")?
        .flows(SOME_BYTES, LIMIT)
        .with_context(words)?;
    client.interrupt()?;
    CheckReport::both_clean(&client.succeed(LIMIT)?, &server.succeed(LIMIT)?)?;
    Ok(())
}

fn two_labs_at_once(lab: &TestLab) -> anyhow::Result<()> {
    let other = TestLab::up(lab.tools(), HOSTS)?;
    // The same hosts, names and addresses, at the same time.
    let program = lab.tools().vcheck.display().to_string();
    let mut running = Vec::new();
    for lab in [lab, &other] {
        lab.ask(&["run", "--host", "src", "--name", "same", "--", "sleep", "1000"])?;
        let server = lab.start("peer", &[&program])?;
        lab.listens("peer", 1, VCHECK_PORT)?;
        let address = lab.address("peer")?;
        let client = lab.start(
            "src",
            &[&program, "--op", "mix", "-q", "2", "-n", "3000", &address],
        )?;
        running.push((client, server));
    }
    for (client, server) in running {
        CheckReport::both_clean(&client.succeed(LIMIT)?, &server.succeed(LIMIT)?)?;
    }
    other.down()?;
    lab.ask(&["stop", "same"])?;
    Ok(())
}

/// The test's own promise: what it started goes when it dies, however it dies.
fn a_lab_goes_with_its_test(lab: &TestLab) -> anyhow::Result<()> {
    let name = {
        let other = TestLab::up(lab.tools(), &["src"])?;
        other.name().to_owned()
    };
    let said = lab.refused(&["--lab", &name, "lab", "status"])?;
    ensure!(said.contains("verbatim lab up"), "{said}");
    Ok(())
}
