//! Waits that are under way when their program is frozen.

use std::time::Duration;

use anyhow::{Context, ensure};
use verbatim_e2e::{TestLab, eventually};

use crate::Test;

const HOSTS: &[&str] = &["src", "dst"];
const LIMIT: Duration = Duration::from_secs(30);
/// errno(3)
const ETIMEDOUT: i32 = 110;
const PYTHON: &str = "/usr/bin/python3";

/// All of them.
pub fn tests() -> Vec<Test> {
    vec![Test::new(
        "sleeps::a_move_ends_no_wait_early",
        HOSTS,
        a_move_ends_no_wait_early,
    )]
}

/// Each of these functions of the C library, as C calls it, for 8 seconds in a thread of its own: a line with its name, what it
/// returned, errno, and how long it took.
const PROGRAM: &str = r#"
import ctypes, os, select, threading, time
library = ctypes.CDLL(None, use_errno=True)
epoll = select.epoll()
room = ctypes.create_string_buffer(64)
ms = 8000

class Time(ctypes.Structure):
    _fields_ = [('s', ctypes.c_long), ('fraction', ctypes.c_long)]

def cond():
    end = Time(int(time.time()) + 9, 0)
    mutex, condition = ctypes.create_string_buffer(64), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    return library.pthread_cond_timedwait(condition, mutex, ctypes.byref(end))

def mutex():
    end = Time(int(time.time()) + 9, 0)
    mutex = ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    return library.pthread_mutex_timedlock(mutex, ctypes.byref(end))

def sem():
    end = Time(int(time.time()) + 9, 0)
    return library.sem_timedwait(ctypes.create_string_buffer(64), ctypes.byref(end))

def sem_clock():
    end = Time(int(time.monotonic()) + 9, 0)
    return library.sem_clockwait(ctypes.create_string_buffer(64), 1, ctypes.byref(end))

waits = {
    'sleep': lambda: library.sleep(8),
    'usleep': lambda: library.usleep(ms * 1000),
    'nanosleep': lambda: library.nanosleep(ctypes.byref(Time(8, 0)), None),
    'clock_nanosleep': lambda: library.clock_nanosleep(1, 0, ctypes.byref(Time(8, 0)), None),
    'poll': lambda: library.poll(None, 0, ms),
    'ppoll': lambda: library.ppoll(None, 0, ctypes.byref(Time(8, 0)), None),
    'select': lambda: library.select(0, None, None, None, ctypes.byref(Time(8, 0))),
    'pselect': lambda: library.pselect(0, None, None, None, ctypes.byref(Time(8, 0)), None),
    'epoll_wait': lambda: library.epoll_wait(epoll.fileno(), room, 1, ms),
    'epoll_pwait': lambda: library.epoll_pwait(epoll.fileno(), room, 1, ms, None),
    'pthread_cond_timedwait': cond,
    'pthread_mutex_timedlock': mutex,
    'sem_timedwait': sem,
    'sem_clockwait': sem_clock,
}

def run(name):
    began = time.monotonic()
    returned = waits[name]()
    took = time.monotonic() - began
    print(f'{name} {returned} {ctypes.get_errno()} {took:.3f}\n', end='', flush=True)

threads = [threading.Thread(target=run, args=(name,)) for name in waits]
for thread in threads:
    thread.start()
print('waiting', flush=True)
for thread in threads:
    thread.join()
"#;

fn a_move_ends_no_wait_early(lab: &TestLab) -> anyhow::Result<()> {
    let instance = lab.instance("src", "waits", &[PYTHON, "-u", "-c", PROGRAM])?;
    eventually("the program's first line", LIMIT, || {
        Ok(instance.output()?.contains("waiting").then_some(()))
    })?;
    instance.moves("dst")?;
    let output = instance.succeed(LIMIT)?.stdout;
    let ended = |name: &str| -> anyhow::Result<(i32, i32, f64)> {
        let line = output
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        let words: Vec<&str> = line.with_context(|| format!("no {name}"))?.split(' ').collect();
        ensure!(words.len() == 3, "{words:?}");
        Ok((words[0].parse()?, words[1].parse()?, words[2].parse()?))
    };
    let waits = [
        ("sleep", 0),
        ("usleep", 0),
        ("nanosleep", 0),
        ("clock_nanosleep", 0),
        ("poll", 0),
        ("ppoll", 0),
        ("select", 0),
        ("pselect", 0),
        ("epoll_wait", 0),
        ("epoll_pwait", 0),
        ("pthread_cond_timedwait", ETIMEDOUT),
        ("pthread_mutex_timedlock", ETIMEDOUT),
        ("sem_timedwait", -1),
        ("sem_clockwait", -1),
    ];
    for (name, expected) in waits {
        let (returned, errno, took) = ended(name).with_context(|| output.clone())?;
        ensure!(
            expected != -1 || errno == ETIMEDOUT,
            "{name} failed with {errno}:\n{output}"
        );
        ensure!(returned == expected, "{name} returned {returned}:\n{output}");
        ensure!(took >= 7.99, "{name} took {took} s:\n{output}");
    }
    Ok(())
}
