//! A client on this machine, which a thread of its own serves.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use tokio::sync::oneshot;

use crate::volume::Volume;

/// Serves the client on a new thread of this name, until the client leaves, the volume is no longer served,
/// or `ends` completes. In the latter cases the thread sees the end of the client's stream. Requests that it
/// has read before are answered, or refused if the volume is no longer served.
pub async fn by_thread(
    name: &str,
    stream: tokio::net::UnixStream,
    volume: Arc<Volume>,
    ends: impl Future<Output = ()>,
    serve: impl FnOnce(UnixStream, Arc<Volume>) -> io::Result<()> + Send + 'static,
) -> io::Result<()> {
    let stream = stream.into_std()?;
    stream.set_nonblocking(false)?;
    let other = stream.try_clone()?;
    let (sender, mut ended) = oneshot::channel();
    let mut open = volume.open();
    std::thread::Builder::new().name(name.into()).spawn(move || {
        let result = serve(stream, volume);
        // The runtime may have ended, and the receiver with it.
        let _ = sender.send(result);
    })?;
    let result = tokio::select! {
        result = &mut ended => Some(result),
        _ = async { drop(open.wait_for(|is_open| !is_open).await) } => None,
        () = ends => None,
    };
    let result = match result {
        Some(result) => result,
        None => {
            other.shutdown(Shutdown::Read)?;
            ended.await
        }
    };
    result.map_err(io::Error::other)?
}
