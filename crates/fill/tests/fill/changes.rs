//! A container that changes its memory at random while it is filled, and knows what each page must be.

use std::time::Instant;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use verbatim_fill::{Filler, Phase};

use crate::criu::Criu;
use crate::task::{BASE, Container, PAGE, check, mapping_end};
use crate::world::{World, most, soon};

/// Random changes, and a model of what each page must be.
fn changes(seed: u64, pages: u64) -> bool {
    let mut random = StdRng::seed_from_u64(seed);
    let origin = |at: u64| most(at).then_some(at);
    // What is at each page of an area three times as large: not mapped, or mapped with some content.
    let area = 3 * pages;
    let mut model: Vec<Option<Option<u64>>> = (0..area)
        .map(|page| (page < pages).then(|| origin(BASE + page * PAGE)))
        .collect();
    let mut children = Vec::new();
    for step in 0..120 {
        let page = random.random_range(0..area);
        let many = random.random_range(1..64).min(area - page);
        let (from, to) = (page as usize, (page + many) as usize);
        let at = |page: u64| BASE + page * PAGE;
        match random.random_range(0..8) {
            0 => {
                // SAFETY: within the area, which is this test's.
                unsafe { libc::munmap(at(page) as *mut _, (many * PAGE) as usize) };
                model[from..to].fill(None);
            }
            1 if model[from..to].iter().all(Option::is_some) => {
                // SAFETY: as above.
                unsafe { libc::madvise(at(page) as *mut _, (many * PAGE) as usize, libc::MADV_DONTNEED) };
                model[from..to].fill(Some(None));
            }
            2 | 3 if model[from..to].iter().all(Option::is_some) => {
                // The kernel moves one mapping at a time where a userfaultfd watches.
                let end = mapping_end(at(page)).expect("it is mapped");
                let many = many.min((end - at(page)) / PAGE);
                let to = (page + many) as usize;
                let target = random.random_range(0..=area - many);
                if target + many > page && page + many > target {
                    continue;
                }
                let bytes = (many * PAGE) as usize;
                // SAFETY: as above.
                let moved = unsafe {
                    libc::mremap(
                        at(page) as *mut _,
                        bytes,
                        bytes,
                        libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED,
                        at(target),
                    )
                };
                if moved as u64 == at(target) {
                    let contents = model[from..to].to_vec();
                    model[target as usize..(target + many) as usize].clone_from_slice(&contents);
                    model[from..to].fill(None);
                } else {
                    return report(seed, step, "mremap");
                }
            }
            4 if children.len() < 4 => {
                // SAFETY: the container has one thread.
                let pid = unsafe { libc::fork() };
                if pid == 0 {
                    let right = matches(&model);
                    // SAFETY: ends the child without what this program does at its end.
                    unsafe { libc::_exit(i32::from(!right)) };
                }
                children.push(pid);
            }
            5 if model[from..to].iter().all(Option::is_some) => {
                // Splits mappings.
                // SAFETY: as above.
                unsafe { libc::mprotect(at(page) as *mut _, (many * PAGE) as usize, libc::PROT_READ) };
            }
            _ => {
                if let Some(content) = model[from]
                    && !check(at(page), content)
                {
                    return report(seed, step, "a page");
                }
            }
        }
    }
    let mut right = matches(&model);
    for child in children {
        let mut status = 0;
        // SAFETY: waits for a child of ours.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        right &= status == 0 || report(seed, 1000, "a child");
    }
    right
}

fn matches(model: &[Option<Option<u64>>]) -> bool {
    model.iter().enumerate().all(|(page, content)| {
        content.is_none_or(|content| {
            check(BASE + page as u64 * PAGE, content) || report(page as u64, 0, "page of the model")
        })
    })
}

fn report(seed: u64, step: u32, what: &str) -> bool {
    println!("seed or page {seed}, step {step}: {what} is wrong");
    false
}

/// One container whose memory changes; `meanwhile` is called again and again until it is ready.
pub fn changed_memory(seed: u64, mut meanwhile: impl FnMut(&Filler)) {
    let world = World::new();
    let filler = world.start();
    let pages = 2048;
    let ranges = [(BASE, pages * PAGE)];
    world.dump(7, &ranges, most);
    let mut container = Container::start(&ranges, move || changes(seed, pages));
    container.go();
    let mut criu = Criu::connect(&world.config.work);
    criu.task(7, container.uffd()).unwrap();
    criu.finish();
    let deadline = soon();
    while !container.has_ended() && Instant::now() < deadline {
        meanwhile(&filler);
        std::thread::yield_now();
    }
    assert!(
        container.has_ended(),
        "seed {seed}: {:?}\n{}",
        filler.status(),
        world.log()
    );
    assert!(
        container.is_right(),
        "seed {seed}: {:?}\n{}",
        filler.status(),
        world.log()
    );
    if let Err(error) = filler.wait(&Phase::Filled, soon()) {
        panic!("seed {seed}: {error}; {:?}\n{}", filler.status(), world.log());
    }
    filler.end().unwrap();
    container.kill();
}
