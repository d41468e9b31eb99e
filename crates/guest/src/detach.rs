//! A command that is added to a container leaves the process that it was started as (`verbatim exec`).
//!
//! What `runc exec` starts has its parent outside of the container, and CRIU takes a tree of processes: the one below the
//! container's first process. A child whose parent has ended becomes a child of that one (pid_namespaces(7)), so that a fork
//! brings it into the tree. Its session must begin within the tree, too.

use std::ffi::CStr;

/// Set by whoever starts such a command.
const VARIABLE: &CStr = c"VERBATIM_DETACH";

/// What the agent sees of a process that could not leave itself; of one that could, it sees 0.
const NOT_DETACHED: i32 = 125;

/// Run by the loader before the program.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = detach_if_asked;

extern "C" fn detach_if_asked() {
    // SAFETY: the loader runs this on the only thread that there is, so that nobody else reads or changes the environment, and
    // nothing that a fork would leave locked is locked. The names are C strings.
    unsafe {
        if libc::getenv(VARIABLE.as_ptr()).is_null() {
            return;
        }
        libc::unsetenv(VARIABLE.as_ptr());
        match libc::fork() {
            0 if libc::setsid() >= 0 => {}
            0 | -1 => libc::_exit(NOT_DETACHED),
            _ => libc::_exit(0),
        }
    }
}
