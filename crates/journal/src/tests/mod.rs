//! What a log promises, held against disks that fail and crash.

mod damage;
mod exhaustive;
mod model;
mod promises;
mod random;
mod real;

use crate::testing::{Disk, Mount};
use crate::{Damage, Error, Log, Replayed};

/// Opens the log on a simulated disk.
fn open(disk: &Disk) -> Result<(Log<Mount>, Replayed), Error> {
    Log::open(disk.mount())
}

/// What is replayed of an undamaged log.
fn records(disk: &Disk) -> Vec<Vec<u8>> {
    let (_, replayed) = open(disk).unwrap();
    assert_eq!(replayed.damage, None);
    replayed.records
}

fn damage(segment: u32, offset: u64) -> Option<Damage> {
    Some(Damage { segment, offset })
}
