//! A command line of QEMU in parts that can be changed: options, and the parameters in their values.

use serde_json::{Map, Value};

/// An option, with its value if it has one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Word {
    /// The option's name, with one dash.
    pub name: String,
    pub value: Option<String>,
}

impl Word {
    pub fn new(name: &str, value: impl ToString) -> Self {
        Self {
            name: name.to_owned(),
            value: Some(value.to_string()),
        }
    }

    /// The parameters, if the option has this name.
    pub fn params(&self, name: &str) -> Option<Params> {
        (self.name == name)
            .then(|| self.value.as_deref().map(Params::parse))
            .flatten()
    }
}

/// Splits a line into words.
pub(super) fn words(line: &[String]) -> Vec<Word> {
    let mut words: Vec<Word> = Vec::new();
    let mut line = line.iter().peekable();
    while let Some(word) = line.next() {
        let name = match word.strip_prefix("--") {
            Some(name) => format!("-{name}"),
            None => word.clone(),
        };
        let value = match name.starts_with('-') {
            true => line.next_if(|value| !value.starts_with('-') || value.as_str() == "-"),
            false => None,
        };
        words.push(Word {
            name,
            value: value.cloned(),
        });
    }
    words
}

/// Joins the words to a line.
pub(super) fn joined(words: &[Word]) -> Vec<String> {
    let words = words.iter();
    words
        .flat_map(|word| std::iter::once(word.name.clone()).chain(word.value.clone()))
        .collect()
}

/// The value of an option: `virtio-blk,drive=a`, or the same as JSON.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Params {
    /// Values with their keys; a value without a key is a kind, or a switch.
    Plain(Vec<(Option<String>, String)>),
    Json(Map<String, Value>),
}

impl Params {
    pub fn parse(value: &str) -> Self {
        if value.starts_with('{')
            && let Ok(Value::Object(map)) = serde_json::from_str(value)
        {
            return Self::Json(map);
        }
        let mut parts = vec![String::new()];
        let mut letters = value.chars().peekable();
        while let Some(letter) = letters.next() {
            match letter {
                ',' if letters.next_if_eq(&',').is_none() => parts.push(String::new()),
                letter => parts.last_mut().expect("there is one").push(letter),
            }
        }
        let keyed = parts.into_iter().map(|part| match part.split_once('=') {
            Some((key, value)) if is_key(key) => (Some(key.to_owned()), value.to_owned()),
            _ => (None, part),
        });
        Self::Plain(keyed.collect())
    }

    /// The kind: the first part, or the value of one of these keys.
    pub fn kind(&self, keys: &[&str]) -> String {
        match self {
            Self::Plain(parts) if parts.first().is_some_and(|(key, _)| key.is_none()) => parts[0].1.clone(),
            _ => keys.iter().find_map(|key| self.get(key)).unwrap_or_default(),
        }
    }

    pub fn get(&self, name: &str) -> Option<String> {
        match self {
            Self::Plain(parts) => parts
                .iter()
                .rev()
                .find(|(key, _)| key.as_deref() == Some(name))
                .map(|(_, value)| value.clone()),
            Self::Json(map) => map.get(name).map(|value| match value {
                Value::String(text) => text.clone(),
                other => other.to_string(),
            }),
        }
    }

    pub fn set(&mut self, name: &str, value: &str) {
        self.retain(|key| key != name);
        match self {
            Self::Plain(parts) => parts.push((Some(name.to_owned()), value.to_owned())),
            Self::Json(map) => {
                map.insert(name.to_owned(), Value::String(value.to_owned()));
            }
        }
    }

    /// Keeps the parts with one of these keys, or without a key.
    pub fn retain(&mut self, keeps: impl Fn(&str) -> bool) {
        match self {
            Self::Plain(parts) => parts.retain(|(key, _)| key.as_deref().is_none_or(&keeps)),
            Self::Json(map) => map.retain(|key, _| keeps(key)),
        }
    }
}

/// Whether this text can be a key before `=`, and is no part of a path or a URI.
fn is_key(text: &str) -> bool {
    let is_part = |letter: char| letter.is_ascii_alphanumeric() || "-_.[]".contains(letter);
    !text.is_empty() && text.chars().all(is_part)
}

impl std::fmt::Display for Params {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Json(map) => to.write_str(&Value::Object(map.clone()).to_string()),
            Self::Plain(parts) => {
                for (number, (key, value)) in parts.iter().enumerate() {
                    if number > 0 {
                        to.write_str(",")?;
                    }
                    if let Some(key) = key {
                        write!(to, "{key}=")?;
                    }
                    to.write_str(&value.replace(',', ",,"))?;
                }
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_the_same_when_it_is_put_together_again() {
        let line = [
            "-drive",
            "file=/a,,b,format=raw,if=none,id=d",
            "-nographic",
            "-device",
            r#"{"driver":"virtio-blk-pci","drive":"d","addr":5}"#,
            "-device",
            "virtio-net,netdev=n,disable-modern",
        ]
        .map(str::to_owned);
        let mut taken = words(&line);
        assert_eq!(joined(&taken), line);
        let drive = taken[0].params("-drive").unwrap();
        assert_eq!(drive.get("file").unwrap(), "/a,b");
        assert_eq!(drive.to_string(), line[1]);
        let json = taken[2].params("-device").unwrap();
        assert_eq!(
            (json.kind(&["driver"]), json.get("addr").unwrap()),
            ("virtio-blk-pci".to_owned(), "5".to_owned())
        );
        let mut card = taken[3].params("-device").unwrap();
        assert_eq!(card.kind(&["driver"]), "virtio-net");
        card.set("addr", "03.0");
        taken[3].value = Some(card.to_string());
        assert_eq!(joined(&taken)[6], "virtio-net,netdev=n,disable-modern,addr=03.0");
    }
}
