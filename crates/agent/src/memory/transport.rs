//! How memory goes to the destination while the program runs, as it is asked for.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;
use verbatim_bulk::{MOST_RING_BYTES, MOST_RUN_BYTES, Operation, PAGE_BYTES, QpClass};

/// How it was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Transport {
    /// On the agents' own connection.
    Tls,
    /// By one-sided RDMA, not encrypted; what arrives is compared with fingerprints that go over TLS.
    Rdma,
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tls => "tls",
            Self::Rdma => "rdma",
        })
    }
}

/// What an operator asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Wanted {
    /// TLS.
    #[default]
    Tls,
    /// RDMA, where both hosts can.
    Rdma,
    /// RDMA where both hosts can and the list of hosts trusts the network.
    Auto,
}

impl FromStr for Wanted {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "tls" | "" => Ok(Self::Tls),
            "rdma" => Ok(Self::Rdma),
            "auto" => Ok(Self::Auto),
            other => Err(format!(
                "there is no memory transport {other}; there are tls, rdma and auto"
            )),
        }
    }
}

/// The transport of one attempt, and why it was taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// Which.
    pub transport: Transport,
    /// For the operator.
    pub reason: String,
}

impl Choice {
    /// TLS, for this reason.
    pub fn tls(reason: impl Into<String>) -> Self {
        Self {
            transport: Transport::Tls,
            reason: reason.into(),
        }
    }

    /// What is wanted, before anything is known of the RNICs. `can`: the destination takes contents by RDMA. `untrusted`: the
    /// hosts whose network the list of hosts does not trust.
    pub fn first(wanted: Wanted, to: &str, can: bool, untrusted: &[&str]) -> Self {
        let reason = match wanted {
            Wanted::Tls => return Self::tls("asked for"),
            _ if !can => {
                return Self::tls(format!(
                    "the agent of {to} takes no memory by RDMA; upgrade it to this release"
                ));
            }
            Wanted::Auto if !untrusted.is_empty() => {
                return Self::tls(format!(
                    "the list of hosts does not say \"trusted_network\" of {}",
                    untrusted.join(" and ")
                ));
            }
            Wanted::Auto => "the list of hosts trusts the network of both hosts",
            Wanted::Rdma => "asked for",
        };
        Self {
            transport: Transport::Rdma,
            reason: reason.to_owned(),
        }
    }
}

/// Details, for measurements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tuning {
    /// Who carries runs; by load if `None`.
    pub operation: Option<Operation>,
    /// The longest run, in bytes.
    pub run_bytes: u64,
    /// The most bytes in flight.
    pub window_bytes: u64,
    /// Whose work goes first at the RNICs while the program runs.
    pub class: QpClass,
    /// Pages that are zero are told, not sent.
    pub skips_zeroes: bool,
    /// Several runs of bytes go in one part.
    pub packs: bool,
    /// Slower while others use the RNICs.
    pub adapts: bool,
}

impl Default for Tuning {
    fn default() -> Self {
        let options = verbatim_bulk::Options::default();
        Self {
            operation: None,
            run_bytes: options.run_bytes,
            window_bytes: options.window_bytes,
            class: options.class,
            skips_zeroes: true,
            packs: true,
            adapts: true,
        }
    }
}

impl Tuning {
    /// For the crate that carries runs.
    pub fn options(&self, operation: Operation) -> verbatim_bulk::Options {
        let ring = verbatim_bulk::Options::default().ring_bytes;
        verbatim_bulk::Options {
            operation,
            run_bytes: self.run_bytes,
            ring_bytes: ring
                .max(2 * self.window_bytes)
                .next_multiple_of(self.run_bytes)
                .min(MOST_RING_BYTES / self.run_bytes * self.run_bytes),
            window_bytes: self.window_bytes,
            class: self.class,
            locks: false,
        }
    }
}

impl FromStr for Tuning {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut tuning = Self::default();
        for setting in text.split(',').filter(|setting| !setting.is_empty()) {
            let wrong = || {
                format!(
                    "{setting:?} is no setting of the memory transport; there are operation=write|read|auto, run=BYTES (whole pages), \
                     window=BYTES, class=user|background, zeroes=skip|send, pack=on|off and rate=adaptive|full"
                )
            };
            let bytes = |value: &str, most: u64| {
                let bytes = value.parse().map_err(|_| wrong())?;
                let page = PAGE_BYTES as u64;
                match (page..=most).contains(&bytes) && bytes % page == 0 {
                    true => Ok(bytes),
                    false => Err(wrong()),
                }
            };
            match setting.split_once('=').ok_or_else(wrong)? {
                ("operation", "write") => tuning.operation = Some(Operation::Write),
                ("operation", "read") => tuning.operation = Some(Operation::Read),
                ("operation", "auto") => tuning.operation = None,
                ("run", value) => tuning.run_bytes = bytes(value, MOST_RUN_BYTES)?,
                ("window", value) => tuning.window_bytes = bytes(value, MOST_RING_BYTES / 2)?,
                ("class", "user") => tuning.class = QpClass::User,
                ("class", "background") => tuning.class = QpClass::Background,
                ("zeroes", "skip") => tuning.skips_zeroes = true,
                ("zeroes", "send") => tuning.skips_zeroes = false,
                ("pack", "on") => tuning.packs = true,
                ("pack", "off") => tuning.packs = false,
                ("rate", "adaptive") => tuning.adapts = true,
                ("rate", "full") => tuning.adapts = false,
                _ => return Err(wrong()),
            }
        }
        Ok(tuning)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rdma_is_taken_where_it_is_wanted_and_can_be() {
        let choose = |wanted, can, untrusted: &[&str]| Choice::first(wanted, "b", can, untrusted);
        let transport = |wanted, can, untrusted: &[&str]| choose(wanted, can, untrusted).transport;
        assert_eq!(transport(Wanted::Tls, true, &[]), Transport::Tls);
        assert_eq!(transport(Wanted::Rdma, true, &["a"]), Transport::Rdma);
        assert_eq!(transport(Wanted::Auto, true, &[]), Transport::Rdma);
        let untrusted = choose(Wanted::Auto, true, &["a", "b"]);
        assert_eq!(untrusted.transport, Transport::Tls);
        assert!(untrusted.reason.contains("a and b"), "{untrusted:?}");
        for wanted in [Wanted::Rdma, Wanted::Auto] {
            let old = choose(wanted, false, &[]);
            assert_eq!(old.transport, Transport::Tls);
            assert!(old.reason.contains("upgrade"), "{old:?}");
        }
        assert!(
            "udp"
                .parse::<Wanted>()
                .unwrap_err()
                .contains("tls, rdma and auto")
        );
    }

    #[test]
    fn settings_are_read_and_wrong_ones_refused() {
        assert_eq!("".parse(), Ok(Tuning::default()));
        let tuning: Tuning = "operation=read,run=4096,window=65536,class=user,zeroes=send,pack=off,rate=full"
            .parse()
            .unwrap();
        assert_eq!(
            tuning,
            Tuning {
                operation: Some(Operation::Read),
                run_bytes: 4096,
                window_bytes: 65536,
                class: QpClass::User,
                skips_zeroes: false,
                packs: false,
                adapts: false
            }
        );
        for wrong in [
            "run=1",
            "run=0",
            "run=8388608",
            "x=1",
            "run",
            "window=x",
            "class=fast",
        ] {
            let error = wrong.parse::<Tuning>().unwrap_err();
            assert!(error.contains(wrong) && error.contains("operation="), "{error}");
        }
    }

    #[test]
    fn a_ring_is_whole_runs_of_any_length() {
        for run in [1, 3, 100, 256, 1024] {
            for window in [1, 7, 1024, 8192] {
                let page = PAGE_BYTES as u64;
                let tuning = Tuning {
                    run_bytes: run * page,
                    window_bytes: window * page,
                    ..Tuning::default()
                };
                let options = tuning.options(Operation::Write);
                assert_eq!(options.ring_bytes % options.run_bytes, 0);
                assert!((options.run_bytes..=MOST_RING_BYTES).contains(&options.ring_bytes));
            }
        }
    }
}
