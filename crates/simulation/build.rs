//! The digest of the sources that a walk depends on: those of the core, and of the worlds in which it runs.

mod digest;

fn main() -> std::io::Result<()> {
    let digest = digest::of(&["../session/src", "src"])?;
    println!("cargo::rustc-env=SOURCES_DIGEST={digest}");
    Ok(())
}
