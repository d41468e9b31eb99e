//! Which commands make something that another process can go on with, and what their attributes are (`rdma/ib_user_ioctl_cmds.h`).

use crate::backend::rdma_core::uverbs::{ATTR_CORE_IN, ATTR_CORE_OUT, Command, OBJECT_DEVICE};

const METHOD_GET_CONTEXT: u16 = 3;
const OBJECT_CQ: u16 = 3;
const OBJECT_SRQ: u16 = 5;
const OBJECT_ASYNC_EVENT: u16 = 16;
/// Of CQs, SRQs and descriptors of events.
const METHOD_CREATE: u16 = 0;

const CMD_ALLOC_PD: u64 = 3;
const CMD_REG_MR: u64 = 9;
const CMD_CREATE_COMP_CHANNEL: u64 = 17;

/// What is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Makes {
    Context,
    /// The descriptor of asynchronous events.
    Events,
    Pd,
    Mr,
    CompChannel,
    Cq,
    Srq,
}

/// What an attribute is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Given or answered, as the kernel says of it.
    Plain,
    /// The new object's number, which the kernel leaves in the attribute.
    Handle,
    /// A descriptor that is given.
    Descriptor,
    /// A new one, whose number the kernel leaves in the attribute.
    NewDescriptor,
    /// A new one, whose number the kernel writes where the attribute leads to.
    AnswerDescriptor,
    /// By what events name the object.
    UserHandle,
}

impl Makes {
    /// What a command makes, if it is one of those.
    pub fn of(command: &Command<'_>) -> Option<Self> {
        if let Some(number) = command.write_command() {
            return match number {
                CMD_ALLOC_PD => Some(Self::Pd),
                CMD_REG_MR => Some(Self::Mr),
                CMD_CREATE_COMP_CHANNEL => Some(Self::CompChannel),
                _ => None,
            };
        }
        match (command.header.object, command.header.method) {
            (OBJECT_DEVICE, METHOD_GET_CONTEXT) => Some(Self::Context),
            (OBJECT_ASYNC_EVENT, METHOD_CREATE) => Some(Self::Events),
            (OBJECT_CQ, METHOD_CREATE) => Some(Self::Cq),
            (OBJECT_SRQ, METHOD_CREATE) => Some(Self::Srq),
            _ => None,
        }
    }

    /// What its attribute of that number is.
    pub fn role(self, attribute: u16) -> Role {
        match (self, attribute) {
            (Self::Events, 0) => Role::NewDescriptor,
            (Self::CompChannel, ATTR_CORE_OUT) => Role::AnswerDescriptor,
            (Self::Cq | Self::Srq, 0) => Role::Handle,
            (Self::Cq, 2) | (Self::Srq, 4) => Role::UserHandle,
            (Self::Cq, 3 | 7) | (Self::Srq, 10) => Role::Descriptor,
            _ => Role::Plain,
        }
    }

    /// Which bytes of what is given in that attribute are addresses of the caller's.
    pub fn addresses(self, attribute: u16) -> std::ops::Range<usize> {
        match (self, attribute) {
            // `response`, and where the memory is; where the RNIC is to find it is another field (`hca_va`).
            (Self::Mr, ATTR_CORE_IN) => 0..16,
            // `response`
            (Self::Pd | Self::CompChannel, ATTR_CORE_IN) => 0..8,
            _ => 0..0,
        }
    }
}
