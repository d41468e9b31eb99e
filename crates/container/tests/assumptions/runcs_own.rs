//! What runc does to a container that somebody else has frozen, and what it leaves when it is killed.

use verbatim_container::{CgroupVersion, Fact, Status};

use crate::world::{World, name, runs};

pub fn a_frozen_container(world: &mut World) {
    let place = world.start();
    let (tasks, runc) = (world.a.tasks(&name()), world.a.host.runc());
    let still = |what: &str| {
        assert!(!runs(&place), "{what}");
        assert_eq!(world.fact(&world.a), Fact::Frozen, "{what}");
    };
    world.runtime.block_on(tasks.freeze()).unwrap();
    let state = world.runtime.block_on(runc.state(&name())).unwrap().unwrap();
    assert_eq!(state.status, Status::Paused);
    still("runc state");
    let exec = world
        .runtime
        .block_on(runc.exec(&name(), &["/bin/true".to_owned()]))
        .unwrap();
    assert!(!exec.success(), "nothing is added to a frozen container");
    still("runc exec");
    world.runtime.block_on(runc.delete(&name(), false)).unwrap_err();
    still("runc delete");
    world.runtime.block_on(runc.kill(&name(), libc::SIGTERM)).unwrap();
    still("runc kill TERM");
    // Whether other tasks run until the first one's end has killed them is the kernel's business: that the freezer is off is
    // enough not to let runc do it.
    world.runtime.block_on(runc.kill(&name(), libc::SIGKILL)).unwrap();
    let cgroup = std::fs::read_to_string(world.a.host.state().join("runc/web/state.json")).unwrap();
    let state: serde_json::Value = serde_json::from_str(&cgroup).unwrap();
    if world.version == CgroupVersion::V1 {
        let path = format!(
            "{}/freezer.state",
            state["cgroup_paths"]["freezer"].as_str().unwrap()
        );
        assert_eq!(std::fs::read_to_string(path).unwrap(), "THAWED\n");
    } else {
        let path = format!("{}/cgroup.freeze", state["cgroup_paths"][""].as_str().unwrap());
        assert_eq!(std::fs::read_to_string(path).unwrap(), "0\n");
    }
    world.stop(&world.a, place);
}

/// A runc that is killed in the middle of a restore leaves the container's root file system mounted in its own state, without a
/// `state.json`. To forget such a container it removes all that is below.
pub fn a_killed_runcs_mount_is_not_followed(world: &mut World) {
    let users = std::path::Path::new("/run/users-root");
    std::fs::create_dir_all(users).unwrap();
    std::fs::write(users.join("file"), "the user's").unwrap();
    let left = world.a.host.state().join("runc/web");
    let root = left.join("criu-root");
    std::fs::create_dir_all(&root).unwrap();
    rustix::mount::mount_bind(users, &root).unwrap();
    assert!(root.join("file").exists());
    world
        .runtime
        .block_on(world.a.host.runc().delete(&name(), true))
        .unwrap();
    assert_eq!(std::fs::read_to_string(users.join("file")).unwrap(), "the user's");
    assert!(!left.exists(), "the name is free again");
}
