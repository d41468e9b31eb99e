//! The digests of the sources that walks depend on: those of a core, and of the worlds in which it runs.

#[path = "../simulation/digest.rs"]
mod digest;

fn main() -> std::io::Result<()> {
    for (name, of) in [("MIRROR", "mirror"), ("LEASE", "lease")] {
        let folders = ["src", "tests"].map(|folder| format!("../{of}/{folder}"));
        let digest = digest::of(&folders.each_ref().map(String::as_str))?;
        println!("cargo::rustc-env={name}_DIGEST={digest}");
    }
    Ok(())
}
