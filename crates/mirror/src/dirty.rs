//! The map of chunks that the destination lacks.

/// One bit for each chunk.
#[derive(Debug, Clone)]
pub struct Dirty {
    words: Vec<u64>,
    chunks: u64,
    count: u64,
}

impl Dirty {
    /// The destination lacks all chunks.
    pub fn all(chunks: u64) -> Self {
        let mut words = vec![u64::MAX; chunks.div_ceil(64) as usize];
        if let (Some(last), used @ 1..) = (words.last_mut(), chunks % 64) {
            *last = (1 << used) - 1;
        }
        Self {
            words,
            chunks,
            count: chunks,
        }
    }

    /// The number of lacking chunks.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The number of all chunks.
    pub fn chunks(&self) -> u64 {
        self.chunks
    }

    /// Whether the destination lacks this chunk.
    pub fn has(&self, chunk: u64) -> bool {
        self.words[(chunk / 64) as usize] & (1 << (chunk % 64)) != 0
    }

    /// Marks this chunk as lacking.
    pub fn mark(&mut self, chunk: u64) {
        if !self.has(chunk) {
            self.words[(chunk / 64) as usize] |= 1 << (chunk % 64);
            self.count += 1;
        }
    }

    /// The destination has this chunk.
    pub fn clear(&mut self, chunk: u64) {
        if self.has(chunk) {
            self.words[(chunk / 64) as usize] &= !(1 << (chunk % 64));
            self.count -= 1;
        }
    }

    /// The first lacking chunk from `chunk` on.
    pub fn next(&self, chunk: u64) -> Option<u64> {
        if chunk >= self.chunks {
            return None;
        }
        let first = (chunk / 64) as usize;
        let mut word = self.words[first] & (u64::MAX << (chunk % 64));
        let mut index = first;
        while word == 0 {
            index += 1;
            word = *self.words.get(index)?;
        }
        Some(index as u64 * 64 + u64::from(word.trailing_zeros()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_map_is_a_set() {
        for chunks in [1, 63, 64, 65, 200] {
            let mut dirty = Dirty::all(chunks);
            let mut set: std::collections::BTreeSet<u64> = (0..chunks).collect();
            for step in 0..chunks * 3 {
                let chunk = step * 37 % chunks;
                match step % 3 {
                    0 => (dirty.mark(chunk), set.insert(chunk)).1,
                    _ => (dirty.clear(chunk), set.remove(&chunk)).1,
                };
                assert_eq!(dirty.count(), set.len() as u64);
                assert_eq!(dirty.next(chunk), set.range(chunk..).next().copied());
                assert_eq!(dirty.has(chunk), set.contains(&chunk));
            }
            assert_eq!(dirty.next(chunks), None);
        }
    }
}
