//! What a user's configuration asks for and an instance does not get: refused by the field's name, or said.
//!
//! A bundle is judged when it is run, and not when its instance arrives elsewhere: what runs already goes on. What is neither
//! refused nor said here is kept as it is (`docs/what-moves.md` has the list).

use serde_json::Value;

use super::device;

/// The namespaces that every instance has for itself.
const OWN: [&str; 5] = ["pid", "mount", "ipc", "uts", "network"];

/// Folders below `/dev` for which an instance has mounts of its own, in the place of a bundle's.
const OWN_BELOW_DEV: [&str; 3] = ["/dev/pts", "/dev/shm", "/dev/mqueue"];

/// The reason why an instance cannot be what this configuration asks for, if there is one.
pub(super) fn refusal(spec: &Value) -> Option<String> {
    let linux = &spec["linux"];
    for namespace in list(&linux["namespaces"]) {
        let kind = text(&namespace["type"]);
        match kind {
            "user" => return Some(user_namespace("linux.namespaces has one of type user")),
            "time" => {
                return Some(
                    "linux.namespaces has one of type time: an instance's clocks are set where it arrives, so that they go on; remove it"
                        .to_owned(),
                );
            }
            "network" | "cgroup" | "pid" | "mount" | "ipc" | "uts" => {}
            other => {
                return Some(format!(
                    "linux.namespaces has one of type {other:?}, which instances do not have"
                ));
            }
        }
        if kind != "network" && !text(&namespace["path"]).is_empty() {
            return Some(format!(
                "linux.namespaces joins the {kind} namespace at {}: what several containers share cannot move with one of them; \
                 remove the path",
                text(&namespace["path"])
            ));
        }
    }
    for field in ["uidMappings", "gidMappings"] {
        if is_given(&linux[field]) {
            return Some(user_namespace(&format!("linux.{field} maps ids")));
        }
    }
    for (field, why) in [
        (
            "timeOffsets",
            "an instance's clocks are set where it arrives, so that they go on",
        ),
        ("intelRdt", "it would be lost where the instance arrives"),
        ("netDevices", "a network device of this host's cannot move"),
    ] {
        if is_given(&linux[field]) {
            return Some(format!("it has linux.{field}: {why}; remove it"));
        }
    }
    for field in ["ioPriority", "execCPUAffinity"] {
        if is_given(&spec["process"][field]) {
            return Some(format!(
                "it has process.{field}, which would be lost where the instance arrives; remove it"
            ));
        }
    }
    seccomp(&linux["seccomp"])
        .or_else(|| devices(linux))
        .or_else(|| below_dev(spec))
}

fn user_namespace(found: &str) -> String {
    format!(
        "{found}: CRIU cannot restore a user namespace in a network that waits for it, and without one the container's root would be \
         root of this host; run it with ids of this host's (process.user), and remove the mappings and the namespace"
    )
}

/// A filter that asks a process outside of the container.
fn seccomp(filter: &Value) -> Option<String> {
    let is_notify = |action: &Value| *action == "SCMP_ACT_NOTIFY";
    let asks = is_given(&filter["listenerPath"])
        || is_notify(&filter["defaultAction"])
        || list(&filter["syscalls"]).any(|rule| is_notify(&rule["action"]));
    asks.then(|| {
        "linux.seccomp asks a process outside of the container (SCMP_ACT_NOTIFY, listenerPath), which would not come along; \
         use SCMP_ACT_ERRNO"
            .to_owned()
    })
}

/// A device that an instance does not have.
fn devices(linux: &Value) -> Option<String> {
    let lacking = list(&linux["devices"]).find(|node| {
        let path = text(&node["path"]);
        !device::has(path.as_ref()) && path != "/dev/ptmx" && path != "/dev/console"
    })?;
    Some(format!(
        "linux.devices has {}: an instance has only what every host has (/dev/null, zero, full, random, urandom, tty and terminals), and \
         its RNICs (`--rnic`); remove it",
        text(&lacking["path"])
    ))
}

/// A mount that an instance's own `/dev` would hide.
fn below_dev(spec: &Value) -> Option<String> {
    let hidden = list(&spec["mounts"]).find(|mount| {
        let path = text(&mount["destination"]);
        let path = path.strip_suffix('/').unwrap_or(path);
        path.starts_with("/dev/") && !OWN_BELOW_DEV.contains(&path)
    })?;
    Some(format!(
        "it mounts something at {}, which the instance's own /dev would hide; mount it elsewhere",
        text(&hidden["destination"])
    ))
}

/// What an instance gets in the place of what this configuration asks for, in words for an operator.
pub(super) fn notes(spec: &Value) -> Vec<String> {
    let (linux, mut notes) = (&spec["linux"], Vec::new());
    let has = |kind: &str| list(&linux["namespaces"]).any(|namespace| namespace["type"] == kind);
    let lacking: Vec<_> = OWN.into_iter().filter(|kind| !has(kind)).collect();
    if !lacking.is_empty() {
        notes.push(format!(
            "linux.namespaces leaves out {}: an instance has namespaces of its own all the same",
            lacking.join(", ")
        ));
    }
    for namespace in list(&linux["namespaces"]) {
        let path = text(&namespace["path"]);
        if namespace["type"] == "network" && !path.is_empty() {
            notes.push(format!(
                "the instance has a network of its own, with its own address, and does not join {path} (linux.namespaces)"
            ));
        }
    }
    if has("cgroup") {
        notes.push(
            "the instance has no cgroup namespace (linux.namespaces): it sees the name of its cgroup"
                .to_owned(),
        );
    }
    if is_given(&linux["cgroupsPath"]) {
        notes.push(format!(
            "the instance's cgroup is one of Verbatim's and not {} (linux.cgroupsPath); its limits are kept",
            text(&linux["cgroupsPath"])
        ));
    }
    if list(&spec["process"]["rlimits"]).any(|limit| limit["type"] == "RLIMIT_MEMLOCK") {
        notes.push(
            "RLIMIT_MEMLOCK (process.rlimits) is as high as this host allows, for registered memory"
                .to_owned(),
        );
    }
    if let Some(rule) = list(&linux["resources"]["devices"]).find(|rule| asks_for_more(rule)) {
        notes.push(format!(
            "the instance may use no other devices than its own: the rule {rule} of linux.resources.devices is left out"
        ));
    }
    notes
}

/// Whether a rule allows reading or writing of a device that an instance does not have.
fn asks_for_more(rule: &Value) -> bool {
    let access = rule["access"].as_str().unwrap_or("rwm");
    if rule["allow"] != true || !access.contains(['r', 'w']) {
        return false;
    }
    let number = |field: &str| rule[field].as_u64().and_then(|number| u32::try_from(number).ok());
    match (text(&rule["type"]), number("major"), number("minor")) {
        ("c", Some(major), Some(minor)) => !device::is_every_instances(major, minor),
        ("c", Some(major), None) => !device::are_terminals(major),
        _ => true,
    }
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Whether a field is there and says something.
fn is_given(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Array(values) => !values.is_empty(),
        Value::Object(values) => !values.is_empty(),
        Value::String(text) => !text.is_empty(),
        Value::Bool(_) | Value::Number(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn refused(linux: Value) -> String {
        refusal(&json!({"linux": linux})).unwrap_or_default()
    }

    #[test]
    fn a_user_namespace_is_refused_and_not_dropped() {
        let ids = json!([{"containerID": 0, "hostID": 100_000, "size": 65_536}]);
        for (linux, field) in [
            (
                json!({"namespaces": [{"type": "pid"}, {"type": "user"}]}),
                "linux.namespaces",
            ),
            (json!({"uidMappings": ids}), "linux.uidMappings"),
            (json!({"gidMappings": ids}), "linux.gidMappings"),
        ] {
            let why = refused(linux);
            assert!(why.contains(field) && why.contains("root of this host"), "{why}");
        }
        assert_eq!(refused(json!({"uidMappings": [], "gidMappings": null})), "");
    }

    #[test]
    fn what_would_be_lost_is_refused_by_its_name() {
        for (linux, field) in [
            (json!({"namespaces": [{"type": "time"}]}), "type time"),
            (
                json!({"namespaces": [{"type": "ipc", "path": "/proc/9/ns/ipc"}]}),
                "/proc/9/ns/ipc",
            ),
            (json!({"namespaces": [{"type": "cats"}]}), "cats"),
            (
                json!({"timeOffsets": {"monotonic": {"secs": 5}}}),
                "linux.timeOffsets",
            ),
            (json!({"intelRdt": {"closID": "a"}}), "linux.intelRdt"),
            (json!({"netDevices": {"eth9": {}}}), "linux.netDevices"),
            (
                json!({"seccomp": {"syscalls": [{"action": "SCMP_ACT_NOTIFY"}]}}),
                "SCMP_ACT_NOTIFY",
            ),
            (json!({"seccomp": {"listenerPath": "/run/x"}}), "listenerPath"),
            (
                json!({"devices": [{"path": "/dev/null"}, {"path": "/dev/fuse"}]}),
                "/dev/fuse",
            ),
        ] {
            let why = refused(linux);
            assert!(why.contains(field), "{field}: {why}");
        }
        let process = refusal(&json!({"process": {"ioPriority": {"class": "IOPRIO_CLASS_IDLE"}}})).unwrap();
        assert!(process.contains("process.ioPriority"), "{process}");
        let mount =
            refusal(&json!({"mounts": [{"destination": "/dev/shm"}, {"destination": "/dev/log"}]})).unwrap();
        assert!(mount.contains("/dev/log"), "{mount}");
    }

    #[test]
    fn what_is_replaced_is_said() {
        let spec = json!({
            "process": {"rlimits": [{"type": "RLIMIT_MEMLOCK", "hard": 1, "soft": 1}]},
            "linux": {
                "namespaces": [{"type": "pid"}, {"type": "mount"}, {"type": "ipc"}, {"type": "cgroup"},
                               {"type": "network", "path": "/run/netns/pod"}],
                "cgroupsPath": "/machine/x",
                "resources": {"devices": [{"allow": false, "access": "rwm"},
                                          {"allow": true, "type": "c", "major": 10, "minor": 229, "access": "rw"}]},
            },
        });
        assert_eq!(refusal(&spec), None);
        let notes = notes(&spec).join("\n");
        for said in [
            "leaves out uts:",
            "/run/netns/pod",
            "cgroup namespace",
            "/machine/x",
            "RLIMIT_MEMLOCK",
            "229",
        ] {
            assert!(notes.contains(said), "{said}: {notes}");
        }
    }

    #[test]
    fn what_runc_and_engines_write_by_themselves_is_neither() {
        let namespaces: Vec<_> = OWN.iter().map(|kind| json!({"type": kind})).collect();
        let rule = |major: u32, minor: Option<u32>, access: &str| {
            let mut rule = json!({"allow": true, "type": "c", "major": major, "access": access});
            if let Some(minor) = minor {
                rule["minor"] = minor.into();
            }
            rule
        };
        let spec = json!({
            "process": {"terminal": false, "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 1024, "soft": 1024}]},
            "mounts": [{"destination": "/dev"}, {"destination": "/dev/pts"}, {"destination": "/dev/mqueue"}],
            "linux": {
                "namespaces": namespaces,
                "resources": {"devices": [{"allow": false, "access": "rwm"}, rule(1, Some(3), "rwm"), rule(5, Some(2), "rwm"),
                                          rule(136, None, "rwm"), {"allow": true, "type": "c", "access": "m"}]},
            },
        });
        assert_eq!(refusal(&spec), None);
        assert_eq!(notes(&spec), Vec::<String>::new());
    }
}
