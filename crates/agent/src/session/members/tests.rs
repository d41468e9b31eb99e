use super::*;

fn member(moves: Option<u64>) -> Member {
    Member {
        guest: None,
        kept: KeptMember {
            instance: None,
            pid: 7,
            connections: vec![(0, 0x10), (3, 0x11)],
            unconnected: vec![(5, 0x12)],
        },
        moves,
    }
}

fn count(qpn: u32, messages: u64) -> QpCount {
    QpCount { qpn, messages }
}

#[test]
fn what_was_sent_is_known_by_its_connection() {
    let sent = [count(0x11, 4), count(0x10, 9)];
    assert_eq!(sent_by(&member(None), &sent, 1).unwrap(), [(3, 4), (0, 9)]);
    // Of a process that moves every queue pair is suspended, also those that are connected with nobody.
    let all = [count(0x10, 9), count(0x77, 0), count(0x11, 4)];
    assert_eq!(sent_by(&member(Some(1)), &all, 1).unwrap(), [(0, 9), (3, 4)]);
}

#[test]
fn a_process_that_has_changed_its_queue_pairs_makes_the_attempt_void() {
    let changed = |member, sent: &[QpCount]| sent_by(&member, sent, 1).unwrap_err().is::<Changed>();
    assert!(changed(member(Some(2)), &[count(0x10, 0), count(0x11, 0)]));
    // A queue pair was destroyed, or one is connected that was not.
    assert!(changed(member(None), &[count(0x10, 0)]));
    assert!(changed(member(None), &[count(0x10, 0), count(0x12, 0)]));
}

#[test]
fn a_queue_pair_of_nobody_is_no_answer() {
    let strange = [count(0x10, 0), count(0x99, 0)];
    let error = sent_by(&member(None), &strange, 1).unwrap_err();
    assert_eq!(error.to_string(), NOT_ASKED_FOR);
}

#[test]
fn what_is_not_drained_has_another_end_or_cannot_be_settled() {
    let limit = Duration::from_secs(2);
    let left = || "1 request".to_owned();
    let found = undrained(&member(Some(1)), &[0x11], left(), limit).unwrap();
    assert_eq!(found.connections, BTreeSet::from([3]));
    let error = undrained(&member(Some(1)), &[0x11, 0x77], left(), limit).unwrap_err();
    assert!(error.to_string().starts_with("not drained after 2s"), "{error}");
    let error = undrained(&member(None), &[0x77], left(), limit).unwrap_err();
    assert_eq!(error.to_string(), NOT_ASKED_FOR);
}

#[test]
fn one_that_takes_too_long_is_longest() {
    assert_eq!(longest([]), Some(0));
    assert_eq!(longest([Some(3), Some(5), Some(4)]), Some(5));
    assert_eq!(longest([Some(3), None, Some(4)]), None);
}

#[test]
fn who_moves_is_suspended_whole() {
    use verbatim_channel::Scope;
    assert_eq!(member(Some(1)).suspended(), Scope::All);
    assert_eq!(member(None).suspended(), Scope::Qps(vec![0x10, 0x11, 0x12]));
    assert_eq!(member(None).measured(), Scope::Qps(vec![0x10, 0x11]));
}
