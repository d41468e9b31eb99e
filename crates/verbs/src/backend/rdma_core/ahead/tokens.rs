//! What events name objects by that another process has made: numbers that are no addresses, and the addresses here.

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};

use parking_lot::Mutex;

/// No address of a process has this bit (x86-64 and AArch64), and no number of a port.
const NO_ADDRESS: u64 = 1 << 63;

/// A library that was never given one does not pay for it.
static ANY: AtomicBool = AtomicBool::new(false);
/// Those of a context that was let go are those of the next one.
static ADDRESSES: Mutex<Option<HashMap<u64, u64>>> = Mutex::new(None);

/// The token of the object that is the `index`th of its process.
pub fn token(index: u64) -> u64 {
    NO_ADDRESS | index
}

/// From now on events that name `token` name the object at `address`.
pub fn learn(token: u64, address: u64) {
    ADDRESSES.lock().get_or_insert_default().insert(token, address);
    ANY.store(true, Release);
}

/// The address that a token stands for.
pub fn address(token: u64) -> Option<u64> {
    if token & NO_ADDRESS == 0 || !ANY.load(Acquire) {
        return None;
    }
    ADDRESSES.lock().as_ref()?.get(&token).copied()
}
