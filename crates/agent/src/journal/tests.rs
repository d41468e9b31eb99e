//! What the journal keeps, forgets, and does not conclude.

use verbatim_session::decision::Keep;
use verbatim_session::record::Parties;

use super::*;

fn opened() -> What {
    What::Opened(Parties {
        instance: "web".to_owned(),
        source: "a".to_owned(),
        destination: "b".to_owned(),
    })
}

fn names(journal: &Journal, session: u64, role: Role) -> Vec<String> {
    let parts = journal.parts(session);
    let part = parts.iter().find(|part| part.role == role).unwrap();
    part.steps.iter().map(|(_, name)| name.clone()).collect()
}

#[test]
fn a_journal_goes_on_where_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state/journal");
    let journal = Journal::open(&path).unwrap();
    journal.write(1, Role::Source, opened()).unwrap();
    journal.step(1, Role::Source, Phase::Converge, "PreCopy");
    let partners = Note {
        partners: vec!["c".to_owned()],
        ..Note::default()
    };
    journal.note(1, Role::Source, partners);
    journal.write(1, Role::Source, What::Deciding).unwrap();
    journal.write(1, Role::Source, What::Ran).unwrap();
    journal.step(1, Role::Source, Phase::Resume, "Replay");
    journal.write(2, Role::Destination, opened()).unwrap();
    let boot = journal.boot();
    let check = |journal: &Journal| {
        assert_eq!(journal.standing(1, Role::Source), Some(Standing::Ran));
        assert_eq!(journal.standing(1, Role::Partner), None);
        assert_eq!(journal.standing(2, Role::Destination), Some(Standing::Opened));
        let expected = ["Open", "PreCopy", "Deciding", "Running", "Replay"];
        assert_eq!(names(journal, 1, Role::Source), expected);
        let known = &journal.parts(1)[0];
        assert_eq!(known.told.instance.as_deref(), Some("web"));
        assert_eq!(known.told.partners, ["c"]);
        assert_eq!(known.boot, boot);
    };
    check(&journal);
    drop(journal);
    check(&Journal::open(&path).unwrap());
}

#[test]
fn two_agents_do_not_share_a_journal() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let _first = Journal::open(&path).unwrap();
    assert!(Journal::open(&path).is_err());
}

#[test]
fn a_damaged_journal_decides_nothing_about_open_sessions() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let journal = Journal::open(&path).unwrap();
    for session in [1, 2] {
        journal.write(session, Role::Destination, opened()).unwrap();
    }
    journal
        .write(1, Role::Destination, What::Committed(Noted::Nothing))
        .unwrap();
    let over = What::Closed(Outcome::RolledBack);
    journal.write(2, Role::Destination, over).unwrap();
    journal.write(3, Role::Source, opened()).unwrap();
    drop(journal);
    let (mut damaged, mut cut_off) = (0, 0);
    let length = std::fs::metadata(segment(&path)).unwrap().len() as usize;
    for offset in 0..length {
        // A copy, since what is found damaged is put aside.
        let copy = folder.path().join(format!("copy-{offset}"));
        std::fs::create_dir(&copy).unwrap();
        let mut bytes = std::fs::read(segment(&path)).unwrap();
        bytes[offset] ^= 0x40;
        std::fs::write(copy.join(segment(&path).file_name().unwrap()), bytes).unwrap();
        let Ok(journal) = Journal::open(&copy) else {
            continue;
        };
        let later = journal.standing(3, Role::Source);
        assert!(
            matches!(later, None | Some(Standing::Opened)),
            "it has begun behind all that is missing: offset {offset}, {later:?}"
        );
        match journal.standing(1, Role::Destination) {
            Some(Standing::Damaged) => damaged += 1,
            Some(Standing::Committed) | None => {}
            // A record that nothing follows is one that was being written when the machine went down: nobody was told of it.
            Some(Standing::Opened) if later.is_none() => cut_off += 1,
            other => panic!("offset {offset}: {other:?}, and the last record says {later:?}"),
        }
    }
    assert!(damaged > 0, "{damaged} damaged, {cut_off} cut off");
}

/// The only segment of a journal.
fn segment(path: &Path) -> std::path::PathBuf {
    let segments = std::fs::read_dir(path).unwrap();
    let mut segments = segments
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "log"));
    let only = segments.next().expect("a segment");
    assert!(segments.next().is_none());
    only
}

#[test]
fn what_is_long_over_is_forgotten() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let journal = Journal::open(&path).unwrap();
    let undecided = 1 << 40;
    journal.write(undecided, Role::Destination, opened()).unwrap();
    journal.step(undecided, Role::Destination, Phase::Prepare, "PreSetup");
    journal
        .write(undecided, Role::Destination, What::Committed(Noted::Nothing))
        .unwrap();
    let many = KEPT as u64 + 100;
    for session in 0..many {
        // Without waiting for the disk, which decisions otherwise do.
        let mut inner = journal.lock();
        let boot = inner.boot;
        let step = What::Step {
            phase: Phase::Quiesce,
            name: "Drain".to_owned(),
        };
        for what in [opened(), step, What::Closed(Outcome::Committed)] {
            let entry = Entry {
                session,
                role: Role::Partner,
                unix_ms: session,
                boot,
                what,
            };
            inner.log.append(&entry.encode(), Durability::Later).unwrap();
            inner.add(entry);
        }
    }
    let before = journal.lock().log.bytes();
    journal.write(many, Role::Partner, opened()).unwrap();
    let after = journal.lock().log.bytes();
    let ends = 140 * many;
    assert!(
        after < before && after < ends,
        "it was written anew, and has little but ends: {before} bytes before, {after} after"
    );
    drop(journal);
    let journal = Journal::open(&path).unwrap();
    assert_eq!(journal.standing(0, Role::Partner), None, "forgotten");
    let over = Some(Standing::Closed(Outcome::Committed));
    assert_eq!(journal.standing(200, Role::Partner), over);
    assert_eq!(
        names(&journal, many - 1, Role::Partner),
        ["Open", "Drain", "Closed"]
    );
    let steps = names(&journal, undecided, Role::Destination);
    assert_eq!(steps, ["Open", "PreSetup", "Commit"]);
    let standing = journal.standing(undecided, Role::Destination);
    assert_eq!(standing, Some(Standing::Committed));
    assert_eq!(journal.parts(many)[0].told.instance.as_deref(), Some("web"));
}

#[test]
fn what_memory_is_missing_is_known_until_it_is_not_and_then_forgotten_as_all_else() {
    let folder = tempfile::tempdir().unwrap();
    let journal = Journal::open(folder.path()).unwrap();
    let destination = Role::Destination;
    assert_eq!(journal.memory("web"), (None, Noted::Unknown));
    journal.write(1, destination, opened()).unwrap();
    journal
        .write(1, destination, What::Committed(Noted::Missing))
        .unwrap();
    let closed = What::Closed(Outcome::Committed);
    journal.write(1, destination, closed).unwrap();
    let must_be_missing = |journal: &Journal| {
        assert_eq!(journal.memory("web"), (Some(1), Noted::Missing));
        assert_eq!(journal.memory("other"), (None, Noted::Unknown));
        assert_eq!(journal.filling(), [(1, "web".to_owned())]);
        assert!(journal.lock().ended.is_empty(), "it is not over");
    };
    must_be_missing(&journal);
    drop(journal);
    let journal = Journal::open(folder.path()).unwrap();
    must_be_missing(&journal);
    // One that came to nothing says nothing of the instance that is here.
    journal.write(2, destination, opened()).unwrap();
    journal
        .write(2, destination, What::Committed(Noted::Missing))
        .unwrap();
    journal.write(2, destination, What::RolledBack).unwrap();
    assert_eq!(journal.memory("web").0, Some(1));
    assert_eq!(journal.filling().len(), 1);

    let boot = journal.parts(1)[0].boot;
    journal.write(1, destination, What::Filled).unwrap();
    drop(journal);
    let journal = Journal::open(folder.path()).unwrap();
    assert_eq!(journal.memory("web"), (Some(1), Noted::Nothing));
    assert!(journal.filling().is_empty());
    assert_eq!(journal.parts(1)[0].boot, boot);
    assert_eq!(journal.lock().ended, [(1, destination)]);
    // Its source may have been away for long.
    if let Some(known) = journal.lock().known.get_mut(&(1, destination)) {
        known.forget();
    }
    let kept: Vec<Entry> = journal.parts(1)[0].entries().collect();
    let mut again = Known::new(0, &kept[0]);
    kept.into_iter().for_each(|entry| again.add(entry));
    assert!(again.is_over() && again.part.memory == Noted::Nothing);
}

/// A journal of these records, of which one is flipped where it lies.
fn with_damage(records: &[(u64, Role, What)], lost: usize) -> Journal {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let journal = Journal::open(&path).unwrap();
    let mut ends = Vec::new();
    for (session, role, what) in records {
        journal.write(*session, *role, what.clone()).unwrap();
        ends.push(journal.lock().log.bytes());
    }
    drop(journal);
    let mut bytes = std::fs::read(segment(&path)).unwrap();
    bytes[ends[lost] as usize - 1] ^= 0x40;
    std::fs::write(segment(&path), bytes).unwrap();
    Journal::open(&path).unwrap()
}

#[test]
fn damage_counts_only_where_the_missing_record_may_have_been() {
    let destination = Role::Destination;
    let records = [
        (1, destination, opened()),
        (2, destination, opened()),
        (3, destination, opened()),
        (3, destination, What::RolledBack),
        (4, Role::Source, opened()),
        (4, Role::Source, What::Resolved(Keep::Source)),
        // This one is lost.
        (1, destination, What::Committed(Noted::Nothing)),
        (2, destination, What::Committed(Noted::Nothing)),
        (5, destination, opened()),
        (5, destination, What::Committed(Noted::Nothing)),
        (6, Role::Source, opened()),
        (6, Role::Source, What::Deciding),
    ];
    let journal = with_damage(&records, 6);
    for (session, role, expected) in [
        (1, destination, Standing::Damaged),
        (2, destination, Standing::Committed),
        (3, destination, Standing::RolledBack),
        (4, Role::Source, Standing::Resolved(Keep::Source)),
        (5, destination, Standing::Committed),
        (6, Role::Source, Standing::Deciding),
    ] {
        assert_eq!(
            journal.standing(session, role),
            Some(expected),
            "session {session}"
        );
    }
    // What a session says later it has said.
    journal.write(1, destination, What::RolledBack).unwrap();
    assert_eq!(journal.standing(1, destination), Some(Standing::RolledBack));
}

#[test]
fn a_session_whose_beginning_is_lost_stands_as_its_last_record_says() {
    let source = Role::Source;
    let records = [
        (1, source, opened()),
        (1, source, What::Ran),
        (1, source, What::Cleared),
        (2, source, opened()),
    ];
    let journal = with_damage(&records, 0);
    assert_eq!(journal.standing(1, source), Some(Standing::Cleared));
    assert_eq!(journal.standing(2, source), Some(Standing::Opened));
    // The tasks that are held for a session tell what it was about.
    journal.write(1, source, opened()).unwrap();
    assert_eq!(journal.standing(1, source), Some(Standing::Cleared));
    assert_eq!(journal.parts(1)[0].told.instance.as_deref(), Some("web"));
}

#[test]
fn a_record_of_a_later_release_is_refused_and_is_no_damage() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let journal = Journal::open(&path).unwrap();
    journal.write(1, Role::Destination, opened()).unwrap();
    let mut inner = journal.lock();
    let entry = Entry {
        session: 1,
        role: Role::Destination,
        unix_ms: 1,
        boot: inner.boot,
        what: What::Filled,
    };
    let mut later = entry.encode();
    // Its first field is the version.
    assert_eq!(later[..2], [8, 2]);
    later[1] = 9;
    inner.log.append(&later, Durability::Synced).unwrap();
    drop(inner);
    drop(journal);
    let refused = format!("{:#}", Journal::open(&path).err().expect("it is refused"));
    for word in ["version 9", "later release", &path.display().to_string()] {
        assert!(refused.contains(word), "{refused}");
    }
}

/// Adds records with times as they come from a clock that is put back.
fn at(journal: &Journal, unix_ms: u64, session: u64, role: Role, whats: &[What]) {
    let mut inner = journal.lock();
    for what in whats {
        let entry = Entry {
            session,
            role,
            unix_ms,
            boot: inner.boot,
            what: what.clone(),
        };
        inner.log.append(&entry.encode(), Durability::Synced).unwrap();
        inner.add(entry);
    }
}

#[test]
fn the_order_of_sessions_is_no_clocks_also_when_the_journal_is_written_anew() {
    let folder = tempfile::tempdir().unwrap();
    let journal = Journal::open(folder.path()).unwrap();
    let (source, destination) = (Role::Source, Role::Destination);
    let closed = What::Closed(Outcome::Committed);
    let came = |noted| [opened(), What::Committed(noted), closed.clone()];
    at(&journal, 9_000, 30, destination, &came(Noted::Nothing));
    at(&journal, 8_000, 20, source, &[opened(), closed.clone()]);
    at(&journal, 1_000, 10, destination, &came(Noted::Missing));
    let check = |journal: &Journal| {
        assert_eq!(journal.memory("web"), (Some(10), Noted::Missing));
        assert_eq!(journal.latest("web"), Some((10, destination)));
        assert_eq!(journal.latest("other"), None);
    };
    check(&journal);
    drop(journal);
    let journal = Journal::open(folder.path()).unwrap();
    check(&journal);
    journal.lock().rewrite().unwrap();
    check(&journal);
    drop(journal);
    let journal = Journal::open(folder.path()).unwrap();
    check(&journal);
    at(&journal, 500, 5, source, &[opened()]);
    assert_eq!(journal.latest("web"), Some((5, source)));
}

#[test]
fn memory_of_which_records_may_be_missing_is_neither_there_nor_not() {
    let destination = Role::Destination;
    for noted in [Noted::Missing, Noted::Nothing] {
        let records = [
            (1, destination, opened()),
            (1, destination, What::Committed(noted)),
            (2, Role::Source, opened()),
            (3, Role::Partner, opened()),
        ];
        let journal = with_damage(&records, 2);
        assert_eq!(journal.memory("web"), (Some(1), Noted::Unknown), "{noted:?}");
    }
}
