//! The helper's side: commands go to the kernel, and those that make something are noted with its answers.

use std::ffi::c_int;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};

use verbatim_channel::ahead::{self, MadeAhead, Value};

use super::table::{Makes, Role};
use super::{MADE_AHEAD, tokens};
use crate::backend::rdma_core::uverbs::{ATTR_F_VALID_OUTPUT, Attribute, Command};

/// Objects that were noted in this process, over all of its contexts.
static NOTED: AtomicU64 = AtomicU64::new(0);

/// What has been noted.
#[derive(Debug, Default)]
pub struct Recorder {
    /// Those of the library, by index; the first one is that of the commands.
    descriptors: Vec<RawFd>,
    commands: Vec<ahead::Command>,
    /// Why nobody else can go on with it.
    unusable: Option<String>,
}

impl Recorder {
    /// Whether that is the descriptor of the commands that are noted.
    pub fn is_of(&self, fd: RawFd) -> bool {
        self.descriptors.first() == Some(&fd)
    }

    /// Has the kernel asked by `ask`, and notes what was made.
    ///
    /// # Safety
    /// The command is libibverbs's: what its attributes lead to can be read, and what the kernel has answered.
    pub unsafe fn note(
        &mut self,
        fd: RawFd,
        command: &mut Command<'_>,
        ask: impl FnOnce() -> c_int,
    ) -> c_int {
        let makes = Makes::of(command);
        let Some(makes) = makes.filter(|makes| *makes == Makes::Context || self.is_of(fd)) else {
            return ask();
        };
        let mut token = None;
        for attribute in command.attributes.iter_mut() {
            if makes.role(attribute.id) == Role::UserHandle {
                let index = NOTED.fetch_add(1, Ordering::Relaxed);
                token = Some((attribute.data, tokens::token(index)));
                tokens::learn(tokens::token(index), attribute.data);
                attribute.data = tokens::token(index);
            }
        }
        let returned = ask();
        if returned == 0 {
            // SAFETY: the caller's contract.
            unsafe { self.note_made(fd, makes, command) };
        }
        if let Some((address, token)) = token {
            let given = command.attributes.iter_mut();
            for attribute in given.filter(|attribute| attribute.data == token) {
                attribute.data = address;
            }
        }
        returned
    }

    /// # Safety
    /// As [`Self::note`], and the kernel has answered.
    unsafe fn note_made(&mut self, fd: RawFd, makes: Makes, command: &Command<'_>) {
        if makes == Makes::Context {
            if !self.descriptors.is_empty() {
                self.unusable = Some("more than one context was opened".to_owned());
                return;
            }
            if !MADE_AHEAD.contains(&command.header.driver) {
                self.unusable = Some(format!(
                    "its driver (number {} of the kernel's) has queues in the library's memory",
                    command.header.driver
                ));
            }
            self.descriptors.push(fd);
        }
        let mut attributes = Vec::with_capacity(command.attributes.len());
        for attribute in command.attributes.iter() {
            // SAFETY: the caller's contract.
            match unsafe { self.value(makes, attribute) } {
                Ok(value) => attributes.push(ahead::Attribute {
                    id: attribute.id,
                    bytes: attribute.bytes,
                    flags: attribute.flags,
                    value,
                }),
                Err(why) => self.unusable = Some(why),
            }
        }
        self.commands.push(ahead::Command {
            object: command.header.object,
            method: command.header.method,
            driver: command.header.driver,
            attributes,
        });
    }

    /// # Safety
    /// As [`Self::note_made`].
    unsafe fn value(&mut self, makes: Makes, attribute: &Attribute) -> Result<Value, String> {
        let answered = attribute.flags & ATTR_F_VALID_OUTPUT != 0;
        Ok(match makes.role(attribute.id) {
            Role::Handle => Value::Handle(attribute.data),
            Role::UserHandle => Value::UserHandle(attribute.data),
            Role::NewDescriptor => Value::NewDescriptor(self.add(attribute.data as RawFd)),
            Role::AnswerDescriptor => {
                // SAFETY: the kernel has written so many bytes there, of which the number is the first four.
                let answer = unsafe { answer(attribute) };
                let number = answer.first_chunk().copied().map(RawFd::from_ne_bytes);
                let number = number.ok_or("the kernel gave no number of a descriptor")?;
                Value::AnswerDescriptor(self.add(number))
            }
            Role::Descriptor => {
                let known = self.descriptors.iter();
                let index = known.clone().position(|fd| *fd == attribute.data as RawFd);
                Value::Descriptor(index.ok_or("it names a descriptor that is not its own")? as u32)
            }
            // SAFETY: the caller's contract.
            Role::Plain if answered => Value::Answer(unsafe { answer(attribute) }),
            // SAFETY: the caller's contract.
            Role::Plain => Value::Given(unsafe { given(makes, attribute) }),
        })
    }

    fn add(&mut self, fd: RawFd) -> u32 {
        self.descriptors.push(fd);
        self.descriptors.len() as u32 - 1
    }

    /// All of it; an error says why nobody else can go on with it.
    pub fn finish(self, id: u32, memory: Option<(u64, u64)>) -> Result<(MadeAhead, Vec<OwnedFd>), String> {
        if let Some(why) = self.unusable {
            return Err(why);
        }
        if self.descriptors.is_empty() {
            return Err("its library asks the kernel in a way that is not known here".to_owned());
        }
        let descriptors = self.descriptors.iter().map(|fd| {
            // SAFETY: the library's, and open as long as the context is, which whoever has the notes keeps.
            let open = unsafe { BorrowedFd::borrow_raw(*fd) };
            open.as_fd().try_clone_to_owned()
        });
        let descriptors = descriptors.collect::<Result<Vec<_>, _>>();
        let descriptors =
            descriptors.map_err(|error| format!("a descriptor cannot be handed over: {error}"))?;
        let made = MadeAhead {
            id,
            descriptors: descriptors.len() as u32,
            memory,
            rkeys: Vec::new(),
            commands: self.commands,
        };
        Ok((made, descriptors))
    }
}

/// What the kernel has answered.
///
/// # Safety
/// The attribute leads to so many bytes.
unsafe fn answer(attribute: &Attribute) -> Vec<u8> {
    // SAFETY: the caller's contract.
    unsafe { std::slice::from_raw_parts(attribute.data as *const u8, attribute.bytes.into()) }.to_vec()
}

/// What the caller has given, with zeroes for addresses.
///
/// # Safety
/// The attribute leads to so many bytes, if they do not fit into it.
pub unsafe fn given(makes: Makes, attribute: &Attribute) -> Vec<u8> {
    let count = usize::from(attribute.bytes);
    let mut bytes = match count <= size_of::<u64>() {
        true => attribute.data.to_ne_bytes()[..count].to_vec(),
        // SAFETY: the caller's contract.
        false => unsafe { answer(attribute) },
    };
    let addresses = makes.addresses(attribute.id);
    let end = addresses.end.min(count);
    bytes[addresses.start.min(end)..end].fill(0);
    bytes
}
