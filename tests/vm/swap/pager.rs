//! The program `pager.c`, watched by what it says on a machine's console.

/// What it says each second.
const BEAT: &str = "pager: beat ";

/// How many pages each program has compared, by the last beat of a console.
pub fn compared(console: &str) -> Option<Vec<u64>> {
    // The last line may be cut off.
    let whole = &console[..=console.rfind('\n')?];
    let beat = whole
        .lines()
        .rev()
        .find_map(|line| line.trim().strip_prefix(BEAT))?;
    beat.split_whitespace()
        .skip(2)
        .map(|count| count.parse().ok())
        .collect()
}
