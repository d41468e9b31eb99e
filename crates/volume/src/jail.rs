//! What a volume daemon gives up before it has a second thread. docs/security.md has the table.
//!
//! The processes that it starts, keepers and those that ask for a block device, are this program and have its jail.

use rustix::thread::CapabilitySet;
use verbatim_jail::{Calls, Capabilities, Paths};

/// From here on this process, and what it starts, does no more than a volume daemon does. What this kernel, or this user, cannot give up is named in the log.
///
/// It keeps its user's paths: data may lie anywhere, and landlock lets nobody open a file of a file system that is mounted nowhere, as that of a block
/// device is.
pub fn enter() {
    let steps = [
        (
            "may execute any program",
            Paths::none_executed().and_own_program().keep().map(drop),
        ),
        ("keeps all rights of its user", capabilities().keep()),
        (
            "keeps all system calls",
            calls().keep().map_err(std::io::Error::other),
        ),
    ];
    for (kept, result) in steps {
        if let Err(error) = result {
            tracing::warn!("the volume daemon {kept}: {error}");
        }
    }
}

/// - `CAP_SYS_ADMIN`: a FUSE connection, loop devices, freezing a file system.
/// - `CAP_MKNOD`: the node of a loop device where nobody makes it.
/// - `CAP_SYS_RESOURCE`: the reserve of memory of whoever writes for the kernel, descriptors, keepers that are not killed for memory.
/// - `CAP_SYS_NICE`: threads in the background that come to the front for a moment.
/// - `CAP_IPC_LOCK`: memory that is registered with an RNIC.
/// - `CAP_DAC_OVERRIDE`, `CAP_DAC_READ_SEARCH`, `CAP_FOWNER`: data in folders and devices of other users.
/// - `CAP_NET_BIND_SERVICE`: a port below 1024, if it is asked for one.
fn capabilities() -> Capabilities {
    [
        CapabilitySet::SYS_ADMIN,
        CapabilitySet::MKNOD,
        CapabilitySet::SYS_RESOURCE,
        CapabilitySet::SYS_NICE,
        CapabilitySet::IPC_LOCK,
        CapabilitySet::DAC_OVERRIDE,
        CapabilitySet::DAC_READ_SEARCH,
        CapabilitySet::FOWNER,
        CapabilitySet::NET_BIND_SERVICE,
    ]
    .into_iter()
    .fold(Capabilities::none(), Capabilities::and)
}

/// All but those that reach other processes, namespaces, mounts, or the kernel itself. A list of those that stay would have to name what each RNIC's
/// library may call, too.
fn calls() -> Calls {
    Calls::all_but(&[
        libc::SYS_ptrace,
        libc::SYS_process_vm_readv,
        libc::SYS_process_vm_writev,
        libc::SYS_process_madvise,
        libc::SYS_pidfd_getfd,
        libc::SYS_kcmp,
        libc::SYS_mount,
        libc::SYS_umount2,
        libc::SYS_move_mount,
        libc::SYS_open_tree,
        libc::SYS_pivot_root,
        libc::SYS_chroot,
        libc::SYS_setns,
        libc::SYS_unshare,
        libc::SYS_setuid,
        libc::SYS_setgid,
        libc::SYS_setreuid,
        libc::SYS_setregid,
        libc::SYS_setresuid,
        libc::SYS_setresgid,
        libc::SYS_setgroups,
        libc::SYS_init_module,
        libc::SYS_finit_module,
        libc::SYS_delete_module,
        libc::SYS_kexec_load,
        libc::SYS_kexec_file_load,
        libc::SYS_reboot,
        libc::SYS_swapon,
        libc::SYS_swapoff,
        libc::SYS_sethostname,
        libc::SYS_settimeofday,
        libc::SYS_clock_settime,
        libc::SYS_adjtimex,
        libc::SYS_clock_adjtime,
        libc::SYS_acct,
        libc::SYS_quotactl,
        libc::SYS_syslog,
        libc::SYS_bpf,
        libc::SYS_perf_event_open,
        libc::SYS_userfaultfd,
        libc::SYS_fanotify_init,
        libc::SYS_add_key,
        libc::SYS_keyctl,
        libc::SYS_request_key,
        libc::SYS_open_by_handle_at,
        libc::SYS_io_uring_setup,
    ])
}
