//! A process that takes away what an RNIC in its jail cannot: its files in the runtime folder, and the rules in front of UDP port 4791.
//!
//! It is a shell that waits for one word. It does what it was told at its start, and nothing that it is told later: an RNIC that somebody has taken over
//! gets no rights by it. When an RNIC is killed it ends and leaves all there, for the next RNIC of that folder.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use verbatim_device::control::SOCKET_NAME;
use verbatim_filter::PortFilter;

use crate::stats::STATS_NAME;

/// `$1` and `$2` are the files, `$3` are the rules' end.
const SCRIPT: &str = r#"
trap '' INT TERM HUP
read -r word || exit 0
rm -f -- "$1" "$2"
case "$word" in
rules) printf '%s' "$3" | nft -f - ;;
esac
"#;

/// The process.
#[derive(Debug)]
pub struct Leftovers(Child);

impl Leftovers {
    /// Starts it. Without one the leftovers stay where they are, which the next RNIC can do with.
    pub fn watch(folder: &Path) -> Option<Self> {
        let started = Command::new("sh")
            .args(["-c", SCRIPT, "verbatim-nic-leftovers"])
            .args([SOCKET_NAME, STATS_NAME].map(|name| folder.join(name)))
            .arg(PortFilter::removal(folder))
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            // A signal that ends the RNIC, such as Ctrl-C, is not for it.
            .process_group(0)
            .spawn();
        started
            .inspect_err(|error| {
                tracing::warn!(%error, "what the RNIC leaves in {} stays there when it ends", folder.display());
            })
            .ok()
            .map(Self)
    }

    /// Has it remove what there is, and waits for that. `rules`: those of [`PortFilter`] are there.
    pub fn remove(mut self, rules: Option<()>) {
        let word = match rules {
            Some(()) => "rules\n",
            None => "files\n",
        };
        let told = self
            .0
            .stdin
            .take()
            .map(|mut stdin| stdin.write_all(word.as_bytes()));
        match (told, self.0.wait()) {
            (Some(Ok(())), Ok(status)) if status.success() => {}
            (told, ended) => tracing::warn!(?told, ?ended, "the RNIC's files or rules may stay behind"),
        }
    }
}
