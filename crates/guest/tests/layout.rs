//! Our structures against the installed `<infiniband/verbs.h>`, by asking a C compiler.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use verbatim::abi::{Layout, layouts};

/// Members of ours that have other names in C.
fn c_field(structure: &str, field: &str) -> String {
    let field = field.strip_prefix("r#").unwrap_or(field);
    match (structure, field) {
        // The header's structure has a member of that structure's obsolete type.
        ("ibv_odp_caps", "per_transport_caps") => "per_transport_caps.rc_odp_caps".to_owned(),
        _ => field.to_owned(),
    }
}

fn program() -> String {
    let mut c = String::from(
        "#include <stdio.h>\n#include <stddef.h>\n#include <infiniband/verbs.h>\n#include <infiniband/sa.h>\n#include <rdma/rdma_user_cm.h>\nint main(void) {\n",
    );
    for Layout { name, fields, .. } in layouts() {
        writeln!(c, "printf(\"{name} %zu\", sizeof(struct {name}));").unwrap();
        for (field, _) in *fields {
            let field = c_field(name, field);
            writeln!(c, "printf(\" %zu\", offsetof(struct {name}, {field}));").unwrap();
        }
        writeln!(c, "printf(\"\\n\");").unwrap();
    }
    // What the macro of the layouts does not see: members of unions.
    for member in [
        "wr.rdma.rkey",
        "wr.atomic.swap",
        "wr.atomic.rkey",
        "wr.ud.remote_qkey",
        "bind_mw.bind_info",
    ] {
        writeln!(c, "printf(\"%zu \", offsetof(struct ibv_send_wr, {member}));").unwrap();
    }
    c.push_str("printf(\"%zu %zu\\n\", sizeof(union ibv_gid), _Alignof(union ibv_gid)); return 0; }\n");
    c
}

fn ours() -> String {
    use std::mem::offset_of;
    use verbatim::abi::*;
    let mut text = String::new();
    for Layout { name, size, fields } in layouts() {
        write!(text, "{name} {size}").unwrap();
        for (_, offset) in *fields {
            write!(text, " {offset}").unwrap();
        }
        text.push('\n');
    }
    let target = offset_of!(ibv_send_wr, wr);
    let in_unions = [
        target + offset_of!(ibv_send_wr_rdma, rkey),
        target + offset_of!(ibv_send_wr_atomic, swap),
        target + offset_of!(ibv_send_wr_atomic, rkey),
        target + offset_of!(ibv_send_wr_ud, remote_qkey),
        offset_of!(ibv_send_wr, bind_mw) + offset_of!(ibv_send_wr_bind_mw, bind_info),
        size_of::<ibv_gid>(),
        align_of::<ibv_gid>(),
    ];
    let words: Vec<_> = in_unions.iter().map(ToString::to_string).collect();
    text + &words.join(" ") + "\n"
}

#[test]
fn sizes_and_offsets_are_those_of_the_installed_header() {
    if !Path::new("/usr/include/infiniband/verbs.h").exists() {
        eprintln!("skipped: <infiniband/verbs.h> is not installed (package libibverbs-dev)");
        return;
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (source, binary) = (folder.path().join("layout.c"), folder.path().join("layout"));
    std::fs::write(&source, program()).unwrap();
    let compiler = match Command::new("cc").arg("-o").arg(&binary).arg(&source).output() {
        Ok(output) => output,
        Err(error) => {
            eprintln!("skipped: cc: {error}");
            return;
        }
    };
    assert!(
        compiler.status.success(),
        "{}",
        String::from_utf8_lossy(&compiler.stderr)
    );
    let output = Command::new(&binary).output().unwrap();
    let theirs = String::from_utf8(output.stdout).unwrap();
    let ours = ours();
    for (theirs, ours) in theirs.lines().zip(ours.lines()) {
        assert_eq!(
            ours, theirs,
            "ours (left) is not the header's (right): name, size, offsets"
        );
    }
    assert_eq!(theirs.lines().count(), ours.lines().count());
}
