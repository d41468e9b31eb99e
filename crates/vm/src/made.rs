//! Files and sockets that QEMU would make, but cannot, since it sees the host's files read-only.

use std::path::{Path, PathBuf};

use crate::arguments::Arguments;

/// Folders of QEMU's own in its container.
const OWN: &[&str] = &["/tmp", "/dev/shm"];

/// Options whose value is a character device.
const CHARACTERS: &[&str] = &[
    "-serial",
    "-parallel",
    "-monitor",
    "-debugcon",
    "-chardev",
    "-gdb",
];

impl Arguments {
    /// Such files and sockets in the command line, with advice.
    pub fn unmade(&self) -> Vec<String> {
        let folders: Vec<PathBuf> = self
            .files()
            .into_iter()
            .filter(|(path, _)| path.is_dir())
            .map(|(path, _)| path)
            .collect();
        let may_make = |path: &Path| {
            OWN.iter().any(|own| path.starts_with(own))
                || folders
                    .iter()
                    .any(|folder| path != folder && path.starts_with(folder))
        };
        let mut found = Vec::new();
        for pair in self.rest().windows(2) {
            let (option, value) = (pair[0].replacen("--", "-", 1), &pair[1]);
            let Some((path, is_socket)) = made(&option, value).filter(|(path, _)| path.starts_with('/'))
            else {
                continue;
            };
            let path = Path::new(&path);
            // An existing file is shown to QEMU, which may write to it. A socket replaces an existing file.
            if may_make(path) || !is_socket && path.exists() {
                continue;
            }
            found.push(match is_socket {
                true => format!(
                    "`{option} {value}`: QEMU cannot make the socket {}, since it sees its host's files read-only: name \
                     one below /tmp, which is its own",
                    path.display()
                ),
                false => format!(
                    "`{option} {value}`: QEMU cannot make {}, since it sees its host's files read-only: make the file first, on both hosts or on \
                     storage that both reach, or name one below /tmp, which is its own and goes with it",
                    path.display()
                ),
            });
        }
        found
    }
}

/// The path that an option makes QEMU create, and whether it is a socket.
fn made(option: &str, value: &str) -> Option<(String, bool)> {
    let value = value.replace(",,", "\0");
    let parts: Vec<_> = value.split(',').collect();
    let part = |name: &str| {
        let mut named = parts
            .iter()
            .filter_map(|part| part.strip_prefix(name)?.strip_prefix('='));
        named.next()
    };
    let serves = parts.contains(&"server") || part("server") == Some("on");
    let text = |path: &str| path.replace('\0', ",");
    let kind = parts.first()?.strip_prefix("mon:").unwrap_or(parts[0]);
    match option {
        "-D" => Some((text(&value), false)),
        "-pidfile" => Some((text(&value), false)),
        "-vnc" => Some((text(kind.strip_prefix("unix:")?), true)),
        _ if !CHARACTERS.contains(&option) => None,
        _ => match (kind, kind.split_once(':')) {
            ("file", _) => Some((text(part("path")?), false)),
            ("socket", _) if serves => Some((text(part("path")?), true)),
            (_, Some(("file", path))) => Some((text(path), false)),
            (_, Some(("unix", path))) if serves => Some((text(path), true)),
            _ => None,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_made_is_named() {
        let of = |line: &str| {
            let words: Vec<_> = format!("qemu {line}").split(' ').map(str::to_owned).collect();
            Arguments::parse(&words).unwrap().unmade()
        };
        for named in [
            "-D /no/such/log",
            "-serial file:/no/such/log",
            "-chardev file,id=c,path=/no/such/log",
            "-chardev socket,id=c,path=/run/such.sock,server=on,wait=off",
            "-serial unix:/run/such.sock,server,nowait",
            "-serial mon:unix:/etc,server=on",
            "-vnc unix:/run/vnc",
        ] {
            let found = of(named);
            assert!(
                found.len() == 1 && found[0].contains(named) && found[0].contains("/tmp"),
                "{named}: {found:?}"
            );
        }
        for fine in [
            "-D /tmp/log",
            "-serial file:/etc/hostname",
            "-chardev socket,id=c,path=/run/such.sock",
            "-serial stdio",
            "-vnc :1",
            "-chardev socket,id=c,path=/tmp/s,server=on",
            "-serial file:here",
            "-virtfs local,path=/etc,mount_tag=t,security_model=none -chardev socket,id=c,path=/etc/s,server=on",
        ] {
            assert!(of(fine).is_empty(), "{fine}: {:?}", of(fine));
        }
    }
}
