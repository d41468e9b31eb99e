//! Whether the next host has what a virtual machine has here: said before anything is sent.
//!
//! The source sends what only it knows ([`Needs`]); the destination compares that with what its own QEMU offers ([`compare`]). A domain of libvirt's is libvirt's
//! to compare, and it does.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use verbatim_vm::{Arguments, Machine, Processor};

use super::guest::Guest;
use crate::agent::Shared;
use crate::instances::record::Record;

/// How long it counts what a QEMU of this host has answered.
const FRESH: Duration = Duration::from_secs(10);

/// So many answers are kept.
const KEPT: usize = 64;

/// All sockets of Unix of this network namespace.
const SOCKETS: &str = "/proc/net/unix";

/// What a virtual machine has at its source.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Needs {
    #[serde(default)]
    processor: Option<Processor>,
    /// Its TPM's servers.
    #[serde(default)]
    tpms: Vec<Server>,
    /// That of the source's links; unset: the kernel's usual one.
    #[serde(default)]
    mtu: Option<u32>,
}

/// Who listens at a path, known again on every host of the same kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Server {
    path: PathBuf,
    /// The kernel's boot, and the socket's number in it.
    boot: String,
    inode: u64,
}

/// What the destination finds.
#[derive(Debug, Default)]
pub struct Fit {
    /// What stands in the way.
    pub blockers: Vec<String>,
    /// What an operator should know.
    pub notes: Vec<String>,
}

/// What of one that runs here is to be compared, as it is sent. Empty: nothing.
pub async fn needs(agent: &Shared, guest: &Guest, machine: &Machine) -> anyhow::Result<String> {
    let Guest::Qemu(arguments) = guest else {
        return Ok(String::new());
    };
    let sockets = std::fs::read_to_string(SOCKETS).unwrap_or_default();
    let tpms = arguments.tpm_sockets();
    let needs = Needs {
        processor: Some(machine.processor(arguments).await?),
        tpms: tpms.iter().filter_map(|path| server(&sockets, path)).collect(),
        mtu: agent.config.mtu,
    };
    Ok(serde_json::to_string(&needs)?)
}

/// Compares that with this host. `sent`: by the source.
pub async fn compare(agent: &Shared, record: &Record, sent: &str) -> Fit {
    let (Some(Guest::Qemu(arguments)), false) = (&record.machine, sent.is_empty()) else {
        return Fit::default();
    };
    let needs: Needs = match serde_json::from_str(sent) {
        Ok(needs) => needs,
        Err(error) => {
            return Fit {
                blockers: vec![format!(
                    "what the virtual machine has at its source is not known: {error}"
                )],
                notes: Vec::new(),
            };
        }
    };
    let mut fit = Fit::default();
    if !is_hosts_own(Path::new(arguments.program())) {
        fit.notes.push(format!(
            "{} there is not root's alone, and is not asked which processor and which machines it has",
            arguments.program()
        ));
    } else {
        match offered(arguments).await {
            Ok(there) => {
                let here = needs.processor.unwrap_or_default();
                match here.missed_by(&there) {
                    Some(why) => fit.blockers.push(why),
                    None => fit.notes.extend(here.differs_from(&there)),
                }
            }
            Err(error) => fit.blockers.push(error),
        }
    }
    let sockets = std::fs::read_to_string(SOCKETS).unwrap_or_default();
    let tpms = arguments.tpm_sockets();
    fit.blockers
        .extend(tpms.iter().filter_map(|path| no_tpm(&sockets, path, &needs.tpms)));
    let (own, promised) = (agent.config.mtu.unwrap_or(ETHERNET), arguments.promised_mtu());
    let source = needs.mtu.unwrap_or(ETHERNET);
    if let Some(promised) = promised.filter(|promised| *promised > own) {
        fit.blockers.push(format!(
            "a card promises its guest an MTU of {promised} (host_mtu=), and links there have {own}: start that agent with --mtu {promised}, where its network carries that"
        ));
    } else if source > own && arguments.has_tap() {
        fit.notes.push(format!(
            "links of the source have an MTU of {source}, and those there of {own}: packets that are longer would be lost"
        ));
    }
    fit
}

/// The MTU of a link that nobody has given another one.
const ETHERNET: u32 = 1500;

/// Whether a program is one that only root can change: it is started here on behalf of another host.
fn is_hosts_own(program: &Path) -> bool {
    let is_qemu = program
        .file_name()
        .is_some_and(|name| name.as_encoded_bytes().starts_with(b"qemu"));
    if !is_qemu {
        return false;
    }
    match program.components().count() {
        // It is found where the agent's own programs are.
        1 => true,
        // One that is not there is said to be so by whoever starts it.
        _ => std::fs::metadata(program).map_or(true, |file| file.uid() == 0 && file.mode() & 0o022 == 0),
    }
}

/// What this host's QEMU gives to such a virtual machine, or why it does not.
async fn offered(arguments: &Arguments) -> Result<Processor, String> {
    static KNOWN: Mutex<Option<HashMap<Vec<String>, (Instant, Processor)>>> = Mutex::new(None);
    let key = arguments.asked();
    let known = |known: &mut Option<HashMap<_, (Instant, Processor)>>| {
        let known = known.get_or_insert_default();
        known.retain(|_, (since, _)| since.elapsed() < FRESH);
        known.get(&key).map(|(_, processor)| processor.clone())
    };
    let found = known(&mut KNOWN.lock().expect("no panic under this lock"));
    if let Some(found) = found {
        return Ok(found);
    }
    let processor = match arguments.offered().await {
        Ok(offered) => offered.processor,
        Err(error) => return Err(error.to_string()),
    };
    let mut all = KNOWN.lock().expect("no panic under this lock");
    let all = all.get_or_insert_default();
    if all.len() < KEPT {
        all.insert(key, (Instant::now(), processor.clone()));
    }
    Ok(processor)
}

/// Who listens there, by what the kernel lists.
fn server(sockets: &str, path: &Path) -> Option<Server> {
    let listens = sockets.lines().find_map(|line| {
        // Num RefCount Protocol Flags Type St Inode Path
        let mut words = line.split_whitespace();
        let (flags, inode) = (words.nth(3)?, words.nth(2)?);
        let accepts = u32::from_str_radix(flags, 16).ok()? & 0x10000 != 0;
        let bound = words.next()?;
        (accepts && is_at(Path::new(bound), path)).then(|| inode.parse().ok())?
    });
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    Some(Server {
        path: path.to_owned(),
        boot: boot.trim().to_owned(),
        inode: listens?,
    })
}

/// Whether a server that has bound itself to one path is found by the other.
fn is_at(bound: &Path, path: &Path) -> bool {
    let resolved = |path: &Path| std::fs::canonicalize(path).ok();
    match bound.is_absolute() {
        true => bound == path || resolved(bound).is_some_and(|bound| Some(bound) == resolved(path)),
        // In a folder that only it knows.
        false => path.ends_with(bound),
    }
}

/// Why a virtual machine's TPM is not to be had here.
fn no_tpm(sockets: &str, path: &Path, theirs: &[Server]) -> Option<String> {
    let shown = path.display();
    match server(sockets, path) {
        None => Some(format!(
            "nobody listens at {shown} there, where the virtual machine has its TPM: start swtpm there with that socket, and with a state of its own that is empty (it comes with \
             the guest)"
        )),
        Some(own) if theirs.contains(&own) => Some(format!(
            "the TPM's server at {shown} there is the source's own, which serves one QEMU: start another swtpm for the destination, at a path that each host has for itself"
        )),
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_tpm_needs_a_server_here_that_is_another_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tpm");
        let listed = || std::fs::read_to_string(SOCKETS).unwrap();
        let none = no_tpm(&listed(), &path, &[]).unwrap();
        assert!(none.contains("nobody listens at"), "{none}");
        let listener = UnixListener::bind(&path).unwrap();
        let theirs = server(&listed(), &path).unwrap();
        assert!(theirs.inode != 0 && theirs.boot.len() == 36, "{theirs:?}");
        let same = no_tpm(&listed(), &path, std::slice::from_ref(&theirs)).unwrap();
        assert!(same.contains("the source's own"), "{same}");
        drop(listener);
        std::fs::remove_file(&path).unwrap();
        let _other = UnixListener::bind(&path).unwrap();
        assert_eq!(no_tpm(&listed(), &path, &[theirs]), None);
        // A socket that nobody listens at any more.
        let socket = "0000000000000000: 00000002 00000000 00000000 0001 01 77 /tpm";
        assert!(server(socket, Path::new("/tpm")).is_none());
    }

    #[test]
    fn only_programs_that_root_alone_can_change_are_started_for_others() {
        let folder = tempfile::tempdir().unwrap();
        let own = folder.path().join("qemu-system-x86_64");
        std::fs::write(&own, "").unwrap();
        std::fs::set_permissions(&own, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        assert!(!is_hosts_own(&own));
        assert!(!is_hosts_own(Path::new("sh")) && !is_hosts_own(Path::new("/bin/sh")));
        assert!(is_hosts_own(Path::new("qemu-system-x86_64")));
        assert!(is_hosts_own(Path::new("/no/such/qemu-system-x86_64")));
    }

    #[test]
    fn what_another_version_sends_is_read() {
        let needs: Needs = serde_json::from_str(
            r#"{"processor":{"model":"max","features":["sse2"]},"of_a_later_version":1}"#,
        )
        .unwrap();
        assert!(needs.processor.is_some() && needs.tpms.is_empty() && needs.mtu.is_none());
        let needs: Needs = serde_json::from_str("{}").unwrap();
        assert!(needs.processor.is_none());
    }
}
