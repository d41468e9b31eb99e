//! What a volume's daemon reads from clients, out of the memory of virtual machines, and from the daemons of other hosts.

use verbatim_volume::fuzzing::{self, Host};

use super::folder;

thread_local! {
    // In memory, where a flush is quick.
    static HOST: Host = Host::new(folder::path("").as_path());
}

pub fn messages(bytes: &[u8]) {
    fuzzing::message(bytes);
}

pub fn message_seeds() -> Vec<Vec<u8>> {
    fuzzing::messages()
}

pub fn client(bytes: &[u8]) {
    HOST.with(|host| host.client(bytes));
}

pub fn client_seeds() -> Vec<Vec<u8>> {
    fuzzing::client_streams()
}

pub fn source(bytes: &[u8]) {
    HOST.with(|host| host.source(bytes));
}

pub fn source_seeds() -> Vec<Vec<u8>> {
    fuzzing::source_streams()
}

pub fn guest(bytes: &[u8]) {
    HOST.with(|host| host.guest(bytes));
}

pub fn guest_seeds() -> Vec<Vec<u8>> {
    fuzzing::guests()
}
