//! Virtual machines with Linux in instances, moved between two hosts of a lab: while others talk to one ([`partners`]), and while one works on its
//! memory and on a file system ([`load`]).
//!
//! What is in a guest's memory page by page is the matter of `crates/vm/tests/moves` and of the end-to-end suite's `machines::`; this is about
//! what only an operating system has.
//!
//! They need a kernel that not every machine has, so plain `cargo test` only lists them; `make vm-migrate-test` runs them. `VERBATIM_VM_MOVES` says how
//! many moves there are (4).

mod load;
mod partners;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use libtest_mimic::{Arguments, Failed, Trial};
use verbatim_e2e::{Instance, TestLab, eventually};
use verbatim_testbed::Image;

const NAME: &str = "linux";
const MOVES_VARIABLE: &str = "VERBATIM_VM_MOVES";
const MOVES: u32 = 4;
/// How long a guest without KVM may take to boot on a busy machine.
const BOOT: Duration = Duration::from_secs(180);
const LIMIT: Duration = Duration::from_secs(120);

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let trial = |name: &str, run: fn() -> anyhow::Result<()>| {
        let run = move || run().map_err(|error| Failed::from(format!("{error:#}")));
        Trial::test(name, run).with_ignored_flag(true)
    };
    let trials = vec![
        trial("linux_and_its_partners", partners::run),
        trial("linux_under_load", || load::run(false)),
        trial("linux_on_a_volume", || load::run(true)),
    ];
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// How many.
fn moves() -> anyhow::Result<u32> {
    let moves = std::env::var(MOVES_VARIABLE).ok().map(|text| text.parse());
    Ok(moves.transpose()?.unwrap_or(MOVES))
}

/// Where a program of this machine is.
fn program(name: &str) -> anyhow::Result<PathBuf> {
    let folders = ["/usr/bin", "/usr/sbin", "/bin", "/sbin"];
    let paths = folders.iter().map(|folder| Path::new(folder).join(name));
    let found = paths.into_iter().find(|path| path.is_file());
    found.with_context(|| format!("{name} is not installed: run setup.sh --vm"))
}

/// Starts one on `src` with 256 MiB; returns when it says that it is ready. `options` are `verbatim run`'s, `append` is more of the kernel's
/// command line, `own` more of QEMU's.
fn boot<'a>(
    lab: &'a TestLab,
    image: &Image,
    options: &[&str],
    append: &str,
    own: &[&str],
) -> anyhow::Result<Instance<'a>> {
    let append = format!("console=ttyS0 quiet panic=-1 {append}");
    let (kernel, initrd) = (
        image.kernel.display().to_string(),
        image.initrd.display().to_string(),
    );
    let usual = [
        "-M",
        "q35",
        "-m",
        "256",
        "-nodefaults",
        "-no-user-config",
        "-serial",
        "stdio",
        "-kernel",
        &kernel,
        "-initrd",
        &initrd,
        "-append",
        &append,
    ];
    let guest = lab.machine_with("src", NAME, options, &[&usual[..], own].concat())?;
    eventually("a guest that is ready", BOOT, || {
        Ok(guest.output()?.contains("the guest is ready").then_some(()))
    })
    .with_context(|| guest.output().unwrap_or_default())?;
    Ok(guest)
}
