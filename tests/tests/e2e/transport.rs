//! Memory that goes by one-sided RDMA: what arrives is what was sent, and where RDMA fails nothing is lost.

use anyhow::{Context, ensure};
use verbatim_e2e::{Migration, TestLab};

use crate::Test;
use crate::drain::Loss;
use crate::migration::Check;

const HOSTS: &[&str] = &["src", "dst", "peer"];

/// MiB of private memory.
const PRIVATE_MIB: u64 = 64;

/// All of them.
pub fn tests() -> Vec<Test> {
    let mut tests = vec![
        Test::new("transport::by_either_operation", HOSTS, by_either_operation),
        Test::new("transport::by_the_list_of_hosts", HOSTS, by_the_list_of_hosts),
        Test::new("transport::in_a_bad_network", HOSTS, in_a_bad_network),
    ];
    let failing = [
        Test::new("transport::damaged", HOSTS, damaged),
        Test::new("transport::an_rnic_dies", HOSTS, an_rnic_dies),
        Test::new("transport::an_agent_dies", HOSTS, an_agent_dies),
    ];
    tests.extend(failing.map(Test::injecting_faults));
    tests
}

fn check(lab: &TestLab) -> anyhow::Result<Check<'_>> {
    let mebibytes = PRIVATE_MIB.to_string();
    Check::start(
        lab,
        &["--op", "all", "-q", "2", "-s", "16384", "--private", &mebibytes],
    )
}

fn must_have_gone_by_rdma(report: &Migration) -> anyhow::Result<()> {
    report.must_be_committed()?;
    ensure!(report.memory_transport == "rdma", "{report:?}");
    ensure!(report.rdma_bytes >= PRIVATE_MIB << 20, "{report:?}");
    Ok(())
}

/// Whatever carries it, in runs of whatever length, packed or not: the program finds its memory as it left it.
fn by_either_operation(lab: &TestLab) -> anyhow::Result<()> {
    let check = check(lab)?;
    for (to, tuning) in [
        ("dst", "operation=write"),
        ("src", "operation=read"),
        ("dst", "operation=read,run=4096,window=65536,class=user"),
        ("src", "operation=write,run=65536,zeroes=send"),
    ] {
        let options = ["--memory-transport", "rdma", "--memory-tuning", tuning];
        let report = check.client.migrate_with(to, &options)?;
        must_have_gone_by_rdma(&report).context(tuning)?;
        check.flows(to)?;
    }
    let options = ["--memory-transport", "rdma", "--memory-tuning", "pack=off"];
    let report = check.client.migrate_with("dst", &options)?;
    report.must_be_committed()?;
    ensure!(
        report.memory_transport == "rdma" && report.rdma_bytes == 0,
        "{report:?}"
    );
    check.end()?;
    Ok(())
}

/// TLS by default; the lab's list of hosts trusts the network.
fn by_the_list_of_hosts(lab: &TestLab) -> anyhow::Result<()> {
    let check = check(lab)?;
    let report = check.client.migrate("dst")?;
    report.must_be_committed()?;
    ensure!(
        report.memory_transport == "tls" && report.memory_transport_reason == "asked for",
        "{report:?}"
    );
    ensure!(report.rdma_bytes == 0, "{report:?}");
    check.flows("dst")?;
    let report = check
        .client
        .migrate_with("src", &["--memory-transport", "auto"])?;
    must_have_gone_by_rdma(&report)?;
    ensure!(
        report.memory_transport_reason.contains("list of hosts"),
        "{report:?}"
    );
    check.end()?;
    Ok(())
}

/// Packets are lost, and all of it arrives.
fn in_a_bad_network(lab: &TestLab) -> anyhow::Result<()> {
    let check = check(lab)?;
    let loss = Loss::of(lab, "dst", &["in"], 2)?;
    let report = check
        .client
        .migrate_with("dst", &["--memory-transport", "rdma"])?;
    drop(loss);
    must_have_gone_by_rdma(&report)?;
    check.flows("dst")?;
    check.end()?;
    Ok(())
}

/// A bit that is changed on the way is noticed, and the migration begins again, over TLS.
fn damaged(lab: &TestLab) -> anyhow::Result<()> {
    let check = check(lab)?;
    lab.order_faults("dst", "destination-place damage\n")?;
    let report = check
        .client
        .migrate_with("dst", &["--memory-transport", "rdma"])?;
    lab.order_faults("dst", "")?;
    report.must_be_committed()?;
    ensure!(report.memory_transport == "tls", "{report:?}");
    let why = &report.memory_transport_reason;
    ensure!(why.contains("not what was sent"), "{why}");
    check.flows("dst")?;
    check.end()?;
    Ok(())
}

/// The destination's RNIC dies: the instance stays where it is.
fn an_rnic_dies(lab: &TestLab) -> anyhow::Result<()> {
    let check = check(lab)?;
    lab.order_faults("dst", "destination-place kill-nic\n")?;
    let report = check
        .client
        .migrate_with("dst", &["--memory-transport", "rdma"])?;
    lab.order_faults("dst", "")?;
    report.must_be_rolled_back(&["RNIC"])?;
    check.flows("src")?;
    check.end()?;
    Ok(())
}

/// The destination's agent dies while memory comes by RDMA: the instance stays where it is, and moves when an agent is there again.
fn an_agent_dies(lab: &TestLab) -> anyhow::Result<()> {
    let check = check(lab)?;
    lab.order_faults("dst", "destination-place exit\n")?;
    let report = check
        .client
        .migrate_with("dst", &["--memory-transport", "rdma"])?;
    lab.order_faults("dst", "")?;
    report.must_be_rolled_back(&[])?;
    check.flows("src")?;
    lab.restart("dst", "agent")?;
    must_have_gone_by_rdma(
        &check
            .client
            .migrate_with("dst", &["--memory-transport", "rdma"])?,
    )?;
    check.flows("dst")?;
    check.end()?;
    Ok(())
}
