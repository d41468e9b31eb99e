//! QEMU's messages when it ends.

/// Lines with advice for a user at a terminal, not with a reason.
const HINTS: [&str; 2] = ["Use -machine help", "Use -cpu help"];

/// Messages that only follow from the reason.
const ENDS: [&str; 2] = ["load of migration failed", "error while loading state"];

/// Limit of the lines.
const LINES: usize = 3;

/// The lines of QEMU's output that tell why it has ended, in their order. The output may also have lines of
/// the guest.
pub fn last_words(printed: &str) -> Option<String> {
    let lines = printed.lines().map(str::trim).filter(|line| !line.is_empty());
    let mut last = None;
    let mut said: Vec<&str> = Vec::new();
    for line in lines {
        if HINTS.iter().any(|hint| line.starts_with(hint)) {
            continue;
        }
        last = Some(line);
        // qemu-system-x86_64: -device nosuch: 'nosuch' is not a valid device model name
        let words = match line.split_once(": ") {
            Some((program, words)) if is_qemu(program) && !is_warning(words) => words,
            _ => continue,
        };
        said.retain(|earlier| *earlier != words);
        said.push(words);
    }
    if said.is_empty() {
        return last.map(str::to_owned);
    }
    // A reason is preferred to a message that only follows it.
    let is_end = |words: &&str| ENDS.iter().any(|end| words.starts_with(end));
    if said.iter().any(|words| !is_end(words)) && said.len() > LINES {
        said.retain(|words| !is_end(words));
    }
    let first = said.len().saturating_sub(LINES);
    Some(said[first..].join("; "))
}

fn is_qemu(program: &str) -> bool {
    program
        .rsplit('/')
        .next()
        .is_some_and(|name| name.starts_with("qemu"))
}

fn is_warning(words: &str) -> bool {
    ["warning:", "info:"].iter().any(|kind| words.starts_with(kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_is_shown_and_not_the_line_that_happens_to_be_the_last() {
        for (printed, expected) in [
            (
                "tick 1\nqemu-system-x86_64: unsupported machine type 'pc-q35-10.0'\nUse -machine help to list supported machines\n",
                "unsupported machine type 'pc-q35-10.0'",
            ),
            (
                "qemu-system-x86_64: warning: TCG doesn't support requested feature\ntick 7\n\
                 /usr/bin/qemu-system-x86_64: Unknown savevm section or instance '0000:00:04.0/xhci' 0.\n\
                 qemu-system-x86_64: load of migration failed: Invalid argument\n",
                "Unknown savevm section or instance '0000:00:04.0/xhci' 0.; load of migration failed: Invalid argument",
            ),
            (
                "qemu: one\nqemu: two\nqemu: two\nqemu: three\nqemu: four\nqemu: load of migration failed: x",
                "two; three; four",
            ),
            ("sh: exec: no-such: not found\n\n", "sh: exec: no-such: not found"),
        ] {
            assert_eq!(last_words(printed).as_deref(), Some(expected), "{printed}");
        }
        assert_eq!(last_words("\n \n"), None);
    }
}
