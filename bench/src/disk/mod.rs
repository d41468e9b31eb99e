//! Volumes: what their servers cost beside QEMU's, by NBD and by vhost-user-blk, and what a tenant notices of a copy beside the mirror of
//! `qemu-storage-daemon`: by requests of fio's, and by RocksDB on a volume that is mounted.
//!
//! All on this machine, with files of the same file system, by turns. Ours copies by TLS, or by RDMA through the software RNIC; the mirror in the clear.

mod copying;
pub mod fio;
mod idle;
mod many;
pub mod rocksdb;
pub mod servers;
mod vhost_user;

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};
use serde::Serialize;
use tempfile::TempDir;
use verbatim_e2e::Tools;

use crate::context::Context;
use crate::migrrdma::write;
use copying::Bench;
use servers::{Mirror, Ours};

/// Of each image: enough that a copy lasts longer than a run of the tenant.
const SIZE: u64 = 2 << 30;

/// Packages of setup.sh's.
const PROGRAMS: [&str; 4] = ["fio", "nbdkit", "qemu-nbd", "qemu-storage-daemon"];

#[derive(Debug, Serialize)]
struct Report {
    context: Context,
    bytes: u64,
    idle: Vec<idle::Row>,
    vhost_user: Vec<idle::Row>,
    copying: Vec<copying::Row>,
    ends: copying::Ends,
    rocksdb: rocksdb::Part,
}

#[derive(Debug, Serialize)]
struct Copies {
    context: Context,
    bytes: u64,
    copying: Vec<copying::Row>,
    ends: copying::Ends,
}

#[derive(Debug, Serialize)]
struct Idle {
    context: Context,
    bytes: u64,
    idle: Vec<idle::Row>,
    vhost_user: Vec<idle::Row>,
}

#[derive(Debug, Serialize)]
struct Many {
    context: Context,
    many: Vec<many::Row>,
}

/// Measures, prints and writes.
pub fn run(tools: &Tools, rounds: u32, out: &Path) -> anyhow::Result<()> {
    check()?;
    rocksdb::check()?;
    let context = Context::now();
    let folder = folder_beside(out)?;
    let folder = folder.path();
    let images = images(folder)?;
    let ours = Ours::start(&tools.verbatim, folder)?;
    let idle = idle::run(&ours, folder, &images, SIZE, rounds)?;
    let vhost_user = vhost_user::run(&ours, folder, &images, SIZE, rounds)?;
    let (copying, ends) = copying(&ours, folder, &images, rounds)?;
    for image in &images {
        std::fs::remove_file(image)?;
    }
    let rocksdb = rocksdb::run(&ours, folder, rounds)?;
    let report = Report {
        context,
        bytes: SIZE,
        idle,
        vhost_user,
        copying,
        ends,
        rocksdb,
    };
    write(&report, out)
}

/// Of that the part where nothing moves.
pub fn idle(tools: &Tools, rounds: u32, out: &Path) -> anyhow::Result<()> {
    check()?;
    let context = Context::now();
    let folder = folder_beside(out)?;
    let folder = folder.path();
    let images = images(folder)?;
    let ours = Ours::start(&tools.verbatim, folder)?;
    let report = Idle {
        context,
        bytes: SIZE,
        idle: idle::run(&ours, folder, &images, SIZE, rounds)?,
        vhost_user: vhost_user::run(&ours, folder, &images, SIZE, rounds)?,
    };
    write(&report, out)
}

/// Many volumes in one daemon beside a daemon for each.
pub fn many(tools: &Tools, rounds: u32, out: &Path) -> anyhow::Result<()> {
    check()?;
    let context = Context::now();
    let folder = folder_beside(out)?;
    let many = many::run(&tools.verbatim, folder.path(), rounds)?;
    write(&Many { context, many }, out)
}

/// Of that the part with a tenant beside copies.
pub fn copies(tools: &Tools, rounds: u32, out: &Path) -> anyhow::Result<()> {
    check()?;
    let context = Context::now();
    let folder = folder_beside(out)?;
    let images = images(folder.path())?;
    let ours = Ours::start(&tools.verbatim, folder.path())?;
    let (copying, ends) = copying(&ours, folder.path(), &images, rounds)?;
    let report = Copies {
        context,
        bytes: SIZE,
        copying,
        ends,
    };
    write(&report, out)
}

fn check() -> anyhow::Result<()> {
    for program in PROGRAMS {
        let version = Command::new(program).arg("--version").output();
        version.with_context(|| format!("{program} is missing: run ./setup.sh"))?;
    }
    Ok(())
}

/// Ours, and the other server's.
fn images(folder: &Path) -> anyhow::Result<[PathBuf; 2]> {
    let images = ["a.img", "b.img"].map(|name| folder.join(name));
    for image in &images {
        fill(image, SIZE)?;
    }
    Ok(images)
}

fn copying(
    ours: &Ours,
    folder: &Path,
    images: &[PathBuf; 2],
    rounds: u32,
) -> anyhow::Result<(Vec<copying::Row>, copying::Ends)> {
    // Its mirror's address is that of the next one, so it ends here.
    let mut bench = Bench {
        ours,
        mirror: Mirror::start(folder, &images[1], SIZE)?,
        image: &images[0],
        size: SIZE,
        rounds,
    };
    bench.run()
}

/// A folder for images, beside the report: one for temporary files may be memory.
fn folder_beside(out: &Path) -> anyhow::Result<TempDir> {
    let folder = out.parent().context("the report is in a folder")?;
    Ok(tempfile::tempdir_in(folder.canonicalize()?)?)
}

/// Nothing of it is zero, or a hole.
fn fill(image: &Path, size: u64) -> anyhow::Result<()> {
    let mut file = File::create(image)?;
    let block: Vec<u8> = (0..1u32 << 20)
        .map(|index| (index.wrapping_mul(2_654_435_761) >> 24) as u8 | 1)
        .collect();
    for _ in 0..size >> 20 {
        file.write_all(&block)?;
    }
    Ok(file.sync_all()?)
}

/// What a command writes that ends well.
pub fn ended(command: &mut Command) -> anyhow::Result<String> {
    let output = command
        .output()
        .with_context(|| format!("cannot run {}", command.get_program().display()))?;
    if !output.status.success() {
        bail!("{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(String::from_utf8(output.stdout)?)
}
