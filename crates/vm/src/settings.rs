//! QEMU's settings that a move changes and puts back.
//!
//! QEMU belongs to its user: its migration capabilities and parameters are read before they are changed, and
//! put back when the move has ended, at either host. With `x-ignore-shared` on, `savevm`, `virsh save` and
//! QEMU's own migration would not write the RAM.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::error::Result;
use crate::machine::Machine;

/// On for a move; all others are off.
const CAPABILITIES: [&str; 3] = ["events", "x-ignore-shared", "pause-before-switchover"];

/// On at the destination alone, for a guest that is to run.
pub(crate) const LATE: &str = "late-block-activate";

/// In ms: QEMU stops the guest when it expects the rest of other memory than the RAM to take no longer.
const OTHER_MEMORY: u64 = 20;

/// In bytes/s: only the network limits QEMU.
const BANDWIDTH: u64 = 1 << 40;

/// QEMU's defaults, used if the values found were left by an earlier version of this program.
const USUAL: [(&str, u64); 2] = [("max-bandwidth", 128 << 20), ("downtime-limit", 300)];

/// Parameters that a move changes if they are not empty.
const TEXTS: [&str; 3] = ["tls-creds", "tls-hostname", "tls-authz"];

/// The settings before a move.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// The capabilities that a move changes, by name, and whether they were on.
    #[serde(default)]
    capabilities: BTreeMap<String, bool>,
    /// The parameters that a move changes, by name.
    #[serde(default)]
    parameters: Map<String, Value>,
}

/// A capability, by `query-migrate-capabilities`.
#[derive(Debug, Deserialize)]
struct Capability {
    capability: String,
    state: bool,
}

impl Settings {
    fn of(capabilities: &[Capability], parameters: &Map<String, Value>) -> Self {
        let is_on = |name: &str| capabilities.iter().any(|one| one.capability == name && one.state);
        // Left by an earlier version of this program.
        let is_ours = CAPABILITIES.iter().all(|name| is_on(name));
        let changed = capabilities
            .iter()
            .filter(|one| one.state || one.capability == LATE || CAPABILITIES.contains(&&*one.capability));
        let changed = changed.map(|one| {
            let was = one.state && !(is_ours && CAPABILITIES.contains(&&*one.capability));
            (one.capability.clone(), was)
        });
        let says = |name: &str| parameters.get(name).cloned();
        let is_ours = says("max-bandwidth") == Some(json!(BANDWIDTH))
            && says("downtime-limit") == Some(json!(OTHER_MEMORY));
        let numbers = USUAL.iter().filter_map(|(name, usual)| {
            let found = says(name)?;
            Some(((*name).to_owned(), if is_ours { json!(usual) } else { found }))
        });
        let texts = TEXTS.iter().filter_map(|name| {
            let found = says(name).filter(|value| value.as_str().is_some_and(|text| !text.is_empty()))?;
            Some(((*name).to_owned(), found))
        });
        Self {
            capabilities: changed.collect(),
            parameters: numbers.chain(texts).collect(),
        }
    }

    /// The settings of a move in place of these.
    fn of_a_move(&self) -> Self {
        let on = |name: &String| (name.clone(), CAPABILITIES.contains(&&**name));
        let text = self
            .parameters
            .keys()
            .filter(|name| TEXTS.contains(&&***name))
            .map(|name| (name.clone(), json!("")));
        let numbers = [("max-bandwidth", BANDWIDTH), ("downtime-limit", OTHER_MEMORY)];
        let numbers = numbers.map(|(name, value)| (name.to_owned(), json!(value)));
        Self {
            capabilities: self.capabilities.keys().map(on).collect(),
            parameters: numbers.into_iter().chain(text).collect(),
        }
    }
}

impl Machine {
    /// The present settings that a move changes.
    pub async fn settings(&self) -> Result<Settings> {
        let (capabilities, parameters) = self.found().await?;
        Ok(Settings::of(&capabilities, &parameters))
    }

    async fn found(&self) -> Result<(Vec<Capability>, Map<String, Value>)> {
        let capabilities = self.qmp().ask("query-migrate-capabilities", json!({})).await?;
        let parameters = self.qmp().ask("query-migrate-parameters", json!({})).await?;
        Ok((capabilities, parameters))
    }

    /// Puts them back. Settings that this QEMU does not know are left out: they may come from a source of
    /// another release.
    pub async fn put_back(&self, settings: &Settings) -> Result<()> {
        let (capabilities, parameters) = self.found().await?;
        let mut wanted = settings.clone();
        wanted.capabilities.retain(|name, state| {
            capabilities
                .iter()
                .any(|one| one.capability == *name && one.state != *state)
        });
        wanted
            .parameters
            .retain(|name, value| parameters.get(name).is_some_and(|found| found != value));
        self.set(&wanted).await
    }

    /// Sets those that a move needs; `noted` are the earlier ones.
    pub(crate) async fn prepare(&self, noted: &Settings) -> Result<()> {
        self.set(&noted.of_a_move()).await
    }

    async fn set(&self, settings: &Settings) -> Result<()> {
        if !settings.capabilities.is_empty() {
            let capabilities: Vec<_> = settings
                .capabilities
                .iter()
                .map(|(name, state)| json!({"capability": name, "state": state}))
                .collect();
            let capabilities = json!({"capabilities": capabilities});
            self.qmp().run("migrate-set-capabilities", capabilities).await?;
        }
        if !settings.parameters.is_empty() {
            let parameters = Value::Object(settings.parameters.clone());
            self.qmp().run("migrate-set-parameters", parameters).await?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn capabilities(on: &[&str]) -> Vec<Capability> {
        let all = [
            "xbzrle",
            "events",
            "x-ignore-shared",
            "pause-before-switchover",
            "multifd",
            LATE,
        ];
        let capability = |name: &str| Capability {
            capability: name.to_owned(),
            state: on.contains(&name),
        };
        all.map(capability).into()
    }

    fn parameters(bandwidth: u64, downtime: u64, creds: &str) -> Map<String, Value> {
        let all = json!({"max-bandwidth": bandwidth, "downtime-limit": downtime, "tls-creds": creds, "tls-hostname": "", "multifd-channels": 2});
        all.as_object().unwrap().clone()
    }

    #[test]
    fn what_a_move_changes_is_noted_as_it_was_and_nothing_else() {
        let noted = Settings::of(&capabilities(&["events", "multifd"]), &parameters(5, 6, "tls0"));
        let expected = json!({
            "capabilities": {"events": true, "x-ignore-shared": false, "pause-before-switchover": false, "multifd": true, "late-block-activate": false},
            "parameters": {"max-bandwidth": 5, "downtime-limit": 6, "tls-creds": "tls0"},
        });
        assert_eq!(serde_json::to_value(&noted).unwrap(), expected);
        assert_eq!(serde_json::from_value::<Settings>(expected).unwrap(), noted);
        let of_a_move = json!({
            "capabilities": {"events": true, "x-ignore-shared": true, "pause-before-switchover": true, "multifd": false, "late-block-activate": false},
            "parameters": {"max-bandwidth": BANDWIDTH, "downtime-limit": OTHER_MEMORY, "tls-creds": ""},
        });
        assert_eq!(serde_json::to_value(noted.of_a_move()).unwrap(), of_a_move);
    }

    #[test]
    fn what_an_earlier_version_has_left_is_not_taken_for_its_owners() {
        let left = Settings::of(
            &capabilities(&CAPABILITIES),
            &parameters(BANDWIDTH, OTHER_MEMORY, ""),
        );
        let usual = Settings::of(&capabilities(&[]), &parameters(128 << 20, 300, ""));
        assert_eq!(left, usual);
        // One of both alone may be somebody's wish.
        let wish = Settings::of(
            &capabilities(&["x-ignore-shared"]),
            &parameters(BANDWIDTH, 300, ""),
        );
        assert!(wish.capabilities["x-ignore-shared"]);
        assert_eq!(wish.parameters["max-bandwidth"], json!(BANDWIDTH));
    }
}
