//! Generates the gRPC services from `proto/`.
//!
//! The protocol buffers are parsed by `protox`, in Rust: no `protoc` has to be on the machine.

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
    tonic_prost_build::configure()
        // Content of files: what is received is not copied once more.
        .bytes(".verbatim.v1.FilePart.data")
        .compile_fds(descriptors)?;
    Ok(())
}
