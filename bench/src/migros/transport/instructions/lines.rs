//! Instructions by source line, out of what callgrind writes.

use std::ops::RangeInclusive;
use std::path::Path;

use anyhow::{Context, bail, ensure};

/// The lines of a file of `crates/roce/src` from where the first text begins, which is one place only, to the next that has the second
/// text.
pub fn find(file: &str, begin: &str, end: &str) -> anyhow::Result<RangeInclusive<u64>> {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/roce/src");
    let text = std::fs::read_to_string(sources.join(file)).with_context(|| format!("no {file}"))?;
    let places: Vec<usize> = text.match_indices(begin).map(|(place, _)| place).collect();
    let [place] = places[..] else {
        bail!("{begin:?} is at {} places of {file}", places.len());
    };
    let line_of = |place: usize| text[..place].matches('\n').count() as u64 + 1;
    let length = text[place..]
        .find(end)
        .with_context(|| format!("{begin:?} in {file} has no end"))?;
    Ok(line_of(place)..=line_of(place + length))
}

/// Instructions at these lines of a file of `crates/roce/src`, wherever they were inlined. Of a profile without compression, in the format of the manual of
/// callgrind: `fl=`, `fi=` and `fe=` name the file of the lines that follow, which have a number and a cost; after `calls=` comes
/// a line with the cost of the callee, which is also told where that is.
pub fn count(profile: &str, file: &str, wanted: &RangeInclusive<u64>) -> anyhow::Result<u64> {
    let path = format!("crates/roce/src/{file}");
    let mut sum = 0;
    let mut is_it = false;
    let mut lines = profile.lines();
    let mut costs = 0u64;
    while let Some(line) = lines.next() {
        if let Some(file) = ["fl=", "fi=", "fe="]
            .iter()
            .find_map(|key| line.strip_prefix(key))
        {
            is_it = file.ends_with(&path);
        } else if line.starts_with("calls=") {
            lines.next();
        } else if line.starts_with(|first: char| first.is_ascii_digit()) {
            let mut numbers = line.split_ascii_whitespace();
            let mut number = || numbers.next().and_then(|number| number.parse::<u64>().ok());
            let (at, cost) = (number(), number());
            let (Some(at), Some(cost)) = (at, cost) else {
                bail!("callgrind has written {line:?}");
            };
            costs += 1;
            if is_it && wanted.contains(&at) {
                sum += cost;
            }
        }
    }
    ensure!(costs > 0, "callgrind has written no costs");
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_executed_at_the_lines_themselves_counts() {
        let profile = "\
version: 1
positions: line
events: Ir
fl=/elsewhere/crates/roce/src/shell.rs
fn=admits
7 100
8 20
calls=3 50
8 9000
fi=/elsewhere/other.rs
8 40
fe=/elsewhere/crates/roce/src/shell.rs
9 3
";
        assert_eq!(count(profile, "shell.rs", &(8..=9)).unwrap(), 23);
        assert!(count("events: Ir\n", "shell.rs", &(8..=9)).is_err());
    }
}
