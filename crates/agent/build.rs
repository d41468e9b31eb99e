//! Generates the gRPC services from `proto/`, the lists of their RPCs, and one of everything in them.
//!
//! The protocol buffers are parsed by `protox`, in Rust: no `protoc` has to be on the machine.

use std::fmt::Write;
use std::path::Path;

use prost_types::field_descriptor_proto::Label;
use prost_types::{DescriptorProto, EnumDescriptorProto, FileDescriptorProto};

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
    let mut lines = String::new();
    for file in &descriptors.file {
        write_lines(&mut lines, file)?;
    }
    let out = std::env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?;
    std::fs::write(Path::new(&out).join("rpcs.rs"), rpcs)?;
    std::fs::write(Path::new(&out).join("grpc.txt"), lines)?;
    tonic_prost_build::configure()
        // Content of files: what is received is not copied once more.
        .bytes(".verbatim.v1.FilePart.data")
        .compile_fds(descriptors)?;
    Ok(())
}

/// One line for each field, value and RPC: its name, and all that is on the wire.
fn write_lines(out: &mut String, file: &FileDescriptorProto) -> std::fmt::Result {
    let package = file.package();
    for message in &file.message_type {
        write_message(out, &format!("{package}.{}", message.name()), message)?;
    }
    for values in &file.enum_type {
        write_enum(out, package, values)?;
    }
    for service in &file.service {
        for method in &service.method {
            let stream = |streams| if streams { "stream of " } else { "" };
            let (input, output) = (method.input_type(), method.output_type());
            let (asks, answers) = (
                stream(method.client_streaming()),
                stream(method.server_streaming()),
            );
            let name = format!("{package}.{}.{}", service.name(), method.name());
            writeln!(out, "{name}\t{asks}{input} -> {answers}{output}")?;
        }
    }
    Ok(())
}

fn write_message(out: &mut String, path: &str, message: &DescriptorProto) -> std::fmt::Result {
    for field in &message.field {
        let kind = match field.type_name() {
            "" => format!("{:?}", field.r#type()).to_lowercase(),
            name => name.to_owned(),
        };
        let label = match (field.label(), field.proto3_optional()) {
            (Label::Repeated, _) => "repeated ",
            (_, true) => "optional ",
            _ => "",
        };
        let oneof = field.oneof_index.filter(|_| !field.proto3_optional());
        let oneof = oneof.map(|index| format!(" of {}", message.oneof_decl[index as usize].name()));
        let (name, number) = (field.name(), field.number());
        writeln!(
            out,
            "{path}.{name}\t{number} {label}{kind}{}",
            oneof.unwrap_or_default()
        )?;
    }
    for nested in &message.nested_type {
        write_message(out, &format!("{path}.{}", nested.name()), nested)?;
    }
    for values in &message.enum_type {
        write_enum(out, path, values)?;
    }
    Ok(())
}

fn write_enum(out: &mut String, path: &str, values: &EnumDescriptorProto) -> std::fmt::Result {
    for value in &values.value {
        writeln!(
            out,
            "{path}.{}.{}\t{}",
            values.name(),
            value.name(),
            value.number()
        )?;
    }
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
