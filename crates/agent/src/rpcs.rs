//! The RPCs of the services, from their descriptors (`build.rs`).

include!(concat!(env!("OUT_DIR"), "/rpcs.rs"));
