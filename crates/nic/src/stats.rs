//! What the RNIC counts, and the file in which others can watch it.
//!
//! The engine counts in plain fields and copies them into `nic.stats`, a shared mapping, at the end of each turn that
//! did something: a sampler reads them at any rate without asking the RNIC.

use std::ffi::c_void;
use std::fs::File;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use rustix::mm::{MapFlags, ProtFlags};
use serde::Serialize;

use crate::error::NicError;

/// The statistics file's name in the runtime folder.
pub const STATS_NAME: &str = "nic.stats";

/// `NicStats::magic` of this version of the file.
const MAGIC: u64 = u64::from_be_bytes(*b"VBNICST5");

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The statistics file.
        #[repr(C)]
        #[derive(Debug, Default)]
        pub struct NicStats {
            /// Tells the file's version; 0 until the file is complete.
            magic: AtomicU64,
            $($(#[$doc])* pub $name: AtomicU64,)*
        }

        /// The values of [`NicStats`] at one time.
        #[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
        pub struct NicCounters {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl NicStats {
            fn store(&self, counters: &NicCounters) {
                $(self.$name.store(counters.$name, Relaxed);)*
            }

            /// The values now.
            pub fn load(&self) -> NicCounters {
                NicCounters { $($name: self.$name.load(Relaxed),)* }
            }
        }
    };
}

counters! {
    /// RoCE packets sent.
    tx_packets,
    /// RoCE packets received with a good ICRC.
    rx_packets,
    /// UDP payload bytes sent.
    tx_bytes,
    /// UDP payload bytes received.
    rx_bytes,
    /// Message bytes sent: WRITE and SEND requests and READ responses, without headers and with retransmissions.
    tx_payload_bytes,
    /// Message bytes received and accepted.
    rx_payload_bytes,
    /// UDP sends (GSO batches).
    tx_batches,
    /// UDP receives (GRO batches).
    rx_batches,
    /// Request packets sent again.
    retransmitted_packets,
    /// Requests given up because of missing answers.
    retry_exceeded,
    /// ACK timeouts.
    ack_timeouts,
    /// NAK "PSN sequence error" received.
    rx_nak_sequence,
    /// NAK "remote access error" received.
    rx_nak_access,
    /// NAK "invalid request" received.
    rx_nak_invalid,
    /// RNR NAKs received.
    rx_rnr,
    /// RNR NAKs sent.
    tx_rnr,
    /// NAK "remote access error" sent.
    tx_nak_access,
    /// NAK "invalid request" sent.
    tx_nak_invalid,
    /// Request packets that came ahead of their turn.
    rx_out_of_order,
    /// Request packets that came again.
    rx_duplicates,
    /// Packets with a wrong ICRC.
    rx_icrc_errors,
    /// Datagrams that are no RoCE packet.
    rx_malformed,
    /// Packets of another version of the transport headers.
    rx_wrong_version,
    /// Packets with an opcode that is not defined.
    rx_unknown_opcode,
    /// Packets with another partition key.
    rx_wrong_pkey,
    /// Datagrams with another queue key.
    rx_wrong_qkey,
    /// Requests whose length is not the one that their opcode wants.
    rx_wrong_length,
    /// Messages of unreliable transports for which there was no receive request.
    rx_no_receive,
    /// Packets for a queue pair that there is not.
    rx_unknown_qp,
    /// Packets for a queue pair from an address that is not its partner's.
    rx_wrong_source,
    /// Packets that the state of their queue pair did not let in.
    rx_dropped,
    /// Packets for a context that is parked, or a queue pair that is stopped.
    rx_parked,
    /// RESUMEs passed on to where their queue pair has gone.
    resumes_forwarded,
    /// Connections whose partner was found paused.
    pauses,
    /// Connections that failed because their partner was paused for too long.
    pause_limit_exceeded,
    /// RESUMEs sent.
    tx_resumes,
    /// RESUMEs received.
    rx_resumes,
    /// Messages of pause and resume that were forged, replayed, or could not be: ignored.
    migration_ignored,
    /// Receives that the kernel refused.
    rx_errors,
    /// Times that the socket's buffer was full.
    tx_blocked,
    /// Batches that the kernel refused to send.
    tx_errors,
    /// Completion queues that overran.
    cq_overruns,
    /// Ring indices that no correct program writes.
    bad_indices,
    /// Contexts lost to a truncated file.
    truncated_files,
    /// Objects, connections and memory that a tenant did not get because of what it has, or all have.
    tenant_refusals,
    /// Control requests.
    requests,
    /// Control requests that were refused.
    refused_requests,
    /// Turns of the loop that did something.
    busy_turns,
    /// Times that the RNIC went to sleep.
    sleeps,
    /// Contexts there are.
    contexts,
    /// Protection domains there are.
    pds,
    /// Memory regions there are.
    mrs,
    /// Memory windows there are.
    mws,
    /// Completion queues there are.
    cqs,
    /// Shared receive queues there are.
    srqs,
    /// Address handles there are.
    ahs,
    /// Multicast groups there are.
    groups,
    /// Queue pairs there are.
    qps,
}

#[derive(Debug)]
struct Mapping(NonNull<NicStats>);

impl Mapping {
    fn new(file: &File, access: ProtFlags) -> Result<Self, NicError> {
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory that exists.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                size_of::<NicStats>(),
                access,
                MapFlags::SHARED,
                file,
                0,
            )
        }
        .map_err(|errno| NicError::os("mmap", errno))?;
        Ok(Self(
            NonNull::new(base.cast()).expect("the kernel maps nothing at address 0 unless asked to"),
        ))
    }

    fn get(&self) -> &NicStats {
        // SAFETY: the mapping is as long as a NicStats, whose fields are all atomics.
        unsafe { self.0.as_ref() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own.
        let _ = unsafe { rustix::mm::munmap(self.0.as_ptr().cast::<c_void>(), size_of::<NicStats>()) };
    }
}

/// The RNIC's end of the file.
#[derive(Debug)]
pub(crate) struct StatsWriter(Mapping);

impl StatsWriter {
    /// Makes the file anew: who still watches an earlier one keeps that.
    pub fn create(path: &Path) -> Result<Self, NicError> {
        let wrap = |source| NicError::File {
            path: path.to_owned(),
            source,
        };
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(wrap(error)),
            _ => {}
        }
        let mut options = File::options();
        let file = options
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o644)
            .open(path)
            .map_err(wrap)?;
        file.set_len(size_of::<NicStats>() as u64).map_err(wrap)?;
        let mapping = Mapping::new(&file, ProtFlags::READ | ProtFlags::WRITE)?;
        mapping.get().magic.store(MAGIC, Release);
        Ok(Self(mapping))
    }

    pub fn publish(&self, counters: &NicCounters) {
        self.0.get().store(counters);
    }
}

/// Watches the counters of a running RNIC.
#[derive(Debug)]
pub struct StatsReader(Mapping);

// SAFETY: a NicStats is atomics, and the mapping belongs to this value.
unsafe impl Send for StatsReader {}
// SAFETY: as above.
unsafe impl Sync for StatsReader {}

impl StatsReader {
    /// Opens `<runtime_dir>/nic.stats` ([`STATS_NAME`]).
    pub fn open(path: &Path) -> Result<Self, NicError> {
        let wrap = |source| NicError::File {
            path: path.to_owned(),
            source,
        };
        let file = File::open(path).map_err(wrap)?;
        if file.metadata().map_err(wrap)?.size() != size_of::<NicStats>() as u64 {
            return Err(NicError::NotStatistics {
                path: path.to_owned(),
            });
        }
        let reader = Self(Mapping::new(&file, ProtFlags::READ)?);
        if reader.0.get().magic.load(Acquire) != MAGIC {
            return Err(NicError::NotStatistics {
                path: path.to_owned(),
            });
        }
        Ok(reader)
    }

    /// The counters, live.
    pub fn stats(&self) -> &NicStats {
        self.0.get()
    }

    /// The counters now.
    pub fn read(&self) -> NicCounters {
        self.stats().load()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_sees_what_was_published() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(STATS_NAME);
        assert!(matches!(StatsReader::open(&path), Err(NicError::File { .. })));
        let writer = StatsWriter::create(&path).unwrap();
        let reader = StatsReader::open(&path).unwrap();
        let counters = NicCounters {
            tx_packets: 3,
            qps: 9,
            ..NicCounters::default()
        };
        writer.publish(&counters);
        assert_eq!(reader.read(), counters);
        let _second = StatsWriter::create(&path).unwrap();
        assert_eq!(reader.read(), counters, "a reader keeps the file that it opened");
        std::fs::write(&path, b"something else").unwrap();
        assert!(matches!(
            StatsReader::open(&path),
            Err(NicError::NotStatistics { .. })
        ));
    }
}
