//! A full thin pool, in both of its modes: it fails writes at once, or has them wait for room, for a while.

use anyhow::{Context, ensure};
use verbatim_e2e::eventually;

use crate::destination::{SIZE, fill, noise};
use crate::disks::{Ground, Mapped, Medium, SECTOR, dmsetup};
use crate::hosts::{Hosts, LIMIT, VOLUME, expect_eio, expect_same, read_all, write_all};
use crate::inside::Case;

/// All cases of this file.
pub const ALL: &[Case] = &[
    ("thin::full_at_the_destination", || destination(Full::Fails)),
    ("thin::full_at_the_destination_after_a_while", || {
        destination(Full::FailsLater)
    }),
    ("thin::room_in_time_at_the_destination", room_in_time),
    ("thin::full_while_serving", || serving(Full::Fails)),
    ("thin::full_while_serving_after_a_while", || {
        serving(Full::FailsLater)
    }),
    ("thin::room_in_time_while_serving", room_in_time_while_serving),
];

/// Room of a pool that is too small, and of one that is large enough.
const ROOM: u64 = 6 << 20;
const MORE_ROOM: u64 = 24 << 20;

/// Block size of the pool in sectors.
const BLOCK: u64 = 128;

/// Behaviour of a full pool.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Full {
    Fails,
    /// Writes wait for two seconds, and fail then.
    FailsLater,
    Waits,
}

/// A pool with one thin device, which claims the whole of [`SIZE`].
struct Pool {
    // Fields in the order of their drop.
    thin: Mapped,
    pool: Mapped,
    data: Medium,
    metadata: Medium,
    _ground: Ground,
    full: Full,
}

impl Pool {
    fn new(full: Full) -> anyhow::Result<Self> {
        // Seconds until the waiting writes of a full pool fail; 0: never.
        let seconds = match full {
            Full::FailsLater => "2",
            Full::Fails | Full::Waits => "0",
        };
        std::fs::write("/sys/module/dm_thin_pool/parameters/no_space_timeout", seconds)?;
        let ground = Ground::new()?;
        let data = Medium::new(ground.path("data"), ROOM)?;
        let metadata = Medium::new(ground.path("metadata"), 2 << 20)?;
        let pool = Mapped::new("pool", &table(&data, &metadata, full)?)?;
        dmsetup(&["message", "pool", "0", "create_thin 0"])?;
        let thin = Mapped::new("thin", &format!("0 {} thin {} 0", SIZE / SECTOR, pool.word()))?;
        Ok(Self {
            thin,
            pool,
            data,
            metadata,
            _ground: ground,
            full,
        })
    }

    /// Extends the pool, as lvextend does.
    fn extend(&self) -> anyhow::Result<()> {
        self.data.grow(MORE_ROOM)?;
        dmsetup(&[
            "load",
            "pool",
            "--table",
            &table(&self.data, &self.metadata, self.full)?,
        ])?;
        dmsetup(&["suspend", "--noflush", "--nolockfs", "pool"])?;
        self.pool.resume()
    }

    fn is_full(&self) -> anyhow::Result<bool> {
        Ok(dmsetup(&["status", "pool"])?.contains("out_of_data_space"))
    }

    fn becomes_full(&self) -> anyhow::Result<()> {
        eventually("the pool is full", LIMIT, || Ok(self.is_full()?.then_some(())))
    }
}

fn table(data: &Medium, metadata: &Medium, full: Full) -> anyhow::Result<String> {
    let feature = match full {
        Full::Fails => "1 error_if_no_space",
        Full::FailsLater | Full::Waits => "0",
    };
    Ok(format!(
        "0 {} thin-pool {} {} {BLOCK} 0 {feature}",
        data.sectors()?,
        metadata.device,
        data.device
    ))
}

/// Checks that another volume of the same host, on its own disk, goes on.
fn another_goes_on(hosts: &Hosts, host: usize) -> anyhow::Result<()> {
    hosts.order(host, &["create", "other", "--size", "1M"])?;
    hosts.order(host, &["attach", "other"])?;
    let mut client = hosts.client_of(host, "other")?;
    client.write(0, &[3; 4096], true)?;
    client.flush()?;
    Ok(())
}

fn destination(full: Full) -> anyhow::Result<()> {
    let pool = Pool::new(full)?;
    let hosts = Hosts::up()?;
    let data = noise(1, SIZE);
    fill(&hosts, &data)?;
    hosts.order(1, &["place", VOLUME, "--data", pool.thin.word()])?;
    let cache = pool.thin.keep_cache()?;
    let said = hosts.refused(0, &["migrate", VOLUME, "--to", "b"])?;
    ensure!(said.contains("is served here"), "{said}");
    ensure!(pool.is_full()?, "the pool has room");
    another_goes_on(&hosts, 1)?;
    hosts.expect_suspect(1, true)?;
    let mut client = hosts.client(0)?;
    client.write(0, &data[..4096], true)?;
    pool.extend()?;
    hosts.migrate(0, 1, &[])?;
    expect_same("the thin device after the commit", &pool.thin.bytes()?, &data)?;
    hosts.expect_suspect(1, false)?;
    drop(cache);
    expect_same("the volume there", &read_all(&mut hosts.client(1)?)?, &data)
}

/// Waiting writes succeed once the pool is extended, and no copy is suspect.
fn room_in_time() -> anyhow::Result<()> {
    let pool = Pool::new(Full::Waits)?;
    let hosts = Hosts::up()?;
    let mut data = noise(1, SIZE);
    fill(&hosts, &data)?;
    hosts.order(1, &["place", VOLUME, "--data", pool.thin.word()])?;
    let mut moving = hosts.command(0, &["migrate", VOLUME, "--to", "b"]).spawn()?;
    pool.becomes_full()?;
    another_goes_on(&hosts, 1)?;
    // The tenant does not wait for that disk.
    let patch = noise(2, 4096);
    hosts.client(0)?.write(0, &patch, true)?;
    data[..4096].copy_from_slice(&patch);
    pool.extend()?;
    ensure!(moving.wait()?.success(), "{}", hosts.logs());
    hosts.expect_suspect(1, false)?;
    expect_same("the thin device", &pool.thin.bytes()?, &data)
}

/// Creates the first host's volume on a pool; part of its room is used.
fn served(hosts: &Hosts, pool: &Pool) -> anyhow::Result<Vec<u8>> {
    let size = SIZE.to_string();
    hosts.order(
        0,
        &["create", VOLUME, "--size", &size, "--data", pool.thin.word()],
    )?;
    hosts.order(0, &["attach", VOLUME])?;
    let mut data = vec![0; SIZE as usize];
    let first = noise(1, 2 << 20);
    data[..first.len()].copy_from_slice(&first);
    let mut client = hosts.client(0)?;
    write_all(&mut client, &first)?;
    client.flush()?;
    Ok(data)
}

fn serving(full: Full) -> anyhow::Result<()> {
    let pool = Pool::new(full)?;
    let hosts = Hosts::up()?;
    let flushed = served(&hosts, &pool)?[..2 << 20].to_vec();
    let data = noise(2, SIZE);
    let mut client = hosts.client(0)?;
    write_all(&mut client, &data).context("the page cache takes it")?;
    expect_eio("a flush", client.flush())?;
    hosts.expect_suspect(0, true)?;
    expect_eio("a write", client.write(0, &[1; 512], false))?;
    expect_same("what is read", &read_all(&mut client)?, &data)?;
    another_goes_on(&hosts, 0)?;
    pool.extend()?;
    expect_eio("a flush with room", client.flush())?;
    hosts.order(0, &["accept", VOLUME])?;
    hosts.expect_suspect(0, false)?;
    expect_same("the thin device", &pool.thin.bytes()?, &data)?;
    ensure!(data[..flushed.len()] != flushed[..], "it was not written twice");
    hosts.migrate(0, 1, &[])?;
    expect_same("the other host's file", &hosts.data(1)?, &data)
}

fn room_in_time_while_serving() -> anyhow::Result<()> {
    let pool = Pool::new(Full::Waits)?;
    let hosts = Hosts::up()?;
    let mut data = served(&hosts, &pool)?;
    let more = noise(3, 10 << 20);
    data[..more.len()].copy_from_slice(&more);
    let mut client = hosts.client(0)?;
    write_all(&mut client, &more)?;
    let flushing = std::thread::spawn(move || client.flush());
    pool.becomes_full()?;
    another_goes_on(&hosts, 0)?;
    ensure!(
        !flushing.is_finished(),
        "there was no room, and it is said to be durable"
    );
    pool.extend()?;
    flushing
        .join()
        .expect("it does not panic")
        .context("there is room")?;
    hosts.expect_suspect(0, false)?;
    expect_same("the thin device", &pool.thin.bytes()?, &data)
}
