//! A volume moves: at its source, and at its destination. `verbatim_mirror::decision` has the rules.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::Handle;
use tokio::sync::mpsc::unbounded_channel;
use tokio::time::MissedTickBehavior;
use verbatim_mirror::decision::{
    Answer, Ask, Here, Offer, Refusal, Role, SessionId, Sidecar, Verdict, answer, deciding, has_left, prepare,
};
use verbatim_mirror::trust::may_compare;
use verbatim_mirror::{Event, Report};

use super::both::is_not_the_sources;
use super::data::HowMade;
use super::orders::{has_ended, has_its_size, known, serving};
use super::places::has_room;
use super::resolving::is_answered;
use super::space::needed;
use super::{Daemon, Entry, State, waits_for};
use crate::background;
use crate::callers::PROOF;
use crate::control::Moved;
use crate::faults::Point;
use crate::folder::Settings;
use crate::own_thread::OwnThread;
use crate::peer::destination::Incoming;
use crate::peer::fetching::Fetching;
use crate::peer::source::Call;
use crate::store::trust::Belief;
use crate::store::{Lack, Making, Store};
use crate::transport::{Carriage, RNIC_LIMIT, Wanted};
use crate::volume::Volume;
use crate::wire::{self, About, Hello, OLDEST, Purpose, Rings, ToSource, VERSION};
use crate::words;

/// Interval of the engine's clock ticks.
const TICK: Duration = Duration::from_millis(10);

/// The longest name of a host: it is written into a sidecar.
const MAX_HOST: usize = 255;

/// Pause after a failed hold.
const HOLD_AGAIN: Duration = Duration::from_millis(300);

impl Daemon {
    pub(super) fn call(
        &self,
        entry: &Entry,
        sidecar: &Sidecar,
        session: SessionId,
        to: &str,
        purpose: Purpose,
        transport: Option<Wanted>,
    ) -> anyhow::Result<Call> {
        let hosts = self.hosts.clone();
        let hosts = hosts
            .with_context(|| format!("there is no hosts.json in {}", self.config.config_dir.display()))?;
        hosts.address(to)?;
        let wanted = transport.unwrap_or(self.config.copy_transport);
        let untrusted = hosts.untrusted(&[&self.config.name, to]);
        Ok(Call {
            rnic: self.rnic(),
            carriage: Carriage::first(wanted, &untrusted),
            hosts,
            to: to.to_owned(),
            port: self.config.port,
            version: Arc::new(VERSION.into()),
            about: None,
            hello: Hello {
                version: VERSION,
                name: entry.name.clone(),
                id: sidecar.id,
                session,
                base: sidecar.generation,
                purpose,
            },
        })
    }

    /// Asks the other host whether it would take the volume, if the volume may leave this host.
    pub(super) async fn check(&self, entry: &Entry, to: &str) -> anyhow::Result<Result<(), String>> {
        let (call, allocated) = {
            let state = entry.state.lock().await;
            serving(entry, &state)?;
            // Obstacles on this host are reported without a question to the other host.
            let may = self.may_move(entry, &state, false);
            if let Err(error) = may.and_then(|()| is_answered(&state, to)) {
                return Ok(Err(format!("{error:#}")));
            }
            let sidecar = known(entry, &state)?;
            let purpose = Purpose::Fill {
                length: sidecar.length,
                from: self.config.name.clone(),
                attached: false,
                rdma: None,
                link: 0,
            };
            let session = SessionId(rand::random());
            let mut call = self.call(entry, sidecar, session, to, purpose, None)?;
            call.about = state.about(entry);
            (call, needed(entry, &state, sidecar.length)?)
        };
        call.ask_for_room(allocated).await
    }

    /// Moves the volume. Every error means that it is served here as before.
    pub(super) async fn migrate(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        to: String,
        (bytes_per_second, transport): (Option<u64>, Option<Wanted>),
        is_rescue: bool,
    ) -> anyhow::Result<Moved> {
        let began = Instant::now();
        let session = SessionId(rand::random());
        let (reports, mut reported) = unbounded_channel();
        let (refusals, mut refused) = unbounded_channel();
        let (volume, link) = {
            let state = entry.state.lock().await;
            serving(entry, &state)?;
            self.may_move(entry, &state, is_rescue)?;
            if to == self.config.name {
                bail!("{} is on {to} already", entry.name);
            }
            let volume = state.volume.clone().context("it is not served")?;
            if volume.migration().is_some() {
                bail!("{} is being moved already", entry.name);
            }
            has_its_size(entry, &state, &volume)?;
            is_answered(&state, &to)?;
            // Before anything is decided: later it must not fail.
            let reserved = entry.folder.reserve_sidecar();
            reserved.context("the decision could not be written down here")?;
            let sidecar = state.sidecar.as_ref().expect("it is served");
            let purpose = Purpose::Fill {
                length: sidecar.length,
                from: self.config.name.clone(),
                attached: state.settings.attached,
                rdma: None,
                link: 0,
            };
            let mut call = self.call(entry, sidecar, session, &to, purpose, transport)?;
            call.about = state.about(entry);
            let thread = OwnThread::start("link").context("no thread for the connection")?;
            let allocated = needed(entry, &state, sidecar.length)?;
            volume.migrate(bytes_per_second, reports);
            let link = thread.spawn(call.keep(volume.clone(), allocated, refusals, self.config.hook));
            (volume, link)
        };
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let mut hold_at: Option<Instant> = None;
        let mut held_since = Instant::now();
        let result = loop {
            tokio::select! {
                _ = ticks.tick() => {
                    if let Some(why) = volume.tick() {
                        tracing::warn!("{}: {why}", entry.name);
                    }
                    if hold_at.is_some_and(|at| Instant::now() >= at) {
                        hold_at = None;
                        held_since = Instant::now();
                        volume.event(Event::Hold);
                    }
                }
                report = reported.recv() => match report.expect("the volume has a sender") {
                    Report::Mirrored => {
                        (self.config.hook)(Point::Mirrored);
                        hold_at = Some(Instant::now());
                    }
                    Report::HoldFailed(why) => {
                        tracing::info!("{}: a hold has failed: {}", entry.name, words::hold(&why, &to));
                        hold_at = Some(Instant::now() + HOLD_AGAIN);
                    }
                    Report::Held => break Ok(()),
                    Report::Ended(why) => {
                        let why = refused.try_recv().unwrap_or_else(|_| words::ended(&why, &to));
                        break Err(anyhow::anyhow!("{} was not moved, and is served here: {why}", entry.name));
                    }
                },
            }
        };
        let status = volume.migration();
        let copy = volume.carriage();
        if let Err(error) = result {
            link.abort();
            self.say_that_it_ended(entry, session, to);
            return Err(error);
        }
        let generation = self.decide(entry, &volume, session, &to, is_rescue).await;
        link.abort();
        let (status, sent_bytes) = status.context("a volume that is held is being moved")?;
        Ok(Moved {
            name: entry.name.clone(),
            generation: generation?,
            seconds: began.elapsed().as_secs_f64(),
            blackout_ms: held_since.elapsed().as_secs_f64() * 1e3,
            sent_bytes,
            copied_bytes: status.copied_bytes,
            interruptions: status.interruptions,
            copy,
            to,
        })
    }

    /// Says to the destination that the attempt is over, so that it need not keep what has come. One that does not hear it gives that up later
    /// by itself.
    fn say_that_it_ended(self: &Arc<Self>, entry: &Arc<Entry>, session: SessionId, to: String) {
        let (daemon, entry) = (self.clone(), entry.clone());
        tokio::spawn(async move {
            let call = {
                let state = entry.state.lock().await;
                let Some(sidecar) = state.sidecar.as_ref().filter(|sidecar| sidecar.may_serve()) else {
                    return;
                };
                let purpose = Purpose::Decide { gives_up: true };
                daemon.call(&entry, sidecar, session, &to, purpose, None)
            };
            let said = async { call?.ask().await };
            if let Err(error) = said.await {
                tracing::info!(
                    "{}: {to} does not know that the move has ended: {error:#}",
                    entry.name
                );
            }
        });
    }

    /// Decides the move. The tenant is held, and the destination has all data.
    async fn decide(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        volume: &Arc<Volume>,
        session: SessionId,
        to: &str,
        is_rescue: bool,
    ) -> anyhow::Result<u64> {
        let hook = self.config.hook;
        hook(Point::Held);
        {
            let mut state = entry.state.lock().await;
            // Its disk may have failed meanwhile.
            if let Err(error) = self.may_move(entry, &state, is_rescue) {
                volume.event(Event::Release);
                return Err(error);
            }
            let sidecar = state.sidecar.as_ref().expect("it is served");
            let deciding = deciding(sidecar, session, to, is_rescue).context("it does not serve")?;
            if let Err(error) = self.write(entry, &mut state, deciding) {
                // The record may be durable all the same. A later process would then ask, and the destination
                // would commit its present data. So the tenant goes on only when it is known that the record
                // is not durable.
                if state.unknown.is_some() {
                    return Err(error.context(
                        "the decision may have been written down, or not; nobody is served until that is known (`verbatim volume status` tells)",
                    ));
                }
                volume.event(Event::Release);
                return Err(error.context("the decision could not be written down; it is served here"));
            }
        }
        hook(Point::Deciding);
        match self.resolve(entry).await {
            Some(sidecar) if sidecar.may_serve() => {
                bail!("{to} did not commit; {} is served here", entry.name)
            }
            Some(sidecar) => Ok(sidecar.generation + 1),
            None => bail!(
                "it is not known whether {} has moved; `verbatim volume status {0}` tells",
                entry.name
            ),
        }
    }

    /// Serves a call of another host's daemon, on a thread of its own. Work that outlives the connection, or
    /// waits for disks, goes to the `main` runtime.
    pub(super) async fn peer<S>(
        self: &Arc<Self>,
        mut stream: S,
        caller: &str,
        main: &Handle,
    ) -> anyhow::Result<()>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let hello = tokio::time::timeout(PROOF, wire::receive::<Hello>(&mut stream)).await;
        let (hello, beside) = hello.context("it does not say what it wants")??;
        let about = About::decode(&beside);
        if !(OLDEST..=VERSION).contains(&hello.version) {
            let why = format!("this daemon speaks version {VERSION}, not {}", hello.version);
            return Ok(wire::send(&mut stream, &ToSource::Refused(why)).await?);
        }
        match hello.purpose.clone() {
            Purpose::Fill {
                length,
                from,
                attached,
                rdma,
                link,
            } => {
                if from != caller {
                    let why = format!("the certificate is that of {caller}, and not that of {from}");
                    return Ok(wire::send(&mut stream, &ToSource::Refused(why)).await?);
                }
                let offer = Offer {
                    id: hello.id,
                    session: hello.session,
                    base: hello.base,
                    length,
                    from,
                };
                let (daemon, name, offered) = (self.clone(), hello.name.clone(), offer.clone());
                let preparing =
                    async move { daemon.prepare(&name, (&offered, about.as_ref()), attached).await };
                match main.spawn(preparing).await.context("it ends")? {
                    Ok((incoming, store, has_old, attempt)) => {
                        (self.config.hook)(Point::Prepared);
                        let (rings, fetching) = self.fetch(rdma).await;
                        let welcome = ToSource::Welcome {
                            incarnation: attempt,
                            has_old,
                            rings,
                        };
                        let filled =
                            incoming.fill((stream, link), offer.session, store, length, welcome, fetching);
                        let filled = filled.await;
                        let (daemon, entry) = (self.clone(), self.entry(&hello.name).await?);
                        let ran_full = incoming.ran_full();
                        main.spawn(async move { daemon.is_left(&entry, offer.session, ran_full).await });
                        filled?;
                    }
                    Err(error) => {
                        wire::send(&mut stream, &ToSource::Refused(format!("{error:#}"))).await?;
                    }
                }
            }
            Purpose::Chunks { link } => {
                let entry = self.entry(&hello.name).await?;
                let incoming = entry.state_soon().await?.incoming.clone();
                if let Some(incoming) = incoming {
                    background::enter();
                    incoming.fill_beside(stream, link).await?;
                }
            }
            Purpose::Decide { gives_up } => {
                (self.config.hook)(Point::Question);
                let ask = Ask {
                    id: hello.id,
                    session: hello.session,
                    base: hello.base,
                };
                let daemon = self.clone();
                let asked = async move { daemon.asked(&hello.name, &ask, gives_up).await };
                let answer = match main.spawn(asked).await.context("it ends")? {
                    Ok(answer) => ToSource::Answer(answer),
                    Err(error) => ToSource::Refused(format!("{error:#}")),
                };
                wire::send(&mut stream, &answer).await?;
            }
            Purpose::HasLeft => {
                let ask = Ask {
                    id: hello.id,
                    session: hello.session,
                    base: hello.base,
                };
                let (daemon, asker) = (self.clone(), caller.to_owned());
                let asked = async move { daemon.has_left(&hello.name, &ask, &asker).await };
                let answer = match main.spawn(asked).await.context("it ends")? {
                    Ok(answer) => ToSource::Answer(answer),
                    Err(error) => ToSource::Refused(format!("{error:#}")),
                };
                wire::send(&mut stream, &answer).await?;
            }
            Purpose::Promise { by } => {
                let ask = Ask {
                    id: hello.id,
                    session: hello.session,
                    base: hello.base,
                };
                let daemon = self.clone();
                let promised = async move { daemon.promise(&hello.name, &ask, by).await };
                let answer = match main.spawn(promised).await.context("it ends")? {
                    Ok(()) => ToSource::Promised,
                    Err(error) => ToSource::Refused(format!("{error:#}")),
                };
                wire::send(&mut stream, &answer).await?;
            }
            Purpose::WouldTake {
                length,
                allocated,
                from,
            } => {
                if from != caller {
                    let why = format!("the certificate is that of {caller}, and not that of {from}");
                    return Ok(wire::send(&mut stream, &ToSource::Refused(why)).await?);
                }
                let offer = Offer {
                    id: hello.id,
                    session: hello.session,
                    base: hello.base,
                    length,
                    from,
                };
                let daemon = self.clone();
                let taken = async move {
                    daemon
                        .would_take(&hello.name, (&offer, about.as_ref()), Some(allocated))
                        .await
                };
                let answer = match main.spawn(taken).await.context("it ends")? {
                    Ok(()) => ToSource::WouldTake,
                    Err(error) => ToSource::Refused(format!("{error:#}")),
                };
                wire::send(&mut stream, &answer).await?;
            }
        }
        Ok(())
    }

    /// Accepts the ring that the source offers, if that is possible.
    async fn fetch(&self, offer: Option<Box<verbatim_bulk::Offer>>) -> (Rings, Option<Fetching>) {
        let Some(offer) = offer else {
            return (Rings::None, None);
        };
        let (rnic, hook) = (self.rnic(), self.config.hook);
        let opening = tokio::task::spawn_blocking(move || Fetching::accept(&rnic, &offer, hook));
        let Ok(opened) = tokio::time::timeout(RNIC_LIMIT, opening).await else {
            return (Rings::Refused("its RNIC does not answer".to_owned()), None);
        };
        match opened.expect("it does not panic") {
            Ok((fetching, accepted)) => (Rings::Ready(accepted), Some(fetching)),
            Err(error) => (Rings::Refused(error.to_string()), None),
        }
    }

    /// Whether this offer would be taken. Nothing is changed.
    async fn would_take(
        &self,
        name: &str,
        offer: (&Offer, Option<&About>),
        allocated: Option<u64>,
    ) -> anyhow::Result<()> {
        let entry = self.entry(name).await?;
        let state = entry.state_soon().await?;
        self.taken(&entry, &state, offer, allocated).map(drop)
    }

    /// The sidecar and settings of the copy here for this offer.
    fn taken(
        &self,
        entry: &Entry,
        state: &State,
        (offer, about): (&Offer, Option<&About>),
        allocated: Option<u64>,
    ) -> anyhow::Result<(Sidecar, Settings)> {
        let name = &entry.name;
        ensure!(offer.from.len() <= MAX_HOST, "the name of the source is too long");
        has_ended(entry, state)?;
        let gone = state.gone(entry, offer.id)?;
        let sidecar = prepare(state.here(gone.as_ref()), offer).map_err(|refusal| match refusal {
            Refusal::OtherVolume => anyhow::anyhow!("there is another volume {name} already"),
            Refusal::Serves => anyhow::anyhow!("{name} is served here, or was about to leave"),
            Refusal::NotOlder => anyhow::anyhow!("the copy of {name} here is not older"),
            Refusal::Promised => anyhow::anyhow!(
                "{name} is promised here to an instance that moves, and its agent here has not said yet whether it has arrived"
            ),
            Refusal::Stale => anyhow::anyhow!(
                "a younger copy of {name} has been here than the one that comes; if that is the right one all the same, \
                 `verbatim volume delete {name}` here makes this host forget the other"
            ),
            Refusal::Unknown => anyhow::anyhow!("it is not known what the copy of {name} here is"),
        })?;
        let place = state.place.clone().filter(|_| state.sidecar.is_none());
        let settings = Settings {
            data: place
                .as_ref()
                .map(|place| place.data.clone())
                .or(state.settings.data.clone()),
            unnamed: place
                .as_ref()
                .map_or(state.settings.unnamed, |place| place.is_unnamed),
            ..state.settings.clone()
        };
        // The disk may hang.
        tokio::task::block_in_place(|| {
            let data = entry.folder.data(&settings);
            is_not_the_sources(&data, settings.unnamed, &offer.from, about)?;
            if let Some(place) = &place {
                has_room(&place.data, offer.length, place.is_unnamed)?;
            }
            self.has_space(&entry.folder.data(&settings), offer, allocated)
        })?;
        Ok((sidecar, settings))
    }

    async fn prepare(
        self: &Arc<Self>,
        name: &str,
        (offer, about): (&Offer, Option<&About>),
        attached: bool,
    ) -> anyhow::Result<(Arc<Incoming>, Arc<Store>, bool, u128)> {
        let entry = self.entry(name).await?;
        let mut state = entry.state_soon().await?;
        state.is_known(&entry)?;
        let is_same = state.sidecar.as_ref().is_some_and(|here| {
            let is_session = matches!(here.role, Role::Incoming { session, .. } if session == offer.session);
            is_session && here.id == offer.id
        });
        let is_poisoned = state
            .incoming
            .as_ref()
            .is_some_and(|incoming| incoming.is_poisoned());
        if is_same && is_poisoned {
            bail!("the disk of {name} here has failed");
        }
        self.note_failure(&entry, &mut state)?;
        state.left_at = None;
        let before = state.sidecar.clone();
        let has_old = before.is_some();
        // Data of this attempt were not there when it was asked.
        state.whole = None;
        if !is_same {
            if state.incoming.as_ref().is_some_and(|incoming| !incoming.renew()) {
                bail!("something of an earlier attempt to fill {name} is under way");
            }
            let (sidecar, settings) = self.taken(&entry, &state, (offer, about), None)?;
            let settings = Settings { attached, ..settings };
            let begun = self.begin(&entry, &mut state, sidecar, settings);
            if begun.is_err() && !has_old && state.place.is_none() && state.unknown.is_none() {
                entry.folder.discard();
            }
            begun?;
        }
        if !is_same || state.attempt == 0 {
            state.attempt = rand::random();
        }
        // Opening the data just now may have found a failure.
        self.note_failure(&entry, &mut state)?;
        let is_suspect = state.sidecar.as_ref().is_some_and(|sidecar| sidecar.suspect);
        let may_compare = may_compare(Here::from(before.as_ref())) && !is_suspect && !is_poisoned;
        let path = entry.folder.data(&state.settings);
        if !matches!(&state.filling, Some((session, ..)) if *session == offer.session) {
            self.begin_to_fill(&mut state, offer.session, &path, is_same);
        }
        let store = self.data_for(&entry, &mut state, before.as_ref(), offer.length)?;
        let reserve = state.filling.as_ref().and_then(|(.., reserve)| reserve.clone());
        let incoming = &mut state.incoming;
        let incoming = incoming.get_or_insert_with(|| Incoming::new(self.disks.clone(), self.config.hook));
        incoming.keep_free(reserve);
        Ok((incoming.clone(), store, may_compare, state.attempt))
    }

    /// The open data of the copy that is filled: its old data, or new ones.
    fn data_for(
        &self,
        entry: &Entry,
        state: &mut State,
        before: Option<&Sidecar>,
        length: u64,
    ) -> anyhow::Result<Arc<Store>> {
        let Some(before) = before else {
            if let Some(store) = &state.store {
                return Ok(store.clone());
            }
            let how = HowMade {
                making: Making::Over,
                preallocate: false,
                is_unnamed: state.place.as_ref().is_some_and(|place| place.is_unnamed),
            };
            return self.make_data(entry, state, length, how);
        };
        let belief = match before.suspect {
            true => Belief::Rewritten,
            false => Belief::Sound,
        };
        let opened = self.open_data(entry, state, before, belief);
        let store = match opened {
            Err(lack @ Lack::Later(_)) => Err(anyhow::Error::from(lack)),
            opened => opened.with_context(|| {
                format!(
                    "the older copy of {0} here cannot be had (`verbatim volume delete {0}` there forgets it)",
                    entry.name
                )
            }),
        }?;
        // The data get the length first; the sidecar records it afterwards.
        tokio::task::block_in_place(|| store.reach(length))?;
        Ok(store)
    }

    /// Begins to fill the copy. Everything that needs room is done now: later it must not fail.
    fn begin(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        state: &mut State,
        sidecar: Sidecar,
        settings: Settings,
    ) -> anyhow::Result<()> {
        entry.folder.make()?;
        entry.folder.write_settings(&settings)?;
        entry.folder.reserve_sidecar()?;
        let id = sidecar.id;
        let (before, was) = (state.sidecar.clone(), state.settings.clone());
        state.settings = settings;
        let begun = self
            .data_for(entry, state, before.as_ref(), sidecar.length)
            .and_then(|_| self.write(entry, state, sidecar));
        if let Err(error) = begun {
            state.settings = was;
            state.let_go();
            return Err(error);
        }
        state.place = None;
        // The sidecar has its content now.
        entry.folder.forget(id)?;
        entry.folder.reserve_sidecar()
    }

    /// Whether the copy here has left for that host.
    async fn has_left(&self, name: &str, ask: &Ask, asker: &str) -> anyhow::Result<Answer> {
        let entry = self.entry(name).await?;
        let state = entry.state_soon().await?;
        state.is_known(&entry)?;
        match has_left(state.here(None), ask, asker) {
            Verdict::Say(answer) => Ok(answer),
            Verdict::WriteThenSay(..) | Verdict::Refuse => bail!("that is not decided here yet"),
        }
    }

    async fn asked(self: &Arc<Self>, name: &str, ask: &Ask, gives_up: bool) -> anyhow::Result<Answer> {
        let hook = self.config.hook;
        let entry = self.entry(name).await?;
        let mut state = entry.state_soon().await?;
        let gone = state.gone(&entry, ask.id)?;
        let incoming = state.incoming.clone();
        let has_all = state.whole == Some(ask.session)
            || incoming
                .as_ref()
                .is_some_and(|incoming| incoming.is_complete(ask.session));
        let is_complete = !gives_up && has_all && state.has_file(&entry);
        // Another volume of that name says nothing of the one that was here before.
        let here = gone.as_ref().map_or_else(|| state.here(None), Here::Gone);
        match answer(here, ask, is_complete) {
            Verdict::Say(answer) => Ok(answer),
            Verdict::Refuse => match state.sidecar.as_ref().and_then(waits_for) {
                Some(by) => bail!("the copy of {name} here waits for the session {by:016x} of the agents"),
                None => bail!("it is not known what the copy of {name} here is"),
            },
            Verdict::WriteThenSay(sidecar, answer) => {
                // The copy receives nothing more. If this cannot be written, the source asks again.
                state.whole = sidecar.may_serve().then_some(ask.session);
                if let Some(incoming) = incoming {
                    incoming.close();
                }
                if sidecar.may_serve() {
                    hook(Point::Committing);
                }
                self.write(&entry, &mut state, sidecar)?;
                if answer != Answer::Committed {
                    self.watch_rest(&entry, &mut state);
                    // What is complete may be the best that there is, if an operator's word was wrong.
                    if gives_up && !has_all {
                        let (daemon, entry, session) = (self.clone(), entry.clone(), ask.session);
                        tokio::spawn(async move { daemon.is_left(&entry, session, true).await });
                    }
                }
                if answer == Answer::Committed {
                    state.filling = None;
                    self.is_filled(&entry, &mut state);
                    hook(Point::Committed);
                    self.serve_or_try_again(&entry, &mut state);
                }
                Ok(answer)
            }
        }
    }
}
