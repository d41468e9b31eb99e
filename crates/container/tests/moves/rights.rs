//! What root in a container can do outside of it: nothing, before a move and after it.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::Ordering::SeqCst;

use verbatim_container::{Bind, Link, Workload};

use crate::stories::{move_to, name, stop};
use crate::support::host::{Place, TestHost, copy_images, copy_runtime, program};

/// Tries, as root in the container, what root on the host can do, and writes down what was allowed. Nothing changes on the
/// host even if all of it is: values are written that are there already, and what acts when written to is only opened.
const TRY: &str = r#"
exec >/run/verbatim/answers 2>/run/verbatim/errors
try() {
    what=$1
    shift
    if ("$@"); then echo "$what: allowed"; else echo "$what: refused"; fi
}
write_same() { value=$(cat "$1") && printf '%s' "$value" >"$1"; }
open_to_write() { exec 3>>"$1"; }
has_bytes() { [ "$(head -c 1 "$1" | wc -c)" -gt 0 ]; }
has_entries() { [ -n "$(ls -A "$1")" ]; }
in_user_namespace() { unshare --user --map-root-user --mount --pid --fork "$@"; }
try "write core_pattern" write_same /proc/sys/kernel/core_pattern
try "write a sysctl of the network" write_same /proc/sys/net/ipv4/ip_default_ttl
try "write an interrupt's affinity" write_same /proc/irq/default_smp_affinity
try "open sysrq-trigger" open_to_write /proc/sysrq-trigger
try "open a setting in sysfs" open_to_write /sys/kernel/mm/ksm/run
try "read kcore" has_bytes /proc/kcore
try "read timer_list" has_bytes /proc/timer_list
try "read interrupts" has_bytes /proc/interrupts
try "look into firmware" has_entries /sys/firmware
try "remount" mount -o remount,bind,rw /proc/sys
try "unmount" umount /proc/sys
try "unmount a mask" umount /proc/timer_list
try "mount a proc" mount -t proc proc /tmp
try "make a device" mknod /tmp/device c 1 3
try "remount in a user namespace" in_user_namespace mount -o remount,bind,rw /proc/sys
try "unmount in a user namespace" in_user_namespace umount /proc/sys
try "unmount a mask in a user namespace" in_user_namespace umount /proc/timer_list
try "mount a proc in a user namespace" in_user_namespace mount -t proc proc /tmp
try "mount a sysfs in a user namespace" in_user_namespace unshare --net mount -t sysfs -o rw sysfs /tmp
try "mount its cgroup in a user namespace" in_user_namespace unshare --cgroup mount -t cgroup2 cgroup2 /tmp
try "find the keyring of the host's root" /run/verbatim/program keyring
try "look below the mounts in a user namespace" in_user_namespace mount --bind /proc /tmp
echo "done: all"
"#;

/// How many things [`TRY`] tries.
const TRIES: usize = 22;

/// What the container's root was answered: what was tried, and whether that was allowed.
async fn answers(host: &TestHost, place: &Place) -> BTreeMap<String, String> {
    let shell = ["/bin/sh", "-c", TRY].map(str::to_owned);
    host.host.runc().exec(&name(), &shell).await.unwrap();
    let text = std::fs::read_to_string(place.runtime.join("answers")).unwrap();
    let mut answers: BTreeMap<String, String> = text
        .lines()
        .map(|line| line.split_once(": ").unwrap())
        .map(|(what, answer)| (what.to_owned(), answer.to_owned()))
        .collect();
    assert_eq!(answers.remove("done").as_deref(), Some("all"), "{text}");
    assert_eq!(answers.len(), TRIES, "{text}");
    answers
}

/// What root in the container may do of what it must not.
async fn allowed(host: &TestHost, place: &Place) -> Vec<String> {
    let answers = answers(host, place).await.into_iter();
    answers
        .filter(|(_, answer)| answer != "refused")
        .map(|(what, _)| what)
        .collect()
}

/// Root in the container can do nothing of all that but `wanted`.
pub async fn assert_allowed(host: &TestHost, place: &Place, wanted: &[&str]) {
    let allowed = allowed(host, place).await;
    let errors = std::fs::read_to_string(place.runtime.join("errors")).unwrap_or_default();
    assert_eq!(allowed, wanted, "errors: {errors}");
}

/// Root in the container can do nothing of all that.
async fn assert_nobody_outside(host: &TestHost, place: &Place) {
    assert_allowed(host, place, &[]).await;
}

/// A command sees none of the sockets in the host's `/run`, whether or not that is a part of the root file system.
async fn assert_run_is_its_own(host: &TestHost, place: &Place) {
    let list = ["/bin/sh", "-c", "ls -A /run >/run/verbatim/listed"].map(str::to_owned);
    host.host.runc().exec(&name(), &list).await.unwrap();
    let listed = std::fs::read_to_string(place.runtime.join("listed")).unwrap();
    assert_eq!(listed, "verbatim\n");
}

/// A program that lies in the host's `/run` is shown to the command that is to run it, and moves.
pub async fn a_program_in_run_is_shown_to_its_command() {
    let (a, b) = (TestHost::new("a").await, TestHost::new("b").await);
    let path = Path::new("/run/tools/program");
    std::fs::create_dir_all("/run/tools").unwrap();
    std::fs::copy(std::env::current_exe().unwrap(), path).unwrap();
    let mut args = program();
    args[0] = path.to_str().unwrap().to_owned();
    let workload = Workload::Command {
        args,
        env: Vec::new(),
        cwd: "/".into(),
        binds: vec![Bind {
            path: path.to_owned(),
            writable: false,
        }],
    };
    let place = a.make_place_for(&name(), Link::Attached, &workload);
    a.host.runc().run(&name(), place.bundle.path()).await.unwrap();
    place.assert_alive();
    let next = b.make_place_for(&name(), Link::Detached, &workload);
    let (there, _) = move_to(&a, &place, &b, next).await;
    a.clear_place(place);
    stop(&b, there).await;
}

/// The part of [`TRY`] that asks for the keyring of user 0; succeeds if it is found.
pub fn keyring() -> ExitCode {
    const KEYCTL_GET_KEYRING_ID: libc::c_long = 0;
    const KEY_SPEC_USER_KEYRING: libc::c_long = -4;
    // SAFETY: this operation takes numbers and no pointers (`man 2 keyctl`).
    let found = unsafe { libc::syscall(libc::SYS_keyctl, KEYCTL_GET_KEYRING_ID, KEY_SPEC_USER_KEYRING, 0) };
    ExitCode::from(u8::from(found < 0))
}

/// The rights of the container's first process, as the kernel tells them.
async fn rights(host: &TestHost) -> Vec<String> {
    let state = host.host.runc().state(&name()).await.unwrap().unwrap();
    let status = std::fs::read_to_string(format!("/proc/{}/status", state.pid)).unwrap();
    let rights = status.lines().filter(|line| {
        ["Cap", "NoNewPrivs", "Seccomp:", "Uid", "Gid"]
            .iter()
            .any(|field| line.starts_with(field))
    });
    rights.map(str::to_owned).collect()
}

pub async fn its_root_is_nobody_outside() {
    let (a, b) = (TestHost::new("a").await, TestHost::new("b").await);
    let place = a.make_place(&name(), Link::Attached);
    a.host.runc().run(&name(), place.bundle.path()).await.unwrap();
    place.assert_alive();
    assert_nobody_outside(&a, &place).await;
    assert_run_is_its_own(&a, &place).await;
    let before = rights(&a).await;

    let next = b.make_place(&name(), Link::Detached);
    let (there, _) = move_to(&a, &place, &b, next).await;
    a.clear_place(place);
    assert_nobody_outside(&b, &there).await;
    assert_run_is_its_own(&b, &there).await;
    assert_eq!(rights(&b).await, before);

    // What a destination has put in place is left out and put in place again like the rest.
    let next = a.make_place(&name(), Link::Detached);
    let (back, _) = move_to(&b, &there, &a, next).await;
    b.clear_place(there);
    assert_nobody_outside(&a, &back).await;
    stop(&a, back).await;
}

/// The kernel of one host has files that another's lacks: stood for by a source that leaves some of them as they are.
pub async fn what_only_the_destination_has_is_guarded_too() {
    let (a, b) = (TestHost::new("a").await, TestHost::new("b").await);
    let place = a.make_place(&name(), Link::Attached);
    leave_as_it_is(&place, "readonlyPaths", "/proc/irq");
    leave_as_it_is(&place, "maskedPaths", "/proc/interrupts");
    a.host.runc().run(&name(), place.bundle.path()).await.unwrap();
    place.assert_alive();
    let open = ["read interrupts", "write an interrupt's affinity"];
    assert_allowed(&a, &place, &open).await;

    let next = b.make_place(&name(), Link::Detached);
    let (there, _) = move_to(&a, &place, &b, next).await;
    a.clear_place(place);
    assert_nobody_outside(&b, &there).await;
    stop(&b, there).await;
}

/// What cannot be guarded at the destination does not run there, and goes on at the source.
pub async fn what_cannot_be_guarded_does_not_run() {
    let (a, b) = (TestHost::new("a").await, TestHost::new("b").await);
    let place = a.make_place(&name(), Link::Attached);
    a.host.runc().run(&name(), place.bundle.path()).await.unwrap();
    place.assert_alive();
    let next = b.make_place(&name(), Link::Detached);
    let checkpoint = a.checkpoint(&name()).await;
    let restore = b.restore(&name(), &next).await;
    // runc has read it by now.
    std::fs::write(next.bundle.path().join("config.json"), "{").unwrap();
    let dumped = checkpoint.freeze_and_dump().await.unwrap();
    copy_images(&a.images(&name()), &b.images(&name()));
    copy_runtime(&place, &next);
    let ticks = next.board().ticks.load(SeqCst);
    let error = restore.restore().await.unwrap_err().to_string();
    assert!(error.contains("config.json"), "{error}");
    assert_eq!(next.board().ticks.load(SeqCst), ticks, "it ran");
    assert_eq!(b.host.runc().state(&name()).await.unwrap(), None);
    dumped.abort().await.unwrap();
    place.assert_alive();
    b.clear_place(next);
    stop(&a, place).await;
}

/// Takes a path out of a list of the bundle's configuration.
fn leave_as_it_is(place: &Place, list: &str, path: &str) {
    let file = place.bundle.path().join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let paths = config["linux"][list].as_array_mut().unwrap();
    let before = paths.len();
    paths.retain(|listed| listed != path);
    assert_eq!(paths.len(), before - 1);
    std::fs::write(&file, config.to_string()).unwrap();
}
