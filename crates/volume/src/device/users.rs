//! Users of a block device of this machine, which would lose their disk with it.
//!
//! An exclusive user of a block device (`open(2)`, `O_EXCL`) is visible as such: mounted file systems, swap,
//! the device mapper, md. A loop device on it does not claim it, but names its backing file. The users' names
//! are looked up for the operator.

use std::fs;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The first user that is found.
pub fn of(device: &Path) -> Option<String> {
    let number = fs::metadata(device).ok()?.rdev();
    if let Some(user) = loop_device_on(device, number).or_else(|| holder(number)) {
        return Some(user);
    }
    if !is_claimed(device) {
        return None;
    }
    let named = mounted(number).or_else(|| is_swap(device).then(|| "as swap".to_owned()));
    Some(named.unwrap_or_else(|| "and something has it for itself".to_owned()))
}

fn is_claimed(device: &Path) -> bool {
    let exclusive = fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_EXCL)
        .open(device);
    matches!(exclusive, Err(error) if error.raw_os_error() == Some(libc::EBUSY))
}

fn numbers(number: u64) -> (u32, u32) {
    (rustix::fs::major(number), rustix::fs::minor(number))
}

/// A loop device on this device, by any name of its backing file.
fn loop_device_on(device: &Path, number: u64) -> Option<String> {
    for entry in fs::read_dir("/sys/block").ok()?.filter_map(Result::ok) {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Ok(file) = fs::read_to_string(entry.path().join("loop/backing_file")) else {
            continue;
        };
        let file = PathBuf::from(file.trim_end_matches('\n'));
        // Another block device at the same path has another number.
        let is_it = fs::metadata(&file).map_or(file == device, |file| file.rdev() == number);
        if is_it {
            let path = Path::new("/dev").join(&name);
            let user = fs::metadata(&path).ok().and_then(|on_it| mounted(on_it.rdev()));
            let user = user.map(|user| format!(", {user}")).unwrap_or_default();
            return Some(format!("on which {} is{user}", path.display()));
        }
    }
    None
}

/// A device of the device mapper, md or the like.
fn holder(number: u64) -> Option<String> {
    let (major, minor) = numbers(number);
    let holders = fs::read_dir(format!("/sys/dev/block/{major}:{minor}/holders")).ok()?;
    let holder = holders.filter_map(Result::ok).next()?.file_name();
    let name = fs::read_to_string(Path::new("/sys/block").join(&holder).join("dm/name"));
    let name = name.map(|name| format!(" ({})", name.trim())).unwrap_or_default();
    Some(format!("on which {}{name} is", holder.to_string_lossy()))
}

/// The mount point of the device, in this mount namespace or in another process's.
fn mounted(number: u64) -> Option<String> {
    if let Some(place) = place(&fs::read_to_string("/proc/self/mountinfo").ok()?, number) {
        return Some(format!("mounted on {place}"));
    }
    let mut seen = Vec::new();
    for process in fs::read_dir("/proc").ok()?.filter_map(Result::ok) {
        let name = process.file_name().to_string_lossy().into_owned();
        if name.parse::<u32>().is_err() {
            continue;
        }
        // Most processes share a namespace with another one.
        let Ok(namespace) = fs::read_link(process.path().join("ns/mnt")) else {
            continue;
        };
        if seen.contains(&namespace) {
            continue;
        }
        seen.push(namespace);
        let table = fs::read_to_string(process.path().join("mountinfo"));
        if let Some(place) = table.ok().and_then(|table| place(&table, number)) {
            return Some(format!("mounted on {place} for the process {name}"));
        }
    }
    None
}

/// The fifth field of the line with that device (proc_pid_mountinfo(5)).
fn place(table: &str, number: u64) -> Option<String> {
    let (major, minor) = numbers(number);
    let wanted = format!("{major}:{minor}");
    let mut lines = table.lines().map(|line| line.split(' '));
    let mut fields = lines.find(|fields| fields.clone().nth(2) == Some(wanted.as_str()))?;
    fields.nth(4).map(str::to_owned)
}

fn is_swap(device: &Path) -> bool {
    let table = fs::read_to_string("/proc/swaps").unwrap_or_default();
    let mut paths = table.lines().filter_map(|line| line.split_whitespace().next());
    paths.any(|path| Path::new(path) == device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_a_device_is_mounted_is_read() {
        let table = "29 1 253:0 / / rw - ext4 /dev/vda rw\n31 29 7:3 / /srv rw,nosuid - ext4 /dev/loop3 rw\n";
        assert_eq!(place(table, rustix::fs::makedev(7, 3)).as_deref(), Some("/srv"));
        assert_eq!(place(table, rustix::fs::makedev(7, 31)), None);
    }

    #[test]
    fn a_device_that_is_not_there_has_no_user() {
        assert_eq!(of(Path::new("/dev/no-such-device")), None);
    }
}
