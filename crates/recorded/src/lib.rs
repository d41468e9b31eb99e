//! Recorded messages: what a release that is out sends, this one must still understand, byte for byte.
//!
//! Each contract has a text file in `recorded/`. A line is the version in which a form came, its name, and its bytes in hex.
//! A test goes through the types of the contract ([`Recording::check`]), so that a variant which is not in the file fails, as does
//! one whose bytes are others than those in the file, and a line that no type has any more. `docs/versions.md` says what
//! is to be done then. `RECORD_MESSAGES=1` adds what is missing, and changes nothing that a release has sent.
//!
//! Only tests use this.

mod sampler;

pub use sampler::{Sample, Unsupported, samples};

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// The variable that has new messages added.
pub const VARIABLE: &str = "RECORD_MESSAGES";

/// The line of a file that says up to which version there are releases.
const RELEASED: &str = "# released: ";

#[derive(Debug, Clone, PartialEq, Eq)]
struct Line {
    version: u32,
    content: String,
    seen: bool,
}

/// What a side of an earlier release does with something more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum More {
    /// It passes over it.
    IsUnderstood,
    /// It does not understand the message.
    NeedsAVersion,
}

/// The recorded messages of one contract.
pub struct Recording {
    path: PathBuf,
    /// Comments at the top of the file.
    head: String,
    released: u32,
    version: u32,
    /// It may be written to.
    records: bool,
    /// By name, in the order of the file.
    lines: BTreeMap<String, Line>,
    order: Vec<String>,
    wrong: Vec<String>,
}

impl Recording {
    /// Reads the file, which is to have the messages up to this version of the contract.
    ///
    /// # Panics
    /// If it cannot be read, or is no such file: this is for tests.
    pub fn open(path: impl AsRef<Path>, version: u32) -> Self {
        let records = std::env::var_os(VARIABLE).is_some();
        let path = path.as_ref();
        let text = std::fs::read_to_string(path)
            .unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()));
        Self::of(path, &text, version, records).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    fn of(path: &Path, text: &str, version: u32, records: bool) -> Result<Self, String> {
        let mut recording = Self {
            path: path.to_owned(),
            head: String::new(),
            released: 0,
            version,
            records,
            lines: BTreeMap::new(),
            order: Vec::new(),
            wrong: Vec::new(),
        };
        let mut released = None;
        for (number, line) in (1..).zip(text.lines()) {
            if line.starts_with('#') {
                if let Some(version) = line.strip_prefix(RELEASED) {
                    released = Some(version.trim().parse().map_err(|_| format!("line {number}"))?);
                }
                writeln!(recording.head, "{line}").expect("a text takes everything");
                continue;
            }
            let mut parts = line.splitn(3, ' ');
            let parsed = (|| {
                let version = parts.next()?.parse().ok()?;
                let name = parts.next()?.to_owned();
                let content = parts.next().unwrap_or_default().to_owned();
                Some((name, version, content))
            })();
            let (name, version, content) =
                parsed.ok_or_else(|| format!("line {number} is not `VERSION NAME CONTENT`"))?;
            let line = Line {
                version,
                content,
                seen: false,
            };
            if recording.lines.insert(name.clone(), line).is_some() {
                return Err(format!("{name} is there twice"));
            }
            recording.order.push(name);
        }
        recording.released = released.ok_or_else(|| format!("there is no line `{RELEASED}VERSION`"))?;
        Ok(recording)
    }

    /// Checks a type in postcard's encoding: each variant of it, and of what is within it.
    pub fn check<T: Serialize + DeserializeOwned>(&mut self, name: &str) {
        let samples = match samples::<T>() {
            Ok(samples) => samples,
            Err(error) => return self.wrong.push(format!("{name} has no samples: {error}")),
        };
        for sample in samples {
            let name = match sample.name.is_empty() {
                true => name.to_owned(),
                false => format!("{name}.{}", sample.name),
            };
            match postcard::to_stdvec(&sample.value) {
                Ok(bytes) => self.check_bytes(&name, &bytes, |recorded| {
                    let again =
                        postcard::from_bytes::<T>(recorded).and_then(|value| postcard::to_stdvec(&value));
                    again.map_err(|error| error.to_string())
                }),
                Err(error) => self.wrong.push(format!("{name} cannot be encoded: {error}")),
            }
        }
    }

    /// Checks bytes that are made otherwise: `again` decodes those that are recorded, and encodes what it has understood.
    pub fn check_bytes(
        &mut self,
        name: &str,
        bytes: &[u8],
        again: impl FnOnce(&[u8]) -> Result<Vec<u8>, String>,
    ) {
        let content = hex(bytes);
        if !self.check_text(name, &content) {
            return;
        }
        match again(bytes) {
            Ok(same) if same == bytes => {}
            Ok(_) => self
                .wrong
                .push(format!("{name} is encoded otherwise after it was decoded")),
            Err(error) => self
                .wrong
                .push(format!("{name} is not understood any more: {error}")),
        }
    }

    /// Checks what is recorded as text, without a line break. Whether it is as recorded.
    pub fn check_text(&mut self, name: &str, content: &str) -> bool {
        self.compare(name, content, More::NeedsAVersion)
    }

    /// The same of something to which more of its kind may be added without a new version: a field of a protobuf message.
    pub fn check_field(&mut self, name: &str, content: &str) -> bool {
        self.compare(name, content, More::IsUnderstood)
    }

    /// Checks a type in JSON: what is recorded must be understood, and nothing of it may be lost. A field that older records lack
    /// may be added, and is recorded beside them.
    pub fn check_json<T: Serialize + DeserializeOwned>(&mut self, name: &str) {
        let samples = match samples::<T>() {
            Ok(samples) => samples,
            Err(error) => return self.wrong.push(format!("{name} has no samples: {error}")),
        };
        for sample in samples {
            let name = format!("{name}.{}", sample.name);
            let content = match serde_json::to_string(&sample.value) {
                Ok(content) => content,
                Err(error) => {
                    self.wrong.push(format!("{name} cannot be written: {error}"));
                    continue;
                }
            };
            let forms: Vec<_> = (1..)
                .map(|number| format!("{name}#{number}"))
                .take_while(|form| self.lines.contains_key(form))
                .collect();
            let mut is_recorded = false;
            for form in &forms {
                let recorded = self.recorded(form).expect("it is there");
                is_recorded |= recorded == content;
                if let Err(error) = keeps::<T>(&recorded) {
                    self.wrong.push(format!(
                        "{form}, which a release has written, {error}: give new fields a default, and keep the others \
                         (docs/versions.md)\n    recorded {recorded}\n    now      {content}"
                    ));
                }
            }
            if !is_recorded {
                self.missing(
                    format!("{name}#{}", forms.len() + 1),
                    &content,
                    More::IsUnderstood,
                );
            }
        }
    }

    fn compare(&mut self, name: &str, content: &str, more: More) -> bool {
        let name = name.replace(' ', "_");
        let version = self.version;
        let Some(line) = self.lines.get_mut(&name) else {
            self.missing(name, content, more);
            return true;
        };
        line.seen = true;
        if line.content == content {
            return true;
        }
        if self.records && line.version > self.released {
            // No release has sent it.
            *line = Line {
                version,
                content: content.to_owned(),
                seen: true,
            };
            return true;
        }
        let (since, recorded) = (line.version, line.content.clone());
        self.wrong.push(format!(
            "{name} has changed, which releases with version {since} send and take: raise VERSION, and keep the older form for \
             version {since} (docs/versions.md)\n    recorded {recorded}\n    now      {content}"
        ));
        false
    }

    /// What is recorded under a name, if anything; it counts as known.
    fn recorded(&mut self, name: &str) -> Option<String> {
        let line = self.lines.get_mut(name)?;
        line.seen = true;
        Some(line.content.clone())
    }

    fn missing(&mut self, name: String, content: &str, more: More) {
        let (version, released) = (self.version, self.released);
        if version <= released && more == More::NeedsAVersion {
            self.wrong.push(format!(
                "{name} is new, and releases with version {version} do not know it: raise VERSION, and send it to nobody who \
                 speaks an older one (docs/versions.md)"
            ));
            return;
        }
        if !self.records {
            self.wrong.push(format!(
                "{name} is not recorded: `{VARIABLE}=1` adds it (docs/versions.md)"
            ));
            return;
        }
        let line = Line {
            version,
            content: content.to_owned(),
            seen: true,
        };
        self.lines.insert(name.clone(), line);
        self.order.push(name);
    }

    /// Fails if anything is wrong; writes what was added.
    ///
    /// # Panics
    /// With all that is wrong: this is for tests.
    pub fn finish(mut self) {
        if let Err(wrong) = self.conclude() {
            panic!("{}:\n  {wrong}", self.path.display());
        }
    }

    fn conclude(&mut self) -> Result<(), String> {
        let gone = self.lines.iter().filter(|(_, line)| !line.seen);
        let (unreleased, gone): (Vec<_>, Vec<_>) = gone.partition(|(_, line)| line.version > self.released);
        let unreleased: Vec<_> = unreleased.into_iter().map(|(name, _)| name.clone()).collect();
        self.wrong.extend(gone.into_iter().map(|(name, line)| {
            format!(
                "{name} is gone, which releases with version {} send: raise VERSION, and keep the older form for version {} \
                 (docs/versions.md)",
                line.version, line.version
            )
        }));
        for name in unreleased {
            match self.records {
                true => drop(self.lines.remove(&name)),
                false => self
                    .wrong
                    .push(format!("{name} is gone: `{VARIABLE}=1` takes it out")),
            }
        }
        if !self.wrong.is_empty() {
            return Err(self.wrong.join("\n  "));
        }
        if self.records {
            let lines = self
                .order
                .iter()
                .filter_map(|name| Some((name, self.lines.get(name)?)));
            let lines = lines.map(|(name, line)| format!("{} {name} {}", line.version, line.content));
            let text = lines.fold(self.head.clone(), |text, line| text + line.trim_end() + "\n");
            std::fs::write(&self.path, text)
                .map_err(|error| format!("cannot write {}: {error}", self.path.display()))?;
        }
        Ok(())
    }
}

/// Whether a recorded value is understood, and all of it is kept.
fn keeps<T: Serialize + DeserializeOwned>(recorded: &str) -> Result<(), String> {
    let value: T = serde_json::from_str(recorded).map_err(|error| format!("is not understood ({error})"))?;
    let before = serde_json::from_str(recorded).map_err(|error| format!("is no JSON ({error})"))?;
    let after = serde_json::to_value(value).map_err(|error| format!("cannot be written ({error})"))?;
    match contains(&after, &before) {
        true => Ok(()),
        false => Err("loses something".to_owned()),
    }
}

/// Whether `whole` has all of `part`; objects may have more.
fn contains(whole: &Value, part: &Value) -> bool {
    match (whole, part) {
        (Value::Object(whole), Value::Object(part)) => part
            .iter()
            .all(|(key, part)| whole.get(key).is_some_and(|whole| contains(whole, part))),
        (Value::Array(whole), Value::Array(part)) => {
            let pairs = || whole.iter().zip(part);
            whole.len() == part.len() && pairs().all(|(whole, part)| contains(whole, part))
        }
        (whole, part) => whole == part,
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
            write!(text, "{byte:02x}").expect("a text takes everything");
            text
        })
}

#[cfg(test)]
mod tests;
