//! What guest libraries and agents of this version say to each other is what is recorded.

use verbatim_channel::{
    Answer, GATE_NAME, Greeting, MEMORY_DIR, MovedEndpoint, Order, RUNTIME_DIR, RUNTIME_DIR_VARIABLE,
    Resolved, SOCKET_NAME, VERSION,
};
use verbatim_recorded::Recording;
use verbatim_seqpacket::Carried;

#[test]
fn messages_are_as_recorded() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recorded/channel.txt");
    let mut recording = Recording::open(path, VERSION);
    recording.check::<Carried>("Carried");
    recording.check::<Greeting>("Greeting");
    recording.check::<Order>("Order");
    recording.check::<Answer>("Answer");
    // The answers to `Greeting::Resolve`, `Ways` and `Publish`.
    recording.check::<Resolved>("Resolved");
    recording.check::<Vec<MovedEndpoint>>("Ways");
    recording.check::<Option<u32>>("Published");
    for (name, value) in [
        ("SOCKET_NAME", SOCKET_NAME),
        ("GATE_NAME", GATE_NAME),
        ("MEMORY_DIR", MEMORY_DIR),
        ("RUNTIME_DIR", RUNTIME_DIR),
        ("RUNTIME_DIR_VARIABLE", RUNTIME_DIR_VARIABLE),
    ] {
        recording.check_text(name, value);
    }
    recording.finish();
}
