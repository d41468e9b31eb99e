//! The processor that a guest sees, and whether another host's QEMU gives it the same.
//!
//! QEMU does not check that: a guest keeps using the features that it found at its start, and may meet an
//! instruction that is missing. `-cpu host` and `max` differ between kinds of hosts, or releases.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;

use crate::arguments::Arguments;
use crate::error::{Error, Result};
use crate::limit::in_time;
use crate::machine::Machine;
use crate::qmp::Qmp;
use crate::words::last_words;

/// Limit for a QEMU that is started only for its answers.
const ANSWERS: Duration = Duration::from_secs(30);

/// Limit of its error output that is read.
const COMPLAINTS: u64 = 16 << 10;

/// Properties of a processor that are numbers or words, by the names of QEMU's object.
const FACTS: [&str; 5] = ["vendor", "family", "model", "stepping", "phys-bits"];

/// Properties that are on or off, but are no features: they tell QEMU how to make a processor.
const WAYS: &[&str] = &[
    "check",
    "enforce",
    "kvm",
    "migratable",
    "legacy-cache",
    "l3-cache",
    "fill-mtrr-mask",
    "full-cpuid-auto-level",
    "cpuid-0xb",
    "tcg-cpuid",
    "vmware-cpuid-freq",
    "host-phys-bits",
    "host-cache-info",
    "hotplugged",
    "start-powered-off",
    "realized",
];

/// Limit of the features that a message names.
const NAMED: usize = 24;

/// A processor, as a guest sees it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Processor {
    /// The kind: `max`, `host`, `Skylake-Server`.
    model: String,
    /// Its features, by QEMU's names.
    features: BTreeSet<String>,
    /// Features that QEMU knows and it lacks.
    #[serde(skip)]
    lacks: BTreeSet<String>,
    /// Values of CPUID, by leaf and register; empty if QEMU does not show them.
    #[serde(default)]
    words: BTreeMap<String, u64>,
    /// [`FACTS`].
    #[serde(default)]
    facts: BTreeMap<String, String>,
}

/// The answer to `query-cpu-model-expansion`.
#[derive(Debug, Deserialize)]
struct Expansion {
    model: Model,
}

#[derive(Debug, Deserialize)]
struct Model {
    #[serde(default)]
    props: Map<String, Value>,
}

/// A register of CPUID.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Word {
    cpuid_register: String,
    cpuid_input_eax: u64,
    #[serde(default)]
    cpuid_input_ecx: u64,
    features: u64,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Cpu {
    qom_path: String,
}

impl Processor {
    fn of(model: String, expanded: &Map<String, Value>, unavailable: &[String]) -> Self {
        let spelled = |name: &str| name.replace('_', "-");
        let is_feature = |name: &str| !name.starts_with("x-") && !WAYS.contains(&name);
        let (mut features, mut lacks) = (BTreeSet::new(), BTreeSet::new());
        for (name, value) in expanded {
            let name = spelled(name);
            let Some(is_on) = value.as_bool().filter(|_| is_feature(&name)) else {
                continue;
            };
            match is_on && !unavailable.iter().any(|lacking| spelled(lacking) == name) {
                true => features.insert(name),
                false => lacks.insert(name),
            };
        }
        Self {
            model,
            features,
            lacks,
            ..Self::default()
        }
    }

    /// Features of this one that the other lacks, in words: the guest would miss them there. `None` if there
    /// are none.
    pub fn missed_by(&self, there: &Self) -> Option<String> {
        let mut missed: BTreeSet<&str> = self
            .features
            .intersection(&there.lacks)
            .map(String::as_str)
            .collect();
        let lost = self.words.iter().filter_map(|(register, word)| {
            let lost = word & !there.words.get(register)?;
            (lost != 0).then(|| format!("{register} {lost:#x}"))
        });
        let lost: Vec<_> = lost.collect();
        if !lost.is_empty() {
            // Features that the other release does not know by name.
            let unnamed = self.features.difference(&there.features);
            missed.extend(unnamed.map(String::as_str));
        }
        let mut why = Vec::new();
        if !missed.is_empty() {
            let more = missed.len().saturating_sub(NAMED);
            let names: Vec<_> = missed.into_iter().take(NAMED).collect();
            let more = match more {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            why.push(format!("lacks {}{more}", names.join(", ")));
        } else if !lost.is_empty() {
            why.push(format!("lacks features (CPUID {})", lost.join(", ")));
        }
        let fact = |of: &Self, name: &str| of.facts.get(name).cloned().unwrap_or_default();
        let (here, other) = (fact(self, "vendor"), fact(there, "vendor"));
        if !here.is_empty() && !other.is_empty() && here != other {
            why.push(format!("is one of {other}, and the guest has one of {here}"));
        }
        let bits = |of: &Self| fact(of, "phys-bits").parse::<u32>().unwrap_or(0);
        if bits(there) != 0 && bits(there) < bits(self) {
            why.push(format!(
                "has physical addresses of {} bits, and the guest's of {}",
                bits(there),
                bits(self)
            ));
        }
        (!why.is_empty()).then(|| {
            format!(
                "the guest's processor (-cpu {}) is another one there, which {}: start the virtual machine with `-cpu` \
                 and a model that both hosts have, \
                 or with these features switched off",
                self.model,
                why.join(", and ")
            )
        })
    }

    /// Other differences, which are no obstacle.
    pub fn differs_from(&self, there: &Self) -> Option<String> {
        let differs = |name: &&&str| match (self.facts.get(**name), there.facts.get(**name)) {
            (Some(here), Some(other)) => here != other,
            _ => false,
        };
        let names: Vec<_> = FACTS.iter().filter(differs).copied().collect();
        (!names.is_empty()).then(|| {
            format!(
                "the processor there is another one ({}), with all features of the guest's",
                names.join(", ")
            )
        })
    }
}

impl Machine {
    /// The processor of the guest.
    pub async fn processor(&self, arguments: &Arguments) -> Result<Processor> {
        of_qemu(self.qmp(), arguments.cpu()).await
    }
}

/// The processor of a QEMU whose `-cpu` has this value.
async fn of_qemu(qmp: &Qmp, option: Option<&str>) -> Result<Processor> {
    let cpus: Vec<Cpu> = qmp.ask("query-cpus-fast", json!({})).await?;
    let path = &cpus
        .first()
        .ok_or_else(|| Error::Malformed("it has no processor".to_owned()))?
        .qom_path;
    let get = |property: &str| json!({"path": path, "property": property});
    let kind: String = qmp.ask("qom-get", get("type")).await?;
    // `max-x86_64-cpu`
    let mut parts: Vec<_> = kind.split('-').collect();
    if parts.last() == Some(&"cpu") && parts.len() > 2 {
        parts.truncate(parts.len() - 2);
    }
    let name = parts.join("-");
    let expand =
        |props: &Map<String, Value>| json!({"type": "full", "model": {"name": name, "props": props}});
    let asked = properties(option.unwrap_or_default());
    let command = "query-cpu-model-expansion";
    let expanded = match qmp.ask::<Expansion>(command, expand(&asked)).await {
        // One of them is not a property of the model by this name.
        Err(Error::Refused { .. }) if !asked.is_empty() => qmp.ask(command, expand(&Map::new())).await,
        expanded => expanded,
    };
    let expanded = maybe(expanded)?
        .map(|expanded| expanded.model.props)
        .unwrap_or_default();
    let unavailable: Option<Vec<String>> = maybe(qmp.ask("qom-get", get("unavailable-features")).await)?;
    let mut processor = Processor::of(name.clone(), &expanded, &unavailable.unwrap_or_default());
    let words: Vec<Word> = maybe(qmp.ask("qom-get", get("feature-words")).await)?.unwrap_or_default();
    let words = words.into_iter().map(|word| {
        let register = format!(
            "{:#x}.{}:{}",
            word.cpuid_input_eax, word.cpuid_input_ecx, word.cpuid_register
        );
        (register, word.features)
    });
    processor.words = words.collect();
    for fact in FACTS {
        if let Some(value) = maybe::<Value>(qmp.ask("qom-get", get(fact)).await)? {
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            processor.facts.insert(fact.to_owned(), value);
        }
    }
    Ok(processor)
}

/// An answer that not every architecture has.
fn maybe<T>(answer: Result<T>) -> Result<Option<T>> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(Error::Refused { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Properties in the value of `-cpu`: `max,-avx2,x2apic=off,+pcid`.
fn properties(option: &str) -> Map<String, Value> {
    let said = option.split(',').skip(1).filter(|part| !part.is_empty());
    let said = said.map(|part| {
        if let Some((name, value)) = part.split_once('=') {
            let value = match value {
                "on" | "true" => json!(true),
                "off" | "false" => json!(false),
                value => value.parse::<u64>().map_or(json!(value), |number| json!(number)),
            };
            return (name.to_owned(), value);
        }
        match (part.strip_prefix('+'), part.strip_prefix('-')) {
            (Some(name), _) => (name.to_owned(), json!(true)),
            (None, Some(name)) => (name.to_owned(), json!(false)),
            (None, None) => (part.to_owned(), json!(true)),
        }
    });
    said.collect()
}

/// The offer of a host's QEMU to a virtual machine.
#[derive(Debug, Clone)]
pub struct Offered {
    /// The processor that its guest would have.
    pub processor: Processor,
}

impl Arguments {
    /// The offer of this host's QEMU to a machine with this command line. QEMU is started for that, without
    /// disks and networks, and ends; no guest runs. If it has no such machine type, the error names it.
    pub async fn offered(&self) -> Result<Offered> {
        let (ours, theirs) = UnixStream::pair().map_err(Error::io("make a pair of sockets"))?;
        let theirs = theirs.into_std().map_err(Error::io("make a pair of sockets"))?;
        theirs
            .set_nonblocking(false)
            .map_err(Error::io("make a pair of sockets"))?;
        let output = theirs.try_clone().map_err(Error::io("copy a socket"))?;
        let mut command = tokio::process::Command::new(self.program());
        command.args(self.bare()).args(["-qmp", "stdio"]);
        command.stdin(Stdio::from(OwnedFd::from(theirs)));
        command.stdout(Stdio::from(OwnedFd::from(output)));
        command.stderr(Stdio::piped()).kill_on_drop(true);
        let asked = async {
            let mut child = command.spawn().map_err(|error| match error.kind() {
                std::io::ErrorKind::NotFound => Error::Arguments(format!(
                    "{} is not there: install it (Debian: qemu-system-x86)",
                    self.program()
                )),
                _ => Error::io(format!("start {}", self.program()))(error),
            })?;
            // Only the child has its ends of the pair from here on.
            drop(command);
            let mut complaints = child.stderr.take();
            let answered = async {
                let qmp = Qmp::of(ours).await?;
                let processor = of_qemu(&qmp, self.cpu()).await?;
                let (Ok(()) | Err(_)) = qmp.run("quit", json!({})).await;
                Ok(Offered { processor })
            };
            match answered.await {
                Err(Error::Gone) => {
                    let mut said = Vec::new();
                    if let Some(complaints) = &mut complaints {
                        let read = complaints.take(COMPLAINTS).read_to_end(&mut said).await;
                        read.map_err(Error::io("read what QEMU says"))?;
                    }
                    let said = String::from_utf8_lossy(&said).into_owned();
                    Err(self.refused(&said).await)
                }
                answered => answered,
            }
        };
        in_time("answered what it offers", ANSWERS, asked).await
    }

    /// The reason why QEMU does not start with this command line, by its output.
    async fn refused(&self, said: &str) -> Error {
        let listed = tokio::process::Command::new(self.program())
            .args(["-machine", "help"])
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .output()
            .await;
        let listed = listed.map(|listed| String::from_utf8_lossy(&listed.stdout).into_owned());
        let machine = self.machine();
        match listed {
            Ok(types) if !types.is_empty() && !has_machine(&types, machine) => Error::Arguments(format!(
                "the QEMU there has no machine `{machine}`{}: start the virtual machine with a type of machine that the \
                 QEMUs of both hosts have (`-M`), or upgrade the \
                 one there",
                newest(&types, machine)
                    .map(|other| format!(", and the newest of that kind is {other}"))
                    .unwrap_or_default()
            )),
            _ => Error::Arguments(format!(
                "the QEMU there does not start such a machine: {}",
                last_words(said).unwrap_or_else(|| "it does not say why".to_owned())
            )),
        }
    }
}

fn has_machine(types: &str, machine: &str) -> bool {
    types.lines().any(|line| line.split(' ').next() == Some(machine))
}

/// The newest type of the same kind, in a list as `-machine help` prints it: `pc-q35-7.2`.
fn newest<'a>(types: &'a str, machine: &str) -> Option<&'a str> {
    let version = |name: &str| -> Option<(u32, u32)> {
        let (_, version) = name.rsplit_once('-')?;
        let (major, minor) = version.split_once('.')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    };
    let (kind, _) = machine.rsplit_once('-')?;
    let names = types.lines().filter_map(|line| line.split(' ').next());
    let same = names.filter(|name| name.rsplit_once('-').is_some_and(|(other, _)| other == kind));
    same.filter(|name| version(name).is_some())
        .max_by_key(|name| version(name))
}

#[cfg(test)]
mod tests;
