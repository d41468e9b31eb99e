//! What of a context was made at its new host before its process came there: by a helper of that host's agent, with the library of the
//! RNIC, for the process to go on with.
//!
//! The library asks the kernel for each object by a command. The helper notes what was asked for and what the kernel answered, and hands
//! the descriptors over. The process's own library then makes its half of the same objects, and is given those answers.
//!
//! With [`Order::MakeAgain`](crate::Order::MakeAgain) it comes as descriptors, behind the terminal: first that of [`pack`], then those of all
//! contexts, in their order. Who does not understand it makes all by itself.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::OwnedFd;

use rustix::fs::MemfdFlags;
use serde::{Deserialize, Serialize};

/// The first byte of what [`pack`] writes. It rises when what follows has another form.
const FORM: u8 = 1;

/// As many bytes as are read: thousands of commands.
const MAX_BYTES: u64 = 64 << 20;

/// A context.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MadeAhead {
    /// [`ContextRecord::id`](crate::ContextRecord::id).
    pub id: u32,
    /// So many descriptors are its own. The first one is that of its commands.
    pub descriptors: u32,
    /// Device and inode number of the file of adopted memory that is registered.
    pub memory: Option<(u64, u64)>,
    /// The regions' remote keys, by which it is seen whether the process has gone on with them.
    pub rkeys: Vec<u32>,
    /// In their order.
    pub commands: Vec<Command>,
}

/// An ioctl(2) of uverbs that has made something (`struct ib_uverbs_ioctl_hdr`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Command {
    /// `object_id`
    pub object: u16,
    /// `method_id`
    pub method: u16,
    /// `driver_id`
    pub driver: u32,
    /// In their order.
    pub attributes: Vec<Attribute>,
}

/// `struct ib_uverbs_attr`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attribute {
    /// `attr_id`
    pub id: u16,
    /// `len`
    pub bytes: u16,
    /// As the kernel left them.
    pub flags: u16,
    /// What was said.
    pub value: Value,
}

/// What an attribute says, and who says it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Value {
    /// The caller, with addresses blanked.
    Given(Vec<u8>),
    /// The caller: by what events name the object. The helper's is none of the process's addresses.
    UserHandle(u64),
    /// The caller: the descriptor of that index.
    Descriptor(u32),
    /// The kernel: the object's number.
    Handle(u64),
    /// The kernel: the descriptor of that index is new.
    NewDescriptor(u32),
    /// The kernel, where the attribute leads to.
    Answer(Vec<u8>),
    /// The kernel, where the attribute leads to: a 32-bit number of a new descriptor, that of this index.
    AnswerDescriptor(u32),
}

/// A file with all of it.
pub fn pack(contexts: &[MadeAhead]) -> io::Result<OwnedFd> {
    let bytes = postcard::to_stdvec(contexts).map_err(io::Error::other)?;
    let mut file = File::from(rustix::fs::memfd_create("verbatim-ahead", MemfdFlags::CLOEXEC)?);
    file.write_all(&[FORM])?;
    file.write_all(&bytes)?;
    Ok(file.into())
}

/// What [`pack`] has written; an error of kind `InvalidData` if it has another form.
pub fn unpack(file: OwnedFd) -> io::Result<Vec<MadeAhead>> {
    let mut file = File::from(file);
    file.rewind()?;
    let mut bytes = Vec::new();
    file.take(MAX_BYTES).read_to_end(&mut bytes)?;
    let invalid = |why: String| io::Error::new(io::ErrorKind::InvalidData, why);
    match bytes.split_first() {
        Some((&FORM, rest)) => verbatim_bounded::decode(rest).map_err(|error| invalid(error.to_string())),
        Some((other, _)) => Err(invalid(format!("what was made ahead is in form {other}"))),
        None => Err(invalid("nothing was made ahead".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_packed_is_unpacked_and_another_form_is_an_error() {
        let context = MadeAhead {
            id: 3,
            descriptors: 2,
            memory: Some((1, 2)),
            rkeys: vec![0x101],
            commands: vec![Command {
                object: 3,
                method: 0,
                driver: 14,
                attributes: vec![Attribute {
                    id: 6,
                    bytes: 4,
                    flags: 3,
                    value: Value::Answer(vec![1, 2, 3, 4]),
                }],
            }],
        };
        let packed = pack(std::slice::from_ref(&context)).unwrap();
        assert_eq!(unpack(packed).unwrap(), [context]);
        for bytes in [&[][..], &[FORM + 1, 0], &[FORM, 7]] {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(bytes).unwrap();
            let error = unpack(file.into()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{bytes:?}");
        }
    }
}
