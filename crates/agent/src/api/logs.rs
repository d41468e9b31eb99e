//! What an instance wrote to its standard output and error.

use std::io::{Read, Seek, SeekFrom};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::OFlags;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use crate::beneath;
use crate::instances::{Instance, State};
use crate::own_files;
use crate::proto::LogsChunk;

/// How often a file that is followed is looked at: a person reads it, and tmpfs tells nobody of writes but by inotify,
/// which counts every one.
const INTERVAL: Duration = Duration::from_millis(100);

/// The most that leaves in one chunk.
const CHUNK_BYTES: usize = 64 * 1024;

/// The output so far; with `follow`, more of it until the instance ends or leaves.
pub fn stream(instance: Arc<Instance>, follow: bool) -> ReceiverStream<Result<LogsChunk, Status>> {
    let (chunks, receiver) = mpsc::channel(8);
    tokio::spawn(async move {
        let (mut position, mut is_said) = (0, false);
        loop {
            // Looked at before the file, so that what was written before the end is read after it.
            let ended = !matches!(instance.state(), State::Running | State::Moving);
            loop {
                match read(&instance, position) {
                    Ok(data) if data.is_empty() => break,
                    Ok(data) => {
                        position += data.len() as u64;
                        if chunks.send(Ok(output(data))).await.is_err() {
                            return;
                        }
                    }
                    // It has moved away, and its files with it.
                    Err(error) if error.kind() == std::io::ErrorKind::NotFound => return,
                    Err(error) => {
                        let _ = chunks
                            .send(Err(Status::internal(format!("reading its output: {error}"))))
                            .await;
                        return;
                    }
                }
            }
            if let Some(note) = unprinted(&instance).filter(|_| !is_said) {
                is_said = true;
                if chunks.send(Ok(note)).await.is_err() {
                    return;
                }
            }
            if ended || !follow {
                return;
            }
            tokio::select! {
                () = tokio::time::sleep(INTERVAL) => {}
                () = chunks.closed() => return,
            }
        }
    });
    ReceiverStream::new(receiver)
}

fn output(data: Vec<u8>) -> LogsChunk {
    LogsChunk {
        data,
        note: String::new(),
    }
}

/// A note for the reader of the output while there is no room for more of it. (The program itself gets an
/// error from its write.)
fn unprinted(instance: &Instance) -> Option<LogsChunk> {
    let folder = instance.home.paths.folder.as_path();
    own_files::is_full(folder).then(|| LogsChunk {
        data: Vec::new(),
        note: format!(
            "{} has no room left for its files (/tmp, /dev/shm, its output): new output is lost. Remove some of them, or start it \
             with a greater --tmp-size",
            instance.name()
        ),
    })
}

fn read(instance: &Instance, position: u64) -> std::io::Result<Vec<u8>> {
    let output = instance.home.output();
    let (folder, name) = (
        output.parent().expect("a folder"),
        output.file_name().expect("a name"),
    );
    let Some(mut file) = beneath::open(folder, name.as_ref(), OFlags::RDONLY)? else {
        return Ok(Vec::new());
    };
    file.seek(SeekFrom::Start(position))?;
    let mut data = Vec::new();
    file.take(CHUNK_BYTES as u64).read_to_end(&mut data)?;
    Ok(data)
}
