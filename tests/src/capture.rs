//! What an RNIC puts on the wire, taken there by `dumpcap` and decoded by `tshark`: a witness that shares no code with
//! the RNIC.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail, ensure};

use crate::icrc;
use crate::lab::TestLab;
use crate::running::Running;
use crate::wait::eventually;

const START_LIMIT: Duration = Duration::from_secs(20);
const END_LIMIT: Duration = Duration::from_secs(60);
/// The interface of a lab's host.
const INTERFACE: &str = "br0";

/// A capture under way.
pub struct Capture<'a> {
    lab: &'a TestLab,
    host: String,
    dumpcap: Running,
    file: PathBuf,
}

/// A frame, as `tshark` sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Its number in the file, from 1.
    pub number: u64,
    /// The protocols in it, from outside to inside, as `eth:ethertype:ip:udp:infiniband:data`.
    pub protocols: String,
    /// The operation code of its base transport header.
    pub opcode: Option<u8>,
    /// What `tshark` finds wrong with it; empty if nothing.
    pub complaint: String,
}

impl<'a> Capture<'a> {
    /// Starts to write what `host` sends and receives on RoCEv2's port to `file`, and returns when that has begun.
    pub fn start(lab: &'a TestLab, host: &str, file: &Path) -> anyhow::Result<Self> {
        // The kernel shows large batches as they are before they are cut; so each sender's has to cut them earlier.
        let whole_packets = ["ip", "link", "set", "dev", INTERFACE, "gso_max_segs", "1"];
        for sender in lab.lab().hosts() {
            lab.start_plain(sender, &whole_packets)?.succeed(START_LIMIT)?;
        }
        let path = file.to_str().context("a path that is not UTF-8")?;
        // The shell tells the process number, which is another one outside of the host.
        let script = format!("echo $$; exec dumpcap -q -P -i {INTERFACE} -f 'udp port 4791' -w {path}");
        let dumpcap = lab.start_plain(host, &["sh", "-c", &script])?;
        let mut capture = Self {
            lab,
            host: host.to_owned(),
            dumpcap,
            file: file.to_owned(),
        };
        // It tells the name of the file when it listens, and has then written the header.
        eventually("a capture", START_LIMIT, || {
            if capture.dumpcap.has_ended()? {
                bail!("dumpcap ended");
            }
            Ok(fs::metadata(&capture.file)
                .is_ok_and(|file| file.len() > 0)
                .then_some(()))
        })?;
        Ok(capture)
    }

    /// Ends it, after everything that has been on the wire until now.
    pub fn finish(self) -> anyhow::Result<PathBuf> {
        // What the kernel has not handed over yet would be lost: wait for a packet that comes after all others.
        let other = self.lab.lab().hosts().find(|host| *host != self.host);
        let address = self
            .lab
            .address(other.context("a lab of one host has no wire")?)?;
        let send = format!("printf {LAST} >/dev/udp/{address}/4791");
        self.lab
            .start_plain(&self.host, &["bash", "-c", &send])?
            .succeed(END_LIMIT)?;
        eventually("the last packet in the capture", START_LIMIT, || {
            let bytes = fs::read(&self.file)?;
            Ok(bytes
                .windows(LAST.len())
                .any(|bytes| bytes == LAST.as_bytes())
                .then_some(()))
        })?;
        let pid = self.dumpcap.stdout()?;
        let interrupt = ["kill", "-INT", pid.trim()];
        self.lab.start_plain(&self.host, &interrupt)?.succeed(END_LIMIT)?;
        self.dumpcap.succeed(END_LIMIT)?;
        cut(&self.file)?;
        Ok(self.file)
    }
}

/// The content of the packet that ends a capture.
const LAST: &str = "no-more-packets-after-this";

/// Takes the packet that ends a capture out of the file.
fn cut(file: &Path) -> anyhow::Result<()> {
    let bytes = fs::read(file)?;
    let last = |record: &&[u8]| record.windows(LAST.len()).any(|bytes| bytes == LAST.as_bytes());
    let mut kept = bytes[..HEADER_BYTES].to_vec();
    for record in records(&bytes)?.into_iter().filter(|record| !last(record)) {
        kept.extend_from_slice(record);
    }
    Ok(fs::write(file, kept)?)
}

/// Of the format of `dumpcap -P`, pcap-savefile(5).
const HEADER_BYTES: usize = 24;
const RECORD_HEADER_BYTES: usize = 16;

/// The packets of a capture, each after its header.
fn records(bytes: &[u8]) -> anyhow::Result<Vec<&[u8]>> {
    let mut rest = bytes.get(HEADER_BYTES..).context("a capture without a header")?;
    let mut records = Vec::new();
    while !rest.is_empty() {
        let length = rest.get(8..12).context("a capture that was cut off")?;
        let length = u32::from_le_bytes(length.try_into()?) as usize;
        let record = rest.get(..RECORD_HEADER_BYTES + length);
        let record = record.context("a capture that was cut off")?;
        records.push(record);
        rest = &rest[record.len()..];
    }
    Ok(records)
}

/// Decodes a capture with `tshark`.
pub fn decode(file: &Path) -> anyhow::Result<Vec<Frame>> {
    let mut command = Command::new("tshark");
    command.arg("-r").arg(file).args(["-n", "-T", "fields"]);
    for field in FIELDS {
        command.args(["-e", field]);
    }
    for protocol in GUESSED {
        command.args(["--disable-protocol", protocol]);
    }
    let finished = Running::start("tshark", command)?.succeed(END_LIMIT)?;
    finished.stdout.lines().map(frame).collect()
}

/// Protocols that `tshark` takes a payload for by its looks. Those of the programs here are random, and look like anything
/// now and then.
const GUESSED: [&str; 9] = [
    "smc",
    "smb_direct",
    "rpcordma",
    "nvme-rdma",
    "lnet",
    "iser",
    "infiniband.eoib",
    "infiniband_sdp",
    "fcoib",
];

/// What `tshark` is asked for, in the order in which [`frame`] reads it.
const FIELDS: [&str; 6] = [
    "frame.number",
    "frame.protocols",
    "infiniband.bth.opcode",
    "_ws.malformed",
    "_ws.expert.severity",
    "_ws.expert.message",
];

/// The least severe of `tshark`'s remarks that counts, a warning. A note is, for example, that a packet will not be
/// routed, which is what a program asks for with a hop limit of 1.
const WARNING: u32 = 0x60_0000;

fn frame(line: &str) -> anyhow::Result<Frame> {
    let columns: Vec<_> = line.split('\t').collect();
    let [number, protocols, opcode, malformed, severity, message] = columns[..] else {
        bail!("tshark printed {line:?}");
    };
    let severities = severity.split(',').filter(|severity| !severity.is_empty());
    let severities: Vec<u32> = severities
        .map(str::parse)
        .collect::<Result<_, _>>()
        .with_context(|| format!("not a severity in {line:?}"))?;
    let bad = !malformed.is_empty() || severities.iter().any(|severity| *severity >= WARNING);
    Ok(Frame {
        number: number
            .parse()
            .with_context(|| format!("not a number in {line:?}"))?,
        protocols: protocols.to_owned(),
        opcode: match opcode {
            "" => None,
            opcode => Some(
                opcode
                    .parse()
                    .with_context(|| format!("not an operation code in {line:?}"))?,
            ),
        },
        complaint: if bad {
            format!("{malformed} {message}")
        } else {
            String::new()
        },
    })
}

/// Checks the invariant CRC of every packet in a capture; how many there were.
pub fn check_icrc(file: &Path) -> anyhow::Result<usize> {
    /// Destination, source, type.
    const ETHERNET_BYTES: usize = 14;
    let bytes = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    let records = records(&bytes)?;
    for (number, record) in (1..).zip(&records) {
        let frame = &record[RECORD_HEADER_BYTES..];
        let packet = frame.get(ETHERNET_BYTES..).unwrap_or_default();
        let (found, right) = icrc::of_packet(packet).with_context(|| format!("frame {number}"))?;
        ensure!(
            found == right,
            "frame {number}: the invariant CRC is {found:08x} instead of {right:08x}: {frame:02x?}"
        );
    }
    Ok(records.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_tshark_prints_is_read() {
        let good = frame("7\teth:ethertype:ip:udp:infiniband:data\t17\t\t\t").unwrap();
        assert_eq!(
            (good.number, good.opcode, good.complaint.as_str()),
            (7, Some(17), "")
        );
        let noted = frame("7\teth:ethertype:ip:udp:infiniband\t17\t\t4194304\tonly 1").unwrap();
        assert_eq!(noted.complaint, "");
        for bad in [
            "8\teth\t\tMalformed Packet\t\tan exception",
            "8\teth\t\t\t4194304,8388608\tan exception",
        ] {
            let bad = frame(bad).unwrap();
            assert_eq!(bad.opcode, None);
            assert!(bad.complaint.contains("exception"), "{bad:?}");
        }
        assert!(frame("8\teth").is_err());
    }
}
