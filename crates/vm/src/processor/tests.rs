//! `recorded.json` has answers of QEMU 7.2 for two processors of Intel and one of AMD
//! (`query-cpu-model-expansion type=full`), which stand for KVM's `host` on such hosts, since no KVM was at
//! hand. It is reduced to features that at least one of them has.

use super::*;

fn of_host(model: &str, vendor: &str) -> Processor {
    let recorded: BTreeMap<String, Map<String, Value>> =
        serde_json::from_str(include_str!("recorded.json")).unwrap();
    let mut processor = Processor::of("host".to_owned(), &recorded[model], &[]);
    processor.facts.insert("vendor".to_owned(), vendor.to_owned());
    processor.facts.insert("model".to_owned(), model.to_owned());
    processor
}

#[test]
fn features_that_another_kind_of_host_lacks_are_named_and_more_of_them_are_no_obstacle() {
    let (older, newer) = (
        of_host("Haswell-v4", "GenuineIntel"),
        of_host("Skylake-Server-v4", "GenuineIntel"),
    );
    let why = newer.missed_by(&older).unwrap();
    for said in ["-cpu host", "avx512f", "adx", "clwb", "xsavec", "switched off"] {
        assert!(why.contains(said), "{said}: {why}");
    }
    assert!(!why.contains("sse2"), "{why}");
    assert_eq!(newer.missed_by(&newer), None);
    assert_eq!(older.missed_by(&newer), None);
    assert_eq!(
        older.differs_from(&newer).unwrap(),
        "the processor there is another one (model), with all features of the guest's"
    );
    assert_eq!(older.differs_from(&older), None);
    let other = of_host("EPYC-Rome-v1", "AuthenticAMD");
    let why = older.missed_by(&other).unwrap();
    assert!(
        why.contains("invpcid") && why.contains("is one of AuthenticAMD"),
        "{why}"
    );
}

#[test]
fn it_is_compared_as_it_was_sent() {
    let newer = of_host("Skylake-Server-v4", "GenuineIntel");
    let sent: Processor = serde_json::from_str(&serde_json::to_string(&newer).unwrap()).unwrap();
    assert_eq!(
        sent.missed_by(&of_host("Skylake-Server-v4", "GenuineIntel")),
        None
    );
    assert!(sent.missed_by(&of_host("Haswell-v4", "GenuineIntel")).is_some());
}

#[test]
fn a_feature_that_the_host_does_not_have_is_none_and_a_way_of_making_one_neither() {
    let props = json!({"avx2": true, "pcid": true, "sse4_1": true, "check": true, "x-old": true, "hle": false, "level": 13});
    let processor = Processor::of("max".to_owned(), props.as_object().unwrap(), &["pcid".to_owned()]);
    assert_eq!(Vec::from_iter(&processor.features), ["avx2", "sse4-1"]);
    assert_eq!(Vec::from_iter(&processor.lacks), ["hle", "pcid"]);
}

#[test]
fn bits_that_are_lost_are_said_also_without_names() {
    let with = |words: &[(&str, u64)], features: &[&str]| Processor {
        model: "max".to_owned(),
        features: features.iter().map(|name| (*name).to_owned()).collect(),
        words: words
            .iter()
            .map(|(name, word)| ((*name).to_owned(), *word))
            .collect(),
        ..Processor::default()
    };
    let source = with(&[("0x7.1:EAX", 0b110)], &["avx2"]);
    assert_eq!(source.missed_by(&with(&[("0x7.1:EAX", 0b111)], &[])), None);
    let why = source
        .missed_by(&with(&[("0x7.1:EAX", 0b100)], &["avx2"]))
        .unwrap();
    assert!(why.contains("CPUID 0x7.1:EAX 0x2"), "{why}");
    let why = source.missed_by(&with(&[("0x7.1:EAX", 0b100)], &[])).unwrap();
    assert!(why.contains("lacks avx2"), "{why}");
}

#[test]
fn the_value_of_an_option_is_taken_apart() {
    assert_eq!(
        Value::Object(properties("max,-avx2,x2apic=off,+pcid,level=7,,vendor=x")),
        json!({"avx2": false, "x2apic": false, "pcid": true, "level": 7, "vendor": "x"})
    );
    assert!(properties("max").is_empty() && properties("").is_empty());
}

#[test]
fn the_newest_type_of_the_same_kind_is_found() {
    let types = "Supported machines are:\npc-q35-2.12         x\npc-q35-7.2           y\npc-i440fx-10.0 z\nmicrovm  w\n";
    assert!(has_machine(types, "pc-q35-7.2") && !has_machine(types, "pc-q35-10.0"));
    assert_eq!(newest(types, "pc-q35-10.0"), Some("pc-q35-7.2"));
    assert_eq!(newest(types, "microvm"), None);
}
