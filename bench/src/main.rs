//! Measures what the papers measured, between hosts of a lab on this machine, and writes it to `out/bench/`.
//!
//! One module per subject: [`bandwidth`], [`soft_rnic`], [`cost`], [`blackout`], [`memory`], [`far`], [`pollers`], [`disk`], [`swap`], [`vm`],
//! [`methods`], and [`migrrdma`] and [`migros`] for the papers' figures. Each prints a table for people and writes a JSON file
//! for programs, with every single measurement and what it was measured on.

mod bandwidth;
mod blackout;
mod context;
mod cost;
mod disk;
mod far;
mod memory;
mod methods;
mod migros;
mod migrrdma;
mod pollers;
mod pre_copy;
mod programs;
mod soft_rnic;
mod stock;
mod summary;
mod swap;
mod vm;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use verbatim_e2e::{Simulation, Tools, Ungrouped};

/// Measures bandwidth and blackouts between virtual hosts on this machine.
#[derive(Debug, Parser)]
#[command(
    after_help = "Example:\n  bench/run blackout --moves 20\n\nNothing else should run on the machine meanwhile."
)]
struct Arguments {
    /// What to measure; everything if nothing is named.
    what: Vec<Bench>,
    /// Rounds of the bandwidth measurement.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Seconds of each single bandwidth measurement.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    seconds: u32,
    /// Moves of the sender, and as many of the receiver.
    #[arg(long, default_value_t = 12, value_parser = clap::value_parser!(u32).range(1..))]
    moves: u32,
    /// Moves, or repeats, for each point of the paper's figures.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    /// The fewest queue pairs of `methods`.
    #[arg(long, default_value_t = 1)]
    least: u32,
    /// The most queue pairs; the most private memory of `memory` in MiB.
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..))]
    most: u32,
    /// Packets lost of a hundred, for rows of `methods`.
    #[arg(long, value_name = "PERCENT,...", value_delimiter = ',', default_values_t = [0.0, 0.1, 1.0])]
    loss: Vec<f64>,
    /// Round-trip times in milliseconds, for rows of `methods`; needs TAP devices (`/dev/net/tun`).
    #[arg(long, value_name = "MS,...", value_delimiter = ',', default_values_t = [0.0, 1.0, 10.0])]
    rtt: Vec<f64>,
    /// For `swap`: one core per end looks for work all the time, the last but one of this machine for the disk and its RNIC, and the last for
    /// the server's.
    #[arg(long)]
    poll: bool,
    /// The folder for the JSON files.
    #[arg(long, default_value = "out/bench")]
    out: PathBuf,
    /// Also write the page of the software RNIC's performance, with its plots, into this folder.
    #[arg(long)]
    docs: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Bench {
    /// `ib_write_bw` against one TCP stream.
    Bandwidth,
    /// Bandwidth, latency, set-up, memory and loss of the software RNIC, beside TCP and UDP.
    SoftRnic,
    /// Moves of `ib_write_bw` with 16 queue pairs, beside what CRIU alone takes for a small program.
    Blackout,
    /// Moves of programs with private memory, beside what CRIU alone takes for the same.
    Memory,
    /// 4 KiB of another host's memory by a one-sided READ, beside TCP.
    Far,
    /// Volumes: idle by NBD and by vhost-user-blk beside QEMU's servers, a tenant's requests beside a copy by TLS and by RDMA, and RocksDB on one that is mounted and copied.
    Disk,
    /// Of `disk` the part where nothing moves alone.
    Idle,
    /// 1 and 50 volumes in one daemon, beside a daemon for each, and nbdkit for each.
    ManyVolumes,
    /// Of `disk` the part with a tenant's requests beside copies alone.
    Copying,
    /// Of `disk` the part with RocksDB alone.
    Rocksdb,
    /// Swap disks on another host's memory, beside nbdkit's memory by TCP.
    Swap,
    /// Virtual machines moved, beside QEMU's own migration over TCP, over several connections, and by RDMA.
    Vm,
    /// Transfers beside threads that poll without pause, more of them than there are processors.
    Pollers,
    /// What it costs to send memory ahead, over TLS and by RDMA, alone and beside a partner.
    PreCopy,
    /// What virtualisation costs per operation (MigrRDMA, table 4).
    Cost,
    /// The blackout by phase against the number of queue pairs (MigrRDMA, figure 3).
    Connections,
    /// Wait-before-stop against queue pairs, message size and partners (MigrRDMA, figure 4).
    Drain,
    /// The partner's throughput around a move (MigrRDMA, figure 5).
    Timeline,
    /// Wait-before-stop and pause-resume (MigrOS) side by side, also over links that lose packets or are long.
    Methods,
    /// What it costs that a connection can be paused, while none is (MigrOS, table 3).
    Transport,
    /// How long it takes to make verbs objects (MigrOS, figures 8 and 9).
    Objects,
    /// A migration's time by queue pairs and registered memory, by both methods (MigrOS, figures 9 and 10).
    MigrationTime,
    /// What a migration carries of each object (MigrOS, table 1).
    Images,
    /// LAMMPS over MPI and UCX, moved, against starting it again (MigrRDMA, figure 6).
    Application,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    // What a bench starts of itself within a host.
    let outcome = match arguments.get(1).map(String::as_str) {
        Some("udp-echo") => soft_rnic::udp::echo(&arguments[2..]),
        Some("udp-ping") => soft_rnic::udp::ping(&arguments[2..]),
        Some("delay-line") => migros::delay_line::run(&arguments[2..]),
        Some("transport-messages") => migros::transport::instructions::messages(&arguments[2..]),
        Some("object-numbers") => migros::objects::numbers::run(&arguments[2..]),
        Some("compute") => pollers::compute(),
        Some("far-server") => far::serve(&arguments[2..]),
        Some("far-client") => far::read(&arguments[2..]),
        Some("cost-batches") => cost::batches(&arguments[2..]),
        _ => run(&Arguments::parse()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> anyhow::Result<()> {
    if let Some(obstacle) = Tools::obstacle() {
        anyhow::bail!(obstacle);
    }
    let tools = Tools::find()?;
    let _ungrouped = Ungrouped::hold()?;
    std::fs::create_dir_all(&arguments.out)?;
    let wanted = |bench| arguments.what.is_empty() || arguments.what.contains(&bench);
    if wanted(Bench::Bandwidth) {
        bandwidth::run(
            &tools,
            arguments.rounds,
            arguments.seconds,
            &arguments.out.join("bandwidth.json"),
        )?;
    }
    if wanted(Bench::SoftRnic) {
        soft_rnic::run(
            &tools,
            arguments.seconds,
            &arguments.out.join("soft-rnic.json"),
            arguments.docs.as_deref(),
        )?;
    }
    if wanted(Bench::Cost) {
        cost::run(&arguments.out.join("cost.json"))?;
    }
    if wanted(Bench::Blackout) {
        blackout::run(&tools, arguments.moves, &arguments.out.join("blackout.json"))?;
    }
    let (repeats, most) = (arguments.repeats, arguments.most);
    if wanted(Bench::Memory) {
        memory::run(&tools, repeats, most, &arguments.out.join("memory.json"))?;
    }
    if wanted(Bench::PreCopy) {
        pre_copy::run(&tools, repeats, most, &arguments.out.join("pre-copy.json"))?;
    }
    if wanted(Bench::Far) {
        far::run(&tools, arguments.rounds, &arguments.out.join("far.json"))?;
    }
    if wanted(Bench::Disk) {
        disk::run(&tools, arguments.rounds, &arguments.out.join("disk.json"))?;
    }
    // Everything has it already.
    if arguments.what.contains(&Bench::Idle) && !wanted(Bench::Disk) {
        disk::idle(&tools, arguments.rounds, &arguments.out.join("idle.json"))?;
    }
    if wanted(Bench::ManyVolumes) {
        disk::many(&tools, arguments.rounds, &arguments.out.join("many-volumes.json"))?;
    }
    if arguments.what.contains(&Bench::Copying) && !wanted(Bench::Disk) {
        disk::copies(&tools, arguments.rounds, &arguments.out.join("copying.json"))?;
    }
    if arguments.what.contains(&Bench::Rocksdb) && !wanted(Bench::Disk) {
        disk::rocksdb::report(&tools, arguments.rounds, &arguments.out.join("rocksdb.json"))?;
    }
    if wanted(Bench::Swap) {
        let name = if arguments.poll {
            "swap-poll.json"
        } else {
            "swap.json"
        };
        swap::run(
            &tools,
            arguments.rounds,
            arguments.poll,
            &arguments.out.join(name),
        )?;
    }
    if wanted(Bench::Vm) {
        vm::run(&tools, repeats, &arguments.out.join("vm.json"))?;
    }
    if wanted(Bench::Pollers) {
        pollers::run(&tools, arguments.rounds, &arguments.out.join("pollers.json"))?;
    }
    if wanted(Bench::Connections) {
        migrrdma::connections::run(&tools, repeats, most, &arguments.out.join("connections.json"))?;
    }
    if wanted(Bench::Drain) {
        migrrdma::drain::run(&tools, repeats, most, &arguments.out.join("drain.json"))?;
    }
    if wanted(Bench::Timeline) {
        migrrdma::timeline::run(&tools, repeats, &arguments.out.join("timeline.json"))?;
    }
    if wanted(Bench::Methods) {
        let Arguments { loss, rtt, .. } = arguments;
        methods::run(
            &tools,
            repeats,
            arguments.least..=most,
            loss,
            rtt,
            &arguments.out.join("methods.json"),
        )?;
    }
    if wanted(Bench::Images) {
        migros::images::run(&arguments.out.join("images.json"))?;
    }
    if wanted(Bench::Transport) {
        migros::transport::run(&tools, repeats, &arguments.out.join("transport.json"))?;
    }
    if wanted(Bench::Objects) {
        migros::objects::run(&tools, repeats, &arguments.out.join("objects.json"))?;
    }
    if wanted(Bench::MigrationTime) {
        migros::migration_time::run(&tools, repeats, most, &arguments.out.join("migration-time.json"))?;
    }
    if wanted(Bench::Application) {
        match Simulation::obstacle() {
            // Of everything this is left out, since it needs more than the others.
            Some(obstacle) if arguments.what.is_empty() => println!("application: {obstacle}"),
            _ => migrrdma::application::run(&tools, repeats, &arguments.out.join("application.json"))?,
        }
    }
    Ok(())
}
