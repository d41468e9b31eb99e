//! A disk that both hosts see. A volume that moved there would be copied onto itself: the destination refuses it before
//! anything is written.

use std::fs::OpenOptions;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use anyhow::{Context, bail};

use super::{Entry, State};
use crate::store::identity::Identity;
use crate::store::shared::sign_of_same;
use crate::wire::About;

impl State {
    /// What the other host is told of the data here.
    pub(super) fn about(&self, entry: &Entry) -> Option<About> {
        let noted = self.noted.as_ref()?;
        Some(About {
            path: entry.folder.data(&self.settings).display().to_string(),
            identity: noted.identity.clone(),
        })
    }
}

/// An error if the data at this path are those of the source, `from`. `is_unnamed`: by an operator's word the names of
/// devices tell nothing.
pub(super) fn is_not_the_sources(
    data: &Path,
    is_unnamed: bool,
    from: &str,
    theirs: Option<&About>,
) -> anyhow::Result<()> {
    let (Some(theirs), Ok(metadata)) = (theirs, data.metadata()) else {
        return Ok(());
    };
    let is_device = metadata.file_type().is_block_device();
    if !is_device && !metadata.is_file() {
        return Ok(());
    }
    // Not exclusively: what else uses it is looked at later.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(data)
        .with_context(|| format!("cannot open {}", data.display()))?;
    let here = Identity::beside(&file, Some(&theirs.identity))?;
    let Some(sign) = sign_of_same(&theirs.identity, &here, !is_unnamed) else {
        return Ok(());
    };
    let (shown, kind) = (data.display(), if is_device { "device" } else { "file" });
    let way_out = match (is_device, is_unnamed, here.signed_at()) {
        (true, false, _) => format!(
            ". If these are two devices that have the same name, `verbatim volume place NAME --data {shown} --unnamed` here says so"
        ),
        (true, true, Some(at)) => {
            format!(". If this device is a copy of that one, clear its signature: the block at byte {at}")
        }
        _ => String::new(),
    };
    bail!(
        "the copy would go onto the volume itself: {shown} here and {} on {from} are the same {kind}, which both hosts see ({sign}). Give the copy \
         another place here (`verbatim volume place --help`){way_out}",
        theirs.path
    )
}
