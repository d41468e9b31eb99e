//! The RNIC's ends of the shared rings, each together with the block of the arena that it lies in.
//!
//! The one place where raw shared memory becomes a typed ring end. The contracts of `verbatim_device::ring` ask for
//! memory of the layout's length that starts as zeroes, is aligned to 64 bytes, stays mapped, and has one end of each
//! role. Here a block is allocated for exactly one set of ends, at a page boundary, and is kept beside them.

use std::rc::Rc;

use verbatim_device::control::{QpCap, SrqAttr};
use verbatim_device::layout::{CONTEXT_BYTES, CqLayout, QpLayout, RecvLayout, SIGNS_OFFSET};
use verbatim_device::ring::{CqProducer, DoorbellReader, RecvConsumer, SendConsumer, SignsWriter};

use crate::arena::{Arena, Block};
use crate::error::Refused;

/// A queue pair's rings.
#[derive(Debug)]
pub struct QpEnds {
    pub send: SendConsumer,
    pub recv: RecvConsumer,
    block: Block,
}

impl QpEnds {
    pub fn new(arena: &Rc<Arena>, cap: &QpCap) -> Result<Self, Refused> {
        let layout = QpLayout::new(cap);
        let block = arena.allocate(layout.bytes)?;
        // SAFETY: see the head of the file.
        let send = unsafe { SendConsumer::new(block.base(), &layout) };
        // SAFETY: as above.
        let recv = unsafe { RecvConsumer::new(block.base(), &layout.recv) };
        Ok(Self { send, recv, block })
    }

    /// Where they start in the arena.
    pub fn offset(&self) -> u64 {
        self.block.offset()
    }
}

/// A completion queue's ring.
#[derive(Debug)]
pub struct CqEnd {
    pub producer: CqProducer,
    block: Block,
}

impl CqEnd {
    pub fn new(arena: &Rc<Arena>, layout: &CqLayout) -> Result<Self, Refused> {
        let block = arena.allocate(layout.bytes)?;
        // SAFETY: see the head of the file.
        let producer = unsafe { CqProducer::new(block.base(), layout) };
        Ok(Self { producer, block })
    }

    /// Where it starts in the arena.
    pub fn offset(&self) -> u64 {
        self.block.offset()
    }
}

/// A shared receive queue's ring.
#[derive(Debug)]
pub struct SrqEnd {
    pub recv: RecvConsumer,
    block: Block,
}

impl SrqEnd {
    pub fn new(arena: &Rc<Arena>, attr: &SrqAttr) -> Result<Self, Refused> {
        let layout = RecvLayout::shared(attr);
        let block = arena.allocate(layout.bytes)?;
        // SAFETY: see the head of the file.
        let recv = unsafe { RecvConsumer::new(block.base(), &layout) };
        Ok(Self { recv, block })
    }

    /// Where it starts in the arena.
    pub fn offset(&self) -> u64 {
        self.block.offset()
    }
}

/// A context's doorbells and signs. They are the first thing in an arena.
#[derive(Debug)]
pub struct Doorbells {
    pub reader: DoorbellReader,
    pub signs: SignsWriter,
    _block: Block,
}

impl Doorbells {
    pub fn new(arena: &Rc<Arena>) -> Result<Self, Refused> {
        let block = arena.allocate(CONTEXT_BYTES)?;
        assert_eq!(
            block.offset(),
            0,
            "the context page is the first block of its arena"
        );
        // SAFETY: see the head of the file; a ContextPage is not longer than CONTEXT_BYTES.
        let reader = unsafe { DoorbellReader::new(block.base().cast()) };
        // SAFETY: see the head of the file; the signs are inside of the first CONTEXT_BYTES, at a line of their own.
        let signs = unsafe { SignsWriter::new(block.base().add(SIGNS_OFFSET as usize).cast()) };
        Ok(Self {
            reader,
            signs,
            _block: block,
        })
    }
}
