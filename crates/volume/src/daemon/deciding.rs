//! A volume moves: at its source, and at its destination. `verbatim_mirror::decision` has the rules.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::Handle;
use tokio::sync::mpsc::unbounded_channel;
use tokio::time::MissedTickBehavior;
use verbatim_mirror::decision::{
    Answer, Ask, Offer, Refusal, Role, SessionId, Sidecar, Verdict, answer, prepare,
};
use verbatim_mirror::{Event, Report};

use super::orders::serving;
use super::places::has_room;
use super::{Daemon, Entry};
use crate::background;
use crate::control::Moved;
use crate::faults::Point;
use crate::folder::Settings;
use crate::own_thread::OwnThread;
use crate::peer::destination::Incoming;
use crate::peer::fetching::Fetching;
use crate::peer::source::Call;
use crate::store::Store;
use crate::transport::{Carriage, Wanted};
use crate::volume::Volume;
use crate::wire::{self, Hello, Purpose, Rings, ToSource, VERSION};

/// How often the engine is told the time.
const TICK: Duration = Duration::from_millis(10);

/// After a hold that has failed.
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

    /// Moves it. Every error means that it is served here as before.
    pub(super) async fn migrate(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        to: String,
        bytes_per_second: Option<u64>,
        transport: Option<Wanted>,
    ) -> anyhow::Result<Moved> {
        let began = Instant::now();
        let session = SessionId(rand::random());
        let (reports, mut reported) = unbounded_channel();
        let (refusals, mut refused) = unbounded_channel();
        let (volume, link) = {
            let state = entry.state.lock().await;
            serving(entry, &state)?;
            if to == self.config.name {
                bail!("{} is on {to} already", entry.name);
            }
            let volume = state.volume.clone().context("it is not served")?;
            if volume.migration().is_some() {
                bail!("{} is being moved already", entry.name);
            }
            let sidecar = state.sidecar.as_ref().expect("it is served");
            let purpose = Purpose::Fill {
                length: sidecar.length,
                from: self.config.name.clone(),
                attached: state.settings.attached,
                rdma: None,
                link: 0,
            };
            let call = self.call(entry, sidecar, session, &to, purpose, transport)?;
            let thread = OwnThread::start("link").context("no thread for the connection")?;
            volume.migrate(bytes_per_second, reports);
            let link = thread.spawn(call.keep(volume.clone(), refusals, self.config.hook));
            (volume, link)
        };
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let mut hold_at: Option<Instant> = None;
        let mut held_since = Instant::now();
        let result = loop {
            tokio::select! {
                _ = ticks.tick() => {
                    volume.event(Event::Tick);
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
                        tracing::info!("{}: a hold has failed: {why:?}", entry.name);
                        hold_at = Some(Instant::now() + HOLD_AGAIN);
                    }
                    Report::Held => break Ok(()),
                    Report::Ended(why) => {
                        let why = refused.try_recv().unwrap_or_else(|_| format!("{why:?}"));
                        break Err(anyhow::anyhow!("{} was not moved, and is served here: {why}", entry.name));
                    }
                },
            }
        };
        let status = volume.migration();
        let copy = volume.carriage();
        if let Err(error) = result {
            link.abort();
            return Err(error);
        }
        let generation = self.decide(entry, &volume, session, &to).await;
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

    /// The tenant is held, and the destination has everything.
    async fn decide(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        volume: &Arc<Volume>,
        session: SessionId,
        to: &str,
    ) -> anyhow::Result<u64> {
        let hook = self.config.hook;
        hook(Point::Held);
        {
            let mut state = entry.state.lock().await;
            let sidecar = state.sidecar.clone().expect("it is served");
            let to = to.to_owned();
            let deciding = sidecar.with(Role::Deciding { session, to });
            if let Err(error) = tokio::task::block_in_place(|| entry.folder.write_sidecar(&deciding)) {
                // It may be there all the same. A process that comes later would ask, and the destination would commit what it
                // has now: so the tenant goes on only when that is off the disk.
                self.write(entry, &mut state, sidecar).await;
                volume.event(Event::Release);
                return Err(error.context("the decision could not be written down; it is served here"));
            }
            state.sidecar = Some(deciding);
        }
        hook(Point::Deciding);
        match self.resolve(entry).await {
            Some(sidecar) if sidecar.may_serve() => {
                bail!("{to} did not commit; {} is served here", entry.name)
            }
            Some(sidecar) => Ok(sidecar.generation + 1),
            None => bail!("{} is not being decided any more", entry.name),
        }
    }

    /// Another daemon has called, on a thread of its own. What outlives the connection, or waits for disks, is for the `main` runtime.
    pub(super) async fn peer<S>(self: &Arc<Self>, mut stream: S, main: &Handle) -> anyhow::Result<()>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (hello, _) = wire::receive::<Hello>(&mut stream).await?;
        if hello.version != VERSION {
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
                let offer = Offer {
                    id: hello.id,
                    session: hello.session,
                    base: hello.base,
                    length,
                    from,
                };
                match self.prepare(&hello.name, &offer, attached).await {
                    Ok((incoming, store, has_old)) => {
                        (self.config.hook)(Point::Prepared);
                        let (rings, fetching) = self.fetch(rdma).await;
                        let welcome = ToSource::Welcome {
                            incarnation: self.incarnation,
                            has_old,
                            rings,
                        };
                        incoming
                            .fill((stream, link), offer.session, store, length, welcome, fetching)
                            .await?;
                    }
                    Err(error) => {
                        wire::send(&mut stream, &ToSource::Refused(format!("{error:#}"))).await?;
                    }
                }
            }
            Purpose::Chunks { link } => {
                let entry = self.entry(&hello.name).await?;
                let incoming = entry.state.lock().await.incoming.clone();
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
                let answer = main.spawn(asked).await.context("it ends")??;
                wire::send(&mut stream, &ToSource::Answer(answer)).await?;
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
        }
        Ok(())
    }

    /// What can be done with a ring that the source offers.
    async fn fetch(&self, offer: Option<Box<verbatim_bulk::Offer>>) -> (Rings, Option<Fetching>) {
        let Some(offer) = offer else {
            return (Rings::None, None);
        };
        let (rnic, hook) = (self.rnic(), self.config.hook);
        let opened = tokio::task::spawn_blocking(move || Fetching::accept(&rnic, &offer, hook)).await;
        match opened.expect("it does not panic") {
            Ok((fetching, accepted)) => (Rings::Ready(accepted), Some(fetching)),
            Err(error) => (Rings::Refused(error.to_string()), None),
        }
    }

    async fn prepare(
        self: &Arc<Self>,
        name: &str,
        offer: &Offer,
        attached: bool,
    ) -> anyhow::Result<(Arc<Incoming>, Arc<Store>, bool)> {
        let entry = self.entry(name).await?;
        let mut state = entry.state.lock().await;
        if state.sidecar.is_none() && entry.folder.sidecar()?.is_some() {
            bail!("the volume {name} here is damaged");
        }
        let is_same = state.sidecar.as_ref().is_some_and(|here| {
            let is_session = matches!(here.role, Role::Incoming { session, .. } if session == offer.session);
            is_session && here.id == offer.id
        });
        let has_old = state.sidecar.is_some();
        if !is_same {
            let sidecar = prepare(state.sidecar.as_ref(), offer).map_err(|refusal| match refusal {
                Refusal::OtherVolume => anyhow::anyhow!("there is another volume {name} already"),
                Refusal::Serves => anyhow::anyhow!("{name} is served here, or was about to leave"),
                Refusal::NotOlder => anyhow::anyhow!("the copy of {name} here is not older"),
                Refusal::Promised => anyhow::anyhow!(
                    "{name} is promised here to an instance that moves, and its agent here has not said yet whether it has arrived"
                ),
            })?;
            let place = state.place.clone().filter(|_| !has_old);
            if let Some(place) = &place {
                has_room(place, offer.length)?;
            }
            entry.folder.make()?;
            let settings = Settings {
                attached,
                data: place.or(state.settings.data.clone()),
                ..state.settings.clone()
            };
            entry.folder.write_settings(&settings)?;
            entry.folder.write_sidecar(&sidecar)?;
            (state.sidecar, state.settings, state.place) = (Some(sidecar), settings, None);
        }
        let path = entry.folder.data(&state.settings);
        let store =
            Store::open(&path, offer.length).with_context(|| format!("cannot open {}", path.display()))?;
        let incoming = &mut state.incoming;
        let incoming = incoming.get_or_insert_with(|| Incoming::new(self.disks.clone(), self.config.hook));
        Ok((incoming.clone(), Arc::new(store), has_old))
    }

    async fn asked(self: &Arc<Self>, name: &str, ask: &Ask, gives_up: bool) -> anyhow::Result<Answer> {
        let hook = self.config.hook;
        let entry = self.entry(name).await?;
        let mut state = entry.state.lock().await;
        let incoming = state.incoming.clone();
        let is_complete = !gives_up
            && incoming
                .as_ref()
                .is_some_and(|incoming| incoming.is_complete(ask.session));
        match answer(state.sidecar.as_ref(), ask, is_complete) {
            Verdict::Say(answer) => Ok(answer),
            Verdict::WriteThenSay(sidecar, answer) => {
                if let Some(incoming) = incoming {
                    incoming.close();
                }
                if sidecar.may_serve() {
                    hook(Point::Committing);
                }
                self.write(&entry, &mut state, sidecar).await;
                if answer == Answer::Committed {
                    hook(Point::Committed);
                    if let Err(error) = self.serve(&entry, &mut state) {
                        tracing::error!("volume {name} has moved here and is not served: {error:#}");
                    }
                }
                Ok(answer)
            }
        }
    }
}
