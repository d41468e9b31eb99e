//! What this host's volume daemon lends to an instance: asked for, mounted, brought to rest, and given back.

use std::fs::File;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use verbatim_volume::control::{self, Order, Row, is_nobody_there};

use super::{Form, Mounted, file_system};
use crate::instances::freeze;

/// The daemon's socket, in the runtime folder.
pub const SOCKET_NAME: &str = "volumes.sock";

/// The folder of its sockets for clients of no instance, in the runtime folder.
const SOCKETS: &str = "volumes";

/// The folder of all instances' volumes, in the runtime folder.
const FOLDER: &str = "disks";

/// Where QEMU finds a volume, in the volume's folder.
pub const SOCKET: &str = "nbd";

/// The role of a copy that waits for the session by which its instance comes.
const PROMISED: &str = "ready";

/// So long the daemon may take for an order.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// A container that ends lets go of its mounts a moment later.
const RELEASE_LIMIT: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(20);

const OLD_DAEMON: &str =
    "the volume daemon is of an earlier release, and does not lend volumes so: start it again";

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

    /// Takes these volumes, and mounts them or has them served to a virtual machine. On an error none is left taken. `by`: they come with the
    /// instance, in a session of that number, which is not decided yet.
    pub fn take(
        &self,
        instance: &str,
        volumes: &[Mounted],
        form: Form,
        by: Option<u64>,
    ) -> anyhow::Result<()> {
        let taken = volumes.iter().try_for_each(|mounted| match form {
            Form::FileSystem => self.mount_one(instance, mounted, by),
            Form::Disk => self.connect_one(instance, mounted, by),
        });
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

    fn mount_one(&self, instance: &str, mounted: &Mounted, by: Option<u64>) -> anyhow::Result<()> {
        let name = &mounted.volume;
        let folder = self.make_folder(name)?;
        let lend = |writable| {
            let row = self.lent(instance, name, by, None, writable)?;
            let device = row.device;
            let device = device.with_context(|| format!("the volume {name} is no block device"))?;
            // A daemon of an earlier release does not send it.
            anyhow::Ok((device, row.fresh.unwrap_or(true)))
        };
        // A volume that comes with an instance has a file system already, frozen at its source.
        if by.is_none() {
            let (device, is_fresh) = lend(true)?;
            file_system::make(&device, name, is_fresh)?;
            if !mounted.writable {
                // Replays the file system's journal while the volume can still be written.
                file_system::mount(&device, &folder, name, false)?;
                file_system::unmount(&folder)?;
            }
        }
        file_system::mount(&lend(mounted.writable)?.0, &folder, name, mounted.writable)
    }

    fn connect_one(&self, instance: &str, mounted: &Mounted, by: Option<u64>) -> anyhow::Result<()> {
        let name = &mounted.volume;
        let socket = self.make_folder(name)?.join(SOCKET);
        let row = self.lent(instance, name, by, Some(&socket), mounted.writable)?;
        match row.socket {
            Some(served) if served == socket => Ok(()),
            _ => bail!(OLD_DAEMON),
        }
    }

    /// Has the daemon lend it to the instance: as a block device, or on a socket.
    fn lent(
        &self,
        instance: &str,
        name: &str,
        by: Option<u64>,
        socket: Option<&Path>,
        writable: bool,
    ) -> anyhow::Result<Row> {
        let attach = Order::Attach {
            vhost_user: false,
            name: name.to_owned(),
            device: socket.is_none(),
            holder: Some(instance.to_owned()),
            by,
            socket: socket.map(Path::to_owned),
            read_only: !writable,
        };
        let row = self.row(&attach).with_context(|| format!("the volume {name}"))?;
        if row.holder.as_deref() != Some(instance) {
            bail!(OLD_DAEMON);
        }
        Ok(row)
    }

    fn row(&self, order: &Order) -> anyhow::Result<Row> {
        let mut rows = control::order_now(&self.socket, order, ANSWER_LIMIT)?.rows()?;
        match (rows.pop(), rows.len()) {
            (Some(row), 0) => Ok(row),
            (None, _) => {
                bail!("the volume daemon says nothing of it: is it of an earlier release? Start it again")
            }
            (Some(_), more) => bail!(
                "the volume daemon answers for {} volumes, and was asked for one",
                more + 1
            ),
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
            self.wait_for_daemon(&folder);
            // One that is frozen would not go. What its disk says is no matter any more.
            if let Err(error) = file_system::thaw(&folder) {
                tracing::debug!(error = format!("{error:#}"), "given back all the same");
            }
            file_system::unmount(&folder)?;
            let name = folder.file_name().and_then(|name| name.to_str());
            let name = name.context("no name of a volume")?;
            let detach = Order::Detach {
                name: name.to_owned(),
                holder: Some(instance.to_owned()),
            };
            self.insist(&detach)
                .with_context(|| format!("the volume {name}"))?;
            // There is one where the daemon has ended before.
            remove(&folder.join(SOCKET), |socket| std::fs::remove_file(socket))?;
            remove_folder(&folder)?;
        }
        remove_folder(&self.folder)
    }

    /// Where the daemon of a disk has ended, the disk waits for the next one, and would not be unmounted before. A daemon that does not come soon is waited for no more:
    /// then the disk is let go of, and what is not on it yet is lost, as it would be with the machine.
    fn wait_for_daemon(&self, folder: &Path) {
        let begun = Instant::now();
        while file_system::is_mount_point(folder) && UnixStream::connect(&self.socket).is_err() {
            if begun.elapsed() < RELEASE_LIMIT {
                std::thread::sleep(PAUSE);
                continue;
            }
            let name = folder.file_name().and_then(|name| name.to_str());
            if let (Some(runtime_dir), Some(name)) = (self.socket.parent(), name) {
                tracing::warn!(volume = name, "no volume daemon comes: its disk is let go of");
                verbatim_volume::end_waiting(runtime_dir, name);
            }
            return;
        }
    }

    /// An error unless the instance, which has come here, has all of them, as far as their daemon knows, and they are promised.
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
            ensure!(
                row.is_some_and(|row| row.role == PROMISED),
                "the copy of the volume {} there is not whole",
                mounted.volume
            );
        }
        Ok(())
    }

    /// Why no volume can come to this host.
    pub fn lacking(&self) -> Option<String> {
        let connected = UnixStream::connect(&self.socket);
        let error = connected.err()?;
        Some(format!(
            "no volume daemon answers there at {} ({error}); start one with `verbatim volume daemon`",
            self.socket.display()
        ))
    }

    /// Has the file systems write what they have not written yet, so that they come to rest sooner.
    pub fn sync(&self) -> anyhow::Result<()> {
        for folder in self
            .folders()?
            .iter()
            .filter(|folder| file_system::is_mount_point(folder))
        {
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
                file_system::is_mount_point(&folder),
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
        self.folders()?
            .iter()
            .try_for_each(|folder| file_system::thaw(folder))
    }

    /// The file systems never write to their disks again, and let go of who waits for them.
    pub fn shut_down(&self) -> anyhow::Result<()> {
        for folder in self
            .folders()?
            .iter()
            .filter(|folder| file_system::is_mount_point(folder))
        {
            freeze::shut_down(folder).with_context(|| format!("cannot shut {} down", folder.display()))?;
            file_system::thaw(folder)?;
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

    /// The volume whose usual socket, for clients of no instance, has this path.
    pub fn served_at(&self, path: &Path) -> Option<String> {
        let folder = self.socket.parent()?.join(SOCKETS);
        let name = path.strip_prefix(folder).ok()?.to_str()?.strip_suffix(".sock")?;
        Some(name.to_owned())
    }

    /// All volumes of the host's daemon; none if there is no daemon.
    pub fn all(&self) -> anyhow::Result<Vec<Row>> {
        match control::order_now(&self.socket, &Order::List, ANSWER_LIMIT) {
            Ok(outcome) => outcome.rows(),
            Err(error) if is_nobody_there(&error) => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }
}

fn remove_folder(folder: &Path) -> anyhow::Result<()> {
    remove(folder, |folder| std::fs::remove_dir(folder))
}

fn remove(path: &Path, by: impl Fn(&Path) -> io::Result<()>) -> anyhow::Result<()> {
    match by(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mounted(name: &str) -> Mounted {
        Mounted {
            volume: name.to_owned(),
            inside: "/srv".into(),
            writable: true,
        }
    }

    #[test]
    fn a_name_that_leads_elsewhere_is_refused_before_anything_is_made() {
        let folder = tempfile::tempdir().unwrap();
        let disks = Disks::new(folder.path(), "web");
        for name in ["../x", "..", "/etc"] {
            for form in [Form::FileSystem, Form::Disk] {
                assert!(disks.take("web", &[mounted(name)], form, None).is_err(), "{name}");
            }
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn without_a_daemon_nothing_is_taken_and_nothing_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let disks = Disks::new(folder.path(), "web");
        for form in [Form::FileSystem, Form::Disk] {
            let error = disks.take("web", &[mounted("db")], form, None).unwrap_err();
            assert!(
                format!("{error:#}").contains("no volume daemon answers"),
                "{error:#}"
            );
            assert!(!disks.folder.exists());
        }
        assert!(disks.all().unwrap().is_empty());
        // A daemon that has ended leaves its socket.
        std::fs::create_dir_all(disks.of("db")).unwrap();
        std::fs::write(disks.of("db").join(SOCKET), "").unwrap();
        disks.give_back().unwrap();
        assert!(!disks.folder.exists());
    }

    #[test]
    fn the_socket_of_a_volume_is_known() {
        let disks = Disks::new(Path::new("/run/verbatim"), "web");
        let at = |path: &str| disks.served_at(Path::new(path));
        assert_eq!(at("/run/verbatim/volumes/db.1.sock"), Some("db.1".to_owned()));
        assert_eq!(at("/run/verbatim/volumes/db.lent"), None);
        assert_eq!(at("/run/verbatim/volumes.sock"), None);
        assert_eq!(at("/srv/db.sock"), None);
    }
}
