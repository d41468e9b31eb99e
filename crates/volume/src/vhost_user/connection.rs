//! Front ends, and the listener for them.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use tokio::net::UnixListener;
use tokio::task::JoinHandle;
use vhost::vhost_user::{BackendReqHandler, Error};

use super::backend::Backend;
use super::length::Length;
use crate::callers::{OF_MACHINE, accepted, descriptors};
use crate::client;
use crate::volume::Volume;

/// Bytes of the head of a message: number, flags, length of the payload.
const HEAD: usize = 12;

/// The number of the message with the channel for messages to the front end.
const SET_BACKEND_REQ_FD: u32 = 21;

/// The most descriptors of one message.
const MAX_FILES: usize = 32;

/// Accepts front ends of one volume. When dropped, it accepts no more; a present connection ends with the
/// volume's.
pub struct Server {
    socket: PathBuf,
    is_connected: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
        // The file may be gone, if another program has removed it.
        let _ = std::fs::remove_file(&self.socket);
    }
}

impl Server {
    /// Takes front ends from this listener, whose path is `socket`.
    pub fn new(listener: UnixListener, socket: &Path, name: &str, volume: Arc<Volume>) -> Self {
        let is_connected = Arc::new(AtomicBool::new(false));
        let task = tokio::spawn(take(listener, name.to_owned(), volume, is_connected.clone()));
        Self {
            socket: socket.to_owned(),
            is_connected,
            task,
        }
    }

    /// The path of the socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Whether there is a front end.
    pub fn is_connected(&self) -> bool {
        self.is_connected.load(Ordering::Relaxed)
    }
}

/// The front end of the present connection.
struct Current {
    stream: UnixStream,
    task: JoinHandle<()>,
}

impl Current {
    /// Whether it has left, and only its requests in flight remain.
    fn has_left(&self) -> bool {
        let mut ends = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        let now = rustix::time::Timespec::default();
        self.task.is_finished() || matches!(poll(&mut ends, Some(&now)), Ok(1..))
    }
}

/// Accepts one front end at a time: the next one when no request of the earlier one is in flight.
async fn take(listener: UnixListener, name: String, volume: Arc<Volume>, is_connected: Arc<AtomicBool>) {
    let mut current: Option<Current> = None;
    loop {
        let (stream, _) = accepted(|| listener.accept()).await;
        if let Some(before) = current.take() {
            if !before.has_left() {
                tracing::warn!("a second virtual machine wants {name}, and is not let in");
                current = Some(before);
                continue;
            }
            // The task is never cancelled, and a panic in it does not concern the next one.
            let _ = before.task.await;
        }
        let Some(held) = descriptors().take(OF_MACHINE, "a virtual machine") else {
            continue;
        };
        let watched = stream.into_std().and_then(|stream| {
            let watched = stream.try_clone()?;
            Ok((tokio::net::UnixStream::from_std(stream)?, watched))
        });
        let (stream, watched) = match watched {
            Ok(both) => both,
            Err(error) => {
                tracing::warn!("a virtual machine cannot be served: {error}");
                continue;
            }
        };
        let (name, volume, is_connected) = (name.clone(), volume.clone(), is_connected.clone());
        let task = tokio::spawn(async move {
            let _held = held;
            is_connected.store(true, Ordering::Relaxed);
            let ended = serve(stream, &name, volume).await;
            is_connected.store(false, Ordering::Relaxed);
            match ended {
                Ok(()) => tracing::debug!("a virtual machine has left {name}"),
                Err(error) => tracing::warn!("the virtual machine at {name} is not served any more: {error}"),
            }
        });
        current = Some(Current {
            stream: watched,
            task,
        });
    }
}

async fn serve(stream: tokio::net::UnixStream, name: &str, volume: Arc<Volume>) -> io::Result<()> {
    let mut lengths = volume.lengths();
    let length = Length::new(*lengths.borrow_and_update());
    let (name, of_thread) = (name.to_owned(), length.clone());
    let serving = client::by_thread(
        "vhost-user",
        stream,
        volume,
        std::future::pending(),
        move |stream, volume| listen(stream, volume, &name, &of_thread),
    );
    tokio::pin!(serving);
    loop {
        tokio::select! {
            result = &mut serving => return result,
            Ok(()) = lengths.changed() => length.set(*lengths.borrow_and_update()),
        }
    }
}

/// Handles the front end's messages until it leaves.
fn listen(stream: UnixStream, volume: Arc<Volume>, name: &str, length: &Arc<Length>) -> io::Result<()> {
    let backend = Arc::new(Mutex::new(Backend::new(volume, name, length.clone())));
    // The socket stays open until all requests have ended: its end tells the front end that its memory is no
    // longer written to.
    let _open = stream.try_clone()?;
    let mut handler = BackendReqHandler::from_stream(stream.try_clone()?, backend.clone());
    let heard = loop {
        match look_ahead(&stream) {
            Ok(None) => break Ok(()),
            Ok(Some(None)) => {}
            Ok(Some(Some(given))) => length.channel(Some(given)),
            Err(error) => break Err(error),
        }
        match handler.handle_request() {
            Ok(()) => length.works(backend.lock().expect("no panic under this lock").works()),
            Err(Error::Disconnected) => break Ok(()),
            // The front end gets the error as the answer, if it has asked for one.
            Err(Error::ReqHandlerError(error)) => break Err(error),
            Err(error) => break Err(io::Error::other(error)),
        }
    };
    length.channel(None);
    backend.lock().expect("no panic under this lock").stop();
    heard
}

/// Looks at the next message without taking it; `None` at the end. The crate `vhost` takes the front end's
/// channel but sends nothing about the configuration through it, so a copy of the channel is taken here.
fn look_ahead(stream: &UnixStream) -> io::Result<Option<Option<UnixStream>>> {
    let mut head = [0; HEAD];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::PEEK | RecvFlags::CMSG_CLOEXEC;
    let seen = loop {
        let mut parts = [io::IoSliceMut::new(&mut head)];
        match recvmsg(stream, &mut parts, &mut ancillary, flags) {
            Err(rustix::io::Errno::INTR) => {}
            seen => break seen?.bytes,
        }
    };
    let files: Vec<OwnedFd> = ancillary
        .drain()
        .flat_map(|message| match message {
            RecvAncillaryMessage::ScmRights(files) => files.collect(),
            _ => Vec::new(),
        })
        .collect();
    if seen == 0 {
        return Ok(None);
    }
    let number = u32::from_ne_bytes(head[..4].try_into().expect("four bytes"));
    if seen < HEAD || number != SET_BACKEND_REQ_FD {
        return Ok(Some(None));
    }
    let given = files
        .into_iter()
        .next()
        .map(|file| UnixStream::from(OwnedFd::from(File::from(file))));
    Ok(Some(given))
}
