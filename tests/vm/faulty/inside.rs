//! The part within a machine: one case, or a step of a case that runs outside.

use anyhow::{Context, bail};

use crate::{destination, identity, log, power, serving, slow, state, thin};

/// A case and its name.
pub type Case = (&'static str, fn() -> anyhow::Result<()>);

/// All cases that run in one machine.
pub const CASES: &[&[Case]] = &[
    destination::ALL,
    serving::ALL,
    thin::ALL,
    identity::ALL,
    slow::ALL,
    state::ALL,
    log::ALL,
];

/// Runs the case or step that the command line names.
pub fn tell(words: &[String]) -> anyhow::Result<()> {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let (&name, rest) = words.split_first().context("a case is lacking")?;
    if let Some((_, case)) = CASES
        .iter()
        .flat_map(|cases| cases.iter())
        .find(|case| case.0 == name)
    {
        return case();
    }
    match name {
        power::TENANT => power::tenant(rest),
        power::VERIFY => power::verify(rest),
        _ => bail!("there is no case {name}"),
    }
}
