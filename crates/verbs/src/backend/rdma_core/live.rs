//! Objects of the library, each used by many threads and destroyed once.
//!
//! Verbs may be called from any thread (ibv_open_device(3) and the others are thread safe), but not with an object that
//! was destroyed, nor while it is. In C that is the program's promise; here [`Live`] keeps it.

use std::ffi::c_int;
use std::fmt;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use parking_lot::{ArcRwLockReadGuard, RawRwLock, RwLock, RwLockReadGuard};

use super::ffi::ibv_context;
use super::library::Library;
use crate::error::VerbsError;

/// A pointer to an object that any thread may use.
struct Pointer<T>(NonNull<T>);

// SAFETY: the library's objects may be used and destroyed by any thread; who may when is what `Live` and `Opened` see to.
unsafe impl<T> Send for Pointer<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Pointer<T> {}

impl<T> fmt::Debug for Pointer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:p}", self.0)
    }
}

/// An opened device of the library, closed when the last object of it is gone.
#[derive(Debug)]
pub struct Opened {
    library: Arc<Library>,
    context: Pointer<ibv_context>,
}

impl Opened {
    /// # Safety
    /// `context` is open, of that library, and nobody else closes it.
    pub unsafe fn new(library: Arc<Library>, context: NonNull<ibv_context>) -> Self {
        Self {
            library,
            context: Pointer(context),
        }
    }

    pub fn library(&self) -> &Library {
        &self.library
    }

    /// The library, for whoever outlives this.
    pub fn shared_library(&self) -> &Arc<Library> {
        &self.library
    }

    /// Good as long as this exists.
    pub fn context(&self) -> *mut ibv_context {
        self.context.0.as_ptr()
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: open (contract of `new`), and every object of it holds an `Arc` of this, so that none is left.
        unsafe { (self.library.functions().ibv_close_device)(self.context()) };
    }
}

/// How a kind of object is destroyed: 0, an errno, or -1 with `errno`.
type Destroy<T> = unsafe extern "C" fn(*mut T) -> c_int;

/// An object, destroyed when it is told to or else when this is dropped.
pub struct Live<T> {
    object: Arc<RwLock<Option<Pointer<T>>>>,
    pins: Arc<AtomicUsize>,
    destroy: Destroy<T>,
    opened: Arc<Opened>,
}

impl<T> fmt::Debug for Live<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Live").field(&self.object).finish()
    }
}

/// Keeps an object from being destroyed while it is used.
pub struct Held<'a, T>(RwLockReadGuard<'a, Option<Pointer<T>>>);

impl<T> Deref for Held<'_, T> {
    type Target = NonNull<T>;

    #[inline]
    fn deref(&self) -> &NonNull<T> {
        &self.0.as_ref().expect("`hold` has looked").0
    }
}

/// As [`Held`], for those who do not keep the [`Live`].
pub struct OwnedHeld<T>(ArcRwLockReadGuard<RawRwLock, Option<Pointer<T>>>);

impl<T> Deref for OwnedHeld<T> {
    type Target = NonNull<T>;

    #[inline]
    fn deref(&self) -> &NonNull<T> {
        &self.0.as_ref().expect("`hold_owned` has looked").0
    }
}

/// Keeps an object from being destroyed for as long as it exists: whoever destroys it meanwhile is refused. For ends of queues, which
/// use their object for every request: taking and leaving a lock costs as much as all the rest.
pub struct Pin<T> {
    object: Pointer<T>,
    pins: Arc<AtomicUsize>,
    _opened: Arc<Opened>,
}

impl<T> fmt::Debug for Pin<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pin").field(&self.object).finish()
    }
}

impl<T> Deref for Pin<T> {
    type Target = NonNull<T>;

    #[inline]
    fn deref(&self) -> &NonNull<T> {
        &self.object.0
    }
}

impl<T> Drop for Pin<T> {
    fn drop(&mut self) {
        self.pins.fetch_sub(1, Release);
    }
}

impl<T> Live<T> {
    /// # Safety
    /// `object` is of that device, `destroy` destroys its kind, and nobody else does.
    pub unsafe fn new(opened: Arc<Opened>, object: NonNull<T>, destroy: Destroy<T>) -> Self {
        Self {
            object: Arc::new(RwLock::new(Some(Pointer(object)))),
            pins: Arc::default(),
            destroy,
            opened,
        }
    }

    /// The device that it is of.
    pub fn opened(&self) -> &Arc<Opened> {
        &self.opened
    }

    /// The object, for as long as the answer is kept; `None` if it was destroyed.
    #[inline]
    pub fn hold(&self) -> Option<Held<'_, T>> {
        let object = self.object.read_recursive();
        object.is_some().then_some(Held(object))
    }

    /// As [`Self::hold`].
    pub fn hold_owned(&self) -> Option<OwnedHeld<T>> {
        let object = self.object.read_arc_recursive();
        object.is_some().then_some(OwnedHeld(object))
    }

    /// As [`Self::hold`], for control verbs.
    pub fn get(&self, verb: &'static str) -> Result<Held<'_, T>, VerbsError> {
        self.hold().ok_or_else(|| VerbsError::Gone {
            object: format!("what {verb} was asked for"),
        })
    }

    /// The object, for the end of a queue.
    pub fn pin(&self, verb: &'static str) -> Result<Pin<T>, VerbsError> {
        let held = self.get(verb)?;
        // Whoever destroys it looks with the lock that is held here.
        self.pins.fetch_add(1, Relaxed);
        Ok(Pin {
            object: Pointer(*held),
            pins: self.pins.clone(),
            _opened: self.opened.clone(),
        })
    }

    /// Destroys it, after those who hold it; it stays if the library refuses, and while it is pinned.
    pub fn destroy(&self, verb: &'static str) -> Result<(), VerbsError> {
        let mut object = self.object.write();
        let users = self.pins.load(Acquire);
        if users > 0 && object.is_some() {
            return Err(VerbsError::Busy {
                object: format!("what {verb} was asked for"),
                users,
            });
        }
        let Some(pointer) = object.take() else {
            return Ok(());
        };
        let library = self.opened.library();
        library.functions();
        // SAFETY: it is alive, its device is open, and nobody uses it, since the lock is ours.
        let outcome = library.check(verb, unsafe { (self.destroy)(pointer.0.as_ptr()) });
        if outcome.is_err() {
            *object = Some(pointer);
        }
        outcome
    }
}

impl<T> Drop for Live<T> {
    fn drop(&mut self) {
        // What the library does not destroy, or what is pinned, the kernel destroys when the device is closed.
        let _ = self.destroy("close_device");
    }
}
