//! What can be typed about migrations that are under way.

use clap::{Args, Subcommand, ValueEnum};

const RESOLVE_HELP: &str = "\
Example:
  verbatim session resolve 3f2a --keep source

When the source has asked the destination to commit and gets no answer, the instance stays frozen at the source until the
destination says whether it runs there. Usually that takes care of itself as soon as the hosts reach each other. Only if
the destination will never answer, somebody must decide, with --force:
  --keep source       the frozen copy goes on. If the destination's runs too, there are two with one identity. A destination that
                      does not answer is first given the time in which it gives the session up, some seconds.
  --keep destination  the frozen copy is killed. If the destination never let its copy run, the instance is lost.
Without --force nothing is done that another host has not confirmed.

Exit status: 0 decided, 1 refused.";

const FORGET_HELP: &str = "\
Example:
  verbatim session forget 3f2a --host src --force

After the decision a session asks the hosts of all partners until they have taken the new connections. A host whose machine was
started anew says that nothing is left there, and is not asked again. One that is switched off for ever is asked for ever, unless
somebody ends that:
  at the source or the destination   the others are not asked any more. One that comes back all the same asks by itself.
  at a partner                       its source and destination are gone: the programs there go on with their old connections.

Exit status: 0 ended, 1 refused.";

#[derive(Debug, Subcommand)]
pub enum SessionCommand {
    /// Its steps and when they began, its hosts, what was sent, the last error.
    #[command(after_help = "Example:\n  verbatim session show 3f2a --json")]
    Show {
        /// The session, or the first digits of its number.
        id: String,
        /// A JSON array with one element for each host that takes part.
        #[arg(long)]
        json: bool,
    },
    /// Decide which copy of an instance stays, in the place of hosts that lost each other at the commit.
    #[command(after_help = RESOLVE_HELP)]
    Resolve(ResolveArguments),
    /// End a host's part in a session that waits for hosts which will not answer any more.
    #[command(after_help = FORGET_HELP)]
    Forget(ForgetArguments),
}

#[derive(Debug, Args)]
pub struct ResolveArguments {
    /// The session, or the first digits of its number.
    pub id: String,
    /// Which copy stays.
    #[arg(long, value_enum)]
    pub keep: Keep,
    /// Also where no other host confirms that this is right; see the consequences below.
    #[arg(long)]
    pub force: bool,
    /// {"session": ..., "done": ...} instead of a line.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct ForgetArguments {
    /// The session, or the first digits of its number.
    pub id: String,
    /// Whose part ends; not needed where only one host has not ended its part.
    #[arg(long)]
    pub host: Option<String>,
    /// Also where hosts may still answer; see above what is lost then.
    #[arg(long)]
    pub force: bool,
    /// {"session": ..., "host": ..., "done": ...} instead of a line.
    #[arg(long)]
    pub json: bool,
}

/// Which copy of an instance stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Keep {
    /// The frozen one at the source.
    Source,
    /// The one at the destination.
    Destination,
}
