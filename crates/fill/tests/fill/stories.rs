//! What is tried.

use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use verbatim_fill::{Config, Filler, Phase};

use crate::criu::{self, Criu, LAZY, PRESENT};
use crate::task::{BASE, Container, PAGE, check, content, mapping_end};

type Story = (&'static str, fn());

pub const STORIES: &[Story] = &[
    ("plain", plain),
    ("faults_while_it_fills", faults_while_it_fills),
    ("memory_that_changes_while_it_fills", memory_that_changes),
    ("several_tasks_and_a_zombie", several_tasks),
    ("killed_again_and_again", killed_again_and_again),
    ("both_killed_is_noticed", both_killed),
    ("a_task_that_exits", exits),
    ("bad_images_are_refused", bad_images),
    ("a_missing_page_is_refused", missing_page),
    ("speed", speed),
];

pub fn run(names: &[String]) -> ExitCode {
    let mut failed = 0;
    for (name, story) in STORIES {
        let wanted = names
            .iter()
            .filter(|name| !name.starts_with('-'))
            .collect::<Vec<_>>();
        if !wanted.is_empty() && !wanted.iter().any(|wanted| name.contains(wanted.as_str())) {
            continue;
        }
        let start = Instant::now();
        let right = catch_unwind(AssertUnwindSafe(story)).is_ok();
        println!(
            "{name}: {} ({:?})",
            if right { "ok" } else { "FAILED" },
            start.elapsed()
        );
        failed += usize::from(!right);
    }
    if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn seed() -> u64 {
    let seed = std::env::var("VERBATIM_FILL_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(rand::random);
    println!("VERBATIM_FILL_SEED={seed}");
    seed
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// Folders, and the helpers.
struct World {
    folder: tempfile::TempDir,
    config: Config,
}

impl World {
    fn new() -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = |name: &str| folder.path().join(name);
        for name in ["images", "cache", "work"] {
            std::fs::create_dir(path(name)).unwrap();
        }
        let config = Config {
            images: path("images"),
            cache: path("cache"),
            work: path("work"),
            control: path("control"),
            log: path("log"),
        };
        Self { folder, config }
    }

    fn start(&self) -> Filler {
        let program = std::env::current_exe().unwrap();
        Filler::start(&program, &self.config).unwrap()
    }

    /// Every page of the ranges for which `lazy` says so is left for later, and in the cache.
    fn dump(&self, vpid: u32, ranges: &[(u64, u64)], lazy: impl Fn(u64) -> bool) {
        let file = std::fs::File::create(self.cache(vpid)).unwrap();
        let (mut runs, mut mappings) = (Vec::new(), Vec::new());
        for (start, bytes) in ranges {
            mappings.push((*start, start + bytes, 0));
            for at in (*start..start + bytes).step_by(PAGE as usize) {
                if lazy(at) {
                    runs.push((at, 1, LAZY));
                    file.write_all_at(&content(at), at).unwrap();
                } else if at % (7 * PAGE) == 0 {
                    // In the images: CRIU fills it. Here it is zeros.
                    runs.push((at, 1, LAZY | PRESENT));
                }
            }
        }
        criu::write_task(&self.config.images, vpid, &runs, &mappings);
    }

    fn cache(&self, vpid: u32) -> PathBuf {
        self.config.cache.join(vpid.to_string())
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }
}

fn end(world: &World, filler: Filler) {
    if let Err(error) = filler.wait(&Phase::Filled, soon()) {
        panic!("{error}; {:?}\n{}", filler.status(), world.log());
    }
    let status = filler.status().unwrap();
    assert_eq!((status.pages_left, status.unplaced), (0, 0), "{status:?}");
    let control = filler.control().to_owned();
    filler.end().unwrap();
    assert!(Filler::find(&control).unwrap().is_none());
}

const MIB: u64 = 1 << 20;

/// Most pages, not all.
fn most(at: u64) -> bool {
    at / PAGE % 11 != 3
}

fn is_right_everywhere(start: u64, bytes: u64) -> bool {
    (start..start + bytes)
        .step_by(PAGE as usize)
        .all(|at| check(at, most(at).then_some(at)))
}

fn plain() {
    let world = World::new();
    let filler = world.start();
    assert_eq!(filler.status().unwrap().phase, Phase::Waiting);
    let ranges = [(BASE, 24 * MIB)];
    world.dump(7, &ranges, most);
    criu::write_tree(&world.config.images, &[(7, false), (8, true)]);
    assert_eq!(verbatim_fill::tasks(&world.config.images).unwrap(), [7]);
    filler.prepare().unwrap();
    let mut container = Container::start(&ranges, || is_right_everywhere(BASE, 24 * MIB));
    let mut criu = Criu::connect(&world.config.work);
    criu.task(7, container.uffd()).unwrap();
    filler.wait(&Phase::Restoring, soon()).unwrap();
    criu.finish();
    filler.wait(&Phase::Filled, soon()).unwrap();
    container.go();
    assert!(container.is_right());
    use std::os::unix::fs::MetadataExt;
    let held = std::fs::metadata(world.cache(7)).unwrap().blocks() * 512;
    end(&world, filler);
    assert!(held <= 16 * MIB, "{held} bytes of the cache are still there");
    container.kill();
}

fn faults_while_it_fills() {
    let world = World::new();
    let filler = world.start();
    let ranges = [(BASE, 48 * MIB)];
    world.dump(7, &ranges, most);
    let seed = seed();
    let mut container = Container::start(&ranges, move || {
        let mut random = StdRng::seed_from_u64(seed);
        let mut pages: Vec<u64> = (BASE..BASE + 48 * MIB).step_by(PAGE as usize).collect();
        pages.shuffle(&mut random);
        pages.into_iter().all(|at| check(at, most(at).then_some(at)))
    });
    let mut criu = Criu::connect(&world.config.work);
    container.go();
    criu.task(7, container.uffd()).unwrap();
    criu.finish();
    assert!(container.is_right(), "{}", world.log());
    end(&world, filler);
    container.kill();
}

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

fn memory_that_changes() {
    let seed = seed();
    for round in 0..25 {
        changed_memory(seed.wrapping_add(round), |_| {});
    }
}

/// One container whose memory changes; `meanwhile` is called again and again until it is ready.
fn changed_memory(seed: u64, mut meanwhile: impl FnMut(&Filler)) {
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

fn several_tasks() {
    let world = World::new();
    let filler = world.start();
    let ranges = [(BASE, 4 * MIB), (BASE + 8 * MIB, 2 * MIB)];
    let mut containers = Vec::new();
    let mut criu = Criu::connect(&world.config.work);
    for vpid in 1..=6 {
        world.dump(vpid, &ranges, most);
        let mut container = Container::start(&ranges, || {
            is_right_everywhere(BASE, 4 * MIB) && is_right_everywhere(BASE + 8 * MIB, 2 * MIB)
        });
        criu.task(vpid as i32, container.uffd()).unwrap();
        criu.zombie(100 + vpid as i32);
        container.go();
        containers.push(container);
    }
    criu.finish();
    for container in &mut containers {
        assert!(container.is_right(), "{}", world.log());
    }
    end(&world, filler);
    containers.iter().for_each(Container::kill);
}

/// Kills one of the two, at a random moment, and waits until it was replaced.
fn kill_one(filler: &Filler, random: &mut StdRng, kills: &mut u32) {
    let deadline = soon();
    let Ok(before) = filler.status() else { return };
    if matches!(before.phase, Phase::Filled) {
        return;
    }
    let pause = Instant::now() + Duration::from_micros(random.random_range(0..3000));
    while Instant::now() < pause {
        std::hint::spin_loop();
    }
    let which = usize::from(random.random_bool(0.7));
    // SAFETY: a process that this test has started, in its own PID namespace.
    unsafe { libc::kill(before.processes[which], libc::SIGKILL) };
    *kills += 1;
    loop {
        let now = filler.status().unwrap();
        assert!(!matches!(now.phase, Phase::Lost(_)), "{now:?}");
        if now.processes[which] != before.processes[which] || now.phase == Phase::Filled {
            return;
        }
        assert!(Instant::now() < deadline, "{which} was not replaced: {now:?}");
    }
}

fn killed_again_and_again() {
    let seed = seed();
    let mut random = StdRng::seed_from_u64(seed);
    let mut kills = 0;
    let start = Instant::now();
    for round in 0..200 {
        changed_memory(seed.wrapping_add(round), |filler| {
            kill_one(filler, &mut random, &mut kills)
        });
        if start.elapsed() > Duration::from_secs(10) {
            break;
        }
    }
    println!("{kills} kills");
    assert!(kills > 100, "only {kills} kills");
}

fn both_killed() {
    let world = World::new();
    let filler = world.start();
    let ranges = [(BASE, MIB)];
    world.dump(7, &ranges, most);
    let mut container = Container::start(&ranges, || true);
    let mut criu = Criu::connect(&world.config.work);
    criu.task(7, container.uffd()).unwrap();
    let status = filler.wait(&Phase::Restoring, soon()).unwrap();
    let mut watch = filler.watch().unwrap();
    assert_eq!(watch.next(Some(soon())).unwrap().unwrap().phase, Phase::Restoring);
    for pid in status.processes {
        // SAFETY: processes of this test, in its own PID namespace.
        unsafe { libc::kill(pid, libc::SIGKILL) };
    }
    let lost = watch.next(Some(soon())).unwrap().unwrap();
    assert!(matches!(lost.phase, Phase::Lost(_)), "{lost:?}");
    let found = Filler::find(&world.config.control).unwrap().unwrap();
    assert!(matches!(found.status().unwrap().phase, Phase::Lost(_)));
    assert!(found.clone().end().is_err());
    found.give_up().unwrap();
    assert!(Filler::find(&world.config.control).unwrap().is_none());
    container.kill();
}

fn exits() {
    let world = World::new();
    let filler = world.start();
    let ranges = [(BASE, 64 * MIB)];
    world.dump(7, &ranges, most);
    let mut container = Container::start(&ranges, || true);
    let mut criu = Criu::connect(&world.config.work);
    criu.task(7, container.uffd()).unwrap();
    criu.finish();
    container.kill();
    end(&world, filler);
}

fn refused(world: &World, filler: Filler, wanted: &str) {
    let ranges = [(BASE, MIB)];
    let mut container = Container::start(&ranges, || is_right_everywhere(BASE, MIB));
    let mut criu = Criu::connect(&world.config.work);
    criu.task(7, container.uffd()).unwrap();
    assert!(criu.is_cut_off(), "{:?}\n{}", filler.status(), world.log());
    let status = filler.status().unwrap();
    let Phase::Refused(why) = &status.phase else {
        panic!("{status:?}");
    };
    assert!(why.contains(wanted), "{why}");
    container.go();
    std::thread::sleep(Duration::from_millis(20));
    assert!(!container.has_ended(), "it has read a page that was not filled");
    container.kill();
    filler.give_up().unwrap();
    assert!(!Path::new(&world.config.control).exists());
}

fn bad_images() {
    for (name, keep) in [("pagemap-7.img", 30), ("pagemap-7.img", 5), ("mm-7.img", 20)] {
        let world = World::new();
        let filler = world.start();
        world.dump(7, &[(BASE, MIB)], most);
        let path = world.config.images.join(name);
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        file.set_len(keep).unwrap();
        refused(&world, filler, name);
        let error = match name {
            "mm-7.img" => verbatim_fill::images::mappings(&world.config.images, 7).unwrap_err(),
            _ => verbatim_fill::left_to_fill(&world.config.images, 7).unwrap_err(),
        };
        assert!(error.to_string().contains("cut off"), "{error}");
    }
}

fn missing_page() {
    let world = World::new();
    let filler = world.start();
    world.dump(7, &[(BASE, MIB)], most);
    let file = std::fs::File::options().write(true).open(world.cache(7)).unwrap();
    let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, flags, BASE + 20 * PAGE, PAGE).unwrap();
    refused(
        &world,
        filler,
        &format!("lacks the page at {:#x}", BASE + 20 * PAGE),
    );
}

/// The rate of a fill that nobody disturbs, and how long threads wait that fault meanwhile. What is asked of both is far below what
/// an idle machine does, so that a busy one passes, too; the numbers are printed.
fn speed() {
    let rate = filled_at(|| true, false);
    println!("{rate:.0} MiB/s");
    assert!(rate > 300.0, "{rate} MiB/s");
    filled_at(faults_are_short, true);
}

fn faults_are_short() -> bool {
    let mut times = Vec::new();
    // From the end, so that the fill comes late.
    for step in (64..4096).rev() {
        let at = BASE + step * MIB / 8;
        let start = Instant::now();
        // SAFETY: the container has mapped it.
        unsafe { std::ptr::read_volatile(at as *const u64) };
        times.push(start.elapsed());
        let pause = Instant::now() + Duration::from_micros(300);
        while Instant::now() < pause {
            std::hint::spin_loop();
        }
        // What takes less was there already.
        if times.last().is_some_and(|time| *time < Duration::from_micros(2)) {
            break;
        }
    }
    times.pop();
    times.sort();
    let middle = times[times.len() / 2];
    println!(
        "{} faults while it fills: median {middle:?}, longest {:?}",
        times.len(),
        times[times.len() - 1]
    );
    middle < Duration::from_millis(5)
}

/// MiB/s of filling 512 MiB.
fn filled_at(what: fn() -> bool, meanwhile: bool) -> f64 {
    let world = World::new();
    let filler = world.start();
    let ranges = [(BASE, 512 * MIB)];
    world.dump(7, &ranges, |_| true);
    filler.prepare().unwrap();
    let mut container = Container::start(&ranges, what);
    let mut criu = Criu::connect(&world.config.work);
    let start = Instant::now();
    criu.task(7, container.uffd()).unwrap();
    criu.finish();
    if meanwhile {
        container.go();
    }
    filler.wait(&Phase::Filled, soon()).unwrap();
    let rate = 512.0 / start.elapsed().as_secs_f64();
    if !meanwhile {
        container.go();
    }
    assert!(container.is_right());
    end(&world, filler);
    container.kill();
    rate
}
