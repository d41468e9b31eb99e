//! Memory that a host's virtual machines were promised: it is there when a guest touches it, and nobody is promised it twice.

use std::os::unix::fs::MetadataExt;

use anyhow::{Context, ensure};
use verbatim_e2e::{Instance, TestLab, eventually, left_behind};

use super::{Guest, HOSTS, LIMIT, NAME};
use crate::Test;

/// All of them.
pub fn tests() -> Vec<Test> {
    vec![
        Test::new("machines::promised", HOSTS, promised),
        Test::new("machines::full_runtime_folder", HOSTS, full_runtime_folder),
        Test::new("machines::preallocated", HOSTS, preallocated),
        Test::new("machines::random_numbers", HOSTS, random_numbers),
    ]
}

/// Three fifths of what this machine may promise, in MiB: two do not fit. Nothing touches it: a BIOS finds nothing to start.
fn most() -> anyhow::Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib: u64 = total
        .and_then(|value| value.trim().strip_suffix("kB")?.trim().parse().ok())
        .context("MemTotal")?;
    Ok((kib >> 10) * 15 / 16 * 3 / 5)
}

fn arguments(mebibytes: u64) -> Vec<String> {
    let size = format!("{mebibytes}M");
    let words = [
        "-M",
        "q35",
        "-accel",
        "tcg",
        "-m",
        &size,
        "-nodefaults",
        "-no-user-config",
    ];
    words.map(str::to_owned).into()
}

fn idle<'a>(lab: &'a TestLab, host: &str, name: &str, mebibytes: u64) -> anyhow::Result<Instance<'a>> {
    let arguments = arguments(mebibytes);
    lab.machine(
        host,
        name,
        &arguments.iter().map(String::as_str).collect::<Vec<_>>(),
    )
}

fn start(lab: &TestLab, name: &str, mebibytes: u64) -> anyhow::Result<verbatim_e2e::Running> {
    let arguments = arguments(mebibytes);
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    lab.verbatim(&[&["run", "--host", "src", "--vm", name, "--"], &words[..]].concat())
}

fn promised(lab: &TestLab) -> anyhow::Result<()> {
    const WHY: &str = "may be promised to instances";
    let most = most()?;
    // More than there is.
    let refused = start(lab, "huge", 8 * most)?.wait(LIMIT)?;
    ensure!(
        refused.code == 1 && refused.stderr.contains(WHY),
        "{}",
        refused.output()
    );
    ensure!(left_behind(lab, "src", "huge")?.is_empty());
    // Of two at once that do not fit together one is let in.
    let both = [start(lab, "one", most)?, start(lab, "two", most)?];
    let ended = both
        .into_iter()
        .map(|running| running.wait(LIMIT))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let (started, refused): (Vec<_>, Vec<_>) = ended.iter().partition(|finished| finished.code == 0);
    ensure!(started.len() == 1 && refused.len() == 1, "{ended:?}");
    ensure!(refused[0].stderr.contains(WHY), "{}", refused[0].output());
    let name = if started[0].what.contains(" one ") {
        "one"
    } else {
        "two"
    };
    let here = lab.known(name);
    // Not a page of it is there.
    let ram = lab
        .path("src", &format!("/run/verbatim/instances/{name}/mem/ram"))?
        .metadata()?;
    ensure!(
        ram.len() == most << 20 && ram.blocks() * 512 < 256 << 20,
        "{ram:?}"
    );
    // What is promised outlives the agent that has promised it.
    lab.restart("src", "agent")?;
    let refused = start(lab, "three", most)?.wait(LIMIT)?;
    ensure!(
        refused.code == 1 && refused.stderr.contains(WHY),
        "{}",
        refused.output()
    );

    // Nor does it come to a host that has promised too much already.
    let there = idle(lab, "dst", "there", most)?;
    let said = lab.verbatim(&["check", name, "--to", "dst"])?.wait(LIMIT)?;
    ensure!(said.code == 1 && said.stdout.contains(WHY), "{}", said.output());
    let migration = here.migrate("dst")?;
    migration.must_be_rolled_back(&[WHY])?;
    ensure!(migration.bytes.pre_copy == 0, "something was sent: {migration:?}");
    ensure!(here.row()?.state == "running" && there.row()?.state == "running");

    // What has ended was promised nothing.
    lab.ask(&["stop", "there"])?;
    idle(lab, "dst", "again", most)?;
    for name in [name, "again"] {
        lab.ask(&["stop", name])?;
    }
    Ok(())
}

fn run_folder(lab: &TestLab, host: &str, command: &str) -> anyhow::Result<()> {
    lab.start_plain(host, &["sh", "-c", command])?.succeed(LIMIT)?;
    Ok(())
}

/// The guest's RAM does not lie there; and what a move could not write there is in no later move's way.
fn full_runtime_folder(lab: &TestLab) -> anyhow::Result<()> {
    let guest = Guest::start(lab, &[])?;
    run_folder(
        lab,
        "src",
        "mount -o remount,size=$(( $(df -k --output=used /run | tail -n 1) + 4096 ))k /run; \
         cat /dev/zero > /run/filler 2>/dev/null; df -k --output=avail /run | tail -n 1 | grep -qx ' *0'",
    )?;
    guest.counts_on()?;
    let migration = guest.instance.migrate("dst")?;
    migration.must_be_rolled_back(&["No space left"])?;
    guest.counts_on()?;
    run_folder(lab, "src", "rm /run/filler; mount -o remount,size=50% /run")?;
    // As it was left by agents that did not write it in one piece.
    std::fs::write(lab.path("src", &format!("/run/verbatim/criu/{NAME}/ran"))?, "")?;
    for to in ["dst", "src"] {
        guest.instance.migrate(to)?.must_be_committed()?;
        guest.counts_on()?;
    }
    Ok(())
}

fn preallocated(lab: &TestLab) -> anyhow::Result<()> {
    let guest = Guest::start_with(lab, &["--prealloc"], &[])?;
    for to in ["src", "dst"] {
        if to == "dst" {
            guest.instance.migrate(to)?.must_be_committed()?;
            guest.counts_on()?;
        }
        let ram = lab.path(to, &format!("/run/verbatim/instances/{NAME}/mem/ram"))?;
        let metadata = ram.metadata()?;
        ensure!(metadata.blocks() * 512 == metadata.len(), "{to}: {metadata:?}");
    }
    // What has ended by itself takes no memory, though nobody has removed it.
    guest.signal(lab, "dst", "KILL")?;
    let ram = lab.path("dst", &format!("/run/verbatim/instances/{NAME}/mem/ram"))?;
    eventually("RAM that is gone", LIMIT, || Ok((!ram.exists()).then_some(())))
}

/// A container has that device of its own.
fn random_numbers(lab: &TestLab) -> anyhow::Result<()> {
    let object = "rng-random,id=random,filename=/dev/urandom";
    let guest = Guest::start(lab, &["-object", object, "-device", "virtio-rng-pci,rng=random"])?;
    lab.ask(&["check", NAME, "--to", "dst"])?;
    guest.instance.migrate("dst")?.must_be_committed()?;
    guest.counts_on()
}
