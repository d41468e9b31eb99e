//! The long runs, by libFuzzer. Start it with `fuzz/run`.
//!
//! One binary for all targets: `VERBATIM_FUZZ_TARGET` names the one to run (`list` prints all), and
//! `VERBATIM_FUZZ_CORPUS` the folder that is to have its seeds and regressions.

#![no_main]

use std::path::Path;
use std::sync::OnceLock;

use verbatim_fuzz::{TARGETS, Target};

static TARGET: OnceLock<&'static Target> = OnceLock::new();

fn choose() {
    let name = std::env::var("VERBATIM_FUZZ_TARGET").unwrap_or_default();
    if name == "list" {
        TARGETS.iter().for_each(|target| println!("{}", target.name));
        std::process::exit(0);
    }
    let Some(target) = Target::named(&name) else {
        eprintln!("VERBATIM_FUZZ_TARGET={name:?} is no target; set it to \"list\" to see them");
        std::process::exit(2);
    };
    if let Ok(folder) = std::env::var("VERBATIM_FUZZ_CORPUS") {
        let seeds = (target.seeds)().into_iter().enumerate();
        let seeds = seeds.map(|(index, content)| (format!("seed-{index}"), content));
        for (name, content) in seeds.chain(target.regressions()) {
            std::fs::write(Path::new(&folder).join(name), content).expect("the corpus can be written");
        }
    }
    TARGET.set(target).expect("it is chosen once");
}

libfuzzer_sys::fuzz_target!(init: choose(), |data: &[u8]| {
    (TARGET.get().expect("it was chosen first").run)(data);
});
