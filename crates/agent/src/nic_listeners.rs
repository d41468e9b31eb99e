//! The sockets over which instances reach the RNIC, and the RNIC that accepts at them, whichever that is.
//!
//! The socket of an instance is made here and given to the RNIC, which is the only one to hold it: while there is no RNIC the kernel
//! refuses who connects. This agent watches its own connection to the RNIC. When that has died and another one is there, it gets a
//! new socket for each instance, in the place of the old one. An RNIC that has outlived an agent has the sockets, which stay.
//!
//! Nothing is asked again and again: the kernel says when a connection ends, and when somebody listens in the runtime folder.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::io::Errno;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use verbatim_device::control::{Reply, Request};
use verbatim_seqpacket::{Error as SocketError, Socket};

use crate::beneath;
use crate::standby;

/// An RNIC that is there and does not do its part is asked again after this time at the latest: no event tells when it would.
const AGAIN: Duration = Duration::from_secs(1);

/// The instances' sockets at the RNIC of this host.
#[derive(Debug)]
pub struct NicListeners {
    /// The RNIC's own control socket.
    nic: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// To the RNIC that has all sockets in `wanted`.
    connection: Option<Socket>,
    /// Paths of the sockets, by instance.
    wanted: BTreeMap<String, PathBuf>,
}

impl NicListeners {
    /// With the RNIC whose control socket is `nic`, when there is one.
    pub fn new(nic: PathBuf) -> Self {
        Self {
            nic,
            state: Mutex::default(),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("no panic under this lock")
    }

    /// Makes the socket of a new instance at `path`; an error if there is no RNIC.
    pub fn add(&self, instance: &str, path: &Path) -> anyhow::Result<()> {
        let mut state = self.lock();
        let socket = state.connected(&self.nic)?;
        give(socket, instance, path)?;
        state.wanted.insert(instance.to_owned(), path.to_owned());
        Ok(())
    }

    /// The same for an instance that can do without the RNIC, which may come later; an error if it is not there now.
    pub fn add_for_later(&self, instance: &str, path: &Path) -> anyhow::Result<()> {
        let mut state = self.lock();
        state.wanted.insert(instance.to_owned(), path.to_owned());
        // If it is connected, it has heard of the others only.
        state.connection = None;
        state.connected(&self.nic).map(drop)
    }

    /// The same for an instance that an earlier agent has left running: the RNIC may have its socket, or come later.
    pub fn take_over(&self, instance: &str, path: &Path) {
        if let Err(error) = self.add_for_later(instance, path) {
            let error = format!("{error:#}");
            tracing::warn!(
                instance,
                error,
                "its programs cannot open the RNIC until there is one"
            );
        }
    }

    /// The instance has no socket any more.
    pub fn remove(&self, instance: &str) {
        let mut state = self.lock();
        state.wanted.remove(instance);
        // If the RNIC is gone, so is the socket.
        if let Ok(socket) = state.connected(&self.nic) {
            let instance = instance.to_owned();
            if let Err(error) = done(socket, &Request::RemoveListener { instance }, &[]) {
                tracing::debug!(error = format!("{error:#}"), "a listener is left behind");
            }
        }
    }

    /// Gives the sockets to each RNIC that comes, for ever.
    pub async fn watch(self: Arc<Self>) -> anyhow::Result<()> {
        // Before the first look, so that no RNIC is missed.
        let arrivals = Arrivals::of(&self.nic).context("cannot watch for the RNIC")?;
        loop {
            let this = Arc::clone(&self);
            let connected = tokio::task::spawn_blocking(move || {
                let mut state = this.lock();
                let socket = state.connected(&this.nic)?;
                anyhow::Ok(socket.as_fd().try_clone_to_owned()?)
            });
            match connected.await.context("connecting to the RNIC panicked")? {
                Ok(connection) => {
                    hangup(connection).await?;
                    tracing::warn!("the RNIC is gone; programs cannot open it until it is started again");
                }
                Err(error) if is_absent(&error) => arrivals.next().await?,
                Err(error) => {
                    let error = format!("{error:#}");
                    tracing::warn!(error, "the RNIC does not take the instances' sockets");
                    // One that is dying closes the connection before it stops to listen; then another one may come.
                    tokio::select! {
                        arrived = arrivals.next() => arrived?,
                        () = tokio::time::sleep(AGAIN) => {}
                    }
                }
            }
        }
    }
}

impl State {
    /// The connection to an RNIC that has all sockets.
    fn connected(&mut self, nic: &Path) -> anyhow::Result<&Socket> {
        if self
            .connection
            .as_ref()
            .is_none_or(|socket| !standby::is_open(socket))
        {
            self.connection = None;
            let socket = standby::connect(nic)?;
            let has = listeners(&socket)?;
            for (instance, path) in &self.wanted {
                if has.contains(instance) && path.exists() {
                    continue;
                }
                match give(&socket, instance, path) {
                    Ok(()) => tracing::info!(instance, "the RNIC accepts its programs"),
                    // The others shall have theirs.
                    Err(error) if standby::is_open(&socket) => {
                        tracing::error!(
                            instance,
                            error = format!("{error:#}"),
                            "its programs cannot open the RNIC"
                        );
                    }
                    Err(error) => return Err(error),
                }
            }
            self.connection = Some(socket);
        }
        Ok(self.connection.as_ref().expect("it is set above"))
    }
}

/// Makes the socket of an instance and lets the RNIC have it.
fn give(nic: &Socket, instance: &str, path: &Path) -> anyhow::Result<()> {
    // Programs in the container may be of any user; the folder is theirs alone, and they may run.
    let folder = path.parent().context("a socket without a folder")?;
    let name = path.file_name().and_then(|name| name.to_str());
    let name = name.context("a socket without a name")?;
    let listener = beneath::listen(folder, name).context("cannot listen for the RNIC")?;
    let instance = instance.to_owned();
    done(nic, &Request::AddListener { instance }, &[listener.as_fd()])
}

fn done(nic: &Socket, request: &Request, fds: &[std::os::fd::BorrowedFd<'_>]) -> anyhow::Result<()> {
    match nic.call::<_, Reply>(request, fds)?.message {
        Reply::Done => Ok(()),
        other => bail!("the RNIC does not take the instance's socket: {other:?}"),
    }
}

/// The instances whose sockets the RNIC has.
fn listeners(nic: &Socket) -> anyhow::Result<BTreeSet<String>> {
    let mut all = BTreeSet::new();
    loop {
        let after = all.last().cloned();
        match nic
            .call::<_, Reply>(&Request::QueryListeners { after }, &[])?
            .message
        {
            Reply::Listeners { instances, more } => {
                let none = instances.is_empty();
                all.extend(instances);
                if !more || none {
                    return Ok(all);
                }
            }
            other => bail!("the RNIC does not say whose sockets it has: {other:?}"),
        }
    }
}

/// Whether nobody listens where the RNIC would.
pub(crate) fn is_absent(error: &anyhow::Error) -> bool {
    let errno = error.downcast_ref::<SocketError>().map(SocketError::errno);
    matches!(errno, Some(libc::ECONNREFUSED | libc::ENOENT))
}

/// Waits until the other end of a connection is closed.
pub(crate) async fn hangup(connection: OwnedFd) -> anyhow::Result<()> {
    let socket = Socket::from_fd(connection);
    // SAFETY: the socket owns its descriptor, never changes it, and lives as long as the registration.
    let watched = unsafe { AsyncFd::register(socket) }?;
    while standby::is_open(watched.get_ref()) {
        // Answers to requests wake it, too.
        watched.ready(Interest::READABLE).await?.clear_ready();
    }
    Ok(())
}

/// Tells when somebody begins to listen at a path.
pub(crate) struct Arrivals {
    inotify: AsyncFd<OwnedFd>,
}

impl Arrivals {
    pub(crate) fn of(socket: &Path) -> anyhow::Result<Self> {
        let folder = socket.parent().context("the RNIC's socket has no folder")?;
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        // An RNIC sets the mode of its socket (chmod) once it listens there.
        let events = WatchFlags::CREATE | WatchFlags::MOVED_TO | WatchFlags::ATTRIB;
        inotify::add_watch(&inotify, folder, events).with_context(|| folder.display().to_string())?;
        // SAFETY: an owned descriptor stays open and the same until the registration, which is dropped first, is gone.
        let inotify = unsafe { AsyncFd::register(inotify) }?;
        Ok(Self { inotify })
    }

    /// Waits until something has appeared in the folder since the last time.
    pub(crate) async fn next(&self) -> anyhow::Result<()> {
        loop {
            let mut ready = self.inotify.readable().await?;
            let mut events = [0; 4096];
            let mut some = false;
            loop {
                match rustix::io::read(self.inotify.get_ref(), &mut events) {
                    Ok(_) => some = true,
                    Err(Errno::WOULDBLOCK) => break,
                    Err(Errno::INTR) => {}
                    Err(errno) => return Err(errno).context("inotify"),
                }
            }
            ready.clear_ready();
            if some {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use std::collections::HashMap;
    use tokio::sync::mpsc;
    use verbatim_seqpacket::Listener;

    const PATIENCE: Duration = Duration::from_secs(20);

    /// What an RNIC does for its agent, until it is told to die.
    struct Nic {
        added: mpsc::UnboundedReceiver<String>,
        death: std::os::unix::net::UnixStream,
        thread: std::thread::JoinHandle<()>,
    }

    impl Nic {
        /// One that has the sockets of these instances.
        fn start(path: &Path, has: &[&str]) -> Self {
            let listener = Listener::bind(path).unwrap();
            std::fs::set_permissions(path, PermissionsExt::from_mode(0o666)).unwrap();
            let (added, receiver) = mpsc::unbounded_channel();
            let (death, told) = std::os::unix::net::UnixStream::pair().unwrap();
            let has: Vec<String> = has.iter().map(ToString::to_string).collect();
            let thread = std::thread::spawn(move || {
                let mut listeners: HashMap<String, Option<OwnedFd>> =
                    has.into_iter().map(|name| (name, None)).collect();
                while let Some(client) = ready(&listener, &told).then(|| listener.accept().unwrap()) {
                    while ready(&client, &told) {
                        let Ok(mut received) = client.recv::<Request>() else {
                            break;
                        };
                        let reply = match received.message {
                            Request::AddListener { instance } => {
                                listeners.insert(instance.clone(), received.fds.pop());
                                let _ = added.send(instance);
                                Reply::Done
                            }
                            Request::RemoveListener { instance } => {
                                listeners.remove(&instance);
                                Reply::Done
                            }
                            Request::QueryListeners { .. } => Reply::Listeners {
                                instances: listeners.keys().cloned().collect(),
                                more: false,
                            },
                            other => panic!("{other:?}"),
                        };
                        client.send(&reply, &[]).unwrap();
                    }
                }
            });
            Self {
                added: receiver,
                death,
                thread,
            }
        }

        async fn is_given(&mut self) -> String {
            let given = tokio::time::timeout(PATIENCE, self.added.recv()).await;
            given.expect("the agent gives it a socket").expect("it lives")
        }

        fn die(self) {
            drop(self.death);
            self.thread.join().unwrap();
        }
    }

    /// Waits for a message or a connection; or else it dies.
    fn ready(socket: &impl AsFd, told: &impl AsFd) -> bool {
        use rustix::event::{PollFd, PollFlags, poll};
        let mut ends = [
            PollFd::new(socket, PollFlags::IN),
            PollFd::new(told, PollFlags::IN),
        ];
        poll(&mut ends, None).unwrap();
        ends[1].revents().is_empty()
    }

    /// How a connection is refused, as soon as the agent has let go of what it has just given away.
    async fn refused(path: &Path) -> i32 {
        let refused = async {
            loop {
                match Socket::connect(path) {
                    Err(error) => return error.errno(),
                    Ok(_) => tokio::task::yield_now().await,
                }
            }
        };
        tokio::time::timeout(PATIENCE, refused)
            .await
            .expect("nobody listens")
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn each_rnic_that_comes_is_given_the_sockets_of_all_instances() {
        let folder = tempfile::tempdir().unwrap();
        let nic = folder.path().join("nic.sock");
        let [web, db, new] = ["web", "db", "new"].map(|name| folder.path().join(name));
        let listeners = Arc::new(NicListeners::new(nic.clone()));
        listeners.take_over("web", &web);
        listeners.take_over("db", &db);
        let error = listeners.add("new", &new).unwrap_err().to_string();
        assert!(error.contains("cannot reach the software RNIC"), "{error}");
        let watch = tokio::spawn(Arc::clone(&listeners).watch());
        for _ in 0..3 {
            let mut rnic = Nic::start(&nic, &[]);
            assert_eq!([rnic.is_given().await, rnic.is_given().await], ["db", "web"]);
            Socket::connect(&web).unwrap();
            let waits = Socket::connect(&db).unwrap();
            rnic.die();
            // Nobody waits for an RNIC that has died.
            assert_eq!(
                (refused(&web).await, refused(&db).await),
                (libc::ECONNREFUSED, libc::ECONNREFUSED)
            );
            assert!(waits.recv::<Reply>().is_err());
        }
        // One that knows an instance already keeps its socket, and is given one of another that was removed in vain.
        listeners.remove("db");
        let _kept = Listener::bind(&web).unwrap();
        let mut rnic = Nic::start(&nic, &["web"]);
        listeners.add("new", &new).unwrap();
        assert_eq!(rnic.is_given().await, "new");
        Socket::connect(&web).unwrap();
        assert!(!watch.is_finished());
        watch.abort();
        rnic.die();
    }
}
