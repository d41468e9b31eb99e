//! Generates the gRPC services from `proto/`, and the lists of their RPCs.
//!
//! The protocol buffers are parsed by `protox`, in Rust: no `protoc` has to be on the machine.

use std::fmt::Write;
use std::path::Path;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = Path::new("../../proto");
    let files = [
        root.join("verbatim/v1/control.proto"),
        root.join("verbatim/v1/peer.proto"),
    ];
    for file in &files {
        println!("cargo::rerun-if-changed={}", file.display());
    }
    let descriptors = protox::compile(&files, [root])?;
    let mut rpcs = String::new();
    for service in descriptors.file.iter().flat_map(|file| &file.service) {
        let methods = service.method.iter().map(|method| method.name());
        write_rpcs(&mut rpcs, service.name(), &methods.collect::<Vec<_>>())?;
    }
    let out = std::env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?;
    std::fs::write(Path::new(&out).join("rpcs.rs"), rpcs)?;
    tonic_prost_build::configure()
        // Content of files: what is received is not copied once more.
        .bytes(".verbatim.v1.FilePart.data")
        .compile_fds(descriptors)?;
    Ok(())
}

/// An enum of all RPCs of a service: who matches on it has forgotten none.
fn write_rpcs(out: &mut String, service: &str, methods: &[&str]) -> std::fmt::Result {
    writeln!(
        out,
        "/// The RPCs of the service `{service}`, from its descriptor."
    )?;
    writeln!(out, "#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]")?;
    writeln!(out, "pub enum {service}Rpc {{")?;
    for method in methods {
        writeln!(out, "    /// `{service}.{method}`.\n    {method},")?;
    }
    writeln!(out, "}}\n\nimpl {service}Rpc {{")?;
    writeln!(out, "    /// All of them, in the order of the descriptor.")?;
    writeln!(out, "    pub const ALL: &[Self] = &[")?;
    for method in methods {
        writeln!(out, "        Self::{method},")?;
    }
    writeln!(out, "    ];\n")?;
    writeln!(out, "    /// Its name, as in the descriptor.")?;
    writeln!(
        out,
        "    pub fn name(self) -> &'static str {{\n        match self {{"
    )?;
    for method in methods {
        writeln!(out, "            Self::{method} => \"{method}\",")?;
    }
    writeln!(out, "        }}\n    }}\n}}\n")
}
