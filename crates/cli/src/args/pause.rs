//! `verbatim pause` and `verbatim resume`.

use std::str::FromStr;

use clap::Args;

/// All connections of an instance, or one: `NAME` or `NAME/0xQPN`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PauseTarget {
    /// The instance.
    pub name: String,
    /// The number of its queue pair, as its RNIC has it.
    pub qpn: Option<u32>,
}

impl FromStr for PauseTarget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, qpn) = match text.split_once('/') {
            Some((name, qpn)) => (name, Some(super::nic::qpn(qpn)?)),
            None => (text, None),
        };
        if name.is_empty() {
            return Err("an instance has a name".to_owned());
        }
        Ok(Self {
            name: name.to_owned(),
            qpn,
        })
    }
}

#[derive(Debug, Args)]
pub struct PauseArguments {
    /// The instance; or one of its connections, by the number of its queue pair.
    #[arg(value_name = "NAME[/QPN]")]
    pub target: PauseTarget,
    /// After so many seconds both ends go on by themselves, whoever is gone by then.
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub limit: u32,
    /// JSON instead of a table.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct ResumeArguments {
    /// The instance; or one of its connections.
    #[arg(value_name = "NAME[/QPN]")]
    pub target: PauseTarget,
    /// Also if a partner's agent is out of reach: the end there goes on when the limit of the pause has passed.
    #[arg(long)]
    pub force: bool,
    /// JSON instead of a table.
    #[arg(long)]
    pub json: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_is_named_by_instance_and_queue_pair() {
        let target = |text: &str| text.parse::<PauseTarget>();
        let web = |qpn| PauseTarget {
            name: "web".to_owned(),
            qpn,
        };
        assert_eq!(target("web"), Ok(web(None)));
        assert_eq!(
            (target("web/0x11"), target("web/17")),
            (Ok(web(Some(17))), Ok(web(Some(17))))
        );
        for wrong in ["", "/0x11", "web/", "web/0x1000000", "web/1/2"] {
            assert!(target(wrong).is_err(), "{wrong}");
        }
    }
}
