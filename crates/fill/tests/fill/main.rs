//! Fills memory for real: children of this program are the containers, and this program is CRIU.
//!
//! Everything runs in a PID namespace of its own, whose first process is the test itself: when it ends, however that is, the kernel
//! kills the helper processes and the containers. `cargo test -p verbatim-fill --test fill -- [NAME…]` runs the stories whose
//! names contain a NAME; `VERBATIM_FILL_SEED` sets the seed.

mod changes;
mod criu;
mod kills;
mod speed;
mod stories;
mod task;
mod world;

use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

/// All stories together.
const LIMIT: Duration = Duration::from_secs(90);

fn main() -> ExitCode {
    let mut arguments = std::env::args_os();
    let name = arguments.next().unwrap_or_default();
    if name == verbatim_fill::PROGRAM_NAME {
        return verbatim_fill::main(std::env::args_os());
    }
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.iter().any(|argument| argument == "--list") {
        stories::STORIES
            .iter()
            .for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    if std::env::var_os("VERBATIM_FILL_INSIDE").is_some() {
        return stories::run(&arguments);
    }
    if !rustix::process::geteuid().is_root() {
        println!(
            "skipped: only root may make PID namespaces and a userfaultfd that sees the kernel's faults"
        );
        return ExitCode::SUCCESS;
    }
    outside(&arguments)
}

/// Runs the stories in a PID namespace, and ends them if they take too long.
fn outside(arguments: &[String]) -> ExitCode {
    let mut command = Command::new("unshare");
    command
        .args(["--pid", "--fork", "--kill-child", "--mount-proc"])
        .arg(std::env::current_exe().expect("this program has a path"))
        .args(arguments)
        .env("VERBATIM_FILL_INSIDE", "1")
        .stdin(Stdio::null())
        .process_group(0);
    // SAFETY: one system call, which is safe after fork.
    unsafe {
        command.pre_exec(|| {
            rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
            Ok(())
        });
    }
    let mut child = command.spawn().expect("unshare can be started");
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("a child can be waited for") {
            return if status.success() {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            };
        }
        if start.elapsed() > LIMIT {
            let _ = child.kill();
            let _ = child.wait();
            eprintln!("the stories have not ended within {LIMIT:?}");
            return ExitCode::FAILURE;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
