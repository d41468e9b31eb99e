//! What a container's processes have open and mapped, in one number: whether a dump has been tried with the same.

use std::collections::BTreeSet;
use std::collections::hash_map::DefaultHasher;
use std::ffi::OsString;
use std::fs;
use std::hash::{Hash, Hasher};
use std::io;
use std::path::Path;

use crate::check::processes_of;
use crate::fdinfo::line;

/// How much of a container CRIU has to write down, beside memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Size {
    /// Processes.
    pub processes: usize,
    /// Threads of all of them, the first ones included.
    pub threads: usize,
}

/// A number of the processes, descriptors, kinds of mappings and namespaces of the container with this first process, and its size. It is
/// another one when one of them is another one. Addresses and lengths of mappings are no part of it, since memory grows all the time, nor which
/// socket or pipe a descriptor is: a deep check itself gives programs new ones.
pub fn fingerprint(init_pid: i32) -> io::Result<(u64, Size)> {
    let (mut hasher, mut size) = (DefaultHasher::new(), Size::default());
    for (pid, process) in processes_of(init_pid)? {
        size.processes += 1;
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let threads = line(&status, "Threads:").and_then(|count| count.parse().ok());
        size.threads += threads.unwrap_or(1);
        (pid, &process.command, of_process(pid)).hash(&mut hasher);
    }
    Ok((hasher.finish(), size))
}

fn of_process(pid: i32) -> u64 {
    let mut hasher = DefaultHasher::new();
    links(Path::new(&format!("/proc/{pid}/fd"))).hash(&mut hasher);
    links(Path::new(&format!("/proc/{pid}/ns"))).hash(&mut hasher);
    let maps = fs::read(format!("/proc/{pid}/maps")).unwrap_or_default();
    kinds(&String::from_utf8_lossy(&maps)).hash(&mut hasher);
    hasher.finish()
}

/// The links of a folder by their names, sockets and pipes without their numbers. Those of a process that ends while we look are none.
fn links(folder: &Path) -> BTreeSet<(OsString, OsString)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let links = entries.filter_map(|entry| {
        let target = fs::read_link(entry.path()).ok()?.into_os_string();
        let kind = ["socket:[", "pipe:["].into_iter().find(|kind| {
            let target = target.as_encoded_bytes();
            target.starts_with(kind.as_bytes())
        });
        Some((entry.file_name(), kind.map_or(target, OsString::from)))
    });
    links.collect()
}

/// Rights and files of the lines of a `maps`.
fn kinds(maps: &str) -> BTreeSet<(&str, &str)> {
    let lines = maps.lines().filter_map(|line| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let rights = fields.next()?;
        Some((rights, fields.nth(3).unwrap_or_default()))
    });
    lines.collect()
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn it_changes_with_descriptors_and_not_with_time() {
        let program = "while read line; do eval \"$line\"; echo done; done";
        let mut child = Command::new("sh")
            .args(["-c", program])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let pid = child.id() as i32;
        let (mut orders, answers) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut answers = BufReader::new(answers);
        let mut then = |order: &str| {
            writeln!(orders, "{order}").unwrap();
            answers.read_line(&mut String::new()).unwrap();
            of_process(pid)
        };
        let (first, second) = (then(":"), then(":"));
        let opened = then("exec 7</dev/null");
        let closed = then("exec 7<&-");
        let (_, size) = fingerprint(pid).unwrap();
        drop((orders, answers));
        child.wait().unwrap();
        assert_eq!(first, second);
        assert_ne!(second, opened);
        assert_eq!(second, closed);
        assert!(size.processes >= 2 && size.threads >= size.processes, "{size:?}");
    }

    #[test]
    fn a_heap_that_grows_is_the_same_and_another_file_is_not() {
        let one = "5500-5600 rw-p 00000000 00:00 0 [heap]\n7000-7100 r-xp 00000000 08:01 5 /lib/x.so\n";
        let grown = "5500-9900 rw-p 00000000 00:00 0 [heap]\n7000-7100 r-xp 00000000 08:01 5 /lib/x.so\n";
        let other = "5500-5600 rw-p 00000000 00:00 0 [heap]\n7000-7100 r-xs 00000000 08:01 5 /dev/x\n";
        assert_eq!(kinds(one), kinds(grown));
        assert_ne!(kinds(one), kinds(other));
        assert_eq!(
            kinds("7000-7100 rw-p 00000000 00:00 0\n"),
            BTreeSet::from([("rw-p", "")])
        );
    }
}
