//! Names, folders, and attributes of files.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::time::{Duration, UNIX_EPOCH};

use rand::Rng;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags, XattrFlags, renameat_with};

use crate::work::{Outcome, Subject, Work, compare};

/// Files of one folder.
const MANY: u32 = 60;

/// Saves as editors do: a new file is written beside the old one, made durable, and takes its name.
pub fn rename_over(work: &mut Work) -> io::Result<Outcome> {
    let data = work.noise(64 << 10);
    let mut new = Subject::create(work.folder.join("new"))?;
    new.write(0, &data)?;
    new.file.sync_all()?;
    let folder = File::open(&work.folder)?;
    let subject = work.any();
    fs::rename(&new.path, &subject.path)?;
    folder.sync_all()?;
    // An open descriptor still has the old file.
    let mut found = vec![0; subject.content.len()];
    subject.file.read_exact_at(&mut found, 0)?;
    compare("replaced", &subject.path, 0, &found, &subject.content);
    new.path = subject.path.clone();
    *subject = new;
    Ok(Outcome::Done)
}

pub fn rename_exchange(work: &mut Work) -> io::Result<Outcome> {
    let (one, other) = work.two();
    let (first, second) = (work.subjects[one].path.clone(), work.subjects[other].path.clone());
    renameat_with(CWD, &first, CWD, &second, RenameFlags::EXCHANGE)?;
    work.subjects[one].path = second;
    work.subjects[other].path = first;
    for index in [one, other] {
        let subject = &work.subjects[index];
        let (by_name, open) = (fs::metadata(&subject.path)?, subject.file.metadata()?);
        assert_eq!(
            by_name.ino(),
            open.ino(),
            "{} is another file",
            subject.path.display()
        );
    }
    Ok(Outcome::Done)
}

pub fn rename_no_replace(work: &mut Work) -> io::Result<Outcome> {
    let (one, other) = work.two();
    let (first, second) = (&work.subjects[one].path, &work.subjects[other].path);
    let refused = renameat_with(CWD, first, CWD, second, RenameFlags::NOREPLACE);
    assert_eq!(refused, Err(rustix::io::Errno::EXIST));
    let free = work.folder.join("free");
    renameat_with(CWD, first, CWD, &free, RenameFlags::NOREPLACE)?;
    fs::rename(&free, first)?;
    Ok(Outcome::Done)
}

/// A tree is renamed with its content.
pub fn rename_folder(work: &mut Work) -> io::Result<Outcome> {
    let (old, new) = (work.folder.join("tree"), work.folder.join("other-tree"));
    let mut wanted = Vec::new();
    for path in ["a/b/c/one", "a/b/two", "a/three"] {
        let data = work.noise(9000);
        let file = old.join(path);
        fs::create_dir_all(file.parent().expect("a folder"))?;
        fs::write(&file, &data)?;
        wanted.push((path, data));
    }
    fs::rename(&old, &new)?;
    fs::rename(new.join("a/b"), new.join("b"))?;
    fs::rename(new.join("b"), new.join("a/b"))?;
    assert!(!old.exists(), "the old name is there");
    for (path, data) in wanted {
        compare("of a tree", &new.join(path), 0, &fs::read(new.join(path))?, &data);
    }
    fs::remove_dir_all(&new)?;
    Ok(Outcome::Done)
}

pub fn hard_link(work: &mut Work) -> io::Result<Outcome> {
    let second = work.folder.join("second");
    let data = work.noise(5000);
    let subject = work.any();
    fs::hard_link(&subject.path, &second)?;
    assert_eq!(subject.file.metadata()?.nlink(), 2);
    File::options()
        .write(true)
        .open(&second)?
        .write_all_at(&data, 0)?;
    subject.has(0, &data);
    subject.check("by its second name")?;
    fs::remove_file(&subject.path)?;
    fs::rename(&second, &subject.path)?;
    assert_eq!(subject.file.metadata()?.nlink(), 1);
    Ok(Outcome::Done)
}

pub fn symbolic_link(work: &mut Work) -> io::Result<Outcome> {
    let (link, long) = (work.folder.join("link"), work.random.random_range(1..480));
    // A short target lies in the inode, a long one in a block.
    let target = "./".repeat(long);
    let subject = work.any();
    let name = subject
        .path
        .file_name()
        .expect("a name")
        .to_string_lossy()
        .into_owned();
    std::os::unix::fs::symlink(format!("{target}{name}"), &link)?;
    assert_eq!(fs::read_link(&link)?.to_string_lossy(), format!("{target}{name}"));
    compare("by a link", &link, 0, &fs::read(&link)?, &subject.content);
    fs::remove_file(&link)?;
    Ok(Outcome::Done)
}

pub fn attributes(work: &mut Work) -> io::Result<Outcome> {
    let value = work.noise(if work.is_xfs { 20_000 } else { 700 });
    let name = format!("user.verbatim.{}", work.random.random_range(0..3));
    let is_removed = work.random.random_bool(0.2);
    let subject = work.any();
    if is_removed && subject.attributes.remove(&name).is_some() {
        rustix::fs::fremovexattr(&subject.file, name.as_str())?;
    } else {
        rustix::fs::fsetxattr(&subject.file, name.as_str(), &value, XattrFlags::empty())?;
        subject.attributes.insert(name, value);
    }
    Ok(Outcome::Done)
}

/// A file gets its name when it is complete.
pub fn unnamed_file(work: &mut Work) -> io::Result<Outcome> {
    let data = work.noise(64 << 10);
    let flags = OFlags::TMPFILE | OFlags::RDWR;
    let file = File::from(rustix::fs::open(&work.folder, flags, Mode::from_raw_mode(0o600))?);
    (&file).write_all(&data)?;
    let path = work.folder.join("named");
    let own = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    rustix::fs::linkat(CWD, own, CWD, &path, AtFlags::SYMLINK_FOLLOW)?;
    compare("named late", &path, 0, &fs::read(&path)?, &data);
    fs::remove_file(&path)?;
    Ok(Outcome::Done)
}

pub fn deleted_while_open(work: &mut Work) -> io::Result<Outcome> {
    let data = work.noise(200_000);
    let mut subject = Subject::create(work.folder.join("deleted"))?;
    subject.write(0, &data)?;
    fs::remove_file(&subject.path)?;
    subject.write(data.len() / 2, &data)?;
    subject.file.sync_all()?;
    rustix::fs::fadvise(&subject.file, 0, None, rustix::fs::Advice::DontNeed)?;
    subject.check("deleted while it was open")?;
    Ok(Outcome::Done)
}

pub fn many_files(work: &mut Work) -> io::Result<Outcome> {
    let folder = work.folder.join("many");
    fs::create_dir(&folder)?;
    let content = |number: u32| format!("{number} ").repeat(number as usize);
    for number in 0..MANY {
        fs::write(folder.join(number.to_string()), content(number))?;
    }
    for number in (0..MANY).step_by(3) {
        fs::remove_file(folder.join(number.to_string()))?;
    }
    let mut found: Vec<u32> = fs::read_dir(&folder)?
        .map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().parse().expect("a number")))
        .collect::<io::Result<_>>()?;
    found.sort_unstable();
    let wanted: Vec<u32> = (0..MANY).filter(|number| !number.is_multiple_of(3)).collect();
    assert_eq!(found, wanted, "names in a folder");
    for number in wanted {
        let path = folder.join(number.to_string());
        compare(
            "one of many",
            &path,
            0,
            &fs::read(&path)?,
            content(number).as_bytes(),
        );
    }
    fs::remove_dir_all(&folder)?;
    Ok(Outcome::Done)
}

pub fn times_and_modes(work: &mut Work) -> io::Result<Outcome> {
    let time = UNIX_EPOCH + Duration::from_secs(work.random.random_range(1..2_000_000_000));
    let mode = work.random.random_range(0o600..0o700);
    let subject = work.any();
    subject.file.set_permissions(PermissionsExt::from_mode(mode))?;
    subject.file.set_modified(time)?;
    subject.file.sync_all()?;
    let found = fs::metadata(&subject.path)?;
    assert_eq!((found.modified()?, found.mode() & 0o7777), (time, mode));
    Ok(Outcome::Done)
}
