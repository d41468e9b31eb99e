//! A connection of a client on this machine: a thread reads its requests and, as far as the page cache
//! allows, carries them out and answers them itself. Handing such a request over would take longer than the
//! request.

use std::io::{self, Read};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use super::export::Ends;
use super::outbox::Outbox;
use super::server::{bad, errno, meaning};
use super::wire::{self, Command, REQUEST_BYTES, Request};
use crate::client;
use crate::volume::Volume;

/// Most bytes of one read, except for the data of a large WRITE.
const BUFFER: usize = 256 << 10;

/// Serves requests until the client leaves or the volume is no longer served; with `ends`, also until the
/// volume has another size.
pub async fn transmit(
    stream: tokio::net::UnixStream,
    volume: Arc<Volume>,
    is_read_only: bool,
    ends: Option<Ends>,
) -> io::Result<()> {
    if let Some(ends) = &ends {
        ends.others_are_over().await;
    }
    let lengths = volume.lengths();
    // `ends` itself is dropped when the thread has ended.
    let is_due = async {
        match &ends {
            Some(ends) => ends.is_due(lengths).await,
            None => std::future::pending().await,
        }
    };
    client::by_thread("nbd client", stream, volume, is_due, move |stream, volume| {
        serve(&stream, &volume, is_read_only)
    })
    .await
}

fn serve(stream: &UnixStream, volume: &Arc<Volume>, is_read_only: bool) -> io::Result<()> {
    let outbox = Arc::new(Outbox::new(stream.try_clone()?, volume.room().clone()));
    std::thread::scope(|scope| {
        std::thread::Builder::new()
            .name("nbd answers".into())
            .spawn_scoped(scope, || outbox.write())?;
        let result = read(stream, (volume, is_read_only), &outbox);
        // Requests in flight use the outbox, too: their answers leave before the connection is closed.
        outbox.end();
        result
    })?;
    stream.shutdown(Shutdown::Both)
}

/// Bytes that were read and not parsed yet.
struct Inbox<'a> {
    stream: &'a UnixStream,
    buffer: Vec<u8>,
    begin: usize,
    end: usize,
}

impl Inbox<'_> {
    fn waiting(&self) -> &[u8] {
        &self.buffer[self.begin..self.end]
    }

    /// Whether there is a whole request, so that its reader need not wait.
    fn has_more(&self) -> bool {
        let Some(head) = self.waiting().first_chunk::<REQUEST_BYTES>() else {
            return false;
        };
        match Request::parse(head) {
            Some(request) if request.command == Command::Write => {
                self.waiting().len() - REQUEST_BYTES >= request.length as usize
            }
            // An invalid request ends the connection at once.
            _ => true,
        }
    }

    /// Reads until there are this many bytes, which fit into the buffer; false if the client has left before
    /// the first of them.
    fn fill(&mut self, wanted: usize) -> io::Result<bool> {
        if self.begin == self.end {
            (self.begin, self.end) = (0, 0);
        } else if self.begin + wanted > self.buffer.len() {
            self.buffer.copy_within(self.begin..self.end, 0);
            (self.begin, self.end) = (0, self.end - self.begin);
        }
        while self.end - self.begin < wanted {
            match self.stream.read(&mut self.buffer[self.end..]) {
                Ok(0) if self.begin == self.end => return Ok(false),
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => self.end += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// The next bytes, in a buffer of their own.
    fn take(&mut self, length: usize) -> io::Result<Vec<u8>> {
        let there = length.min(self.end - self.begin);
        let mut data = Vec::with_capacity(length);
        data.extend_from_slice(&self.waiting()[..there]);
        self.begin += there;
        data.resize(length, 0);
        self.stream.read_exact(&mut data[there..])?;
        Ok(data)
    }
}

fn read(
    stream: &UnixStream,
    (volume, is_read_only): (&Arc<Volume>, bool),
    outbox: &Arc<Outbox>,
) -> io::Result<()> {
    let size = volume.length();
    let mut inbox = Inbox {
        stream,
        buffer: vec![0; BUFFER],
        begin: 0,
        end: 0,
    };
    let mut is_gathering = false;
    loop {
        if is_gathering && !inbox.has_more() {
            outbox.scatter();
            is_gathering = false;
        }
        if !inbox.fill(REQUEST_BYTES)? {
            return Ok(());
        }
        let head = inbox.waiting().first_chunk().expect("it was read");
        let request = Request::parse(head).ok_or_else(|| bad("no request"))?;
        inbox.begin += REQUEST_BYTES;
        if request.command == Command::Disconnect {
            return Ok(());
        }
        if request.command == Command::Write && request.length > wire::MAX_REQUEST {
            return Err(bad("a write is too long"));
        }
        let checked = request.check(size, is_read_only);
        let kib = request.needed_kib(checked.is_ok());
        let held = outbox.begin(kib);
        let data = match request.command {
            Command::Write => inbox.take(request.length as usize),
            _ => Ok(Vec::new()),
        };
        let cookie = request.cookie;
        let data = match data {
            Ok(data) => data,
            Err(error) => {
                outbox.answer(cookie, (kib, held), Err(wire::error::EINVAL));
                return Err(error);
            }
        };
        if !is_gathering && inbox.has_more() {
            outbox.gather();
            is_gathering = true;
        }
        match checked.map(|()| meaning(&request, size, data)) {
            Err(error) => outbox.answer(cookie, (kib, held), Err(error)),
            Ok(None) => outbox.answer(cookie, (kib, held), Ok(Vec::new())),
            Ok(Some((wanted, extent, is_durable))) => {
                let outbox = outbox.clone();
                let reply = Box::new(move |result: Result<Vec<u8>, _>| {
                    outbox.answer(cookie, (kib, held), result.map_err(errno));
                });
                volume.request_here(wanted, extent, is_durable, reply);
            }
        }
    }
}
