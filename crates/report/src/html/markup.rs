//! Elements and escapes.

/// Text as the content of an element or as a quoted attribute. Control characters, which HTML forbids, become spaces.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\n' | '\t' => out.push(letter),
            letter if letter.is_control() => out.push(' '),
            letter => out.push(letter),
        }
    }
    out
}

/// An element with its attributes and content, which must be markup already.
pub fn tag(name: &str, attributes: &str, content: &str) -> String {
    let space = if attributes.is_empty() { "" } else { " " };
    format!("<{name}{space}{attributes}>{content}</{name}>\n")
}

#[cfg(test)]
pub mod testing {
    /// Elements without an end.
    const VOID: [&str; 1] = ["meta"];

    /// Panics unless every element ends where it must, and every attribute is quoted.
    pub fn check(page: &str) {
        let mut open: Vec<&str> = Vec::new();
        let page = page
            .strip_prefix("<!doctype html>")
            .expect("it begins with a doctype");
        let (before, style) = page.split_once("<style>").expect("it has a style");
        let (_, after) = style.split_once("</style>").expect("its style ends");
        for part in [before, after] {
            let mut rest = part;
            while let Some((_, tail)) = rest.split_once('<') {
                let (tag, tail) = tail.split_once('>').expect("every tag ends");
                rest = tail;
                assert!(!tag.contains('<'), "a tag in a tag: {tag}");
                assert_eq!(
                    tag.matches('"').count() % 2,
                    0,
                    "an attribute is not closed: {tag}"
                );
                if let Some(name) = tag.strip_prefix('/') {
                    assert_eq!(
                        open.pop(),
                        Some(name),
                        "</{name}> ends another element; open are {open:?}"
                    );
                    continue;
                }
                let name = tag.split([' ', '/']).next().unwrap();
                if !tag.ends_with('/') && !VOID.contains(&name) {
                    open.push(name);
                }
            }
        }
        assert_eq!(open, Vec::<&str>::new(), "left open");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markup_becomes_text() {
        assert_eq!(
            escape("<a href=\"x\">&'\u{7}\n"),
            "&lt;a href=&quot;x&quot;&gt;&amp;&#39; \n"
        );
    }

    #[test]
    #[should_panic(expected = "ends another element")]
    fn the_checker_finds_a_wrong_end() {
        testing::check("<!doctype html><style></style><p><b></p></b>");
    }
}
