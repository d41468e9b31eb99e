//! What the way through costs, against the library called directly: `cargo test --release -- --ignored cost --nocapture`.

use std::time::Instant;

use super::through_the_objects::{program, send};
use super::*;
use crate::work::{SEND_SIGNALED, Wc};

const ROUNDS: u32 = 200_000;

#[test]
#[ignore = "prints times and checks nothing"]
fn cost_of_a_request_and_its_completion() {
    let fake = Fake::new();
    let program = program(&fake);
    let mut wc = [Wc::default()];
    let started = Instant::now();
    for n in 0..ROUNDS {
        program.qp.post_send([send(n.into(), SEND_SIGNALED)]).unwrap();
        assert_eq!(program.cq.poll(&mut wc), 1);
    }
    let through = started.elapsed();

    let qp = fake.qp(program.qp.number());
    let mut wr = fake.last(1)[0].wr;
    wr.next = std::ptr::null_mut();
    let mut bad = std::ptr::null_mut();
    let started = Instant::now();
    for _ in 0..ROUNDS {
        // SAFETY: the fake's queue pair and completion queue are alive, the request is whole.
        unsafe {
            let ops = &(*(*qp).context).ops;
            assert_eq!(ops.post_send.unwrap()(qp, &mut wr, &mut bad), 0);
            assert_eq!(ops.poll_cq.unwrap()((*qp).send_cq, 1, wc.as_mut_ptr()), 1);
        }
    }
    let direct = started.elapsed();
    let each = |elapsed: std::time::Duration| elapsed.as_nanos() / u128::from(ROUNDS);
    println!(
        "through the objects {} ns, directly {} ns",
        each(through),
        each(direct)
    );
}
