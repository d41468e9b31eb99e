//! Virtual machines whose disks are volumes: the guest has its pages written there, spoils them, and has them read back, while all of it moves.

use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use verbatim_e2e::{ROLLED_BACK, TestLab, eventually, left_behind, patience};

use super::{Guest, HOSTS, NAME, blockers, program};
use crate::Test;
use crate::faults::Subject;
use crate::volumes::{must, row, volume};

const LIMIT: Duration = Duration::from_secs(60);
const VOLUME: &str = "disk";
/// The guest's driver is of the legacy interface.
const LEGACY: &str = "disable-modern=on";

/// What fails before the guest runs at the destination, at which host.
const SHORT: &[(&str, &str)] = &[("src", "source-commit exit"), ("dst", "destination-restore fail")];

/// The rest.
const LONG: &[(&str, &str)] = &[
    ("src", "source-open fail"),
    ("src", "source-pre-copy exit"),
    ("dst", "destination-prepare-restore fail"),
    ("dst", "destination-prepare-restore exit"),
    ("src", "source-freeze fail"),
    ("src", "source-transfer exit"),
    ("src", "source-restore fail"),
    ("dst", "destination-restore exit"),
    ("dst", "destination-commit fail"),
    ("dst", "destination-commit exit"),
    ("src", "source-transfer fail"),
    // The guest has not been let go.
    ("dst", "destination-committed exit"),
];

/// What strikes after it, at which host: whoever is left brings the move to its end.
const DECIDED: &[(&str, &str)] = &[
    ("dst", "destination-running exit"),
    ("src", "source-committed exit"),
];

pub fn tests() -> Vec<Test> {
    vec![
        Test::new("machines::volumes_move", HOSTS, moves).with_volumes(),
        Test::new("machines::volumes_grow", HOSTS, grow).with_volumes(),
        Test::new("machines::volumes_stay", HOSTS, |lab| {
            stay(lab, SHORT, &DECIDED[..1])
        })
        .with_volumes()
        .injecting_faults(),
        Test::new("machines::volumes_stay_long", HOSTS, |lab| {
            stay(lab, LONG, &DECIDED[1..])
        })
        .with_volumes()
        .injecting_faults()
        .only_on_demand(true),
        Test::new("machines::volumes_daemons_die", HOSTS, daemons_die)
            .with_volumes()
            .injecting_faults()
            .only_on_demand(true),
        Test::new("machines::volumes_refused", HOSTS, refused)
            .with_volumes()
            .only_on_demand(true),
        Test::new("machines::volumes_move_often", HOSTS, often)
            .with_volumes()
            .only_on_demand(true),
    ]
}

fn start(lab: &TestLab) -> anyhow::Result<Guest<'_>> {
    must(lab, "src", &["create", VOLUME, "--size", "16M"])?;
    Guest::start_with(lab, &["--volume", &format!("{VOLUME}:{LEGACY}")], &[])
}

/// What is on the disk of a host.
fn data(lab: &TestLab, host: &str) -> anyhow::Result<Vec<u8>> {
    let path = lab.path(host, &format!("/run/verbatim-state/volumes/{VOLUME}/data"))?;
    std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))
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

/// What is left of an attempt there, if anything is, is no copy that could serve, and nobody's. (Where the source's agent has died, the source's daemon
/// may have begun to fill it again before it heard that the session is over.)
fn is_nothing(lab: &TestLab, host: &str) -> anyhow::Result<()> {
    let mut last = String::new();
    eventually("a copy that is nothing", patience(LIMIT), || {
        let status = volume(lab, host, &["status", VOLUME, "--json"])?;
        if status.code != 0 {
            return Ok(Some(()));
        }
        last = status.stdout;
        let row: Value = serde_json::from_str(&last)?;
        let is_rest = ["incoming", "incomplete"].iter().any(|role| row["role"] == *role);
        Ok((is_rest && row["holder"].is_null() && row["socket"].is_null()).then_some(()))
    })
    .with_context(|| last.clone())
}

/// The guest runs there, with its disk.
fn works(lab: &TestLab, guest: &Guest, host: &str) -> anyhow::Result<()> {
    eventually("an instance that runs", patience(LIMIT), || {
        let row = guest.instance.row().ok();
        Ok(row
            .filter(|row| row.state == "running" && row.host == host)
            .map(drop))
    })?;
    let row = becomes(lab, host, "serving")?;
    ensure!(row["holder"] == NAME && row["socket"].is_string(), "{row}");
    guest.counts_on()
}

/// A word to QEMU.
fn tell(lab: &TestLab, host: &str, command: &'static str) -> anyhow::Result<()> {
    let qmp = lab.path(host, "/run/verbatim/instances/guest/qmp")?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let qmp = verbatim_vm::Qmp::connect(&qmp).await?;
        Ok(qmp.run(command, json!({})).await?)
    })
}

/// There and back, the disk with it; between agents and daemons that are replaced.
fn moves(lab: &TestLab) -> anyhow::Result<()> {
    let guest = start(lab)?;
    let check = lab.ask(&["check", NAME, "--to", "dst"])?.output();
    ensure!(
        check.contains("the volume disk is copied to dst first"),
        "{check}"
    );
    for (here, there) in [("src", "dst"), ("dst", "src")] {
        guest.moves(there)?;
        works(lab, &guest, there)?;
        let left = becomes(lab, here, "moved")?;
        ensure!(left["holder"].is_null() && left["socket"].is_null(), "{left}");
        eventually("a host without leftovers", patience(LIMIT), || {
            Ok(left_behind(lab, here, NAME)?.is_empty().then_some(()))
        })?;
        lab.restart(there, "agent")?;
        // QEMU connects anew.
        lab.restart(there, "volumes")?;
        works(lab, &guest, there)?;
    }
    // One that stands still writes nothing: both copies are the same, and none of it is empty.
    tell(lab, "src", "stop")?;
    guest.stands_still()?;
    guest.moves("dst")?;
    guest.stands_still()?;
    becomes(lab, "src", "moved")?;
    let (left, moved) = (data(lab, "src")?, data(lab, "dst")?);
    ensure!(left == moved, "the copies differ");
    let written = moved
        .chunks(4096)
        .filter(|page| page.iter().any(|byte| *byte != 0));
    ensure!(written.count() > 2000, "the guest has not written all its pages");
    tell(lab, "dst", "cont")?;
    works(lab, &guest, "dst")?;
    lab.ask(&["stop", NAME])?;
    let row = row(lab, "dst", VOLUME)?;
    ensure!(row["holder"].is_null() && row["role"] == "serving", "{row}");
    ensure!(left_behind(lab, "dst", NAME)?.is_empty());
    Ok(())
}

/// How large QEMU takes the guest's disk for.
fn size(lab: &TestLab, host: &str) -> anyhow::Result<u64> {
    let qmp = lab.path(host, "/run/verbatim/instances/guest/qmp")?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let nodes: Vec<Value> = runtime.block_on(async {
        let qmp = verbatim_vm::Qmp::connect(&qmp).await?;
        qmp.ask("query-named-block-nodes", json!({})).await
    })?;
    let mut nodes = nodes.iter().filter(|node| node["node-name"] == "verbatim-disk0");
    let node = nodes.next().context("there is no such disk")?;
    node["image"]["virtual-size"].as_u64().context("it has no size")
}

/// The disk grows under a guest that works with it: at each place, between two agents, and just before a move.
fn grow(lab: &TestLab) -> anyhow::Result<()> {
    let guest = start(lab)?;
    let grows = |host: &str, mib: u64| {
        let asked = format!("{mib}M");
        eventually(
            "a volume that is idle for a moment, and grows",
            patience(LIMIT),
            || {
                let resized = volume(lab, host, &["resize", VOLUME, "--size", &asked])?;
                Ok((resized.code == 0).then_some(()))
            },
        )
    };
    let knows = |host: &str, mib: u64| {
        let mut last = 0;
        eventually("a QEMU that knows its disk's size", patience(LIMIT), || {
            last = size(lab, host)?;
            Ok((last == mib << 20).then_some(()))
        })
        .with_context(|| format!("{last} bytes"))?;
        guest.counts_on()
    };
    grows("src", 32)?;
    knows("src", 32)?;
    lab.lab().kill("src", "agent")?;
    grows("src", 48)?;
    lab.lab().start("src", "agent")?;
    knows("src", 48)?;
    grows("src", 64)?;
    guest.moves("dst")?;
    works(lab, &guest, "dst")?;
    knows("dst", 64)?;
    grows("dst", 80)?;
    knows("dst", 80)?;
    guest.moves("src")?;
    works(lab, &guest, "src")
}

/// Many times in a row, by both transports of memory.
fn often(lab: &TestLab) -> anyhow::Result<()> {
    let guest = start(lab)?;
    for number in 0..20 {
        let (there, transport) = [("dst", "tls"), ("src", "rdma")][number % 2];
        let migration = guest
            .instance
            .migrate_with(there, &["--memory-transport", transport])?;
        migration.must_be_committed()?;
        eprintln!(
            "to {there}: {:.1} ms of {:.0}",
            migration.service_blackout_ms, migration.total_ms
        );
        works(lab, &guest, there)?;
    }
    Ok(())
}

/// Moves that come to nothing, and such that an agent does not see to their end.
fn stay(lab: &TestLab, undone: &[(&str, &str)], decided: &[(&str, &str)]) -> anyhow::Result<()> {
    let guest = start(lab)?;
    let attempt = |host: &str, order: &str, to: &str| {
        lab.order_faults(host, &format!("{order}\n"))?;
        let migrate = lab.verbatim(&["migrate", NAME, "--to", to, "--json"])?;
        if order.ends_with("exit") {
            lab.ended(host, "agent")?;
            lab.order_faults(host, "")?;
            lab.lab().start(host, "agent")?;
        }
        // What it says depends on who has died.
        let ended = migrate.wait(patience(LIMIT))?;
        lab.order_faults(host, "")?;
        anyhow::Ok(ended)
    };
    for (host, order) in undone {
        let case = || {
            let ended = attempt(host, order, "dst")?;
            ensure!(ended.code == 1, "{}", ended.output());
            works(lab, &guest, "src")?;
            eventually("a destination without leftovers", patience(LIMIT), || {
                Ok(left_behind(lab, "dst", NAME)?.is_empty().then_some(()))
            })?;
            is_nothing(lab, "dst")
        };
        case().with_context(|| format!("{host}: {order}"))?;
    }
    for (host, order) in decided {
        let case = || {
            attempt(host, order, "dst")?;
            works(lab, &guest, "dst")?;
            becomes(lab, "src", "moved")?;
            guest.moves("src")?;
            works(lab, &guest, "src")
        };
        case().with_context(|| format!("{host}: {order}"))?;
    }
    guest.moves("dst")?;
    works(lab, &guest, "dst")
}

/// Volume daemons that are killed: while the guest runs, and while a move is decided.
fn daemons_die(lab: &TestLab) -> anyhow::Result<()> {
    let guest = start(lab)?;
    // The guest waits for the next one.
    lab.lab().kill("src", "volumes")?;
    eventually("a guest that waits for its disk", patience(LIMIT), || {
        let before = guest.count()?;
        std::thread::sleep(Duration::from_millis(100));
        Ok((guest.count()? == before).then_some(()))
    })?;
    lab.lab().start("src", "volumes")?;
    works(lab, &guest, "src")?;

    let waiting_at = |point: &str| {
        lab.order_faults("dst", &format!("{point} hang\n"))?;
        let reached = lab.path("dst", "/run/verbatim/faults.reached")?;
        let _ = std::fs::remove_file(&reached);
        let migrate = lab.verbatim(&["migrate", NAME, "--to", "dst", "--json"])?;
        eventually(point, patience(LIMIT), || Ok(reached.exists().then_some(())))?;
        anyhow::Ok(migrate)
    };
    // While the memory is sent: the source's, whose copying ends with it.
    lab.order_faults("src", "source-pre-setup hang\n")?;
    let reached = lab.path("src", "/run/verbatim/faults.reached")?;
    let _ = std::fs::remove_file(&reached);
    let migrate = lab.verbatim(&["migrate", NAME, "--to", "dst", "--json"])?;
    eventually("the point", patience(LIMIT), || {
        Ok(reached.exists().then_some(()))
    })?;
    lab.restart("src", "volumes")?;
    lab.order_faults("src", "")?;
    let ended = migrate.wait(patience(LIMIT))?;
    ensure!(
        ended.code == 1 && ended.output().contains("volume disk"),
        "{}",
        ended.output()
    );
    works(lab, &guest, "src")?;

    // Both, before the decision: what each has written down is what it comes back to, and the move goes on.
    let migrate = waiting_at("destination-commit")?;
    for (host, role) in [("src", "held"), ("dst", "ready")] {
        becomes(lab, host, role)?;
        lab.restart(host, "volumes")?;
        let row = becomes(lab, host, role)?;
        ensure!(row["holder"] == NAME, "{host}: {row}");
    }
    lab.order_faults("dst", "")?;
    let ended = migrate.wait(patience(LIMIT))?;
    ensure!(ended.code == 0, "{}", ended.output());
    works(lab, &guest, "dst")?;
    becomes(lab, "src", "moved")?;
    guest.moves("src")?;

    // The destination's, before the decision, and it does not come back: nothing is decided for it.
    let migrate = waiting_at("destination-commit")?;
    lab.lab().kill("dst", "volumes")?;
    lab.order_faults("dst", "")?;
    let ended = migrate.wait(patience(LIMIT))?;
    ensure!(ended.code == 1, "{}", ended.output());
    works(lab, &guest, "src")?;
    lab.lab().start("dst", "volumes")?;
    becomes(lab, "dst", "incomplete")?;

    // Both, after it.
    let migrate = waiting_at("destination-committed")?;
    for host in ["src", "dst"] {
        lab.restart(host, "volumes")?;
    }
    lab.order_faults("dst", "")?;
    let ended = migrate.wait(patience(LIMIT))?;
    ensure!(ended.code == 0, "{}", ended.output());
    works(lab, &guest, "dst")?;
    becomes(lab, "src", "moved").map(drop)
}

/// What cannot be is refused with the reason.
fn refused(lab: &TestLab) -> anyhow::Result<()> {
    let run = |wanted: &str| {
        lab.refused(&[
            "run", "--host", "src", "--vm", NAME, "--volume", wanted, "--", "-M", "pc",
        ])
    };
    must(lab, "src", &["create", VOLUME, "--size", "16M"])?;
    must(lab, "src", &["create", "log", "--size", "16M"])?;
    must(lab, "src", &["attach", "log"])?;
    for (wanted, why) in [
        ("disk:/srv", "for the guest to say"),
        ("nothing", "there is no volume nothing"),
        ("log", "attached for other clients"),
        ("disk:nosuch=1", "nosuch"),
    ] {
        let said = run(wanted)?;
        ensure!(said.contains(why), "{wanted}: {said}");
        let behind = left_behind(lab, "src", NAME)?;
        ensure!(behind.is_empty(), "{wanted}: {behind:?}");
    }
    let guest = Guest::start_with(lab, &["--volume", &format!("{VOLUME}:{LEGACY}")], &[])?;
    let taken = lab.refused(&[
        "run",
        "--host",
        "src",
        "--name",
        "other",
        "--volume",
        "disk:/srv",
        "--",
        "sleep",
        "1000",
    ])?;
    ensure!(taken.contains("in use by the instance guest"), "{taken}");
    let detach = volume(lab, "src", &["detach", VOLUME])?;
    ensure!(
        detach.code == 1 && detach.stderr.contains("in use by the instance guest"),
        "{}",
        detach.output()
    );

    // At the destination there is another volume of that name; then no daemon.
    must(lab, "dst", &["create", VOLUME, "--size", "16M"])?;
    let migration = guest.instance.migrate("dst")?;
    let why = migration.error.unwrap_or_default();
    ensure!(
        migration.outcome == ROLLED_BACK && why.contains("another volume disk"),
        "{why}"
    );
    lab.lab().kill("dst", "volumes")?;
    let said = blockers(lab)?;
    ensure!(said.contains("no volume daemon answers there"), "{said}");
    let migration = guest.instance.migrate("dst")?;
    ensure!(migration.outcome == ROLLED_BACK, "{migration:?}");
    works(lab, &guest, "src")?;
    lab.ask(&["stop", NAME])?;
    lab.lab().start("dst", "volumes")?;

    // By the socket for everybody, which is behind the same path at the destination, too.
    let mut guest = Guest::start_with(lab, &[], &by_hand())?;
    let said = blockers(lab)?;
    ensure!(said.contains("--vm guest --volume log"), "{said}");
    let migration = guest.instance.migrate("dst")?;
    let why = migration.error.unwrap_or_default();
    ensure!(
        migration.outcome == ROLLED_BACK && why.contains("--volume log"),
        "{why}"
    );
    guest.counts_on()?;
    lab.ask(&["stop", NAME])?;

    // The same of one that somebody else has started.
    let program = program()?;
    let program = program.to_str().context("a path in UTF-8")?;
    let own = [
        "qemu-system-x86_64",
        "-M",
        "pc,memory-backend=mem",
        "-object",
        "memory-backend-file,id=mem,size=16M,mem-path=/run/guest.ram,share=on",
        "-m",
        "16",
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-qmp",
        "unix:/run/guest.qmp,server=on,wait=off",
        "-serial",
        "stdio",
        "-kernel",
        program,
    ];
    let qemu = lab.start_plain("src", &[&own[..], &by_hand()].concat())?;
    eventually("a guest that counts", LIMIT, || {
        Ok(qemu.stdout()?.contains("tick 3\n").then_some(()))
    })?;
    lab.ask(&["attach", NAME, "--qmp", "/run/guest.qmp", "--host", "src"])?;
    let said = blockers(lab)?;
    ensure!(said.contains("--vm guest --volume log"), "{said}");
    guest.instance = lab.known(NAME);
    let migration = guest.instance.migrate("dst")?;
    ensure!(migration.outcome == ROLLED_BACK, "{migration:?}");
    lab.ask(&["stop", NAME])?;
    Ok(())
}

/// A disk that is a volume by the means of whoever starts QEMU.
fn by_hand() -> [&'static str; 4] {
    [
        "-drive",
        "file=nbd+unix:///log?socket=/run/verbatim/volumes/log.sock,format=raw,if=none,id=disk",
        "-device",
        "virtio-blk-pci,drive=disk,disable-modern=on",
    ]
}
