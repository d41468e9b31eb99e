//! What an instance's programs make of their network namespace, on its way to another host.
//!
//! It is read when the tasks stand still, and goes with CRIU's images, as a file of its own. At the destination it is put in place
//! before CRIU makes sockets, which need their addresses.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail};
use verbatim_container::{Contents, Descriptors, Membership, join_again, memberships};
use verbatim_netns::{Found, Reader, State};

use crate::instances::Instance;
use crate::protocol::NETWORK_STATE;

/// Among CRIU's images.
const FILE: &str = "verbatim-network.json";

/// The multicast groups of its sockets, beside it; none if there are none.
const MEMBERSHIPS: &str = "verbatim-memberships.json";

/// A longer file is not read.
const MAX_FILE: u64 = 9 << 20;

/// The instance's end of its link.
const LINK: &str = "eth0";

/// What a link takes if nobody says otherwise, in bytes.
const USUAL_MTU: u32 = 1500;

/// Reads the namespace of an instance; nothing of a virtual machine's.
pub async fn look(instance: &Arc<Instance>, reader: &Reader) -> anyhow::Result<Option<Found>> {
    let Some(contents) = instance.home.network_contents()? else {
        return Ok(None);
    };
    let reader = reader.clone();
    let read = tokio::task::spawn_blocking(move || contents.read(&reader));
    let found = read.await.context("reading the network namespace panicked")?;
    Ok(Some(found?))
}

/// Who reads namespaces on this host.
pub async fn reader() -> anyhow::Result<Reader> {
    let made = tokio::task::spawn_blocking(Reader::new);
    let made = made
        .await
        .context("looking at a new network namespace panicked")?;
    made.context("cannot make a network namespace")
}

/// Reads the namespace, and the multicast groups of sockets, into files among the images. The container's tasks, of which `init` is the
/// first, stand still.
pub fn write(
    (contents, reader): (&Contents, &Reader),
    (init, descriptors): (i32, &Descriptors),
    images: &Path,
) -> anyhow::Result<()> {
    let memberships = memberships(init, descriptors)?;
    if !memberships.is_empty() {
        let path = images.join(MEMBERSHIPS);
        let written = std::fs::write(&path, serde_json::to_vec(&memberships)?);
        written.with_context(|| format!("cannot write {}", path.display()))?;
    }
    let found = contents.read(reader)?;
    if let Some(obstacle) = found.obstacles.first() {
        bail!("{obstacle}");
    }
    let path = images.join(FILE);
    std::fs::write(&path, found.state.encode()?).with_context(|| format!("cannot write {}", path.display()))
}

/// What was read at the source; nothing from one that does not write it.
pub fn read(images: &Path) -> anyhow::Result<Option<State>> {
    let bytes = content(&images.join(FILE))?;
    Ok(bytes.map(|bytes| State::decode(&bytes)).transpose()?)
}

/// Has sockets of restored tasks, of which `init` is the first, join the groups that they were members of.
pub fn join_groups(init: i32, images: &Path) -> anyhow::Result<()> {
    let Some(bytes) = content(&images.join(MEMBERSHIPS))? else {
        return Ok(());
    };
    let memberships: Vec<Membership> =
        serde_json::from_slice(&bytes).context("the list of multicast groups is malformed")?;
    Ok(join_again(init, &memberships)?)
}

fn content(path: &Path) -> anyhow::Result<Option<Vec<u8>>> {
    let file = match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        file => file.with_context(|| format!("cannot open {}", path.display()))?,
    };
    let mut bytes = Vec::new();
    file.take(MAX_FILE)
        .read_to_end(&mut bytes)
        .with_context(|| format!("cannot read {}", path.display()))?;
    Ok(Some(bytes))
}

/// The MTU of the instance's link, as `OpenRequest` says it.
pub fn link_mtu(found: Option<&Found>) -> u32 {
    found.and_then(|found| found.state.mtu(LINK)).unwrap_or(0)
}

/// Why a link of that MTU cannot be made here; `mtu` is that of this host's links.
pub fn narrower(wanted: u32, mtu: Option<u32>) -> Option<String> {
    let mtu = mtu.unwrap_or(USUAL_MTU);
    (wanted > mtu).then(|| {
        format!(
            "{LINK} of the instance has an MTU of {wanted}, and links of that host take {mtu}: start its agent with `--mtu {wanted}`, or \
             `ip link set {LINK} mtu {mtu}` in the instance"
        )
    })
}

/// Why what `found` has cannot go to `to`, whose agent can do that much; nothing of what any agent moves.
pub fn unknown(instance: &Instance, found: &Found, to: &str, can: bool) -> Option<String> {
    let is_as_made = found.state.is_as_made(instance.home.record.address);
    (!can && !is_as_made).then(|| {
        format!(
            "{} has addresses, routes, rules or sysctls of its own in its network namespace, and the agent of {to} does not put them in \
             place (`{NETWORK_STATE}`): upgrade it",
            instance.name()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_of_the_release_before_sends_no_file() {
        let images = tempfile::tempdir().unwrap();
        assert!(read(images.path()).unwrap().is_none());
        std::fs::write(images.path().join(FILE), "{}").unwrap();
        assert!(read(images.path()).is_err());
    }

    #[test]
    fn a_link_is_not_wider_than_its_host() {
        assert!(narrower(9000, None).unwrap().contains("--mtu 9000"));
        assert_eq!(narrower(1500, None), None);
        assert_eq!(narrower(9000, Some(9000)), None);
        // Who does not say it is not asked for it.
        assert_eq!(narrower(0, Some(1280)), None);
    }
}
