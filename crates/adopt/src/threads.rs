//! Pages that belong to threads themselves and stay private: stacks and thread descriptors.

use std::ops::Range;

use crate::maps::Mapping;
use crate::pages::overlap;
use crate::sys::{memory, thread};

/// How many threads the process has; `usize::MAX` if that cannot be told.
pub fn count() -> usize {
    std::fs::read_dir("/proc/self/task").map_or(usize::MAX, |tasks| tasks.count())
}

/// What must not move, as far as it lies in `region`, which lies in `mappings`:
///
/// - the caller's stack and descriptor, which it uses while pages are in transit;
/// - every thread's descriptor: the kernel ends `pthread_join` with a wake-up of the futex there, whose key depends on
///   what kind of mapping it is in (futex(2), `CLONE_CHILD_CLEARTID`);
/// - the stack below that descriptor, as libc lays them out: the thread may be the next to call us;
/// - headers of malloc's arenas: a child of `fork` resets their locks before anybody can give it its own pages.
pub fn off_limits(mappings: &[Mapping], region: &Range<usize>) -> Vec<Range<usize>> {
    let mut ranges = vec![thread::current_stack()];
    ranges.extend(thread::own_descriptor());
    let main = std::process::id().cast_signed();
    for tid in tids() {
        let Some(mut range) = thread::descriptor(tid) else {
            continue;
        };
        if tid != main
            && let Some(mapping) = mappings
                .iter()
                .find(|mapping| mapping.range.contains(&range.start))
        {
            range.start = mapping.range.start;
        }
        ranges.push(range);
    }
    let movable = mappings.iter().filter(|mapping| mapping.movable());
    ranges.extend(
        movable
            .filter_map(|mapping| overlap(&mapping.range, region))
            .flat_map(arena_headers),
    );
    ranges
}

/// The headers of glibc's thread arenas in a part of the region. An arena starts at a multiple of `HEAP_MAX_SIZE` with a `struct
/// heap_info`, whose first word points to the `struct malloc_state` right behind it; both are in one page.
fn arena_headers(part: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    const HEAP_MAX_BYTES: usize = 64 << 20;
    const HEAP_INFO_BYTES: Range<usize> = 16..256;
    let first = part
        .start
        .checked_next_multiple_of(HEAP_MAX_BYTES)
        .unwrap_or(usize::MAX);
    (first..part.end)
        .step_by(HEAP_MAX_BYTES)
        .filter(|start| HEAP_INFO_BYTES.contains(&memory::word(*start).wrapping_sub(*start)))
        .map(|start| start..start + 1)
}

fn tids() -> Vec<i32> {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else {
        return Vec::new();
    };
    tasks
        .flatten()
        .filter_map(|task| task.file_name().to_str()?.parse().ok())
        .collect()
}
