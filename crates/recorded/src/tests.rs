//! What changes in a contract, and what its recording says to it.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::*;

#[derive(Serialize, Deserialize)]
struct Key {
    lkey: u32,
    rkey: u32,
    is_window: bool,
}

#[derive(Serialize, Deserialize)]
enum Order {
    Describe,
    Stop(Vec<u32>),
    Claim { keys: Vec<Key>, limit: Option<u64> },
}

/// As an earlier version has sent it, and as it may have become.
macro_rules! variants {
    ($($name:ident { $($body:tt)* })*) => {
        $(mod $name {
            use super::*;
            #[derive(Serialize, Deserialize)]
            #[allow(dead_code)]
            pub(super) enum Order { $($body)* }
        })*
    };
}

variants! {
    one_more { Describe, Stop(Vec<u32>), Claim { keys: Vec<Key>, limit: Option<u64> }, Resume { session: u64 } }
    one_less { Describe, Stop(Vec<u32>) }
    other_order { Stop(Vec<u32>), Describe, Claim { keys: Vec<Key>, limit: Option<u64> } }
    one_field_more { Describe, Stop(Vec<u32>), Claim { keys: Vec<Key>, limit: Option<u64>, force: bool } }
    fields_swapped { Describe, Stop(Vec<u32>), Claim { limit: Option<u64>, keys: Vec<Key> } }
    wider { Describe, Stop(Vec<u64>), Claim { keys: Vec<Key>, limit: Option<u64> } }
    nested { Describe, Stop(Vec<u32>), Claim { keys: Vec<SwappedKey>, limit: Option<u64> } }
}

#[derive(Serialize, Deserialize)]
struct SwappedKey {
    rkey: u32,
    lkey: u32,
    is_window: bool,
}

fn names<T: DeserializeOwned>() -> Vec<String> {
    let samples = samples::<T>().unwrap();
    samples.into_iter().map(|sample| sample.name).collect()
}

#[test]
fn there_is_a_value_for_each_variant() {
    assert_eq!(
        names::<Order>(),
        [
            "Describe",
            "Stop",
            "Claim",
            "Claim/Claim.keys.is_window=false",
            "Claim/Claim.limit=None"
        ]
    );
    assert_eq!(names::<Option<u32>>(), ["Some", "None"]);
    assert_eq!(names::<Vec<[u8; 16]>>(), [""]);
    assert_eq!(
        names::<std::collections::HashMap<u32, (u32, Key)>>(),
        ["", "/value.1.is_window=false"]
    );
}

#[test]
fn what_is_in_a_value_follows_from_its_names() {
    let key = &samples::<Key>().unwrap()[0].value;
    let swapped = &samples::<SwappedKey>().unwrap()[0].value;
    assert_ne!(key.lkey, key.rkey);
    assert_eq!((key.lkey, key.rkey), (swapped.lkey, swapped.rkey));
    let list = &samples::<Vec<u32>>().unwrap()[0].value;
    assert_eq!(list.len(), 2);
    assert_ne!(list[0], list[1]);
}

/// The recording of `Order` at version 7, which is released.
fn recorded(path: &Path) -> String {
    let mut recording = Recording::of(path, "# released: 6\n", 7, true).unwrap();
    recording.check::<Order>("Order");
    recording.conclude().unwrap();
    let text = std::fs::read_to_string(path).unwrap();
    text.replace("released: 6", "released: 7")
}

fn checked<T: Serialize + DeserializeOwned>(
    text: &str,
    version: u32,
    records: bool,
) -> Result<String, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("recorded.txt");
    std::fs::write(&path, text).unwrap();
    let mut recording = Recording::of(&path, text, version, records)?;
    recording.check::<T>("Order");
    recording.conclude()?;
    Ok(std::fs::read_to_string(&path).unwrap())
}

#[test]
fn what_is_as_recorded_is_well_and_nothing_else_is() {
    let folder = tempfile::tempdir().unwrap();
    let text = recorded(&folder.path().join("recorded.txt"));
    assert_eq!(checked::<Order>(&text, 7, false).unwrap(), text);
    assert_eq!(
        checked::<Order>(&text, 7, true).unwrap(),
        text,
        "nothing is written that is there"
    );
    for (what, said) in [
        ("removed", checked::<one_less::Order>(&text, 7, true)),
        ("reordered", checked::<other_order::Order>(&text, 7, true)),
        ("a field more", checked::<one_field_more::Order>(&text, 7, true)),
        ("fields swapped", checked::<fields_swapped::Order>(&text, 7, true)),
        (
            "fields swapped in what is within",
            checked::<nested::Order>(&text, 7, true),
        ),
        ("a wider number", checked::<wider::Order>(&text, 7, true)),
    ] {
        let said = said.expect_err(what);
        let asks = said.contains("raise VERSION, and keep the older form for version 7");
        assert!(asks, "{what}: {said}");
    }
}

#[test]
fn a_new_variant_needs_a_new_version_and_a_recording() {
    let folder = tempfile::tempdir().unwrap();
    let text = recorded(&folder.path().join("recorded.txt"));
    for records in [false, true] {
        let said = checked::<one_more::Order>(&text, 7, records).unwrap_err();
        assert!(
            said.starts_with("Order.Resume is new") && said.contains("raise VERSION"),
            "{said}"
        );
    }
    let said = checked::<one_more::Order>(&text, 8, false).unwrap_err();
    assert!(
        said.contains("Order.Resume is not recorded: `RECORD_MESSAGES=1` adds it"),
        "{said}"
    );
    let more = checked::<one_more::Order>(&text, 8, true).unwrap();
    let added = more.strip_prefix(&text).expect("what was there stays");
    assert!(added.starts_with("8 Order.Resume 03"), "{added}");
    assert_eq!(checked::<one_more::Order>(&more, 8, false).unwrap(), more);
}

#[test]
fn what_no_release_has_sent_may_change() {
    let folder = tempfile::tempdir().unwrap();
    let text = recorded(&folder.path().join("recorded.txt")).replace("released: 7", "released: 6");
    checked::<one_less::Order>(&text, 7, false).unwrap_err();
    let less = checked::<one_less::Order>(&text, 7, true).unwrap();
    assert!(!less.contains("Claim") && less.contains("Stop"), "{less}");
    let wider = checked::<wider::Order>(&text, 7, true).unwrap();
    assert_ne!(wider, text);
    assert_eq!(checked::<wider::Order>(&wider, 7, false).unwrap(), wider);
}

#[test]
fn a_file_that_is_none_is_refused() {
    let path = Path::new("recorded.txt");
    let opened = |text: &str| Recording::of(path, text, 1, false).map(drop);
    assert!(opened("1 a 00\n").unwrap_err().contains("released"));
    assert!(opened("# released: 0\nx a 00\n").unwrap_err().contains("line 2"));
    assert!(
        opened("# released: 0\n1 a 00\n1 a 00\n")
            .unwrap_err()
            .contains("twice")
    );
    opened("# released: 0\n# more\n1 a 00\n1 b\n").unwrap();
}

#[derive(Serialize, Deserialize)]
struct Record {
    name: String,
    addresses: Vec<std::net::Ipv4Addr>,
}

#[derive(Serialize, Deserialize)]
struct WithADefault {
    name: String,
    addresses: Vec<std::net::Ipv4Addr>,
    #[serde(default)]
    visited: Vec<String>,
}

#[derive(Serialize, Deserialize)]
struct WithoutADefault {
    name: String,
    addresses: Vec<std::net::Ipv4Addr>,
    visited: Vec<String>,
}

#[derive(Serialize, Deserialize)]
struct LessIsWritten {
    name: String,
}

fn checked_json<T: Serialize + DeserializeOwned>(text: &str, records: bool) -> Result<String, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("recorded.txt");
    let mut recording = Recording::of(&path, text, 1, records)?;
    recording.check_json::<T>("Record");
    recording.conclude()?;
    Ok(std::fs::read_to_string(&path).unwrap_or_default())
}

#[test]
fn a_record_may_gain_a_field_with_a_default_and_lose_none() {
    let text = checked_json::<Record>("# released: 1\n", true).unwrap();
    checked_json::<Record>(&text, false).unwrap();
    let said = checked_json::<WithoutADefault>(&text, true).unwrap_err();
    assert!(
        said.contains("is not understood") && said.contains("default"),
        "{said}"
    );
    let said = checked_json::<LessIsWritten>(&text, true).unwrap_err();
    assert!(said.contains("loses something"), "{said}");
    checked_json::<WithADefault>(&text, false).unwrap_err();
    let more = checked_json::<WithADefault>(&text, true).unwrap();
    assert!(
        more.starts_with(&text) && more.lines().count() == text.lines().count() + 1,
        "{more}"
    );
    checked_json::<WithADefault>(&more, false).unwrap();
    checked_json::<Record>(&more, false).expect_err("what is written now would be lost");
}

#[test]
fn a_field_may_be_added_without_a_version_and_not_changed() {
    let path = Path::new("recorded.txt");
    let text = "# released: 1\n1 Hello.protocol 1 uint32\n";
    let check = |fields: &[(&str, &str)]| {
        let mut recording = Recording::of(path, text, 1, false).unwrap();
        for (name, content) in fields {
            recording.check_field(name, content);
        }
        recording.conclude()
    };
    check(&[("Hello.protocol", "1 uint32")]).unwrap();
    let said = check(&[("Hello.protocol", "1 uint32"), ("Hello.oldest", "3 uint32")]).unwrap_err();
    assert!(said.contains("is not recorded"), "{said}");
    for changed in ["1 uint64", "2 uint32"] {
        let said = check(&[("Hello.protocol", changed)]).unwrap_err();
        assert!(said.contains("raise VERSION"), "{said}");
    }
    let said = check(&[]).unwrap_err();
    assert!(said.contains("is gone"), "{said}");
}
