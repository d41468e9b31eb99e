//! Colours, for terminals that have them.

/// The colours in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Colour {
    /// The terminal's own.
    Plain,
    /// All is well.
    Green,
    /// Something is not; the service blackout.
    Red,
    /// The communication blackout.
    Yellow,
    /// Data.
    Cyan,
}

impl Colour {
    fn code(self) -> u8 {
        match self {
            Self::Plain => 39,
            Self::Green => 32,
            Self::Red => 31,
            Self::Yellow => 33,
            Self::Cyan => 36,
        }
    }
}

/// Whether to colour.
#[derive(Debug, Clone, Copy)]
pub struct Paint(pub bool);

impl Paint {
    /// In that colour.
    pub fn colour(self, colour: Colour, text: &str) -> String {
        self.escape(&colour.code().to_string(), text)
    }

    /// In that colour and bold.
    pub fn bold(self, colour: Colour, text: &str) -> String {
        self.escape(&format!("1;{}", colour.code()), text)
    }

    /// In the background.
    pub fn dim(self, text: &str) -> String {
        self.escape("2", text)
    }

    fn escape(self, code: &str, text: &str) -> String {
        if self.0 && !text.trim().is_empty() {
            format!("\u{1b}[{code}m{text}\u{1b}[0m")
        } else {
            text.to_owned()
        }
    }
}
