//! What `testbed` itself promises, and that the cases test what they say.

use crate::site::{End, Site};
use anyhow::ensure;
use std::time::Duration;
use verbatim_e2e::eventually;
use verbatim_testbed::{Command, Network, Vm, VmConfig};

const LIMIT: Duration = Duration::from_secs(60);

/// A name, and what is done under it.
pub type Test = (&'static str, fn(&Site) -> anyhow::Result<()>);

/// All of them.
pub const ALL: &[Test] = &[
    (
        "testbed::status_and_output_are_the_commands_own",
        status_and_output,
    ),
    ("testbed::a_command_ends_at_its_limit", limit),
    ("testbed::a_command_ends_with_who_started_it", abandoned),
    ("testbed::much_output_arrives_whole", much_output),
    ("testbed::the_hosts_files_are_read_only", read_only),
    ("testbed::files_are_copied_out", copied_out),
    ("testbed::two_machines_share_a_bridge", two_machines),
    ("guest-over-rxe::the_library_is_in_between", library_in_between),
];

fn status_and_output(site: &Site) -> anyhow::Result<()> {
    let script = "echo out; echo err >&2; exit 7";
    let finished = site.start(End::Rxe, &["sh", "-c", script])?.wait(LIMIT)?;
    let told = (finished.code, finished.stdout.as_str(), finished.stderr.as_str());
    ensure!(told == (7, "out\n", "err\n"), "{told:?}");
    let killed = site.start(End::Rxe, &["sh", "-c", "kill -9 $$"])?.wait(LIMIT)?;
    ensure!(killed.code == 137, "status {}", killed.code);
    let missing = site.start(End::Rxe, &["no-such-program"])?.wait(LIMIT)?;
    ensure!(
        missing.code == 125 && missing.stderr.contains("no-such-program"),
        "status {}{}",
        missing.code,
        missing.output()
    );
    Ok(())
}

/// Whether a process with this argument runs in the machine; `pattern` is one that does not match itself.
fn runs(site: &Site, pattern: &str) -> anyhow::Result<bool> {
    // The arguments of a process end in zero bytes: proc_pid_cmdline(5).
    let script = format!("grep -lzx -e '{pattern}' /proc/[0-9]*/cmdline 2>/dev/null; true");
    let ended = site.vm().run(&Command::new(["sh", "-c", &script]), LIMIT)?;
    Ok(!ended.stdout.is_empty())
}

fn limit(site: &Site) -> anyhow::Result<()> {
    let finished = site
        .tool(&["exec", site.name(), "--limit", "1", "--", "sleep", "90001"])?
        .wait(LIMIT)?;
    ensure!(
        finished.code == 125 && finished.stderr.contains("did not end within"),
        "status {}{}",
        finished.code,
        finished.output()
    );
    eventually("the end of the command", LIMIT, || {
        Ok((!runs(site, "9000[1]")?).then_some(()))
    })
}

fn abandoned(site: &Site) -> anyhow::Result<()> {
    let running = site.start(End::Rxe, &["sleep", "90002"])?;
    eventually("the start of the command", LIMIT, || {
        Ok(runs(site, "9000[2]")?.then_some(()))
    })?;
    drop(running);
    eventually("the end of the command", LIMIT, || {
        Ok((!runs(site, "9000[2]")?).then_some(()))
    })
}

fn much_output(site: &Site) -> anyhow::Result<()> {
    let ended = site.vm().run(&Command::new(["seq", "300000"]), LIMIT)?;
    let expected: String = (1..=300_000).map(|number| format!("{number}\n")).collect();
    ensure!(
        ended.code == 0 && ended.stdout == expected.as_bytes(),
        "{} bytes of {}",
        ended.stdout.len(),
        expected.len()
    );
    Ok(())
}

fn read_only(site: &Site) -> anyhow::Result<()> {
    let path = format!("/etc/testbed-{}", std::process::id());
    let ended = site.vm().run(&Command::new(["touch", &path]), LIMIT)?;
    ensure!(ended.code == 0, "a machine can write to its own root");
    ensure!(
        !std::path::Path::new(&path).exists(),
        "{path} was made on the host"
    );
    Ok(())
}

fn copied_out(site: &Site) -> anyhow::Result<()> {
    let script =
        "mkdir -p /run/copied/sub && printf data >/run/copied/sub/file && ln -s file /run/copied/sub/link";
    ensure!(site.vm().run(&Command::new(["sh", "-c", script]), LIMIT)?.code == 0);
    let to = tempfile::tempdir()?;
    let folder = to.path().display().to_string();
    let from = format!("{}:/run/copied", site.name());
    site.tool(&["copy", &from, &folder])?.succeed(LIMIT)?;
    let sub = to.path().join("copied/sub");
    ensure!(std::fs::read(sub.join("file"))? == b"data");
    ensure!(std::fs::read_link(sub.join("link"))?.as_os_str() == "file");
    Ok(())
}

fn two_machines(site: &Site) -> anyhow::Result<()> {
    let config = VmConfig {
        address: Some("10.77.0.101/16".parse().map_err(anyhow::Error::msg)?),
        memory_mib: 1024,
        ..VmConfig::new(format!("{}-b", site.name()))
    };
    let other = Vm::boot(&config, &Network::of_process(site.vm().record().process.pid)?)?;
    for address in [site.address(End::Rxe)?, site.address(End::Ours)?] {
        let ended = other.run(&Command::new(["ping", "-c", "1", "-W", "10", &address]), LIMIT)?;
        ensure!(ended.code == 0, "no answer from {address}");
    }
    Ok(())
}

/// The cases of the guest library would pass without it, too.
fn library_in_between(site: &Site) -> anyhow::Result<()> {
    for (backend, seen) in [("rdma-core", true), ("soft", false)] {
        let finished = site.with_library(backend, &["ibv_devices"])?.wait(LIMIT)?;
        ensure!(
            finished.stdout.contains("rxe0") == seen,
            "with the backend {backend}:{}",
            finished.output()
        );
    }
    Ok(())
}
