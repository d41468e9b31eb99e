//! The RAM of a virtual machine, tracked from outside ([`verbatim_vm::Rounds`]) and sent in rounds.
//!
//! It is a file of the runtime folder, and the destination's is another one, mapped by the QEMU that waits there: so what is sent is put
//! in its place in it, and what the guest has given back becomes a hole there.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::Ordering;

use tonic::transport::Channel;
use verbatim_vm::{Rounds, Run};

use super::parts::{PART_BYTES, Parts};
use super::send::stream;
use super::tracked::Way;
use crate::proto::FilePart;
use crate::proto::file_part::{Folder, Kind};
use crate::proto::peer_client::PeerClient;

/// Which round it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Which {
    /// The guest runs.
    Another,
    /// The guest stands still, and its disks are quiet.
    Last,
}

impl Way {
    /// Sends what was written since the round before; all in the first. Returns how many bytes that were.
    ///
    /// After an error nothing is tracked any more: what the destination has is not known.
    pub async fn ram(
        &self,
        path: &Path,
        rounds: &mut Option<Rounds>,
        which: Which,
        destination: &mut PeerClient<Channel>,
    ) -> anyhow::Result<u64> {
        let Some(mut taken) = rounds.take() else {
            anyhow::bail!("the guest's RAM is not tracked");
        };
        self.sent.store(0, Ordering::Relaxed);
        let (session, path) = (self.session, path.as_os_str().as_bytes().to_vec());
        let streamed = stream(destination, &self.route, &self.sent, move |parts| {
            let runs = match which {
                Which::Another => taken.round(),
                Which::Last => taken.last(),
            };
            let part = FilePart {
                session,
                folder: Folder::Runtime.into(),
                path,
                kind: Kind::File.into(),
                length: taken.ram().bytes(),
                ..FilePart::default()
            };
            let sent = runs
                .map_err(anyhow::Error::from)
                .and_then(|runs| send(&taken, &runs, &part, parts));
            (taken, sent)
        });
        let ((back, read), placed) = streamed.await?;
        placed?;
        read?;
        *rounds = Some(back);
        Ok(self.sent.load(Ordering::Relaxed))
    }
}

fn send(rounds: &Rounds, runs: &[Run], part: &FilePart, parts: &Parts) -> anyhow::Result<()> {
    let mut buffer = vec![0; PART_BYTES];
    for run in runs {
        let range = match run {
            Run::Zero(range) => {
                parts.hole(part, range.clone())?;
                continue;
            }
            Run::Data(range) => range,
        };
        let mut from = range.start;
        while from < range.end {
            let to = range.end.min(from + PART_BYTES as u64);
            let bytes = &mut buffer[..(to - from) as usize];
            rounds.ram().read(from..to, bytes)?;
            parts.data(part, from, bytes)?;
            from = to;
        }
    }
    Ok(())
}
