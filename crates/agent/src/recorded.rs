//! What this agent says and writes down is what is recorded: others may be of an earlier release.

use verbatim_channel::{KeyPair, MovedEndpoint, QpProgress, RoadMap};
use verbatim_keeper as keeper;
use verbatim_recorded::Recording;

use crate::PROTOCOL;
use crate::instances::home;
use crate::instances::record::Record;
use crate::session::{ProcessKeys, destination, partner};

/// The version of what an agent leaves on its own host. An agent that is older than what it finds there is told by the journal.
const RECORDS: u32 = 1;

/// The version of what is said to agents that say `bulk`. Another one needs another word.
const BULK: u32 = 1;

/// The version of what keepers are told.
const KEEPER: u32 = 2;

fn open(file: &str, version: u32) -> Recording {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recorded");
    Recording::open(format!("{folder}/{file}"), version)
}

/// Each line that the build script has made of the descriptors: a name, and what it is.
#[test]
fn grpc_is_as_recorded() {
    let mut recording = open("grpc.txt", PROTOCOL);
    for line in include_str!(concat!(env!("OUT_DIR"), "/grpc.txt")).lines() {
        let (name, content) = line.split_once('\t').expect("a name, a tabulator, and the rest");
        recording.check_field(name, content);
    }
    recording.finish();
}

#[test]
fn bytes_within_grpc_are_as_recorded() {
    let mut recording = open("peer.txt", PROTOCOL);
    recording.check::<Vec<RoadMap>>("PreSetupRequest.road_maps");
    recording.check::<ProcessKeys>("PreSetupReply.keys");
    recording.check::<Vec<KeyPair>>("ResolveReply.keys");
    recording.check::<Vec<KeyPair>>("PublishRequest.keys");
    recording.check::<Vec<MovedEndpoint>>("MovedRequest.endpoints");
    recording.check::<Vec<Vec<KeyPair>>>("PartnerConnectRequest.keys");
    recording.check::<Vec<Vec<KeyPair>>>("RetargetRequest.keys");
    recording.check::<Vec<(u32, QpProgress)>>("SettleRequest.progress");
    recording.check::<Vec<(u32, QpProgress)>>("StopReply.progress");
    // JSON, as in the records.
    recording.check_json::<Record>("OpenRequest.instance");
    recording.finish();
}

#[test]
fn what_connections_for_memory_are_made_of_is_as_recorded() {
    let mut recording = open("bulk.txt", BULK);
    recording.check::<verbatim_bulk::Offer>("OfferBulkRequest.offer");
    recording.check::<verbatim_bulk::Accepted>("OfferBulkReply.accepted");
    recording.finish();
}

#[test]
fn what_keepers_are_told_is_as_recorded() {
    let mut recording = open("keeper.txt", KEEPER);
    recording.check::<keeper::Order>("Order");
    recording.check::<keeper::Answer>("Answer");
    // What is kept, by a source and by a destination.
    recording.check::<u32>("Source");
    recording.check::<destination::Kept>("Destination");
    recording.check_text("PROGRAM_NAME", keeper::PROGRAM_NAME);
    recording.finish();
}

#[test]
fn records_are_as_recorded() {
    let mut recording = open("records.txt", RECORDS);
    recording.check_json::<home::Kept>("records");
    recording.check_json::<partner::Kept>("partners");
    recording.finish();
}
