//! The benches' own programs, of `bench/programs`.

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
    let path = path.to_str().context("a path that is not UTF-8")?;
    Ok(path.to_owned())
}
