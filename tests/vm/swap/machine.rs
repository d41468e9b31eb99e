//! A machine with less memory than its programs use.

use std::cell::RefCell;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use verbatim_testbed::{Command, Ended, Network, Vm, VmConfig};

use crate::built::Built;
use crate::pager::compared;

/// How long a command of ours may take while everything is swapped.
const SHORT: Duration = Duration::from_secs(120);
/// So long after its time the programs may still compare, page by page, what they have.
const LAST_LOOK: Duration = Duration::from_secs(600);
/// No program may be without a page for this time: a path that waits for itself has none ever again.
const STILL: Duration = Duration::from_secs(60);
/// The kernel says so of a task that waits for that long without a pause, and its machine ends.
const HUNG: u32 = 45;
/// What the kernel says of swap that does not work.
const COMPLAINTS: [&str; 5] = [
    "blocked for more than",
    "Read-error on swap-device",
    "Write-error on swap-device",
    "I/O error",
    "Out of memory",
];

/// What it swaps with.
pub struct Machine {
    vm: Vm,
    pager: Built,
}

/// Programs that use more memory than there is.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    pub programs: u32,
    /// Of all together.
    pub mib: u32,
    pub seconds: u32,
}

/// Pages that the kernel has swapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Swapped {
    pub out: u64,
    pub back: u64,
}

impl Machine {
    pub fn boot(config: &VmConfig, network: &Network) -> anyhow::Result<Self> {
        let pager = Built::of(&["pager"])?;
        let vm = Vm::boot(config, network)?;
        let machine = Self { vm, pager };
        machine.shell(&format!(
            "sysctl -qw kernel.hung_task_timeout_secs={HUNG} kernel.hung_task_panic=1 kernel.printk=7"
        ))?;
        Ok(machine)
    }

    /// What a script there writes that ends well.
    pub fn shell(&self, script: &str) -> anyhow::Result<String> {
        let ended = self.vm.run(&Command::new(["sh", "-ec", script]), SHORT)?;
        let errors = String::from_utf8_lossy(&ended.stderr);
        ensure!(
            ended.code == 0,
            "{script:?} ends with {}: {errors}\n{}",
            ended.code,
            self.console()
        );
        Ok(String::from_utf8(ended.stdout)?)
    }

    /// How a command there ends.
    pub fn run(&self, command: &Command, limit: Duration) -> anyhow::Result<Ended> {
        Ok(self.vm.run(command, limit)?)
    }

    /// It swaps there from now on.
    pub fn swap_on(&self, device: &Path) -> anyhow::Result<()> {
        let device = device.display();
        self.shell(&format!("mkswap {device} && swapon --discard {device}"))
            .map(drop)
    }

    pub fn swapped(&self) -> anyhow::Result<Swapped> {
        let text = self.shell("cat /proc/vmstat")?;
        let of = |name: &str| -> anyhow::Result<u64> {
            let line = text
                .lines()
                .find_map(|line| line.strip_prefix(name))
                .context("no such counter")?;
            Ok(line.trim().parse()?)
        };
        Ok(Swapped {
            out: of("pswpout ")?,
            back: of("pswpin ")?,
        })
    }

    /// What its kernel and the programs have said.
    pub fn console(&self) -> String {
        let bytes = std::fs::read(self.vm.record().console()).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The programs go on while `trouble` happens, which is given a way to wait until each has compared so many pages more. Then all that they
    /// have is compared, and the kernel has complained of nothing.
    pub fn load(
        &self,
        load: Load,
        trouble: impl FnOnce(&Watch<'_>) -> anyhow::Result<()>,
    ) -> anyhow::Result<Swapped> {
        let before = self.swapped()?;
        let Load {
            programs,
            mib,
            seconds,
        } = load;
        let argv = [programs, mib, seconds, 1].map(|number| number.to_string());
        let command = Command::new(
            [self.pager.path("pager").display().to_string()]
                .into_iter()
                .chain(argv),
        );
        let limit = Duration::from_secs(seconds.into()) + LAST_LOOK;
        let ended = std::thread::scope(|scope| {
            let running = scope.spawn(|| self.vm.run(&command, limit));
            let is_over = || running.is_finished();
            let watch = Watch {
                machine: self,
                is_over: &is_over,
                last: RefCell::new((vec![0; programs as usize], Instant::now())),
            };
            // Who is late to say so would hide that nothing went on.
            let watched = trouble(&watch).and_then(|()| watch.to_the_end());
            if watched.is_err() {
                // The command ends with its machine.
                let _ = self.vm.record().process.kill(rustix::process::Signal::KILL);
            }
            let ended = running.join().expect("it does not panic");
            watched.map(|()| ended)
        });
        let ended = ended.with_context(|| format!("the console says:\n{}", self.console()))??;
        let said = String::from_utf8_lossy(&ended.stdout);
        let errors = String::from_utf8_lossy(&ended.stderr);
        ensure!(
            ended.code == 0,
            "it ends with {}: {errors}\n{}",
            ended.code,
            self.console()
        );
        let kernel = self.shell("dmesg")?;
        for complaint in COMPLAINTS {
            ensure!(!kernel.contains(complaint), "{complaint}:\n{kernel}");
        }
        let after = self.swapped()?;
        let swapped = Swapped {
            out: after.out - before.out,
            back: after.back - before.back,
        };
        eprintln!("{load:?}: {}, {swapped:?}", said.trim());
        Ok(swapped)
    }
}

/// Sees that all programs go on.
pub struct Watch<'a> {
    machine: &'a Machine,
    is_over: &'a dyn Fn() -> bool,
    /// What each had compared when all had more than before, and when that was.
    last: RefCell<(Vec<u64>, Instant)>,
}

impl Watch<'_> {
    /// Until `is_so`, and no longer than they go on.
    pub fn until(&self, what: &str, mut is_so: impl FnMut() -> anyhow::Result<bool>) -> anyhow::Result<()> {
        while !is_so()? {
            ensure!(
                !(self.is_over)(),
                "the programs have ended before this was so: {what}"
            );
            self.look()?;
            std::thread::sleep(Duration::from_millis(200));
        }
        Ok(())
    }

    /// Until each has compared so many pages more.
    pub fn go_on(&self, pages: u64) -> anyhow::Result<()> {
        let goal: Vec<_> = self.compared().into_iter().map(|count| count + pages).collect();
        self.until("pages are compared", || {
            Ok(self
                .compared()
                .into_iter()
                .zip(&goal)
                .all(|(count, goal)| count >= *goal))
        })
    }

    fn to_the_end(&self) -> anyhow::Result<()> {
        while !(self.is_over)() {
            self.look()?;
            std::thread::sleep(Duration::from_millis(200));
        }
        Ok(())
    }

    fn compared(&self) -> Vec<u64> {
        compared(&self.machine.console()).unwrap_or_else(|| self.last.borrow().0.clone())
    }

    fn look(&self) -> anyhow::Result<()> {
        let counts = self.compared();
        let mut last = self.last.borrow_mut();
        // Who has ended compares no more, and the others may take their time.
        if counts.iter().zip(&last.0).any(|(now, before)| now > before) {
            *last = (counts, Instant::now());
        }
        ensure!(
            last.1.elapsed() < STILL,
            "no page was compared for {STILL:?}: {:?}",
            last.0
        );
        Ok(())
    }
}
