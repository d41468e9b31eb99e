//! nft(8).

use std::io::{self, Write};
use std::process::{Command, Stdio};

/// Gives commands to the kernel: all of them, or none.
pub(crate) fn run(commands: &str) -> io::Result<()> {
    let child = Command::new("nft")
        .args(["-f", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = child.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => io::Error::new(
            error.kind(),
            "there is no nft on this host; install the package nftables",
        ),
        _ => error,
    })?;
    // The pipe is closed after this statement, which ends the commands.
    let written = child
        .stdin
        .take()
        .expect("stdin is piped")
        .write_all(commands.as_bytes());
    let output = child.wait_with_output()?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let first = said.lines().next().unwrap_or("nothing").trim();
        return Err(io::Error::other(format!("nft says: {first}")));
    }
    written
}

/// Takes a chain away. One that is not there is made first, so that nothing fails.
pub(crate) fn remove(table: &str, chain: &str) -> io::Result<()> {
    run(&removal(table, chain))
}

/// The commands for that.
pub(crate) fn removal(table: &str, chain: &str) -> String {
    format!(
        "add table {table}\nadd chain {table} {chain}\nflush chain {table} {chain}\ndelete chain {table} {chain}\n"
    )
}
