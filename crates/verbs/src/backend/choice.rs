//! Which backends a process has.

use std::ffi::OsStr;
use std::path::Path;
use std::time::Duration;

use super::Provider;
use super::rdma_core::{self, RdmaCoreProvider};
use super::soft::SoftProvider;

/// Says which backends there shall be: `soft`, `rdma-core` or `auto`.
pub const BACKEND_VARIABLE: &str = "VERBATIM_BACKEND";

/// What was said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Choice {
    /// The software RNIC only.
    Soft,
    /// The system's RNICs only.
    RdmaCore,
    /// Both, the software RNIC first.
    Auto,
}

impl Choice {
    /// Anything else is as if nothing was said: a program must not lose its devices by a slip of the pen.
    fn parse(value: Option<&OsStr>) -> Self {
        match value.and_then(OsStr::to_str) {
            Some("soft") => Self::Soft,
            Some("rdma-core") => Self::RdmaCore,
            _ => Self::Auto,
        }
    }
}

/// All backends, for a process with that runtime folder. Where two have a device of one name, the first one's counts.
pub fn providers(runtime: &Path, limit: Option<Duration>) -> Vec<Box<dyn Provider>> {
    let choice = Choice::parse(std::env::var_os(BACKEND_VARIABLE).as_deref());
    let mut providers: Vec<Box<dyn Provider>> = Vec::new();
    if choice != Choice::RdmaCore {
        providers.push(Box::new(SoftProvider::new(runtime, limit)));
    }
    // Where the kernel has no RDMA device, its library is not even loaded.
    if choice == Choice::RdmaCore || choice == Choice::Auto && rdma_core::has_devices() {
        providers.push(Box::new(RdmaCoreProvider::default()));
    }
    providers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_understood_is_both() {
        let parse = |text: &str| Choice::parse(Some(OsStr::new(text)));
        assert_eq!(parse("soft"), Choice::Soft);
        assert_eq!(parse("rdma-core"), Choice::RdmaCore);
        assert_eq!(parse("auto"), Choice::Auto);
        assert_eq!(parse("mlx5_0"), Choice::Auto);
        assert_eq!(Choice::parse(None), Choice::Auto);
    }
}
