//! Doors for the fuzz targets (`fuzz/`) to what reads bytes of others and is nobody else's business.

use crate::protocol::{FromHost, Lines, Outcome, Request, Response, ToHost, receive};

/// Reads the lines of the lab's processes, which come in two parts.
pub fn lines(bytes: &[u8], cut: usize) {
    let (first, second) = bytes.split_at(cut.min(bytes.len()));
    let mut lines = Lines::default();
    for part in [first, second] {
        assert!(!lines.fill(part).expect("a slice can be read"));
        // Who gets an error reads no more.
        while let Ok(Some(_)) = lines.next::<FromHost>() {}
        let mut orders = Lines::default();
        assert!(!orders.fill(part).expect("a slice can be read"));
        while let Ok(Some(_)) = orders.next::<ToHost>() {}
    }
    let _ = receive::<Request>(bytes);
    let _ = receive::<Response>(bytes);
    let _ = receive::<Outcome>(bytes);
}
