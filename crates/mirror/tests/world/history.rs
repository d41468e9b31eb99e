//! The tenant's knowledge: an array of cells, and the promises about each.

use super::disk::Value;

/// One cell. Writes are counted in the order of their issue, in which overlapping writes are carried out.
#[derive(Debug, Clone)]
struct Cell {
    /// All values ever written.
    writes: Vec<Value>,
    /// The last one that was acknowledged, or seen after a crash.
    acknowledged: usize,
    /// The last one that a crash must leave.
    flushed: usize,
}

/// All cells.
#[derive(Debug, Clone)]
pub struct History {
    cells: Vec<Cell>,
    next: Value,
}

impl History {
    pub fn new(cells: usize) -> Self {
        let cell = Cell {
            writes: vec![0],
            acknowledged: 0,
            flushed: 0,
        };
        Self {
            cells: vec![cell; cells],
            next: 1,
        }
    }

    /// Values for a write that is issued now.
    pub fn issue(&mut self, offset: usize, length: usize) -> Vec<Value> {
        let values: Vec<_> = (self.next..).take(length).collect();
        self.next += length as Value;
        for (cell, &value) in self.cells[offset..][..length].iter_mut().zip(&values) {
            cell.writes.push(value);
        }
        values
    }

    /// The write was acknowledged.
    pub fn acknowledge(&mut self, offset: usize, values: &[Value]) {
        for (cell, value) in self.cells[offset..].iter_mut().zip(values) {
            let index = cell.index(*value).expect("it was issued");
            cell.acknowledged = cell.acknowledged.max(index);
        }
    }

    /// The state that a read or flush may rely on if it is issued now.
    pub fn promised(&self) -> Vec<usize> {
        self.cells.iter().map(|cell| cell.acknowledged).collect()
    }

    /// A flush that was issued at `then` is done.
    pub fn flushed(&mut self, then: &[usize]) {
        for (cell, &index) in self.cells.iter_mut().zip(then) {
            cell.flushed = cell.flushed.max(index);
        }
    }

    /// Whether the values of a read are right.
    pub fn check_read(&self, offset: usize, values: &[Value], then: &[usize]) -> Result<(), String> {
        for (place, value) in values.iter().enumerate() {
            self.check(offset + place, *value, then[offset + place])?;
        }
        Ok(())
    }

    /// The copy that serves is back with this content.
    pub fn after_crash(&mut self, content: &[Value], was_power: bool) -> Result<(), String> {
        for (place, &value) in content.iter().enumerate() {
            let cell = &self.cells[place];
            let least = if was_power {
                cell.flushed
            } else {
                cell.acknowledged
            };
            self.check(place, value, least)?;
            let cell = &mut self.cells[place];
            cell.acknowledged = cell.index(value).expect("it was found");
            cell.flushed = cell.flushed.min(cell.acknowledged);
        }
        Ok(())
    }

    /// Another copy serves from now on, with this content, which has to be durable.
    pub fn moved(
        &mut self,
        visible: &[Value],
        durable: &[Value],
        source_lost_power: bool,
    ) -> Result<(), String> {
        self.after_crash(visible, source_lost_power)?;
        for (place, &value) in durable.iter().enumerate() {
            self.check(place, value, self.cells[place].acknowledged)?;
            self.cells[place].flushed = self.cells[place].acknowledged;
        }
        Ok(())
    }

    fn check(&self, place: usize, value: Value, least: usize) -> Result<(), String> {
        let cell = &self.cells[place];
        match cell.index(value) {
            Some(index) if index >= least => Ok(()),
            Some(index) => Err(format!(
                "cell {place} has write {index} ({value}), but {least} ({}) was promised",
                cell.writes[least]
            )),
            None => Err(format!("cell {place} has {value}, which was never written there")),
        }
    }
}

impl Cell {
    fn index(&self, value: Value) -> Option<usize> {
        self.writes.binary_search(&value).ok()
    }
}
