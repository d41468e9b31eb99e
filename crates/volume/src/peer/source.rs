//! The link to the destination: calls it again and again, sends the engine's messages, and gives the engine
//! the answers.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, BufReader, BufWriter};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use verbatim_mirror::decision::Answer;
use verbatim_mirror::{Event, Standing};

use crate::faults::{Hook, Point};
use crate::outlet::Outgoing;
use crate::peer::chunks::{Chunks, Job};
use crate::peer::lending::Lending;
use crate::tls::Hosts;
use crate::transport::{Carriage, RNIC_LIMIT, Rnic, Transport};
use crate::volume::Volume;
use crate::wire::{self, About, Hello, OLDEST, Purpose, Rings, ToSource, VERSION};
use crate::words;

/// Limit for a call to be answered.
const CALL: Duration = Duration::from_secs(15);

/// Pause between two calls: the first, and the longest.
const PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Limit for a destination to be out of reach; then it is given up.
const GIVE_UP: Duration = Duration::from_secs(600);

/// Beginning of the refusal by a daemon that speaks only [`OLDEST`].
const OLDER: &str = "this daemon speaks version 3,";

/// A call to another daemon, and its subject.
#[derive(Clone)]
pub struct Call {
    /// All hosts.
    pub hosts: Hosts,
    /// The destination.
    pub to: String,
    /// Its daemon's port.
    pub port: u16,
    /// The first message.
    pub hello: Hello,
    /// The data here, where the copy there must be another disk.
    pub about: Option<About>,
    /// The version of the other daemon, as far as is known.
    pub version: Arc<AtomicU32>,
    /// This host's RNIC.
    pub rnic: Rnic,
    /// Transport for the chunks.
    pub carriage: Carriage,
}

impl Call {
    /// A connection after the first message.
    async fn call(
        &self,
        purpose: Purpose,
    ) -> anyhow::Result<impl AsyncRead + AsyncWrite + Unpin + Send + use<>> {
        let hello = Hello {
            purpose,
            version: self.version.load(Ordering::Relaxed),
            ..self.hello.clone()
        };
        let mut stream = self.hosts.connect(&self.to, self.port).await?;
        let about = self.about.as_ref().map(About::encode).unwrap_or_default();
        wire::send_with(&mut stream, &hello, &about).await?;
        Ok(stream)
    }

    /// The same, and its first answer. A ring may be offered, and the connection has a name. An older daemon
    /// is called again in its own version.
    async fn open(
        &self,
        rdma: Option<verbatim_bulk::Offer>,
        name: u128,
    ) -> anyhow::Result<(impl AsyncRead + AsyncWrite + Unpin + Send + use<>, ToSource)> {
        let first = self.open_once(rdma.clone(), name).await?;
        let is_older = matches!(&first.1, ToSource::Refused(why) if why.starts_with(OLDER));
        if is_older && self.version.swap(OLDEST, Ordering::Relaxed) != OLDEST {
            return self.open_once(rdma, name).await;
        }
        Ok(first)
    }

    async fn open_once(
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

    /// A second connection, for the chunks of the welcomed connection of this name.
    async fn open_beside(&self, link: u128) -> anyhow::Result<Chunks> {
        let call = self.clone();
        let connect = async move {
            let called = tokio::time::timeout(CALL, call.call(Purpose::Chunks { link })).await;
            let stream = called.context("no answer")?;
            stream.with_context(|| format!("cannot reach {} a second time", call.to))
        };
        Chunks::beside(connect).await
    }

    fn knows_room(&self) -> bool {
        self.version.load(Ordering::Relaxed) >= VERSION
    }

    /// Asks once whether the destination has committed.
    pub async fn ask(&self) -> anyhow::Result<Answer> {
        match self.open(None, 0).await?.1 {
            ToSource::Answer(answer) => Ok(answer),
            ToSource::Refused(why) => bail!("{} refuses: {why}", self.to),
            other => bail!("{}", words::unasked(&self.to, &other)),
        }
    }

    /// Asks once for a promise.
    pub async fn ask_to_promise(&self) -> anyhow::Result<()> {
        match self.open(None, 0).await?.1 {
            ToSource::Promised => Ok(()),
            ToSource::Refused(why) => bail!("{} refuses: {why}", self.to),
            other => bail!("{}", words::unasked(&self.to, &other)),
        }
    }

    /// Asks whether the other daemon would take the volume, which has `allocated` bytes here. The inner error
    /// is its refusal; the outer one means that there was no answer.
    pub async fn ask_for_room(&self, allocated: u64) -> anyhow::Result<Result<(), String>> {
        let Purpose::Fill { length, from, .. } = &self.hello.purpose else {
            bail!("nothing is offered");
        };
        let purpose = Purpose::WouldTake {
            length: *length,
            allocated,
            from: from.clone(),
        };
        let hello = Hello {
            purpose,
            ..self.hello.clone()
        };
        let asking = Self {
            hello,
            ..self.clone()
        };
        match asking.open(None, 0).await?.1 {
            ToSource::WouldTake => Ok(Ok(())),
            ToSource::Refused(why) => Ok(Err(why)),
            other => bail!("{}", words::unasked(&self.to, &other)),
        }
    }

    /// Keeps a link for this volume until its migration is over. A refusal by the destination goes to
    /// `refused`. `allocated`: the volume's allocated bytes here.
    pub async fn keep(
        self,
        volume: Arc<Volume>,
        allocated: u64,
        refused: UnboundedSender<String>,
        hook: Hook,
    ) {
        // A daemon that does not answer this gets the offer itself.
        if let Ok(Err(why)) = self.ask_for_room(allocated).await {
            // There is no receiver if the migration is over.
            let _ = refused.send(why);
            return volume.event(Event::Cancel);
        }
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
                        let lending = accepted(lending, rings, &mut carriage).await;
                        volume.carried_by(carriage.clone());
                        let keeps = known.replace(incarnation) == Some(incarnation);
                        pause = PAUSE;
                        let way = match lending {
                            Some(lending) => Ok(Way::Ring(Box::new(lending))),
                            None => self.open_beside(link).await.map(Way::Beside),
                        };
                        let exchanged = match way {
                            Ok(way) => exchange(
                                stream,
                                &volume,
                                keeps,
                                (has_old || keeps, self.knows_room()),
                                way,
                                hook,
                            )
                            .await
                            .map_err(anyhow::Error::from),
                            Err(error) => Err(error),
                        };
                        // A way that has failed once is not tried again in this move.
                        carriage = volume.carriage().unwrap_or(carriage);
                        if let Err(error) = exchanged {
                            tracing::info!("the link to {} has ended: {error:#}", self.to);
                        }
                        since = Instant::now();
                    }
                    Ok((_, ToSource::Refused(why))) => {
                        // The receiver is gone if the migration is over.
                        let _ = refused.send(why);
                        return volume.event(Event::Cancel);
                    }
                    Ok((_, other)) => tracing::warn!("{}", words::unasked(&self.to, &other)),
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
    match asked(move || Lending::open(&rnic)).await {
        Ok(lent) => Some(lent),
        Err(error) => {
            carriage.fall_back(error);
            None
        }
    }
}

/// Calls this host's RNIC, and gives up waiting after [`RNIC_LIMIT`].
async fn asked<T: Send + 'static>(
    ask: impl FnOnce() -> Result<T, verbatim_bulk::Error> + Send + 'static,
) -> Result<T, String> {
    match tokio::time::timeout(RNIC_LIMIT, tokio::task::spawn_blocking(ask)).await {
        Ok(answered) => answered
            .expect("it does not panic")
            .map_err(|error| error.to_string()),
        Err(_) => Err(format!(
            "the RNIC of this host has not answered in {} s",
            RNIC_LIMIT.as_secs()
        )),
    }
}

/// The ring, if the other host has made one as well.
async fn accepted(lending: Option<Lending>, rings: Rings, carriage: &mut Carriage) -> Option<Lending> {
    let mut lending = lending?;
    let failed = match rings {
        Rings::Ready(accepted) => match asked(move || lending.accept(&accepted).map(|()| lending)).await {
            Ok(lending) => {
                carriage.device = Some(lending.name());
                return Some(lending);
            }
            Err(error) => error,
        },
        Rings::Refused(why) => format!("the destination: {why}"),
        Rings::None => "the destination has not answered the offer".to_owned(),
    };
    carriage.fall_back(failed);
    None
}

/// The way of chunks.
enum Way {
    Ring(Box<Lending>),
    Beside(Chunks),
}

/// Serves one connection, until it ends.
async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    volume: &Arc<Volume>,
    keeps: bool,
    knows: (bool, bool),
    way: Way,
    hook: Hook,
) -> io::Result<()> {
    let (reader, writer) = tokio::io::split(stream);
    let (sender, outgoing) = unbounded_channel();
    let has_ring = matches!(way, Way::Ring(_));
    let mut chunks = match way {
        // The thread keeps nothing open: when the engine gives the connection up, the connection ends.
        Way::Ring(lending) => Chunks::by_ring(*lending, sender.downgrade())?,
        Way::Beside(chunks) => chunks,
    };
    let jobs = chunks.jobs();
    let number = volume.link_up(keeps, knows, sender);
    let result = tokio::select! {
        result = write(writer, outgoing, volume, &jobs) => result,
        result = chunks.ended() => result,
        result = read(BufReader::new(reader), volume, number, has_ring.then_some(&jobs), hook) => result,
    };
    volume.link_down(number);
    // If the RNIC hangs, a thread of its own waits for it: the ring's content is no longer trusted.
    if tokio::time::timeout(RNIC_LIMIT, chunks.end()).await.is_err() {
        volume.carries(|carriage| {
            carriage.fall_back("the RNIC of this host does not let go of the ring".to_owned())
        });
    }
    result
}

/// Ends when the engine has given the connection up.
async fn write(
    writer: impl AsyncWrite + Unpin,
    mut outgoing: UnboundedReceiver<Outgoing>,
    volume: &Volume,
    jobs: &UnboundedSender<Job>,
) -> io::Result<()> {
    let mut writer = BufWriter::with_capacity(256 << 10, writer);
    while let Some(message) = outgoing.recv().await {
        match message {
            Outgoing::Frame(frame, data) => {
                writer.write_all(&frame).await?;
                if let Some(data) = data {
                    writer.write_all(&data).await?;
                }
            }
            Outgoing::Chunk { tag, offset, data } => {
                // Without a receiver, the connection's end is reported soon.
                let _ = jobs.send(Job::Put { tag, offset, data });
            }
            Outgoing::Carried(bytes) => volume.carries(|carriage| carriage.rdma_bytes += bytes),
            Outgoing::FellBack(why) => volume.carries(|carriage| carriage.fall_back(why)),
        }
        if outgoing.is_empty() {
            writer.flush().await?;
        }
    }
    Ok(())
}

/// `ring`: the queue of the ring's thread.
async fn read(
    mut reader: impl AsyncRead + Unpin,
    volume: &Arc<Volume>,
    number: u64,
    ring: Option<&UnboundedSender<Job>>,
    hook: Hook,
) -> io::Result<()> {
    loop {
        let (message, _) = wire::receive::<ToSource>(&mut reader).await?;
        // Without a receiver for a job, the connection's end is reported soon.
        match (message, ring) {
            (ToSource::Taken(position), Some(ring)) => {
                let _ = ring.send(Job::Taken(position));
            }
            (ToSource::Again(tag, why), Some(ring)) => {
                volume.carries(|carriage| {
                    carriage.fall_back(why);
                    carriage.sent_again += 1;
                });
                hook(Point::Again);
                let _ = ring.send(Job::Again(tag));
            }
            (message, _) => {
                if !volume.heard(number, message) {
                    return Ok(());
                }
            }
        }
    }
}
