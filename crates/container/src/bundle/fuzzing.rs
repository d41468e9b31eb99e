//! A user's `config.json`, for the fuzz targets.

use std::path::Path;

use serde_json::Value;

use super::{BundleConfig, fields, masks, spec, submounts};
use crate::name::ContainerName;

/// Whatever is accepted can be made ours, and is then what it must be.
pub fn bundle_config(text: &str) {
    let Ok(users) = spec::parse(text, Path::new("config.json")) else {
        return;
    };
    let config = BundleConfig {
        name: ContainerName::new("web").expect("a good name"),
        dir: "/b".into(),
        runtime: "/r".into(),
        netns: "/n".into(),
        cgroup_parent: "/c".into(),
        preload: None,
        rnics: Vec::new(),
        devices: Vec::new(),
        folders: Vec::new(),
    };
    let _ = (fields::refusal(&users), fields::notes(&users));
    let users = submounts::expanded(Path::new("/user"), users)
        .expect("the mounts of this machine have names in UTF-8");
    let (rootfs, dev) = (Path::new("/b/rootfs"), Path::new("/b/dev"));
    let ours = spec::for_bundle(&config, Path::new("/user"), rootfs, dev, &[], users)
        .expect("what was accepted can be changed");
    assert_eq!(ours["process"]["terminal"], false);
    assert_eq!(ours["linux"]["cgroupsPath"], "/c/web");
    let rules = ours.pointer("/linux/resources/devices").and_then(Value::as_array);
    assert!(rules.is_some_and(|rules| rules.iter().any(|rule| rule["allow"] == false)));
    for (list, paths) in masks::LISTS {
        let listed = ours["linux"][list].as_array().expect("it is a list now");
        assert!(
            paths
                .iter()
                .all(|path| listed.iter().any(|theirs| theirs == path))
        );
    }
    assert!(ours["linux"]["seccomp"].is_object());
    let args = ours.pointer("/process/args").and_then(Value::as_array);
    assert!(args.is_some_and(|args| !args.is_empty() && args.iter().all(Value::is_string)));
}
