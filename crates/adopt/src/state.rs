//! What is adopted, and the two operations on it.

pub(crate) mod release;

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::error::AdoptError;
use crate::look::Look;
use crate::memfile::{MemFile, Reserved};
use crate::pages::{self, chunks};
use crate::plan::{self, Kind, Piece};
use crate::region::{Adoption, Backing, Options, Token};
use crate::space::Space;
use crate::spans::Spans;
use crate::sys::swap;
use crate::sys::uffd::{self, KeptUserfaultfd, Userfaultfd};
use crate::threads;

use self::release::Leftovers;

/// Everything behind the lock of an [`crate::Adopter`].
#[derive(Debug)]
pub struct State {
    mem_dir: PathBuf,
    /// The process that all of this is about.
    pid: u32,
    /// Counts processes: tokens of an ancestor are void.
    pub(crate) generation: u64,
    pub(crate) options: Options,
    pub(crate) userfaultfd_device: Option<OwnedFd>,
    /// One of each kind at most.
    pub(crate) userfaultfds: Vec<KeptUserfaultfd>,
    /// None is kept until then: a look at the process's descriptors goes on.
    pub(crate) none_kept_until: Option<Instant>,
    pub(crate) file: Option<MemFile>,
    pub(crate) spans: Spans,
    pub(crate) space: Space,
    pub(crate) leftovers: Leftovers,
    /// The last look at smaps.
    pub(crate) look: Option<Look>,
    closed: bool,
}

/// The place of a piece in the file, and the pages there.
type Place = (Range<u64>, Reserved);

/// How other threads are kept away from pages in transit.
pub(crate) enum Keeper {
    /// They wait.
    Userfaultfd(Userfaultfd),
    /// There are none.
    Alone,
}

impl Keeper {
    pub(crate) fn as_ref(&self) -> Option<&Userfaultfd> {
        match self {
            Self::Userfaultfd(keeper) => Some(keeper),
            Self::Alone => None,
        }
    }
}

impl State {
    pub fn new(mem_dir: &Path, options: Options) -> Self {
        Self {
            mem_dir: mem_dir.to_owned(),
            pid: std::process::id(),
            generation: 0,
            options,
            userfaultfd_device: None,
            userfaultfds: Vec::new(),
            none_kept_until: None,
            file: None,
            spans: Spans::default(),
            space: Space::default(),
            leftovers: Leftovers::default(),
            look: None,
            closed: false,
        }
    }

    /// After a fork: nothing is adopted in the child, and its file will be another.
    pub fn forget_parent(&mut self) {
        self.pid = std::process::id();
        self.generation += 1;
        self.userfaultfds.clear();
        self.file = None;
        self.spans = Spans::default();
        self.space = Space::default();
        self.leftovers = Leftovers::default();
        self.look = None;
    }

    /// A child of a fork that no handler saw must not take its parent's file for its own.
    pub fn check_process(&mut self) {
        if self.pid != std::process::id() {
            self.forget_parent();
        }
    }

    pub fn close(&mut self) {
        self.check_process();
        self.closed = true;
        if let Some(file) = &self.file {
            file.remove();
        }
    }

    pub fn adopt(&mut self, address: usize, length: usize) -> Result<Adoption, AdoptError> {
        self.check_process();
        if self.closed {
            return Err(AdoptError::Closed);
        }
        let mut adoption = Adoption {
            segments: Vec::new(),
            token: Token {
                generation: self.generation,
                pieces: Vec::new(),
            },
        };
        if length == 0 {
            return Ok(adoption);
        }
        let range = pages::covering(address, length)?;
        let opened = match &self.file {
            Some(file) => Some(file.open()?),
            None => None,
        };
        let ours = match (&self.file, &opened) {
            (Some(file), Some(opened)) => Some(file.id(opened.as_fd())?),
            _ => None,
        };
        let mappings = Look::at(&mut self.look, &range, ours)?;
        let off_limits = threads::off_limits(&mappings, &range);
        let pieces = plan::divide(&range, &mappings, ours, &off_limits)?;

        let keeper = match pieces.iter().any(|piece| matches!(piece.kind, Kind::Movable(_))) {
            true => self.keeper(uffd::Kind::Anonymous),
            false => None,
        };
        let opened = match (opened, &keeper) {
            (None, Some(_)) => {
                let (file, opened) = MemFile::create(&self.mem_dir, self.pid)?;
                self.file = Some(file);
                Some(opened)
            }
            (opened, _) => opened,
        };
        let places = match (&opened, &keeper) {
            (Some(opened), Some(_)) => self.reserve(opened.as_fd(), &pieces)?,
            _ => vec![None; pieces.len()],
        };
        for (piece, place) in pieces.into_iter().zip(places) {
            let moved = match (place, &opened, &keeper) {
                (Some(place), Some(opened), Some(keeper)) => {
                    self.move_in(&piece, place, opened.as_fd(), keeper)
                }
                _ => self.claim(&piece),
            };
            adoption.push(piece.range, moved);
        }
        Ok(adoption)
    }

    /// A way to keep other threads out: a full userfaultfd, else having none, else one for user mode if that was asked
    /// for.
    pub(crate) fn keeper(&mut self, kind: uffd::Kind) -> Option<Keeper> {
        let kept = self.userfaultfds.iter().find(|kept| kept.kind() == kind);
        if let Some(userfaultfd) = kept.and_then(KeptUserfaultfd::duplicate) {
            return Some(Keeper::Userfaultfd(userfaultfd));
        }
        let keeper = self.new_keeper(kind)?;
        if let Keeper::Userfaultfd(userfaultfd) = &keeper {
            self.userfaultfds.retain(|kept| kept.kind() != kind);
            if self.none_kept_until.is_none_or(|until| Instant::now() >= until) {
                self.userfaultfds.extend(userfaultfd.keep());
            }
        }
        Some(keeper)
    }

    fn new_keeper(&self, kind: uffd::Kind) -> Option<Keeper> {
        let device = self.userfaultfd_device.as_ref().map(AsFd::as_fd);
        let full = self
            .options
            .full
            .then(|| Userfaultfd::open_full(device, kind))
            .flatten();
        if let Some(keeper) = full {
            return Some(Keeper::Userfaultfd(keeper));
        }
        if threads::count().saturating_sub(self.options.own_threads) <= 1 {
            return Some(Keeper::Alone);
        }
        let user_mode = self
            .options
            .user_mode
            .then(|| Userfaultfd::open_user_mode(kind))
            .flatten();
        user_mode.map(Keeper::Userfaultfd)
    }

    /// Room in the file for each movable piece, or none for all.
    fn reserve(
        &mut self,
        opened: BorrowedFd<'_>,
        pieces: &[Piece],
    ) -> Result<Vec<Option<Place>>, AdoptError> {
        let mut places = Vec::with_capacity(pieces.len());
        for piece in pieces {
            if !matches!(piece.kind, Kind::Movable(_)) {
                places.push(None);
                continue;
            }
            let mut place = self.space.allocate(piece.range.len() as u64);
            let mut reserved = self.file.as_ref().map(|file| file.reserve(opened, place.clone()));
            if matches!(reserved, Some(Err(AdoptError::Full { .. }))) && self.sweep() {
                self.vacate(opened, place);
                place = self.space.allocate(piece.range.len() as u64);
                reserved = self.file.as_ref().map(|file| file.reserve(opened, place.clone()));
            }
            match reserved {
                Some(Ok(reserved)) => places.push(Some((place, reserved))),
                Some(Err(error)) => {
                    let made = places.into_iter().flatten().map(|(place, _)| place);
                    for place in made.chain([place]) {
                        self.vacate(opened, place);
                    }
                    return Err(error);
                }
                None => places.push(None),
            }
        }
        Ok(places)
    }

    /// Moves a piece to its place, and answers how much of it could be moved and where it is.
    fn move_in(
        &mut self,
        piece: &Piece,
        (place, reserved): Place,
        opened: BorrowedFd<'_>,
        keeper: &Keeper,
    ) -> Option<Range<u64>> {
        let Kind::Movable(attributes) = &piece.kind else {
            return None;
        };
        let pagemap = std::fs::File::open("/proc/self/pagemap").ok();
        let pagemap = pagemap.as_ref().map(AsFd::as_fd);
        let mut done = place.start;
        for chunk in chunks(piece.range.clone()) {
            // Memory without pages in the file stays where it is: the RNIC reaches it through this process, which has it in its cgroup.
            let pages = done..done + chunk.len() as u64;
            let fills = |file: &MemFile| file.fill(opened, pages).is_ok();
            if reserved == Reserved::Length && !self.file.as_ref().is_some_and(fills) {
                break;
            }
            if swap::move_in(chunk.clone(), opened, done, keeper.as_ref(), pagemap, attributes).is_err() {
                break;
            }
            done += chunk.len() as u64;
        }
        self.vacate(opened, done..place.end);
        if done == place.start {
            return None;
        }
        let moved = piece.range.start..piece.range.start + (done - place.start) as usize;
        if let Some(look) = &mut self.look {
            look.take(&moved);
        }
        self.spans
            .insert(place.start..done, moved.start as u64, *attributes);
        Some(place.start..done)
    }

    /// Claims a piece that is in the file already.
    fn claim(&mut self, piece: &Piece) -> Option<Range<u64>> {
        let Kind::Ours(offset) = piece.kind else {
            return None;
        };
        let range = offset..offset + piece.range.len() as u64;
        self.spans.claim(range.clone()).then_some(range)
    }

    /// Makes a range of the file free again; not if it cannot be emptied, since the next one expects zeros.
    pub(crate) fn vacate(&mut self, opened: BorrowedFd<'_>, range: Range<u64>) {
        if self
            .file
            .as_ref()
            .is_some_and(|file| file.punch(opened, range.clone()))
        {
            self.space.free(range);
        }
    }
}

impl Adoption {
    /// Adds the next piece of the region, of which the start is in the file if `moved` says so.
    fn push(&mut self, range: Range<usize>, moved: Option<Range<u64>>) {
        let mut start = range.start as u64;
        if let Some(moved) = moved {
            let end = start + (moved.end - moved.start);
            self.push_segment(start..end, Backing::File { offset: moved.start });
            self.token.pieces.push(moved);
            start = end;
        }
        if start < range.end as u64 {
            self.push_segment(start..range.end as u64, Backing::Process);
        }
    }

    fn push_segment(&mut self, range: Range<u64>, backing: Backing) {
        if let Some((last, before)) = self.segments.last_mut() {
            let continues = match (*before, backing) {
                (Backing::Process, Backing::Process) => true,
                (Backing::File { offset: first }, Backing::File { offset }) => {
                    first + (last.end - last.start) == offset
                }
                _ => false,
            };
            if continues {
                last.end = range.end;
                return;
            }
        }
        self.segments.push((range, backing));
    }
}
