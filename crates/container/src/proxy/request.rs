//! The messages of CRIU's RPC that the proxy reads or changes (`images/rpc.proto`).

use std::fs::File;
use std::os::fd::AsRawFd;

use anyhow::Context;

use super::wire::{self, Malformed, Number};
use crate::gate::{Kind, STOP_LIMIT_VARIABLE};

/// Fields of `criu_req`.
mod req {
    use super::Number;
    pub const TYPE: Number = 1;
    pub const OPTS: Number = 2;
    pub const NOTIFY_SUCCESS: Number = 3;
    pub const KEEP_OPEN: Number = 4;
}

/// Fields of `criu_resp` and of `criu_notify` within it.
mod resp {
    use super::Number;
    pub const TYPE: Number = 1;
    pub const SUCCESS: Number = 2;
    pub const NOTIFY: Number = 5;
    pub const CR_ERRNO: Number = 7;
    pub const CR_ERRMSG: Number = 9;
    pub const NOTIFY_SCRIPT: Number = 1;
    pub const NOTIFY_PID: Number = 2;
}

/// Fields of `criu_opts`.
mod opts {
    use super::Number;
    pub const IMAGES_DIR_FD: Number = 1;
    pub const LOG_LEVEL: Number = 9;
    pub const WORK_DIR_FD: Number = 17;
    pub const LINK_REMAP: Number = 18;
    pub const CG_ROOT: Number = 25;
    pub const SKIP_MNT: Number = 31;
    pub const MANAGE_CGROUPS_MODE: Number = 34;
    pub const GHOST_LIMIT: Number = 35;
    pub const EXTERNAL: Number = 37;
    pub const FREEZE_CGROUP: Number = 44;
    pub const TIMEOUT: Number = 45;
    pub const TCP_SKIP_IN_FLIGHT: Number = 46;
    pub const LAZY_PAGES: Number = 48;
    pub const STATUS_FD: Number = 49;
    pub const CONFIG_FILE: Number = 51;
    pub const NETWORK_LOCK: Number = 64;
}

/// Values of `criu_req_type`.
mod kind {
    pub const DUMP: u64 = 1;
    pub const RESTORE: u64 = 2;
    pub const PRE_DUMP: u64 = 4;
    pub const NOTIFY: u64 = 6;
    pub const VERSION: u64 = 10;
}

/// `criu_cg_mode`: leave cgroups alone. runc has put CRIU, and with it the restored tasks, into the right ones.
const CG_MODE_IGNORE: u64 = 0;
/// `criu_network_lock_method`: the agent holds the instance's traffic back itself.
const NETWORK_LOCK_SKIP: u64 = 3;
/// Errors and warnings. runc asks for debug output, some thousand lines of it, written during the blackout.
const LOG_LEVEL_WARNINGS: u64 = 2;
/// Overrides [`LOG_LEVEL_WARNINGS`], for a look into a blackout.
const LOG_LEVEL_VARIABLE: &str = "VERBATIM_CRIU_LOG_LEVEL";

/// Which operation a request asks for, if it is one that the gate knows.
pub(super) fn operation(request: &[u8]) -> Result<Option<Kind>, Malformed> {
    Ok(match wire::find_varint(request, req::TYPE)? {
        Some(kind::DUMP) => Some(Kind::Dump),
        Some(kind::PRE_DUMP) => Some(Kind::PreDump),
        Some(kind::RESTORE) => Some(Kind::Restore),
        _ => None,
    })
}

/// A request that CRIU answers as soon as it is up, and after which it takes another one.
pub(super) fn are_you_there() -> Vec<u8> {
    let mut message = Vec::new();
    wire::put_varint(&mut message, req::TYPE, kind::VERSION);
    wire::put_varint(&mut message, req::KEEP_OPEN, 1);
    message
}

/// The refusal of a notification.
pub(super) fn refusal() -> Vec<u8> {
    notification_answer(false)
}

/// The confirmation of a notification.
pub(super) fn acceptance() -> Vec<u8> {
    notification_answer(true)
}

/// Whether an answer to a notification lets CRIU go on.
pub(super) fn accepts(answer: &[u8]) -> Result<bool, Malformed> {
    Ok(wire::find_varint(answer, req::NOTIFY_SUCCESS)? == Some(1))
}

fn notification_answer(success: bool) -> Vec<u8> {
    let mut message = Vec::new();
    wire::put_varint(&mut message, req::TYPE, kind::NOTIFY);
    wire::put_varint(&mut message, req::NOTIFY_SUCCESS, success.into());
    message
}

/// Whether runc confirms this notification without doing anything (up to 1.4 at least; `libcontainer/criu_linux.go`,
/// `criuNotifications`): asking it would only cost time in the blackout.
pub(super) fn runc_ignores(script: &str) -> bool {
    [
        "pre-dump",
        "query-ext-files",
        "pre-restore",
        "post-setup-namespaces",
        "pre-resume",
        "post-resume",
    ]
    .contains(&script)
}

/// The answer "it did not work" to runc's request.
pub(super) fn failure(operation: Kind, errno: i32) -> Vec<u8> {
    let mut message = Vec::new();
    let kind = match operation {
        Kind::Dump => kind::DUMP,
        Kind::PreDump => kind::PRE_DUMP,
        Kind::Restore => kind::RESTORE,
    };
    wire::put_varint(&mut message, resp::TYPE, kind);
    wire::put_varint(&mut message, resp::SUCCESS, 0);
    wire::put_varint(&mut message, resp::CR_ERRNO, errno.unsigned_abs().into());
    message
}

/// What CRIU says.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Response {
    /// A moment is reached; CRIU waits for an answer.
    Notify { script: String, pid: Option<i32> },
    /// The last word.
    Final { success: bool, reason: String },
}

/// Reads what CRIU says.
pub(super) fn response(message: &[u8]) -> Result<Response, Malformed> {
    let success = wire::find_varint(message, resp::SUCCESS)?.ok_or(Malformed)? != 0;
    if wire::find_varint(message, resp::TYPE)? == Some(kind::NOTIFY) && success {
        let notify = wire::find_bytes(message, resp::NOTIFY)?.ok_or(Malformed)?;
        let script = wire::find_bytes(notify, resp::NOTIFY_SCRIPT)?.unwrap_or_default();
        let pid = wire::find_varint(notify, resp::NOTIFY_PID)?.and_then(|pid| i32::try_from(pid).ok());
        return Ok(Response::Notify {
            script: String::from_utf8_lossy(script).into_owned(),
            pid,
        });
    }
    let said =
        wire::find_bytes(message, resp::CR_ERRMSG)?.map(|text| String::from_utf8_lossy(text).into_owned());
    let errno = wire::find_varint(message, resp::CR_ERRNO)?.unwrap_or(0);
    let mut reason = String::from("CRIU gave up");
    if let Some(errno) = i32::try_from(errno).ok().filter(|errno| *errno != 0) {
        reason.push_str(&format!(" ({})", std::io::Error::from_raw_os_error(errno)));
    }
    if let Some(said) = said.filter(|said| !said.is_empty()) {
        reason.push_str(&format!(": {}", said.trim()));
    }
    Ok(Response::Final { success, reason })
}

/// A request made ours, and the directories that it names by descriptor, which must stay open as long as CRIU runs.
pub(super) struct Adapted {
    pub message: Vec<u8>,
    /// Where CRIU writes its log.
    pub work: Option<File>,
    pub _directories: Vec<File>,
}

/// What of private memory is in the images.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Private {
    /// All of it.
    InImages,
    /// As little as CRIU can, which looks into this configuration file for whom to serve the rest (see
    /// [`lazy`](super::lazy)).
    LeftOut {
        /// Of a dump.
        configuration: Option<String>,
    },
}

/// Makes runc's request ours: CRIU is to look for its directories among our descriptors, and to leave out what costs
/// time in a blackout and is not needed here. `external` are files that it is to pass over, by its names for them; `skipped` are mounts that
/// it is to pass over beside the masks.
pub(super) fn adapt(
    request: &[u8],
    runc_pid: i32,
    private: &Private,
    external: &[String],
    skipped: &[&str],
) -> anyhow::Result<Adapted> {
    let options = wire::find_bytes(request, req::OPTS)?.context("runc's request has no options")?;
    let mut directories = Vec::new();
    let mut work = None;
    let mut ours = Vec::new();
    for number in [opts::IMAGES_DIR_FD, opts::WORK_DIR_FD, opts::STATUS_FD] {
        // int32 -1, the default, is ten bytes of varint.
        let Some(theirs) = wire::find_varint(options, number)?.and_then(|fd| i32::try_from(fd).ok()) else {
            continue;
        };
        let path = format!("/proc/{runc_pid}/fd/{theirs}");
        let file = File::open(&path).with_context(|| format!("cannot open {path}"))?;
        wire::put_varint(&mut ours, number, file.as_raw_fd().unsigned_abs().into());
        if number == opts::WORK_DIR_FD {
            work = Some(
                file.try_clone()
                    .with_context(|| format!("cannot duplicate {path}"))?,
            );
        }
        directories.push(file);
    }
    wire::put_varint(&mut ours, opts::LOG_LEVEL, log_level());
    wire::put_varint(&mut ours, opts::MANAGE_CGROUPS_MODE, CG_MODE_IGNORE);
    wire::put_varint(&mut ours, opts::NETWORK_LOCK, NETWORK_LOCK_SKIP);
    wire::put_varint(&mut ours, opts::TCP_SKIP_IN_FLIGHT, 1);
    wire::put_varint(&mut ours, opts::GHOST_LIMIT, crate::check::GHOST_LIMIT_BYTES);
    // A file whose name is gone while it has others gets one for the move, `link_remap.N` beside the old one: where it lies on what
    // moves along, the agent carries it (`check::nameless`).
    wire::put_varint(&mut ours, opts::LINK_REMAP, 1);
    if let Some(limit) = stop_limit() {
        wire::put_varint(&mut ours, opts::TIMEOUT, limit);
    }
    if let Private::LeftOut { configuration } = private {
        wire::put_varint(&mut ours, opts::LAZY_PAGES, 1);
        if let Some(path) = configuration {
            wire::put_bytes(&mut ours, opts::CONFIG_FILE, path.as_bytes());
        }
    }
    // They are no part of the images: the destination puts its own in place.
    for path in crate::bundle::masks::MASKED.iter().chain(skipped) {
        wire::put_bytes(&mut ours, opts::SKIP_MNT, path.as_bytes());
    }
    let replaced: Vec<Number> = wire::fields(&ours)
        .map(|field| field.map(|field| field.number))
        .collect::<Result<_, _>>()?;
    // Without a freezer cgroup CRIU stops the tasks by ptrace, at once; with it, it looks every 100 ms
    // (`criu/seize.c`).
    let dropped = [opts::FREEZE_CGROUP, opts::CG_ROOT];
    let mut options = wire::without(options, |number| {
        replaced.contains(&number) || dropped.contains(&number)
    })?;
    options.extend_from_slice(&ours);
    // Beside runc's own.
    for name in external {
        wire::put_bytes(&mut options, opts::EXTERNAL, name.as_bytes());
    }
    let mut message = wire::without(request, |number| number == req::OPTS)?;
    wire::put_bytes(&mut message, req::OPTS, &options);
    Ok(Adapted {
        message,
        work,
        _directories: directories,
    })
}

/// For how many seconds CRIU may try to stop the tasks of a dump, if that is said.
fn stop_limit() -> Option<u64> {
    std::env::var(STOP_LIMIT_VARIABLE).ok()?.parse().ok()
}

fn log_level() -> u64 {
    std::env::var(LOG_LEVEL_VARIABLE)
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(LOG_LEVEL_WARNINGS)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A request as runc makes one.
    fn dump(images: i32) -> Vec<u8> {
        request(kind::DUMP, images)
    }

    fn request(asked: u64, images: i32) -> Vec<u8> {
        let mut options = Vec::new();
        wire::put_varint(&mut options, opts::IMAGES_DIR_FD, images as u64);
        wire::put_varint(&mut options, 2, 4711);
        wire::put_varint(&mut options, opts::LOG_LEVEL, 4);
        wire::put_bytes(&mut options, opts::FREEZE_CGROUP, b"/sys/fs/cgroup/freezer/x");
        wire::put_bytes(&mut options, opts::EXTERNAL, b"mnt[/etc/hosts]");
        wire::put_bytes(&mut options, 999, b"a field of the future");
        let mut message = Vec::new();
        wire::put_varint(&mut message, req::TYPE, asked);
        wire::put_bytes(&mut message, req::OPTS, &options);
        message
    }

    #[test]
    fn a_request_keeps_what_we_do_not_know_and_names_our_descriptors() {
        let directory = File::open("/").unwrap();
        let request = dump(directory.as_raw_fd());
        assert_eq!(operation(&request), Ok(Some(Kind::Dump)));
        let adapted = adapt(&request, std::process::id() as i32, &Private::InImages, &[], &[]).unwrap();
        assert_eq!(operation(&adapted.message), Ok(Some(Kind::Dump)));
        let options = wire::find_bytes(&adapted.message, req::OPTS).unwrap().unwrap();
        assert_eq!(wire::find(options, opts::LAZY_PAGES), Ok(None));
        assert_eq!(wire::find(options, opts::CONFIG_FILE), Ok(None));
        let images = wire::find_varint(options, opts::IMAGES_DIR_FD).unwrap().unwrap();
        assert_ne!(images, directory.as_raw_fd() as u64);
        assert_eq!(
            std::fs::read_link(format!("/proc/self/fd/{images}"))
                .unwrap()
                .as_os_str(),
            "/"
        );
        assert_eq!(wire::find_varint(options, 2), Ok(Some(4711)));
        assert_eq!(
            wire::find_bytes(options, 999),
            Ok(Some(&b"a field of the future"[..]))
        );
        assert_eq!(wire::find(options, opts::FREEZE_CGROUP), Ok(None));
        assert_eq!(
            wire::find_varint(options, opts::NETWORK_LOCK),
            Ok(Some(NETWORK_LOCK_SKIP))
        );
        let count = |number: Number| {
            let fields = wire::fields(options).map(|field| field.unwrap().number);
            fields.filter(|theirs| *theirs == number).count()
        };
        assert_eq!(count(opts::LOG_LEVEL), 1);
        assert_eq!(count(opts::SKIP_MNT), crate::bundle::masks::MASKED.len());
    }

    #[test]
    fn files_that_are_passed_over_are_named_beside_runc_s() {
        let directory = File::open("/").unwrap();
        let request = dump(directory.as_raw_fd());
        let external = ["file[1e:5]".to_owned()];
        let adapted = adapt(
            &request,
            std::process::id() as i32,
            &Private::InImages,
            &external,
            &["/dev/pts"],
        )
        .unwrap();
        let options = wire::find_bytes(&adapted.message, req::OPTS).unwrap().unwrap();
        let named = wire::fields(options).map(|field| field.unwrap());
        let named = named.filter(|field| field.number == opts::EXTERNAL);
        let named: Vec<_> = named.map(|field| field.value).collect();
        let expected = [&b"mnt[/etc/hosts]"[..], b"file[1e:5]"].map(wire::Value::Bytes);
        assert_eq!(named, expected);
        let skipped = wire::fields(options).map(|field| field.unwrap());
        let skipped = skipped.filter(|field| field.number == opts::SKIP_MNT);
        assert!(
            skipped
                .map(|field| field.value)
                .any(|path| path == wire::Value::Bytes(b"/dev/pts"))
        );
    }

    #[test]
    fn a_pre_dump_keeps_its_parent() {
        let directory = File::open("/").unwrap();
        let request = {
            let plain = request(kind::PRE_DUMP, directory.as_raw_fd());
            let mut options = wire::find_bytes(&plain, req::OPTS).unwrap().unwrap().to_vec();
            // parent_img and track_mem of `criu_opts`.
            wire::put_bytes(&mut options, 14, b"../1");
            wire::put_varint(&mut options, 15, 1);
            let mut message = wire::without(&plain, |number| number == req::OPTS).unwrap();
            wire::put_bytes(&mut message, req::OPTS, &options);
            message
        };
        assert_eq!(operation(&request), Ok(Some(Kind::PreDump)));
        let adapted = adapt(&request, std::process::id() as i32, &Private::InImages, &[], &[]).unwrap();
        assert_eq!(operation(&adapted.message), Ok(Some(Kind::PreDump)));
        let options = wire::find_bytes(&adapted.message, req::OPTS).unwrap().unwrap();
        assert_eq!(wire::find_bytes(options, 14), Ok(Some(&b"../1"[..])));
        assert_eq!(wire::find_varint(options, 15), Ok(Some(1)));
    }

    #[test]
    fn a_lazy_request_names_who_is_served() {
        let directory = File::open("/").unwrap();
        let private = Private::LeftOut {
            configuration: Some("/proc/1/fd/9".to_owned()),
        };
        let adapted = adapt(
            &dump(directory.as_raw_fd()),
            std::process::id() as i32,
            &private,
            &[],
            &[],
        )
        .unwrap();
        let options = wire::find_bytes(&adapted.message, req::OPTS).unwrap().unwrap();
        assert_eq!(wire::find_varint(options, opts::LAZY_PAGES), Ok(Some(1)));
        assert_eq!(
            wire::find_bytes(options, opts::CONFIG_FILE),
            Ok(Some(&b"/proc/1/fd/9"[..]))
        );
    }

    #[test]
    fn responses_are_told_apart() {
        let mut notify = Vec::new();
        wire::put_bytes(&mut notify, resp::NOTIFY_SCRIPT, b"post-restore");
        wire::put_varint(&mut notify, resp::NOTIFY_PID, 42);
        let mut message = Vec::new();
        wire::put_varint(&mut message, resp::TYPE, kind::NOTIFY);
        wire::put_varint(&mut message, resp::SUCCESS, 1);
        wire::put_bytes(&mut message, resp::NOTIFY, &notify);
        let expected = Response::Notify {
            script: "post-restore".to_owned(),
            pid: Some(42),
        };
        assert_eq!(response(&message), Ok(expected));
        let Ok(Response::Final {
            success: false,
            reason,
        }) = response(&failure(Kind::Dump, libc::ECANCELED))
        else {
            panic!("a failure is a last word");
        };
        assert!(reason.contains("canceled"), "{reason}");
        assert_eq!(operation(&are_you_there()), Ok(None));
        assert_eq!(accepts(&acceptance()), Ok(true));
        assert_eq!(accepts(&refusal()), Ok(false));
        assert_eq!(accepts(b""), Ok(false));
    }
}
