//! Instances with RNICs of the kernel's: what must be alike on both hosts, and what such an instance must not do.

use std::collections::BTreeSet;
use std::path::Path;

use verbatim_container::{Rnic, find_rnic};

use crate::agent::Agent;
use crate::instances::record::Record;
use crate::proto::CheckInstanceReply;
use crate::protocol::RNICS;

/// Why an instance cannot come to this host, as far as its RNICs go.
pub fn lacking(agent: &Agent, record: &Record) -> Vec<String> {
    if record.rnics.is_empty() {
        return Vec::new();
    }
    let plugin = agent.tools.moves_rnics().err().map(|error| error.to_string());
    let rnics = record
        .rnics
        .iter()
        .filter_map(|theirs| match find_rnic(&theirs.name) {
            Ok(ours) => difference(theirs, &ours),
            Err(error) => Some(error.to_string()),
        });
    plugin.into_iter().chain(rnics).collect()
}

/// Why a program that has `theirs` open cannot go on with `ours`.
fn difference(theirs: &Rnic, ours: &Rnic) -> Option<String> {
    let name = &theirs.name;
    if theirs.driver != ours.driver {
        return Some(format!(
            "{name} is of the driver {} there, and of {} where the instance started; its programs have that one's provider loaded",
            ours.driver, theirs.driver
        ));
    }
    (theirs.abi != ours.abi).then(|| {
        format!(
            "the driver {} of {name} has commands of version {} there, and of version {} where the instance started: run kernels alike",
            ours.driver, ours.abi, theirs.abi
        )
    })
}

/// What stands in the way of a move from here to `destination`, with which this agent is connected.
pub fn blockers(agent: &Agent, record: &Record, destination: &str) -> Vec<String> {
    if record.rnics.is_empty() {
        return Vec::new();
    }
    let mut found = Vec::new();
    if !agent.peers.can(destination, RNICS) {
        found.push(format!(
            "the agent of {destination} does not know instances with RNICs of the kernel's; upgrade it"
        ));
    }
    found.extend(agent.tools.moves_rnics().err().map(|error| error.to_string()));
    found
}

/// Processes of an instance that have opened an RNIC without their guest library, or past it: nobody would make their objects again.
/// In words for an operator.
pub fn strangers(agent: &Agent, instance: &str, init: i32) -> std::io::Result<Vec<String>> {
    let guests: BTreeSet<_> = agent
        .guests
        .of_instance(instance)
        .iter()
        .filter_map(|guest| guest.host_pid())
        .collect();
    let found = verbatim_container::with_rnics(init)?.into_iter();
    let strange = found.filter(|(pid, _)| !guests.contains(pid));
    let words = strange.map(|(pid, program)| {
        format!(
            "process {pid} ({program}) has an RNIC open that its guest library does not know of; what it has there cannot be made again"
        )
    });
    Ok(words.collect())
}

/// What this host says of itself.
pub fn describe_host(reply: &mut CheckInstanceReply) {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    reply.kernel = read("/proc/sys/kernel/osrelease").trim().to_owned();
    reply.cpu_features = features(&read("/proc/cpuinfo"));
}

/// The features of the first processor in a `/proc/cpuinfo`.
fn features(cpuinfo: &str) -> Vec<String> {
    let line = cpuinfo.lines().find_map(|line| line.strip_prefix("flags"));
    let words = line
        .and_then(|line| line.split_once(':'))
        .map_or("", |(_, words)| words);
    words.split_ascii_whitespace().map(ToOwned::to_owned).collect()
}

/// What of this host the destination does not have: what stands in the way, and what is worth knowing.
pub fn compare(theirs: &CheckInstanceReply, destination: &str) -> (Vec<String>, Vec<String>) {
    let mut ours = CheckInstanceReply::default();
    describe_host(&mut ours);
    differences(&ours, theirs, destination)
}

fn differences(
    ours: &CheckInstanceReply,
    theirs: &CheckInstanceReply,
    destination: &str,
) -> (Vec<String>, Vec<String>) {
    if theirs.kernel.is_empty() {
        return Default::default();
    }
    let there: BTreeSet<_> = theirs.cpu_features.iter().collect();
    let missing: Vec<_> = ours
        .cpu_features
        .iter()
        .filter(|feature| !there.contains(feature) && matters(feature))
        .map(String::as_str)
        .collect();
    let blockers = (!missing.is_empty()).then(|| {
        format!(
            "the processors of {destination} lack {}, which programs and their providers may have chosen when they started",
            missing.join(", ")
        )
    });
    let notes = (ours.kernel != theirs.kernel).then(|| {
        format!(
            "{destination} runs Linux {}, and this host {}",
            theirs.kernel, ours.kernel
        )
    });
    (blockers.into_iter().collect(), notes.into_iter().collect())
}

/// Whether a program can use the feature: an extension of the instruction set, by the kernel's names of them.
fn matters(feature: &str) -> bool {
    const EXACT: [&str; 26] = [
        "adx",
        "aes",
        "bmi1",
        "bmi2",
        "clflushopt",
        "clwb",
        "cx16",
        "erms",
        "f16c",
        "fma",
        "fsrm",
        "gfni",
        "lahf_lm",
        "lzcnt",
        "abm",
        "movbe",
        "movdiri",
        "movdir64b",
        "pclmulqdq",
        "popcnt",
        "rdpid",
        "rdrand",
        "rdseed",
        "rdtscp",
        "vaes",
        "vpclmulqdq",
    ];
    const FAMILIES: [&str; 5] = ["sse", "ssse", "avx", "amx", "sha"];
    EXACT.contains(&feature) || FAMILIES.iter().any(|family| feature.starts_with(family))
}

/// What of the processes of an instance goes, but not as their programs may think.
pub fn notes(record: &Record, init: i32) -> Vec<String> {
    if !record.rnics.iter().any(|rnic| rnic.driver.starts_with("mlx")) {
        return Vec::new();
    }
    let processes = verbatim_container::with_rnics(init).unwrap_or_default();
    let linked = processes
        .iter()
        .filter(|(pid, _)| has_provider_of_its_own(*pid, "libmlx5"));
    let words = linked.map(|(pid, program)| {
        format!(
            "process {pid} ({program}) has libmlx5 loaded itself: what it makes by mlx5dv_* on an RNIC is not known to its guest library"
        )
    });
    words.collect()
}

/// Whether a library is mapped twice: once in the namespace of the guest library's copy of libibverbs, and once in the program's own.
fn has_provider_of_its_own(pid: i32, library: &str) -> bool {
    let maps = std::fs::read(Path::new("/proc").join(pid.to_string()).join("maps")).unwrap_or_default();
    starts_of(&String::from_utf8_lossy(&maps), library) > 1
}

/// How often the beginning of the library's file is mapped.
fn starts_of(maps: &str, library: &str) -> usize {
    let is_start = |line: &&str| {
        let mut fields = line.split_ascii_whitespace().skip(2);
        let (offset, path) = (fields.next(), fields.nth(2));
        let name = path.and_then(|path| path.rsplit('/').next()).unwrap_or_default();
        offset == Some("00000000") && name.starts_with(library)
    };
    maps.lines().filter(is_start).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rnic(driver: &str, abi: u32) -> Rnic {
        Rnic {
            name: "mlx5_0".to_owned(),
            driver: driver.to_owned(),
            abi,
        }
    }

    #[test]
    fn an_rnic_of_another_driver_or_abi_will_not_do() {
        assert_eq!(difference(&rnic("mlx5_core", 1), &rnic("mlx5_core", 1)), None);
        let driver = difference(&rnic("mlx5_core", 1), &rnic("irdma", 1)).unwrap();
        assert!(
            driver.contains("of the driver irdma there, and of mlx5_core"),
            "{driver}"
        );
        let abi = difference(&rnic("mlx5_core", 1), &rnic("mlx5_core", 2)).unwrap();
        assert!(abi.contains("version 2 there, and of version 1"), "{abi}");
    }

    fn host(kernel: &str, features: &[&str]) -> CheckInstanceReply {
        CheckInstanceReply {
            kernel: kernel.to_owned(),
            cpu_features: features.iter().map(|feature| (*feature).to_owned()).collect(),
            ..Default::default()
        }
    }

    #[test]
    fn a_processor_must_have_what_programs_may_use() {
        let ours = host("6.12.1", &["fpu", "avx2", "hypervisor", "aes"]);
        let (blockers, notes) = differences(&ours, &host("6.12.1", &["aes", "avx2", "avx512f"]), "b");
        assert_eq!((blockers.len(), notes.len()), (0, 0));
        let (blockers, notes) = differences(&ours, &host("6.1.0", &["aes"]), "b");
        assert!(blockers[0].contains("lack avx2,"), "{blockers:?}");
        assert!(notes[0].contains("b runs Linux 6.1.0"), "{notes:?}");
        let silent = differences(&ours, &CheckInstanceReply::default(), "b");
        assert_eq!(silent, Default::default());
    }

    #[test]
    fn features_are_those_of_the_first_processor() {
        let text = "processor\t: 0\nflags\t\t: fpu sse2\nbugs\t:\n\nprocessor\t: 1\nflags\t\t: none\n";
        assert_eq!(features(text), ["fpu", "sse2"]);
        assert!(!features(&std::fs::read_to_string("/proc/cpuinfo").unwrap()).is_empty());
    }

    #[test]
    fn a_provider_that_is_loaded_twice_is_found() {
        let one = "7f0000000000-7f0000001000 r--p 00000000 fe:00 12 /usr/lib/libibverbs/libmlx5-rdmav34.so\n\
                   7f0000001000-7f0000002000 r-xp 00001000 fe:00 12 /usr/lib/libibverbs/libmlx5-rdmav34.so\n";
        let two = format!("{one}7e0000000000-7e0000001000 r--p 00000000 fe:00 12 /usr/lib/libmlx5.so.1.24\n");
        assert_eq!((starts_of(one, "libmlx5"), starts_of(&two, "libmlx5")), (1, 2));
        assert_eq!(starts_of("", "libmlx5"), 0);
    }
}
