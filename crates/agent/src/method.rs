//! How a migration brings connections to a stop.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

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

/// What it takes longer to pause so many connections, and to let them go on, than to do nothing but wait (`bench/run methods`).
fn pausing(connections: usize) -> Duration {
    const EACH: Duration = Duration::from_micros(15);
    EACH * u32::try_from(connections).unwrap_or(u32::MAX)
}

/// What an operator asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Wanted {
    /// This one.
    #[default]
    WaitBeforeStop,
    /// This one, where both ends of all connections can.
    PauseResume,
    /// The one with which the connections are expected to stand still for the shorter time, by what is under way.
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
            Wanted::Auto => (Method::PauseResume, "what is under way is not known yet"),
        };
        Self {
            method,
            reason: reason.to_owned(),
        }
    }

    /// By how long takes what is under way: `None` is longer than [`Choice::of_interest`].
    pub fn expected(wait: Option<Duration>, connections: usize) -> Self {
        let pause = pausing(connections);
        let in_ms = |time: Duration| time.as_secs_f64() * 1e3;
        let waiting = match wait {
            Some(wait) => format!("about {:.1} ms", in_ms(wait)),
            None => format!("more than {:.1} ms", in_ms(Self::of_interest(connections))),
        };
        let method = match wait {
            Some(wait) if wait < pause => Method::WaitBeforeStop,
            _ => Method::PauseResume,
        };
        let reason = format!(
            "what is under way takes {waiting}, and to pause {connections} connections about {:.1} ms",
            in_ms(pause)
        );
        Self { method, reason }
    }

    /// What is under way for longer than this is longer than any pause.
    pub fn of_interest(connections: usize) -> Duration {
        Duration::from_millis(20) + 2 * pausing(connections)
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
    fn what_takes_long_is_not_waited_for() {
        let chosen = |ms: Option<u64>, connections| {
            Choice::expected(ms.map(Duration::from_millis), connections).method
        };
        assert_eq!(chosen(Some(10), 16), Method::PauseResume);
        assert_eq!(chosen(Some(0), 16), Method::WaitBeforeStop);
        assert_eq!(chosen(Some(10), 4096), Method::WaitBeforeStop);
        assert_eq!(chosen(Some(100), 4096), Method::PauseResume);
        assert_eq!(chosen(None, 4096), Method::PauseResume);
        let reason = Choice::expected(Some(Duration::from_micros(6400)), 16).reason;
        assert_eq!(
            reason,
            "what is under way takes about 6.4 ms, and to pause 16 connections about 0.2 ms"
        );
        assert!(Choice::expected(None, 1).reason.contains("more than 20.0 ms"));
    }

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
