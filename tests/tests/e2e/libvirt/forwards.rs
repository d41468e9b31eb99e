//! Ports of the host that a domain's own network forwards to its guest (`hostfwd`, `<portForward>`).

use anyhow::ensure;
use verbatim_e2e::{ROLLED_BACK, TestLab};

use super::{BACKING, NAME, Site, attach, change};
use crate::machines::blockers;

/// A network of QEMU's that libvirt passes on without a look at it.
const LINE: &str = "<commandline xmlns='http://libvirt.org/schemas/domain/qemu/1.0'><arg value='-netdev'/>\
    <arg value='user,id=own,hostfwd=tcp:127.0.0.1:2222-:22'/><arg value='-device'/>\
    <arg value='virtio-net-pci,netdev=own,mac=52:54:00:00:00:02,addr=0x10'/></commandline></domain>";

/// A network whose server is a process that libvirt starts.
const PASST: &str = "<interface type='user'><mac address='52:54:00:00:00:03'/><model type='virtio'/><backend type='passt'/>\
    <portForward proto='tcp' address='127.0.0.1'><range start='2224' to='22'/></portForward></interface></devices>";

/// The words of its definition go along; a forward that was added or removed in QEMU's monitor is named.
pub(super) fn of_the_line(lab: &TestLab) -> anyhow::Result<()> {
    let site = Site::start(lab)?;
    let description = site.description(NAME, BACKING)?;
    change(&description, &[("</domain>", LINE)])?;
    site.ask("src", &["define", &description])?;
    site.ask("src", &["start", NAME])?;
    site.counts_on()?;
    attach(lab, NAME)?;
    let told = |host: &str, line: &str| site.ask(host, &["qemu-monitor-command", NAME, "--hmp", line]);
    let has = |host: &str, port: &str| anyhow::Ok(told(host, "info usernet")?.contains(port));
    for to in ["dst", "src"] {
        site.instance().migrate(to)?.must_be_committed()?;
        site.goes_on_kept(to)?;
        ensure!(has(to, "2222")?, "{}", told(to, "info usernet")?);
    }
    let is_refused = |port: &str| -> anyhow::Result<()> {
        let said = blockers(lab)?;
        ensure!(said.contains(port) && said.contains("the network own"), "{said}");
        let migration = site.instance().migrate("dst")?;
        ensure!(migration.outcome == ROLLED_BACK, "{migration:?}");
        let error = migration.error.unwrap_or_default();
        ensure!(error.contains(port), "{error}");
        site.goes_on_kept("src")
    };
    told("src", "hostfwd_add own tcp:127.0.0.1:2223-:23")?;
    is_refused("tcp:127.0.0.1:2223-10.0.2.15:23")?;
    told("src", "hostfwd_remove own tcp:127.0.0.1:2223")?;
    lab.ask(&["check", NAME, "--to", "dst"])?;
    told("src", "hostfwd_remove own tcp:127.0.0.1:2222")?;
    is_refused("tcp:127.0.0.1:2222-10.0.2.15:22")?;
    told("src", "hostfwd_add own tcp:127.0.0.1:2222-:22")?;
    site.instance().migrate("dst")?.must_be_committed()?;
    site.goes_on_kept("dst")?;
    ensure!(has("dst", "2222")? && !has("dst", "2223")?, "{}", told("dst", "info usernet")?);

    // A network that libvirt itself adds has none, until it is given one behind libvirt.
    let words = ["attach-interface", NAME, "user", "--mac", "52:54:00:00:00:01", "--model", "virtio", "--live"];
    site.ask("dst", &words)?;
    site.instance().migrate("src")?.must_be_committed()?;
    site.goes_on_kept("src")?;
    let networks = told("src", "info network")?;
    ensure!(networks.contains("52:54:00:00:00:01"), "{networks}");
    told("src", "hostfwd_add hostnet0 udp:127.0.0.1:2225-:25")?;
    let said = blockers(lab)?;
    ensure!(said.contains("udp:127.0.0.1:2225-10.0.2.15:25"), "{said}");
    told("src", "hostfwd_remove hostnet0 udp:127.0.0.1:2225")?;
    site.instance().moves("dst")?;
    site.goes_on_kept("dst")
}

/// libvirt's own forwards: the destination's libvirt starts them from the description.
pub(super) fn of_passt(lab: &TestLab) -> anyhow::Result<()> {
    let site = Site::start(lab)?;
    let description = site.description(NAME, BACKING)?;
    change(&description, &[("</devices>", PASST)])?;
    site.ask("src", &["define", &description])?;
    site.ask("src", &["start", NAME])?;
    site.counts_on()?;
    attach(lab, NAME)?;
    lab.ask(&["check", NAME, "--to", "dst"])?;
    for to in ["dst", "src"] {
        site.instance().migrate(to)?.must_be_committed()?;
        site.goes_on_kept(to)?;
        let xml = site.ask(to, &["dumpxml", NAME])?;
        ensure!(xml.contains("<range start='2224' to='22'/>"), "{xml}");
        for host in super::HOSTS {
            let listening = lab.start_plain(host, &["ss", "-Htln"])?.succeed(super::LIMIT)?;
            ensure!(
                listening.stdout.contains("127.0.0.1:2224") == (*host == to),
                "{host}: {}",
                listening.stdout
            );
        }
    }
    Ok(())
}
