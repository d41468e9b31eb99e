//! The link to the destination: calls it again and again, sends what the engine wants sent, tells the engine what comes back.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, BufReader, BufWriter};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, WeakUnboundedSender, unbounded_channel};
use verbatim_mirror::decision::Answer;
use verbatim_mirror::{Event, Standing};

use crate::faults::{Hook, Point};
use crate::outlet::Outgoing;
use crate::peer::beside::{Beside, Put};
use crate::peer::lending::Lending;
use crate::tls::Hosts;
use crate::transport::{Carriage, Rnic, Transport};
use crate::volume::Volume;
use crate::wire::{self, Hello, Purpose, Rings, ToDestination, ToSource};

/// So long a call may take until it is answered.
const CALL: Duration = Duration::from_secs(15);

/// Between two calls, the first time and at most.
const PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// A destination that is out of reach for so long is given up.
const GIVE_UP: Duration = Duration::from_secs(600);

/// How often the RNIC is looked after: it serves the other host without a word of this one's.
const LOOK: Duration = Duration::from_millis(100);

/// Whom to call, and what about.
pub struct Call {
    /// All hosts.
    pub hosts: Hosts,
    /// The destination.
    pub to: String,
    /// Its daemon's port.
    pub port: u16,
    /// What is said first.
    pub hello: Hello,
    /// This host's RNIC.
    pub rnic: Rnic,
    /// How chunks are to go.
    pub carriage: Carriage,
}

impl Call {
    /// A connection on which a first message was sent.
    async fn call(
        &self,
        purpose: Purpose,
    ) -> anyhow::Result<impl AsyncRead + AsyncWrite + Unpin + Send + use<>> {
        let hello = Hello {
            purpose,
            ..self.hello.clone()
        };
        let mut stream = self.hosts.connect(&self.to, self.port).await?;
        wire::send(&mut stream, &hello).await?;
        Ok(stream)
    }

    /// The same, and its first answer. A ring may be offered, and the connection has a name.
    async fn open(
        &self,
        rdma: Option<verbatim_bulk::Offer>,
        name: u128,
    ) -> anyhow::Result<(impl AsyncRead + AsyncWrite + Unpin + Send + use<>, ToSource)> {
        let mut purpose = self.hello.purpose.clone();
        if let Purpose::Fill {
            rdma: offered, link, ..
        } = &mut purpose
        {
            *offered = rdma.map(Box::new);
            *link = name;
        }
        let calling = async {
            let mut stream = self.call(purpose).await?;
            let (answer, _) = wire::receive::<ToSource>(&mut stream).await?;
            anyhow::Ok((stream, answer))
        };
        let called = tokio::time::timeout(CALL, calling).await;
        called
            .context("no answer")?
            .with_context(|| format!("cannot reach {}", self.to))
    }

    /// A second connection, for the chunks of the one with that name, which was welcomed.
    async fn open_beside(&self, link: u128) -> anyhow::Result<Beside> {
        let called = tokio::time::timeout(CALL, self.call(Purpose::Chunks { link })).await;
        let stream = called.context("no answer")?;
        let stream = stream.with_context(|| format!("cannot reach {} a second time", self.to))?;
        Ok(Beside::begin(stream))
    }

    /// Asks once.
    pub async fn ask(&self) -> anyhow::Result<Answer> {
        match self.open(None, 0).await?.1 {
            ToSource::Answer(answer) => Ok(answer),
            ToSource::Refused(why) => bail!("{} refuses: {why}", self.to),
            other => bail!("{} answers {other:?}", self.to),
        }
    }

    /// Asks once for a promise.
    pub async fn ask_to_promise(&self) -> anyhow::Result<()> {
        match self.open(None, 0).await?.1 {
            ToSource::Promised => Ok(()),
            ToSource::Refused(why) => bail!("{} refuses: {why}", self.to),
            other => bail!("{} answers {other:?}", self.to),
        }
    }

    /// Keeps a link for that volume until its migration is over. Why the destination will not have it goes to `refused`.
    pub async fn keep(self, volume: Arc<Volume>, refused: UnboundedSender<String>, hook: Hook) {
        let mut known = None;
        let mut carriage = self.carriage.clone();
        let mut pause = PAUSE;
        let mut since = Instant::now();
        while volume.migration().is_some() {
            if volume.standing() == Standing::Serving {
                hook(Point::Offering);
                let (lending, offer) = lend(&self.rnic, &mut carriage).await.unzip();
                volume.carried_by(carriage.clone());
                let link = rand::random();
                match self.open(offer, link).await {
                    Ok((
                        stream,
                        ToSource::Welcome {
                            incarnation,
                            has_old,
                            rings,
                        },
                    )) => {
                        let lending = accepted(lending, rings, &mut carriage);
                        volume.carried_by(carriage.clone());
                        let keeps = known.replace(incarnation) == Some(incarnation);
                        pause = PAUSE;
                        let way = match lending {
                            Some(lending) => Ok(Way::Ring(lending)),
                            None => self.open_beside(link).await.map(Way::Beside),
                        };
                        let exchanged = match way {
                            Ok(way) => exchange(stream, &volume, keeps, has_old || keeps, way, hook)
                                .await
                                .map_err(anyhow::Error::from),
                            Err(error) => Err(error),
                        };
                        // What has failed once is not tried again in this move.
                        carriage = volume.carriage().unwrap_or(carriage);
                        if let Err(error) = exchanged {
                            tracing::info!("the link to {} has ended: {error:#}", self.to);
                        }
                        since = Instant::now();
                    }
                    Ok((_, ToSource::Refused(why))) => {
                        // Nobody listens if the migration is over.
                        let _ = refused.send(why);
                        return volume.event(Event::Cancel);
                    }
                    Ok((_, other)) => tracing::warn!("{} answers {other:?}", self.to),
                    Err(error) => tracing::info!("{error:#}"),
                }
                if since.elapsed() > GIVE_UP {
                    let _ = refused.send(format!(
                        "{} was out of reach for {} s",
                        self.to,
                        GIVE_UP.as_secs()
                    ));
                    return volume.event(Event::Cancel);
                }
            }
            tokio::time::sleep(pause).await;
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }
}

/// A ring for the next connection, if chunks are to go by RDMA.
async fn lend(rnic: &Rnic, carriage: &mut Carriage) -> Option<(Lending, verbatim_bulk::Offer)> {
    if carriage.transport == Transport::Tls {
        return None;
    }
    let rnic = rnic.clone();
    let opened = tokio::task::spawn_blocking(move || Lending::open(&rnic)).await;
    match opened.expect("it does not panic") {
        Ok(lent) => Some(lent),
        Err(error) => {
            carriage.fall_back(error.to_string());
            None
        }
    }
}

/// The ring, if the other host has made one, too.
fn accepted(lending: Option<Lending>, rings: Rings, carriage: &mut Carriage) -> Option<Arc<Lending>> {
    let lending = lending?;
    let failed = match rings {
        Rings::Ready(accepted) => match lending.accept(&accepted) {
            Ok(()) => {
                carriage.device = Some(lending.name());
                return Some(Arc::new(lending));
            }
            Err(error) => error.to_string(),
        },
        Rings::Refused(why) => format!("the destination: {why}"),
        Rings::None => "the destination has not answered the offer".to_owned(),
    };
    carriage.fall_back(failed);
    None
}

/// How chunks leave.
enum Way {
    Ring(Arc<Lending>),
    Beside(Beside),
}

impl Way {
    fn lending(&self) -> Option<&Arc<Lending>> {
        match self {
            Self::Ring(lending) => Some(lending),
            Self::Beside(_) => None,
        }
    }

    /// Why chunks cannot leave any more; a ring's end is told by the destination.
    async fn ended(&mut self) -> io::Result<()> {
        match self {
            Self::Ring(_) => std::future::pending().await,
            Self::Beside(beside) => beside.ended().await,
        }
    }
}

/// One connection, until it ends.
async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    volume: &Arc<Volume>,
    keeps: bool,
    compares: bool,
    mut way: Way,
    hook: Hook,
) -> io::Result<()> {
    let (reader, writer) = tokio::io::split(stream);
    let (sender, outgoing) = unbounded_channel();
    // It keeps nothing open: when the engine gives the connection up, that ends.
    let more = sender.downgrade();
    let number = volume.link_up(keeps, compares, sender);
    let lending = way.lending().cloned();
    let lent = lending.as_deref();
    let chunks = match &way {
        Way::Ring(lending) => Chunks::Ring(lending.clone()),
        Way::Beside(beside) => Chunks::Beside(beside.chunks()),
    };
    let result = tokio::select! {
        result = write(writer, outgoing, &chunks) => result,
        result = way.ended() => result,
        result = read(BufReader::new(reader), volume, number, lent, &more, hook) => result,
        () = look_after(volume, lent, &more) => Ok(()),
    };
    volume.link_down(number);
    drop((way, chunks));
    if let Some(lending) = lending {
        // Its queue pair and its ring go, which takes a moment: nothing of this attempt can be read any more.
        let gone = tokio::task::spawn_blocking(move || drop(lending)).await;
        gone.expect("it does not panic");
    }
    result
}

/// By what chunks are given to whoever sends them.
enum Chunks {
    Ring(Arc<Lending>),
    Beside(UnboundedSender<Put>),
}

/// Ends when the engine has given the connection up.
async fn write(
    writer: impl AsyncWrite + Unpin,
    mut outgoing: UnboundedReceiver<Outgoing>,
    chunks: &Chunks,
) -> io::Result<()> {
    let mut writer = BufWriter::with_capacity(256 << 10, writer);
    while let Some(message) = outgoing.recv().await {
        let leaves = match (message, chunks) {
            (Outgoing::Frame(frame, data), _) => Some((frame, data)),
            (Outgoing::Chunk { tag, offset, data }, Chunks::Ring(lending)) => {
                Some(lending.put(tag, offset, data))
            }
            (Outgoing::Chunk { tag, offset, data }, Chunks::Beside(beside)) => {
                // If nobody takes it, the connection's end is told soon.
                let _ = beside.send(Put { tag, offset, data });
                None
            }
        };
        if let Some((frame, data)) = leaves {
            writer.write_all(&frame).await?;
            if let Some(data) = data {
                writer.write_all(&data).await?;
            }
        }
        if outgoing.is_empty() {
            writer.flush().await?;
        }
    }
    Ok(())
}

async fn read(
    mut reader: impl AsyncRead + Unpin,
    volume: &Arc<Volume>,
    number: u64,
    lending: Option<&Lending>,
    more: &WeakUnboundedSender<Outgoing>,
    hook: Hook,
) -> io::Result<()> {
    loop {
        let (message, _) = wire::receive::<ToSource>(&mut reader).await?;
        match (message, lending) {
            (ToSource::Taken(position), Some(lending)) => {
                let bytes = lending.taken(position)?;
                volume.carries(|carriage| carriage.rdma_bytes += bytes);
            }
            (ToSource::Again(tag, why), Some(lending)) => {
                volume.carries(|carriage| {
                    carriage.fall_back(why);
                    carriage.sent_again += 1;
                });
                hook(Point::Again);
                if let (Some((frame, data)), Some(more)) = (lending.again(tag), more.upgrade()) {
                    // If nobody takes it, the connection's end is told soon.
                    let _ = more.send(Outgoing::Frame(frame, data));
                }
            }
            (message, _) => {
                if !volume.heard(number, message) {
                    return Ok(());
                }
            }
        }
    }
}

/// Tells the destination when the RNIC here is gone, since that would find out late. It never ends.
async fn look_after(volume: &Arc<Volume>, lending: Option<&Lending>, more: &WeakUnboundedSender<Outgoing>) {
    let mut looks = tokio::time::interval(LOOK);
    looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
    while let Some(lending) = lending {
        looks.tick().await;
        if lending.has_gone() {
            volume.carries(|carriage| carriage.fall_back("the RNIC of this host is gone".to_owned()));
            if let Some(more) = more.upgrade() {
                // If nobody takes it, the connection's end is told soon.
                let _ = more.send(Outgoing::Frame(
                    wire::frame(&ToDestination::StopFetching, 0),
                    None,
                ));
            }
            break;
        }
    }
    std::future::pending().await
}
