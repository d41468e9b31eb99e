//! The process's side: what was noted is answered from the notes.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd, RawFd};

use verbatim_channel::ahead::{self, MadeAhead, Value};

use super::record::given;
use super::table::{Makes, Role};
use super::tokens;
use crate::backend::rdma_core::uverbs::{Attribute, Command};

/// The library sees it of a command that is another than the one that was noted.
const DIFFERS: i32 = libc::ECANCELED;

/// What was noted, and how far it has been asked for.
#[derive(Debug)]
pub struct Replay {
    commands: VecDeque<ahead::Command>,
    /// Those that the library has not got yet.
    descriptors: Vec<Option<OwnedFd>>,
    /// Their numbers in the library, by index.
    numbers: Vec<Option<RawFd>>,
    /// What was another than noted.
    differs: Option<String>,
}

impl Replay {
    pub fn new(ahead: MadeAhead, descriptors: Vec<OwnedFd>) -> Self {
        Self {
            commands: ahead.commands.into(),
            numbers: vec![None; descriptors.len()],
            descriptors: descriptors.into_iter().map(Some).collect(),
            differs: None,
        }
    }

    /// Answers a command, or says why not by an `errno`; `None` if the kernel is to be asked.
    ///
    /// # Safety
    /// The command is libibverbs's: what its attributes lead to can be read, and written where the kernel writes.
    pub unsafe fn answer(&mut self, fd: RawFd, command: &mut Command<'_>) -> Option<Result<(), i32>> {
        let makes = Makes::of(command)?;
        match self.numbers.first()? {
            None if makes == Makes::Context => {}
            Some(own) if *own == fd => {}
            _ => return None,
        }
        // SAFETY: the caller's contract.
        let outcome = unsafe { self.answer_next(fd, makes, command) };
        Some(outcome.map_err(|why| {
            self.differs.get_or_insert(why);
            DIFFERS
        }))
    }

    /// # Safety
    /// As [`Self::answer`].
    unsafe fn answer_next(
        &mut self,
        fd: RawFd,
        makes: Makes,
        command: &mut Command<'_>,
    ) -> Result<(), String> {
        let noted = self.commands.pop_front();
        let noted = noted.ok_or_else(|| format!("the program has one more: {makes:?}"))?;
        let header = &command.header;
        let same = (noted.object, noted.method, noted.driver)
            == (header.object, header.method, header.driver)
            && noted.attributes.len() == command.attributes.len();
        if !same {
            return Err(format!("the library asks in another way for {makes:?}"));
        }
        for (attribute, noted) in command.attributes.iter().zip(&noted.attributes) {
            // SAFETY: the caller's contract.
            if !unsafe { self.is_same(makes, attribute, noted) } {
                return Err(format!("attribute {} of {makes:?} is another", attribute.id));
            }
        }
        if makes == Makes::Context {
            self.take_over(fd)?;
        }
        for (attribute, noted) in command.attributes.iter_mut().zip(noted.attributes) {
            // SAFETY: the caller's contract; it is as long as the one that was noted.
            unsafe { self.give(attribute, noted)? };
        }
        Ok(())
    }

    /// The number that the library has for its commands is that of the context that was made.
    fn take_over(&mut self, fd: RawFd) -> Result<(), String> {
        let handed = self.descriptors.first_mut().and_then(Option::take);
        let handed = handed.ok_or("the context is open already")?;
        // SAFETY: the library's own number; what it led to has no context.
        if unsafe { libc::dup3(handed.as_raw_fd(), fd, libc::O_CLOEXEC) } < 0 {
            return Err(format!("dup3: {}", std::io::Error::last_os_error()));
        }
        self.numbers[0] = Some(fd);
        Ok(())
    }

    /// # Safety
    /// As [`Self::answer`].
    unsafe fn is_same(&self, makes: Makes, attribute: &Attribute, noted: &ahead::Attribute) -> bool {
        let role = makes.role(attribute.id);
        (attribute.id, attribute.bytes) == (noted.id, noted.bytes)
            && match &noted.value {
                // SAFETY: the caller's contract: whoever gives it also did so when it was noted.
                Value::Given(bytes) => role == Role::Plain && unsafe { given(makes, attribute) } == *bytes,
                Value::Answer(bytes) => role == Role::Plain && bytes.len() == usize::from(noted.bytes),
                Value::Descriptor(index) => {
                    let number = self.numbers.get(*index as usize).copied().flatten();
                    role == Role::Descriptor && number == Some(attribute.data as RawFd)
                }
                Value::UserHandle(_) => role == Role::UserHandle,
                Value::Handle(_) => role == Role::Handle,
                Value::NewDescriptor(_) => role == Role::NewDescriptor,
                Value::AnswerDescriptor(_) => role == Role::AnswerDescriptor && noted.bytes >= 4,
            }
    }

    /// # Safety
    /// As [`Self::answer`], of an attribute that is the same.
    unsafe fn give(&mut self, attribute: &mut Attribute, noted: ahead::Attribute) -> Result<(), String> {
        attribute.flags = noted.flags;
        let to = attribute.data as *mut u8;
        match noted.value {
            Value::Given(_) | Value::Descriptor(_) => {}
            Value::UserHandle(token) => tokens::learn(token, attribute.data),
            Value::Handle(handle) => attribute.data = handle,
            Value::NewDescriptor(index) => attribute.data = self.hand(index)? as u64,
            Value::AnswerDescriptor(index) => {
                let number = self.hand(index)?.to_ne_bytes();
                // SAFETY: the caller's contract; there is room for as much as was noted, four bytes or more.
                unsafe { to.copy_from_nonoverlapping(number.as_ptr(), number.len()) };
            }
            // SAFETY: the caller's contract; there is room for as much as was noted.
            Value::Answer(bytes) => unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) },
        }
        Ok(())
    }

    /// Gives a descriptor to the library, which closes it.
    fn hand(&mut self, index: u32) -> Result<RawFd, String> {
        let index = index as usize;
        let handed = self.descriptors.get_mut(index).and_then(Option::take);
        let number = handed.ok_or("a descriptor is missing")?.into_raw_fd();
        self.numbers[index] = Some(number);
        Ok(number)
    }

    /// Whether all was asked for that was noted, and nothing else.
    pub fn finish(self) -> Result<(), String> {
        match (self.differs, self.commands.len()) {
            (Some(why), _) => Err(why),
            (None, 0) => Ok(()),
            (None, left) => Err(format!("the program does not have {left} of what was made")),
        }
    }
}
