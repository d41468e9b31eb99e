//! Comparison of the next host with the needs of a virtual machine, before anything is sent.
//!
//! The source sends the machine's [`Needs`]; the destination compares them with the offer of its own QEMU
//! ([`compare`]). libvirt compares its own domains.

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
use crate::instances::storage::servers::{self, Reached};

/// Lifetime of an answer of a QEMU of this host.
const FRESH: Duration = Duration::from_secs(10);

/// Limit of the answers that are kept.
const KEPT: usize = 64;

/// All Unix sockets of this network namespace.
const SOCKETS: &str = "/proc/net/unix";

/// Properties of a virtual machine at its source.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Needs {
    #[serde(default)]
    processor: Option<Processor>,
    /// Its TPM's servers.
    #[serde(default)]
    tpms: Vec<Server>,
    /// MTU of the source's links; unset: the kernel's default.
    #[serde(default)]
    mtu: Option<u32>,
    /// The servers of its disks.
    #[serde(default)]
    servers: Vec<Reached>,
}

/// A listener at a path, recognised by every host that shares its kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Server {
    path: PathBuf,
    /// The kernel's boot, and the socket's number in it.
    boot: String,
    inode: u64,
}

/// The destination's findings.
#[derive(Debug, Default)]
pub struct Fit {
    /// Obstacles.
    pub blockers: Vec<String>,
    /// Notes for an operator.
    pub notes: Vec<String>,
}

/// The needs of a machine that runs here, as they are sent. Empty: nothing to compare. `servers`: those of its
/// disks.
pub async fn needs(
    agent: &Shared,
    guest: &Guest,
    machine: &Machine,
    servers: &[Reached],
) -> anyhow::Result<String> {
    let servers = servers.to_vec();
    let Guest::Qemu(arguments) = guest else {
        if servers.is_empty() {
            return Ok(String::new());
        }
        let needs = Needs {
            servers,
            ..Needs::default()
        };
        return Ok(serde_json::to_string(&needs)?);
    };
    let sockets = std::fs::read_to_string(SOCKETS).unwrap_or_default();
    let tpms = arguments.tpm_sockets();
    let needs = Needs {
        processor: Some(machine.processor(arguments).await?),
        tpms: tpms.iter().filter_map(|path| server(&sockets, path)).collect(),
        mtu: agent.config.mtu,
        servers,
    };
    Ok(serde_json::to_string(&needs)?)
}

/// Compares the needs with this host. `sent`: the source's text.
pub async fn compare(agent: &Shared, record: &Record, sent: &str) -> Fit {
    let (Some(guest), false) = (&record.machine, sent.is_empty()) else {
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
    let mut fit = Fit {
        blockers: servers::others(&needs.servers).await,
        notes: Vec::new(),
    };
    let Guest::Qemu(arguments) = guest else {
        return fit;
    };
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
    compare_mtu(arguments, needs.mtu, agent.config.mtu, &mut fit);
    fit
}

/// Compares the MTU of the source's links and of this host's; unset: the kernel's default.
fn compare_mtu(arguments: &Arguments, source: Option<u32>, own: Option<u32>, fit: &mut Fit) {
    let (source, own) = (source.unwrap_or(ETHERNET), own.unwrap_or(ETHERNET));
    if let Some(promised) = arguments.promised_mtu().filter(|promised| *promised > own) {
        fit.blockers.push(format!(
            "a card promises its guest an MTU of {promised} (host_mtu=), and links there have {own}: start that agent \
             with --mtu {promised}, where its network carries that"
        ));
    } else if source > own && arguments.has_tap() {
        fit.notes.push(format!(
            "links of the source have an MTU of {source}, and those there of {own}: packets that are longer would be lost"
        ));
    }
}

/// Default MTU of a link.
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
        // Found among the agent's own programs.
        1 => true,
        // Starting a missing program reports that.
        _ => std::fs::metadata(program).map_or(true, |file| file.uid() == 0 && file.mode() & 0o022 == 0),
    }
}

/// Processors by the questions that QEMUs were asked, and the times of their answers.
type Known = HashMap<Vec<String>, (Instant, Processor)>;

/// The processor that this host's QEMU offers to such a virtual machine, or the reason why it does not.
async fn offered(arguments: &Arguments) -> Result<Processor, String> {
    static KNOWN: Mutex<Option<Known>> = Mutex::new(None);
    let key = arguments.asked();
    let known = |known: &mut Option<Known>| {
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

/// The listener there, by the kernel's list.
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

/// Whether a server that is bound to the path `bound` is found at `path`.
fn is_at(bound: &Path, path: &Path) -> bool {
    let resolved = |path: &Path| std::fs::canonicalize(path).ok();
    match bound.is_absolute() {
        true => bound == path || resolved(bound).is_some_and(|bound| Some(bound) == resolved(path)),
        // Relative to a folder that only the server knows.
        false => path.ends_with(bound),
    }
}

/// The reason why a virtual machine cannot have its TPM here.
fn no_tpm(sockets: &str, path: &Path, theirs: &[Server]) -> Option<String> {
    let shown = path.display();
    match server(sockets, path) {
        None => Some(format!(
            "nobody listens at {shown} there, where the virtual machine has its TPM: start swtpm there with that socket, \
             and with a state of its own that is empty (it comes with the guest)"
        )),
        Some(own) if theirs.contains(&own) => Some(format!(
            "the TPM's server at {shown} there is the source's own, which serves one QEMU: start another swtpm for the \
             destination, at a path that each host has for itself"
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
        // A socket without a listener.
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
    fn links_carry_what_a_card_promises_and_shorter_ones_are_noted() {
        let said = |words: &str, source: Option<u32>, own: Option<u32>| {
            let words: Vec<_> = words.split(' ').collect();
            let mut fit = Fit::default();
            compare_mtu(&Arguments::parse(&words).unwrap(), source, own, &mut fit);
            (fit.blockers, fit.notes)
        };
        let none = (Vec::<String>::new(), Vec::<String>::new());
        let tap = "qemu -netdev tap,id=n -device virtio-net-pci,netdev=n";
        let promises = format!("{tap},host_mtu=9000");
        let (blockers, notes) = said(&promises, Some(9000), None);
        assert!(
            notes.is_empty() && blockers[0].contains("an MTU of 9000 (host_mtu=), and links there have 1500"),
            "{blockers:?}"
        );
        assert_eq!(said(&promises, Some(9000), Some(9000)), none);
        assert_eq!(said(&promises, None, Some(9216)), none);
        let (blockers, notes) = said(tap, Some(9000), Some(4000));
        assert!(
            blockers.is_empty() && notes[0].contains("an MTU of 9000, and those there of 4000"),
            "{notes:?}"
        );
        assert_eq!(said(tap, None, None), none);
        assert_eq!(said(tap, Some(1500), Some(9000)), none);
        assert_eq!(
            said("qemu -netdev user,id=n", Some(9000), None),
            none,
            "no link of the host's"
        );
    }

    #[test]
    fn what_another_version_sends_is_read() {
        let needs: Needs = serde_json::from_str(
            r#"{"processor":{"model":"max","features":["sse2"]},"of_a_later_version":1}"#,
        )
        .unwrap();
        assert!(needs.processor.is_some() && needs.tpms.is_empty() && needs.mtu.is_none());
        assert!(needs.servers.is_empty());
        let needs: Needs = serde_json::from_str("{}").unwrap();
        assert!(needs.processor.is_none());
    }
}
