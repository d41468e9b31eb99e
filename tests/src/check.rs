//! What `vcheck` prints.

use anyhow::{Context, bail};
use serde::Deserialize;

use crate::running::Finished;

/// The TCP port on which its server listens.
pub const VCHECK_PORT: u16 = 18516;

/// The report of one side.
#[derive(Debug, Clone, Deserialize)]
pub struct CheckReport {
    /// `client` or `server`.
    pub role: String,
    /// Requests that this side posted.
    pub posted: u64,
    /// Of these, how many completed.
    pub completed: u64,
    /// Messages that arrived here (READs: where they were posted).
    pub received: u64,
    /// Messages that never came.
    pub lost: u64,
    /// Messages that came twice.
    pub duplicated: u64,
    /// Messages that came before their turn.
    pub out_of_order: u64,
    /// Messages whose content was wrong.
    pub corrupted: u64,
    /// The longest time between two completions.
    pub longest_gap_ms: f64,
    /// How often it stood still (`--hold-every`).
    #[serde(default)]
    pub holds: u64,
    /// Bytes of content.
    pub bytes: u64,
    /// `ok`, `defect` or `error`.
    pub verdict: String,
    /// The first thing that was wrong.
    pub error: Option<String>,
}

impl CheckReport {
    /// Takes the report out of what a side has written, as its last line that is JSON.
    pub fn parse(finished: &Finished) -> anyhow::Result<Self> {
        let lines: Vec<_> = finished
            .stdout
            .lines()
            .filter(|line| line.starts_with('{'))
            .collect();
        let [line] = lines[..] else {
            bail!(
                "{} printed {} reports instead of one{}",
                finished.what,
                lines.len(),
                finished.output()
            );
        };
        serde_json::from_str(line).with_context(|| format!("not a report of vcheck: {line}"))
    }

    /// Fails if anything was lost, repeated, reordered or changed, or if nothing was sent at all.
    pub fn must_be_clean(&self) -> anyhow::Result<()> {
        let defects = [self.lost, self.duplicated, self.out_of_order, self.corrupted];
        if defects != [0; 4] || self.verdict != "ok" || self.posted != self.completed {
            bail!("the {} of vcheck found defects: {self:?}", self.role);
        }
        Ok(())
    }

    /// Both sides are clean, and what one posted has arrived.
    pub fn both_clean(client: &Finished, server: &Finished) -> anyhow::Result<(Self, Self)> {
        let (client, server) = (Self::parse(client)?, Self::parse(server)?);
        client.must_be_clean()?;
        server.must_be_clean()?;
        if client.role != "client" || server.role != "server" {
            bail!("these are reports of {} and {}", client.role, server.role);
        }
        let (posted, received) = (client.posted + server.posted, client.received + server.received);
        if posted != received || posted == 0 {
            bail!("{posted} messages were posted and {received} arrived");
        }
        Ok((client, server))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn side(role: &str, posted: u64, received: u64, lost: u64) -> Finished {
        let verdict = if lost == 0 { "ok" } else { "defect" };
        let stdout = format!(
            "a note\n{{\"role\":\"{role}\",\"posted\":{posted},\"completed\":{posted},\"received\":{received},\
             \"lost\":{lost},\"duplicated\":0,\"out_of_order\":0,\"corrupted\":0,\"longest_gap_ms\":1.5,\"bytes\":64,\
             \"verdict\":\"{verdict}\",\"error\":null}}\n"
        );
        Finished {
            what: role.to_owned(),
            code: 0,
            stdout,
            stderr: String::new(),
        }
    }

    #[test]
    fn only_two_clean_sides_that_agree_are_clean() {
        let both = |client: &Finished, server: &Finished| CheckReport::both_clean(client, server).is_ok();
        assert!(both(&side("client", 10, 0, 0), &side("server", 0, 10, 0)));
        assert!(
            !both(&side("client", 10, 0, 0), &side("server", 0, 9, 0)),
            "one did not arrive"
        );
        assert!(
            !both(&side("client", 10, 0, 0), &side("server", 0, 10, 1)),
            "a loss was reported"
        );
        assert!(
            !both(&side("client", 0, 0, 0), &side("server", 0, 0, 0)),
            "nothing was sent"
        );
        assert!(
            !both(&side("server", 10, 0, 0), &side("server", 0, 10, 0)),
            "two servers"
        );
    }
}
