//! What we have to say, if anybody asked for it: on stderr when `VERBATIM_LOG` is set.

use std::io::Write;
use std::sync::OnceLock;

/// The environment variable that turns the log on.
pub const VARIABLE: &str = "VERBATIM_LOG";

/// Whether anybody wants to read it.
pub fn wanted() -> bool {
    static WANTED: OnceLock<bool> = OnceLock::new();
    *WANTED.get_or_init(|| std::env::var_os(VARIABLE).is_some_and(|value| !value.is_empty() && value != "0"))
}

/// Writes one line; if stderr is gone, so be it.
pub fn line(text: std::fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "verbatim[{}]: {text}", std::process::id());
}

/// Logs one line if anybody wants to read it.
macro_rules! log {
    ($($arguments:tt)*) => {
        if $crate::log::wanted() {
            $crate::log::line(format_args!($($arguments)*));
        }
    };
}
pub(crate) use log;
