//! Test tools of other projects for file systems, as far as they are installed. Each compares its reads with
//! its writes.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::support::find;

/// Result of a tool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    Well,
    NotInstalled,
}

type Tool = fn(&Path, u64) -> Option<Command>;

/// All tools. A tool without a command is not installed.
pub const TOOLS: &[(&str, Tool)] = &[
    ("fsx", fsx),
    ("fio-direct", |folder, seed| {
        fio(folder, seed, &["--ioengine=libaio", "--direct=1", "--iodepth=8"])
    }),
    ("fio-mapped", |folder, seed| {
        fio(folder, seed, &["--ioengine=mmap"])
    }),
    ("fio-buffered", |folder, seed| {
        fio(folder, seed, &["--ioengine=psync", "--fsync=32"])
    }),
    ("stress-hdd", |folder, _| {
        stress(folder, &["--hdd", "1", "--hdd-bytes", "16M"])
    }),
    ("stress-fallocate", |folder, _| {
        stress(folder, &["--fallocate", "1", "--fallocate-bytes", "16M"])
    }),
    ("stress-fpunch", |folder, _| stress(folder, &["--fpunch", "1"])),
    ("stress-iomix", |folder, _| {
        stress(folder, &["--iomix", "1", "--iomix-bytes", "16M"])
    }),
    ("stress-aiol", |folder, _| stress(folder, &["--aiol", "1"])),
    ("stress-dentry", |folder, _| {
        stress(folder, &["--dentry", "1", "--dentries", "500"])
    }),
    ("stress-dir", |folder, _| {
        stress(folder, &["--dir", "1", "--rename", "1", "--link", "1"])
    }),
    ("stress-seek", |folder, _| {
        stress(folder, &["--seek", "1", "--seek-size", "16M"])
    }),
    ("stress-sync-file", |folder, _| {
        stress(folder, &["--sync-file", "1", "--sync-file-bytes", "16M"])
    }),
    ("stress-xattr", |folder, _| stress(folder, &["--xattr", "1"])),
    ("dbench", dbench),
    ("fstrim", |folder, _| {
        Some(command("fstrim", &["-v"], Some(folder)))
    }),
    ("freeze", freeze),
];

fn command(program: &str, arguments: &[&str], last: Option<&Path>) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).args(last);
    command
}

fn fsx(folder: &Path, seed: u64) -> Option<Command> {
    // `./setup.sh --filesystem` installs it there.
    let own = std::env::var_os("VERBATIM_FSX").map(PathBuf::from);
    let program = own.or_else(|| find("fsx"))?;
    let mut command = Command::new(program);
    command
        .args(["-N", "3000", "-S", &seed.to_string()])
        .arg(folder.join("fsx"));
    Some(command)
}

fn fio(folder: &Path, seed: u64, arguments: &[&str]) -> Option<Command> {
    let mut command = command(
        "fio",
        &["--name=verified", "--rw=randwrite", "--bs=4k-64k", "--size=16M"],
        None,
    );
    // It leaves its state where it was started.
    command.current_dir(std::env::temp_dir());
    let seed = format!("--randseed={seed}");
    let folder = format!("--directory={}", folder.display());
    command.args([
        "--verify=crc32c",
        "--verify_fatal=1",
        "--do_verify=1",
        "--unlink=1",
    ]);
    command.args([seed, folder]).args(arguments);
    find("fio").map(|_| command)
}

fn stress(folder: &Path, arguments: &[&str]) -> Option<Command> {
    let mut command = command(
        "stress-ng",
        &["--verify", "--timeout", "4", "--oom-avoid", "--temp-path"],
        Some(folder),
    );
    command.args(arguments);
    find("stress-ng").map(|_| command)
}

fn dbench(folder: &Path, _: u64) -> Option<Command> {
    let load = "/usr/share/dbench/client.txt";
    let mut command = command("dbench", &["-t", "4", "-c", load, "-D"], Some(folder));
    command.arg("2");
    find("dbench")
        .filter(|_| Path::new(load).exists())
        .map(|_| command)
}

/// Freezes the file system for a moment, as for a snapshot.
fn freeze(folder: &Path, _: u64) -> Option<Command> {
    let mut command = Command::new("sh");
    command
        .args(["-c", "fsfreeze -f \"$0\" && sleep 0.3; fsfreeze -u \"$0\""])
        .arg(folder.parent()?);
    Some(command)
}

/// Runs a tool in a folder of its own; it must succeed.
pub fn run(tool: usize, folder: &Path, seed: u64) -> Ended {
    let (name, tool) = TOOLS[tool];
    let Some(mut command) = tool(folder, seed) else {
        return Ended::NotInstalled;
    };
    let output = command.stdin(Stdio::null()).output().expect("it runs");
    let (said, errors) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(
        output.status.success(),
        "{name}: {command:?}: {}\n{said}\n{errors}",
        output.status
    );
    Ended::Well
}
