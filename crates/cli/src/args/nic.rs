//! `verbatim nic`.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use verbatim_device::control::HOST_NUMBERS;

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct NicArguments {
    #[command(flatten)]
    pub run: NicRunArguments,
    #[command(subcommand)]
    pub command: Option<NicCommand>,
}

/// The RNIC itself.
#[derive(Debug, Args)]
pub struct NicRunArguments {
    /// The folder of the control socket and the statistics.
    #[arg(long, default_value = "/run/verbatim")]
    pub runtime_dir: PathBuf,
    /// The network interface that is the port.
    #[arg(long, default_value = "br0")]
    pub interface: String,
    /// The IPv4 or IPv6 address that is the port, in the place of an interface.
    #[arg(long, conflicts_with = "interface")]
    pub address: Option<IpAddr>,
    /// Leave the interface's other addresses alone: another RNIC may have them.
    #[arg(long)]
    pub only_address: bool,
    /// Let this host's users send to UDP port 4791. Without it the kernel drops their packets, but for those of root and of the RNIC's
    /// own user; nft(8) tells it. Partners know an RNIC by its address, which all users of a host share.
    #[arg(long)]
    pub no_port_filter: bool,
    /// The core to keep to: for a machine with several RNICs, or with a core to spare.
    #[arg(long, value_name = "NUMBER", env = "VERBATIM_NIC_CPU")]
    pub cpu: Option<usize>,
    /// How long the RNIC looks for work before it sleeps: longer saves a wake-up on the next packet or request, and takes a core meanwhile. 1000000
    /// is a core that never rests while it is used at all; give it one (--cpu), and --nice 0 where others are to share that. Default: 20 on four or
    /// more cores, else 0. Not with --locked: whoever has real-time priority and looks for work lets nobody run on that core.
    #[arg(long, value_name = "MICROSECONDS", env = "VERBATIM_NIC_SPIN", conflicts_with = "locked", value_parser = clap::value_parser!(u32).range(..=1_000_000))]
    pub spin: Option<u32>,
    /// The nice value that the RNIC asks for. On a machine with several RNICs, whose programs compete for the same cores, 0 is fair.
    #[arg(long, value_name = "NUMBER", env = "VERBATIM_NIC_NICE", default_value_t = -10, allow_negative_numbers = true,
          value_parser = clap::value_parser!(i32).range(-20..=19))]
    pub nice: i32,
    /// For a host whose own swap is another host's memory (`verbatim swap attach --device`): the RNIC's memory, registered memory and queues are
    /// locked, as hardware pins them, and it has real-time priority instead of a nice value. Memory that is in no file is refused.
    #[arg(long)]
    pub locked: bool,
    /// Keep all rights of the user that starts it: on a kernel, or under a debugger, where an RNIC does not work without them. Otherwise it gives
    /// up what it does not need once it works, see docs/security.md.
    #[arg(long)]
    pub no_jail: bool,
    /// Which part of the queue pair numbers and memory keys this RNIC gives: another one on each host, so that what moves here
    /// with its numbers finds them free. Default: made of the port's address.
    #[arg(long, value_name = "NUMBER", env = "VERBATIM_HOST_NUMBER",
          value_parser = clap::value_parser!(u8).range(..i64::from(HOST_NUMBERS)))]
    pub host_number: Option<u8>,
    /// Queue pairs that one program can have.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub max_qp: Option<u32>,
    /// Memory regions that one program can have.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=524_288))]
    pub max_mr: Option<u32>,
    /// Completion queues that one program can have.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub max_cq: Option<u32>,
    /// Entries of all completion queues of one program.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_cqe: Option<u32>,
    /// Contexts that one process can open.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub max_contexts: Option<u32>,
    /// Bytes that may be under way to one destination.
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(4096..=1 << 30))]
    pub window: Option<u32>,
    /// How long a connection waits for a partner that is paused before it fails. Default: 60.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    pub pause_limit: Option<u32>,
}

#[derive(Debug, Subcommand)]
pub enum NicCommand {
    /// Show what the running RNIC counts: packets, retransmissions, NAKs, errors, by device and by queue pair.
    #[command(
        after_help = "Examples:\n  verbatim nic stat\n  verbatim nic stat --qp 0x11 --json\n  \
                      verbatim nic stat --prometheus\n\nNames are those of `rdma statistic`. Root sees all queue \
                      pairs, others their own."
    )]
    Stat(StatArguments),
    /// Write the packets of the running RNIC into a file that Wireshark opens.
    #[command(after_help = "Examples:\n  verbatim nic capture run.pcap --duration 5\n  \
                      verbatim nic capture - --count 100 | tshark -r -\n\nEnds after --count packets, after --duration, \
                      or with Ctrl-C. IP and UDP headers are made again from what the RNIC knows of them.")]
    Capture(CaptureArguments),
}

#[derive(Debug, Args)]
pub struct StatArguments {
    /// The folder of the RNIC's control socket.
    #[arg(long, default_value = "/run/verbatim")]
    pub runtime_dir: PathBuf,
    /// All counters of this queue pair; its number in decimal, or hexadecimal behind 0x.
    #[arg(long, value_name = "NUMBER", value_parser = qpn)]
    pub qp: Option<u32>,
    /// JSON instead of tables.
    #[arg(long, conflicts_with = "prometheus")]
    pub json: bool,
    /// The text format of Prometheus instead of tables.
    #[arg(long)]
    pub prometheus: bool,
    /// Again every second, with the difference, until Ctrl-C.
    #[arg(long, conflicts_with_all = ["json", "prometheus"])]
    pub watch: bool,
}

#[derive(Debug, Args)]
pub struct CaptureArguments {
    /// The file to write; - for standard output.
    pub file: PathBuf,
    /// The folder of the RNIC's control socket.
    #[arg(long, default_value = "/run/verbatim")]
    pub runtime_dir: PathBuf,
    /// Only packets of this queue pair.
    #[arg(long, value_name = "NUMBER", value_parser = qpn)]
    pub qp: Option<u32>,
    /// End after so many packets.
    #[arg(long)]
    pub count: Option<u64>,
    /// End after so many seconds.
    #[arg(long, value_name = "SECONDS", value_parser = super::seconds)]
    pub duration: Option<Duration>,
    /// Bytes of each packet, from its IP header on.
    #[arg(long, value_name = "BYTES", default_value = "65535", value_parser = clap::value_parser!(u32).range(64..=65_535))]
    pub snap: u32,
}

/// A queue pair number, decimal or hexadecimal.
pub fn qpn(text: &str) -> Result<u32, String> {
    let number = match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16),
        None => text.parse(),
    };
    number
        .ok()
        .filter(|number| *number < 1 << 24)
        .ok_or_else(|| format!("{text:?} is not a queue pair number"))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::{Arguments, Command};
    use super::*;

    fn nic(arguments: &[&str]) -> Result<NicArguments, clap::Error> {
        let all = ["verbatim", "nic"].iter().chain(arguments);
        match Arguments::try_parse_from(all)?.command {
            Command::Nic(arguments) => Ok(arguments),
            command => panic!("another command: {command:?}"),
        }
    }

    #[test]
    fn without_a_subcommand_the_rnic_runs() {
        let plain = nic(&["--address", "fd00::1", "--max-qp", "7"]).unwrap();
        assert!(plain.command.is_none());
        assert_eq!(plain.run.address, Some("fd00::1".parse().unwrap()));
        assert_eq!(plain.run.max_qp, Some(7));
        assert!(matches!(
            nic(&["stat"]).unwrap().command,
            Some(NicCommand::Stat(_))
        ));
        assert!(nic(&["--interface", "eth0", "stat"]).is_err());
        assert!(nic(&["stat", "--json", "--watch"]).is_err());
        assert!(nic(&["--host-number", "119"]).is_ok() && nic(&["--host-number", "120"]).is_err());
        assert!(nic(&["--max-qp", "0"]).is_err() && nic(&["capture"]).is_err());
    }

    #[test]
    fn queue_pair_numbers_are_decimal_or_hexadecimal() {
        assert_eq!((qpn("0x11"), qpn("17")), (Ok(17), Ok(17)));
        assert!(qpn("11h").is_err() && qpn("0x1000000").is_err());
    }
}
