//! Whether what CRIU does not keep of a container finds room, known before anything stands still.

use std::collections::HashSet;
use std::fs;
use std::os::fd::AsFd;

use super::fresh::Fresh;
use super::options::Options;
use super::{At, MAX_BYTES, MAX_THINGS, Task, tasks_of};

/// Up to so many sockets have room, whatever they have: fewer bytes are in a name, a value and what is around them than in 4 KiB.
const SURE: usize = (MAX_BYTES / 4096) as usize;

/// What something else takes in the file at most: a timer, a counter, a thread with a list of processors.
const OTHER_BYTES: u64 = 1024;

/// Why that much has no room, if it has none.
pub(super) fn lack(things: usize, bytes: u64) -> Option<String> {
    (things > MAX_THINGS || bytes > MAX_BYTES).then(|| {
        format!(
            "it has {things} sockets, timers and threads of which CRIU does not keep all, in {} MiB; {MAX_THINGS} in {} MiB can be moved: \
             have the program close some, or set fewer options (setsockopt)",
            bytes.div_ceil(1 << 20),
            MAX_BYTES >> 20
        )
    })
}

/// Why what is kept of the container with this first process has no room, if that is so now. Its tasks may run: what is gone meanwhile takes
/// none.
///
/// Counting is cheap. Only where there are many sockets is each of them asked.
pub(crate) fn lack_of_room(init: i32) -> anyhow::Result<Option<String>> {
    let tasks = tasks_of(init)?;
    let (mut sockets, mut others, mut seen) = (Vec::new(), 0, HashSet::new());
    for (at, task) in tasks.iter().enumerate() {
        let entries = fs::read_dir(format!("/proc/{}/fd", task.pid));
        for entry in entries.into_iter().flatten().flatten() {
            let Ok(target) = fs::read_link(entry.path()) else {
                continue;
            };
            let target = target.to_string_lossy().into_owned();
            match target.as_str() {
                "anon_inode:[timerfd]" | "anon_inode:[eventfd]" => others += 1,
                socket if socket.starts_with("socket:") => {
                    let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
                    sockets.extend(number.filter(|_| seen.insert(target)).map(|number| (at, number)));
                }
                _ => {}
            }
        }
        others += fs::read_dir(format!("/proc/{}/task", task.pid)).map_or(0, Iterator::count);
    }
    let beside = others as u64 * OTHER_BYTES;
    if sockets.len() <= SURE && sockets.len() + others <= MAX_THINGS && beside <= MAX_BYTES / 2 {
        return Ok(None);
    }
    let mut fresh = Fresh::of_process(init);
    let (mut things, mut bytes) = (others, beside);
    for (at, number) in sockets {
        if let Some(taken) = bytes_of(&tasks[at], number, &mut fresh) {
            things += 1;
            bytes += taken;
        }
    }
    Ok(lack(things, bytes))
}

/// What a socket takes in the file; `None` if nothing.
fn bytes_of(task: &Task, descriptor: i32, fresh: &mut Fresh) -> Option<u64> {
    let socket = task.duplicate(descriptor).ok()?;
    let what = Options::read(socket.as_fd(), fresh).ok()??;
    let at = At {
        process: task.inner,
        descriptor,
        what,
    };
    Some(serde_json::to_vec(&at).ok()?.len() as u64 + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kept::{Kept, unaccepted::Connection};

    #[test]
    fn many_sockets_with_an_option_each_have_room_and_one_more_than_the_limit_has_not() {
        let at = |descriptor| At {
            process: 1,
            descriptor,
            what: serde_json::from_str(
                r#"[["TCP_CONGESTION",[99,117,98,105,99]],["TCP_USER_TIMEOUT",[57,48,0,0]]]"#,
            )
            .unwrap(),
        };
        let images = tempfile::tempdir().unwrap();
        let mut kept = Kept {
            sockets: (0..MAX_THINGS as i32).map(at).collect(),
            ..Kept::default()
        };
        kept.write(images.path()).unwrap();
        assert_eq!(Kept::of(images.path()).unwrap().things(), MAX_THINGS);
        kept.lost.push(Connection {
            local: "10.0.0.1:80".parse().unwrap(),
            remote: "10.0.0.2:4000".parse().unwrap(),
        });
        let error = kept.write(images.path()).unwrap_err().to_string();
        assert!(error.contains("262145 sockets, timers and threads"), "{error}");
        assert!(lack(1, MAX_BYTES).is_none() && lack(1, MAX_BYTES + 1).is_some());
    }

    #[test]
    fn a_small_process_has_room() {
        assert_eq!(lack_of_room(std::process::id() as i32).unwrap(), None);
    }
}
