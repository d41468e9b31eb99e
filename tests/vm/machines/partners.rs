//! A guest that has the kernel's rxe on its network, moved while a third host pings it and talks RDMA with it from our software RNIC.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, ensure};
use verbatim_e2e::{Instance, TestLab, Tools, eventually, left_behind};
use verbatim_testbed::{Contents, Image, Kernel};

use crate::{LIMIT, NAME, boot, moves, program};

const HOSTS: &[&str] = &["src", "dst", "peer"];
const ADDRESS: &str = "10.77.1.50";
/// Between two moves: what was cut off is sent again within seconds.
const BETWEEN: Duration = Duration::from_secs(2);
/// How long a move may take, with its pause behind it.
const EACH: Duration = Duration::from_secs(8);
/// What the partner counts, in seconds between two of its questions.
const ASKED_EVERY: &str = "0.05";

/// What the guest runs, beside its first process.
const PROGRAMS: &[&str] = &["mount", "insmod", "ip", "rdma", "grep", "sleep"];
/// What rxe needs that no dependency names: its checksum.
const MODULES: &[&str] = &["virtio_net", "crc32_generic", "ib_uverbs", "rdma_rxe"];

fn image(vcheck: &Path) -> anyhow::Result<Image> {
    let mut programs = vec![("sh", program("dash")?), ("vcheck", vcheck.to_owned())];
    for name in PROGRAMS {
        programs.push((*name, program(name)?));
    }
    let providers = std::fs::read_dir("/usr/lib")?.flatten();
    let provider = providers
        .map(|entry| entry.path().join("libibverbs/librxe-rdmav34.so"))
        .find(|path| path.is_file())
        .context("rdma-core's provider for rxe is not installed (ibverbs-providers)")?;
    let files = [provider.as_path(), Path::new("/etc/libibverbs.d/rxe.driver")];
    let contents = Contents {
        init: include_bytes!("partners.sh"),
        programs: &programs,
        files: &files,
        modules: MODULES,
    };
    Ok(Image::holding(&Kernel::find()?, &contents)?)
}

/// Its network.
fn start<'a>(lab: &'a TestLab, image: &Image) -> anyhow::Result<Instance<'a>> {
    let own = ["-netdev", "tap,id=n", "-device", "virtio-net-pci,netdev=n"];
    boot(
        lab,
        image,
        &["--address", &format!("{ADDRESS}/16")],
        &format!("guest={ADDRESS}/16"),
        &own,
    )
}

/// Both are whole afterwards.
pub fn run() -> anyhow::Result<()> {
    let moves = moves()?;
    let tools = Tools::find()?;
    let image = image(&tools.vcheck)?;
    let lab = TestLab::up(&tools, HOSTS)?;
    let moved = talk_and_move(&lab, &image, moves).with_context(|| lab.logs());
    lab.down()?;
    moved
}

fn talk_and_move(lab: &TestLab, image: &Image, moves: u32) -> anyhow::Result<()> {
    let guest = start(lab, image)?;
    let seconds = (moves * EACH.as_secs() as u32).to_string();
    let vcheck = lab.tools().vcheck.display().to_string();
    let load = "--stall-timeout 60 --ack-timeout 19 --op mix -q 4 -s 16384 --random-size --bidirectional -D";
    let check: Vec<&str> = [&vcheck[..]]
        .into_iter()
        .chain(load.split(' '))
        .chain([&seconds[..], ADDRESS])
        .collect();
    let check = lab.start("peer", &check)?;
    let ping = lab.start_plain(
        "peer",
        &["ping", "-q", "-i", ASKED_EVERY, "-w", &seconds, ADDRESS],
    )?;
    for number in 0..moves {
        std::thread::sleep(BETWEEN);
        let (to, left) = match number % 2 {
            0 => ("dst", "src"),
            _ => ("src", "dst"),
        };
        let migration = guest.moves(to)?;
        eprintln!(
            "{to}: {:.1} ms of {:.0}",
            migration.service_blackout_ms, migration.total_ms
        );
        let behind = left_behind(lab, left, NAME)?;
        ensure!(behind.is_empty(), "left on {left}: {behind:?}");
    }
    let limit = EACH * moves + LIMIT;
    let told = check
        .succeed(limit)
        .with_context(|| guest.output().unwrap_or_default())?;
    let report: serde_json::Value = serde_json::from_str(&told.stdout)?;
    ensure!(report["verdict"] == "ok", "{report}");
    let whole = report["posted"] == report["completed"] && report["posted"].as_u64() > Some(0);
    ensure!(whole, "{report}");
    eprintln!("{report}");
    let told = ping.succeed(limit)?.stdout;
    eprintln!("{told}");
    // A packet that was on its way when the guest was stopped may be lost, as on any network.
    let lost = told.split_whitespace().find_map(|word| word.strip_suffix('%'));
    let lost: f64 = lost.context("ping does not tell the loss")?.parse()?;
    ensure!(lost < 5.0, "{told}");
    eventually("the guest's own check", LIMIT, || {
        Ok(guest
            .output()?
            .contains("the check has ended with 0")
            .then_some(()))
    })
    .with_context(|| guest.output().unwrap_or_default())
}
