//! Each step's outcome, for people and for the file.

use std::collections::BTreeMap;
use std::time::Instant;

use serde::Serialize;
use serde_json::Value;

use super::facts::Facts;

/// How all of it went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    Works,
    Fails,
}

/// A step, and how it went.
#[derive(Debug, Serialize)]
struct Step {
    name: String,
    outcome: Outcome,
    ms: Option<f64>,
    error: Option<String>,
    /// What to do.
    remedy: Option<String>,
}

/// What is in the file.
#[derive(Debug, Serialize)]
pub struct SelfTest {
    /// Its name.
    pub device: String,
    /// Of the machine.
    pub facts: Facts,
    steps: Vec<Step>,
    /// The migration's report.
    pub migration: Option<Value>,
    /// Where something failed.
    pub logs: BTreeMap<String, String>,
    #[serde(skip)]
    tells: bool,
}

impl SelfTest {
    /// Nothing is known yet. `tells`: each step is shown when it has ended.
    pub fn new(device: &str, tells: bool) -> Self {
        Self {
            device: device.to_owned(),
            facts: Facts::default(),
            steps: Vec::new(),
            migration: None,
            logs: BTreeMap::new(),
            tells,
        }
    }

    /// Does a step; what it gave, unless it failed.
    pub async fn step<T>(
        &mut self,
        name: &str,
        remedy: &str,
        work: impl Future<Output = anyhow::Result<T>>,
    ) -> Option<T> {
        let begun = Instant::now();
        let result = work.await;
        let ms = Some(begun.elapsed().as_secs_f64() * 1000.0);
        match result {
            Ok(value) => {
                self.passed(name, ms);
                Some(value)
            }
            Err(error) => {
                self.failed(name, remedy, format!("{error:#}"), ms);
                None
            }
        }
    }

    /// A step went well.
    pub fn passed(&mut self, name: &str, ms: Option<f64>) {
        self.ended(Step {
            name: name.to_owned(),
            outcome: Outcome::Works,
            ms,
            error: None,
            remedy: None,
        });
    }

    /// It did not.
    pub fn failed(&mut self, name: &str, remedy: &str, error: String, ms: Option<f64>) {
        self.ended(Step {
            name: name.to_owned(),
            outcome: Outcome::Fails,
            ms,
            error: Some(error),
            remedy: Some(remedy.to_owned()),
        });
    }

    /// Whatever was under way was given up.
    pub fn broken_off(&mut self, why: String) {
        self.failed(
            "all",
            "the agents' logs are in the file; a slow machine may need more time",
            why,
            None,
        );
    }

    fn ended(&mut self, step: Step) {
        if self.tells {
            print!("{}", line(&step));
        }
        self.steps.push(step);
    }

    /// How it went so far.
    pub fn outcome(&self) -> Outcome {
        match self.steps.iter().all(|step| step.outcome == Outcome::Works) {
            true => Outcome::Works,
            false => Outcome::Fails,
        }
    }

    /// In a line.
    pub fn verdict(&self) -> String {
        let device = &self.device;
        match self.outcome() {
            Outcome::Works => format!("programs with {device} can be moved from this machine and to it"),
            Outcome::Fails => format!("this does not show that programs with {device} can be moved"),
        }
    }

    /// For the file.
    pub fn json(&self) -> serde_json::Result<String> {
        let mut value = serde_json::to_value(self)?;
        value["outcome"] = serde_json::to_value(self.outcome())?;
        Ok(format!("{}\n", serde_json::to_string_pretty(&value)?))
    }
}

fn line(step: &Step) -> String {
    let ms = step.ms.map_or(String::new(), |ms| format!("{ms:9.0} ms"));
    let word = match step.outcome {
        Outcome::Works => "works",
        Outcome::Fails => "FAILS",
    };
    let mut text = format!("{:20} {word} {ms}\n", step.name);
    for (what, words) in [("", &step.error), ("to do: ", &step.remedy)] {
        if let Some(words) = words {
            text.push_str(&format!("    {what}{words}\n"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_step_that_fails_is_told_with_what_to_do() {
        let mut test = SelfTest::new("rxe0", false);
        assert_eq!(test.step("one", "nothing", async { Ok(3) }).await, Some(3));
        assert_eq!(test.outcome(), Outcome::Works);
        let failed = test.step::<()>("two", "look", async { anyhow::bail!("broken") });
        assert_eq!(failed.await, None);
        let value: Value = serde_json::from_str(&test.json().unwrap()).unwrap();
        assert_eq!(value["outcome"], "fails");
        assert_eq!(value["steps"][0]["outcome"], "works");
        assert_eq!(value["steps"][1]["error"], "broken");
        let text = line(&test.steps[1]);
        assert!(
            text.contains("FAILS") && text.contains("    to do: look\n"),
            "{text}"
        );
        assert!(test.verdict().contains("does not show"));
    }
}
