//! Parts of the host that a command line names: files, sockets, processors, links.

use std::path::PathBuf;

use super::Arguments;

/// Options whose files QEMU only reads.
const READ_ONLY: &[&str] = &[
    "-kernel",
    "-initrd",
    "-dtb",
    "-bios",
    "-cdrom",
    "-L",
    "-fw_cfg",
    "-acpitable",
    "-smbios",
    "-readconfig",
];

impl Arguments {
    /// Existing files that are named by absolute paths: disks and images, with whether QEMU may have to write
    /// to each.
    pub fn files(&self) -> Vec<(PathBuf, bool)> {
        let mut files: Vec<(PathBuf, bool)> = Vec::new();
        let mut option = "";
        for word in &self.rest {
            if word.starts_with('-') {
                option = word;
                continue;
            }
            for path in paths(word).into_iter().filter(|path| path.exists()) {
                let writes = !READ_ONLY.contains(&option);
                match files.iter_mut().find(|(known, _)| *known == path) {
                    Some((_, written)) => *written |= writes,
                    None => files.push((path, writes)),
                }
            }
        }
        files
    }

    /// The values of an option.
    fn values<'a>(&'a self, option: &'a str) -> impl Iterator<Item = &'a str> {
        let pairs = self.rest.windows(2);
        let named =
            pairs.filter(move |pair| pair[0].trim_start_matches('-') == option && pair[0].starts_with('-'));
        named.map(|pair| pair[1].as_str())
    }

    /// The value of `-cpu`.
    pub(crate) fn cpu(&self) -> Option<&str> {
        self.values("cpu").last()
    }

    /// A machine of the same type with the same processors and without devices, which stops before its first
    /// instruction.
    pub(crate) fn bare(&self) -> Vec<String> {
        let accelerators = self
            .properties
            .split(',')
            .filter(|part| part.starts_with("accel="));
        let properties: String = accelerators.map(|part| format!(",{part}")).collect();
        let mut line = vec!["-machine".to_owned(), format!("{}{properties}", self.machine())];
        for option in ["accel", "cpu"] {
            for value in self.values(option) {
                line.extend([format!("-{option}"), value.to_owned()]);
            }
        }
        let has = |option: &str| {
            self.rest
                .iter()
                .any(|word| word.trim_start_matches('-') == option)
        };
        line.extend(has("enable-kvm").then(|| "-enable-kvm".to_owned()));
        let nothing = [
            "-m",
            "32",
            "-S",
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-serial",
            "none",
        ];
        line.extend(nothing.map(str::to_owned));
        line
    }

    /// A key for the answer of [`Arguments::offered`]: equal keys have equal answers.
    pub fn asked(&self) -> Vec<String> {
        let mut asked = self.bare();
        asked.push(self.program.clone());
        asked
    }

    /// Whether it has a tap network.
    pub fn has_tap(&self) -> bool {
        let mut networks = self.values("netdev").chain(self.values("nic"));
        networks.any(|value| value.starts_with("tap"))
    }

    /// Unix sockets of its TPMs.
    pub fn tpm_sockets(&self) -> Vec<PathBuf> {
        let part = |value: &str, name: &str| {
            let mut parts = value.split(',').filter_map(|part| part.split_once('='));
            parts.find_map(|(key, value)| (key == name).then(|| value.to_owned()))
        };
        let tpms = self
            .values("tpmdev")
            .filter(|value| value.starts_with("emulator"));
        let names: Vec<_> = tpms.filter_map(|value| part(value, "chardev")).collect();
        let sockets = self.values("chardev").filter(|value| value.starts_with("socket"));
        let sockets = sockets.filter(|value| part(value, "id").is_some_and(|id| names.contains(&id)));
        sockets
            .filter_map(|value| part(value, "path"))
            .map(PathBuf::from)
            .collect()
    }

    /// The greatest MTU that one of its cards promises to its guest (`host_mtu=`).
    pub fn promised_mtu(&self) -> Option<u32> {
        let parts = self.values("device").flat_map(|value| value.split(','));
        let promised =
            parts.filter_map(|part| part.strip_prefix("host_mtu=").or(part.strip_prefix("host-mtu=")));
        promised.filter_map(|mtu| mtu.parse().ok()).max()
    }
}

/// The absolute paths in the value of an option. Each begins the value, or follows `=`, `:` or a quotation
/// mark (`file=/a`, `json:{"filename":"/a"}`, `nbd+unix:///?socket=/a`), and ends at a single comma, or at
/// the other quotation mark.
pub(crate) fn paths(value: &str) -> Vec<PathBuf> {
    // No path contains this character (QEMU takes its words from C strings).
    const COMMA: char = '\0';
    let value = value.replace(",,", &COMMA.to_string());
    let mut found = Vec::new();
    let mut before = '=';
    for (at, letter) in value.char_indices() {
        if letter == '/' && matches!(before, '=' | ':' | '"' | ',') {
            let end = match before {
                '"' => '"',
                _ => ',',
            };
            let path = value[at..].split(end).next().unwrap_or_default();
            found.push(PathBuf::from(path.replace(COMMA, ",")));
        }
        before = letter;
    }
    found
}
