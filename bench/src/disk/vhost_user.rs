//! What a request costs by vhost-user-blk where nothing moves, beside `qemu-storage-daemon` on a file of the same file system.

mod front;

use std::path::{Path, PathBuf};
use std::process::Command;

use super::fio::Load;
use super::idle::{self, Row, Sides};
use super::servers::{Ours, Server, until_there};
use front::Front;

/// Measures and prints. Both have an image with the same content.
pub fn run(
    ours: &Ours,
    folder: &Path,
    images: &[PathBuf; 2],
    size: u64,
    rounds: u32,
) -> anyhow::Result<Vec<Row>> {
    let near = ours.vhost_user("idle", size, &images[0])?;
    let (qemu, far) = storage_daemon(folder, &images[1])?;
    let measured = |server: &Server, socket: &Path, load: Load| {
        let mut front = Front::connect(socket, size, load.depth)?;
        let before = server.processor_time()?;
        let run = front.run(load)?;
        Ok((run, server.processor_time()? - before))
    };
    let rows = idle::compare(
        "4 KiB by vhost-user-blk",
        "qemu-storage-daemon",
        &idle::free(),
        rounds,
        Sides {
            ours: |load, _| measured(&ours.daemons[0], &near, load),
            theirs: |load, _| measured(&qemu, &far, load),
        },
    )?;
    ours.forget("idle")?;
    Ok(rows)
}

fn storage_daemon(folder: &Path, image: &Path) -> anyhow::Result<(Server, PathBuf)> {
    let socket = folder.join("vhost-user.sock");
    let mut command = Command::new("qemu-storage-daemon");
    command
        .arg("--blockdev")
        .arg(format!("driver=file,node-name=file,filename={}", image.display()))
        .args(["--blockdev", "driver=raw,node-name=disk,file=file"])
        .arg("--export")
        .arg(format!(
            "type=vhost-user-blk,id=disk,node-name=disk,writable=on,addr.type=unix,addr.path={}",
            socket.display()
        ));
    let server = Server::start(&mut command, &folder.join("vhost-user.log"))?;
    until_there(&socket)?;
    Ok((server, socket))
}
