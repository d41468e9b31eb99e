//! Descriptors of processes that stand still.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::RawFd;

/// The descriptors of a container's processes.
///
/// They are read before CRIU writes the processes down: while it does, it opens some of its own in them, and closes them again, which are
/// none of the container's.
#[derive(Debug, Clone, Default)]
pub struct Descriptors(BTreeMap<i32, Vec<RawFd>>);

impl Descriptors {
    /// Those of the container with this first process, whose tasks stand still.
    pub fn of(init: i32) -> io::Result<Self> {
        let mut all = BTreeMap::new();
        for pid in crate::check::processes_of(init)?.into_keys() {
            all.insert(pid, numbers(pid)?);
        }
        Ok(Self(all))
    }

    pub(crate) fn of_process(&self, pid: i32) -> &[RawFd] {
        self.0.get(&pid).map_or(&[], Vec::as_slice)
    }
}

/// Those of one process; none if it has ended.
fn numbers(pid: i32) -> io::Result<Vec<RawFd>> {
    let entries = match fs::read_dir(format!("/proc/{pid}/fd")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut numbers = Vec::new();
    for entry in entries {
        let name = entry?.file_name();
        let number = name.to_string_lossy().parse();
        numbers.push(number.map_err(|_| io::ErrorKind::InvalidData)?);
    }
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn those_of_a_process_are_found() {
        let file = fs::File::open("/dev/null").unwrap();
        let found = numbers(std::process::id().cast_signed()).unwrap();
        assert!(found.contains(&file.as_raw_fd()));
        assert_eq!(numbers(i32::MAX).unwrap(), Vec::<RawFd>::new());
        assert_eq!(Descriptors::default().of_process(1), &[] as &[RawFd]);
    }
}
