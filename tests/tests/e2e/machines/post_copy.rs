//! Virtual machines that run before all of their RAM has come. The guest of these tests finds a page that is lost, old, or another one's.

use anyhow::{Context, ensure};
use verbatim_e2e::{Migration, ROLLED_BACK, TestLab, eventually, left_behind};

use super::{Guest, HOSTS, LIMIT, NAME};
use crate::Test;
use crate::faults::Subject;

/// What has the guest leave something behind: one round, in which it writes on.
const EARLY: &[&str] = &["--post-copy", "--max-precopy-time", "0.001"];

/// RAM goes by one-sided RDMA, before the decision and after it.
const BY_RDMA: &[&str] = &["--memory-transport", "rdma"];

/// Where a host keeps what was left at it.
const BEHIND: &str = "/run/verbatim/behind";

pub fn tests() -> Vec<Test> {
    vec![
        Test::new("machines::post_copy", HOSTS, moves),
        Test::new("machines::post_copy_by_rdma", HOSTS, by_rdma).injecting_faults(),
        Test::new("machines::post_copy_agents_die", HOSTS, agents_die).injecting_faults(),
        Test::new("machines::post_copy_is_damaged", HOSTS, is_damaged).injecting_faults(),
        Test::new("machines::post_copy_rnic_dies", HOSTS, rnic_dies).injecting_faults(),
        Test::new("machines::post_copy_is_undone", HOSTS, is_undone).injecting_faults(),
        Test::new("machines::post_copy_loses_its_source", HOSTS, loses_its_source).injecting_faults(),
        Test::new("machines::post_copy_source_is_away", HOSTS, source_is_away).injecting_faults(),
        Test::new("machines::post_copy_often", HOSTS, often).only_on_demand(true),
    ]
}

/// Nothing of a guest's RAM is kept at a host.
fn keeps_nothing(lab: &TestLab, host: &str) -> anyhow::Result<()> {
    let folder = lab.path(host, BEHIND)?;
    eventually("a source that gives back what it has kept", LIMIT, || {
        Ok((std::fs::read_dir(&folder)?.count() == 0).then_some(()))
    })
}

fn leaves_some_behind(guest: &Guest, to: &str) -> anyhow::Result<Migration> {
    leaves_some_behind_with(guest, to, &[])
}

fn leaves_some_behind_with(guest: &Guest, to: &str, options: &[&str]) -> anyhow::Result<Migration> {
    let migration = guest.instance.migrate_with(to, &[EARLY, options].concat())?;
    migration.must_be_committed()?;
    ensure!(migration.post_copy_bytes > 0, "{migration:?}");
    Ok(migration)
}

/// There and back, and what is left by it: nothing.
fn there_and_back(lab: &TestLab, moves: usize) -> anyhow::Result<()> {
    let guest = Guest::start(lab, &[])?;
    let ways = [("src", "dst"), ("dst", "src")].into_iter().cycle();
    for (number, (from, to)) in ways.enumerate().take(moves) {
        // Over TLS, there and back; then by RDMA.
        let options = [&[], BY_RDMA][number / 2 % 2];
        leaves_some_behind_with(&guest, to, options)?;
        guest.counts_on()?;
        keeps_nothing(lab, from)?;
        let behind = left_behind(lab, from, NAME)?;
        ensure!(behind.is_empty(), "left on {from}: {behind:?}");
    }
    // One whose rounds gain enough leaves nothing behind, and is none.
    let migration = guest
        .instance
        .migrate_with("dst", &["--post-copy", "--max-blackout", "5000"])?;
    migration.must_be_committed()?;
    ensure!(migration.post_copy_bytes == 0, "{migration:?}");
    guest.counts_on()
}

fn moves(lab: &TestLab) -> anyhow::Result<()> {
    there_and_back(lab, 4)?;
    // Nothing but a virtual machine has RAM that can be left.
    let container = lab.instance("src", "other", &["sleep", "60"])?;
    let refused = container.migrate_with("dst", &["--post-copy"])?;
    ensure!(refused.outcome == ROLLED_BACK, "{refused:?}");
    let error = refused.error.unwrap_or_default();
    ensure!(error.contains("post-copy is for virtual machines"), "{error}");
    Ok(())
}

fn often(lab: &TestLab) -> anyhow::Result<()> {
    there_and_back(lab, 50)
}

/// By one-sided RDMA, in place; what cannot come that way comes over TLS.
fn by_rdma(lab: &TestLab) -> anyhow::Result<()> {
    let guest = waits_with(lab, BY_RDMA)?;
    is_lent(lab)?;
    lab.order_faults("dst", "")?;
    guest.counts_on()?;
    keeps_nothing(lab, "src")?;
    let ways = all_has_come(lab)?;
    ensure!(
        matches!(ways[..], [(1.., _)]),
        "KiB by RDMA and over TLS: {ways:?}"
    );
    // It moves on.
    let migration = leaves_some_behind_with(&guest, "src", BY_RDMA)?;
    ensure!(migration.memory_transport == "rdma", "{migration:?}");
    guest.counts_on()
}

/// What is changed on its way is noticed, and comes over TLS.
fn is_damaged(lab: &TestLab) -> anyhow::Result<()> {
    let guest = waits_with(lab, BY_RDMA)?;
    is_lent(lab)?;
    lab.order_faults("dst", "destination-bring damage\n")?;
    guest.counts_on()?;
    keeps_nothing(lab, "src")?;
    let logs = lab.logs();
    ensure!(
        logs.contains("what arrived by RDMA is not what was sent"),
        "{logs}"
    );
    let ways = all_has_come(lab)?;
    ensure!(
        matches!(ways[..], [(_, 1..)]),
        "KiB by RDMA and over TLS: {ways:?}"
    );
    Ok(())
}

/// A source whose RNIC dies while it lends gives the rest in another way.
fn rnic_dies(lab: &TestLab) -> anyhow::Result<()> {
    let guest = waits_with(lab, BY_RDMA)?;
    is_lent(lab)?;
    lab.restart("src", "nic")?;
    lab.order_faults("dst", "")?;
    guest.counts_on()?;
    keeps_nothing(lab, "src")?;
    let logs = lab.logs();
    ensure!(logs.contains("comes by RDMA no more"), "{logs}");
    leaves_some_behind_with(&guest, "src", BY_RDMA)?;
    guest.counts_on()
}

/// Waits until the source lends.
fn is_lent(lab: &TestLab) -> anyhow::Result<()> {
    eventually("a source that lends", LIMIT, || {
        let said = lab.logs().contains("is read by RDMA from now on");
        Ok(said.then_some(()))
    })
}

/// In KiB, what came by RDMA and over TLS after each move so far, as the agents say.
fn all_has_come(lab: &TestLab) -> anyhow::Result<Vec<(u64, u64)>> {
    let logs = lab.logs();
    let said = logs
        .lines()
        .filter(|line| line.contains("all of the RAM that was left behind has come"));
    let number = |line: &str, name: &str| {
        let (_, rest) = line.split_once(name)?;
        let digits = rest
            .split(|c: char| !c.is_ascii_digit())
            .find(|digits| !digits.is_empty())?;
        digits.parse().ok()
    };
    said.map(|line| {
        number(line, "by_rdma_kib")
            .zip(number(line, "over_tls_kib"))
            .with_context(|| line.to_owned())
    })
    .collect()
}

/// A guest on `dst` that waits for pages of `src`, which nobody asks for.
fn waits(lab: &TestLab) -> anyhow::Result<Guest<'_>> {
    waits_with(lab, &[])
}

fn waits_with<'a>(lab: &'a TestLab, options: &[&str]) -> anyhow::Result<Guest<'a>> {
    let guest = Guest::start(lab, &[])?;
    lab.order_faults("src", "source-commit hang\n")?;
    let migrate = lab.verbatim(&[&["migrate", NAME, "--to", "dst", "--json"], EARLY, options].concat())?;
    reached(lab, "src", "source-commit")?;
    lab.order_faults("dst", "destination-bring hang\n")?;
    lab.order_faults("src", "")?;
    let migration = Migration::of(&migrate.wait(LIMIT)?)?;
    migration.must_be_committed()?;
    ensure!(migration.post_copy_bytes > 0, "{migration:?}");
    reached(lab, "dst", "destination-bring")?;
    let kept = std::fs::read_dir(lab.path("src", BEHIND)?)?.count();
    ensure!(kept == 1, "{kept} are kept");
    Ok(guest)
}

fn reached(lab: &TestLab, host: &str, point: &str) -> anyhow::Result<()> {
    let reached = lab.path(host, "/run/verbatim/faults.reached")?;
    eventually("the point", LIMIT, || {
        let text = std::fs::read_to_string(&reached).unwrap_or_default();
        Ok(text.contains(point).then_some(()))
    })
}

/// Both agents are replaced while a guest waits for its pages, and it goes on with each of them.
fn agents_die(lab: &TestLab) -> anyhow::Result<()> {
    let guest = waits(lab)?;
    guest.stands_still()?;
    let row = guest.instance.row()?;
    ensure!(row.missing_bytes.is_some_and(|bytes| bytes > 0), "{row:?}");
    ensure!(row.missing_from.as_deref() == Some("src"), "{row:?}");
    let check = lab.verbatim(&["check", NAME, "--to", "src"])?.wait(LIMIT)?;
    ensure!(
        check.code == 0 && check.stderr.contains("are still on src and come from there"),
        "{check:?}"
    );
    lab.restart("src", "agent")?;
    lab.order_faults("dst", "")?;
    lab.restart("dst", "agent")?;
    guest.counts_on()?;
    keeps_nothing(lab, "src")?;
    let row = guest.instance.row()?;
    ensure!(row.host == "dst" && row.state == "running", "{row:?}");
    ensure!(row.missing_bytes.is_none(), "{row:?}");
    // It moves on, by either way.
    leaves_some_behind(&guest, "src")?;
    guest.counts_on()?;
    guest.moves("dst")?;
    guest.counts_on()
}

/// What fails before the decision leaves the guest running at its source, with all of its RAM, and nothing kept for anybody.
fn is_undone(lab: &TestLab) -> anyhow::Result<()> {
    let guest = Guest::start(lab, &[])?;
    for (host, order) in [
        ("src", "source-commit fail\n"),
        ("dst", "destination-restore fail\n"),
        ("dst", "destination-committed fail\n"),
    ] {
        lab.order_faults(host, order)?;
        let migration = guest.instance.migrate_with("dst", EARLY)?;
        lab.order_faults(host, "")?;
        ensure!(migration.outcome == ROLLED_BACK, "{order}: {migration:?}");
        guest.counts_on()?;
        keeps_nothing(lab, "src")?;
        ensure!(left_behind(lab, "dst", NAME)?.is_empty(), "{order}");
    }
    // An agent that comes after one that died in the middle finds what was kept, and what became of the session.
    lab.order_faults("src", "source-commit exit\n")?;
    let migrate = lab.verbatim(&[&["migrate", NAME, "--to", "dst", "--json"], EARLY].concat())?;
    migrate.wait(LIMIT)?;
    lab.order_faults("src", "")?;
    lab.restart("src", "agent")?;
    eventually("an agent that has undone the session", LIMIT, || {
        let row = guest.instance.row();
        Ok(row.is_ok_and(|row| row.state == "running").then_some(()))
    })?;
    guest.counts_on()?;
    keeps_nothing(lab, "src")?;
    leaves_some_behind(&guest, "dst")?;
    guest.counts_on()
}

/// A guest whose last host has lost what it still needs never goes on.
fn loses_its_source(lab: &TestLab) -> anyhow::Result<()> {
    let guest = waits(lab)?;
    let before = guest.count()?;
    let folder = lab.path("src", BEHIND)?;
    // As a restart of that host does.
    for kept in std::fs::read_dir(&folder)? {
        std::fs::remove_dir_all(kept?.path())?;
    }
    lab.restart("src", "agent")?;
    lab.order_faults("dst", "")?;
    let row = eventually("a guest that is ended", LIMIT, || {
        let row = guest.instance.row()?;
        Ok((row.state == "exited").then_some(row))
    })?;
    ensure!(row.host == "dst" && row.exit_status == Some(137), "{row:?}");
    let logs = lab.logs();
    ensure!(
        logs.contains("it is ended, since it would go on with zeros"),
        "{logs}"
    );
    // What it has written before its end is what it should.
    let count = guest.count().context("its output")?;
    ensure!(count >= before, "{count} after {before}");
    Ok(())
}

/// A guest whose last host is away waits, and says for which; its operator can end it. The host gives back what it has kept when it is there again.
fn source_is_away(lab: &TestLab) -> anyhow::Result<()> {
    let guest = waits(lab)?;
    lab.lab().kill("src", "agent")?;
    lab.order_faults("dst", "")?;
    let waits_for_it = || -> anyhow::Result<()> {
        guest.stands_still()?;
        let row = guest.instance.row()?;
        ensure!(row.host == "dst" && row.state == "running", "{row:?}");
        ensure!(row.missing_bytes.is_some_and(|bytes| bytes > 0), "{row:?}");
        ensure!(row.missing_from.as_deref() == Some("src"), "{row:?}");
        Ok(())
    };
    waits_for_it()?;
    let shown = lab.verbatim(&["ps"])?.wait(LIMIT)?;
    ensure!(shown.stdout.contains("src"), "{}", shown.output());
    // An agent that comes after this one knows it, too, and does not end the guest: the host may come back.
    lab.restart("dst", "agent")?;
    eventually("an agent that says so, too", LIMIT, || Ok(waits_for_it().ok()))?;
    lab.ask(&["stop", NAME])?;
    ensure!(left_behind(lab, "dst", NAME)?.is_empty());
    lab.lab().start("src", "agent")?;
    keeps_nothing(lab, "src")
}
