//! The agent's tap link for a network of the command line.

use super::Arguments;
use crate::error::{Error, Result};

/// Parts of a tap network that name its link.
const TAP_NAMED: &[&str] = &["ifname=", "fd=", "fds=", "br=", "helper="];

impl Arguments {
    /// The same, with this link for its tap network (`-netdev tap` or `-nic tap`) and this MAC for its card
    /// on that network, unless the user names others. An error if several networks name no link.
    pub fn on_tap(mut self, link: &str, mac: [u8; 6]) -> Result<Self> {
        let mac = mac.map(|byte| format!("{byte:02x}")).join(":");
        let is_named = |value: &str| {
            value
                .split(',')
                .any(|part| TAP_NAMED.iter().any(|name| part.starts_with(name)))
        };
        let mut network: Option<String> = None;
        let options: Vec<usize> = (0..self.rest.len().saturating_sub(1)).collect();
        for at in &options {
            let (option, value) = (self.rest[*at].clone(), &mut self.rest[*at + 1]);
            let mut parts = value.split(',');
            let kind = parts.next().unwrap_or_default();
            let is_tap = kind == "tap" || kind == "type=tap";
            if !["-netdev", "-nic"].contains(&&option[..]) || !is_tap || is_named(value) {
                continue;
            }
            if network.is_some() {
                return Err(Error::Arguments(format!(
                    "`{option} {value}` cannot be taken: there is one tap link, and another network has it; name a link by `ifname=`"
                )));
            }
            let id = parts.find_map(|part| part.strip_prefix("id="));
            network = Some(id.unwrap_or_default().to_owned());
            let has_mac = value.split(',').any(|part| part.starts_with("mac="));
            value.push_str(&format!(",ifname={link},script=no,downscript=no"));
            if option == "-nic" && !has_mac {
                value.push_str(&format!(",mac={mac}"));
            }
        }
        let Some(id) = network.filter(|id| !id.is_empty()) else {
            return Ok(self);
        };
        let of_it = format!("netdev={id}");
        for at in options {
            let is_device = self.rest[at] == "-device";
            let value = &mut self.rest[at + 1];
            let parts = || value.split(',');
            if is_device && parts().any(|part| part == of_it) && !parts().any(|part| part.starts_with("mac="))
            {
                value.push_str(&format!(",mac={mac}"));
            }
        }
        Ok(self)
    }
}
