//! When a server accepts connections, without connecting to it: perftest's takes the first that comes for its client.

use std::path::Path;
use std::time::Duration;

use anyhow::bail;
use tokio::time::Instant;

/// How often the kernel's table is looked at; it tells nobody of changes.
const INTERVAL: Duration = Duration::from_millis(5);
/// How long a program may take until it listens.
const LIMIT: Duration = Duration::from_secs(20);
/// TCP_LISTEN in the kernel's `net/tcp_states.h`, as `/proc` shows it.
const LISTEN: &str = "0A";

/// Waits until somebody in the network namespace of a process listens at `port`; `proc` is its folder in `/proc`. Fails
/// when the process ends.
pub async fn listening(proc: &Path, port: u16) -> anyhow::Result<()> {
    let deadline = Instant::now() + LIMIT;
    loop {
        if !proc.exists() {
            bail!("the server ended before it listened at port {port}");
        }
        let listens = ["net/tcp", "net/tcp6"]
            .iter()
            .filter_map(|table| std::fs::read_to_string(proc.join(table)).ok())
            .any(|table| has_listener(&table, port));
        if listens {
            return Ok(());
        }
        if Instant::now() > deadline {
            bail!(
                "the server did not listen at port {port} within {} s",
                LIMIT.as_secs()
            );
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

/// Whether a table of `/proc/net/tcp` (proc_pid_net(5)) has a socket that listens at `port`.
fn has_listener(table: &str, port: u16) -> bool {
    table.lines().skip(1).any(|line| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let local = fields.next().and_then(|address| address.rsplit_once(':'));
        let state = fields.nth(1);
        local.is_some_and(|(_, hex)| u16::from_str_radix(hex, 16) == Ok(port)) && state == Some(LISTEN)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n   0: \
                         00000000:4853 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0\n   1: \
                         0100007F:4854 0100007F:9C40 01 00000000:00000000 00:00000000 00000000     0\n";

    #[test]
    fn only_listeners_at_the_port_count() {
        assert!(has_listener(TABLE, 0x4853));
        assert!(
            !has_listener(TABLE, 0x4854),
            "an established connection is no listener"
        );
        assert!(!has_listener(TABLE, 0x4855));
        assert!(!has_listener("", 1));
    }

    #[tokio::test]
    async fn a_listener_of_this_process_is_found_and_an_end_is_noticed() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listening(Path::new("/proc/self"), listener.local_addr().unwrap().port())
            .await
            .unwrap();
        let error = listening(Path::new("/proc/no-such-process"), 1)
            .await
            .unwrap_err();
        assert!(error.to_string().contains("ended before"));
    }
}
