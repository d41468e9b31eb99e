use super::*;

const OTHER: [u8; 4] = [10, 0, 0, 2];

fn at(millis: u64) -> Time {
    Time::from_nanos(1_000_000_000 + millis * 1_000_000)
}

fn other(qpn: u32) -> Location {
    location(OTHER.into(), qpn)
}

fn asked(confirming: &mut Confirming, now: Time, tenant: &str) -> Vec<u32> {
    let mut asked = Vec::new();
    while let Some((qpn, _)) = confirming.pop_due(now) {
        if confirming.take_turn(qpn, tenant, now).is_some() {
            asked.push(qpn);
        }
    }
    asked
}

#[test]
fn a_question_is_asked_again_in_growing_steps_until_the_program_s_own_time_begins() {
    let mut confirming = Confirming::default();
    confirming.begin(at(0));
    confirming.insert(7, other(9), at(0));
    let (mut now, mut pauses) = (at(0), Vec::new());
    assert_eq!(confirming.pop_late(at(9_999)), None);
    let given_up = loop {
        assert_eq!(asked(&mut confirming, now, "a"), [7]);
        let then = confirming.judge(7, PeerVerdict::NotYet, Confirmation::Awaited, now);
        let next = confirming.due.first().expect("it is asked again").0;
        if then == Then::Deny {
            break now;
        }
        pauses.push((next - now).as_millis());
        now = next;
    };
    assert_eq!(pauses[..9], [1, 2, 4, 8, 16, 32, 64, 100, 100]);
    assert!(given_up >= at(10_000) && given_up < at(10_200));
    assert_eq!(
        confirming.judge(7, PeerVerdict::Confirmed, Confirmation::Denied, now),
        Then::Open
    );
    assert_eq!(confirming.next_late(), None);
    assert!(
        confirming.next() >= Some(now + CONFIRMED_PAUSE),
        "it is asked late"
    );
}

#[test]
fn a_no_holds_and_is_asked_again_rarely() {
    let mut confirming = Confirming::default();
    confirming.begin(at(0));
    confirming.insert(7, other(9), at(0));
    assert_eq!(asked(&mut confirming, at(0), "a"), [7]);
    assert_eq!(
        confirming.judge(7, PeerVerdict::Refused, Confirmation::Awaited, at(1)),
        Then::Deny
    );
    assert!(confirming.was_refused(7));
    assert_eq!(confirming.next(), Some(at(1001)));
    // Not connected any more, say, is no yes.
    assert_eq!(asked(&mut confirming, at(1001), "a"), [7]);
    assert_eq!(
        confirming.judge(7, PeerVerdict::NotYet, Confirmation::Denied, at(1001)),
        Then::Deny
    );
    assert_eq!(confirming.next(), Some(at(3001)));
}

#[test]
fn a_tenant_has_so_many_under_way_and_keeps_nobody_else_waiting() {
    let mut confirming = Confirming::default();
    confirming.begin(at(0));
    for qpn in 0..1000 {
        confirming.insert(qpn, other(9), at(0));
    }
    let first = asked(&mut confirming, at(0), "greedy");
    assert_eq!(first.len(), MOST_OF_TENANT);
    confirming.insert(5000, other(9), at(0));
    assert_eq!(asked(&mut confirming, at(0), "other"), [5000]);
    // Each answer lets one more ask.
    confirming.judge(first[0], PeerVerdict::Confirmed, Confirmation::Awaited, at(0));
    assert_eq!(asked(&mut confirming, at(0), "greedy").len(), 1);
    // Those that end make room, too.
    for qpn in &first[1..11] {
        confirming.remove(*qpn, at(0));
    }
    assert_eq!(asked(&mut confirming, at(0), "greedy").len(), 10);
    // Whoever takes questions next is asked anew.
    confirming.begin(at(1));
    assert_eq!(asked(&mut confirming, at(1), "greedy").len(), MOST_OF_TENANT);
}

#[test]
fn tenants_whose_answers_never_come_leave_room_for_others() {
    let mut confirming = Confirming::default();
    confirming.begin(at(0));
    for tenant in 0..20 {
        for qpn in 0..300 {
            confirming.insert(tenant * 1000 + qpn, other(9), at(0));
        }
        asked(&mut confirming, at(0), &tenant.to_string());
    }
    let under_way: usize = confirming.under_way.values().sum();
    assert!(under_way <= MOST + 20 * LEAST_OF_TENANT, "{under_way}");
    for qpn in 50_000..50_100 {
        confirming.insert(qpn, other(9), at(1));
    }
    let mut late = Vec::new();
    while let Some((qpn, _)) = confirming.pop_due(at(1)) {
        if qpn >= 50_000 && confirming.take_turn(qpn, "late", at(1)).is_some() {
            late.push(qpn);
        }
    }
    assert_eq!(late.len(), LEAST_OF_TENANT);
    let waiting: usize = confirming.waiting.values().map(BTreeMap::len).sum();
    assert!(waiting <= confirming.open.len(), "each waits once");
}

#[test]
fn whoever_waits_is_on_the_list_once() {
    let mut confirming = Confirming::default();
    confirming.begin(at(0));
    for qpn in 0..=MOST_OF_TENANT as u32 {
        confirming.insert(qpn, other(9), at(0));
    }
    let first = asked(&mut confirming, at(0), "a");
    let last = (0..=MOST_OF_TENANT as u32)
        .find(|qpn| !first.contains(qpn))
        .unwrap();
    for _ in 0..100 {
        confirming.schedule(last, at(1));
        assert_eq!(asked(&mut confirming, at(1), "a"), []);
    }
    assert_eq!(confirming.waiting.values().map(BTreeMap::len).sum::<usize>(), 1);
    confirming.judge(first[0], PeerVerdict::Confirmed, Confirmation::Awaited, at(2));
    assert_eq!(asked(&mut confirming, at(2), "a"), [last]);
}

#[test]
fn whoever_waits_does_not_depend_on_another_that_ends() {
    let mut confirming = Confirming::default();
    confirming.begin(at(0));
    let all = 2 * MOST_OF_TENANT as u32 + 10;
    for qpn in 0..all {
        confirming.insert(qpn, other(9), at(0));
    }
    asked(&mut confirming, at(0), "a");
    // One program ends, with those that were asked about and those that had the next turns.
    for qpn in 0..all - 10 {
        confirming.remove(qpn, at(1));
    }
    assert_eq!(asked(&mut confirming, at(1001), "a").len(), 10);
    assert!(confirming.waiting.is_empty());
}

fn confirm(confirming: &mut Confirming, qpns: std::ops::Range<u32>, now: Time) {
    for qpn in qpns {
        confirming.insert(qpn, other(qpn), now);
        assert_eq!(asked(confirming, now, "a"), [qpn]);
        assert_eq!(
            confirming.judge(qpn, PeerVerdict::Confirmed, Confirmation::Awaited, now),
            Then::Open
        );
    }
}

#[test]
fn what_is_confirmed_is_asked_again_and_a_no_ends_it() {
    let mut confirming = Confirming::default();
    confirming.begin(at(0));
    confirm(&mut confirming, 7..8, at(0));
    assert_eq!(confirming.counters()[0], ("peers_asked_about", 0));
    for round in 1..4 {
        let (before, now) = (at(0), confirming.next_question().expect("it is asked again"));
        assert!(now - before >= round * CONFIRMED_PAUSE, "{round}: {now:?}");
        assert!(now - before <= round * (CONFIRMED_PAUSE + CONFIRMED_SPREAD + ROW));
        assert_eq!(asked(&mut confirming, now, "a"), [7]);
        let then = confirming.judge(7, PeerVerdict::Confirmed, Confirmation::Confirmed, now);
        assert_eq!(then, Then::Open);
    }
    assert_eq!(confirming.counters()[1], ("peers_confirmed", 1));
    let mut now = confirming.next_question().expect("it is asked again");
    // A host that cannot be asked says nothing: the connection goes on, for however long.
    for pause in [1, 2, 4, 8, 16, 30, 30, 30] {
        assert_eq!(asked(&mut confirming, now, "a"), [7]);
        let then = confirming.judge(7, PeerVerdict::NotYet, Confirmation::Confirmed, now);
        assert_eq!(then, Then::Wait);
        let next = confirming.next_question().expect("it is asked again");
        assert_eq!((next - now).as_secs(), pause);
        now = next;
    }
    assert_eq!(asked(&mut confirming, now, "a"), [7]);
    let then = confirming.judge(7, PeerVerdict::Refused, Confirmation::Confirmed, now);
    assert_eq!((then, confirming.was_refused(7)), (Then::Deny, true));
    assert_eq!(confirming.counters()[0], ("peers_asked_about", 1));
    // From there on as after the first no.
    now = confirming.next_question().expect("it is asked again");
    assert_eq!(asked(&mut confirming, now, "a"), [7]);
    let then = confirming.judge(7, PeerVerdict::NotYet, Confirmation::Denied, now);
    assert_eq!(then, Then::Deny);
    confirming.remove(7, now);
    assert_eq!((confirming.next(), confirming.settled), (None, 0));
}

#[test]
fn thousands_that_are_confirmed_are_asked_again_in_rows() {
    const ALL: u32 = 6000;
    let mut confirming = Confirming::default();
    confirming.begin(at(0));
    confirm(&mut confirming, 0..ALL, at(0));
    let mut rows = Vec::new();
    while let Some(now) = confirming.next_question().filter(|now| *now < at(90_000)) {
        let row = asked(&mut confirming, now, "a");
        for qpn in &row {
            confirming.judge(*qpn, PeerVerdict::Confirmed, Confirmation::Confirmed, now);
        }
        rows.push(row.len());
    }
    assert_eq!(rows.iter().sum::<usize>(), ALL as usize);
    assert!((20..=32).contains(&rows.len()), "{rows:?}");
    assert!(rows.iter().all(|row| *row <= MOST_OF_TENANT), "{rows:?}");
    // The next agent has them in rows, too, and at once what waits.
    let now = at(90_000);
    confirming.insert(ALL, other(9), now);
    confirming.begin(now);
    assert_eq!(asked(&mut confirming, now, "a"), [ALL]);
    confirming.remove(ALL, now);
    let mut rows: Vec<_> = confirming.due.iter().map(|(time, _)| *time).collect();
    rows.dedup();
    assert!((4..=5).contains(&rows.len()), "{rows:?}");
    assert!(rows.last() <= Some(&(now + DOUBT_SPREAD + ROW)), "{rows:?}");
}

#[test]
fn a_no_to_what_was_confirmed_is_a_reason_to_ask_about_all_of_that_host() {
    let mut confirming = Confirming::default();
    confirming.begin(at(0));
    confirm(&mut confirming, 0..100, at(0));
    let elsewhere = location([10, 0, 0, 3].into(), 9);
    confirming.insert(500, elsewhere, at(0));
    assert_eq!(asked(&mut confirming, at(0), "a"), [500]);
    confirming.judge(500, PeerVerdict::Confirmed, Confirmation::Awaited, at(0));
    let now = confirming.next_question().expect("they are asked again");
    let first = asked(&mut confirming, now, "a");
    confirming.judge(first[0], PeerVerdict::Refused, Confirmation::Confirmed, now);
    let soon = now + DOUBT_SPREAD + ROW;
    let late = confirming.due.iter().filter(|(time, _)| *time > soon);
    let late: Vec<_> = late
        .map(|(_, qpn)| *qpn)
        .filter(|qpn| !first.contains(qpn))
        .collect();
    assert_eq!(late, [500]);
}

#[test]
fn a_host_is_doubted_now_and_then_at_most() {
    let mut confirming = Confirming::default();
    confirming.begin(at(0));
    confirm(&mut confirming, 0..100, at(0));
    let refuse = |confirming: &mut Confirming, qpn, now| {
        confirming.schedule(qpn, now);
        assert!(asked(confirming, now, "a").contains(&qpn));
        confirming.judge(qpn, PeerVerdict::Refused, Confirmation::Confirmed, now);
    };
    let soon = |confirming: &Confirming, now| {
        let limit = now + DOUBT_SPREAD + ROW;
        let open = confirming.open.values();
        open.filter(|open| open.confirmed && open.due <= Some(limit))
            .count()
    };
    refuse(&mut confirming, 0, at(0));
    assert_eq!(soon(&confirming, at(0)), 99);
    for qpn in 1..100 {
        confirming.schedule(qpn, at(80_000));
    }
    refuse(&mut confirming, 1, at(40_000));
    assert_eq!(soon(&confirming, at(40_000)), 0);
    refuse(&mut confirming, 2, at(45_000));
    assert_eq!(soon(&confirming, at(45_000)), 97);
    // Hosts that were doubted long ago are not remembered.
    for host in 0..50 {
        let (qpn, now) = (1000 + host, at(100_000 + u64::from(host) * 60_000));
        confirming.insert(qpn, location([10, 1, 0, host as u8].into(), 9), now);
        confirming.judge(qpn, PeerVerdict::Confirmed, Confirmation::Awaited, now);
        confirming.judge(qpn, PeerVerdict::Refused, Confirmation::Confirmed, now);
    }
    assert_eq!(confirming.doubted.len(), 1);
}

/// An agent that is gone, or hangs, costs next to nothing, however many connections go on meanwhile and for however long.
#[test]
fn what_is_confirmed_comes_up_rarely_while_nobody_answers() {
    const ALL: u32 = 20_000;
    let mut confirming = Confirming::default();
    confirming.begin(at(0));
    confirm(&mut confirming, 0..ALL, at(0));
    let mut come_up = 0;
    while let Some(now) = confirming.next_question().filter(|now| *now < at(600_000)) {
        let (qpn, _) = confirming.pop_due(now).expect("it is due");
        come_up += 1;
        match qpn % 3 {
            // Its answer is lost.
            0 => drop(confirming.take_turn(qpn, "a", now)),
            1 => confirming.put_off(qpn, Duration::from_millis(1), now),
            _ => {
                let then = confirming.judge(qpn, PeerVerdict::NotYet, Confirmation::Confirmed, now);
                assert_eq!(then, Then::Wait);
            }
        }
    }
    // Some five times while the pauses grow, and twice a minute then.
    assert!(come_up < ALL * 26, "{come_up}");
    assert!(come_up > ALL * 10, "each is asked again: {come_up}");
    assert!(confirming.open.values().all(|open| open.confirmed));
}

#[test]
fn new_connections_ask_while_nobody_answers_about_confirmed_ones() {
    let mut confirming = Confirming::default();
    confirming.begin(at(0));
    for tenant in 0..20 {
        confirm(&mut confirming, tenant * 1000..tenant * 1000 + 300, at(0));
    }
    let mut now = at(0);
    while now < at(200_000) {
        now = confirming.next_question().expect("they are asked again");
        let (qpn, _) = confirming.pop_due(now).expect("it is due");
        confirming.take_turn(qpn, &(qpn / 1000).to_string(), now);
    }
    let again = confirming.in_all[1];
    assert!(again <= MOST_CONFIRMED + 20 * LEAST_OF_TENANT, "{again}");
    assert!(again >= MOST_CONFIRMED / 2, "{again}");
    for qpn in 500..900 {
        confirming.insert(qpn, other(9), now);
    }
    let mut new = 0;
    while let Some((qpn, _)) = confirming.pop_due(now) {
        let number = confirming.take_turn(qpn, &(qpn / 1000).to_string(), now);
        new += usize::from(number.is_some() && (500..900).contains(&qpn));
    }
    assert_eq!(new, MOST_OF_TENANT);
}

/// Rules that hold whatever has happened.
fn check(confirming: &Confirming) {
    let Confirming {
        open,
        due,
        patience,
        under_way,
        in_all,
        waiting,
        settled,
        ..
    } = confirming;
    let mut counted: HashMap<Asker, usize> = HashMap::new();
    let mut kinds = [0; 2];
    let (mut waits, mut confirmed) = (0, 0);
    for (qpn, open) in open {
        let time = open.due.expect("each comes up again some time");
        assert!(due.contains(&(time, *qpn)));
        if let Some(asker) = &open.asked {
            *counted.entry(asker.clone()).or_default() += 1;
            kinds[usize::from(asker.confirmed)] += 1;
        }
        if let Some((asker, place)) = &open.waits {
            assert_eq!(waiting[asker][place], *qpn);
            waits += 1;
        }
        confirmed += usize::from(open.confirmed);
        assert!(!open.confirmed || !open.refused);
        assert!(!open.confirmed || !patience.contains(&(open.since + PATIENCE, *qpn)));
    }
    assert_eq!(due.len(), open.len());
    assert!(patience.iter().all(|(_, qpn)| open.contains_key(qpn)));
    assert!(patience.len() <= open.len());
    assert_eq!((under_way, in_all), (&counted, &kinds));
    assert_eq!(waiting.values().map(BTreeMap::len).sum::<usize>(), waits);
    assert!(waiting.values().all(|waiting| !waiting.is_empty()));
    assert_eq!(*settled, confirmed);
}

/// Whatever comes in whatever order: each is asked some time, and nothing is left of those that are gone.
#[test]
fn nothing_is_lost_and_nothing_is_left() {
    const QPS: u64 = 700;
    for seed in 0..8 {
        let mut confirming = Confirming::default();
        let mut state = seed;
        let mut random = |below: u64| {
            state = u64::wrapping_add(state, 1).wrapping_mul(0x5851_f42d_4c95_7f2d);
            (state >> 33) % below
        };
        let mut now = at(0);
        confirming.begin(now);
        for step in 0..20_000 {
            let qpn = random(QPS) as u32;
            let confirmation = match confirming.open.get(&qpn) {
                Some(open) if open.confirmed => Confirmation::Confirmed,
                Some(open) if open.refused => Confirmation::Denied,
                _ => Confirmation::Awaited,
            };
            let verdict = match random(4) {
                0 => PeerVerdict::NotYet,
                1 => PeerVerdict::Refused,
                _ => PeerVerdict::Confirmed,
            };
            match random(20) {
                0..4 => confirming.insert(qpn, other(9), now),
                4 => confirming.insert_refused(qpn, other(9), now),
                5 => confirming.remove(qpn, now),
                6 => confirming.note_sign(qpn, now),
                7 => confirming.schedule(qpn, now),
                8 => drop(confirming.pop_late(now)),
                // As where the agent has gone meanwhile, or both ends are here.
                9 => drop(confirming.judge(qpn, verdict, confirmation, now)),
                10 if random(300) == 0 => confirming.begin(now),
                11 => {
                    let most = 1 << random(17);
                    now = now + Duration::from_millis(random(most));
                }
                12..15 => {
                    if confirming.open.get(&qpn).is_some_and(|open| open.asked.is_some()) {
                        confirming.judge(qpn, verdict, confirmation, now);
                    }
                }
                _ => {
                    while let Some((qpn, _)) = confirming.pop_due(now) {
                        let tenant = ["a", "a", "b"][qpn as usize % 3];
                        match random(30) {
                            0 => confirming.remove(qpn, now),
                            1 => confirming.put_off(qpn, Duration::from_millis(100), now),
                            _ => {
                                if confirming.take_turn(qpn, tenant, now).is_some() && random(30) == 0 {
                                    confirming.give_back(qpn, Duration::from_millis(1), now);
                                }
                            }
                        }
                    }
                }
            }
            if step % 50 == 0 {
                check(&confirming);
            }
        }
        for qpn in 0..QPS as u32 {
            confirming.remove(qpn, now);
        }
        check(&confirming);
        assert_eq!((confirming.open.len(), confirming.next()), (0, None));
    }
}

#[test]
fn new_connections_do_not_keep_the_question_about_confirmed_ones_waiting() {
    let mut confirming = Confirming::default();
    confirming.begin(at(0));
    confirm(&mut confirming, 7..8, at(0));
    let now = confirming.next_question().expect("it is asked again");
    for qpn in 1000..1600 {
        confirming.insert(qpn, other(9), now);
    }
    let asked = asked(&mut confirming, now, "a");
    assert_eq!((asked.contains(&7), asked.len()), (true, MOST_OF_TENANT + 1));
}

#[test]
fn a_late_answer_counts_for_nothing() {
    let mut confirming = Confirming::default();
    confirming.begin(at(0));
    confirming.insert(7, other(9), at(0));
    confirming.pop_due(at(0)).unwrap();
    let first = confirming.take_turn(7, "a", at(0)).unwrap();
    assert!(confirming.is_answer(7, other(9), first));
    assert!(!confirming.is_answer(7, other(8), first) && !confirming.is_answer(8, other(9), first));
    // The other end has told meanwhile that it names this one no more.
    confirming.insert_refused(7, other(9), at(1));
    assert!(!confirming.is_answer(7, other(9), first));
    assert_eq!(
        (confirming.was_refused(7), confirming.next()),
        (true, Some(at(1)))
    );
    confirming.pop_due(at(1)).unwrap();
    let second = confirming.take_turn(7, "a", at(1)).unwrap();
    assert!(second != first && confirming.is_answer(7, other(9), second));
}

#[test]
fn a_packet_from_the_other_end_is_a_reason_to_ask_again_now_and_then() {
    let mut confirming = Confirming::default();
    confirming.begin(at(0));
    confirming.insert_refused(7, other(9), at(0));
    assert_eq!(asked(&mut confirming, at(0), "a"), [7]);
    confirming.judge(7, PeerVerdict::Refused, Confirmation::Denied, at(0));
    assert_eq!(confirming.next_question(), Some(at(1000)));
    confirming.note_sign(7, at(10));
    assert_eq!(asked(&mut confirming, at(10), "a"), [7]);
    confirming.note_sign(7, at(200));
    assert_eq!(asked(&mut confirming, at(200), "a"), [], "it is asked already");
    confirming.judge(7, PeerVerdict::Refused, Confirmation::Denied, at(201));
    for now in [202, 210, 250] {
        confirming.note_sign(7, at(now));
    }
    assert_eq!(asked(&mut confirming, at(250), "a"), [7]);
    confirming.judge(7, PeerVerdict::Refused, Confirmation::Denied, at(251));
    confirming.note_sign(7, at(260));
    assert_eq!(asked(&mut confirming, at(300), "a"), [], "not so soon");
    confirming.note_sign(7, at(310));
    assert_eq!(asked(&mut confirming, at(310), "a"), [7]);
}

#[test]
fn patience_ends_without_an_answer_too() {
    let mut confirming = Confirming::default();
    confirming.begin(at(0));
    confirming.insert(7, other(9), at(0));
    confirming.insert(8, other(9), at(5));
    assert_eq!(asked(&mut confirming, at(5), "a"), [7, 8]);
    assert_eq!(confirming.next(), Some(at(10_000)));
    assert_eq!(
        [10_000, 10_000, 10_005].map(|time| confirming.pop_late(at(time))),
        [Some(7), None, Some(8)]
    );
    // Once for each; whoever is not asked about any more, or about another end, has none, or its own.
    confirming.insert(7, other(9), at(20_000));
    confirming.insert(7, other(10), at(20_001));
    confirming.remove(8, at(20_001));
    assert_eq!(confirming.pop_late(at(30_000)), None);
    assert_eq!(confirming.pop_late(at(30_001)), Some(7));
    confirming.remove(7, at(30_001));
    assert_eq!(confirming.next(), None);
}

#[test]
fn a_lost_answer_is_asked_for_again() {
    let mut confirming = Confirming::default();
    confirming.begin(at(0));
    confirming.insert(7, other(9), at(0));
    assert_eq!(asked(&mut confirming, at(0), "a"), [7]);
    assert_eq!(asked(&mut confirming, at(29_999), "a"), []);
    assert_eq!(asked(&mut confirming, at(30_000), "a"), [7]);
}
