//! The description from which another host's libvirt starts a domain.

use std::ops::Range;

use roxmltree::{Document, Node};
use serde::{Deserialize, Serialize};

use super::{ANSWER, Domain, Input, START};
use crate::error::{Error, Result};

/// libvirt's namespace for arguments that it passes on to QEMU unchanged.
const OWN_ARGUMENTS: &str = "http://libvirt.org/schemas/domain/qemu/1.0";

/// Limit of a description's length; libvirt's own is of this order.
const LONGEST: usize = 10 << 20;

/// A domain at its source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Description {
    /// The running domain, in libvirt's XML.
    live: String,
    /// The persistent definition; `None` for a transient domain.
    defined: Option<String>,
    /// Whether libvirt starts the domain when its host boots.
    autostart: bool,
}

impl Domain {
    /// The description of the domain on this host.
    pub async fn describe(&self) -> Result<Description> {
        let live = self.ask("dumpxml", &["--migratable", "--security-info"]).await?;
        let info = self.ask("dominfo", &[]).await?;
        let says = |key: &str, value: &str| {
            let mut lines = info.lines().filter_map(|line| line.split_once(':'));
            lines.any(|(name, said)| name == key && said.trim() == value)
        };
        let defined = match says("Persistent", "yes") {
            true => Some(self.ask("dumpxml", &["--inactive", "--security-info"]).await?),
            false => None,
        };
        Ok(Description {
            live,
            defined,
            autostart: says("Autostart", "enable"),
        })
    }

    /// Makes libvirt start the domain from a description, with a QEMU that waits for a migration. Any error
    /// but [`Error::Silent`] means that the domain was not started.
    pub async fn start(&self, description: &Description) -> Result<()> {
        if let Some(state) = self.state().await?.filter(|state| state != "shut off") {
            return Err(Error::Libvirt(format!(
                "libvirt has a domain {} there already, which is {state}: `virsh --connect {} destroy {}`, if that is a mistake",
                self.name, self.uri, self.name
            )));
        }
        let waiting = arriving(&description.live)?;
        let words = ["create", "--paused", "/dev/stdin"];
        self.virsh(&words, Input::Text(&waiting), START).await.map(drop)
    }

    /// Ends a domain that [`Domain::start`] has started. A domain that is off, or was started in another way,
    /// stays as it is.
    pub async fn end_arrival(&self) -> Result<()> {
        match self.state().await?.as_deref() {
            None | Some("shut off") => return Ok(()),
            Some(_) => {}
        }
        let live = match self.ask("dumpxml", &[]).await {
            Err(Error::Gone) => return Ok(()),
            live => live?,
        };
        match without_incoming(&live)? == live {
            true => Ok(()),
            false => self.destroy().await,
        }
    }

    /// Makes libvirt of this host know the domain permanently, as libvirt of the source did.
    pub async fn define(&self, description: &Description) -> Result<()> {
        let Some(defined) = &description.defined else {
            return Ok(());
        };
        let defined = without_incoming(defined)?;
        self.virsh(&["define", "/dev/stdin"], Input::Text(&defined), ANSWER)
            .await?;
        match description.autostart {
            true => self.ask("autostart", &[]).await.map(drop),
            false => Ok(()),
        }
    }
}

pub(super) fn parse(xml: &str) -> Result<Document<'_>> {
    let malformed = |why: String| Error::Malformed(format!("libvirt's description of the domain: {why}"));
    if xml.len() > LONGEST {
        return Err(malformed(format!("it has {} bytes", xml.len())));
    }
    let document = Document::parse(xml).map_err(|error| malformed(error.to_string()))?;
    match document.root_element().has_tag_name("domain") {
        true => Ok(document),
        false => Err(malformed("it is none".to_owned())),
    }
}

/// The same for a QEMU that waits for a migration.
fn arriving(xml: &str) -> Result<String> {
    let mut xml = without_incoming(xml)?;
    let end = xml
        .rfind("</domain>")
        .ok_or_else(|| Error::Malformed("a domain without an end".to_owned()))?;
    let waits = ["-incoming", "defer"]
        .map(|word| format!("<arg value='{word}'/>"))
        .concat();
    xml.insert_str(
        end,
        &format!("<commandline xmlns='{OWN_ARGUMENTS}'>{waits}</commandline>"),
    );
    Ok(xml)
}

/// Without the arguments that [`arriving`] has added at an earlier host.
fn without_incoming(xml: &str) -> Result<String> {
    let document = parse(xml)?;
    let mut out: Vec<Range<usize>> = Vec::new();
    let is_own = |node: &Node<'_, '_>, name: &str| node.has_tag_name((OWN_ARGUMENTS, name));
    for line in document
        .root_element()
        .children()
        .filter(|node| is_own(node, "commandline"))
    {
        let arguments: Vec<_> = line.children().filter(|node| is_own(node, "arg")).collect();
        let values: Vec<_> = arguments
            .iter()
            .map(|argument| argument.attribute("value"))
            .collect();
        for (at, pair) in values.windows(2).enumerate() {
            if pair == [Some("-incoming"), Some("defer")] {
                out.extend([arguments[at].range(), arguments[at + 1].range()]);
            }
        }
    }
    let mut kept = xml.to_owned();
    for range in out.into_iter().rev() {
        kept.replace_range(range, "");
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: &str = "<domain type='kvm' id='1'>\n  <name>web</name>\n</domain>\n";
    const WAITS: &str = "<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>web</name>
  <qemu:commandline>
    <qemu:arg value='-device'/>
    <qemu:arg value='edu'/>
    <qemu:arg value='-incoming'/>
    <qemu:arg value='defer'/>
  </qemu:commandline>
</domain>
";

    /// The arguments that QEMU gets from it.
    fn arguments(xml: &str) -> Vec<String> {
        let document = parse(xml).unwrap();
        let lines = document.root_element().children();
        let lines = lines.filter(|node| node.has_tag_name((OWN_ARGUMENTS, "commandline")));
        let arguments = lines.flat_map(|line| line.children().filter(Node::is_element));
        arguments
            .map(|argument| argument.attribute("value").unwrap().to_owned())
            .collect()
    }

    #[test]
    fn one_that_arrives_waits_and_does_not_at_its_next_start() {
        assert_eq!(arguments(&arriving(PLAIN).unwrap()), ["-incoming", "defer"]);
        let again = arriving(&arriving(PLAIN).unwrap()).unwrap();
        assert_eq!(arguments(&again), ["-incoming", "defer"]);
        assert_eq!(
            arguments(&arriving(WAITS).unwrap()),
            ["-device", "edu", "-incoming", "defer"]
        );
        let kept = without_incoming(WAITS).unwrap();
        assert_eq!(arguments(&kept), ["-device", "edu"]);
        assert_eq!(without_incoming(PLAIN).unwrap(), PLAIN);
    }

    #[test]
    fn what_is_no_domain_is_an_error() {
        for bad in ["", "<network/>", "<domain>", "<domain/>"] {
            assert!(matches!(arriving(bad), Err(Error::Malformed(_))), "{bad}");
        }
    }
}
