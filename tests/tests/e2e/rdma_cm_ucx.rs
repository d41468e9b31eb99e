//! UCX that connects by rdma_cm: a server and its client, of UCX's own examples, move while they send each other messages.

use std::path::Path;
use std::process::Command;

use anyhow::ensure;
use verbatim_e2e::{Running, TestLab};

use crate::Test;
use crate::rdma_cm_ends::with_enough;
use crate::rdma_cm_moves::{HOSTS, LIMIT, client_of};

/// As Debian's package libucx-dev has it (`setup.sh`).
const SOURCE: &str = "/usr/share/doc/libucx-dev/examples/ucp_client_server.c";
/// Reliable connections only, and those by rdma_cm.
const BY_RDMA_CM: [&str; 4] = [
    "env",
    "UCX_TLS=rc",
    "UCX_SOCKADDR_TLS_PRIORITY=rdmacm",
    // UCX's own, by datagrams, takes a peer for dead where processors are short, without any move (docs/rdma-cm.md).
    "UCX_KEEPALIVE_INTERVAL=inf",
];

/// All of them.
pub fn tests() -> Vec<Test> {
    vec![Test::new("rdma_cm::moves_ucx", HOSTS, ucx).only_on_demand(true)]
}

fn ucx(lab: &TestLab) -> anyhow::Result<()> {
    ensure!(
        Path::new(SOURCE).exists(),
        "{SOURCE} is missing: ./setup.sh installs libucx-dev"
    );
    let folder = tempfile::tempdir()?;
    let program = folder.path().join("ucp_client_server").display().to_string();
    let mut cc = Command::new("cc");
    cc.args(["-O1", "-o", &program, SOURCE, "-lucp", "-lucs"]);
    Running::start("cc ucp_client_server.c".to_owned(), cc)?.succeed(LIMIT)?;

    let address = lab.address("src")?;
    with_enough(20_000, |iterations| {
        let count = iterations.to_string();
        // Another one at each attempt: a server goes on for ever.
        let port = (20_000 + iterations.ilog2()).to_string();
        let program = [&program, "-c", "tag", "-s", "4096", "-i", &count, "-p", &port];
        let argv = [&BY_RDMA_CM[..], &program].concat();
        let server = lab.instance("src", &format!("server{count}"), &argv)?;
        let argv = [&argv[..], &["-a", &address]].concat();
        let client = client_of(lab, &format!("client{count}-"), &argv)?;
        for (instance, to) in [
            (&server, "dst"),
            (&client, "src"),
            (&server, "src"),
            (&client, "peer"),
        ] {
            let report = instance.migrate(to)?;
            if client.row()?.state == "exited" {
                client.succeed(LIMIT)?;
                return Ok(false);
            }
            report.must_be_committed()?;
        }
        let said = client.succeed(LIMIT)?.stdout;
        ensure!(said.contains("UCP TEST SUCCESS"), "{said}");
        Ok(true)
    })
}
