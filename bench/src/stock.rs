//! What CRIU alone takes to write a program down and make it again, as the program itself sees it: the peer of every blackout.
//!
//! The program is `bench/programs/memory.c`, which has no RDMA. Images lie in memory, nothing is sent anywhere, and CRIU does what it
//! does by itself: `criu dump`, then at once `criu restore`.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail, ensure};
use verbatim_container::Criu;
use verbatim_e2e::{TestLab, eventually};

use crate::programs::program;

const LIMIT: Duration = Duration::from_secs(120);

/// The longest time for which a program says that it stood still, in ms, of those that ended at `since` or later.
pub fn longest_gap(said: &str, since: f64) -> Option<f64> {
    let gaps = said.lines().filter_map(|line| {
        let (at, gap) = line.strip_suffix(" ms")?.split_once(" stood still for ")?;
        Some((at.parse::<f64>().ok()?, gap.parse::<f64>().ok()?))
    });
    gaps.filter(|(at, _)| *at >= since)
        .map(|(_, gap)| gap)
        .max_by(f64::total_cmp)
}

/// Now, by the clock of [`longest_gap`].
pub fn now() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default().as_secs_f64()
}

/// What a program that holds so much private memory says that it stood still for, in ms, while CRIU alone wrote it down and made
/// it again.
pub fn gap(lab: &TestLab, host: &str, mebibytes: u32) -> anyhow::Result<f64> {
    let criu = Criu::find()?.path().display().to_string();
    let folder = lab.path(host, "/run/stock-criu")?;
    let inside = Path::new("/run/stock-criu");
    clear(&folder)?;
    std::fs::create_dir_all(folder.join("images"))?;
    let result = dump_and_restore(lab, host, &criu, &folder, inside, mebibytes);
    end(&folder);
    clear(&folder)?;
    result
}

fn dump_and_restore(
    lab: &TestLab,
    host: &str,
    criu: &str,
    folder: &Path,
    inside: &Path,
    mebibytes: u32,
) -> anyhow::Result<f64> {
    let path = |name: &str| inside.join(name).display().to_string();
    let memory = program("memory")?;
    // A session of its own, without a terminal, whose streams are files.
    let script = format!(
        "setsid sh -c 'echo $$ >{}; exec {memory} {mebibytes}' </dev/null >{} 2>&1 &",
        path("pid"),
        path("output")
    );
    lab.start_plain(host, &["sh", "-c", &script])?.succeed(LIMIT)?;
    let said = || std::fs::read_to_string(folder.join("output")).unwrap_or_default();
    eventually("the program's memory", LIMIT, || {
        Ok(said().contains("ready").then_some(()))
    })?;
    let pid = std::fs::read_to_string(folder.join("pid"))?.trim().to_owned();
    let begun = now();
    let images = path("images");
    let one_after_the_other = format!(
        "{criu} dump --tree {pid} --images-dir {images} --log-file dump.log -v1 && \
         {criu} restore --restore-detached --images-dir {images} --log-file restore.log -v1"
    );
    let done = lab
        .start_plain(host, &["sh", "-c", &one_after_the_other])?
        .wait(LIMIT)?;
    if done.code != 0 {
        let log = |name: &str| std::fs::read_to_string(folder.join("images").join(name)).unwrap_or_default();
        bail!("CRIU failed{}\n{}{}", done.output(), log("dump.log"), log("restore.log"));
    }
    let gap = eventually("the program that goes on", LIMIT, || Ok(longest_gap(&said(), begun)))?;
    ensure!(gap > 0.0, "no gap");
    Ok(gap)
}

/// Ends the program, whose number is the same after its restore.
fn end(folder: &Path) {
    let pid = std::fs::read_to_string(folder.join("pid")).unwrap_or_default();
    if let Some(pid) = pid.trim().parse().ok().and_then(rustix::process::Pid::from_raw) {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}

fn clear(folder: &PathBuf) -> anyhow::Result<()> {
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_gap_of_those_that_count_is_found() {
        let said = "ready\n10.5 stood still for 900.000 ms\n20.0 stood still for 12.5 ms\n21.0 stood still for 80.25 ms\n";
        assert_eq!(longest_gap(said, 15.0), Some(80.25));
        assert_eq!(longest_gap(said, 0.0), Some(900.0));
        assert_eq!(longest_gap(said, 30.0), None);
    }
}
