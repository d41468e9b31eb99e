//! Volumes of an instance: local disks of this host's volume daemon (`docs/volumes.md`), as file systems in the container.
//!
//! The daemon makes a volume a block device for the instance alone. The agent mounts its file system on a folder of the host, and the
//! bundle binds that folder: so to CRIU it is an external mount, as all of a container's mounts are. The folder is made before the volume is
//! asked for and removed after it was given back. So whichever agent finds it knows what to give back.

use std::fs::File;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use serde::{Deserialize, Serialize};
use verbatim_container::Workload;
use verbatim_volume::control::{self, Order, Outcome, Row, is_nobody_there};

use super::record::Record;
use super::{Instance, freeze};

/// The daemon's socket, in the runtime folder.
pub const SOCKET_NAME: &str = "volumes.sock";

/// The folder of all instances' volumes, in the runtime folder.
const FOLDER: &str = "disks";

/// The file system that is mounted, and made where there is nothing.
const FILE_SYSTEM: &str = "ext4";

/// So long the daemon may take for an order.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// A container that ends lets go of its mounts a moment later.
const RELEASE_LIMIT: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(20);

/// Where nothing of a container's own may be mounted.
const TAKEN: [&str; 4] = ["/proc", "/sys", "/dev", "/run/verbatim"];

/// Where a container has folders of its own, in which a mount point is made.
const OWN: [&str; 2] = ["/tmp", "/run"];

/// A volume, and where the container has its file system.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mounted {
    /// The volume's name, on all hosts.
    pub volume: String,
    /// The folder inside.
    pub inside: PathBuf,
    /// Whether the container may write to it.
    pub writable: bool,
}

/// Reads `NAME:/PATH` or `NAME:/PATH:ro`.
fn parse_one(text: &str) -> anyhow::Result<Mounted> {
    let wrong = || format!("{text:?} is not a volume and a folder, such as db:/srv or db:/srv:ro");
    let (volume, rest) = text.split_once(':').with_context(wrong)?;
    let (inside, writable) = match rest.rsplit_once(':') {
        Some((inside, "ro")) => (inside, false),
        Some((inside, "rw")) => (inside, true),
        _ => (rest, true),
    };
    let inside = Path::new(inside);
    let is_plain = inside
        .components()
        .all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    ensure!(
        !volume.is_empty() && inside.is_absolute() && is_plain && inside.parent().is_some(),
        wrong()
    );
    if let Some(taken) = TAKEN.iter().find(|taken| inside.starts_with(taken)) {
        bail!("a volume cannot be mounted in {taken}: that is the container's own");
    }
    Ok(Mounted {
        volume: volume.to_owned(),
        // Without what says nothing: slashes at its end, and double ones.
        inside: inside.components().collect(),
        writable,
    })
}

/// Reads what was asked for.
pub fn parse(texts: &[String], is_machine: bool) -> anyhow::Result<Vec<Mounted>> {
    if is_machine && !texts.is_empty() {
        bail!("a virtual machine has no folders to mount a volume on; it reaches volumes by NBD");
    }
    let mut all: Vec<Mounted> = Vec::new();
    for text in texts {
        let one = parse_one(text)?;
        for other in &all {
            if other.volume == one.volume {
                bail!("the volume {} is named twice", one.volume);
            }
            if other.inside.starts_with(&one.inside) || one.inside.starts_with(&other.inside) {
                bail!(
                    "{} and {} lie one in the other",
                    other.inside.display(),
                    one.inside.display()
                );
            }
        }
        all.push(one);
    }
    Ok(all)
}

/// Mount points that a container on this host would lack.
pub fn lacking(record: &Record) -> Vec<String> {
    // Another bundle brings its own.
    let Workload::Command { .. } = &record.workload else {
        return Vec::new();
    };
    let wanted = record.volumes.iter().map(|mounted| &mounted.inside);
    let is_lacking = |inside: &&PathBuf| {
        let is_own = OWN.iter().any(|own| inside.starts_with(own));
        !is_own && !inside.is_dir()
    };
    let words = wanted.filter(is_lacking).map(|inside| {
        format!(
            "there is no folder {} to mount a volume on; the container sees this host's own folders, so make it, or take one in /run",
            inside.display()
        )
    });
    words.collect()
}

/// The volumes of one instance on this host.
#[derive(Debug, Clone)]
pub struct Disks {
    folder: PathBuf,
    socket: PathBuf,
}

impl Disks {
    /// Those of the instance `name` below the agent's runtime folder.
    pub fn new(runtime_dir: &Path, name: &str) -> Self {
        Self {
            folder: runtime_dir.join(FOLDER).join(name),
            socket: runtime_dir.join(SOCKET_NAME),
        }
    }

    /// Where a volume is mounted on this host.
    pub fn of(&self, volume: &str) -> PathBuf {
        self.folder.join(volume)
    }

    /// Takes these volumes, and mounts them. On an error none is left taken. `by`: they have come with the instance, in a session of that
    /// number, which is not decided yet.
    pub fn take(&self, instance: &str, volumes: &[Mounted], by: Option<u64>) -> anyhow::Result<()> {
        let taken = volumes
            .iter()
            .try_for_each(|mounted| self.take_one(instance, mounted, by));
        if taken.is_err()
            && let Err(error) = self.give_back()
        {
            tracing::warn!(
                instance,
                error = format!("{error:#}"),
                "a volume is not given back"
            );
        }
        taken
    }

    /// Makes the folders of these volumes, on which they will be mounted.
    pub fn expect(&self, volumes: &[Mounted]) -> anyhow::Result<()> {
        volumes
            .iter()
            .try_for_each(|mounted| self.make_folder(&mounted.volume).map(drop))
    }

    fn make_folder(&self, name: &str) -> anyhow::Result<PathBuf> {
        // What it is depends on the daemon: a name that leads elsewhere it does not know.
        ensure!(
            Path::new(name).components().count() == 1 && !name.contains('/') && name != "..",
            "{name:?} is no name of a volume"
        );
        let folder = self.of(name);
        std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        Ok(folder)
    }

    fn take_one(&self, instance: &str, mounted: &Mounted, by: Option<u64>) -> anyhow::Result<()> {
        let name = &mounted.volume;
        let folder = self.make_folder(name)?;
        let attach = Order::Attach {
            name: name.clone(),
            device: true,
            holder: Some(instance.to_owned()),
            by,
        };
        let row = self.row(&attach).with_context(|| format!("the volume {name}"))?;
        if row.holder.as_deref() != Some(instance) {
            bail!(
                "the volume daemon is of an earlier release, and lends volumes to nobody alone: start it again"
            );
        }
        let device = row
            .device
            .with_context(|| format!("the volume {name} is no block device"))?;
        if by.is_none() {
            make_file_system(&device, name)?;
        }
        let mode = match mounted.writable {
            true => MountFlags::empty(),
            false => MountFlags::RDONLY,
        };
        let flags = MountFlags::NOSUID | MountFlags::NODEV | mode;
        rustix::mount::mount(&device, &folder, FILE_SYSTEM, flags, None)
            .map_err(io::Error::from)
            .with_context(|| format!("cannot mount the volume {name} ({})", device.display()))
    }

    fn row(&self, order: &Order) -> anyhow::Result<Row> {
        match control::order_now(&self.socket, order, ANSWER_LIMIT)? {
            Outcome::Volumes(mut rows) if rows.len() == 1 => Ok(rows.remove(0)),
            other => bail!("the volume daemon answers {other:?}"),
        }
    }

    /// Unmounts them, and gives them back. Nothing if there are none.
    pub fn give_back(&self) -> anyhow::Result<()> {
        if !self.folder.exists() {
            return Ok(());
        }
        let instance = self.folder.file_name().and_then(|name| name.to_str());
        let instance = instance.context("no name of an instance")?;
        for folder in self.folders()? {
            // One that is frozen would not go. What its disk says is no matter any more.
            if let Err(error) = thaw(&folder) {
                tracing::debug!(error = format!("{error:#}"), "given back all the same");
            }
            unmount(&folder)?;
            let name = folder.file_name().and_then(|name| name.to_str());
            let name = name.context("no name of a volume")?;
            let detach = Order::Detach {
                name: name.to_owned(),
                holder: Some(instance.to_owned()),
            };
            self.insist(&detach)
                .with_context(|| format!("the volume {name}"))?;
            remove_folder(&folder)?;
        }
        remove_folder(&self.folder)
    }

    /// An error unless the instance has all of them, as far as their daemon knows.
    pub fn must_be_there(&self, instance: &str, volumes: &[Mounted]) -> anyhow::Result<()> {
        if volumes.is_empty() {
            return Ok(());
        }
        let rows = self.all()?;
        for mounted in volumes {
            let row = rows.iter().find(|row| row.name == mounted.volume);
            let holder = row.and_then(|row| row.holder.as_deref());
            ensure!(
                holder == Some(instance),
                "the volume {} there is lost: its daemon is not the one that it was",
                mounted.volume
            );
        }
        Ok(())
    }

    /// Why no volume can come to this host.
    pub fn lacking(&self) -> Option<String> {
        let connected = std::os::unix::net::UnixStream::connect(&self.socket);
        let error = connected.err()?;
        Some(format!(
            "no volume daemon answers there at {} ({error}); start one with `verbatim volume daemon`",
            self.socket.display()
        ))
    }

    /// Has the file systems write what they have not written yet, so that they come to rest sooner.
    pub fn sync(&self) -> anyhow::Result<()> {
        for folder in self.folders()?.iter().filter(|folder| is_mount_point(folder)) {
            let written = File::open(folder).and_then(|file| Ok(rustix::fs::syncfs(file)?));
            written.with_context(|| format!("{} cannot be written", folder.display()))?;
        }
        Ok(())
    }

    /// Brings the file systems to rest: their disks have all that was written.
    pub fn freeze(&self, volumes: &[Mounted]) -> anyhow::Result<()> {
        for mounted in volumes.iter().filter(|mounted| mounted.writable) {
            let folder = self.of(&mounted.volume);
            ensure!(
                is_mount_point(&folder),
                "{} is not mounted any more",
                folder.display()
            );
            freeze::freeze(&folder)
                .with_context(|| format!("the volume {} does not come to rest", mounted.volume))?;
        }
        Ok(())
    }

    /// Lets the file systems go on that were brought to rest.
    pub fn thaw(&self) -> anyhow::Result<()> {
        self.folders()?.iter().try_for_each(|folder| thaw(folder))
    }

    /// The file systems never write to their disks again, and let go of who waits for them.
    pub fn shut_down(&self) -> anyhow::Result<()> {
        for folder in self.folders()?.iter().filter(|folder| is_mount_point(folder)) {
            freeze::shut_down(folder).with_context(|| format!("cannot shut {} down", folder.display()))?;
            thaw(folder)?;
        }
        Ok(())
    }

    fn folders(&self) -> anyhow::Result<Vec<PathBuf>> {
        let entries = match std::fs::read_dir(&self.folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.with_context(|| format!("cannot read {}", self.folder.display()))?,
        };
        let folders = entries.map(|entry| Ok(entry?.path()));
        folders.collect()
    }

    /// Gives an order that is refused while the container's mounts are still there.
    fn insist(&self, order: &Order) -> anyhow::Result<()> {
        let begun = Instant::now();
        loop {
            match control::order_now(&self.socket, order, ANSWER_LIMIT) {
                Ok(_) => return Ok(()),
                // The device has gone with it.
                Err(error) if is_nobody_there(&error) => return Ok(()),
                Err(error) if begun.elapsed() > RELEASE_LIMIT => return Err(error),
                Err(_) => std::thread::sleep(PAUSE),
            }
        }
    }

    /// All volumes of the host's daemon; none if there is no daemon.
    pub fn all(&self) -> anyhow::Result<Vec<Row>> {
        match control::order_now(&self.socket, &Order::List, ANSWER_LIMIT) {
            Ok(Outcome::Volumes(rows)) => Ok(rows),
            Ok(other) => bail!("the volume daemon answers {other:?}"),
            Err(error) if is_nobody_there(&error) => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }
}

fn remove_folder(folder: &Path) -> anyhow::Result<()> {
    match std::fs::remove_dir(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}

fn is_mount_point(folder: &Path) -> bool {
    let device = |path: &Path| Some(rustix::fs::lstat(path).ok()?.st_dev);
    folder
        .parent()
        .is_some_and(|parent| device(parent) != device(folder))
}

/// Lets a file system go on, if it was brought to rest.
fn thaw(folder: &Path) -> anyhow::Result<()> {
    if is_mount_point(folder) {
        freeze::thaw(folder).with_context(|| format!("{} stays frozen", folder.display()))?;
    }
    Ok(())
}

/// Takes away whatever is mounted on a folder.
fn unmount(folder: &Path) -> anyhow::Result<()> {
    let begun = Instant::now();
    loop {
        match rustix::mount::unmount(folder, UnmountFlags::NOFOLLOW) {
            // There may be another one below it.
            Ok(()) => {}
            // Nothing is mounted.
            Err(Errno::INVAL | Errno::NOENT) => return Ok(()),
            // Nor for somebody who may not even try.
            Err(Errno::PERM) if !is_mount_point(folder) => return Ok(()),
            // Somebody looks into it.
            Err(Errno::BUSY) if begun.elapsed() < RELEASE_LIMIT => std::thread::sleep(PAUSE),
            Err(errno) => {
                return Err(io::Error::from(errno))
                    .with_context(|| format!("cannot unmount {}", folder.display()));
            }
        }
    }
}

/// Makes a file system where there is nothing at all; an error unless there is ours then.
fn make_file_system(device: &Path, volume: &str) -> anyhow::Result<()> {
    let probed = run(Command::new("blkid").args(["-p", "-o", "export"]).arg(device))?;
    // `man blkid`: 0 something was found, 2 nothing, 8 more than one thing.
    match probed.status.code() {
        Some(0) => {
            let text = String::from_utf8_lossy(&probed.stdout);
            let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key));
            match value("TYPE=").or(value("PTTYPE=")) {
                Some(FILE_SYSTEM) => Ok(()),
                Some(other) => bail!(
                    "there is {other} on the volume {volume}: an instance has volumes with {FILE_SYSTEM}, or with nothing at all"
                ),
                None => {
                    bail!("it is not known what is on the volume {volume}; blkid says {text:?}")
                }
            }
        }
        Some(2) if probed.stderr.is_empty() => {
            let made = run(Command::new("mkfs.ext4").arg("-q").arg(device))?;
            if !made.status.success() {
                bail!(
                    "no file system can be made on the volume {volume}: mkfs.ext4: {}",
                    String::from_utf8_lossy(&made.stderr).trim()
                );
            }
            tracing::info!(volume, "a new {FILE_SYSTEM} is made on it");
            Ok(())
        }
        _ => bail!(
            "it is not known what is on the volume {volume}: blkid: {} {}",
            probed.status,
            String::from_utf8_lossy(&probed.stderr).trim()
        ),
    }
}

fn run(command: &mut Command) -> anyhow::Result<Output> {
    let output = command.output();
    output.with_context(|| format!("cannot start {}", command.get_program().to_string_lossy()))
}

/// Why an instance is not moved, as far as volumes are mounted in it that are not its own: its bundle binds them.
pub async fn blockers_of(instance: &Instance) -> anyhow::Result<Vec<String>> {
    let (record, disks) = (instance.home.record.clone(), instance.home.paths.disks.clone());
    let init_pid = instance.init_pid();
    tokio::task::spawn_blocking(move || blockers(&record, &disks, init_pid)).await?
}

fn blockers(record: &Record, disks: &Disks, init_pid: i32) -> anyhow::Result<Vec<String>> {
    if record.machine.is_some() {
        return Ok(Vec::new());
    }
    let table = match std::fs::read_to_string(format!("/proc/{init_pid}/mountinfo")) {
        // It has ended.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        table => table.context("cannot read what is mounted in the container")?,
    };
    let devices = loop_devices(&table);
    if devices.is_empty() {
        return Ok(Vec::new());
    }
    let is_own = |name: &str| record.volumes.iter().any(|mounted| mounted.volume == name);
    let rows = disks.all()?;
    let strangers = rows.iter().filter(|row| {
        let device = row.device.as_deref().and_then(Path::to_str);
        !is_own(&row.name) && device.is_some_and(|device| devices.iter().any(|mounted| mounted == device))
    });
    let words = strangers.map(|row| {
        format!(
            "the volume {} is mounted in it, and is not its own: only what `verbatim run --volume` has given it moves along",
            row.name
        )
    });
    Ok(words.collect())
}

/// The loop devices that are mounted, by the third field of each line (proc_pid_mountinfo(5)).
fn loop_devices(table: &str) -> Vec<String> {
    let fields = table.lines().filter_map(|line| line.split(' ').nth(2));
    let numbers = fields.filter_map(|field| field.strip_prefix("7:"));
    numbers.map(|number| format!("/dev/loop{number}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(texts: &[&str]) -> Result<Vec<Mounted>, String> {
        let texts: Vec<String> = texts.iter().map(|text| (*text).to_owned()).collect();
        parse(&texts, false).map_err(|error| error.to_string())
    }

    #[test]
    fn volumes_are_read_and_nonsense_is_refused() {
        let mounted = |volume: &str, inside: &str, writable| Mounted {
            volume: volume.into(),
            inside: inside.into(),
            writable,
        };
        assert_eq!(
            parsed(&["db:/srv/db", "log:/mnt/:ro", "x:/a:b"]),
            Ok(vec![
                mounted("db", "/srv/db", true),
                mounted("log", "/mnt", false),
                mounted("x", "/a:b", true),
            ])
        );
        for bad in [
            "db",
            "db:",
            ":/srv",
            "db:srv",
            "db:/",
            "db:/srv/../etc",
            "db:/:ro",
        ] {
            assert!(parsed(&[bad]).unwrap_err().contains("such as"), "{bad}");
        }
        for taken in ["db:/proc", "db:/dev/shm/x", "db:/run/verbatim", "db:/sys/fs"] {
            assert!(
                parsed(&[taken]).unwrap_err().contains("the container's own"),
                "{taken}"
            );
        }
        assert!(parsed(&["db:/a", "db:/b"]).unwrap_err().contains("twice"));
        assert!(
            parsed(&["a:/a", "b:/a/b"])
                .unwrap_err()
                .contains("one in the other")
        );
        assert!(parse(&["db:/srv".to_owned()], true).is_err(), "a virtual machine");
    }

    #[test]
    fn mounted_loop_devices_are_found() {
        let table = "29 1 253:0 / / rw - ext4 /dev/vda rw\n31 29 7:3 / /srv rw,nosuid - ext4 /dev/loop3 rw\n\
                     32 29 0:7 / /run rw - tmpfs tmpfs rw\n";
        assert_eq!(loop_devices(table), ["/dev/loop3"]);
    }

    #[test]
    fn a_name_that_leads_elsewhere_is_refused_before_anything_is_made() {
        let folder = tempfile::tempdir().unwrap();
        let disks = Disks::new(folder.path(), "web");
        for name in ["../x", "..", "/etc"] {
            let mounted = Mounted {
                volume: name.to_owned(),
                inside: "/srv".into(),
                writable: true,
            };
            assert!(disks.take("web", &[mounted], None).is_err(), "{name}");
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn without_a_daemon_nothing_is_taken_and_nothing_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let disks = Disks::new(folder.path(), "web");
        let error = disks
            .take("web", &parsed(&["db:/srv"]).unwrap(), None)
            .unwrap_err();
        assert!(
            format!("{error:#}").contains("no volume daemon answers"),
            "{error:#}"
        );
        assert!(!disks.folder.exists());
        assert!(disks.all().unwrap().is_empty());
    }
}
