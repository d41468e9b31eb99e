//! Whether data flows: the counters of a host's software RNIC.

use std::time::Duration;

use verbatim_nic::{NicCounters, STATS_NAME, StatsReader};

use crate::lab::TestLab;
use crate::wait::eventually;

/// Watches one host's RNIC.
pub struct Traffic {
    host: String,
    reader: StatsReader,
}

impl Traffic {
    /// Opens the counters of `host`.
    pub fn of(lab: &TestLab, host: &str) -> anyhow::Result<Self> {
        let reader = StatsReader::open(&lab.path(host, &format!("/run/verbatim/{STATS_NAME}"))?)?;
        Ok(Self {
            host: host.to_owned(),
            reader,
        })
    }

    /// The counters now.
    pub fn counters(&self) -> NicCounters {
        self.reader.stats().load()
    }

    /// Bytes of messages that this host sent and received.
    pub fn payload_bytes(&self) -> u64 {
        let counters = self.counters();
        counters.tx_payload_bytes + counters.rx_payload_bytes
    }

    /// Waits until `bytes` more have passed than now.
    pub fn flows(&self, bytes: u64, limit: Duration) -> anyhow::Result<()> {
        let before = self.payload_bytes();
        eventually(
            &format!("{bytes} bytes through the RNIC of {}", self.host),
            limit,
            || Ok((self.payload_bytes() >= before + bytes).then_some(())),
        )
    }

    /// Waits until `packets` more have passed than now: atomics have no message whose bytes would count.
    pub fn packets_flow(&self, packets: u64, limit: Duration) -> anyhow::Result<()> {
        self.has_had(self.packets() + packets, limit)
    }

    /// Packets that this host has sent and received.
    pub fn packets(&self) -> u64 {
        let counters = self.counters();
        counters.tx_packets + counters.rx_packets
    }

    /// Waits until there have been so many packets.
    pub fn has_had(&self, packets: u64, limit: Duration) -> anyhow::Result<()> {
        eventually(
            &format!("{packets} packets through the RNIC of {}", self.host),
            limit,
            || Ok((self.packets() >= packets).then_some(())),
        )
    }

    /// The objects that programs have at the RNIC: contexts, protection domains, regions, completion queues, queue
    /// pairs.
    pub fn objects(&self) -> [u64; 5] {
        let NicCounters {
            contexts,
            pds,
            mrs,
            cqs,
            qps,
            ..
        } = self.counters();
        [contexts, pds, mrs, cqs, qps]
    }
}
