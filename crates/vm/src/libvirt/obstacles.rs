//! Parts of a domain's description that cannot move.
//!
//! QEMU is examined as well ([`Machine::may_move`](crate::Machine::may_move)): this module covers obstacles
//! that are clearer in libvirt's terms, or that only libvirt knows.

use std::collections::BTreeSet;
use std::path::PathBuf;

use roxmltree::Node;

use super::description::parse;
use crate::error::Result;

/// Devices, by their names below `devices`, with the reason why they cannot move.
const DEVICES: &[(&str, &str)] = &[
    (
        "hostdev",
        "a device of the host's (<hostdev>): its state is in the host's hardware; detach it first",
    ),
    (
        "redirdev",
        "a device that is redirected to the host (<redirdev>): detach it first",
    ),
    (
        "shmem",
        "memory that is shared with others (<shmem>): their writes would not be seen; detach it first",
    ),
    (
        "memory",
        "memory that is plugged in (<memory model=…>): one piece of RAM can move, and no more",
    ),
    (
        "tpm",
        "a TPM (<tpm>): its state is in another process, or in the host's hardware",
    ),
];

/// All obstacles.
pub(super) fn of(xml: &str) -> Result<Vec<String>> {
    let document = parse(xml)?;
    let root = document.root_element();
    let mut found = Vec::new();
    let mut say = |why: String| {
        if !found.contains(&why) {
            found.push(why);
        }
    };
    if let Some(why) = memory(&root) {
        say(why);
    }
    let devices = child(&root, "devices");
    for device in devices
        .iter()
        .flat_map(|devices| devices.children().filter(Node::is_element))
    {
        let name = device.tag_name().name();
        let kind = device.attribute("type").unwrap_or_default();
        if let Some((_, why)) = DEVICES.iter().find(|(device, _)| *device == name) {
            say(format!("it has {why}"));
        }
        let driver = child(&device, "driver");
        let says = |attribute: &str| {
            driver
                .and_then(|driver| driver.attribute(attribute))
                .unwrap_or_default()
        };
        match name {
            "interface" | "disk" if ["vhostuser", "vhostvdpa", "vdpa"].contains(&kind) => say(format!(
                "it has {name}s whose data another process writes to its RAM (type='{kind}'): nobody would see that; detach them first"
            )),
            "interface" | "disk" if ["hostdev", "nvme"].contains(&kind) => {
                say(format!("it has {name}s that are devices of the host's (type='{kind}'); detach them first"));
            }
            "filesystem" if says("type") == "virtiofs" => say(
                "it has a file system by virtiofs, whose server writes to its RAM: nobody would see that; detach it first".to_owned(),
            ),
            "disk" if ["native", "io_uring"].contains(&says("io")) && ["none", "directsync"].contains(&says("cache")) => {
                say(format!(
                    "the disk {} is read directly (cache='{}') and asynchronously (io='{}'), which the kernel does not track: start it with io='threads'",
                    target(&device),
                    says("cache"),
                    says("io")
                ));
            }
            "disk" if child(&device, "transient").is_some() => {
                say(format!("what it writes to the disk {} is thrown away (<transient>), and would be lost", target(&device)));
            }
            _ => {}
        }
        if name == "disk"
            && let Some(model) = relabels(&root)
                .into_iter()
                .find(|model| is_given_back(&device, model))
        {
            say(format!(
                "libvirt gives the file of the disk {} back to its owner ({model}) when the domain has left, while it is in use at its next host: \
                 add <seclabel model='{model}' relabel='no'/> to its <source>, let QEMU's user write to it, and start the domain again",
                target(&device)
            ));
        }
    }
    Ok(found)
}

/// The reason why the RAM cannot move.
fn memory(root: &Node<'_, '_>) -> Option<String> {
    let backing = child(root, "memoryBacking");
    let is = |element: &str, attribute: &str, value: &str| {
        let element = backing.as_ref().and_then(|backing| child(backing, element));
        element.is_some_and(|element| element.attribute(attribute) == Some(value))
    };
    let is_huge = backing
        .as_ref()
        .is_some_and(|backing| child(backing, "hugepages").is_some());
    if is("source", "type", "file") && is("access", "mode", "shared") && !is_huge {
        return None;
    }
    Some(
        "its RAM is no shared file: give it <memoryBacking><source type='file'/><access mode='shared'/></memoryBacking>, without <hugepages>, with \
         memory_backing_dir of libvirt's qemu.conf in a tmpfs, and start it again"
            .to_owned(),
    )
}

/// The security models by which libvirt labels files for QEMU, and restores them afterwards. Root needs no
/// label of the first kind.
fn relabels<'a>(root: &Node<'a, '_>) -> Vec<&'a str> {
    let labels = root.children().filter(|node| node.has_tag_name("seclabel"));
    let labels = labels.filter(|label| label.attribute("relabel") == Some("yes"));
    let models = labels.filter_map(|label| {
        let user = child(&label, "label")
            .and_then(|label| label.text())
            .unwrap_or_default();
        let model = label.attribute("model")?;
        let concerns = match model {
            "dac" => !user.starts_with("+0:"),
            model => model == "selinux",
        };
        concerns.then_some(model)
    });
    models.collect()
}

fn is_given_back(disk: &Node<'_, '_>, model: &str) -> bool {
    let Some(source) = child(disk, "source") else {
        return false;
    };
    let is_file = ["file", "dev"].iter().any(|name| source.has_attribute(*name));
    let stays = |label: Node<'_, '_>| {
        label.has_tag_name("seclabel")
            && label.attribute("relabel") == Some("no")
            && label.attribute("model").is_none_or(|named| named == model)
    };
    is_file && child(disk, "readonly").is_none() && !source.children().any(stays)
}

fn child<'a, 'input>(node: &Node<'a, 'input>, name: &str) -> Option<Node<'a, 'input>> {
    node.children().find(|child| child.has_tag_name(name))
}

fn target<'a>(disk: &Node<'a, '_>) -> &'a str {
    child(disk, "target")
        .and_then(|target| target.attribute("dev"))
        .unwrap_or("without a name")
}

/// The files of its disks and images, with whether QEMU may write to each.
pub(super) fn files(xml: &str) -> Result<Vec<(PathBuf, bool)>> {
    let document = parse(xml)?;
    let root = document.root_element();
    let devices = child(&root, "devices");
    let disks = devices
        .iter()
        .flat_map(|devices| devices.children().filter(|node| node.has_tag_name("disk")));
    let mut files: Vec<_> = disks
        .filter_map(|disk| {
            let source = child(&disk, "source")?;
            let path = source.attribute("file").or_else(|| source.attribute("dev"))?;
            Some((PathBuf::from(path), child(&disk, "readonly").is_none()))
        })
        .collect();
    let os = child(&root, "os");
    for name in ["kernel", "initrd"] {
        let path = os.and_then(|os| child(&os, name)).and_then(|image| image.text());
        files.extend(path.map(|path| (PathBuf::from(path), false)));
    }
    Ok(files)
}

/// Files and devices that a description names.
#[derive(Debug, Default)]
pub(crate) struct Named {
    /// Files and devices of its disks, those below them included, and of its firmware.
    pub files: BTreeSet<String>,
    /// Volumes of storage pools.
    pub volumes: Vec<(String, String)>,
    /// libvirt's names for its devices.
    pub aliases: BTreeSet<String>,
}

/// Parses the files and devices.
pub(super) fn named(xml: &str) -> Result<Named> {
    let document = parse(xml)?;
    let mut named = Named::default();
    for node in document.root_element().descendants() {
        let attribute = |name: &str| node.attribute(name).map(str::to_owned);
        match node.tag_name().name() {
            "source" => {
                named.files.extend(attribute("file").or_else(|| attribute("dev")));
                named.volumes.extend(attribute("pool").zip(attribute("volume")));
            }
            "loader" | "nvram" => named.files.extend(node.text().map(|text| text.trim().to_owned())),
            "alias" => named.aliases.extend(attribute("name")),
            _ => {}
        }
    }
    Ok(named)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BACKING: &str = "<memoryBacking><source type='file'/><access mode='shared'/></memoryBacking>";

    fn domain(inside: &str, devices: &str) -> String {
        format!("<domain type='kvm'><name>a</name>{inside}<devices>{devices}</devices></domain>")
    }

    #[test]
    fn one_that_can_move_has_none() {
        let devices = "<disk type='file'><driver name='qemu' cache='none' io='threads'/><source file='/d'/><target dev='vda'/></disk>\
                       <interface type='bridge'><source bridge='br0'/></interface><memballoon model='virtio'/>";
        assert!(of(&domain(BACKING, devices)).unwrap().is_empty());
    }

    #[test]
    fn each_is_said() {
        for (devices, why) in [
            ("<hostdev mode='subsystem' type='pci'/>", "<hostdev>"),
            ("<interface type='vhostuser'/>", "type='vhostuser'"),
            ("<interface type='hostdev'/>", "devices of the host's"),
            (
                "<filesystem type='mount'><driver type='virtiofs'/></filesystem>",
                "virtiofs",
            ),
            ("<disk type='nvme'/>", "type='nvme'"),
            (
                "<disk type='file'><driver cache='none' io='native'/><target dev='vdb'/></disk>",
                "the disk vdb is read directly",
            ),
            (
                "<disk type='file'><transient/><target dev='vdb'/></disk>",
                "thrown away",
            ),
            ("<memory model='dimm'/>", "one piece of RAM"),
            ("<tpm model='tpm-crb'/>", "a TPM"),
            ("<shmem name='a'/>", "<shmem>"),
        ] {
            let found = of(&domain(BACKING, devices)).unwrap();
            assert!(found.len() == 1 && found[0].contains(why), "{devices}: {found:?}");
        }
        for backing in [
            "",
            "<memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>",
            "<memoryBacking><source type='file'/></memoryBacking>",
            "<memoryBacking><hugepages/><source type='file'/><access mode='shared'/></memoryBacking>",
        ] {
            let found = of(&domain(backing, "")).unwrap();
            assert!(
                found.len() == 1 && found[0].contains("memory_backing_dir"),
                "{backing}: {found:?}"
            );
        }
    }

    #[test]
    fn files_that_libvirt_would_give_back_are_said() {
        let label = |model: &str, label: &str| {
            format!(
                "{BACKING}<seclabel type='dynamic' model='{model}' relabel='yes'><label>{label}</label></seclabel>"
            )
        };
        let disk = |inside: &str, more: &str| {
            format!("<disk type='file'><source file='/d'>{inside}</source><target dev='vda'/>{more}</disk>")
        };
        let found = |labels: &str, disk: &str| of(&domain(labels, disk)).unwrap();
        let plain = disk("", "");
        let said = found(&label("dac", "+64055:+64055"), &plain);
        assert!(
            said.len() == 1 && said[0].contains("<seclabel model='dac' relabel='no'/>"),
            "{said:?}"
        );
        assert_eq!(found(&label("selinux", "x"), &plain).len(), 1);
        assert!(found(&label("dac", "+0:+0"), &plain).is_empty());
        assert!(found(&label("apparmor", "libvirt-x"), &plain).is_empty());
        let dac = label("dac", "+64055:+64055");
        assert!(found(&dac, &disk("<seclabel model='dac' relabel='no'/>", "")).is_empty());
        assert_eq!(
            found(&dac, &disk("<seclabel model='selinux' relabel='no'/>", "")).len(),
            1
        );
        assert!(found(&dac, &disk("", "<readonly/>")).is_empty());
        assert!(
            found(
                &dac,
                "<disk type='network'><source protocol='nbd' name='a'/></disk>"
            )
            .is_empty()
        );
    }

    #[test]
    fn all_that_a_description_names_is_known() {
        let xml = domain(
            "<os><loader type='pflash'>/code</loader><nvram>/vars</nvram></os>",
            "<disk type='file'><source file='/over' index='2'/><backingStore type='block'><source dev='/dev/vg/base'/></backingStore>\
             <alias name='virtio-disk0'/></disk><disk type='volume'><source pool='p' volume='v'/></disk>",
        );
        let named = named(&xml).unwrap();
        let files = ["/code", "/dev/vg/base", "/over", "/vars"].map(str::to_owned);
        assert_eq!(named.files, BTreeSet::from(files));
        assert_eq!(named.volumes, [("p".to_owned(), "v".to_owned())]);
        assert_eq!(named.aliases, BTreeSet::from(["virtio-disk0".to_owned()]));
    }

    #[test]
    fn its_files_are_known() {
        let xml = domain(
            "<os><kernel>/k</kernel></os>",
            "<disk type='file'><source file='/d'/></disk><disk type='file'><source file='/c'/><readonly/></disk><disk type='block'><source dev='/b'/></disk>",
        );
        let expected = [("/d", true), ("/c", false), ("/b", true), ("/k", false)]
            .map(|(path, writes)| (PathBuf::from(path), writes));
        assert_eq!(files(&xml).unwrap(), expected);
    }
}
