//! Arguments of `verbatim check`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

#[derive(Debug, Args)]
pub struct CheckArguments {
    /// The instance.
    #[arg(required_unless_present = "self_test", conflicts_with = "self_test")]
    pub name: Option<String>,
    /// The destination.
    #[arg(
        long,
        value_name = "HOST",
        required_unless_present = "self_test",
        conflicts_with = "self_test"
    )]
    pub to: Option<String>,
    /// Instead: move a small program that has this RNIC of the kernel's open between two hosts that are made on this machine for that,
    /// and taken away again. Nothing need run, and nothing that runs is touched.
    #[arg(long, value_name = "DEVICE", num_args = 0..=1, default_missing_value = "")]
    pub self_test: Option<String>,
    /// With --self-test: where the result goes, to be sent with a bug report; self-test-DEVICE.json if not given.
    #[arg(long, value_name = "FILE", requires = "self_test")]
    pub out: Option<PathBuf>,
    /// With --self-test: how long it may take, in seconds.
    #[arg(long, value_name = "SECONDS", requires = "self_test", default_value = "60", value_parser = super::seconds)]
    pub limit: Duration,
    /// If nothing stands in the way: have CRIU write the instance down, without its memory, and let it go on at once. What only CRIU knows is
    /// found so. The instance stands still for that, some ten milliseconds if it is small; how long is expected is said before, and how long
    /// it was afterwards. It stays where it is, whatever happens.
    #[arg(long, conflicts_with = "self_test")]
    pub deep: bool,
    /// {"blockers": [...], "notes": [...], "expected_pause_ms": ..., "deep": ...} instead of lines; with --self-test, what is in the file.
    #[arg(long)]
    pub json: bool,
}
