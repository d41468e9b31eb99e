//! Fields at fixed places.

/// Size of a message, without the MAD's header, in bytes.
pub const MESSAGE_BYTES: usize = 232;

/// The bytes at `at`. All places are constants, within the message.
pub fn get<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("as many as asked for")
}

/// Puts bytes at `at`.
pub fn put<const N: usize>(bytes: &mut [u8], at: usize, value: [u8; N]) {
    bytes[at..at + N].copy_from_slice(&value);
}

/// 24 bits and the byte behind them, which is how queue pair numbers and PSNs lie.
pub fn get_24_8(bytes: &[u8], at: usize) -> (u32, u8) {
    let word = u32::from_be_bytes(get(bytes, at));
    (word >> 8, word as u8)
}

/// The other way.
pub fn put_24_8(bytes: &mut [u8], at: usize, value: u32, last: u8) {
    put(bytes, at, (value << 8 | u32::from(last)).to_be_bytes());
}
