//! Daemons that give up what they do not need, and containers that know nothing of it.

use std::collections::BTreeMap;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use verbatim_e2e::{Instance, Running, TestLab, eventually, patience};

use crate::Test;
use crate::volumes::must;

const LIMIT: Duration = Duration::from_secs(60);
const HOSTS: &[&str] = &["src", "dst"];

/// Everybody may read and write what is made with it.
const OPEN: u32 = 0o000;

/// All of them.
pub fn tests() -> Vec<Test> {
    vec![
        Test {
            umask: Some(OPEN),
            ..Test::new("jail::files_are_their_daemons", HOSTS, files_are_their_daemons).with_volumes()
        },
        Test {
            umask: Some(OPEN),
            ..Test::new(
                "jail::containers_inherit_nothing",
                HOSTS,
                containers_inherit_nothing,
            )
        },
        Test::new(
            "jail::daemons_keep_what_they_need",
            &["src"],
            daemons_keep_what_they_need,
        )
        .with_volumes(),
    ]
}

/// What other users of a host may do with files of a host's daemons: the end of the path, the mode, and why.
const REACHABLE: &[(&str, u32, &str)] = &[
    (
        "/run/verbatim",
        0o755,
        "the sockets of programs of all users lie there",
    ),
    (
        "/run/verbatim/nic.sock",
        0o666,
        "programs of all users reach the RNIC; it asks the kernel for their user",
    ),
    (
        "/run/verbatim/agent.sock",
        0o666,
        "guest libraries of all users reach the agent",
    ),
    (
        "/run/verbatim/nic.stats",
        0o644,
        "all users may read the RNIC's counters",
    ),
    (
        "/run/verbatim/hosts.json",
        0o644,
        "the operator's, here the lab's",
    ),
    ("/run/verbatim/tls", 0o755, "the operator's, here the lab's"),
    ("/run/verbatim/tls/ca.pem", 0o644, "certificates are public"),
    ("/run/verbatim/tls/cert.pem", 0o644, "certificates are public"),
];

/// Folders of an instance whose content its own programs see, who may be of any user. They lie below folders of root's.
const OF_INSTANCES: &[&str] = &[
    "instances/web",
    "bundles/web/run",
    "bundles/web/dev",
    "bundles/web/rootfs",
];

/// Folders of root's alone in which runc and CRIU write, with the umask that is a container's.
const OF_RUNC_AND_CRIU: &[&str] = &[
    "/run/verbatim/containers",
    "/run/verbatim/criu",
    "/run/verbatim/images",
];

fn files_are_their_daemons(lab: &TestLab) -> anyhow::Result<()> {
    must(lab, "src", &["create", "data", "--size", "64M"])?;
    let options = ["--name", "web", "--volume", "data:/srv", "--"];
    let instance = Instance::run(lab, "src", &options, &["sleep", "1000"])?;
    let program = lab
        .tools()
        .verbatim
        .to_str()
        .context("a path that is not UTF-8")?;
    let open = |host: &str, command: &str| -> anyhow::Result<Running> {
        lab.start_plain(
            host,
            &["sh", "-c", &format!("umask 000; exec {program} {command}")],
        )
    };
    let config = "--config-dir /run/verbatim";
    let _server = open("src", &format!("memory serve --name src --size 64M {config}"))?;
    let socket = lab.path("src", "/run/verbatim/memory.sock")?;
    eventually("a memory server", patience(LIMIT), || {
        Ok(socket.exists().then_some(()))
    })?;
    let disk = format!(
        "swap attach src 16M --backup file --own-name dst {config} --state-dir /run/verbatim-state/swap --foreground"
    );
    let mut attached = open("dst", &disk)?;
    let disks = lab.path("dst", "/run/verbatim/swap")?;
    eventually("a swap disk", patience(LIMIT), || {
        ensure!(!attached.has_ended()?, "it has ended: {}", attached.stderr()?);
        let entries = std::fs::read_dir(&disks).into_iter().flatten().flatten();
        let mut sockets = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_socket()));
        Ok(sockets.next().map(|_| ()))
    })?;
    // What a move writes at both ends.
    instance.moves("dst")?;
    instance.moves("src")?;
    for host in HOSTS {
        let mut found = Vec::new();
        let mut seen = 0;
        for folder in ["/run/verbatim", "/run/verbatim-state"] {
            let there = lab.path(host, folder)?;
            walk(&there, Path::new(folder), &mut |path, mode| {
                seen += 1;
                let known = REACHABLE.iter().find(|(known, _, _)| Path::new(known) == path);
                let is_expected = known.is_some_and(|(_, expected, _)| *expected == mode);
                let lies_in = |folder: &&str| path != Path::new(folder) && path.starts_with(folder);
                if mode & 0o077 != 0 && !is_expected && !OF_RUNC_AND_CRIU.iter().any(lies_in) {
                    found.push(format!("{} has mode {mode:o}", path.display()));
                }
            })?;
        }
        ensure!(seen > 20, "only {seen} files of {host} were looked at");
        ensure!(
            found.is_empty(),
            "other users reach files of {host}:\n{}",
            found.join("\n")
        );
    }
    Ok(())
}

/// Tells of each file below a folder, but for links, the content of instances, and file systems that are mounted there.
fn walk(folder: &Path, shown: &Path, tell: &mut impl FnMut(&Path, u32)) -> anyhow::Result<()> {
    let own = std::fs::symlink_metadata(folder)?;
    tell(shown, own.mode() & 0o777);
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let (path, shown) = (entry.path(), shown.join(entry.file_name()));
        let Ok(metadata) = std::fs::symlink_metadata(&path) else {
            // It has gone meanwhile.
            continue;
        };
        if metadata.is_symlink() || OF_INSTANCES.iter().any(|own| shown.ends_with(own)) {
            continue;
        }
        match metadata.is_dir() && metadata.dev() == own.dev() {
            true => walk(&path, &shown, tell)?,
            false if metadata.dev() == own.dev() => tell(&shown, metadata.mode() & 0o777),
            false => {}
        }
    }
    Ok(())
}

/// What a process has inherited, or was given: lines of `/proc/PID/status`, limits, and the like.
fn attributes(lab: &TestLab, host: &str, pid: i32) -> anyhow::Result<BTreeMap<String, String>> {
    let read = |file: &str| -> anyhow::Result<String> {
        let path = lab.path(host, &format!("/proc/{pid}/{file}"))?;
        std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    };
    const OF_STATUS: [&str; 11] = [
        "Umask",
        "CapInh",
        "CapPrm",
        "CapEff",
        "CapBnd",
        "CapAmb",
        "NoNewPrivs",
        "Seccomp",
        "Seccomp_filters",
        "Groups",
        "SigIgn",
    ];
    let status = read("status")?;
    let mut found: BTreeMap<String, String> = status
        .lines()
        .filter_map(|line| line.split_once(':'))
        .filter(|(key, _)| OF_STATUS.contains(key))
        .map(|(key, value)| (key.to_owned(), value.trim().to_owned()))
        .collect();
    ensure!(
        found.len() >= OF_STATUS.len() - 1,
        "the kernel tells too little: {found:?}"
    );
    for limit in read("limits")?.lines().skip(1) {
        let (name, values) = limit.split_at(limit.len().min(26));
        let values: Vec<_> = values.split_whitespace().take(2).collect();
        found.insert(name.trim().to_owned(), values.join(" "));
    }
    found.insert(
        "oom_score_adj".to_owned(),
        read("oom_score_adj")?.trim().to_owned(),
    );
    // Its nice value (proc_pid_stat(5), field 19), behind the name, which may hold anything.
    let stat = read("stat")?;
    let nice = stat
        .rsplit_once(") ")
        .and_then(|(_, fields)| fields.split(' ').nth(16));
    found.insert("nice".to_owned(), nice.context("a short stat")?.to_owned());
    Ok(found)
}

/// A container that runc starts without us: by the configuration of an instance, in a cgroup of its own.
struct Plain {
    folder: tempfile::TempDir,
    pid: i32,
}

impl Plain {
    fn start(lab: &TestLab, instance: &str) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let config = lab.path("src", &format!("/run/verbatim/bundles/{instance}/config.json"))?;
        let mut spec: Value = serde_json::from_slice(&std::fs::read(config)?)?;
        spec["linux"]["cgroupsPath"] = json!(format!("/verbatim-yardstick-{}", std::process::id()));
        // Programs of the bundle may wait for what only an agent gives.
        spec["process"]["args"] = json!(["sleep", "1000"]);
        std::fs::write(folder.path().join("config.json"), serde_json::to_vec(&spec)?)?;
        let at = folder.path().display();
        let start = format!(
            "umask 000; exec runc --root {at}/state run --detach --pid-file {at}/pid --bundle {at} yardstick"
        );
        lab.start_plain("src", &["sh", "-c", &start])?
            .succeed(patience(LIMIT))?;
        let pid = std::fs::read_to_string(folder.path().join("pid"))?
            .trim()
            .parse()?;
        Ok(Self { folder, pid })
    }

    fn runc(&self, lab: &TestLab, command: &str) -> anyhow::Result<String> {
        let command = format!(
            "umask 000; exec runc --root {}/state {command}",
            self.folder.path().display()
        );
        Ok(lab
            .start_plain("src", &["sh", "-c", &command])?
            .succeed(patience(LIMIT))?
            .stdout)
    }
}

fn containers_inherit_nothing(lab: &TestLab) -> anyhow::Result<()> {
    let instance = lab.instance("src", "web", &["sleep", "1000"])?;
    let plain = Plain::start(lab, "web")?;
    let compared = compare(lab, &instance, &plain);
    plain.runc(lab, "delete --force yardstick")?;
    compared
}

fn compare(lab: &TestLab, instance: &Instance<'_>, plain: &Plain) -> anyhow::Result<()> {
    let expected = attributes(lab, "src", plain.pid)?;
    let of_instance =
        |host: &str| -> anyhow::Result<_> { attributes(lab, host, instance.row()?.pid.context("it runs")?) };
    let started = of_instance("src")?;
    ensure!(
        started == expected,
        "started: {started:#?}\nby runc alone: {expected:#?}"
    );
    // A command that is added to it.
    let by_runc = plain.runc(lab, "exec yardstick sh -c umask")?;
    lab.ask(&["exec", "web", "--", "sh", "-c", "echo umask $(umask)"])?;
    let said = format!("umask {}", by_runc.trim());
    eventually("the umask of a command", patience(LIMIT), || {
        let output = instance.output()?;
        ensure!(
            !output.contains("umask") || output.contains(&said),
            "{output}, by runc alone {by_runc}"
        );
        Ok(output.contains(&said).then_some(()))
    })?;
    for host in ["dst", "src"] {
        instance.moves(host)?;
        let moved = of_instance(host)?;
        ensure!(
            moved == expected,
            "moved: {moved:#?}\nby runc alone: {expected:#?}"
        );
    }
    Ok(())
}

fn daemons_keep_what_they_need(lab: &TestLab) -> anyhow::Result<()> {
    let of = |service: &str| -> anyhow::Result<_> {
        let pid = lab.service_pid("src", service)?;
        attributes(lab, "src", pid.cast_signed())
    };
    let (nic, agent, volumes) = (of("nic")?, of("agent")?, of("volumes")?);
    for daemon in [&nic, &agent, &volumes] {
        ensure!(daemon["Umask"] == "0077", "{daemon:#?}");
    }
    for daemon in [&nic, &volumes] {
        ensure!(
            (&*daemon["NoNewPrivs"], &*daemon["Seccomp"]) == ("1", "2"),
            "{daemon:#?}"
        );
    }
    // What it starts, runc and CRIU, needs what root has.
    ensure!(
        (&*agent["NoNewPrivs"], &*agent["Seccomp"]) == ("0", "0"),
        "{agent:#?}"
    );
    // The RNIC's root has processes in it, and nothing of the host's.
    let pid = lab.service_pid("src", "nic")?;
    let root: PathBuf = lab.path("src", &format!("/proc/{pid}/root"))?;
    ensure!(
        root.join("self").is_symlink() && !root.join("etc").exists(),
        "{}",
        root.display()
    );
    Ok(())
}
