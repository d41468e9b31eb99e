//! What `/proc` says of tasks and descriptors, line by line.

/// A line of a file of `/proc`, behind its name.
pub(crate) fn line<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let mut lines = text.lines();
    lines
        .find_map(|line| line.trim_start().strip_prefix(name))
        .map(str::trim)
}

/// Whether an eventfd is a semaphore, which CRIU does not keep, and nobody can change later. Kernels before Linux 6.9 do not say so.
pub(crate) fn is_semaphore(fdinfo: &str) -> bool {
    line(fdinfo, "eventfd-semaphore:").is_some_and(|value| value != "0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn semaphores_say_so() {
        assert!(is_semaphore("eventfd-id: 4\neventfd-semaphore: 1\n"));
        assert!(!is_semaphore("eventfd-id: 4\neventfd-semaphore: 0\n"));
        assert!(!is_semaphore("eventfd-id: 4\n"));
    }
}
