//! Which version of the protocol two agents speak, or a command and an agent.
//!
//! Both sides say their range in the first call ([`HelloRequest`], [`VersionRequest`](crate::proto::VersionRequest)), and the newest
//! version that both have is spoken. A side of a release that had no ranges says one number, and demands that the answer
//! has the same: so the answer's `protocol` is the version that is agreed, and the range stands beside it.
//!
//! A session pins what its source and another host have agreed when it opens there ([`pinned`]): an agent that is replaced
//! while it lasts goes on in that.

use std::fmt::Display;

use anyhow::Context;
use verbatim_versions::{Mismatch, Side, Versions, agree};

use crate::guests::Guest;
use crate::proto::{Contract, HelloReply, HelloRequest, VersionReply, VersionRequest};

/// The version of the protocol between agents, and between command and agent. What is sent under it is recorded, and
/// `docs/versions.md` says when it rises.
pub const PROTOCOL: u32 = 10;

/// The oldest version that is spoken, too.
pub const OLDEST: u32 = 10;

/// Both.
pub const PROTOCOLS: Versions = Versions::new(OLDEST, PROTOCOL);

/// What the last releases without ranges speak: of the protocol, and of the contract with guest libraries.
const SILENT: u32 = 10;
const SILENT_CHANNEL: Versions = Versions::only(7);

/// It can restore tasks whose private memory comes while they run (`PreSetupRequest.fill`).
pub const FILL: &str = "fill";

/// It takes contents by one-sided RDMA, and several runs of bytes in one part (`OfferBulk`, `FilePart.pieces`).
pub const BULK: &str = "bulk";

/// It restores images that say nothing of a network namespace in that of the instance; before, tasks of such images came into the
/// host's.
pub const NETWORK: &str = "network";

/// It moves contexts that their processes make again (`PreSetupRequest.made_again`), and has partners of such.
pub const MADE_AGAIN: &str = "made-again";

/// It restores tasks that have an RNIC's context which was made ahead of them, at a host before (`PreSetupRequest.made_ahead`).
pub const MADE_AHEAD: &str = "made-ahead";

/// It gives instances RNICs of the kernel's (`rnics` of a record), and restores tasks that had one open.
pub const RNICS: &str = "rnics";

/// It takes programs that have connections by rdma_cm (`PreSetupRequest.cm`).
pub const CM: &str = "rdma-cm";

/// It takes virtual machines (`machine` of a record).
pub const MACHINES: &str = "machines";

/// It takes virtual machines that are libvirt's (`machine` of a record has a `domain`).
pub const LIBVIRT: &str = "libvirt";

/// It gives containers volumes (`RunRequest.volumes`, `volumes` of a record).
pub const VOLUMES: &str = "volumes";

/// It takes instances with volumes.
pub const VOLUMES_MOVE: &str = "volumes-move";

/// It gives virtual machines volumes as disks, and takes such that have some.
pub const MACHINE_VOLUMES: &str = "machine-volumes";

/// It gives virtual machines block devices of its host's as disks, and looks whether they are the source's (`OpenRequest.devices`).
pub const BLOCK_DEVICES: &str = "block-devices";

/// It compares the files of which disks of virtual machines consist with the source's (`OpenRequest.images`).
pub const IMAGES: &str = "images";

/// It gives virtual machines memory of other hosts as disks (`RunRequest.swap`, `swap` of a record), and takes such that have some.
pub const MACHINE_SWAP: &str = "machine-swap";

/// It takes virtual machines that leave RAM behind (`OpenRequest.post_copy`, `Lack`), and gives what they have left at its host (`ReadBehind`).
pub const POST_COPY: &str = "post-copy";

/// It lends what virtual machines have left at its host for one-sided RDMA (`LendBehind`).
pub const POST_COPY_RDMA: &str = "post-copy-rdma";

/// It gives instances file systems of their own, and shows them parts of its host (`RunRequest.files`, `prealloc`, `binds`).
pub const INSTANCE_FILES: &str = "instance-files";

/// It drops frames of instances with addresses of others (`RunRequest.further_addresses`).
pub const ADDRESS_FILTER: &str = "address-filter";

/// It makes the network namespace of an instance what it was at the source ([`instances::network`](crate::instances::network)).
pub const NETWORK_STATE: &str = "network-state";

/// It compares the processor, machine type and TPM that a virtual machine needs with its own
/// (`OpenRequest.machine`).
pub const MACHINE_FITS: &str = "machine-fits";

/// It gives containers terminals (`/dev/pts`), and restores those that are open.
pub const TERMINALS: &str = "terminals";

/// It compares the servers of a virtual machine's disks with its own (`servers` in `OpenRequest.machine`).
pub const DISK_SERVERS: &str = "disk-servers";

/// It gives files hard links, times, extended attributes and sockets' names (`FilePart.attributes`, `stamps`, and kinds from `LINK` on).
pub const FILE_ATTRIBUTES: &str = "file-attributes";

/// It says whether queue pairs of its host name those of another (`ConfirmPeers`).
pub const CONFIRM_PEERS: &str = "confirm-peers";

/// What not every agent of a version can do, and what others may ask it for only if it says so.
const CAPABILITIES: &[&str] = &[
    FILL,
    BULK,
    NETWORK,
    MADE_AGAIN,
    MADE_AHEAD,
    RNICS,
    CM,
    MACHINES,
    LIBVIRT,
    VOLUMES,
    VOLUMES_MOVE,
    MACHINE_VOLUMES,
    BLOCK_DEVICES,
    IMAGES,
    MACHINE_SWAP,
    POST_COPY,
    POST_COPY_RDMA,
    ADDRESS_FILTER,
    INSTANCE_FILES,
    MACHINE_FITS,
    DISK_SERVERS,
    TERMINALS,
    NETWORK_STATE,
    FILE_ATTRIBUTES,
    CONFIRM_PEERS,
];

/// All of them, as they are said.
pub fn capabilities() -> Vec<String> {
    CAPABILITIES.iter().map(|name| (*name).to_owned()).collect()
}

/// The names of the contracts that a host has with what is on it.
const CHANNEL: &str = "channel";
const DEVICE: &str = "device";

/// What is known of another agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Agreed {
    /// The version that both speak.
    pub protocol: u32,
    /// What it can do beyond that.
    pub capabilities: Vec<String>,
    /// The versions of guest libraries that can be on its host.
    pub channel: Versions,
}

/// What one side says of itself; zeroes where it says nothing.
fn said(protocol: u32, oldest: u32) -> Versions {
    match oldest {
        0 => Versions::only(protocol),
        oldest => Versions::named(oldest, protocol).unwrap_or(Versions::only(protocol)),
    }
}

/// The number in an answer: what is agreed, or else the answerer's newest, which the other side refuses.
fn answered(own: Versions, asked: Versions) -> u32 {
    own.common(asked).unwrap_or(own.newest)
}

fn contract(name: &str, versions: Versions) -> Contract {
    Contract {
        name: name.to_owned(),
        oldest: versions.oldest,
        newest: versions.newest,
    }
}

/// A greeting in a range: all of this agent, or the one number of an agent that demands it.
pub fn hello(own: Versions, host: &str) -> HelloRequest {
    HelloRequest {
        protocol: own.newest,
        host: host.to_owned(),
        oldest: own.oldest,
        capabilities: capabilities(),
    }
}

/// The answer to a greeting, and the version that is agreed, if any.
pub fn answer_hello(own: Versions, request: &HelloRequest, host: &str) -> (HelloReply, Option<u32>) {
    let asked = said(request.protocol, request.oldest);
    let reply = HelloReply {
        protocol: answered(own, asked),
        host: host.to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        oldest: own.oldest,
        newest: own.newest,
        capabilities: capabilities(),
        contracts: vec![
            contract(CHANNEL, verbatim_channel::VERSIONS),
            contract(DEVICE, verbatim_device::control::VERSIONS),
        ],
    };
    (reply, own.common(asked))
}

/// What an agent's answer means; an error says which side is to be upgraded.
pub fn read_hello(own: Versions, own_host: &str, reply: &HelloReply) -> Result<Agreed, Mismatch> {
    let theirs = match reply.newest {
        0 => Versions::only(reply.protocol),
        newest => said(newest, reply.oldest),
    };
    let side = |host: &str, versions| Side::new(format!("the agent of {host}"), versions);
    let protocol = agree("agent", side(own_host, own), side(&reply.host, theirs))?;
    let channel = reply.contracts.iter().find(|contract| contract.name == CHANNEL);
    let channel = channel.and_then(|contract| Versions::named(contract.oldest, contract.newest));
    Ok(Agreed {
        protocol,
        capabilities: reply.capabilities.clone(),
        channel: channel.unwrap_or(SILENT_CHANNEL),
    })
}

/// Whether the answer is of an agent that demands to be greeted with its own number.
pub fn demands_its_own(asked: &HelloRequest, reply: &HelloReply, agreed: &Agreed) -> bool {
    reply.newest == 0 && asked.protocol != agreed.protocol
}

/// The version that a session's source has pinned when it opened the session here.
pub fn pinned(protocol: u32, source: &str) -> anyhow::Result<u32> {
    let protocol = match protocol {
        0 => SILENT,
        protocol => protocol,
    };
    let source = Side::new(format!("the agent of {source}"), Versions::only(protocol));
    let here = Side::new("this host's agent", PROTOCOLS);
    agree("agent", here, source).context("the session is of a version that is not spoken here")
}

/// What a command says of itself.
pub fn ask_version() -> VersionRequest {
    VersionRequest {
        protocol: PROTOCOLS.newest,
        oldest: PROTOCOLS.oldest,
    }
}

/// The numbers for a command: what is agreed, and the range.
pub fn answer_version(own: Versions, request: &VersionRequest) -> (u32, Versions) {
    let asked = match request.protocol {
        // It demands what it had when there were no ranges.
        0 => Versions::only(SILENT),
        protocol => said(protocol, request.oldest),
    };
    (answered(own, asked), own)
}

/// What the agent's answer means to a command.
pub fn read_version(own: Versions, reply: &VersionReply) -> Result<u32, Mismatch> {
    let theirs = match reply.newest {
        0 => Versions::only(reply.protocol),
        newest => said(newest, reply.oldest),
    };
    agree(
        "agent",
        Side::new("this command", own),
        Side::new(format!("the agent of {}", reply.host), theirs),
    )
}

/// An error if one of these programs has a guest library that the agent of `host` does not understand: it would be lost there.
pub fn must_know(agreed: &Agreed, host: &str, guests: &[Guest]) -> anyhow::Result<()> {
    for guest in guests {
        let there = Side::new(format!("the agent of {host}"), agreed.channel);
        // There it goes down, if it must.
        let spoken = verbatim_channel::spoken_by_library(guest.version);
        agree("channel", there, speaking(&guest.program, guest.pid, spoken))?;
    }
    Ok(())
}

/// The guest library of a program, which keeps the one that its container started with.
pub fn library(program: &str, pid: impl Display, version: u32) -> Side {
    speaking(program, pid, Versions::only(version))
}

fn speaking(program: &str, pid: impl Display, versions: Versions) -> Side {
    Side::new(
        format!("the guest library of {program} (process {pid})"),
        versions,
    )
    .with_remedy("end the instance and start it again with the library of this release")
}

#[cfg(test)]
mod tests;
