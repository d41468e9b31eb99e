//! `config.json` (OCI runtime specification, `config.md` and `config-linux.md`).
//!
//! The user's own file is changed as JSON, field by field: types of ours would drop what they do not know.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::device::Device;
use super::lookup::Inside;
use super::{Bind, BundleConfig, FolderMount, RUNTIME_INSIDE, masks, seccomp};
use crate::error::Error;

/// The rights of a container's root: the set that container engines give, with `CAP_IPC_LOCK` for registered memory, and
/// without `CAP_MKNOD`. No mount that a command may write to takes a device for one, but the runtime folder lies on a file
/// system of the host, where it would be one for everybody.
const CAPABILITIES: [&str; 14] = [
    "CAP_AUDIT_WRITE",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_IPC_LOCK",
    "CAP_KILL",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_RAW",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
];

/// Where programs are looked for, the usual places, if the command's environment does not say.
const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The variable that tells the guest library whose RNICs to show (`docs/backends.md`).
const BACKEND: &str = "VERBATIM_BACKEND=";

/// Where a container has mounts of ours in the place of the user's: what a file system of the container's own would put into
/// the images comes from the runtime folder.
const REPLACED: [&str; 6] = [
    "/dev",
    "/dev/pts",
    "/dev/shm",
    "/dev/mqueue",
    "/sys/fs/cgroup",
    RUNTIME_INSIDE,
];

/// Whether a path of the container lies in one of those.
pub(super) fn is_replaced(inside: &Path) -> bool {
    REPLACED.iter().any(|path| inside.starts_with(path))
}

/// Where a container has a file system of terminals.
pub(crate) const TERMINALS: &str = "/dev/pts";

/// Of that file system: everybody may make a terminal, and the group `tty` may write to others'.
pub(super) const TERMINALS_OPTIONS: [&str; 3] = ["ptmxmode=0666", "mode=0620", "gid=5"];

/// What opens a program's standard streams.
pub(crate) const SHELL: &str = "/bin/sh";

/// Runs its arguments with the standard streams opened inside the container. CRIU refuses to dump a descriptor of a
/// file that is not on one of the container's own mounts, and the file is to move with the runtime folder.
///
/// Whoever has made the FIFO [`STARTED_NAME`](super::STARTED_NAME) hears what becomes of the program. Descriptor 3 is closed for it by
/// a redirection, so that the shell keeps a copy that closes when the program is executed, and has it again when that fails; then
/// dash ends, with its trap, and bash goes on.
const OPEN_STREAMS: &str = r#"exec </dev/null >>/run/verbatim/stdout 2>&1
if [ -n "$VERBATIM_PRELOAD" ]; then
    LD_PRELOAD=$VERBATIM_PRELOAD${LD_PRELOAD:+:$LD_PRELOAD}
    export LD_PRELOAD
    unset VERBATIM_PRELOAD
fi
if [ -p /run/verbatim/started ]; then
    exec 3<>/run/verbatim/started
    trap 'echo failed >&3' EXIT
fi
[ -z "$BASH_VERSION" ] || shopt -s execfail
{ exec "$@"; } 3>&-
exit $?"#;

/// Whether a configuration has its program started by [`OPEN_STREAMS`].
pub(super) fn tells_start(spec: &Value) -> bool {
    spec["process"]["args"][2] == OPEN_STREAMS
}

/// Reads a `config.json`.
pub(super) fn parse(text: &str, file: &Path) -> Result<Value, Error> {
    let refuse = |reason: String| Error::Config {
        path: file.to_owned(),
        reason,
    };
    let spec: Value = serde_json::from_str(text).map_err(|error| refuse(format!("not JSON: {error}")))?;
    let args = spec.pointer("/process/args").and_then(Value::as_array);
    if args.is_none_or(|args| args.is_empty() || !args.iter().all(Value::is_string)) {
        return Err(refuse("it names no process.args to run".to_owned()));
    }
    if spec.pointer("/root/path").is_none_or(|path| !path.is_string()) {
        return Err(refuse("it names no root.path".to_owned()));
    }
    if spec.pointer("/process/terminal") == Some(&Value::Bool(true)) {
        return Err(refuse(
            "a container with a terminal cannot be moved: set process.terminal to false".to_owned(),
        ));
    }
    Ok(spec)
}

/// The configuration of a command over the host's root file system.
#[expect(
    clippy::too_many_arguments,
    reason = "they are the fields of one enum variant"
)]
pub(super) fn for_command(
    config: &BundleConfig,
    rootfs: &Path,
    run: &Path,
    dev: &Path,
    devices: &[Device],
    args: &[String],
    env: &[String],
    cwd: &Path,
    binds: &[Bind],
) -> Result<Value, Error> {
    if args.is_empty() {
        return Err(Error::Config {
            path: config.dir.clone(),
            reason: "no command to run was given".to_owned(),
        });
    }
    let runtime = &config.runtime;
    let mut mounts = vec![
        json!({"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "noexec", "nodev"]}),
        json!({"destination": "/sys", "type": "sysfs", "source": "sysfs",
               "options": ["nosuid", "noexec", "nodev", "ro"]}),
        bind(dev, "/dev", &["nosuid", "noexec", "ro"])?,
        terminals(),
        bind(&runtime.join("shm"), "/dev/shm", &["nosuid", "nodev"])?,
        bind(&runtime.join("tmp"), "/tmp", &["nosuid", "nodev"])?,
        bind(run, "/run", &["nosuid", "nodev", "noexec", "ro"])?,
        bind(runtime, RUNTIME_INSIDE, &["nosuid", "nodev"])?,
    ];
    for part in binds {
        let mode = if part.writable { "rw" } else { "ro" };
        mounts.push(bind(&part.path, text(&part.path)?, &["nosuid", "nodev", mode])?);
    }
    mounts.extend(folders(config)?);
    let cwd = if cwd.is_absolute() && rootfs.join(cwd.strip_prefix("/").unwrap_or(cwd)).is_dir() {
        cwd
    } else {
        Path::new("/")
    };
    let mut spec = json!({
        "ociVersion": "1.0.2",
        "hostname": config.name.as_str(),
        "root": {"path": text(rootfs)?, "readonly": true},
        "process": {
            "terminal": false,
            "user": {"uid": 0, "gid": 0},
            "args": with_streams(args.iter().map(|arg| arg.as_str().into()).collect()),
            "env": environment(config, with_path(env))?,
            "cwd": text(cwd)?,
            "capabilities": capabilities(),
            "rlimits": [memlock()],
        },
        "mounts": mounts,
        "linux": {
            "namespaces": namespaces(config)?,
            "cgroupsPath": text(&config.cgroup_parent.join(&config.name))?,
            "resources": {"devices": device_rules(devices)},
            "seccomp": seccomp::profile(),
        },
    });
    masks::insert(object(&mut spec, "linux"));
    Ok(spec)
}

/// The root file system that a user's configuration names.
pub(super) fn root_of(bundle: &Path, spec: &Value) -> PathBuf {
    bundle.join(spec["root"]["path"].as_str().unwrap_or_default())
}

/// The user's configuration, changed so that the container can be moved. `rootfs` is what its root file system is bound to.
pub(super) fn for_bundle(
    config: &BundleConfig,
    bundle: &Path,
    rootfs: &Path,
    dev: &Path,
    devices: &[Device],
    mut spec: Value,
) -> Result<Value, Error> {
    let has_shell = Inside::of(bundle, &spec).has(SHELL);
    spec["root"]["path"] = text(rootfs)?.into();

    let process = object(&mut spec, "process");
    process.insert("terminal".to_owned(), json!(false));
    let args = array(process, "args");
    let env = array(process, "env");
    process.insert("env".to_owned(), Value::Array(environment(config, env)?));
    // Without a shell, standard output goes to the container's /dev/null: runc sees to that.
    let args = if has_shell { with_streams(args) } else { args };
    process.insert("args".to_owned(), Value::Array(args));
    let mut rlimits = array(process, "rlimits");
    rlimits.retain(|limit| limit["type"] != "RLIMIT_MEMLOCK");
    rlimits.push(memlock());
    process.insert("rlimits".to_owned(), Value::Array(rlimits));

    let mut mounts = array(spec.as_object_mut().expect("`parse` looked into it"), "mounts");
    mounts.retain(|mount| !REPLACED.iter().any(|path| mount["destination"] == *path));
    let runtime = &config.runtime;
    mounts.push(bind(dev, "/dev", &["nosuid", "noexec", "ro"])?);
    mounts.push(terminals());
    mounts.push(bind(&runtime.join("shm"), "/dev/shm", &["nosuid", "nodev"])?);
    mounts.push(bind(runtime, RUNTIME_INSIDE, &["nosuid", "nodev"])?);
    mounts.extend(folders(config)?);
    spec["mounts"] = Value::Array(mounts);

    let linux = object(&mut spec, "linux");
    linux.insert("namespaces".to_owned(), namespaces(config)?);
    let cgroup = config.cgroup_parent.join(&config.name);
    linux.insert("cgroupsPath".to_owned(), text(&cgroup)?.into());
    // Devices are nodes in a `/dev` that is ours now.
    linux.remove("devices");
    masks::insert(linux);
    // Filters of two authors cannot be made one: who brings one has decided what it is to refuse.
    if !linux.get("seccomp").is_some_and(Value::is_object) {
        linux.insert("seccomp".to_owned(), seccomp::profile());
    }
    let resources = object(&mut spec["linux"], "resources");
    let mut rules = array(resources, "devices");
    rules.extend(device_rules(devices));
    resources.insert("devices".to_owned(), Value::Array(rules));
    Ok(spec)
}

fn with_streams(args: Vec<Value>) -> Vec<Value> {
    let mut wrapped: Vec<Value> = [SHELL, "-c", OPEN_STREAMS, "sh"].map(Value::from).into();
    wrapped.extend(args);
    wrapped
}

/// A shell finds programs without `PATH`; programs that start others, such as `mpirun`, do not.
fn with_path(env: &[String]) -> Vec<Value> {
    let has_path = env.iter().any(|variable| variable.starts_with("PATH="));
    let default = (!has_path).then(|| PATH.into());
    let given = env.iter().map(|variable| variable.as_str().into());
    default.into_iter().chain(given).collect()
}

fn environment(config: &BundleConfig, mut env: Vec<Value>) -> Result<Vec<Value>, Error> {
    if let Some(preload) = &config.preload {
        env.push(format!("VERBATIM_PRELOAD={}", text(preload)?).into());
    }
    let chosen = |variable: &Value| variable.as_str().is_some_and(|text| text.starts_with(BACKEND));
    if !config.rnics.is_empty() && !env.iter().any(chosen) {
        env.push(format!("{BACKEND}rdma-core").into());
    }
    Ok(env)
}

fn bind(source: &Path, destination: &str, options: &[&str]) -> Result<Value, Error> {
    let options: Vec<_> = ["bind"].iter().chain(options).collect();
    Ok(json!({"destination": destination, "type": "bind", "source": text(source)?, "options": options}))
}

/// A file system of terminals of the container's own, which CRIU makes again, with the terminals that are open.
fn terminals() -> Value {
    json!({"destination": TERMINALS, "type": "devpts", "source": "devpts",
           "options": ["nosuid", "noexec", "newinstance", TERMINALS_OPTIONS[0], TERMINALS_OPTIONS[1], TERMINALS_OPTIONS[2]]})
}

fn folders(config: &BundleConfig) -> Result<Vec<Value>, Error> {
    let mount = |folder: &FolderMount| {
        let mode = if folder.writable { "rw" } else { "ro" };
        bind(&folder.source, text(&folder.inside)?, &["nosuid", "nodev", mode])
    };
    config.folders.iter().map(mount).collect()
}

fn namespaces(config: &BundleConfig) -> Result<Value, Error> {
    Ok(json!([
        {"type": "pid"}, {"type": "mount"}, {"type": "ipc"}, {"type": "uts"},
        {"type": "network", "path": text(&config.netns)?},
    ]))
}

/// A path as it is written in a configuration, which is JSON and so holds nothing but Unicode.
pub(super) fn text(path: &Path) -> Result<&str, Error> {
    path.to_str().ok_or_else(|| Error::Config {
        path: path.to_owned(),
        reason: format!("{path:?} is not UTF-8, as a container's configuration must be: rename it"),
    })
}

fn capabilities() -> Value {
    json!({"bounding": CAPABILITIES, "effective": CAPABILITIES, "permitted": CAPABILITIES})
}

fn device_rules(devices: &[Device]) -> Vec<Value> {
    let deny = json!({"allow": false, "access": "rwm"});
    let allow = devices.iter().map(|device| {
        let (kind, access) = match device.is_block {
            true => ("b", "rw"),
            false => ("c", "rwm"),
        };
        json!({"allow": true, "type": kind, "major": device.major, "minor": device.minor, "access": access})
    });
    let allow = allow.chain(super::device::terminal_rules());
    std::iter::once(deny).chain(allow).collect()
}

/// As much memory may be locked as we can allow: without `CAP_SYS_RESOURCE` only up to our own hard limit
/// (`man 2 setrlimit`).
fn memlock() -> Value {
    use rustix::process::{Resource, getrlimit, setrlimit};

    let mut limit = getrlimit(Resource::Memlock);
    let all = rustix::process::Rlimit {
        current: limit.current,
        maximum: None,
    };
    if setrlimit(Resource::Memlock, all).is_ok() {
        limit.maximum = None;
    }
    let bytes = limit.maximum.unwrap_or(u64::MAX);
    json!({"type": "RLIMIT_MEMLOCK", "hard": bytes, "soft": bytes})
}

/// The object at `key`, which becomes one if it is not.
fn object<'a>(value: &'a mut Value, key: &str) -> &'a mut Map<String, Value> {
    let field = &mut value[key];
    if !field.is_object() {
        *field = json!({});
    }
    field.as_object_mut().expect("it was just made one")
}

/// Takes the array at `key`, or an empty one.
fn array(map: &mut Map<String, Value>, key: &str) -> Vec<Value> {
    match map.remove(key) {
        Some(Value::Array(values)) => values,
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::name::ContainerName;

    fn config() -> BundleConfig {
        BundleConfig {
            name: ContainerName::new("web").unwrap(),
            dir: "/b".into(),
            runtime: "/run/verbatim/instances/web".into(),
            netns: "/run/netns/web".into(),
            cgroup_parent: "/verbatim-h1".into(),
            preload: Some("/run/verbatim/lib/libverbatim.so".into()),
            rnics: Vec::new(),
            devices: Vec::new(),
            folders: Vec::new(),
        }
    }

    #[test]
    fn a_users_bundle_keeps_what_is_not_in_the_way_of_a_move() {
        let text = r#"{"ociVersion": "1.0.2", "root": {"path": "rootfs"}, "future": {"x": 1},
            "process": {"args": ["serve", "-v"], "env": ["A=b"], "cwd": "/srv",
                        "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 9, "soft": 9}]},
            "mounts": [{"destination": "/dev", "type": "tmpfs"}, {"destination": "/data", "type": "bind"}],
            "linux": {"maskedPaths": ["/proc/kcore", "/opt/hidden"], "resources": {"memory": {"limit": 1}},
                      "seccomp": {"defaultAction": "SCMP_ACT_ALLOW"},
                      "namespaces": [{"type": "network"}, {"type": "cgroup"}]}}"#;
        let spec = parse(text, Path::new("config.json")).unwrap();
        let spec = for_bundle(
            &config(),
            Path::new("/user"),
            Path::new("/b/rootfs"),
            Path::new("/b/dev"),
            &[],
            spec,
        )
        .unwrap();
        assert_eq!(spec["future"]["x"], 1);
        assert_eq!(spec["root"]["path"], "/b/rootfs");
        assert_eq!(
            spec["process"]["args"],
            json!(["serve", "-v"]),
            "no shell there to wrap it with"
        );
        assert_eq!(spec["process"]["cwd"], "/srv");
        assert_eq!(spec["linux"]["resources"]["memory"]["limit"], 1);
        assert_eq!(spec["linux"]["cgroupsPath"], "/verbatim-h1/web");
        assert_guarded(&spec);
        let masked = spec["linux"]["maskedPaths"].as_array().unwrap();
        assert_eq!(
            masked[..2],
            ["/proc/kcore", "/opt/hidden"],
            "what the bundle's author lists stays"
        );
        assert_eq!(
            spec["linux"]["seccomp"],
            json!({"defaultAction": "SCMP_ACT_ALLOW"})
        );
        let mounts = spec["mounts"].as_array().unwrap();
        let at = |path: &str| mounts.iter().find(|mount| mount["destination"] == path).unwrap();
        assert_eq!(at("/dev")["type"], "bind");
        assert_eq!(at(RUNTIME_INSIDE)["source"], "/run/verbatim/instances/web");
        at("/data");
        let place = |path: &str| {
            mounts
                .iter()
                .position(|mount| mount["destination"] == path)
                .unwrap()
        };
        assert!(
            place("/dev") < place("/dev/pts"),
            "one of the container's own, on its /dev"
        );
        assert_eq!(at("/dev/pts")["type"], "devpts");
    }

    /// What tells of the host is hidden, and what sets it is read-only.
    fn assert_guarded(spec: &Value) {
        for (field, ours) in [
            ("maskedPaths", &masks::MASKED[..]),
            ("readonlyPaths", &masks::READ_ONLY),
        ] {
            let listed = spec["linux"][field].as_array().unwrap();
            for path in ours {
                assert_eq!(listed.iter().filter(|theirs| theirs == path).count(), 1, "{path}");
            }
        }
    }

    #[test]
    fn a_bundle_that_cannot_be_moved_is_refused_with_the_reason() {
        let refused = |text: &str| parse(text, Path::new("config.json")).unwrap_err().to_string();
        assert!(refused("{").contains("not JSON"));
        assert!(refused("{}").contains("process.args"));
        assert!(refused(r#"{"process": {"args": ["a"]}}"#).contains("root.path"));
        let terminal = r#"{"process": {"args": ["a"], "terminal": true}, "root": {"path": "r"}}"#;
        assert!(refused(terminal).contains("terminal"));
    }

    #[test]
    fn what_is_of_the_wrong_kind_is_replaced() {
        let text = r#"{"root": {"path": "r"}, "process": {"args": ["a"], "rlimits": 1}, "mounts": "none",
            "linux": {"resources": 5, "seccomp": null, "maskedPaths": "/a", "readonlyPaths": [7]}}"#;
        let spec = parse(text, Path::new("config.json")).unwrap();
        let spec = for_bundle(
            &config(),
            Path::new("/user"),
            Path::new("/b/rootfs"),
            Path::new("/b/dev"),
            &[],
            spec,
        )
        .unwrap();
        assert_guarded(&spec);
        assert_eq!(spec["linux"]["seccomp"], seccomp::profile());
        assert_eq!(
            spec["linux"]["readonlyPaths"].as_array().unwrap().len(),
            masks::READ_ONLY.len()
        );
        assert_eq!(spec["linux"]["resources"]["devices"][0]["allow"], false);
        // An object with the key "0" is no list of arguments.
        let text = r#"{"root": {"path": "r"}, "process": {"args": {"0": "a"}}}"#;
        assert!(parse(text, Path::new("config.json")).is_err());
    }

    #[test]
    fn names_that_are_not_text_are_refused() {
        use std::os::unix::ffi::OsStrExt;

        let odd = Path::new(std::ffi::OsStr::from_bytes(b"/srv/\xff"));
        let (root, dev, args) = (Path::new("/"), Path::new("/b/dev"), ["prog".to_owned()]);
        let refused = |config: &BundleConfig, binds: &[Bind]| {
            let made = for_command(config, root, root, dev, &[], &args, &[], root, binds);
            let error = made.unwrap_err().to_string();
            assert!(error.contains(r"\xFF") && error.contains("UTF-8"), "{error}");
        };
        let bind = Bind {
            path: odd.to_owned(),
            writable: false,
        };
        refused(&config(), &[bind]);
        let odd = || odd.to_owned();
        let (mut runtime, mut netns, mut cgroup, mut preload) = (config(), config(), config(), config());
        runtime.runtime = odd();
        netns.netns = odd();
        cgroup.cgroup_parent = odd();
        preload.preload = Some(odd());
        for changed in [runtime, netns, cgroup, preload] {
            refused(&changed, &[]);
        }
    }

    #[test]
    fn a_container_with_rnics_is_told_and_may_open_them() {
        let with = BundleConfig {
            rnics: vec!["rxe0".to_owned()],
            ..config()
        };
        let backend = |env: &[&str]| {
            let env = env.iter().map(|variable| Value::from(*variable)).collect();
            let env = environment(&with, env).unwrap();
            let own = env.iter().filter_map(Value::as_str);
            own.filter(|variable| variable.starts_with(BACKEND))
                .map(ToOwned::to_owned)
                .collect::<Vec<_>>()
        };
        assert_eq!(backend(&["A=b"]), ["VERBATIM_BACKEND=rdma-core"]);
        assert_eq!(
            backend(&["VERBATIM_BACKEND=auto"]),
            ["VERBATIM_BACKEND=auto"],
            "who chooses has chosen"
        );
        let node = Device {
            name: "infiniband/uverbs3".into(),
            is_block: false,
            major: 231,
            minor: 195,
        };
        let disk = Device {
            name: "mapper/vg-web".into(),
            is_block: true,
            major: 253,
            minor: 4,
        };
        let rules = device_rules(&[node, disk]);
        assert_eq!(rules[0]["allow"], false);
        assert_eq!(
            rules[1],
            json!({"allow": true, "type": "c", "major": 231, "minor": 195, "access": "rwm"})
        );
        assert_eq!(
            rules[2],
            json!({"allow": true, "type": "b", "major": 253, "minor": 4, "access": "rw"})
        );
    }

    #[test]
    fn folders_are_seen_where_they_are_wanted() {
        let with = BundleConfig {
            folders: [
                ("/run/verbatim/disks/web/db", "/srv", true),
                ("/d/log", "/mnt", false),
            ]
            .map(|(source, inside, writable)| FolderMount {
                source: source.into(),
                inside: inside.into(),
                writable,
            })
            .into(),
            ..config()
        };
        let text = r#"{"root": {"path": "rootfs"}, "process": {"args": ["serve"]}}"#;
        let spec = parse(text, Path::new("config.json")).unwrap();
        let spec = for_bundle(
            &with,
            Path::new("/user"),
            Path::new("/b/rootfs"),
            Path::new("/b/dev"),
            &[],
            spec,
        )
        .unwrap();
        let mounts = spec["mounts"].as_array().unwrap();
        let last = &mounts[mounts.len() - 2..];
        assert_eq!(
            last,
            [
                json!({"destination": "/srv", "type": "bind", "source": "/run/verbatim/disks/web/db",
                       "options": ["bind", "nosuid", "nodev", "rw"]}),
                json!({"destination": "/mnt", "type": "bind", "source": "/d/log",
                       "options": ["bind", "nosuid", "nodev", "ro"]}),
            ]
        );
    }

    #[test]
    fn a_command_runs_with_its_streams_opened_inside() {
        let args = ["prog".to_owned(), "a b".to_owned()];
        let spec = |env: &[String]| {
            let (root, dev) = (Path::new("/"), Path::new("/b/dev"));
            for_command(
                &config(),
                root,
                Path::new("/b/run"),
                dev,
                &[],
                &args,
                env,
                Path::new("/nowhere/x"),
                &[],
            )
            .unwrap()
        };
        let with_path = spec(&["A=b".to_owned(), "PATH=/own".to_owned()]);
        let preload = "VERBATIM_PRELOAD=/run/verbatim/lib/libverbatim.so";
        assert_eq!(with_path["process"]["env"], json!(["A=b", "PATH=/own", preload]));
        let spec = spec(&[]);
        assert_guarded(&spec);
        assert_eq!(spec["linux"]["seccomp"], seccomp::profile());
        for right in ["CAP_SYS_ADMIN", "CAP_MKNOD", "CAP_NET_ADMIN"] {
            let sets = spec["process"]["capabilities"].as_object().unwrap().values();
            let mut rights = sets.flat_map(|set| set.as_array().unwrap());
            assert!(rights.all(|theirs| theirs != right), "{right}");
        }
        let args = spec["process"]["args"].as_array().unwrap();
        assert_eq!(args[args.len() - 2..], [json!("prog"), json!("a b")]);
        assert_eq!(spec["process"]["cwd"], "/");
        assert_eq!(spec["process"]["env"], json!([PATH, preload]));
    }
}
