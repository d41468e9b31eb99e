//! What can be typed.

use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;
use std::time::Duration;
use verbatim_testbed::{Address, VmConfig};

const AFTER_HELP: &str = "\
Examples:
  testbed run -- uname -r
  testbed run --address 10.0.0.1/24 --rxe -- ibv_devinfo -v

  verbatim lab up --hosts a
  testbed up vm1 --lab lab --address 10.77.0.100/16 --rxe
  testbed exec vm1 -- ib_write_bw -d rxe0 -x 1 10.77.0.1
  testbed copy vm1:/var/log out/
  testbed down vm1

A machine sees this machine's files, read-only, and writes to its own memory. It needs ./setup.sh --vm, and root.

Exit status: that of the command in the machine; 125 if the machine or testbed itself failed; 2 wrong usage.";

/// Virtual machines with a kernel of our choice, for tests that need its RDMA and block drivers.
#[derive(Debug, Parser)]
#[command(name = "testbed", version, after_help = AFTER_HELP, propagate_version = true)]
pub struct Arguments {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Build the image, or find it in the cache, and say where it is.
    #[command(after_help = "Example:\n  testbed image --json")]
    Image {
        /// JSON instead of lines.
        #[arg(long)]
        json: bool,
    },
    /// Boot a machine, run a command in it, end it.
    #[command(after_help = "Example:\n  testbed run --limit 60 -- sh -c 'modprobe nbd && lsmod'")]
    Run {
        #[command(flatten)]
        machine: Machine,
        #[command(flatten)]
        execution: Execution,
    },
    /// Boot a machine that goes on running.
    #[command(
        after_help = "Example:\n  testbed up vm1 --address 10.0.0.1/24 --rxe\n  testbed up vm2 --with vm1 --address 10.0.0.2/24 --rxe"
    )]
    Up {
        /// Its name.
        name: String,
        #[command(flatten)]
        machine: Machine,
    },
    /// Run a command in a machine that is up.
    #[command(after_help = "Example:\n  testbed exec vm1 --env LANG=C -- ibv_devinfo")]
    Exec {
        /// The machine.
        name: String,
        #[command(flatten)]
        execution: Execution,
    },
    /// Copy a file or a folder out of a machine.
    #[command(after_help = "Example:\n  testbed copy vm1:/tmp/results out/")]
    Copy {
        /// The machine, a colon, and the absolute path there.
        #[arg(value_name = "NAME:PATH", value_parser = place)]
        from: (String, PathBuf),
        /// The folder that it is put into.
        #[arg(value_name = "FOLDER")]
        to: PathBuf,
    },
    /// List the machines.
    #[command(after_help = "Example:\n  testbed list --json")]
    List {
        /// JSON instead of a table.
        #[arg(long)]
        json: bool,
    },
    /// Print what a machine's kernel wrote to the console.
    #[command(after_help = "Example:\n  testbed console vm1")]
    Console {
        /// The machine.
        name: String,
    },
    /// End machines.
    #[command(after_help = "Example:\n  testbed down vm1 vm2\n  testbed down --all")]
    Down {
        /// The machines.
        #[arg(required_unless_present = "all")]
        names: Vec<String>,
        /// All that there are.
        #[arg(long)]
        all: bool,
    },
}

/// What a machine is made of.
#[derive(Debug, Args)]
pub struct Machine {
    /// Processors.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    cpus: u32,
    /// Memory in MiB.
    #[arg(long, default_value_t = 2048, value_parser = clap::value_parser!(u32).range(256..))]
    memory: u32,
    /// The address of its eth0, such as 10.77.0.100/16 or fd77::100/64.
    #[arg(long, value_name = "ADDRESS/LENGTH")]
    address: Option<Address>,
    /// Make eth0 a port of a bridge br0, which has the address, as agents want it.
    #[arg(long, requires = "address")]
    bridge: bool,
    /// Make rxe0, the kernel's software RNIC, on eth0, or on the bridge.
    #[arg(long, requires = "address")]
    rxe: bool,
    /// Join the network of this lab.
    #[arg(long, value_name = "LAB", conflicts_with = "with")]
    pub lab: Option<String>,
    /// Join the network of this machine.
    #[arg(long, value_name = "NAME")]
    pub with: Option<String>,
    /// A disk, /dev/vda and so on after `modprobe virtio_blk`: a file, or a URI that QEMU knows, such as nbd+unix:///?socket=PATH.
    #[arg(long = "drive", value_name = "FILE")]
    drives: Vec<String>,
    /// Append this to the kernel's command line.
    #[arg(long, value_name = "PARAMETERS", default_value = "")]
    append: String,
}

impl Machine {
    /// The library's words for it.
    pub fn config(&self, name: &str) -> VmConfig {
        VmConfig {
            cpus: self.cpus,
            memory_mib: self.memory,
            address: self.address,
            bridge: self.bridge,
            rxe: self.rxe,
            drives: self.drives.clone(),
            parameters: self.append.clone(),
            ..VmConfig::new(name)
        }
    }
}

/// A command for a machine.
#[derive(Debug, Args)]
pub struct Execution {
    /// Kill it after so many seconds.
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub limit: Option<Duration>,
    /// Environment variables.
    #[arg(short, long, value_name = "NAME=VALUE", value_parser = variable)]
    pub env: Vec<(String, String)>,
    /// The working directory in the machine.
    #[arg(long, value_name = "PATH", default_value = "/")]
    pub directory: String,
    /// The command.
    #[arg(last = true, required = true)]
    pub command: Vec<String>,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text
        .parse()
        .ok()
        .filter(|seconds| (0.1..=86_400.0).contains(seconds));
    seconds
        .map(Duration::from_secs_f64)
        .ok_or_else(|| format!("{text:?} is not a number of seconds from 0.1 to 86400"))
}

fn variable(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err(format!("{text:?} is not NAME=VALUE")),
    }
}

fn place(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once(':') {
        Some((name, path)) if path.starts_with('/') && path != "/" => Ok((name.to_owned(), path.into())),
        _ => Err(format!(
            "{text:?} is not NAME:PATH with an absolute path other than /"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_arguments_are_consistent_and_have_examples() {
        let command = Arguments::command();
        command.clone().debug_assert();
        for sub in command.get_subcommands() {
            let help = sub.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(
                help.contains("Example") && help.contains("testbed "),
                "{} has no example",
                sub.get_name()
            );
        }
    }

    #[test]
    fn places_and_variables_are_checked() {
        assert_eq!(place("vm1:/tmp/a"), Ok(("vm1".to_owned(), "/tmp/a".into())));
        for bad in ["vm1", "vm1:tmp", "vm1:/"] {
            assert!(place(bad).is_err(), "{bad}");
        }
        assert_eq!(variable("A=b=c"), Ok(("A".to_owned(), "b=c".to_owned())));
        assert!(variable("=b").is_err());
        for bad in ["", "0", "-1", "nan", "1e9"] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn rxe_needs_an_address() {
        let parse = |arguments: &[&str]| Arguments::try_parse_from([&["testbed"], arguments].concat());
        assert!(parse(&["up", "a", "--rxe"]).is_err());
        assert!(parse(&["up", "a", "--rxe", "--address", "10.0.0.1/24"]).is_ok());
        assert!(parse(&["up", "a", "--lab", "l", "--with", "b"]).is_err());
        assert!(parse(&["run"]).is_err());
    }
}
