//! What the machine and the device are, for whoever reads a report, and what must be there.

use std::path::Path;

use anyhow::{Context, bail};
use serde::Serialize;
use verbatim_container::{Criu, find_rnic};

use crate::commands::{daemons, lab};

/// What to do where something is missing.
pub const REMEDY: &str = "see docs/rnics.md, \"Machines that are hosts\"; ./setup.sh installs CRIU and runc";

/// Where the kernel lists RDMA devices.
const CLASS: &str = "/sys/class/infiniband";

/// All of it.
#[derive(Debug, Default, Serialize)]
pub struct Facts {
    verbatim: &'static str,
    kernel: String,
    criu: String,
    driver: String,
    /// The version of the driver's commands.
    abi: u32,
    firmware: String,
    /// Of hardware.
    board: String,
    link_layer: String,
    state: String,
    rate: String,
    /// Whether the RDMA subsystem shows its devices in all network namespaces.
    shared: String,
}

/// The device that is meant; an error names those that there are.
pub fn choose(name: &str) -> anyhow::Result<String> {
    let mut all: Vec<_> = std::fs::read_dir(CLASS)
        .map(|entries| {
            entries
                .flatten()
                .filter_map(|entry| entry.file_name().into_string().ok())
                .collect()
        })
        .unwrap_or_default();
    all.sort();
    choose_of(name, &all)
}

fn choose_of(name: &str, all: &[String]) -> anyhow::Result<String> {
    let there = match all {
        [] => "the kernel has no RDMA device: is its driver loaded? (rxe: `rdma link add rxe0 type rxe netdev eth0`)".to_owned(),
        all => format!("there are: {}", all.join(", ")),
    };
    if name.is_empty() {
        bail!("say which device, as in `verbatim check --self-test mlx5_0`; {there}");
    }
    if !all.iter().any(|one| one == name) {
        bail!("there is no RDMA device {name}; {there}");
    }
    Ok(name.to_owned())
}

impl Facts {
    /// Reads it; an error says what is missing.
    pub fn gather(device: &str) -> anyhow::Result<Self> {
        if !rustix::process::geteuid().is_root() {
            bail!("it needs root (CRIU, namespaces, cgroups): run it as root or with sudo");
        }
        let rnic = find_rnic(device)?;
        let read = |path: &str| {
            let text = std::fs::read_to_string(Path::new(CLASS).join(device).join(path));
            text.unwrap_or_default().trim().to_owned()
        };
        let facts = Self {
            verbatim: env!("CARGO_PKG_VERSION"),
            kernel: std::fs::read_to_string("/proc/sys/kernel/osrelease")?
                .trim()
                .to_owned(),
            criu: Criu::find()?.version().to_string(),
            driver: rnic.driver,
            abi: rnic.abi,
            firmware: read("fw_ver"),
            board: read("board_id"),
            link_layer: read("ports/1/link_layer"),
            state: read("ports/1/state"),
            rate: read("ports/1/rate"),
            shared: std::fs::read_to_string("/sys/module/ib_core/parameters/netns_mode")
                .unwrap_or_default()
                .trim()
                .to_owned(),
        };
        if facts.link_layer != "Ethernet" {
            bail!(
                "port 1 of {device} is {}, and only RoCE works (docs/backends.md)",
                facts.link_layer
            );
        }
        if !facts.state.contains("ACTIVE") {
            bail!(
                "port 1 of {device} is {}: bring its network interface up",
                facts.state
            );
        }
        if facts.shared == "N" {
            bail!(
                "the RDMA subsystem shows devices in one network namespace only: `rdma system set netns shared`"
            );
        }
        lab::library()?;
        let plugin = std::env::current_exe()?.with_file_name(daemons::CRIU_PLUGIN);
        std::fs::metadata(&plugin)
            .with_context(|| format!("CRIU's plugin {} is missing", plugin.display()))?;
        Ok(facts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_not_there_is_answered_with_those_that_are() {
        let all = ["mlx5_0".to_owned(), "rxe0".to_owned()];
        assert_eq!(choose_of("rxe0", &all).unwrap(), "rxe0");
        let refused = |name, all| choose_of(name, all).unwrap_err().to_string();
        assert!(refused("", &all[..]).contains("say which device"));
        assert!(refused("mlx4_0", &all[..]).contains("no RDMA device mlx4_0; there are: mlx5_0, rxe0"));
        assert!(refused("rxe0", &[]).contains("the kernel has no RDMA device"));
    }
}
