//! What benches start: programs of `bench/programs`, and themselves once more.

use std::path::Path;

use anyhow::Context;

/// The path of one of them; `make build` builds them.
pub fn program(name: &str) -> anyhow::Result<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../target/bench-programs")
        .join(name);
    let path = path
        .canonicalize()
        .with_context(|| format!("{} is missing: run `make build`", path.display()))?;
    utf8(&path)
}

/// The path of this program, which has commands of its own for what runs within a host.
pub fn this() -> anyhow::Result<String> {
    utf8(&std::env::current_exe()?)
}

fn utf8(path: &Path) -> anyhow::Result<String> {
    let path = path.to_str().context("a path that is not UTF-8")?;
    Ok(path.to_owned())
}
