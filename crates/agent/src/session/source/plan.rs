//! Which end of a connection is told what the other one has said. No I/O.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::connections::{Connected, Connection, OtherEnd};

/// One end of a connection of the instance, by the connection's number: its index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum End {
    /// The instance's.
    Moving(u32),
    /// At another host, or another program's on this one.
    Partner(u32),
}

impl End {
    /// The connection's number.
    pub fn connection(self) -> u32 {
        match self {
            Self::Moving(connection) | Self::Partner(connection) => connection,
        }
    }
}

/// What the other end of a connection has said is not known.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a connection (queue pair {qpn:#x} of process {pid}) was closed at its other end meanwhile; try again"
)]
pub struct Unknown {
    pid: u32,
    qpn: u32,
}

/// The other end; `None` where nobody who takes part has one. Of a connection within the instance both ends are connections.
fn other_end(connections: &[Connection], end: End) -> Option<End> {
    let connection = end.connection();
    match (end, &connections[connection as usize].other_end) {
        (End::Partner(_), _) => Some(End::Moving(connection)),
        (End::Moving(_), OtherEnd::Host(_)) => Some(End::Partner(connection)),
        (End::Moving(_), OtherEnd::Own(other)) => Some(End::Moving(*other as u32)),
        (End::Moving(_), OtherEnd::OwnUnconnected { .. }) => None,
    }
}

/// For each of these ends, by connection, what the other one has said.
pub fn said_at_the_other_end<T: Clone>(
    connections: &[Connection],
    ends: impl IntoIterator<Item = End>,
    said: &HashMap<End, T>,
) -> Result<Vec<(u32, T)>, Unknown> {
    let other = |end: End| {
        let connection = end.connection();
        let value = other_end(connections, end).and_then(|other| said.get(&other));
        let Connection { pid, qpn, .. } = connections[connection as usize];
        let value = value.ok_or(Unknown { pid, qpn })?;
        Ok((connection, value.clone()))
    };
    ends.into_iter().map(other).collect()
}

/// Of these ends, by connection, those whose other end allows something.
pub fn allowed_at_the_other_end(
    connections: &[Connection],
    ends: impl IntoIterator<Item = End>,
    allows: &HashSet<End>,
) -> Vec<u32> {
    let is_allowed = |end: &End| other_end(connections, *end).is_some_and(|other| allows.contains(&other));
    ends.into_iter().filter(is_allowed).map(End::connection).collect()
}

/// Those that are connected at both ends. From an end that is not connected nothing comes, and to one that is not nothing has
/// come: nothing is waited for.
pub fn connected(connections: &[Connection], ends: impl IntoIterator<Item = End>) -> Vec<End> {
    let both = |end: &End| connections[end.connection() as usize].connected == Connected::Both;
    ends.into_iter().filter(both).collect()
}

/// The connections that stop with these: one within the instance is two, and both ends stop.
pub fn stopped(connections: &[Connection], undrained: &BTreeSet<u32>) -> BTreeSet<u32> {
    let other = |connection: &u32| match connections[*connection as usize].other_end {
        OtherEnd::Own(other) => Some(other as u32),
        OtherEnd::Host(_) | OtherEnd::OwnUnconnected { .. } => None,
    };
    let others = undrained.iter().filter_map(other);
    undrained.iter().copied().chain(others).collect()
}

#[cfg(test)]
mod tests {
    use verbatim_channel::Endpoint;

    use super::*;

    /// 0 leads to host b, 1 and 2 to each other, 3 to a queue pair of the instance that is not connected, and 4 is connected at
    /// the other end only.
    fn connections() -> Vec<Connection> {
        let host = || OtherEnd::Host("b".into());
        let ends = [
            (host(), Connected::Both),
            (OtherEnd::Own(2), Connected::Both),
            (OtherEnd::Own(1), Connected::Both),
            (OtherEnd::OwnUnconnected { pid: 1, qpn: 9 }, Connected::Moving),
            (host(), Connected::Partner),
        ];
        let of = |(qpn, (other_end, connected))| Connection {
            pid: 1,
            qpn,
            moving: Endpoint { gid: [0; 16], qpn },
            partner: Endpoint { gid: [1; 16], qpn },
            other_end,
            connected,
            sends: true,
        };
        (0..).zip(ends).map(of).collect()
    }

    #[test]
    fn each_end_is_told_what_the_other_has_said() {
        let sent = HashMap::from([
            (End::Moving(0), 10),
            (End::Partner(0), 20),
            (End::Moving(1), 11),
            (End::Moving(2), 12),
        ]);
        let connections = connections();
        let all = (0..5).map(End::Moving);
        let own = connected(&connections, all);
        assert_eq!(own, [End::Moving(0), End::Moving(1), End::Moving(2)]);
        let told = said_at_the_other_end(&connections, own, &sent).unwrap();
        assert_eq!(told, [(0, 20), (1, 12), (2, 11)]);
        let told = said_at_the_other_end(&connections, [End::Partner(0)], &sent).unwrap();
        assert_eq!(told, [(0, 10)]);
    }

    #[test]
    fn an_end_whose_other_one_says_nothing_is_named() {
        let connections = connections();
        let only = HashMap::from([(End::Moving(0), 10)]);
        let missing = said_at_the_other_end(&connections, [End::Moving(0)], &only).unwrap_err();
        assert_eq!(missing, Unknown { pid: 1, qpn: 0 });
        let nobody = said_at_the_other_end(&connections, [End::Moving(3)], &only).unwrap_err();
        assert_eq!(nobody, Unknown { pid: 1, qpn: 3 });
    }

    #[test]
    fn both_ends_of_a_connection_within_the_instance_stop() {
        let stop = |undrained: &[u32]| stopped(&connections(), &undrained.iter().copied().collect());
        assert_eq!(stop(&[0, 1]), BTreeSet::from([0, 1, 2]));
        assert_eq!(stop(&[4]), BTreeSet::from([4]));
    }
}
