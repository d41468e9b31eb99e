//! `verbatim volume`, whose daemon ends itself where `VERBATIM_VOLUME_DIE_AT` says: the name of a point.

use std::process::ExitCode;

use clap::Parser;
use verbatim_volume::command::{VolumeCommand, run};
use verbatim_volume::faults::Point;

#[derive(Debug, Parser)]
struct Arguments {
    #[command(subcommand)]
    command: VolumeCommand,
}

fn die(point: Point) {
    if std::env::var("VERBATIM_VOLUME_DIE_AT").is_ok_and(|name| name == format!("{point:?}")) {
        let own = rustix::process::getpid();
        let _ = rustix::process::kill_process(own, rustix::process::Signal::KILL);
        // The signal ends this process at the latest when it is scheduled next.
        loop {
            std::thread::park();
        }
    }
}

fn main() -> ExitCode {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    match run(Arguments::parse().command, die) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(1)
        }
    }
}
