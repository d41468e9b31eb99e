//! CRIU: which one, and whether it works here.

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// The variable that names the CRIU to use; the proxy's child is found by it too.
pub(crate) const CRIU_VARIABLE: &str = "VERBATIM_CRIU";

/// CRIU's name for soft-dirty tracking (`criu/cr-check.c`).
const TRACKING: &str = "mem_dirty_track";

/// Where `setup.sh` puts a CRIU that is newer than the distribution's.
const INSTALLED: &str = "/opt/verbatim/criu/bin/criu";

/// A version of CRIU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Major.
    pub major: u32,
    /// Minor.
    pub minor: u32,
    /// Sublevel.
    pub patch: u32,
}

/// The oldest CRIU that we use. 4.1 cannot dump an `AF_INET` socket on Linux 6.16 and newer.
const OLDEST: Version = Version {
    major: 4,
    minor: 2,
    patch: 0,
};

/// Why there is no CRIU to use.
#[derive(Debug, thiserror::Error)]
pub enum CriuError {
    /// None was found.
    #[error("no CRIU was found in PATH nor at {INSTALLED}; run ./setup.sh to install one")]
    Missing,
    /// Those that were found are not usable; the last one's problem.
    #[error("{} cannot be started", .path.display())]
    Start {
        /// The program.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// It is too old.
    #[error("{} is CRIU {found}, and {OLDEST} or newer is needed; run ./setup.sh to install one", .path.display())]
    TooOld {
        /// The program.
        path: PathBuf,
        /// Its version.
        found: Version,
    },
    /// It did not say its version.
    #[error("{} does not print a version of CRIU: {output}", .path.display())]
    NoVersion {
        /// The program.
        path: PathBuf,
        /// What it printed.
        output: String,
    },
    /// `criu check` failed.
    #[error(
        "{} check failed, so it cannot be used on this kernel with these rights: {output}{}",
        .path.display(),
        if output.contains("Network is unreachable") { "; set the loopback device up (ip link set lo up)" } else { "" }
    )]
    Check {
        /// The program.
        path: PathBuf,
        /// What it printed.
        output: String,
    },
}

/// A CRIU that is new enough.
#[derive(Debug, Clone)]
pub struct Criu {
    path: PathBuf,
    version: Version,
}

impl Criu {
    /// Finds CRIU: the one that `VERBATIM_CRIU` names, else the one in `PATH` if it is new enough and passes `criu
    /// check`, else the one that `setup.sh` installed. Takes about 0.1 s.
    pub fn find() -> Result<Self, CriuError> {
        if let Some(named) = std::env::var_os(CRIU_VARIABLE) {
            return Self::open(Path::new(&named));
        }
        let in_path = std::env::var_os("PATH").and_then(|path| find_in_path("criu", &path));
        let candidates = in_path.into_iter().chain([PathBuf::from(INSTALLED)]);
        let mut refusal = CriuError::Missing;
        for path in candidates.filter(|path| is_executable(path)) {
            match Self::open(&path).and_then(|criu| criu.warm().map(|()| criu)) {
                Ok(criu) => return Ok(criu),
                Err(error) => refusal = error,
            }
        }
        Err(refusal)
    }

    /// One that is not there: whatever is asked of it fails.
    pub(crate) fn missing(folder: &Path) -> Self {
        Self {
            path: folder.join("criu"),
            version: OLDEST,
        }
    }

    /// Takes the CRIU at `path`, if it is new enough.
    pub fn open(path: &Path) -> Result<Self, CriuError> {
        let output = run(path, &["--version"])?;
        let text = String::from_utf8_lossy(&output.stdout);
        let Some(version) = parse_version(&text) else {
            let output = printed(&output);
            return Err(CriuError::NoVersion {
                path: path.to_owned(),
                output,
            });
        };
        if version < OLDEST {
            return Err(CriuError::TooOld {
                path: path.to_owned(),
                found: version,
            });
        }
        Ok(Self {
            path: path.to_owned(),
            version,
        })
    }

    /// Checks that it works on this kernel with our rights, and lets it remember what it has probed.
    ///
    /// CRIU probes the kernel for some 75 ms unless it finds its results of an earlier run in `/run/criu.kdat`, which
    /// it writes only where `/run` is tmpfs. So this has to be called before the first blackout.
    pub fn warm(&self) -> Result<(), CriuError> {
        let output = run(&self.path, &["check"])?;
        if output.status.success() {
            Ok(())
        } else {
            Err(CriuError::Check {
                path: self.path.clone(),
                output: printed(&output),
            })
        }
    }

    /// Whether the kernel tells CRIU which pages were written since a pre-dump (soft-dirty), tried by CRIU itself; if not,
    /// what it says. Takes about 0.1 s.
    pub fn tracks_memory(&self) -> Result<Result<(), String>, CriuError> {
        let output = run(&self.path, &["check", "--feature", TRACKING])?;
        Ok(if output.status.success() {
            Ok(())
        } else {
            Err(last_words(&printed(&output)))
        })
    }

    /// The program.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its version.
    pub fn version(&self) -> Version {
        self.version
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { major, minor, patch } = self;
        write!(f, "{major}.{minor}")?;
        if *patch > 0 { write!(f, ".{patch}") } else { Ok(()) }
    }
}

/// The first executable file of that name in the directories of `path`.
pub(crate) fn find_in_path(name: &str, path: &OsStr) -> Option<PathBuf> {
    std::env::split_paths(path)
        .map(|dir| dir.join(name))
        .find(|candidate| is_executable(candidate))
}

fn is_executable(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

fn run(path: &Path, arguments: &[&str]) -> Result<Output, CriuError> {
    Command::new(path)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .map_err(|source| CriuError::Start {
            path: path.to_owned(),
            source,
        })
}

fn printed(output: &Output) -> String {
    let both = [output.stdout.as_slice(), output.stderr.as_slice()].concat();
    String::from_utf8_lossy(&both)
        .lines()
        .map(str::trim)
        .collect::<Vec<_>>()
        .join(" / ")
}

/// What was printed last, of lines that [`printed`] has joined.
fn last_words(printed: &str) -> String {
    printed.rsplit(" / ").next().unwrap_or_default().to_owned()
}

/// Reads `Version: 4.2.1` (`criu/crtools.c`, `print_version`).
fn parse_version(text: &str) -> Option<Version> {
    let line = text.lines().find_map(|line| line.strip_prefix("Version:"))?;
    let mut numbers = line.trim().split(|c: char| !c.is_ascii_digit()).map(str::parse);
    let major = numbers.next()?.ok()?;
    let mut next = || numbers.next().and_then(Result::ok).unwrap_or(0);
    Some(Version {
        major,
        minor: next(),
        patch: next(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_criu_prints_them() {
        let read = |text: &str| parse_version(text).map(|version| version.to_string());
        assert_eq!(read("Version: 4.2.1\nGitID: v4.2.1\n").as_deref(), Some("4.2.1"));
        assert_eq!(read("Version: 4.2\n").as_deref(), Some("4.2"));
        assert_eq!(read("Version: 3.17.1-2+deb12u2\n").as_deref(), Some("3.17.1"));
        assert_eq!(read("criu: not found\n"), None);
        assert!(parse_version("Version: 4.10").unwrap() > OLDEST);
        assert!(parse_version("Version: 4.1.1").unwrap() < OLDEST);
    }

    #[test]
    fn a_program_that_is_not_criu_is_refused_with_what_it_said() {
        let error = Criu::open(Path::new("/bin/true")).unwrap_err();
        assert!(matches!(error, CriuError::NoVersion { .. }), "{error}");
        let error = Criu::open(Path::new("/nonexistent/criu")).unwrap_err();
        assert!(matches!(error, CriuError::Start { .. }), "{error}");
    }
}
