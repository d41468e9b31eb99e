//! What is written, and where: data to standard output, everything for people to standard error.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

/// Logs go to standard error: warnings, or more; `VERBATIM_LOG` overrides.
pub fn start_logging(verbose: u8) {
    let default = match verbose {
        0 => "warn",
        1 => "info,verbatim=info",
        _ => "info,verbatim_agent=debug,verbatim_container=debug,verbatim_nic=debug,verbatim_lab=debug",
    };
    let filter = EnvFilter::try_from_env("VERBATIM_LOG").unwrap_or_else(|_| EnvFilter::new(default));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .init();
}

/// A table with a head, its columns as wide as they must be.
pub fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = head.iter().map(|cell| cell.len()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let padded: Vec<_> = cells
            .zip(&widths)
            .map(|(cell, width)| format!("{cell:<width$}"))
            .collect();
        format!("{}\n", padded.join("  ").trim_end())
    };
    let mut text = line(&mut head.iter().copied());
    for row in rows {
        text += &line(&mut row.iter().map(String::as_str));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let text = table(
            &["NAME", "HOST"],
            &[vec!["a".into(), "src".into()], vec!["longer".into(), "d".into()]],
        );
        assert_eq!(text, "NAME    HOST\na       src\nlonger  d\n");
    }
}
