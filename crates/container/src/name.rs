//! Names of containers.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The name of a container: it is a runc id, a file name and part of a cgroup path, so it is kept to what all three
/// accept.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ContainerName(String);

/// Why a string cannot name a container.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{name:?} cannot name an instance: use 1 to {} letters, digits, '-', '_' or '.', starting with a letter or digit",
    ContainerName::MAX_BYTES
)]
pub struct BadName {
    /// The refused string.
    pub name: String,
}

impl ContainerName {
    /// The longest name, so that paths made from it stay below the 108 bytes of a Unix socket address.
    pub const MAX_BYTES: usize = 48;

    /// Checks `name`.
    pub fn new(name: impl Into<String>) -> Result<Self, BadName> {
        let name = name.into();
        let starts_well = name.starts_with(|c: char| c.is_ascii_alphanumeric());
        let fits = name.len() <= Self::MAX_BYTES;
        if starts_well
            && fits
            && name
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        {
            Ok(Self(name))
        } else {
            Err(BadName { name })
        }
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for ContainerName {
    type Error = BadName;

    fn try_from(name: String) -> Result<Self, BadName> {
        Self::new(name)
    }
}

impl From<ContainerName> for String {
    fn from(name: ContainerName) -> Self {
        name.0
    }
}

impl fmt::Display for ContainerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl AsRef<std::path::Path> for ContainerName {
    fn as_ref(&self) -> &std::path::Path {
        self.0.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_would_leave_a_directory_are_refused() {
        for bad in ["", ".", "..", "a/b", "../x", "-v", "a b", "a\n", &"x".repeat(49)] {
            assert!(ContainerName::new(bad).is_err(), "{bad:?}");
        }
        for good in ["a", "web-1", "0.x_y", &"x".repeat(48)] {
            assert!(ContainerName::new(good).is_ok(), "{good:?}");
        }
    }
}
