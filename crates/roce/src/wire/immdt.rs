//! Immediate data (IBA §9.3.6): four bytes that go from the work request to the completion unchanged.

use crate::Immediate;

/// Size in bytes.
pub const IMMDT_BYTES: usize = 4;

impl Immediate {
    /// Reads the header.
    pub fn parse(bytes: &[u8; IMMDT_BYTES]) -> Immediate {
        Immediate(*bytes)
    }

    /// Writes the header.
    pub fn emit(&self, bytes: &mut [u8; IMMDT_BYTES]) {
        *bytes = self.0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip() {
        let mut bytes = [0; IMMDT_BYTES];
        Immediate([1, 2, 3, 4]).emit(&mut bytes);
        assert_eq!(Immediate::parse(&bytes), Immediate([1, 2, 3, 4]));
    }
}
