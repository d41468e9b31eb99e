//! What containers have beside their programs: namespaces, added commands, users, terminals, mounts.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use verbatim_e2e::{Instance, PYTHON, Release, TestLab, eventually};

use crate::Test;

const HOSTS: &[&str] = &["src", "dst"];
const LIMIT: Duration = Duration::from_secs(60);
/// How far the clocks of a host are ahead whose machine has been up for longer.
const AHEAD: u64 = 1_000_000;

/// All of them.
pub fn tests() -> Vec<Test> {
    vec![
        Test::new(
            "containers::a_user_namespace_is_refused",
            HOSTS,
            a_user_namespace_is_refused,
        ),
        Test {
            releases: vec![("dst", Release::This)],
            ..Test::new(
                "containers::what_is_added_has_the_clocks",
                HOSTS,
                what_is_added_has_the_clocks,
            )
        },
        Test::new("containers::a_shell_in_a_mount", HOSTS, a_shell_in_a_mount),
        Test::new("containers::addresses_of_many", HOSTS, addresses_of_many),
        Test::new(
            "containers::addresses_that_ended_elsewhere",
            HOSTS,
            addresses_that_ended_elsewhere,
        ),
        Test::new("containers::an_image_with_a_user", HOSTS, an_image_with_a_user),
        Test::new("containers::a_process_of_a_user", HOSTS, a_process_of_a_user),
        Test::new(
            "containers::terminals_of_a_command",
            HOSTS,
            terminals_of_a_command,
        ),
        Test::new("containers::terminals_of_a_bundle", HOSTS, terminals_of_a_bundle),
        Test::new("containers::mount_namespaces", HOSTS, mount_namespaces),
        Test::new("containers::mounts_below", HOSTS, mounts_below),
        Test::new(
            "containers::a_folder_that_is_missing_there",
            HOSTS,
            a_folder_that_is_missing_there,
        ),
    ]
}

/// Makes a bundle as `runc spec` writes it, over this machine's `/usr`, which is bound to an image that is empty but for its
/// links.
fn bundle(folder: &Path, args: &[&str], change: impl FnOnce(&mut Value)) -> anyhow::Result<()> {
    let root = folder.join("rootfs");
    for mount_point in [
        "usr",
        "etc",
        "proc",
        "sys",
        "dev",
        "tmp",
        "var/tmp",
        "run/verbatim",
        "home",
    ] {
        std::fs::create_dir_all(root.join(mount_point))?;
    }
    for link in ["bin", "sbin", "lib", "lib64"] {
        std::os::unix::fs::symlink(format!("usr/{link}"), root.join(link))?;
    }
    for writable in ["tmp", "var/tmp"] {
        std::fs::set_permissions(
            root.join(writable),
            std::os::unix::fs::PermissionsExt::from_mode(0o1777),
        )?;
    }
    let status = Command::new("runc")
        .args(["spec", "--bundle"])
        .arg(folder)
        .status()?;
    ensure!(status.success(), "runc spec failed");
    let config = folder.join("config.json");
    let mut spec: Value = serde_json::from_slice(&std::fs::read(&config)?)?;
    spec["process"]["terminal"] = json!(false);
    spec["process"]["args"] = json!(args);
    spec["root"]["readonly"] = json!(false);
    add_mount(
        &mut spec,
        json!({"destination": "/usr", "type": "bind", "source": "/usr", "options": ["bind", "ro"]}),
    );
    change(&mut spec);
    std::fs::write(&config, serde_json::to_vec_pretty(&spec)?)?;
    Ok(())
}

fn add_mount(spec: &mut Value, mount: Value) {
    spec["mounts"]
        .as_array_mut()
        .expect("`runc spec` writes some")
        .push(mount);
}

/// Waits until the instance has said a line that begins with `word`, with a number of at least `least` behind it.
fn counts_to(instance: &Instance<'_>, word: &str, least: u64) -> anyhow::Result<u64> {
    eventually(&format!("{word} {least} of {}", instance.name()), LIMIT, || {
        let output = instance.output()?;
        ensure!(!output.contains("Traceback"), "{output}");
        let mut numbers = output.lines().filter_map(|line| {
            let number = line.strip_prefix(word)?.trim().split(' ').next()?;
            number.parse::<u64>().ok()
        });
        Ok(numbers.next_back().filter(|number| *number >= least))
    })
    .with_context(|| instance.output().unwrap_or_default())
}

/// Whether nothing stands in the way of moving it.
fn may_move(lab: &TestLab, name: &str, to: &str) -> anyhow::Result<()> {
    let said = lab.verbatim(&["check", name, "--to", to])?.wait(LIMIT)?;
    ensure!(said.code == 0, "{}", said.output());
    Ok(())
}

/// A change of a bundle's configuration.
type Change<'a> = dyn Fn(&mut Value) + 'a;

/// Root of such a container was root of the host.
fn a_user_namespace_is_refused(lab: &TestLab) -> anyhow::Result<()> {
    let ids = json!([{"containerID": 0, "hostID": 100_000, "size": 65_536}]);
    let mapped = |spec: &mut Value| {
        spec["linux"]["uidMappings"] = ids.clone();
        spec["linux"]["gidMappings"] = ids.clone();
    };
    let namespace = |spec: &mut Value| {
        let namespaces = spec["linux"]["namespaces"]
            .as_array_mut()
            .expect("`runc spec` writes some");
        namespaces.push(json!({"type": "user"}));
    };
    let offsets =
        |spec: &mut Value| spec["linux"]["timeOffsets"] = json!({"boottime": {"secs": 5, "nanosecs": 0}});
    let cases: [(&Change<'_>, &str); 3] = [
        (&mapped, "linux.uidMappings"),
        (&namespace, "type user"),
        (&offsets, "linux.timeOffsets"),
    ];
    for (change, named) in cases {
        let folder = tempfile::tempdir()?;
        bundle(folder.path(), &["sleep", "1000"], change)?;
        let path = folder.path().to_str().context("UTF-8")?;
        let said = lab.refused(&["run", "--host", "src", "--name", "mapped", "--bundle", path])?;
        ensure!(said.contains(named), "{named}: {said}");
    }
    let rows = lab.ask(&["ps", "--json"])?;
    ensure!(rows.stdout.trim() == "[]", "{}", rows.stdout);
    Ok(())
}

/// Says every 50 ms what its clocks and its first process's time namespace are.
const CLOCKS: &str = r#"
import os, sys, time
for n in range(100000):
    uptime = open('/proc/uptime').read().split()[0]
    same = os.readlink('/proc/self/ns/time') == os.readlink('/proc/1/ns/time')
    print(sys.argv[1], n, f'{time.monotonic():.2f} {time.clock_gettime(time.CLOCK_BOOTTIME):.2f} {uptime} {same}', flush=True)
    time.sleep(0.05)
"#;

/// The clocks in the last line of one that runs [`CLOCKS`]: monotonic, since the boot, and the uptime.
fn clocks(instance: &Instance<'_>, who: &str, least: u64) -> anyhow::Result<[f64; 3]> {
    counts_to(instance, who, least)?;
    let output = instance.output()?;
    let line = output
        .lines()
        .rfind(|line| line.starts_with(who))
        .context("it said one")?;
    let words: Vec<_> = line.split(' ').skip(2).collect();
    ensure!(
        words.len() == 4 && words[3] == "True",
        "another time namespace: {line}"
    );
    let clock = |index: usize| words[index].parse::<f64>().with_context(|| line.to_owned());
    Ok([clock(0)?, clock(1)?, clock(2)?])
}

/// The clocks of what is added to an instance are the instance's, and not its host's; and it moves along.
fn what_is_added_has_the_clocks(lab: &TestLab) -> anyhow::Result<()> {
    lab.put_clocks_ahead("dst", AHEAD)?;
    let host = |host: &str| -> anyhow::Result<f64> {
        let read = lab.start_plain(host, &["cat", "/proc/uptime"])?.succeed(LIMIT)?;
        let first = read.stdout.split(' ').next().context("it is never empty")?;
        Ok(first.parse()?)
    };
    let instance = lab.instance("src", "clocks", &[PYTHON, "-u", "-c", CLOCKS, "first"])?;
    let add = |who: &str| lab.ask(&["exec", "clocks", "--", PYTHON, "-u", "-c", CLOCKS, who]);
    let agree = |who: &[&str]| -> anyhow::Result<()> {
        let [first, ..] = clocks(&instance, "first", 1)?;
        for who in who {
            let theirs = clocks(&instance, who, 1)?;
            // A reader's lines are some 100 ms apart, and it may wait for a processor.
            ensure!(
                theirs.iter().all(|clock| (clock - first).abs() < 20.0),
                "{who}: {theirs:?}, first: {first}"
            );
            ensure!(
                (theirs[0] - host("src")?).abs() < 60.0,
                "those of the first host: {theirs:?}"
            );
        }
        Ok(())
    };
    add("before")?;
    agree(&["before"])?;
    instance.moves("dst")?;
    add("there")?;
    agree(&["before", "there"])?;
    may_move(lab, "clocks", "src")?;
    instance.moves("src")?;
    add("back")?;
    let said = |who: &str| counts_to(&instance, who, 0);
    let (before, there) = (said("before")?, said("there")?);
    agree(&["before", "there", "back"])?;
    instance.moves("dst")?;
    counts_to(&instance, "before", before + 20)?;
    counts_to(&instance, "there", there + 20)?;
    agree(&["before", "there", "back"])?;
    lab.ask(&["stop", "clocks"])?;
    Ok(())
}

/// The shell that opens streams lies in a mount of the bundle's, behind a link of its root file system.
fn a_shell_in_a_mount(lab: &TestLab) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    bundle(folder.path(), &["sh", "-c", "echo first 1; sleep 1000"], |_| ())?;
    let instance = lab.bundle("src", "image", folder.path())?;
    counts_to(&instance, "first", 1)?;
    lab.ask(&["exec", "image", "--", "sh", "-c", "echo added 1; sleep 1000"])?;
    counts_to(&instance, "added", 1)?;
    may_move(lab, "image", "dst")?;
    instance.moves("dst")?;
    lab.ask(&["exec", "image", "--", "sh", "-c", "echo added 2; sleep 1000"])?;
    counts_to(&instance, "added", 2)?;
    instance.moves("src")?;
    lab.ask(&["stop", "image"])?;
    Ok(())
}

/// Instances that are started at once, arrive, and have left, have an address each.
fn addresses_of_many(lab: &TestLab) -> anyhow::Result<()> {
    let away = lab.instance("src", "away", &["sleep", "1000"])?;
    let address = away.address()?;
    away.moves("dst")?;
    let at_once = |names: &[String]| -> anyhow::Result<Vec<String>> {
        let started: Vec<_> = names
            .iter()
            .map(|name| lab.verbatim(&["run", "--host", "src", "--name", name, "--", "sleep", "1000"]))
            .collect::<Result<_, _>>()?;
        for run in started {
            run.succeed(LIMIT)?;
        }
        names.iter().map(|name| lab.known(name).address()).collect()
    };
    let names = |prefix: &str| (0..4).map(|n| format!("{prefix}{n}")).collect::<Vec<_>>();
    let mut all = at_once(&names("a"))?;
    // One that comes back while others are started.
    let back = lab.verbatim(&["migrate", "away", "--to", "src"])?;
    all.extend(at_once(&names("b"))?);
    back.succeed(LIMIT)?;
    ensure!(away.address()? == address);
    away.moves("dst")?;
    // An agent that comes after the one that gave the address knows of it, too.
    lab.restart("src", "agent")?;
    eventually("the agent of src", LIMIT, || {
        Ok((away.row().is_ok() && lab.known("a0").row().is_ok()).then_some(()))
    })?;
    all.extend(at_once(&names("c"))?);
    all.push(address);
    let different: std::collections::BTreeSet<_> = all.iter().collect();
    ensure!(different.len() == all.len(), "{all:?}");
    away.moves("src")?;
    Ok(())
}

/// When no address is free, those are that left with instances which no host has any more.
fn addresses_that_ended_elsewhere(lab: &TestLab) -> anyhow::Result<()> {
    let lives = lab.instance("src", "lives", &["sleep", "1000"])?;
    let address = lives.address()?;
    let (subnet, _) = address.rsplit_once('.').context("an IPv4 address")?;
    lives.moves("dst")?;
    // As if all of them had left, and all but one had ended there.
    let mut left: serde_json::Map<_, _> = (1..=254)
        .map(|last| (format!("{subnet}.{last}"), json!(format!("gone-{last}"))))
        .collect();
    left.insert(address.clone(), json!("lives"));
    std::fs::write(
        lab.path("src", "/run/verbatim-state/away")?,
        Value::Object(left).to_string(),
    )?;
    lab.restart("src", "agent")?;
    eventually("the agent of src", LIMIT, || {
        Ok(lives.row().is_ok().then_some(()))
    })?;
    let run = |name: &str| lab.verbatim(&["run", "--host", "src", "--name", name, "--", "sleep", "1000"]);
    // One that says nothing may have any of them.
    lab.lab().kill("dst", "agent")?;
    let refused = run("early")?.wait(LIMIT)?;
    ensure!(
        refused.code == 1 && refused.stderr.contains("dst"),
        "{}",
        refused.output()
    );
    lab.lab().start("dst", "agent")?;
    eventually("a free address", LIMIT, || {
        Ok((run("next")?.wait(LIMIT)?.code == 0).then_some(()))
    })?;
    let next = lab.known("next").address()?;
    ensure!(
        next != address && next.starts_with(subnet),
        "{next}, where {address} is another's"
    );
    Ok(())
}

/// Prints numbers for ever, and whose it is.
const COUNTS: &str = r#"
import os, time
for n in range(100000):
    print('counts', n, os.getuid(), os.getgid(), flush=True)
    open('/tmp/own', 'w').write(str(n))
    time.sleep(0.05)
"#;

/// Counts before and after two moves.
fn moves_there_and_back(lab: &TestLab, instance: &Instance<'_>) -> anyhow::Result<()> {
    let mut number = counts_to(instance, "counts", 1)?;
    for to in ["dst", "src"] {
        may_move(lab, instance.name(), to)?;
        instance.moves(to)?;
        number = counts_to(instance, "counts", number + 10)?;
    }
    Ok(())
}

fn an_image_with_a_user(lab: &TestLab) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    std::fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    bundle(folder.path(), &[PYTHON, "-u", "-c", COUNTS], |spec| {
        spec["process"]["user"] = json!({"uid": 1000, "gid": 1000});
    })?;
    let instance = lab.bundle("src", "image", folder.path())?;
    moves_there_and_back(lab, &instance)?;
    let output = instance.output()?;
    ensure!(output.lines().all(|line| line.ends_with("1000 1000")), "{output}");
    // It may open its output by the name, as programs do that are told to log to a file.
    lab.ask(&["exec", "image", "--", "sh", "-c", "echo named 1 > /dev/stdout"])?;
    counts_to(&instance, "named", 1)?;
    lab.ask(&["stop", "image"])?;
    Ok(())
}

/// One that a program of root's has become.
fn a_process_of_a_user(lab: &TestLab) -> anyhow::Result<()> {
    let becomes = [
        "setpriv",
        "--reuid",
        "1000",
        "--regid",
        "1000",
        "--clear-groups",
        PYTHON,
        "-u",
        "-c",
        COUNTS,
    ];
    let instance = lab.instance("src", "becomes", &becomes)?;
    moves_there_and_back(lab, &instance)?;
    lab.ask(&["stop", "becomes"])?;
    Ok(())
}

/// A program behind a terminal gives back each line that it is given.
const TERMINAL: &str = r#"
import os, pty, time, tty
main, other = pty.openpty()
tty.setraw(other)
print('name', os.ttyname(other), flush=True)
if os.fork() == 0:
    os.setsid()
    import fcntl, termios
    fcntl.ioctl(other, termios.TIOCSCTTY, 0)
    os.close(main)
    open('/dev/tty', 'rb').close()
    for line in os.fdopen(os.dup(other), 'rb', buffering=0):
        os.write(other, line)
os.close(other)
for n in range(100000):
    os.write(main, f'{n}\n'.encode())
    line = b''
    while not line.endswith(b'\n'):
        line += os.read(main, 100)
    assert line == f'{n}\n'.encode(), line
    print('counts', n, flush=True)
    time.sleep(0.05)
"#;

fn terminals_of_a_command(lab: &TestLab) -> anyhow::Result<()> {
    let instance = lab.instance("src", "terminal", &[PYTHON, "-u", "-c", TERMINAL])?;
    moves_there_and_back(lab, &instance)?;
    let output = instance.output()?;
    ensure!(output.contains("name /dev/pts/0"), "{output}");
    let counts = "i=0; while :; do i=$((i+1)); echo counts $i; sleep 0.05; done";
    let script = ["script", "-q", "-c", counts, "/dev/null"];
    let script = lab.instance("src", "script", &script)?;
    moves_there_and_back(lab, &script)?;
    if Path::new("/usr/bin/tmux").exists() {
        let session = format!("{counts} >> /tmp/said");
        let starts = format!("tmux new -d '{session}' && exec tail -F /tmp/said");
        let options = ["--name", "tmux", "-e", "TERM=xterm", "--"];
        let tmux = Instance::run(lab, "src", &options, &["sh", "-c", &starts])?;
        moves_there_and_back(lab, &tmux)?;
        lab.ask(&["stop", "tmux"])?;
    }
    // CRIU does not find the terminal of one that has it open by this name.
    let holds = "script -q -c 'exec 3</dev/tty; echo counts 1; sleep 1000' /dev/null";
    let holds = lab.instance("src", "holds", &["sh", "-c", holds])?;
    counts_to(&holds, "counts", 1)?;
    let said = lab.verbatim(&["check", "holds", "--to", "dst"])?.wait(LIMIT)?;
    ensure!(
        said.code == 1 && said.stdout.contains("/dev/tty"),
        "{}",
        said.output()
    );
    for name in ["terminal", "script", "holds"] {
        lab.ask(&["stop", name])?;
    }
    Ok(())
}

fn terminals_of_a_bundle(lab: &TestLab) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    bundle(folder.path(), &[PYTHON, "-u", "-c", TERMINAL], |_| ())?;
    let instance = lab.bundle("src", "image", folder.path())?;
    moves_there_and_back(lab, &instance)?;
    lab.ask(&["stop", "image"])?;
    Ok(())
}

/// A process that has a mount namespace of its own.
fn mount_namespaces(lab: &TestLab) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let nested = format!("sleep 1000 & unshare -m {PYTHON} -u -c \"$0\"");
    bundle(folder.path(), &["sh", "-c", &nested, COUNTS], |spec| {
        for set in ["bounding", "effective", "permitted"] {
            let set = spec["process"]["capabilities"][set].as_array_mut();
            set.expect("`runc spec` writes it").push(json!("CAP_SYS_ADMIN"));
        }
    })?;
    let instance = lab.bundle("src", "image", folder.path())?;
    moves_there_and_back(lab, &instance)?;
    lab.ask(&["stop", "image"])?;
    Ok(())
}

/// `rbind` of a folder with mounts below it, and a root file system with one.
fn mounts_below(lab: &TestLab) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let at = |path: &str| folder.path().join(path);
    let reads = r#"
import time
for n in range(100000):
    assert open('/data/below/own/file').read() == 'of the mount', 'the mount is not there'
    assert open('/opt/file').read() == 'of the root', 'the mount is not there'
    print('counts', n, flush=True)
    time.sleep(0.05)
"#;
    bundle(folder.path(), &[PYTHON, "-u", "-c", reads], |spec| {
        add_mount(
            spec,
            json!({"destination": "/data", "source": "data", "options": ["rbind", "rw"]}),
        );
    })?;
    let mounted: [(PathBuf, &str); 2] = [
        (at("data/below/own"), "of the mount"),
        (at("rootfs/opt"), "of the root"),
    ];
    std::fs::create_dir_all(at("rootfs/data"))?;
    for (path, text) in &mounted {
        std::fs::create_dir_all(path)?;
        for host in HOSTS {
            let path = path.display();
            let mount = format!("mount -t tmpfs own {path} && printf '%s' '{text}' > {path}/file");
            lab.start_plain(host, &["sh", "-c", &mount])?.succeed(LIMIT)?;
        }
    }
    let instance = lab.bundle("src", "image", folder.path())?;
    moves_there_and_back(lab, &instance)?;
    lab.ask(&["stop", "image"])?;
    Ok(())
}

/// A host that lacks what a bundle binds says so before anything is touched.
fn a_folder_that_is_missing_there(lab: &TestLab) -> anyhow::Result<()> {
    // Each host has a /run of its own.
    lab.start_plain("src", &["mkdir", "/run/only-here"])?
        .succeed(LIMIT)?;
    let folder = tempfile::tempdir()?;
    bundle(folder.path(), &[PYTHON, "-u", "-c", COUNTS], |spec| {
        add_mount(
            spec,
            json!({"destination": "/home", "source": "/run/only-here", "options": ["rbind"]}),
        );
    })?;
    let instance = lab.bundle("src", "image", folder.path())?;
    let number = counts_to(&instance, "counts", 1)?;
    let said = lab.verbatim(&["check", "image", "--to", "dst"])?.wait(LIMIT)?;
    ensure!(
        said.code == 1 && said.stdout.contains("/run/only-here is not there"),
        "{}",
        said.output()
    );
    ensure!(
        instance.migrate("dst")?.must_be_committed().is_err(),
        "it has moved without the folder"
    );
    counts_to(&instance, "counts", number + 1)?;
    lab.start_plain("dst", &["mkdir", "/run/only-here"])?
        .succeed(LIMIT)?;
    moves_there_and_back(lab, &instance)?;
    lab.ask(&["stop", "image"])?;
    Ok(())
}
