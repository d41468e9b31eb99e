//! A domain that libvirt keeps when it is off: nothing starts it a second time, whatever fails, and libvirt's own means work on it while it is an instance.

use std::path::PathBuf;

use anyhow::{Context, ensure};
use verbatim_e2e::{ROLLED_BACK, Running, TestLab, eventually, left_behind};

use super::{BACKING, HOSTS, LIMIT, MANAGER, NAME, SHORT, Site, URI, attach, attach_on, change};
use crate::faults::{self, Subject};

/// What is believed to have ended is to be started again.
const RESTARTED: &str = "<on_poweroff>restart</on_poweroff><on_crash>restart</on_crash><devices>";

/// A site with a manager on each host that starts the domain where it hears of a crash.
struct Managed<'a> {
    site: Site<'a>,
    managers: Vec<Running>,
}

impl Managed<'_> {
    fn heard(&self, number: usize) -> anyhow::Result<Vec<String>> {
        let said = self.managers[number].stdout()?;
        let lines = said.lines().filter(|line| line.contains("lifecycle"));
        Ok(lines.map(str::to_owned).collect())
    }
}

impl Subject for Managed<'_> {
    fn name(&self) -> &str {
        NAME
    }

    fn connections(&self) -> u32 {
        0
    }

    fn goes_on(&self, host: &str) -> anyhow::Result<()> {
        self.site.goes_on_kept(host)?;
        for (number, known) in HOSTS.iter().enumerate() {
            let heard = self.heard(number)?;
            for word in ["Crashed", "Failed"] {
                ensure!(
                    !heard.iter().any(|line| line.contains(word)),
                    "{known} has heard {word}: {heard:#?}"
                );
            }
            if *known == host {
                let info = self.site.ask(known, &["dominfo", NAME])?;
                let is = |key: &str, value: &str| {
                    let mut lines = info.lines().filter_map(|line| line.split_once(':'));
                    lines.any(|(name, said)| name == key && said.trim() == value)
                };
                ensure!(is("Persistent", "yes") && is("Autostart", "enable"), "{known}: {info}");
                continue;
            }
            let Some(state) = self.site.state(known)? else {
                continue;
            };
            ensure!(state == "shut off", "{known}: {state}");
            let reason = self.site.reason(known)?;
            ensure!(reason == "shut off (destroyed)", "{known}: {reason}");
            let info = self.site.ask(known, &["dominfo", NAME])?;
            let autostart = info.lines().find(|line| line.starts_with("Autostart"));
            ensure!(autostart.is_some_and(|line| line.ends_with("disable")), "{known}: {info}");
        }
        Ok(())
    }

    fn moves(&self, to: &str) -> anyhow::Result<()> {
        self.site.moves(to)
    }

    fn end(mut self: Box<Self>) -> anyhow::Result<()> {
        // The start of the host without it starts nothing.
        let running = self.site.instance().row()?.host;
        let number = HOSTS.iter().position(|host| *host != running).context("another host")?;
        self.site.starts_anew(number)?;
        self.site.goes_on_kept(&running)
    }
}

/// As for a domain that libvirt forgets when it is off.
pub(super) fn faults(lab: &TestLab) -> anyhow::Result<()> {
    let site = Site::start(lab)?;
    let description = site.description(NAME, BACKING)?;
    change(&description, &[("<devices>", RESTARTED)])?;
    site.ask("src", &["define", &description])?;
    site.ask("src", &["autostart", NAME])?;
    site.ask("src", &["start", NAME])?;
    site.counts_on()?;
    attach(lab, NAME)?;
    // A definition there, too.
    site.instance().moves("dst")?;
    let start = |host: &&str| lab.start_plain(host, &["sh", "-c", MANAGER, URI, NAME]);
    let managers = HOSTS.iter().map(start).collect::<anyhow::Result<Vec<_>>>()?;
    let managed = Managed { site, managers };
    for (number, host) in [(1, "dst"), (0, "src")] {
        if managed.site.instance().row()?.host != host {
            managed.moves(host)?;
        }
        eventually("a manager that hears", LIMIT, || {
            managed.site.ask(host, &["suspend", NAME])?;
            managed.site.ask(host, &["resume", NAME])?;
            let heard = managed.heard(number)?;
            Ok(heard.iter().any(|line| line.contains("Suspended")).then_some(()))
        })?;
    }
    let more = [
        ("source-committed", verbatim_e2e::Action::Exit),
        ("source-commit", verbatim_e2e::Action::Fail),
    ];
    faults::some(lab, Box::new(managed), &[SHORT, &more].concat())
}

/// The instance is over when libvirt has taken its domain away, and nothing is left of it.
fn is_over(site: &Site<'_>, host: &str) -> anyhow::Result<()> {
    eventually("the end of the instance", LIMIT, || {
        Ok((site.instance().row()?.state == "exited").then_some(()))
    })?;
    site.lab.ask(&["stop", NAME])?;
    ensure!(left_behind(site.lab, host, NAME)?.is_empty());
    Ok(())
}

/// What libvirt does with a domain that is an instance: a snapshot with its RAM, a save, and libvirt's own migration.
fn works(site: &Site<'_>, host: &'static str, other: &'static str) -> anyhow::Result<()> {
    site.ask(host, &["snapshot-create-as", NAME, "inner"])?;
    site.counts_on()?;
    let saved = site.ask(host, &["snapshot-dumpxml", NAME, "inner"])?;
    ensure!(saved.contains("<memory snapshot='internal'/>"), "{saved}");
    site.ask(host, &["snapshot-delete", NAME, "inner"])?;
    ensure!(site.instance().row()?.state == "running");
    ensure!(site.saved_bytes(host, "attached")? > super::LEAST_SAVED);

    // With a file of its own.
    let file: PathBuf = site.folder.path().join("saved");
    let path = file.to_str().context("a path in UTF-8")?;
    site.ask(host, &["save", NAME, path])?;
    is_over(site, host)?;
    let bytes = std::fs::metadata(&file)?.len();
    ensure!(bytes > super::LEAST_SAVED, "the file of `save` has {bytes} bytes");
    site.ask(host, &["restore", path])?;
    site.counts_on()?;
    attach_on(site.lab, host, NAME)?;
    site.ask(host, &["managedsave", NAME])?;
    ensure!(site.reason(host)? == "shut off (saved)", "{}", site.reason(host)?);
    is_over(site, host)?;
    site.ask(host, &["start", NAME])?;
    site.counts_on()?;
    attach_on(site.lab, host, NAME)?;
    site.migrates_itself(host, other, "libvirt's own migration")?;
    is_over(site, host)?;
    attach_on(site.lab, other, NAME)?;
    site.counts_on()
}

/// libvirt's own means, while the domain is an instance: after it has been attached, after a move that came to nothing, and after a move.
pub(super) fn attached_means(lab: &TestLab) -> anyhow::Result<()> {
    let site = Site::start(lab)?;
    site.ask("src", &["define", &site.description(NAME, BACKING)?])?;
    site.ask("src", &["start", NAME])?;
    site.counts_on()?;
    attach(lab, NAME)?;
    works(&site, "src", "dst").context("after it was attached")?;
    lab.order_faults("dst", "source-commit fail\n")?;
    let migration = site.instance().migrate("src")?;
    lab.order_faults("dst", "")?;
    ensure!(migration.outcome == ROLLED_BACK, "{migration:?}");
    site.counts_on()?;
    works(&site, "dst", "src").context("after a move that came to nothing")?;
    site.instance().moves("dst")?;
    site.counts_on()?;
    works(&site, "dst", "src").context("after a move")?;
    // It moves as before.
    site.instance().moves("dst")?;
    site.counts_on()
}
