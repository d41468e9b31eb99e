//! PostgreSQL with checksums of its pages on a volume that moves, killed over and over.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::mounted::Kind;
use crate::moving;
use crate::round::{Site, VOLUME};
use crate::support::devices::run as run_program;
use crate::support::until;

/// The folder of PostgreSQL's programs in Debian.
fn programs() -> Option<PathBuf> {
    let versions = std::fs::read_dir("/usr/lib/postgresql").ok()?;
    let folders = versions
        .filter_map(Result::ok)
        .map(|entry| entry.path().join("bin"));
    folders.filter(|folder| folder.join("initdb").exists()).max()
}

struct Postgres {
    programs: PathBuf,
    data: PathBuf,
    /// A folder beside the volume with a short name.
    sockets: tempfile::TempDir,
    server: Option<Child>,
}

impl Postgres {
    /// A program of PostgreSQL, as the user `postgres`.
    fn program(&self, name: &str) -> Command {
        let mut command = Command::new("setpriv");
        command
            .args(["--reuid=postgres", "--regid=postgres", "--clear-groups", "--"])
            .arg(self.programs.join(name))
            .env("PGHOST", self.sockets.path())
            .env("PGDATA", &self.data)
            .env("LC_ALL", "C")
            .current_dir(self.sockets.path())
            .stdin(Stdio::null());
        command
    }

    fn start(&mut self) {
        let log = std::fs::File::options()
            .append(true)
            .create(true)
            .open(self.sockets.path().join("log"))
            .expect("a log");
        let mut server = self.program("postgres");
        server.args([
            "-c",
            "listen_addresses=",
            "-c",
            "shared_buffers=16MB",
            "-c",
            "checkpoint_timeout=30",
        ]);
        server.arg("-c").arg(format!(
            "unix_socket_directories={}",
            self.sockets.path().display()
        ));
        server.args(["-c", "max_wal_size=48MB", "-c", "min_wal_size=32MB"]);
        server.stderr(log.try_clone().expect("a log")).stdout(log);
        self.server = Some(server.spawn().expect("it starts"));
        until("PostgreSQL takes orders", || {
            let server = self.server.as_mut().expect("it was started");
            assert!(
                server.try_wait().expect("ours").is_none(),
                "PostgreSQL has ended\n{}",
                self.log()
            );
            let mut asking = self.program("pg_isready");
            asking.stdout(Stdio::null()).status().expect("it runs").success()
        });
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.sockets.path().join("log")).unwrap_or_default()
    }

    /// Kills the server, like a power failure for the database alone. Its other processes notice.
    fn kill(&mut self) {
        let mut server = self.server.take().expect("it runs");
        server.kill().expect("it is ours");
        server.wait().expect("it ends");
        let socket = self.sockets.path().to_owned();
        let data = self.data.clone();
        until("nobody has the database open", || !is_used(&data, &socket));
    }

    fn stop(&mut self) {
        if let Some(mut server) = self.server.take() {
            rustix::process::kill_process(
                rustix::process::Pid::from_child(&server),
                rustix::process::Signal::INT,
            )
            .expect("it is ours");
            server.wait().expect("it ends");
        }
    }

    fn ask(&self, question: &str) -> String {
        run_program(
            self.program("psql")
                .args(["-XAtq", "-v", "ON_ERROR_STOP=1", "-c", question, "postgres"]),
        )
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        if let Some(mut server) = self.server.take() {
            let _ = server.kill();
            let _ = server.wait();
            let (data, sockets) = (self.data.clone(), self.sockets.path().to_owned());
            let end = Instant::now() + Duration::from_secs(10);
            while is_used(&data, &sockets) && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }
}

/// Whether a process works in this folder.
fn is_used(data: &Path, _: &Path) -> bool {
    let Ok(processes) = std::fs::read_dir("/proc") else {
        return false;
    };
    let mut folders = processes
        .filter_map(Result::ok)
        .filter_map(|process| std::fs::read_link(process.path().join("cwd")).ok());
    folders.any(|folder| folder == data)
}

/// A client that counts the commits that were acknowledged to it.
struct Ledger {
    client: Child,
    reading: std::thread::JoinHandle<u64>,
}

impl Ledger {
    fn start(postgres: &Postgres, first: u64) -> Self {
        let mut client = postgres
            .program("psql")
            .args(["-XAtq", "-v", "ON_ERROR_STOP=1", "postgres"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("it runs");
        let mut input = client.stdin.take().expect("piped");
        let output = BufReader::new(client.stdout.take().expect("piped"));
        let reading = std::thread::spawn(move || {
            let mut last = first;
            let mut lines = output.lines();
            // The next insert follows the answer to the last one.
            while writeln!(
                input,
                "INSERT INTO ledger VALUES ({}) RETURNING number;",
                last + 1
            )
            .is_ok()
            {
                match lines.next() {
                    Some(Ok(line)) => last = line.parse().expect("a number"),
                    _ => break,
                }
            }
            last
        });
        Self { client, reading }
    }

    /// The last acknowledged commit.
    fn end(mut self) -> u64 {
        let _ = self.client.kill();
        self.client.wait().expect("it ends");
        self.reading.join().expect("no panic")
    }
}

/// Runs for this long; skipped if PostgreSQL is not installed.
pub fn run(kind: Kind, seed: u64, time: Duration) {
    let Some(programs) = programs() else {
        eprintln!("skipped: PostgreSQL is not installed");
        return;
    };
    let mut random = StdRng::seed_from_u64(seed);
    let site = Site::new(kind, "noatime");
    // Another user has to pass these folders.
    for folder in [site.lab.path(2, ""), site.lab.path(2, "..")] {
        run_program(Command::new("chmod").arg("711").arg(folder));
    }
    let sockets = tempfile::Builder::new().prefix("pg").tempdir().expect("a folder");
    let data = std::fs::canonicalize(site.folder()).expect("a path").join("data");
    std::fs::create_dir(&data).expect("a folder");
    run_program(
        Command::new("chown")
            .arg("postgres:")
            .arg(&data)
            .arg(sockets.path()),
    );
    let mut postgres = Postgres {
        programs,
        data,
        sockets,
        server: None,
    };
    run_program(
        postgres
            .program("initdb")
            .args(["--data-checksums", "--no-locale", "-A", "trust"]),
    );
    postgres.start();
    postgres.ask("CREATE TABLE ledger (number bigint PRIMARY KEY)");
    run_program(
        postgres
            .program("pgbench")
            .args(["-i", "-q", "-s", "2", "postgres"]),
    );
    let (is_over, end) = (AtomicBool::new(false), Instant::now() + time);
    let interval = Duration::from_secs(20).min(time / 5);
    let (mut kills, mut heard, mut transactions) = (0, 0, 0);
    let (moves, host) = std::thread::scope(|scope| {
        let moving = scope.spawn(|| moving::to_and_fro(&site.lab, VOLUME, interval, &is_over));
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            while Instant::now() < end || kills == 0 {
                assert!(!moving.is_finished(), "the moves have ended by themselves");
                let ledger = Ledger::start(&postgres, heard);
                let mut bench = postgres.program("pgbench");
                bench.args(["-c", "3", "-j", "1", "-T", "600", "-n", "postgres"]);
                let mut bench = bench
                    .stdout(Stdio::null())
                    .stderr(Stdio::null())
                    .spawn()
                    .expect("it runs");
                std::thread::sleep(Duration::from_millis(random.random_range(2000..8000)));
                postgres.kill();
                kills += 1;
                bench.wait().expect("it ends");
                heard = ledger.end();
                postgres.start();
                let found: u64 = postgres
                    .ask("SELECT coalesce(max(number), 0) FROM ledger")
                    .parse()
                    .expect("a number");
                assert!(
                    found >= heard,
                    "commits up to {heard} were told, up to {found} are there\n{}",
                    postgres.log()
                );
                let count = postgres.ask("SELECT count(*) FROM ledger");
                assert_eq!(count, found.to_string(), "a commit is missing");
                heard = found;
                let sums = "SELECT (SELECT sum(abalance) FROM pgbench_accounts) = (SELECT sum(bbalance) FROM pgbench_branches)
                    AND (SELECT sum(tbalance) FROM pgbench_tellers) = (SELECT coalesce(sum(delta), 0) FROM pgbench_history)
                    AND (SELECT sum(tbalance) FROM pgbench_tellers) = (SELECT sum(bbalance) FROM pgbench_branches)";
                assert_eq!(
                    postgres.ask(sums),
                    "t",
                    "the balances do not agree\n{}",
                    postgres.log()
                );
                transactions = postgres
                    .ask("SELECT count(*) FROM pgbench_history")
                    .parse()
                    .expect("a number");
            }
        }));
        is_over.store(true, Ordering::Relaxed);
        let moved = moving.join().expect("no panic");
        if let Err(panic) = outcome {
            std::panic::resume_unwind(panic);
        }
        moved
    });
    postgres.stop();
    run_program(postgres.program("pg_checksums").arg("--check"));
    eprintln!(
        "PostgreSQL on {}, seed {seed}: killed {kills} times, {moves} moves, {heard} commits that were told, {transactions} of pgbench",
        kind.name()
    );
    let _: u64 = transactions;
    assert!(moves > 0 && heard > 0, "nothing was tried");
    drop(postgres);
    site.end(host);
}
