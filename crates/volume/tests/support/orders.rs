//! Orders, clients and data of the tests about decisions.

use std::path::PathBuf;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use verbatim_volume::control::{Order, Outcome, Row, order_now};

use super::client::Client;
use super::{Lab, PATIENCE};

pub const MIB: u64 = 1 << 20;

/// Runs a command that must be refused; returns its error.
pub fn refused(lab: &Lab, host: usize, args: &[&str]) -> String {
    let output = lab.try_order(host, args);
    assert!(
        !output.status.success(),
        "{args:?} is not refused\n{}",
        lab.logs()
    );
    String::from_utf8(output.stderr).expect("text")
}

/// Gives an order; returns the rows, or the reason of its refusal.
pub fn give(lab: &Lab, host: usize, order: &Order) -> Result<Vec<Row>, String> {
    match order_now(&lab.path(host, "run/volumes.sock"), order, PATIENCE) {
        Ok(Outcome::Volumes(rows)) => Ok(rows),
        Ok(other) => Err(format!("{other:?}")),
        Err(error) => Err(format!("{error:#}")),
    }
}

/// Tells a daemon what became of a session; returns the role of its copy.
pub fn settle(lab: &Lab, host: usize, by: u64, is_committed: bool) -> Result<String, String> {
    let order = Order::Settle {
        name: "db".to_owned(),
        by,
        is_committed,
    };
    let mut rows = give(lab, host, &order)?;
    assert_eq!(rows.len(), 1, "the answer is a row");
    Ok(rows.remove(0).role)
}

/// Copies the volume for a session, and holds it.
pub fn hold(lab: &Lab, by: u64) {
    let name = "db".to_owned();
    let follow = Order::Follow {
        name: name.clone(),
        to: "b".to_owned(),
        by,
        bytes_per_second: None,
    };
    give(lab, 0, &follow).expect("it is copied");
    let mirrored = Order::Mirrored {
        name: name.clone(),
        by,
    };
    give(lab, 0, &mirrored).expect("it has everything");
    give(lab, 0, &Order::Hold { name, by }).expect("it is held");
}

/// Bytes that are not zero, so that they take room.
pub fn noise(seed: u64, bytes: u64) -> Vec<u8> {
    let mut noise = vec![0; bytes as usize];
    StdRng::seed_from_u64(seed).fill(noise.as_mut_slice());
    noise
}

/// A client of the volume.
pub fn client(lab: &Lab, host: usize, volume: &str) -> Client {
    Client::connect(&lab.socket(host, volume)).expect("it is served")
}

/// Writes durably.
pub fn write(lab: &Lab, host: usize, volume: &str, offset: u64, data: &[u8]) {
    let mut client = client(lab, host, volume);
    client.write(offset, data, false).expect("written");
    client.flush().expect("flushed");
}

/// What is there.
pub fn read(lab: &Lab, host: usize, volume: &str, offset: u64, bytes: u64) -> Vec<u8> {
    let mut data = vec![0; bytes as usize];
    client(lab, host, volume).read(offset, &mut data).expect("read");
    data
}

/// The path as a word of a command.
pub fn text(path: &std::path::Path) -> String {
    path.to_str().expect("text").to_owned()
}

/// The trouble that is listed with the volume.
pub fn trouble(lab: &Lab, host: usize, volume: &str) -> String {
    let status = lab.status(host, volume).unwrap_or_default();
    status["trouble"].as_str().unwrap_or_default().to_owned()
}

/// A volume on the first host whose data are not in the state folder.
pub fn volume_elsewhere(lab: &Lab, name: &str, bytes: u64) -> PathBuf {
    let data = lab.path(0, &format!("{name}.img"));
    let size = bytes.to_string();
    lab.order(0, &["create", name, "--size", &size, "--data", &text(&data)]);
    lab.order(0, &["attach", name]);
    data
}
