//! Where everything is.

use std::ffi::OsString;
use std::path::PathBuf;

/// Paths of one restore. All are absolute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// CRIU's images: `pagemap-VPID.img` and `mm-VPID.img` are read when a task's descriptor comes.
    pub images: PathBuf,
    /// Folder of the cache: one sparse file for each task, named by its number in its own PID namespace; offsets are addresses
    /// at the time of the dump. A page of zeros is written, too: a hole is a page that is missing. What has been filled is
    /// punched out of it. It should be on a tmpfs: other file systems have no files of this length.
    pub cache: PathBuf,
    /// Folder in which `lazy-pages.socket` is made: CRIU's work directory.
    pub work: PathBuf,
    /// Path of the control socket. `PATH.filled` stands beside it once all is filled.
    pub control: PathBuf,
    /// File to which the processes append what they have to say.
    pub log: PathBuf,
}

impl Config {
    /// As a helper process gets it.
    pub fn arguments(&self) -> [OsString; 5] {
        [&self.images, &self.cache, &self.work, &self.control, &self.log]
            .map(|path| path.clone().into_os_string())
    }

    /// What a helper process got, its name first.
    pub fn parse(mut arguments: impl Iterator<Item = OsString>) -> Option<Self> {
        let mut next = || arguments.next().map(PathBuf::from);
        next()?;
        Some(Self {
            images: next()?,
            cache: next()?,
            work: next()?,
            control: next()?,
            log: next()?,
        })
    }

    /// The socket that CRIU connects to.
    pub fn lazy_pages_socket(&self) -> PathBuf {
        self.work.join("lazy-pages.socket")
    }

    /// The mark beside the control socket.
    pub fn filled_mark(control: &std::path::Path) -> PathBuf {
        let mut name = control.as_os_str().to_owned();
        name.push(".filled");
        name.into()
    }
}
