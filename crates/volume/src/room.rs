//! How much of a client is under way at once.

/// The most requests of a client that are under way, and of which answers wait.
pub const MAX_IN_FLIGHT: usize = 128;

/// The most KiB of data of them; at least one request of the largest size.
pub const MAX_KIB: usize = 64 << 10;

/// The longest data of a request, in bytes.
pub const MAX_REQUEST: u32 = 32 << 20;

/// What is under way.
#[derive(Debug, Default)]
pub struct Room {
    requests: usize,
    kib: usize,
}

impl Room {
    /// One more request, with so many KiB of data; false if there is no room for it.
    pub fn try_begin(&mut self, kib: usize) -> bool {
        let is_full = self.requests >= MAX_IN_FLIGHT || self.requests > 0 && self.kib + kib > MAX_KIB;
        if !is_full {
            self.requests += 1;
            self.kib += kib;
        }
        !is_full
    }

    /// So many have come to their end.
    pub fn end(&mut self, requests: usize, kib: usize) {
        self.requests -= requests;
        self.kib -= kib;
    }

    /// How many are under way.
    pub fn requests(&self) -> usize {
        self.requests
    }
}
