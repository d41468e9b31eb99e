//! The types of `<infiniband/verbs.h>`, written by hand with the names that they have there.
//!
//! rdma-core's rule is that structures only grow: at the end, or, for [`verbs_context`], at the beginning. What is here
//! is rdma-core 44; a program built against a newer one finds the rest absent by `sz` or `comp_mask`, one built
//! against an older one does not look at it. `tests/layout.rs` compares each size and offset with the installed header.

#![allow(
    non_camel_case_types,
    non_snake_case,
    missing_docs,
    reason = "names and meanings are those of <infiniband/verbs.h>"
)]

mod attributes;
mod cm;
mod context;
mod device;
mod objects;
mod work;

pub use attributes::*;
pub use cm::*;
pub use context::*;
pub use device::*;
pub use objects::*;
pub use work::*;

/// One structure as we laid it out.
#[derive(Debug)]
pub struct Layout {
    /// Its name in C, without `struct` or `union`.
    pub name: &'static str,
    /// `sizeof`.
    pub size: usize,
    /// Each member and its `offsetof`.
    pub fields: &'static [(&'static str, usize)],
}

/// Defines `#[repr(C)]` structures and a list of their layouts for the comparison with the header.
macro_rules! c_structs {
    ($layouts:ident: $($(#[$attribute:meta])* $name:ident { $($(#[$about:meta])* $field:ident: $type:ty,)* })*) => {
        $(
            $(#[$attribute])*
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub struct $name { $($(#[$about])* pub $field: $type,)* }
        )*

        pub(super) const $layouts: &[super::Layout] = &[$(super::Layout {
            name: stringify!($name),
            size: size_of::<$name>(),
            fields: &[$((stringify!($field), std::mem::offset_of!($name, $field)),)*],
        },)*];
    };
}
pub(crate) use c_structs;

/// All structures of the interface that C programs and we both look into.
pub fn layouts() -> impl Iterator<Item = &'static Layout> {
    [
        attributes::LAYOUTS,
        cm::LAYOUTS,
        context::LAYOUTS,
        device::LAYOUTS,
        objects::LAYOUTS,
        work::LAYOUTS,
    ]
    .into_iter()
    .flatten()
}
