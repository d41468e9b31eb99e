//! Failures that a test orders: named points, and what happens there.
//!
//! The file `faults` in the runtime folder has one `POINT ACTION` per line; it is read at each point, and missing on any
//! host that is not under test. Whoever can write there is root on this host.

use std::path::PathBuf;

use anyhow::bail;

/// Where failures can be ordered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Point {
    /// The destination is about to make the standby contexts.
    DestinationPreSetup,
    /// The destination has all images and is about to restore.
    DestinationRestore,
    /// The destination is about to let the tasks run.
    DestinationCommit,
    /// A partner is about to make its standby queue pairs.
    PartnerPrepare,
    /// A partner is about to suspend.
    PartnerSuspend,
    /// A partner is about to wait until nothing is in flight.
    PartnerDrain,
}

impl Point {
    /// Its name in the file.
    pub fn name(self) -> &'static str {
        match self {
            Self::DestinationPreSetup => "destination-pre-setup",
            Self::DestinationRestore => "destination-restore",
            Self::DestinationCommit => "destination-commit",
            Self::PartnerPrepare => "partner-prepare",
            Self::PartnerSuspend => "partner-suspend",
            Self::PartnerDrain => "partner-drain",
        }
    }
}

/// The failures ordered on this host.
#[derive(Debug)]
pub struct Faults {
    file: PathBuf,
}

impl Faults {
    /// Those in `file`, now and later.
    pub fn new(file: PathBuf) -> Self {
        Self { file }
    }

    fn action(&self, point: Point) -> Option<String> {
        let text = std::fs::read_to_string(&self.file).ok()?;
        text.lines()
            .find_map(|line| Some(line.strip_prefix(point.name())?.trim().to_owned()))
    }

    /// Passes a point: goes on, fails, or ends this process (`exit`). `damage` is the caller's to carry out; true tells
    /// it to.
    pub fn pass(&self, point: Point) -> anyhow::Result<bool> {
        match self.action(point).as_deref() {
            None => Ok(false),
            Some("damage") => Ok(true),
            Some("exit") => {
                tracing::error!(point = point.name(), "ordered to exit");
                std::process::exit(70)
            }
            Some(_) => bail!("refused at {}, as ordered", point.name()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_named_point_fails_and_only_while_it_is_ordered() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("faults");
        let faults = Faults::new(file.clone());
        assert!(!faults.pass(Point::PartnerPrepare).unwrap());
        std::fs::write(&file, "partner-prepare fail\ndestination-restore damage\n").unwrap();
        assert!(faults.pass(Point::PartnerPrepare).is_err());
        assert!(!faults.pass(Point::PartnerDrain).unwrap());
        assert!(faults.pass(Point::DestinationRestore).unwrap());
        std::fs::remove_file(&file).unwrap();
        assert!(!faults.pass(Point::PartnerPrepare).unwrap());
    }
}
