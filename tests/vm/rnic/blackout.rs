//! The blackout of a program with rxe beside what CRIU alone takes in the same machine for a program without RDMA, as JSON.
//!
//! `make rnic-bench`. By turns: CRIU alone, and runc with CRIU, on the first host, then a move of the server to the last host and back. An emulated
//! processor's milliseconds say nothing; the ratio does. Then programs with more queue pairs and more registered memory, there with what was made
//! ahead, and back without: a limit on objects, which it never reaches, has agents leave all to the process.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, ensure};
use serde::Deserialize;
use verbatim_container::Criu;

use crate::built;
use crate::machines::{HOSTS, Machines};
use crate::run::{CHECK, Check, MOVE_LIMIT, flows, gone_on_with};
use crate::trial::limit;

/// Whoever sets this to 0 wants no programs of [`SIZES`].
const SIZES_VARIABLE: &str = "VERBATIM_RNIC_SIZES";

/// How often, unless `VERBATIM_RNIC_TURNS` says so.
const TURNS: usize = 7;

#[derive(Debug, Deserialize)]
struct Report {
    service_blackout_ms: f64,
    communication_blackout_ms: f64,
    phases_ms: BTreeMap<String, f64>,
}

/// Programs whose contexts are large in one way or the other, by what `vcheck` is told.
const SIZES: [(&str, &str); 5] = [
    ("1 queue pair", "--op write -q 1 --depth 8 --nap 5"),
    ("16 queue pairs", "--op write -q 16 --depth 8 --nap 20"),
    ("64 queue pairs", "--op write -q 64 --depth 8 --nap 50"),
    ("256 queue pairs", "--op write -q 256 --depth 8 --nap 200"),
    (
        "2 queue pairs, 128 MiB",
        "--op write -q 2 -s 8388608 --depth 4 --nap 100",
    ),
];

/// More objects than any program here has.
const PLENTY: &str = "1000000";

/// What moves took of one kind.
#[derive(Debug, Default)]
struct Moves {
    service: Vec<f64>,
    communication: Vec<f64>,
    phases: BTreeMap<String, Vec<f64>>,
}

impl Moves {
    fn add(&mut self, report: Report) {
        self.service.push(report.service_blackout_ms);
        self.communication.push(report.communication_blackout_ms);
        for (phase, ms) in report.phases_ms {
            self.phases.entry(phase).or_default().push(ms);
        }
    }

    fn medians(&mut self) -> serde_json::Value {
        let phases = self.phases.iter_mut();
        let phases: BTreeMap<_, _> = phases.map(|(phase, ms)| (phase.as_str(), median(ms))).collect();
        serde_json::json!({
            "phases_ms": phases,
            "service_blackout_ms": median(&mut self.service),
            "communication_blackout_ms": median(&mut self.communication),
            "moves": self.service.len(),
        })
    }
}

fn migrate(machines: &Machines, from: &str, to: &str) -> anyhow::Result<Report> {
    let said = machines.verbatim(from, &["migrate", "server", "--to", to, "--json"], MOVE_LIMIT)?;
    serde_json::from_str(&said).with_context(|| said.clone())
}

/// Prints it.
pub fn tell() -> anyhow::Result<()> {
    let turns = match std::env::var("VERBATIM_RNIC_TURNS") {
        Ok(number) => number.parse().context("VERBATIM_RNIC_TURNS is no number")?,
        Err(_) => TURNS,
    };
    let machines = Machines::up()?;
    let [here, partner, there] = HOSTS;
    let (mut alone, mut contained, mut moves) = (Vec::new(), Vec::new(), Moves::default());
    for turn in 1..=turns {
        eprintln!("turn {turn} of {turns}");
        alone.push(stood_still(&machines, here, CRIU_ALONE)?);
        contained.push(stood_still(&machines, here, RUNC_ALONE)?);
        machines.clear()?;
        let check = Check::start(&machines, here, partner, CHECK)?;
        for (from, to) in [(here, there), (there, here)] {
            moves.add(migrate(&machines, from, to)?);
            flows(&machines, partner)?;
        }
        check.end(&machines)?;
    }
    let wanted = match std::env::var(SIZES_VARIABLE).as_deref() {
        Ok("0") => &[][..],
        _ => &SIZES,
    };
    let sizes = wanted
        .iter()
        .map(|(name, options)| {
            let told = ahead_and_not(&machines, options, turns).with_context(|| (*name).to_owned())?;
            Ok(((*name).to_owned(), told))
        })
        .collect::<anyhow::Result<serde_json::Map<_, _>>>()?;
    let mut told = moves.medians();
    let service = median(&mut moves.service);
    for (peer, ms) in [("criu_alone", &mut alone), ("runc_alone", &mut contained)] {
        let ms = median(ms);
        told[format!("{peer}_ms")] = ms.into();
        told[format!("service_to_{peer}")] = (service / ms).into();
    }
    told["sizes"] = sizes.into();
    println!("{}", serde_json::to_string_pretty(&told)?);
    Ok(())
}

/// Moves of the same program with and without what can be made ahead.
fn ahead_and_not(machines: &Machines, options: &str, turns: usize) -> anyhow::Result<serde_json::Value> {
    let [here, partner, there] = HOSTS;
    let (mut ahead, mut not) = (Moves::default(), Moves::default());
    machines.clear()?;
    limit(machines, here, PLENTY)?;
    let check = Check::start(machines, here, partner, options)?;
    for turn in 1..=turns {
        eprintln!("{options}: turn {turn} of {turns}");
        let before = (gone_on_with(machines, there)?, gone_on_with(machines, here)?);
        ahead.add(migrate(machines, here, there)?);
        flows(machines, partner)?;
        not.add(migrate(machines, there, here)?);
        flows(machines, partner)?;
        let after = (gone_on_with(machines, there)?, gone_on_with(machines, here)?);
        ensure!(
            after == (before.0 + 1, before.1),
            "it was to go on with what was made ahead once, there: {before:?}, then {after:?}"
        );
    }
    check.end(machines)?;
    limit(machines, here, "max")?;
    Ok(serde_json::json!({ "made_ahead": ahead.medians(), "made_after": not.medians() }))
}

/// The median of some.
fn median(of: &mut [f64]) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

/// A program without RDMA that is dumped and restored by CRIU, as it is.
const CRIU_ALONE: &str = r#"
setsid $memory 0 </dev/null >said 2>&1 & pid=$!
ready
criu dump --tree $pid --images-dir images -o dump.log -v1 >&2 || { cat images/dump.log >&2; exit 1; }
# Its number is free again for the restore when it was reaped, by this shell.
wait $pid || true
down
criu restore --restore-detached --images-dir images -o restore.log -v1 >&2 || { cat images/restore.log >&2; exit 1; }
gap
kill -KILL $pid
"#;

/// The same program in a container, which has what `runc spec` gives one, by runc and CRIU.
const RUNC_ALONE: &str = r#"
mkdir -p rootfs/usr rootfs/proc rootfs/dev rootfs/sys
ln -s usr/bin usr/lib usr/lib64 rootfs
cp $memory rootfs/memory
runc spec
python3 - <<'END'
import json
with open("config.json") as file:
    spec = json.load(file)
spec["root"]["readonly"] = False
spec["process"]["terminal"] = False
spec["process"]["args"] = ["/bin/sh", "-c", "exec /memory 0 </dev/null >/said 2>&1"]
spec["mounts"].append({"destination": "/usr", "source": "/usr", "options": ["bind", "ro"]})
with open("config.json", "w") as file:
    json.dump(spec, file)
END
touch rootfs/said; ln -s rootfs/said said
trap 'runc delete --force alone >/dev/null 2>&1' EXIT
runc run --detach alone </dev/null >out 2>&1 || { cat out >&2; exit 1; }
ready
runc checkpoint --image-path images --work-path work alone >&2 || { cat work/dump.log >&2; exit 1; }
down
runc restore --detach --image-path images --work-path work alone </dev/null >out 2>&1 || { cat out work/restore.log >&2; exit 1; }
gap
"#;

/// For how long a program without RDMA says that it stood still, in ms, while `script` writes it down and brings it back.
fn stood_still(machines: &Machines, host: &str, script: &str) -> anyhow::Result<f64> {
    let criu = Criu::find()?;
    let folder = criu.path().parent().context("CRIU lies in a folder")?.display();
    let memory = built("../bench-programs/memory")?;
    let memory = memory.display();
    let script = format!(
        "set -e; rm -rf /run/alone; mkdir -p /run/alone/images; cd /run/alone\n\
         export CRIU_FAULT=130 PATH={folder}:$PATH; memory={memory}\n\
         ready() {{ until grep -q ready said; do sleep 0.1; done; }}\n\
         lines() {{ grep -c 'stood still' said || true; }}\n\
         down() {{ before=$(lines); }}\n\
         gap() {{ until [ $(lines) -gt $before ]; do sleep 0.1; done; }}\n\
         {script}\n\
         sed -n 's/.*stood still for \\(.*\\) ms/\\1/p' said"
    );
    let said = machines.shell_for(host, &script, Duration::from_secs(120))?;
    let gaps = said.lines().filter_map(|line| line.trim().parse::<f64>().ok());
    let gap = gaps.max_by(f64::total_cmp).context("it tells of no gap")?;
    ensure!(gap > 0.0, "a gap of {gap} ms");
    Ok(gap)
}
