//! Starting an instance's program, and finding out whether it could be started.
//!
//! runc starts a shell in the container, which opens the program's streams and then executes it; that this fails, runc does not
//! see. So the shell holds a FIFO of the runtime folder open while it tries ([`STARTED_NAME`]): it is closed when the
//! program is executed, and something was written to it before if that cannot be.

use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use anyhow::{Context, bail};
use rustix::fs::{CWD, FileType, Mode, OFlags};
use tokio::net::unix::pipe::{OpenOptions, Receiver};
use verbatim_container::{Bundle, Init, Runc, STARTED_NAME};

use crate::beneath;
use crate::instances::home::{Home, OUTPUT_NAME};

/// How much of the end of a program's output is looked at for a reason.
const REASON_BYTES: u64 = 4096;

/// Starts the container of `home`, whose bundle is made. An error if its program cannot be executed; then nothing of the
/// container is left.
pub async fn start(runc: &Runc, home: &Home) -> anyhow::Result<Init> {
    let name = &home.record.name;
    let folder = &home.paths.folder;
    let fifo = folder.join(STARTED_NAME);
    let words = match Bundle::open(home.bundle())?.tells_start()? {
        true => Some(listen(&fifo).with_context(|| format!("cannot make {}", fifo.display()))?),
        false => None,
    };
    let started = runc.run(name, home.bundle()).await;
    let mut init = match started {
        Ok(init) => init,
        Err(error) => {
            let _ = std::fs::remove_file(&fifo);
            return Err(error.into());
        }
    };
    let Some(words) = words else {
        return Ok(init);
    };
    let failed = tokio::select! {
        // What it says it says before it ends.
        biased;
        said = said(&words) => said.context("nobody says whether the program was started")?,
        ended = init.wait_exit() => {
            tracing::debug!(instance = %name, ?ended, "its shell has ended before it tried");
            true
        }
    };
    let _ = std::fs::remove_file(&fifo);
    if !failed {
        return Ok(init);
    }
    // It has ended, or will have in a moment; who started it is to see to the rest.
    let _ = init.wait_exit().await;
    let reason = last_line(folder).unwrap_or_default();
    runc.delete(name, true).await?;
    bail!(
        "the program {:?} cannot be started: {}",
        home.record.command().first().map_or("", String::as_str),
        if reason.is_empty() {
            "its shell does not say why"
        } else {
            &reason
        }
    );
}

/// Makes the FIFO, which everybody may write to: the container's user may be any.
fn listen(fifo: &Path) -> std::io::Result<Receiver> {
    rustix::fs::mknodat(CWD, fifo, FileType::Fifo, Mode::from_raw_mode(0o666), 0)?;
    std::fs::set_permissions(fifo, std::os::unix::fs::PermissionsExt::from_mode(0o666))?;
    OpenOptions::new().open_receiver(fifo)
}

/// Waits until whoever has opened the FIFO has closed it. Whether something was written to it.
async fn said(words: &Receiver) -> std::io::Result<bool> {
    let mut said = false;
    loop {
        // Not before somebody has opened it.
        words.readable().await?;
        match words.try_read(&mut [0; 64]) {
            Ok(0) => return Ok(said),
            Ok(_) => said = true,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}

/// The last line of the output: the shell's own words.
fn last_line(folder: &Path) -> Option<String> {
    Some(last_output(folder)?.trim_end().lines().next_back()?.to_owned())
}

/// The end of the output.
pub fn last_output(folder: &Path) -> Option<String> {
    let mut output = beneath::open(folder, OUTPUT_NAME.as_ref(), OFlags::RDONLY).ok()??;
    let length = output.metadata().ok()?.len();
    output
        .seek(SeekFrom::Start(length.saturating_sub(REASON_BYTES)))
        .ok()?;
    let mut text = Vec::new();
    output.take(REASON_BYTES).read_to_end(&mut text).ok()?;
    Some(String::from_utf8_lossy(&text).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_fifo_tells_when_it_is_closed_and_whether_something_was_said() {
        let folder = tempfile::tempdir().unwrap();
        for words in ["", "failed\n"] {
            let fifo = folder.path().join("f");
            let receiver = listen(&fifo).unwrap();
            let (told, said) = (fifo.clone(), said(&receiver));
            let writer = tokio::task::spawn_blocking(move || {
                let mut file = std::fs::OpenOptions::new()
                    .read(true)
                    .write(true)
                    .open(told)
                    .unwrap();
                std::io::Write::write_all(&mut file, words.as_bytes()).unwrap();
            });
            assert_eq!(said.await.unwrap(), !words.is_empty());
            writer.await.unwrap();
            std::fs::remove_file(fifo).unwrap();
        }
    }
}
