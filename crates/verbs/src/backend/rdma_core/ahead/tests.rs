//! Notes and answers, with commands as libibverbs puts them together and a kernel that is a closure.

use std::os::fd::{AsRawFd, RawFd};

use super::*;
use crate::backend::rdma_core::uverbs::{ATTR_F_VALID_OUTPUT, Attribute, Header};

const CREATE_CQ: (u16, u16) = (3, 0);
const GET_CONTEXT: (u16, u16) = (0, 3);
const ALLOC_EVENTS: (u16, u16) = (16, 0);
const INVOKE_WRITE: (u16, u16) = (0, 0);

/// One command of a library.
struct Sent {
    header: Header,
    attributes: Vec<Attribute>,
}

impl Sent {
    fn new((object, method): (u16, u16), attributes: Vec<Attribute>) -> Self {
        Self {
            header: Header {
                bytes: 0,
                object,
                method,
                attributes: attributes.len() as u16,
                reserved: 0,
                driver: RDMA_DRIVER_RXE,
                reserved_too: 0,
            },
            attributes,
        }
    }

    fn command(&mut self) -> Command<'_> {
        Command {
            header: &self.header,
            attributes: &mut self.attributes,
        }
    }

    fn attribute(&mut self, id: u16) -> &mut Attribute {
        let mut all = self.attributes.iter_mut();
        all.find(|attribute| attribute.id == id).expect("it has one")
    }

    /// As the kernel answers.
    fn answer(&mut self, id: u16, bytes: &[u8]) {
        let attribute = self.attribute(id);
        attribute.flags |= ATTR_F_VALID_OUTPUT;
        // SAFETY: the test's own room, of that size.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), attribute.data as *mut u8, bytes.len()) };
    }
}

fn file() -> OwnedFd {
    std::fs::File::open("/dev/null").unwrap().into()
}

/// What a library makes: a context, its events, a channel, a region and a completion queue.
struct Library {
    context: OwnedFd,
    room: Box<[[u8; 8]; 4]>,
    own: u64,
}

impl Library {
    fn new(own: u64) -> Self {
        Self {
            context: file(),
            room: Box::default(),
            own,
        }
    }

    fn to(&self, index: usize) -> u64 {
        self.room[index].as_ptr() as u64
    }

    fn open(&self) -> Sent {
        Sent::new(GET_CONTEXT, vec![Attribute::new(0, 4, self.to(0))])
    }

    fn events(&self) -> Sent {
        Sent::new(ALLOC_EVENTS, vec![Attribute::new(0, 0, 0)])
    }

    fn channel(&self) -> Sent {
        Sent::new(
            INVOKE_WRITE,
            vec![
                Attribute::new(2, 8, 17),
                Attribute::new(0, 8, self.own),
                Attribute::new(1, 4, self.to(1)),
            ],
        )
    }

    /// `struct ib_uverbs_reg_mr`
    fn region(&self, asked: &mut [u64; 5], length: u64) -> Sent {
        *asked = [self.own, self.own + 4096, length, 0x7000, 1];
        Sent::new(
            INVOKE_WRITE,
            vec![
                Attribute::new(2, 8, 9),
                Attribute::new(0, 40, asked.as_ptr() as u64),
                Attribute::new(1, 8, self.to(2)),
            ],
        )
    }

    fn cq(&self, channel: RawFd, events: RawFd, entries: u64) -> Sent {
        Sent::new(
            CREATE_CQ,
            vec![
                Attribute::new(0, 0, 0),
                Attribute::new(1, 4, entries),
                Attribute::new(2, 8, self.own),
                Attribute::new(3, 0, channel as u64),
                Attribute::new(6, 4, self.to(3)),
                Attribute::new(7, 0, events as u64),
            ],
        )
    }
}

/// Notes what a library makes whose driver has that number: the notes, descriptors, and what the kernel was given to name the queue by.
fn noted_by(driver: u32) -> (Result<(MadeAhead, Vec<OwnedFd>), String>, u64) {
    let library = Library::new(0x5000_0000);
    let mut recorder = Recorder::default();
    let own = library.context.as_raw_fd();
    let (events, channel) = (file(), file());
    let mut note = |sent: &mut Sent, answer: &dyn Fn(&mut Sent)| {
        sent.header.driver = driver;
        let sent: *mut Sent = sent;
        // SAFETY: the kernel answers while the command is lent, as the real one does; all rooms are the test's.
        unsafe {
            let mut command = (*sent).command();
            assert_eq!(
                recorder.note(own, &mut command, || {
                    answer(&mut *sent);
                    0
                }),
                0
            );
        }
    };
    note(&mut library.open(), &|sent| sent.answer(0, &2u32.to_ne_bytes()));
    note(&mut library.events(), &|sent| {
        sent.attribute(0).data = events.as_raw_fd() as u64;
    });
    note(&mut library.channel(), &|sent| {
        sent.answer(1, &channel.as_raw_fd().to_ne_bytes());
    });
    let mut asked = [0; 5];
    note(&mut library.region(&mut asked, 8192), &|sent| {
        sent.answer(1, &[1, 0, 0, 0, 9, 0, 0, 0])
    });
    let mut cq = library.cq(channel.as_raw_fd(), events.as_raw_fd(), 64);
    let named = std::cell::Cell::new(0);
    note(&mut cq, &|sent| {
        named.set(sent.attribute(2).data);
        sent.attribute(0).data = 5;
        sent.answer(6, &127u32.to_ne_bytes());
    });
    assert_eq!(cq.attribute(2).data, library.own, "the library's own again");
    (recorder.finish(3, Some((1, 2))), named.get())
}

/// What another library is answered, which asks for a region of `length` bytes and a queue of `entries`.
fn answered_to(noted: (MadeAhead, Vec<OwnedFd>), length: u64, entries: u64) -> (Result<(), String>, Library) {
    let library = Library::new(0x6000_0000);
    let mut replay = Replay::new(noted.0, noted.1);
    let own = library.context.as_raw_fd();
    let mut failed = false;
    let mut ask = |sent: &mut Sent| {
        // SAFETY: all rooms are the test's.
        let answered = unsafe { replay.answer(own, &mut sent.command()) };
        failed |= answered.expect("it is one that was noted").is_err();
        failed
    };
    ask(&mut library.open());
    let mut events = library.events();
    ask(&mut events);
    ask(&mut library.channel());
    ask(&mut library.region(&mut [0; 5], length));
    let channel = RawFd::from_ne_bytes(*library.room[1].first_chunk().unwrap());
    let mut cq = library.cq(channel, events.attribute(0).data as RawFd, entries);
    if !ask(&mut cq) {
        assert_eq!(cq.attribute(0).data, 5);
        assert_eq!(cq.attribute(6).flags & ATTR_F_VALID_OUTPUT, ATTR_F_VALID_OUTPUT);
        // Of others the kernel is asked, and nobody looks at the notes.
        let other = file();
        // SAFETY: as above.
        assert!(unsafe { replay.answer(other.as_raw_fd(), &mut library.channel().command()) }.is_none());
    }
    (replay.finish(), library)
}

#[test]
fn another_library_that_asks_for_the_same_is_answered_from_the_notes() {
    let (noted, named) = noted_by(RDMA_DRIVER_RXE);
    let (ahead, descriptors) = noted.unwrap();
    assert_eq!((ahead.id, ahead.descriptors, ahead.memory), (3, 3, Some((1, 2))));
    assert_eq!(
        tokens::address(named),
        Some(0x5000_0000),
        "here it is the maker's"
    );
    let (outcome, library) = answered_to((ahead, descriptors), 8192, 64);
    assert_eq!(outcome, Ok(()));
    assert_eq!(library.room[0][..4], 2u32.to_ne_bytes());
    assert_eq!(
        *library.room.last_chunk::<2>().unwrap(),
        [[1, 0, 0, 0, 9, 0, 0, 0], [127, 0, 0, 0, 0, 0, 0, 0]]
    );
    assert_eq!(
        tokens::address(named),
        Some(0x6000_0000),
        "events name what is here now"
    );
    assert_eq!(tokens::address(0x6000_0000), None);
}

#[test]
fn a_library_that_asks_for_something_else_is_refused_from_there_on() {
    let differs = |length, entries| {
        let (noted, _) = noted_by(RDMA_DRIVER_RXE);
        answered_to(noted.unwrap(), length, entries).0.unwrap_err()
    };
    assert_eq!(differs(4096, 64), "attribute 0 of Mr is another");
    assert_eq!(differs(8192, 65), "attribute 1 of Cq is another");
}

#[test]
fn what_is_left_over_or_one_more_is_something_else() {
    let (noted, _) = noted_by(RDMA_DRIVER_RXE);
    let (mut ahead, descriptors) = noted.unwrap();
    let last = ahead.commands.last().unwrap().clone();
    ahead.commands.push(last);
    let (outcome, _) = answered_to((ahead.clone(), descriptors), 8192, 64);
    assert_eq!(
        outcome.unwrap_err(),
        "the program does not have 1 of what was made"
    );
    ahead.commands.truncate(4);
    let descriptors = (0..3).map(|_| file()).collect();
    let (outcome, _) = answered_to((ahead, descriptors), 8192, 64);
    assert_eq!(outcome.unwrap_err(), "the program has one more: Cq");
}

#[test]
fn hardware_s_queues_are_not_handed_over() {
    // `RDMA_DRIVER_MLX5`
    let why = noted_by(1).0.unwrap_err();
    assert!(why.contains("number 1"), "{why}");
}
