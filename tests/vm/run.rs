//! Running a case.

use crate::cases::{Case, Program};
use crate::site::{End, Site};
use anyhow::{Context, bail, ensure};
use libtest_mimic::Completion;
use std::time::Duration;
use verbatim_e2e::{BandwidthRow, CheckReport, Finished, LatencyRow, PERFTEST_PORT, VCHECK_PORT};

/// How long a case may take. The longest, with lost packets, take half a minute on two cores that emulate two others.
const LIMIT: Duration = Duration::from_secs(120);

/// Runs a case; a failure comes with what both sides and both RNICs have said.
pub fn run(site: &Site, case: &Case) -> anyhow::Result<Completion> {
    if let Some(reason) = site.no_ipv6().filter(|_| case.ipv6) {
        return Ok(Completion::ignored_with(reason));
    }
    let result = attempt(site, case).map(|()| Completion::Completed);
    result.map_err(|error| error.context(format!("{}{}", case.name(), site.words())))
}

fn attempt(site: &Site, case: &Case) -> anyhow::Result<()> {
    let vcheck = site.tools().vcheck.to_str().context("a path that is not UTF-8")?;
    let (program, fixed, port): (_, &[&str], _) = match case.program {
        // -F: the frequency of an emulated processor says nothing.
        Program::Bandwidth(name) | Program::Latency(name) => (name, &["-F"], PERFTEST_PORT),
        Program::Check => (vcheck, &[], VCHECK_PORT),
    };
    let loss = match case.loss_per_mille {
        0 => None,
        per_mille => Some(site.lose(per_mille)?),
    };
    let options: Vec<&str> = case.options.split_ascii_whitespace().collect();
    let argv = |end: End| [&[program], end.device(case.ipv6), fixed, &options].concat();
    let server = site.start(case.server, &argv(case.server))?;
    site.listens(case.server, port)?;
    let address = site.address(case.server)?;
    let mut argv = argv(case.client);
    argv.push(&address);
    let client = site.start(case.client, &argv)?.wait(LIMIT);
    let server = match &client {
        // Nobody will come any more.
        Ok(finished) if finished.code != 0 => server.wait(Duration::from_secs(5)),
        _ => server.wait(LIMIT),
    };
    // Both sides' words, whoever failed.
    let (client, server) = match (client, server) {
        (Ok(client), Ok(server)) if client.code == 0 && server.code == 0 => (client, server),
        (client, server) => bail!("{}\n{}", told(client), told(server)),
    };
    judge(case, &client, &server)?;
    if let Some(loss) = loss {
        ensure!(loss.dropped()? > 0, "not a single packet was lost");
    }
    Ok(())
}

fn told(result: anyhow::Result<Finished>) -> String {
    match result {
        Ok(finished) => {
            format!(
                "`{}` ended with status {}{}",
                finished.what,
                finished.code,
                finished.output()
            )
        }
        Err(error) => format!("{error:#}"),
    }
}

fn judge(case: &Case, client: &Finished, server: &Finished) -> anyhow::Result<()> {
    match case.program {
        Program::Bandwidth(_) => {
            let rows = BandwidthRow::parse(client)?;
            // All: 2 B to 8 MiB. The rate of the smallest may be printed as 0.00.
            let all = case.options.split_ascii_whitespace().any(|option| option == "-a");
            let expected = if all { 23 } else { 1 };
            ensure!(
                rows.len() == expected,
                "{} rows instead of {expected}{}",
                rows.len(),
                client.output()
            );
            let fastest = rows.iter().map(|row| row.average_mib_s).fold(0.0, f64::max);
            ensure!(
                fastest > 0.0 && rows.iter().all(|row| row.iterations > 0),
                "{rows:?}"
            );
        }
        Program::Latency(_) => {
            for row in LatencyRow::parse(client)? {
                ensure!(row.typical_us > 0.0 && row.iterations > 0, "{row:?}");
            }
        }
        Program::Check => {
            let (client, server) = CheckReport::both_clean(client, server)?;
            // The system's library has no such calls, with which rxe's end would be still.
            let ours = [(case.client, client), (case.server, server)]
                .into_iter()
                .find(|(end, _)| *end == End::Ours);
            if let (true, Some((_, ours))) = (case.options.contains("--hold-every"), ours) {
                ensure!(ours.holds > 0, "it never stood still: {ours:?}");
            }
        }
    }
    Ok(())
}
