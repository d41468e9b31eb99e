//! How a migration brings connections to a stop.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

/// How it was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// Requests are intercepted at both ends until nothing is in flight, and both ends take new queue pairs (MigrRDMA §3.4).
    WaitBeforeStop,
    /// The RNICs pause the connections in the middle of what is under way, and the instance's end goes on elsewhere (MigrOS
    /// §3.2).
    PauseResume,
}

impl Method {
    /// Its name in commands and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::WaitBeforeStop => "wait-before-stop",
            Self::PauseResume => "pause-resume",
        }
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What an operator asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Wanted {
    /// This one.
    #[default]
    WaitBeforeStop,
    /// This one, where both ends of all connections can.
    PauseResume,
    /// Pausing where that can be. Blackouts are not predicted.
    Auto,
}

impl FromStr for Wanted {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "wait-before-stop" | "" => Ok(Self::WaitBeforeStop),
            "pause-resume" => Ok(Self::PauseResume),
            "auto" => Ok(Self::Auto),
            other => Err(format!(
                "there is no method {other}; there are wait-before-stop, pause-resume and auto"
            )),
        }
    }
}

/// The method of one attempt, and why it was taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// Which.
    pub method: Method,
    /// For the operator.
    pub reason: String,
}

impl Choice {
    /// The first attempt's.
    pub fn first(wanted: Wanted) -> Self {
        let (method, reason) = match wanted {
            Wanted::WaitBeforeStop => (Method::WaitBeforeStop, "asked for"),
            Wanted::PauseResume => (Method::PauseResume, "asked for"),
            Wanted::Auto => (
                Method::PauseResume,
                "both ends of all connections can pause, and what is in flight need not be waited for",
            ),
        };
        Self {
            method,
            reason: reason.to_owned(),
        }
    }

    /// The one after it turned out that connections cannot be paused.
    pub fn instead(why: &str) -> Self {
        Self {
            method: Method::WaitBeforeStop,
            reason: format!("the connections cannot be paused: {why}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_have_the_names_that_commands_take() {
        for (wanted, method) in [
            (Wanted::WaitBeforeStop, Method::WaitBeforeStop),
            (Wanted::PauseResume, Method::PauseResume),
        ] {
            assert_eq!(method.name().parse(), Ok(wanted));
            assert_eq!(Choice::first(wanted).method, method);
        }
        assert_eq!("".parse(), Ok(Wanted::default()));
        assert!("fast".parse::<Wanted>().unwrap_err().contains("pause-resume"));
    }
}
