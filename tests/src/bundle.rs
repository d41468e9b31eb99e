//! An OCI bundle of one program of this machine, as somebody else's image would be.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use serde_json::{Value, json};

use crate::tools::find_program;

/// Makes a bundle in `folder` whose root file system has `argv`'s program, a shell, and the libraries that these and
/// `library` need, and nothing else.
pub fn bundle_of(folder: &Path, argv: &[&str], library: &Path) -> anyhow::Result<()> {
    let program = argv.first().context("there is no command to run")?;
    let program = if Path::new(program).is_absolute() {
        PathBuf::from(program)
    } else {
        find_program(program)?
    };
    let root = folder.join("rootfs");
    let mut files = BTreeSet::from([find_program("sh")?]);
    for file in [&program, &find_program("sh")?, &library.to_owned()] {
        files.extend(needed(file)?);
    }
    for file in &files {
        let target = root.join(file.strip_prefix("/")?);
        std::fs::create_dir_all(target.parent().context("a file without a folder")?)?;
        std::fs::copy(file, &target).with_context(|| format!("cannot copy {}", file.display()))?;
    }
    // Not where it was built, which may be a folder that an instance has of its own, such as /tmp.
    let inside = Path::new("/usr/bin").join(program.file_name().context("the program is a folder")?);
    let target = root.join(inside.strip_prefix("/")?);
    std::fs::create_dir_all(target.parent().context("a file without a folder")?)?;
    std::fs::copy(&program, &target).with_context(|| format!("cannot copy {}", program.display()))?;
    let shell = root.join("bin/sh");
    if !shell.exists() {
        std::fs::create_dir_all(root.join("bin"))?;
        std::os::unix::fs::symlink(find_program("sh")?, &shell)?;
    }
    for mount_point in ["proc", "sys", "dev", "tmp", "run/verbatim", "dev/shm"] {
        std::fs::create_dir_all(root.join(mount_point))?;
    }

    let status = Command::new(find_program("runc")?)
        .args(["spec", "--bundle"])
        .arg(folder)
        .status()?;
    if !status.success() {
        bail!("runc spec failed");
    }
    let config = folder.join("config.json");
    let mut spec: Value = serde_json::from_slice(&std::fs::read(&config)?)?;
    let arguments = argv[1..].iter().copied();
    spec["process"]["args"] = json!(
        [inside]
            .into_iter()
            .chain(arguments.map(PathBuf::from))
            .collect::<Vec<_>>()
    );
    // What moves has no terminal.
    spec["process"]["terminal"] = json!(false);
    std::fs::write(&config, serde_json::to_vec_pretty(&spec)?)?;
    Ok(())
}

/// The shared libraries that a file needs, and the loader: ldd(1).
fn needed(file: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let output = Command::new("ldd").arg(file).output().context("cannot run ldd")?;
    let text = String::from_utf8(output.stdout)?;
    Ok(parse_ldd(&text))
}

fn parse_ldd(text: &str) -> Vec<PathBuf> {
    let words = text
        .lines()
        .filter_map(|line| line.split_ascii_whitespace().find(|word| word.starts_with('/')));
    words.map(PathBuf::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_and_the_loader_are_read_from_ldd() {
        let text = "\
\tlinux-vdso.so.1 (0x00007ffe7a9f2000)
\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f5c0a000000)
\t/lib64/ld-linux-x86-64.so.2 (0x00007f5c0a2b5000)
";
        let expected = ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"];
        assert_eq!(parse_ldd(text), expected.map(PathBuf::from));
    }
}
