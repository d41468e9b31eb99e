//! `verbatim volume`, whose daemon ends itself where `VERBATIM_VOLUME_DIE_AT` says: the name of a point. With `VERBATIM_VOLUME_DAMAGE=N` the
//! Nth chunk that it reads by RDMA is damaged. With `VERBATIM_VOLUME_WAIT_AT=POINT:PATH` it makes that file at that point, and waits until it is gone. With `VERBATIM_VOLUME_NO_RESEND` set the kernel is taken for one that does not send requests again.

use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use clap::Parser;
use verbatim_volume::command::{VolumeCommand, run};
use verbatim_volume::faults::{Fault, Point};

#[derive(Debug, Parser)]
struct Arguments {
    #[command(subcommand)]
    command: VolumeCommand,
}

static FETCHED: AtomicU64 = AtomicU64::new(0);

/// Makes a file, and waits until somebody has removed it.
fn wait_at(path: &Path) {
    if std::fs::write(path, "").is_ok() {
        while path.exists() {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn die(point: Point) -> Fault {
    if std::env::var("VERBATIM_VOLUME_DIE_AT").is_ok_and(|name| name == format!("{point:?}")) {
        let own = rustix::process::getpid();
        let _ = rustix::process::kill_process(own, rustix::process::Signal::KILL);
        // The signal ends this process at the latest when it is scheduled next.
        loop {
            std::thread::park();
        }
    }
    if let Ok(wait) = std::env::var("VERBATIM_VOLUME_WAIT_AT")
        && let Some((name, path)) = wait.split_once(':')
        && name == format!("{point:?}")
    {
        wait_at(Path::new(path));
    }
    if point == Point::Device && std::env::var_os("VERBATIM_VOLUME_NO_RESEND").is_some() {
        return Fault::NoResend;
    }
    if point == Point::Fetched {
        let number = FETCHED.fetch_add(1, Ordering::Relaxed) + 1;
        if std::env::var("VERBATIM_VOLUME_DAMAGE").is_ok_and(|text| text == number.to_string()) {
            return Fault::Damage;
        }
    }
    Fault::None
}

fn main() -> ExitCode {
    verbatim_keeper::run_role();
    verbatim_volume::run_role();
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    match run(Arguments::parse().command, die) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(1)
        }
    }
}
