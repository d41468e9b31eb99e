//! A disk with a cache that a power failure loses, cell by cell.

use rand::Rng;
use rand::rngs::SmallRng;

/// Content of a cell: the number of its write.
pub type Value = u32;

/// One disk.
#[derive(Debug, Clone)]
pub struct Disk {
    durable: Vec<Value>,
    visible: Vec<Value>,
    /// Values of each cell that were written since the last flush, in order.
    cached: Vec<Vec<Value>>,
    /// Values that are clean in the cache and may not be on the disk; for other cells the largest value,
    /// which no cell has.
    dropped: Vec<Value>,
}

/// I/O in flight at a disk. It is carried out cell by cell, in any order.
#[derive(Debug, Clone)]
pub struct Io {
    pub kind: IoKind,
    left: Vec<usize>,
    pub offset: usize,
    /// Values to write, or values read so far.
    pub values: Vec<Value>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IoKind {
    Read,
    Write,
    Flush,
}

impl Io {
    pub fn read(offset: usize, length: usize) -> Self {
        Self {
            kind: IoKind::Read,
            left: (0..length).collect(),
            offset,
            values: vec![0; length],
        }
    }

    pub fn write(offset: usize, values: Vec<Value>) -> Self {
        Self {
            kind: IoKind::Write,
            left: (0..values.len()).collect(),
            offset,
            values,
        }
    }

    pub fn flush() -> Self {
        Self {
            kind: IoKind::Flush,
            left: vec![0],
            offset: 0,
            values: Vec::new(),
        }
    }

    pub fn is_done(&self) -> bool {
        self.left.is_empty()
    }

    /// Carries out one cell.
    pub fn step(&mut self, disk: &mut Disk, random: &mut SmallRng) {
        let which = random.random_range(0..self.left.len());
        let cell = self.left.swap_remove(which);
        match self.kind {
            IoKind::Read => self.values[cell] = disk.visible[self.offset + cell],
            IoKind::Write => disk.write(self.offset + cell, self.values[cell]),
            IoKind::Flush => disk.flush(),
        }
    }
}

impl Disk {
    pub fn new(cells: usize) -> Self {
        Self {
            durable: vec![0; cells],
            visible: vec![0; cells],
            cached: vec![Vec::new(); cells],
            dropped: vec![Value::MAX; cells],
        }
    }

    /// The content that programs read.
    pub fn visible(&self) -> &[Value] {
        &self.visible
    }

    /// The content that a power failure leaves at least.
    pub fn durable(&self) -> &[Value] {
        &self.durable
    }

    fn write(&mut self, cell: usize, value: Value) {
        self.visible[cell] = value;
        // The cell is dirty again.
        self.dropped[cell] = Value::MAX;
        self.cached[cell].push(value);
    }

    pub fn flush(&mut self) {
        for (cell, &value) in self.visible.iter().enumerate() {
            if self.dropped[cell] != value {
                self.durable[cell] = value;
            }
        }
        self.cached.iter_mut().for_each(Vec::clear);
    }

    /// A flush fails: cells that could not be written count as clean, are read as before, and are never
    /// written.
    pub fn fail_flush(&mut self) {
        self.cached.iter_mut().for_each(Vec::clear);
        self.dropped.clone_from(&self.visible);
    }

    /// For each cell, any of its values since the last flush may remain.
    pub fn lose_power(&mut self, random: &mut SmallRng) {
        for cell in 0..self.visible.len() {
            let cached = &mut self.cached[cell];
            let which = random.random_range(0..=cached.len());
            if which > 0 {
                self.durable[cell] = cached[which - 1];
            }
            cached.clear();
        }
        self.visible.clone_from(&self.durable);
        self.dropped.fill(Value::MAX);
    }
}
