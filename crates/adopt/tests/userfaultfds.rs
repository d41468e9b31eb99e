//! The userfaultfds of a process, counted: a binary of its own, with one test.

mod support;

use std::path::Path;

use support::{Region, adopt, adopter, mem_dir};
use verbatim_adopt::Options;

fn userfaultfds() -> usize {
    std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .flatten()
        .filter(|fd| {
            std::fs::read_link(fd.path()).is_ok_and(|path| path == Path::new("anon_inode:[userfaultfd]"))
        })
        .count()
}

#[test]
fn none_stays_open_for_a_look_at_descriptors() {
    let dir = mem_dir();
    let adopter = adopter(
        &dir,
        Options {
            user_mode: true,
            ..Options::default()
        },
    );
    let regions = [Region::new(1), Region::new(1)];
    for region in &regions {
        region.number(1);
    }
    let _first = adopt(&adopter, regions[0].pages(0..1));
    if userfaultfds() == 0 {
        eprintln!("skipped: no userfaultfd");
        return;
    }
    adopter.close_userfaultfds();
    assert_eq!(userfaultfds(), 0);
    let second = adopt(&adopter, regions[1].pages(0..1));
    assert_eq!(userfaultfds(), 0, "by an adoption while the look goes on");
    adopter.release(second.token);
    assert_eq!(userfaultfds(), 0, "by a release");
}
