//! The initial RAM disk: what a kernel needs to find this machine's files, and the program that is pid 1.
//!
//! It is cached by its content: the key is a hash of everything that goes in, so a rebuilt program or another kernel
//! makes another image, and several runs may build, use and clear the cache at the same time.

use crate::cpio::Archive;
use crate::error::{Error, Result};
use crate::kernel::Kernel;
use serde::Serialize;
use std::ffi::OsStr;
use std::fs;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

/// What the guest needs before it sees the root: the rest of the modules it finds there.
const MODULES: &[&str] = &["9pnet_virtio", "9p", "overlay", "virtio_net"];
/// In the image: the modules, named so that they sort as they load.
pub(crate) const MODULES_DIR: &str = "modules";
/// Names another folder for the cache.
const CACHE_VARIABLE: &str = "VERBATIM_CACHE_DIR";
/// Images that nobody has used for so long are removed when another one is built.
const KEEP: Duration = Duration::from_secs(7 * 24 * 3600);
/// Part of the key: changes when the same inputs give another image.
const FORMAT: u32 = 1;

/// A kernel and an initial RAM disk, ready to boot.
#[derive(Clone, Debug, Serialize)]
pub struct Image {
    /// The kernel.
    pub kernel: PathBuf,
    /// The kernel's release.
    pub release: String,
    /// The folder that belongs at `/lib/modules`.
    pub modules: PathBuf,
    /// The initial RAM disk.
    pub initrd: PathBuf,
    /// Whether it had to be built.
    pub built: bool,
}

/// A file of the image: its path there, and its content.
struct Part {
    path: String,
    content: Vec<u8>,
}

/// What is in an image that has all that its machine needs: nothing of this machine's is seen there.
#[derive(Clone, Copy, Debug)]
pub struct Contents<'a> {
    /// Pid 1, a script for one.
    pub init: &'a [u8],
    /// Programs of this machine, by their names in `/bin`; their shared libraries come along.
    pub programs: &'a [(&'a str, PathBuf)],
    /// Other files, which are there where they are here.
    pub files: &'a [&'a Path],
    /// The kernel's modules, with what they need; they lie in `/modules`, named so that they sort as they load.
    pub modules: &'a [&'a str],
}

impl Image {
    /// The image with `kernel` and, as pid 1, `program`, whose `main` begins with [`crate::run_role`].
    pub fn of(kernel: &Kernel, program: &Path) -> Result<Self> {
        Self::with(kernel, &parts(kernel, program)?)
    }

    /// The image with `kernel` and these contents.
    pub fn holding(kernel: &Kernel, contents: &Contents<'_>) -> Result<Self> {
        let mut parts = vec![Part {
            path: "init".to_owned(),
            content: contents.init.to_owned(),
        }];
        let mut take = |from: &Path, path: String| {
            let is_new = !parts.iter().any(|part| part.path == path);
            if is_new {
                parts.push(part(path, from)?);
            }
            Ok::<(), Error>(())
        };
        let inside = |path: &Path| path.to_string_lossy().trim_start_matches('/').to_owned();
        for (name, program) in contents.programs {
            take(program, format!("bin/{name}"))?;
            for library in libraries(program)? {
                take(&library, inside(&library))?;
            }
        }
        for file in contents.files {
            take(file, inside(file))?;
        }
        parts.extend(modules(kernel, contents.modules)?);
        Self::with(kernel, &parts)
    }

    fn with(kernel: &Kernel, parts: &[Part]) -> Result<Self> {
        let dir = cache_dir();
        let initrd = dir.join(format!("{}.cpio", key(kernel, parts)));
        // Also keeps it from being cleared.
        let built = fs::File::options()
            .write(true)
            .open(&initrd)
            .and_then(|file| file.set_modified(SystemTime::now()))
            .is_err();
        if built {
            build(&dir, &initrd, parts)?;
        }
        Ok(Self {
            kernel: kernel.image(),
            release: kernel.release().to_owned(),
            modules: kernel.modules_root(),
            initrd,
            built,
        })
    }
}

fn parts(kernel: &Kernel, program: &Path) -> Result<Vec<Part>> {
    let mut parts = vec![part("init".to_owned(), program)?];
    for library in libraries(program)? {
        parts.push(part(
            library.to_string_lossy().trim_start_matches('/').to_owned(),
            &library,
        )?);
    }
    parts.extend(modules(kernel, MODULES)?);
    Ok(parts)
}

/// Modules, in the order in which they load.
fn modules(kernel: &Kernel, names: &[&str]) -> Result<Vec<Part>> {
    let modules = kernel.load_order(names)?.into_iter().enumerate();
    let parts = modules.map(|(number, module)| {
        let name = module
            .file_name()
            .unwrap_or(OsStr::new("module"))
            .to_string_lossy();
        part(format!("{MODULES_DIR}/{number:02}-{name}"), &module)
    });
    parts.collect()
}

fn part(path: String, from: &Path) -> Result<Part> {
    let content = fs::read(from).map_err(Error::file("read", from))?;
    Ok(Part { path, content })
}

fn key(kernel: &Kernel, parts: &[Part]) -> String {
    let mut hasher = blake3::Hasher::new();
    let mut add = |bytes: &[u8]| {
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    };
    add(&FORMAT.to_le_bytes());
    add(kernel.release().as_bytes());
    for part in parts {
        add(part.path.as_bytes());
        add(&part.content);
    }
    hasher.finalize().to_hex()[..32].to_owned()
}

/// Builds the image aside, and moves it to its place: two that do so at once write the same.
fn build(dir: &Path, initrd: &Path, parts: &[Part]) -> Result<()> {
    fs::create_dir_all(dir).map_err(Error::file("make the cache", dir))?;
    clear(dir);
    let file = tempfile::Builder::new()
        .prefix(".building-")
        .tempfile_in(dir)
        .map_err(Error::file("write to the cache", dir))?;
    let write = || {
        let mut archive = Archive::new(BufWriter::new(file.as_file()));
        for folder in ["dev", "proc", "sys", "root", "lower", "layer"] {
            archive.directory(folder)?;
        }
        for part in parts {
            archive.file(&part.path, &part.content)?;
        }
        archive.finish().map(drop)
    };
    write().map_err(Error::file("write", file.path()))?;
    file.persist(initrd)
        .map_err(|error| Error::file("write", initrd)(error.error))?;
    Ok(())
}

/// Removes what nobody has used for long, as far as that is possible: it is only a cache.
fn clear(dir: &Path) {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    for entry in entries {
        let age = entry
            .metadata()
            .and_then(|data| data.modified())
            .ok()
            .and_then(|time| time.elapsed().ok());
        if age.is_some_and(|age| age > KEEP) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// `$VERBATIM_CACHE_DIR`, else the user's cache, else the system's.
fn cache_dir() -> PathBuf {
    let set = |name: &str| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    set(CACHE_VARIABLE)
        .or_else(|| set("XDG_CACHE_HOME").map(|dir| dir.join("verbatim")))
        .unwrap_or_else(|| PathBuf::from("/var/cache/verbatim"))
        .join("images")
}

/// The shared libraries of `program`, its loader among them, as ldd(1) finds them.
fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd")
        .arg(program)
        .output()
        .map_err(Error::io("run ldd (package libc-bin)"))?;
    if !output.status.success() {
        return Err(Error::Command {
            command: format!("ldd {}", program.display()),
            output: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        });
    }
    Ok(parse_ldd(&String::from_utf8_lossy(&output.stdout)))
}

fn parse_ldd(text: &str) -> Vec<PathBuf> {
    let paths = text.lines().filter_map(|line| {
        let line = line.split_once("=>").map_or(line, |(_, found)| found);
        line.split_ascii_whitespace()
            .next()
            .filter(|path| path.starts_with('/'))
    });
    paths.map(PathBuf::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_and_loader_are_taken_and_the_vdso_is_not() {
        let text = "\tlinux-vdso.so.1 (0x00007ffd)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        assert_eq!(
            parse_ldd(text),
            ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"].map(PathBuf::from)
        );
        assert!(parse_ldd("\tstatically linked\n").is_empty());
    }
}
