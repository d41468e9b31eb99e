//! The link to the destination: calls it again and again, sends what the engine wants sent, tells the engine what comes back.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, BufReader, BufWriter};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use verbatim_mirror::decision::Answer;
use verbatim_mirror::{Event, Standing};

use crate::faults::{Hook, Point};
use crate::tls::Hosts;
use crate::volume::{Outgoing, Volume};
use crate::wire::{self, Hello, ToSource};

/// So long a call may take until it is answered.
const CALL: Duration = Duration::from_secs(15);

/// Between two calls, the first time and at most.
const PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// A destination that is out of reach for so long is given up.
const GIVE_UP: Duration = Duration::from_secs(600);

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
}

impl Call {
    /// A connection on which the first message was sent, and its first answer.
    async fn open(&self) -> anyhow::Result<(impl AsyncRead + AsyncWrite + Unpin + Send + use<>, ToSource)> {
        let calling = async {
            let mut stream = self.hosts.connect(&self.to, self.port).await?;
            wire::send(&mut stream, &self.hello).await?;
            let (answer, _) = wire::receive::<ToSource>(&mut stream).await?;
            anyhow::Ok((stream, answer))
        };
        let called = tokio::time::timeout(CALL, calling).await;
        called
            .context("no answer")?
            .with_context(|| format!("cannot reach {}", self.to))
    }

    /// Asks once.
    pub async fn ask(&self) -> anyhow::Result<Answer> {
        match self.open().await?.1 {
            ToSource::Answer(answer) => Ok(answer),
            ToSource::Refused(why) => bail!("{} refuses: {why}", self.to),
            other => bail!("{} answers {other:?}", self.to),
        }
    }

    /// Asks once for a promise.
    pub async fn ask_to_promise(&self) -> anyhow::Result<()> {
        match self.open().await?.1 {
            ToSource::Promised => Ok(()),
            ToSource::Refused(why) => bail!("{} refuses: {why}", self.to),
            other => bail!("{} answers {other:?}", self.to),
        }
    }

    /// Keeps a link for that volume until its migration is over. Why the destination will not have it goes to `refused`.
    pub async fn keep(self, volume: Arc<Volume>, refused: UnboundedSender<String>, hook: Hook) {
        let mut known = None;
        let mut pause = PAUSE;
        let mut since = Instant::now();
        while volume.migration().is_some() {
            if volume.standing() == Standing::Serving {
                hook(Point::Offering);
                match self.open().await {
                    Ok((stream, ToSource::Welcome { incarnation, has_old })) => {
                        let keeps = known.replace(incarnation) == Some(incarnation);
                        pause = PAUSE;
                        if let Err(error) = exchange(stream, &volume, keeps, has_old || keeps).await {
                            tracing::info!("the link to {} has ended: {error}", self.to);
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

/// One connection, until it ends.
async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    volume: &Arc<Volume>,
    keeps: bool,
    compares: bool,
) -> io::Result<()> {
    let (reader, writer) = tokio::io::split(stream);
    let (sender, outgoing) = unbounded_channel();
    let number = volume.link_up(keeps, compares, sender);
    let result = tokio::select! {
        result = write(writer, outgoing) => result,
        result = read(BufReader::new(reader), volume, number) => result,
    };
    volume.link_down(number);
    result
}

/// Ends when the engine has given the connection up.
async fn write(writer: impl AsyncWrite + Unpin, mut outgoing: UnboundedReceiver<Outgoing>) -> io::Result<()> {
    let mut writer = BufWriter::with_capacity(256 << 10, writer);
    while let Some((frame, data)) = outgoing.recv().await {
        writer.write_all(&frame).await?;
        if let Some(data) = data {
            writer.write_all(&data).await?;
        }
        if outgoing.is_empty() {
            writer.flush().await?;
        }
    }
    Ok(())
}

async fn read(mut reader: impl AsyncRead + Unpin, volume: &Arc<Volume>, number: u64) -> io::Result<()> {
    loop {
        let (message, _) = wire::receive::<ToSource>(&mut reader).await?;
        if !volume.heard(number, message) {
            return Ok(());
        }
    }
}
