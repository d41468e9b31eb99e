//! What an agent reads from its disk, from other agents, and from the lab.

use std::os::unix::fs::symlink;

use arbitrary::{Arbitrary, Unstructured};
use verbatim_agent::fuzzing;
use verbatim_agent::proto::FilePart;

use super::guest::road_map;
use super::{encoded, folder};

pub fn journal(record: &[u8]) {
    fuzzing::journal(record);
}

pub fn journal_seeds() -> Vec<Vec<u8>> {
    fuzzing::journal_records()
}

pub fn records(bytes: &[u8]) {
    fuzzing::records(bytes);
}

pub fn record_seeds() -> Vec<Vec<u8>> {
    let command = r#"{"name":"web","workload":{"Command":{"args":["a"],"env":["B=c"],"cwd":"/","binds":[]}},
        "address":"10.77.1.5","prefix":16}"#;
    let bundle =
        r#"{"name":"web","workload":{"Bundle":{"path":"/b","config":"{}"}},"address":"10.0.0.1","prefix":8}"#;
    vec![
        command.as_bytes().to_vec(),
        bundle.as_bytes().to_vec(),
        b"10.77.1.5/16".to_vec(),
        encoded(&vec![road_map(), road_map()]),
    ]
}

/// Paths that could lead out, and some that do not.
const PATHS: [&str; 12] = [
    "a",
    "d",
    "d/a",
    "l",
    "l/a",
    "d/l",
    "..",
    "../x",
    "/tmp/x",
    "a/../../x",
    "",
    "d/./a",
];

/// Whatever the parts say, nothing outside of the folder changes.
pub fn file_parts(input: &[u8]) {
    let mut input = Unstructured::new(input);
    let mut parts = Vec::new();
    while !input.is_empty() && parts.len() < 16 {
        let Ok(part) = file_part(&mut input) else {
            break;
        };
        parts.push(part);
    }
    folder::with_new(|folder| {
        let (root, outside) = (folder.join("root"), folder.join("outside"));
        std::fs::create_dir(&root).expect("a folder");
        std::fs::create_dir(&outside).expect("a folder");
        std::fs::write(outside.join("a"), "untouched").expect("a file");
        symlink(&outside, root.join("l")).expect("a link");
        fuzzing::place(&root, &parts);
        let text = std::fs::read_to_string(outside.join("a"));
        assert_eq!(text.expect("it is still there"), "untouched");
        let outside = std::fs::read_dir(&outside).expect("it is still there").count();
        let beside = std::fs::read_dir(folder).expect("it is still there").count();
        assert_eq!((outside, beside), (1, 2), "nothing is beside the folder");
    });
}

fn file_part(input: &mut Unstructured<'_>) -> arbitrary::Result<FilePart> {
    let path = match input.ratio(3, 4)? {
        true => input.choose(&PATHS)?.as_bytes().to_vec(),
        false => Vec::<u8>::arbitrary(input)?,
    };
    let data = match input.ratio(1, 4)? {
        true => b"../outside/a".to_vec(),
        false => Vec::<u8>::arbitrary(input)?,
    };
    Ok(FilePart {
        path,
        kind: input.int_in_range(0..=4)?,
        mode: input.arbitrary()?,
        uid: None,
        gid: None,
        offset: input.arbitrary()?,
        length: input.arbitrary()?,
        data: data.into(),
        ..FilePart::default()
    })
}

pub fn file_part_seeds() -> Vec<Vec<u8>> {
    vec![(0..200).collect(), vec![0; 300], (0..250).rev().collect()]
}

pub fn lab_protocol(input: &[u8]) {
    let Some((cut, bytes)) = input.split_first() else {
        return;
    };
    verbatim_lab::fuzzing::lines(bytes, usize::from(*cut));
}

pub fn lab_seeds() -> Vec<Vec<u8>> {
    let lines = [
        "\"Begin\"\n{\"Kill\":{\"service\":\"nic\"}}\n",
        "\"Ready\"\n{\"Services\":[{\"name\":\"nic\",\"state\":\"running\"}]}\n{\"Answer\":{\"Ok\":null}}\n",
        "{\"Kill\":{\"host\":\"a\",\"service\":\"nic\"}}\n\"Status\"\n{\"Failed\":{\"reason\":\"x\"}}\n",
    ];
    lines.map(|text| [b"\x07", text.as_bytes()].concat()).to_vec()
}
