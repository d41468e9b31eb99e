//! What happens now, on standard error: a line that changes on a terminal, plain lines elsewhere.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Tells what happens.
#[derive(Debug, Clone)]
pub struct Progress {
    /// Hidden where standard error is no terminal.
    bar: ProgressBar,
    begun: Instant,
}

impl Progress {
    /// Begins now.
    pub fn new() -> Self {
        let style = ProgressStyle::with_template("{spinner} {msg}  {prefix}").expect("a valid template");
        let bar = ProgressBar::new_spinner().with_style(style);
        bar.enable_steady_tick(Duration::from_millis(100));
        Self {
            bar,
            begun: Instant::now(),
        }
    }

    /// Something has happened; the line stays.
    pub fn step(&self, text: &str) {
        let line = format!("{:6.1} s  {text}", self.begun.elapsed().as_secs_f64());
        if self.bar.is_hidden() {
            eprintln!("{line}")
        } else {
            self.bar.println(line)
        }
    }

    /// Something is going on; shown until something else is.
    pub fn now(&self, text: &str) {
        self.bar.set_message(text.to_owned());
    }

    /// How fast data flows now, in bits per second; `None` when nobody measures.
    pub fn rate(&self, bits: Option<f64>) {
        self.bar.set_prefix(bits.map(gigabits).unwrap_or_default());
    }

    /// Nothing more will be told.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// "11.9 Gbit/s".
pub fn gigabits(bits: f64) -> String {
    format!("{:.1} Gbit/s", bits / 1e9)
}
