use super::*;

fn names(names: &[&'static str]) -> BTreeSet<&'static str> {
    names.iter().copied().collect()
}

#[test]
fn an_instance_is_moved_or_joined_but_not_both() {
    let mut turns = Turns::default();
    assert_eq!(turns.join(1, &"a", names(&["b", "c"])), Joined::Yes);
    assert!(!turns.is_empty());
    assert!(!turns.take(&"b", 3), "it is joined");
    assert_eq!(
        turns.join(2, &"d", names(&["b"])),
        Joined::Yes,
        "two partners' sessions do not disturb each other"
    );
    turns.leave(1);
    assert!(!turns.take(&"b", 3), "it is joined by another one");
    turns.leave(2);
    assert!(turns.is_empty());
    assert!(turns.take(&"b", 3));
    assert!(!turns.is_empty());
    assert_eq!(turns.join(1, &"a", names(&["b", "c"])), Joined::Moving("b"));
    assert!(!turns.take(&"b", 4), "another session has it");
    assert!(turns.take(&"c", 4), "who may not join has joined nothing");
}

#[test]
fn a_session_may_join_what_it_has_itself() {
    let mut turns = Turns::default();
    assert!(turns.take(&"b", 3));
    assert_eq!(turns.join(3, &"b", names(&["b"])), Joined::Yes);
}

#[test]
fn what_a_session_has_only_that_session_gives_back() {
    let mut turns = Turns::default();
    turns.have(&"a", 1);
    // The next session has it already when the one before ends.
    turns.have(&"a", 2);
    turns.give_back(&"a", 1);
    assert!(turns.is_had(&"a"));
    turns.give_back(&"b", 2);
    assert!(turns.is_had(&"a"));
    turns.give_back(&"a", 2);
    assert!(!turns.is_had(&"a") && turns.is_empty());
}

#[test]
fn the_next_move_of_an_instance_waits_for_the_one_before() {
    let mut turns = Turns::default();
    turns.join_again(1, &"a", names(&["b"]));
    assert_eq!(turns.earlier(2, &"a"), Some(1));
    assert_eq!(turns.earlier(1, &"a"), None, "it does not wait for itself");
    assert_eq!(turns.earlier(2, &"b"), None);
    turns.leave(1);
    assert_eq!(turns.earlier(2, &"a"), None);
}

#[test]
fn it_is_told_who_is_in_the_way() {
    let mut turns = Turns::default();
    assert_eq!(turns.joined_by(&"b"), None);
    assert_eq!(turns.anyone(1), None);
    turns.join_again(1, &"a", names(&["b"]));
    assert_eq!(turns.joined_by(&"b"), Some(&"a"));
    assert_eq!(turns.joined_by(&"a"), None);
    turns.have(&"c", 2);
    assert_eq!(turns.anyone(1), Some(&"c"));
    assert_eq!(turns.anyone(2), None, "nobody waits for itself");
}

#[test]
fn of_two_that_wait_for_each_other_one_lets_go() {
    for (one, other) in [("a", "b"), ("b", "a"), ("a", "aa")] {
        assert_ne!(keeps(&one, &other), keeps(&other, &one));
    }
    assert!(keeps(&"a", &"b"));
    // An earlier session's turn of the same instance is waited for like any other.
    assert!(keeps(&"a", &"a"));
}
