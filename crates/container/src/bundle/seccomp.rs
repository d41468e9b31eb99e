//! The system calls that a container is refused although they ask for no right that it lacks: they reach, by the number of a
//! user, what no namespace of the container separates.
//!
//! Everything else is allowed, for the capabilities guard it. A filter costs each system call some 20 ns; CRIU takes it along.

use serde_json::{Value, json};

/// `CLONE_NEWUSER` (`linux/sched.h`), in the first argument of both calls on the machines that are supported.
const NEW_USER_NAMESPACE: u64 = 0x1000_0000;

/// The `linux.seccomp` object of a configuration (OCI runtime specification, `config-linux.md`).
///
/// - Keys: root's keyrings are one and the same for every root of a host, and hold what its services log in with.
/// - User namespaces: with all rights in one of its own, a container's root mounts its cgroup, whose files are root's, and
///   lifts its limits. `clone3` keeps its flags in memory, where a filter cannot look; without it, C libraries use `clone`.
pub(super) fn profile() -> Value {
    let new_user_namespace = json!({
        "index": 0, "op": "SCMP_CMP_MASKED_EQ", "value": NEW_USER_NAMESPACE, "valueTwo": NEW_USER_NAMESPACE,
    });
    json!({
        "defaultAction": "SCMP_ACT_ALLOW",
        "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
        "syscalls": [
            refuse(&["add_key", "keyctl", "request_key"], libc::EPERM, &[]),
            refuse(&["clone", "unshare"], libc::EPERM, &[new_user_namespace]),
            refuse(&["clone3"], libc::ENOSYS, &[]),
        ],
    })
}

fn refuse(names: &[&str], errno: i32, args: &[Value]) -> Value {
    json!({"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": errno, "args": args})
}
