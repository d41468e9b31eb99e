//! The scheduler without groups, for as long as somebody measures or tests.
//!
//! Linux 6.13 to 6.19 lets a group of tasks that run on several cores starve everybody else, for a minute in the worst case
//! seen: see `docs/soft-rnic.md`, "No idle moment". A lab makes no groups of its own (`verbatim_lab`), but by sched(7) each session is one
//! where the machine has autogroups.

use std::process::{Child, Command, Stdio};

use anyhow::{Context, bail};

/// Whether sessions are groups.
const SWITCH: &str = "/proc/sys/kernel/sched_autogroup_enabled";

/// Held by all who want no groups; its content is what the first of them found.
const LOCK: &str = "/run/lock/verbatim-ungrouped";

/// Turns groups off, says so, waits for the end of its input, and turns them on again if nobody else wants them off. Whoever
/// kills the one that asked for this kills its end of the pipe, too.
const HOLD: &str = r#"set -e
exec 9<>"$1"
flock -s 9
found=$(cat "$0")
if [ "$found" = 1 ]; then echo 1 >"$1"; echo 0 >"$0"; fi
echo held
cat >/dev/null
if flock -n -x 9 && [ "$(cat "$1")" = 1 ]; then echo 1 >"$0"; : >"$1"; fi
"#;

/// While it lives, sessions are no groups of the scheduler.
pub struct Ungrouped(Option<Child>);

impl Ungrouped {
    /// Turns them off, where the machine has them and lets us.
    pub fn hold() -> anyhow::Result<Self> {
        let is_off = std::fs::read_to_string(SWITCH).map_or(true, |found| found.trim() == "0");
        let is_held = std::fs::read_to_string(LOCK).is_ok_and(|found| found.trim() == "1");
        if is_off && !is_held || !rustix::process::geteuid().is_root() {
            return Ok(Self(None));
        }
        Self::hold_at(SWITCH, LOCK).map(|holder| Self(Some(holder)))
    }

    fn hold_at(switch: &str, lock: &str) -> anyhow::Result<Child> {
        use std::io::BufRead;
        use std::os::unix::process::CommandExt;
        let mut holder = Command::new("sh")
            .args(["-c", HOLD, switch, lock])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // A terminal's Ctrl-C is not for it.
            .process_group(0)
            .spawn()
            .context("cannot start sh")?;
        let mut said = String::new();
        let stdout = holder.stdout.as_mut().context("its output is a pipe")?;
        std::io::BufReader::new(stdout).read_line(&mut said)?;
        if said.trim() != "held" {
            bail!("cannot turn off {switch}: {}", holder.wait()?);
        }
        Ok(holder)
    }
}

impl Drop for Ungrouped {
    fn drop(&mut self) {
        if let Some(holder) = &mut self.0 {
            release(holder);
        }
    }
}

fn release(holder: &mut Child) {
    // The end of the pipe.
    drop(holder.stdin.take());
    let (Ok(_) | Err(_)) = holder.wait();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_holder_restores_what_the_first_one_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        let (switch, lock) = (path("switch"), path("lock"));
        let now = || std::fs::read_to_string(&switch).unwrap().trim().to_owned();
        for found in ["1", "0", "1"] {
            std::fs::write(&switch, found).unwrap();
            let mut first = Ungrouped::hold_at(&switch, &lock).unwrap();
            let mut second = Ungrouped::hold_at(&switch, &lock).unwrap();
            assert_eq!(now(), "0");
            release(&mut first);
            assert_eq!(now(), "0", "the second still wants it off");
            let mut third = Ungrouped::hold_at(&switch, &lock).unwrap();
            release(&mut second);
            assert_eq!(now(), "0");
            release(&mut third);
            assert_eq!(now(), found);
        }
    }
}
