//! More of a busy processor.
//!
//! A NIC does not wait for the programs that use it. A software one does, if it is one process among others on a machine
//! with few cores: programs poll, and each of them looks as busy to the scheduler as the RNIC that they wait for.

/// As an agent's; programs have 0.
const NICE: i32 = -10;

/// Asks the scheduler to prefer this process. Without the right to do so nothing changes.
pub fn raise() {
    // With `CONFIG_SCHED_AUTOGROUP` a nice value counts among the processes of a session only, and each session has one
    // against the others (sched(7)). The leader of a process group, which a shell has started, keeps its terminal.
    let _ = rustix::process::setsid();
    let own_session = rustix::process::getsid(None) == Ok(rustix::process::getpid());
    let autogroup = "/proc/self/autogroup";
    if own_session && std::path::Path::new(autogroup).exists() {
        // It may be read-only in a container.
        let _ = std::fs::write(autogroup, NICE.to_string());
    }
    if let Err(errno) = rustix::process::setpriority_process(None, NICE) {
        tracing::info!("the software RNIC runs with ordinary priority ({errno}): slower on busy machines");
    }
}
