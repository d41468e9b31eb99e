//! The ends of the shared queues over memory in which the other side has written anything, and goes on to.

use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use arbitrary::{Arbitrary, Unstructured};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};
use verbatim_device::control::QpCap;
use verbatim_device::layout::{
    ContextPage, CqLayout, Cqe, MAX_QP_SLOTS, QpLayout, RecvWqe, SEND_INLINE, SendWqe, Sge,
};
use verbatim_device::ring::{
    Body, CqConsumer, CqProducer, Doorbell, DoorbellReader, RecvConsumer, RecvProducer, SendConsumer,
    SendProducer, SentWqe,
};

const PAGE: usize = 4096;
/// Enough for the longest queue below.
const ROOM: usize = 16 * PAGE;
/// Operations of one input.
const MOST_STEPS: usize = 256;

/// Memory between two pages that nobody can touch.
struct Guarded(NonNull<u8>);

impl Guarded {
    fn new() -> Self {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice, of which the first and last page are given away.
        unsafe {
            let whole =
                rustix::mm::mmap_anonymous(std::ptr::null_mut(), ROOM + 2 * PAGE, access, MapFlags::PRIVATE);
            let whole = whole.expect("memory");
            for guard in [whole, whole.byte_add(ROOM + PAGE)] {
                rustix::mm::mprotect(guard, PAGE, MprotectFlags::empty()).expect("it can be protected");
            }
            Self(NonNull::new(whole.byte_add(PAGE).cast()).expect("not address 0"))
        }
    }

    /// Room for a queue of so many bytes, that ends where a guard starts (or less than 64 bytes before, for the sake of
    /// its alignment), filled with `content` again and again.
    fn queue(&self, bytes: u64, content: &[u8]) -> Queue {
        let bytes = bytes as usize;
        assert!(bytes <= ROOM, "{bytes} bytes are more than a target asks for");
        let offset = (ROOM - bytes) & !63;
        // SAFETY: inside of the mapping.
        let base = unsafe { self.0.add(offset) };
        for at in 0..bytes {
            let byte = content.get(at % content.len().max(1)).copied().unwrap_or(0);
            // SAFETY: inside of the mapping.
            unsafe { base.add(at).write(byte) };
        }
        Queue { base, bytes }
    }
}

thread_local! {
    static MEMORY: [Guarded; 2] = [Guarded::new(), Guarded::new()];
}

#[derive(Clone, Copy)]
struct Queue {
    base: NonNull<u8>,
    bytes: usize,
}

impl Queue {
    /// The other side writes a word, more often one of the counters at the front.
    fn scribble(&self, input: &mut Unstructured<'_>) -> arbitrary::Result<()> {
        let words = self.bytes / 4;
        let word = match input.arbitrary()? {
            true => *input.choose(&[0, 1, 32, 33])?,
            false => input.choose_index(words)?,
        };
        let here = self.word(word);
        let value = match input.int_in_range(0..=2)? {
            0 => here.load(Relaxed).wrapping_add(input.int_in_range(0..=8)?),
            1 => input.int_in_range(0..=8)?,
            _ => input.arbitrary()?,
        };
        here.store(value, Relaxed);
        Ok(())
    }

    fn word(&self, index: usize) -> &AtomicU32 {
        assert!(index < self.bytes / 4);
        // SAFETY: inside of the queue and aligned; an atomic like all that is shared.
        unsafe { self.base.cast::<AtomicU32>().add(index).as_ref() }
    }
}

fn cap(input: &mut Unstructured<'_>) -> arbitrary::Result<QpCap> {
    Ok(QpCap {
        max_send_wr: input.int_in_range(0..=16)?,
        max_recv_wr: input.int_in_range(0..=16)?,
        max_send_sge: input.int_in_range(0..=4)?,
        max_recv_sge: input.int_in_range(0..=4)?,
        max_inline_data: input.int_in_range(0..=256)?,
    })
}

fn content(input: &mut Unstructured<'_>) -> arbitrary::Result<Vec<u8>> {
    match input.arbitrary()? {
        true => Ok(Vec::new()),
        false => Vec::arbitrary(input),
    }
}

/// The RNIC's ends; the program is hostile.
pub fn nic_ends(input: &[u8]) {
    // Too little input ends a story early, as good as any other end.
    let _ = MEMORY.with(|memory| nic_story(&mut Unstructured::new(input), memory));
}

fn nic_story(input: &mut Unstructured<'_>, memory: &[Guarded; 2]) -> arbitrary::Result<()> {
    match input.int_in_range(0..=2)? {
        0 => nic_queue_pair(input, &memory[0]),
        1 => nic_completions(input, memory),
        _ => nic_doorbells(input, &memory[0]),
    }
}

fn nic_queue_pair(input: &mut Unstructured<'_>, memory: &Guarded) -> arbitrary::Result<()> {
    let cap = cap(input)?;
    let layout = QpLayout::new(&cap);
    let queue = memory.queue(layout.bytes, &content(input)?);
    // SAFETY: the memory is the queue's for as long as this story takes, and these are the only ends of their roles.
    let (mut send, mut recv) = unsafe {
        (
            SendConsumer::new(queue.base, &layout),
            RecvConsumer::new(queue.base, &layout.recv),
        )
    };
    let (mut out, mut sges, mut taken) = (SentWqe::default(), Vec::new(), 0u32);
    for _ in 0..MOST_STEPS {
        match input.int_in_range(0..=7)? {
            0..=2 => queue.scribble(input)?,
            3 => {
                if send.pop(&mut out) == Ok(true) {
                    taken += 1;
                    let room = layout.send_stride as usize - size_of::<SendWqe>();
                    assert!(out.inline.len() <= room && size_of_val(&out.sges[..]) <= room);
                    assert!(!out.overlong || out.inline.is_empty() && out.sges.is_empty());
                    assert!(out.head.flags & SEND_INLINE == 0 || out.sges.is_empty());
                }
                assert!(taken <= layout.send_slots, "more was taken than there are slots");
            }
            4 => {
                let count = input.int_in_range(0..=taken)?;
                send.complete(count);
                taken -= count;
            }
            5 => {
                if recv.pop(&mut sges).is_ok_and(|taken| taken.is_some()) {
                    let room = layout.recv.stride as usize - size_of::<RecvWqe>();
                    assert!(size_of_val(&sges[..]) <= room);
                }
            }
            6 => {
                assert!(send.pending().is_err() || send.pending().is_ok_and(|n| n <= layout.send_slots));
                assert!(recv.pending().is_err() || recv.pending().is_ok_and(|n| n <= layout.recv.slots));
            }
            _ => {
                send.reset();
                recv.reset();
                taken = 0;
            }
        }
    }
    Ok(())
}

fn nic_completions(input: &mut Unstructured<'_>, memory: &[Guarded; 2]) -> arbitrary::Result<()> {
    let layouts = [
        CqLayout::new(input.int_in_range(0..=16)?),
        CqLayout::new(input.int_in_range(0..=16)?),
    ];
    let first = content(input)?;
    let queues = [0, 1].map(|index| memory[index].queue(layouts[index].bytes, &first));
    // SAFETY: as above; both are producers of their own queue.
    let mut ends = [0, 1].map(|index| unsafe { CqProducer::new(queues[index].base, &layouts[index]) });
    for _ in 0..MOST_STEPS {
        let which = input.choose_index(2)?;
        match input.int_in_range(0..=4)? {
            0 | 1 => queues[which].scribble(input)?,
            2 => {
                let wr_id = input.arbitrary()?;
                let _ = ends[which].push(&Cqe {
                    wr_id,
                    ..Cqe::default()
                });
            }
            3 => {
                let _ = ends[which].take_armed(input.arbitrary()?);
            }
            _ => {
                let [from, to] = &mut ends;
                let _ = from.copy_to(to);
            }
        }
    }
    Ok(())
}

fn nic_doorbells(input: &mut Unstructured<'_>, memory: &Guarded) -> arbitrary::Result<()> {
    let queue = memory.queue(size_of::<ContextPage>() as u64, &content(input)?);
    // SAFETY: as above; the page is as long as a ContextPage, of which any bytes are one.
    let mut reader = unsafe { DoorbellReader::new(queue.base.cast()) };
    for _ in 0..MOST_STEPS {
        match input.int_in_range(0..=3)? {
            0 | 1 => queue.scribble(input)?,
            2 => {
                let mut count = 0;
                reader.drain(|slot| {
                    assert!(slot < MAX_QP_SLOTS);
                    count += 1;
                });
                assert!(count <= MAX_QP_SLOTS);
            }
            _ => {
                let _ = reader.is_rung();
                reader.set_sleeping(input.arbitrary()?);
            }
        }
    }
    Ok(())
}

/// The program's ends; the RNIC is hostile. It could send wrong numbers, but not make a program leave its queues.
pub fn program_ends(input: &[u8]) {
    let _ = MEMORY.with(|memory| program_story(&mut Unstructured::new(input), memory));
}

fn program_story(input: &mut Unstructured<'_>, memory: &[Guarded; 2]) -> arbitrary::Result<()> {
    match input.int_in_range(0..=2)? {
        0 => program_queue_pair(input, &memory[0]),
        1 => program_completions(input, &memory[0]),
        _ => program_doorbells(input, &memory[0]),
    }
}

fn program_queue_pair(input: &mut Unstructured<'_>, memory: &Guarded) -> arbitrary::Result<()> {
    let cap = cap(input)?;
    let layout = QpLayout::new(&cap);
    let queue = memory.queue(layout.bytes, &content(input)?);
    // SAFETY: as above.
    let (mut send, mut recv) = unsafe {
        (
            SendProducer::new(queue.base, &layout),
            RecvProducer::new(queue.base, &layout.recv),
        )
    };
    let mut unpublished = 0;
    for _ in 0..MOST_STEPS {
        match input.int_in_range(0..=7)? {
            0..=2 => queue.scribble(input)?,
            3 if send.room() > 0 => {
                assert!(send.room() <= layout.send_slots);
                let head = SendWqe::default();
                if input.arbitrary()? {
                    let bytes = input.int_in_range(0..=cap.max_inline_data)? as usize;
                    send.push(&head, Body::Inline(&[&[1; 256][..bytes]]));
                } else {
                    let sges = input.int_in_range(0..=cap.max_send_sge)? as usize;
                    send.push(&head, Body::Sges(&[Sge::default(); 4][..sges]));
                }
                unpublished += 1;
            }
            4 => {
                send.unpush(unpublished);
                unpublished = 0;
            }
            5 => {
                send.publish();
                unpublished = 0;
            }
            6 if recv.room() > 0 => {
                assert!(recv.room() <= layout.recv.slots);
                let sges = input.int_in_range(0..=cap.max_recv_sge)? as usize;
                recv.push(input.arbitrary()?, &[Sge::default(); 4][..sges]);
                recv.publish();
            }
            7 => {
                send.reset();
                recv.reset();
                unpublished = 0;
            }
            _ => {}
        }
    }
    Ok(())
}

fn program_completions(input: &mut Unstructured<'_>, memory: &Guarded) -> arbitrary::Result<()> {
    let layout = CqLayout::new(input.int_in_range(0..=16)?);
    let queue = memory.queue(layout.bytes, &content(input)?);
    // SAFETY: as above.
    let mut consumer = unsafe { CqConsumer::new(queue.base, &layout) };
    for _ in 0..MOST_STEPS {
        match input.int_in_range(0..=4)? {
            0 | 1 => queue.scribble(input)?,
            2 | 3 => drop(consumer.pop()),
            _ => drop(consumer.arm(input.arbitrary()?)),
        }
    }
    Ok(())
}

fn program_doorbells(input: &mut Unstructured<'_>, memory: &Guarded) -> arbitrary::Result<()> {
    let queue = memory.queue(size_of::<ContextPage>() as u64, &content(input)?);
    // SAFETY: as above.
    let bell = unsafe { Doorbell::new(queue.base.cast()) };
    for _ in 0..MOST_STEPS {
        queue.scribble(input)?;
        let _ = bell.ring(input.int_in_range(0..=MAX_QP_SLOTS - 1)?);
    }
    Ok(())
}

/// Noise long enough for whole stories, of each kind.
pub fn seeds() -> Vec<Vec<u8>> {
    super::noise(12, 1500)
}
