//! A real application over a library that is not ours: LAMMPS, molecular dynamics, as two ranks of Open MPI over UCX, each
//! in an instance of its own.
//!
//! The atoms of a Lennard-Jones liquid are divided among the ranks, which exchange those near their border in each step.
//! Every ten steps temperature, energies and pressure are written. The arithmetic has one order, so that each digit of
//! each run is the same: one message that is lost, doubled or damaged changes them.

use std::time::Duration;

use anyhow::{Context, bail, ensure};

use crate::instance::Instance;
use crate::lab::TestLab;
use crate::tools::find_program;
use crate::wait::eventually;

/// Without a kernel driver there is no sysfs from which UCX could read which version of RoCE a GID is of. It then looks for
/// the receiver's GID where only version 1 has it, and drops all datagrams, unless it is told not to look.
pub const UCX_SETTING: &str = "UCX_UD_VERBS_ETH_DGID_CHECK=n";

/// `tests/programs/remote_shell.py` listens there.
const SHELL_PORT: u16 = 7787;
const SHELL: &str = include_str!("../programs/remote_shell.py");
/// Where the programs of instances are written, which is a place of their own.
const SHELL_INSIDE: &str = "/tmp/remote_shell";
const INPUT_INSIDE: &str = "/tmp/liquid";
/// Steps from one written line to the next.
pub const STEPS_PER_LINE: u32 = 10;
/// 4 atoms in each of 20 × 20 × 20 cells.
const CELLS: u32 = 20;

/// Writes its first argument to the file that it is named after, and runs that.
const LISTEN: &str = r#"printf '%s' "$1" >"$0" && chmod 755 "$0" && exec "$0" listen"#;

/// Writes its first two arguments to the two files and runs the others with its own address as their first host.
const LAUNCH: &str = r#"printf '%s' "$1" >"$SHELL_INSIDE" && chmod 755 "$SHELL_INSIDE" && printf '%s' "$2" >"$INPUT_INSIDE"
own=$(hostname -I) && worker=$3
shift 3
exec mpirun --host "${own%% *}:1,$worker:1" "$@""#;

/// A running simulation.
pub struct Simulation<'a> {
    /// `mpirun` and rank 0, whose output is the whole's.
    pub head: Instance<'a>,
    /// Rank 1 and the daemon that started it.
    pub worker: Instance<'a>,
}

/// What a simulation has found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Step, temperature, energies and pressure, as they were written.
    pub lines: Vec<String>,
}

impl<'a> Simulation<'a> {
    /// What is not installed, if anything is not.
    pub fn obstacle() -> Option<String> {
        let lacks = ["mpirun", "lmp"]
            .into_iter()
            .find(|program| find_program(program).is_err())?;
        Some(format!(
            "{lacks} is not installed: run `./setup.sh --application`"
        ))
    }

    /// The command of the head, as reports show it.
    pub fn program() -> String {
        format!("mpirun -np 2 lmp (LAMMPS), {} atoms", 4 * CELLS.pow(3))
    }

    /// Starts both ranks. `suffix` makes the instances' names unique.
    pub fn start(
        lab: &'a TestLab,
        head_host: &str,
        worker_host: &str,
        suffix: &str,
        steps: u32,
    ) -> anyhow::Result<Self> {
        let worker = lab.instance(
            worker_host,
            &format!("worker{suffix}"),
            // Its daemon wants the file, too, although it starts nothing.
            &["/bin/sh", "-c", LISTEN, SHELL_INSIDE, SHELL],
        )?;
        worker.listens(SHELL_PORT)?;
        let address = worker.address()?;
        let input = input(steps);
        let ucx = [
            "UCX_TLS=rc_verbs,ud_verbs,self",
            "UCX_NET_DEVICES=verbatim0:1",
            UCX_SETTING,
            // One thread for each rank.
            "OMP_NUM_THREADS=1",
        ];
        let paths = [
            format!("SHELL_INSIDE={SHELL_INSIDE}"),
            format!("INPUT_INSIDE={INPUT_INSIDE}"),
        ];
        let mut argv = vec!["env", &paths[0], &paths[1], "/bin/sh", "-c", LAUNCH, "sh"];
        argv.extend([SHELL, &input, &address]);
        argv.extend([
            "--allow-run-as-root",
            "-np",
            "2",
            "--bind-to",
            "none",
            "--leave-session-attached",
        ]);
        for [name, value] in [
            ["plm_rsh_agent", SHELL_INSIDE],
            // UCX or nothing: Open MPI would fall back to TCP and say nothing.
            ["pml", "ucx"],
            ["opal_common_ucx_tls", "any"],
            ["opal_common_ucx_devices", "any"],
            // The RNICs need the processors, too.
            ["mpi_yield_when_idle", "1"],
        ] {
            argv.extend(["--mca", name, value]);
        }
        for variable in ucx {
            argv.extend(["-x", variable]);
        }
        argv.extend(["lmp", "-in", INPUT_INSIDE, "-log", "none"]);
        let head = lab.instance(head_host, &format!("head{suffix}"), &argv)?;
        Ok(Self { head, worker })
    }

    /// The last step that has been written.
    pub fn step(&self) -> anyhow::Result<Option<u32>> {
        Ok(lines(&self.head.output()?).last().and_then(|line| step_of(line)))
    }

    /// Waits until a step has been written.
    pub fn reaches(&self, step: u32, limit: Duration) -> anyhow::Result<()> {
        let reached = eventually(&format!("step {step} of the simulation"), limit, || {
            let written = self.step()?;
            if written.is_none_or(|written| written < step) && self.head.row()?.pid.is_none() {
                bail!("the simulation has ended before step {step}");
            }
            Ok(written.filter(|written| *written >= step))
        });
        reached.map(drop).with_context(|| self.words())
    }

    /// Waits for the good end of both ranks.
    pub fn found(&self, steps: u32, limit: Duration) -> anyhow::Result<Found> {
        let head = self.head.succeed(limit).with_context(|| self.words())?;
        self.worker.succeed(limit).with_context(|| self.words())?;
        let lines = lines(&head.stdout);
        let written: Vec<_> = lines.iter().filter_map(|line| step_of(line)).collect();
        let expected: Vec<_> = (0..=steps).step_by(STEPS_PER_LINE as usize).collect();
        ensure!(
            written == expected,
            "lines are missing or too many:\n{}",
            head.stdout
        );
        Ok(Found { lines })
    }

    fn words(&self) -> String {
        let output = |instance: &Instance<'_>| instance.output().unwrap_or_else(|error| error.to_string());
        format!("head:\n{}\nworker:\n{}", output(&self.head), output(&self.worker))
    }
}

/// The input: reduced units, an fcc crystal at a density at which it melts, energy kept.
fn input(steps: u32) -> String {
    format!(
        "units lj\natom_style atomic\nlattice fcc 0.85\nregion all block 0 {CELLS} 0 {CELLS} 0 {CELLS}\n\
         create_box 1 all\ncreate_atoms 1 box\nmass 1 1.0\nvelocity all create 1.5 4791 loop geom\n\
         pair_style lj/cut 2.5\npair_coeff 1 1 1.0 1.0 2.5\nneighbor 0.3 bin\nneigh_modify every 10 check no\n\
         fix energy all nve\nthermo {STEPS_PER_LINE}\nthermo_modify flush yes\nrun {steps}\n"
    )
}

/// The lines with numbers between the table's head and the summary behind it.
fn lines(output: &str) -> Vec<String> {
    let table = output
        .lines()
        .skip_while(|line| !line.trim_start().starts_with("Step "))
        .skip(1);
    table
        .take_while(|line| !line.starts_with("Loop time"))
        .filter(|line| step_of(line).is_some() && line.split_ascii_whitespace().count() == 6)
        .map(|line| line.trim().to_owned())
        .collect()
}

fn step_of(line: &str) -> Option<u32> {
    line.split_ascii_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_of_the_table_are_found() {
        let output = "LAMMPS (7 Jan 2022)\n  1 by 1 by 2 MPI processor grid\n\
                      Step Temp E_pair E_mol TotEng Press \n       0   1.5  -6.7  0  -4.6  -5.0 \n\
                      WARNING: slow\n      10   0.7  -5.7  0  -4.6   0.2 \nLoop time of 1.5 on 2 procs\n\
                      1 0 0 0 0 0\n";
        assert_eq!(
            lines(output),
            ["0   1.5  -6.7  0  -4.6  -5.0", "10   0.7  -5.7  0  -4.6   0.2"]
        );
        assert_eq!(lines("no table\n 10 1 1 1 1 1\n"), Vec::<String>::new());
        // A line that is being written.
        assert_eq!(lines("Step Temp\n 10 0.7 -5"), Vec::<String>::new());
    }
}
