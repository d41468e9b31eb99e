//! `verbatim volume` with faults for tests. `VERBATIM_VOLUME_DIE_AT` names the point at which the daemon
//! kills itself. With `VERBATIM_VOLUME_DAMAGE=N`, the Nth chunk that it reads by RDMA is damaged. With
//! `VERBATIM_VOLUME_NO_RESEND`, the kernel counts as one that does not resend requests.

use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};

use clap::Parser;
use verbatim_volume::command::{VolumeCommand, run};
use verbatim_volume::faults::{Fault, Point};

#[derive(Debug, Parser)]
struct Arguments {
    #[command(subcommand)]
    command: VolumeCommand,
}

static FETCHED: AtomicU64 = AtomicU64::new(0);

fn die(point: Point) -> Fault {
    if std::env::var("VERBATIM_VOLUME_DIE_AT").is_ok_and(|name| name == format!("{point:?}")) {
        let own = rustix::process::getpid();
        let _ = rustix::process::kill_process(own, rustix::process::Signal::KILL);
        // The signal ends this process at the latest when it is scheduled next.
        loop {
            std::thread::park();
        }
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
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    match run(Arguments::parse().command, die) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(1)
        }
    }
}
