use super::*;

#[test]
fn runs_add_up_where_the_sources_are_the_same() {
    let text = "# Why.\nold turns 0..9\nnew turns 10..20\nnew turns 30..40\nnew decision 0..5\n";
    let mut walked = Walked::read(text, "new").unwrap();
    assert_eq!(walked.left("turns", 0..50), [0..10, 20..30, 40..50]);
    assert_eq!(walked.left("turns", 12..18), []);
    assert_eq!(walked.left("decision", 3..6).first(), Some(&(5..6)));
    assert_eq!(walked.count("turns"), 20);
    walked.add("turns", 20..30);
    walked.add("decision", 7..8);
    assert_eq!(walked.count("turns"), 30);
    let now = walked.to_string();
    assert!(
        now.ends_with("new decision 0..5\nnew decision 7..8\nnew turns 10..40\n"),
        "{now}"
    );
    assert_eq!(Walked::read(&now, "new").unwrap(), walked);
    assert_eq!(Walked::read(&now, "newer").unwrap().count("turns"), 0);
}

#[test]
fn what_is_within_another_range_counts_once() {
    let mut walked = Walked::default();
    for seeds in [0..10, 2..4, 8..12] {
        walked.add("turns", seeds);
    }
    assert_eq!(walked.count("turns"), 12);
}

#[test]
fn a_damaged_file_is_refused() {
    for line in ["new turns", "new turns 1", "new turns 1..x"] {
        assert!(Walked::read(line, "new").is_err(), "{line}");
    }
}

#[test]
fn the_file_beside_the_sources_can_be_read() {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/walked.txt")).unwrap();
    Walked::read(&text, DIGEST).unwrap();
    assert_eq!(DIGEST.len(), 16);
}
