//! A forked child has nothing of its parent's RNIC, and does its parent no harm.

mod support;

use support::{End, Nic};
use verbatim_verbs::{SendOpcode, WC_SUCCESS, Wc, after_fork_in_child, after_fork_in_parent, before_fork};

/// What the child does with the objects that it inherited; its exit status.
fn child(end: &End, remote: u64) -> i32 {
    after_fork_in_child();
    if end.context.alloc_pd().is_ok() {
        return 1;
    }
    let posted = end.post(SendOpcode::Write, 1, 0, remote, end.mr.rkey(), true);
    if posted.is_err() || end.cq.poll(&mut [Wc::default()]) != 0 {
        return 2;
    }
    0
}

#[test]
fn a_child_cannot_reach_the_device_and_the_parent_goes_on() {
    let nics = [Nic::start([127, 0, 73, 1]), Nic::start([127, 0, 73, 2])];
    let ends = [End::new(&nics[0]), End::new(&nics[1])];
    ends[0].connect(&nics[1], &ends[1]);
    ends[1].connect(&nics[0], &ends[0]);
    let remote = ends[1].memory.address() + 8 * 7000;

    before_fork();
    // SAFETY: the child calls what the handlers promise to work, and `_exit`.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        let status = child(&ends[0], remote);
        // SAFETY: ends the child without running anything of the parent's.
        unsafe { libc::_exit(status) };
    }
    after_fork_in_parent();
    let mut status = -1;
    // SAFETY: our own child.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    assert!(
        libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0,
        "{status:#x}"
    );

    ends[0].memory.write_u64(0, 99);
    let rkey = ends[1].mr.rkey();
    ends[0].post(SendOpcode::Write, 7, 0, remote, rkey, true).unwrap();
    let wc = ends[0].wait();
    assert_eq!((wc.wr_id, wc.status), (7, WC_SUCCESS));
    assert_eq!(ends[1].memory.read_u64(7000), 99);
    ends[0].context.alloc_pd().unwrap();
}
