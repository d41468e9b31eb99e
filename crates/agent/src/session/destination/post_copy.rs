//! Post-copy of a virtual machine, at its destination: what is missing, and from when on it comes.

use std::ops::Range;

use anyhow::{Context, bail, ensure};
use verbatim_tracking::Ranges;

use super::Destination;
use crate::instances::machine::post_copy::{Bringing, Origin};
use crate::proto::LackRequest;

/// How RAM comes that is not brought before the decision.
#[derive(Debug, Default)]
pub(super) enum Lacking {
    /// It does not.
    #[default]
    Nothing,
    /// It may: QEMU is prepared for it.
    Prepared(verbatim_vm::PostCopy),
    /// All that is missing is known, and it comes.
    Comes(Bringing),
}

impl Destination {
    /// The source has left something behind.
    pub async fn lack(&mut self, request: LackRequest) -> anyhow::Result<()> {
        let ranges = ranges(&request.ranges)?;
        let Lacking::Prepared(post_copy) = &self.lacking else {
            bail!("the session was not opened for post-copy, or all that is missing was said");
        };
        tokio::task::block_in_place(|| {
            post_copy.lack(&ranges)?;
            match request.complete {
                true => post_copy.complete(),
                false => Ok(()),
            }
        })?;
        if !request.complete {
            return Ok(());
        }
        let known = self.agent.journal.parts(self.session);
        let source = known.into_iter().find_map(|part| part.told.source);
        let origin = Origin {
            session: self.session,
            source: source.context("the journal does not say where the session comes from")?,
            by_rdma: request.by_rdma,
        };
        origin.keep(&self.paths)?;
        let Lacking::Prepared(post_copy) = std::mem::take(&mut self.lacking) else {
            unreachable!("it was so just now");
        };
        self.lacking = Lacking::Comes(Bringing::begin(&self.agent, origin, post_copy));
        Ok(())
    }

    /// Nothing was left behind: QEMU is as if nothing could have been.
    pub(super) fn lacks_nothing(&mut self) -> anyhow::Result<()> {
        match std::mem::take(&mut self.lacking) {
            Lacking::Prepared(post_copy) => {
                ensure!(
                    post_copy.left() == 0,
                    "the source has not said all that it leaves behind"
                );
                Ok(post_copy.end()?)
            }
            other => {
                self.lacking = other;
                Ok(())
            }
        }
    }
}

fn ranges(said: &[u64]) -> anyhow::Result<Ranges> {
    let (pairs, rest) = said.as_chunks::<2>();
    ensure!(rest.is_empty(), "a range without its length");
    let ranges = pairs.iter().map(|[start, length]| {
        let end = start.checked_add(*length).context("a range beyond all memory")?;
        anyhow::Ok(*start..end)
    });
    let ranges: Vec<Range<u64>> = ranges.collect::<anyhow::Result<_>>()?;
    Ok(ranges.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_range_is_refused() {
        assert!(ranges(&[]).unwrap().is_empty());
        let two: Vec<_> = ranges(&[4096, 8192, 65536, 4096]).unwrap().iter().collect();
        assert_eq!(two, [4096..12288, 65536..69632]);
        assert!(ranges(&[4096]).is_err());
        assert!(ranges(&[u64::MAX, 2]).is_err());
    }
}
