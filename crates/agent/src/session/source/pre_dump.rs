//! Private memory goes ahead: CRIU writes it down while the program runs, in rounds, and the dump in the blackout has what was
//! written since the last of them.
//!
//! It is never needed: whatever stands in its way, all private memory goes in the dump, in one piece, and the report says why.
//!
//! Images lie in `pre-dump/N` below the instance's images, on both hosts, each with a link to the one before.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Context;
use verbatim_container::{PreDumpConfig, PreDumped};

use super::Source;
use super::pre_copy::private_round;
use crate::memory::convergence::Verdict;
use crate::memory::moves::Moves;
use crate::memory::pre_dump::PreDump;
use crate::memory::private;
use crate::memory::send::Sender;
use crate::proto::file_part::Folder;

/// Where they are, in the folder of images.
pub(super) const PRE_DUMPS: &str = "pre-dump";

/// How often a pre-dump that takes long to send is told of.
const TELL_EVERY: Duration = Duration::from_millis(200);

impl Source {
    /// Pre-dumps until more of them gain nothing, or the limits are reached. An error is one of the migration.
    pub(super) async fn pre_dump_rounds(&mut self, begun: Instant) -> anyhow::Result<()> {
        match self.may_pre_dump().await {
            Ok(moves) => self.ahead.moves = Some(moves),
            Err(why_not) => {
                self.ahead.why_not = Some(why_not);
                return Ok(());
            }
        }
        loop {
            if !self.pre_dump().await {
                return Ok(());
            }
            match self.ahead.chain.verdict(&self.request.limits, begun.elapsed()) {
                Verdict::Again => {}
                Verdict::Converged | Verdict::DoesNotConverge => return Ok(()),
            }
        }
    }

    /// One more, where much may have been written since the last: the dump is about to be prepared.
    pub(super) async fn pre_dump_again(&mut self) {
        let Some(last) = self.ahead.last.filter(|_| self.ahead.parent().is_some()) else {
            return;
        };
        if let Err(error) = self.ahead.nothing_has_moved() {
            self.go_in_one_piece(&error).await;
        } else if self.ahead.chain.is_stale(last.elapsed()) {
            self.pre_dump().await;
        }
    }

    /// Why private memory goes in one piece, or else what to watch.
    async fn may_pre_dump(&self) -> Result<Moves, String> {
        if let Err(said) = self.agent.tools.tracks_memory().await {
            return Err(format!(
                "{} does not tell what is written to memory: {said}",
                self.agent.name()
            ));
        }
        let init = self.instance.init_pid();
        if let Some(why_not) = private::untracked(init) {
            return Err(why_not.to_owned());
        }
        Moves::watch(init).map_err(|error| {
            format!(
                "{} cannot tell whether memory is moved (mremap): {error}",
                self.agent.name()
            )
        })
    }

    /// One pre-dump, sent. False if that failed, and private memory goes in one piece.
    async fn pre_dump(&mut self) -> bool {
        match self.try_pre_dump().await {
            Ok(()) => true,
            Err(error) => {
                self.go_in_one_piece(&error).await;
                false
            }
        }
    }

    async fn try_pre_dump(&mut self) -> anyhow::Result<()> {
        let begun = Instant::now();
        let paths = &self.instance.home.paths;
        let before = self.ahead.chain.all().len();
        let folder = Path::new(PRE_DUMPS).join((before + 1).to_string());
        let config = PreDumpConfig {
            name: self.record().name.clone(),
            images: paths.images.join(&folder),
            work: paths.work.clone(),
            parent: (before > 0).then(|| Path::new("..").join(before.to_string())),
            rnics: !self.record().rnics.is_empty(),
        };
        if self.ahead.damaged {
            std::fs::write(paths.images.join(PRE_DUMPS), b"a file where a folder should be")?;
        }
        let (agent, images) = (Arc::clone(&self.agent), config.images.clone());
        // By itself: when this attempt is cut off it goes on, since CRIU must not be stopped in the middle of it.
        let pre_dump = async move { verbatim_container::pre_dump(&agent.tools, config).await };
        let running = self.ahead.running.insert(tokio::spawn(pre_dump));
        let dumped = running.await;
        self.ahead.running = None;
        let PreDumped { bytes, frozen } = dumped.context("a pre-dump panicked")??;
        self.ahead.nothing_has_moved()?;
        self.send_ahead(&folder).await?;
        // The destination has them, and the room is needed for the next.
        verbatim_container::drop_pages(&images).context("the room of a pre-dump is not given back")?;
        let time = begun.elapsed();
        self.ahead.last = Some(Instant::now());
        self.ahead.chain.note(PreDump { bytes, time, frozen });
        Ok(())
    }

    /// Sends a pre-dump; told of while it is sent and when it is there.
    async fn send_ahead(&mut self, folder: &Path) -> anyhow::Result<()> {
        let begun = Instant::now();
        let (round, dirty_bytes) = {
            let all = self.ahead.chain.all();
            (all.len() as u32 + 1, all.last().map_or(0, |last| last.bytes))
        };
        let told = |sent, dirty, complete| private_round(round, begun, sent, dirty, complete);
        let images = self.instance.home.paths.images.clone();
        // Nobody writes to them any more: what the files' times say is enough.
        let trusted = Some(PathBuf::new());
        let mut sender = Sender::new(self.session, Folder::Images, images, trusted)
            .only(folder)
            .by(&self.route);
        let (mut destination, sent) = (self.destination(), sender.sent());
        let mut ticks = tokio::time::interval_at((begun + TELL_EVERY).into(), TELL_EVERY);
        let sending = sender.round(&mut destination);
        tokio::pin!(sending);
        let bytes = loop {
            tokio::select! {
                bytes = &mut sending => break bytes?,
                _ = ticks.tick() => {
                    let _ = self.progress.try_send(told(sent.load(Ordering::Relaxed), dirty_bytes, false));
                }
            }
        };
        self.bytes.pre_copy += bytes;
        let _ = self.progress.try_send(told(bytes, bytes, true));
        Ok(())
    }

    /// What was sent ahead is of no use: it is removed here and at the destination.
    async fn go_in_one_piece(&mut self, error: &anyhow::Error) {
        let why_not = format!("{error:#}");
        self.note(&format!("private memory goes in one piece: {why_not}"));
        self.ahead.why_not = Some(why_not);
        self.ahead.clear(&self.instance.home.paths).await;
        let (mut destination, folder) = (self.destination(), Path::new(PRE_DUMPS));
        let removed = Sender::remove(self.session, Folder::Images, folder, &mut destination);
        if let Err(error) = removed.await {
            tracing::warn!(
                error = format!("{error:#}"),
                "pre-dumps are left at the destination"
            );
        }
    }
}
