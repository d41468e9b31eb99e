//! Names that QEMU's command line and the machine's first process must agree on.

/// On the kernel's command line: where the modules lie, as the machine sees it.
pub(crate) const MODULES_PARAMETER: &str = "testbed.modules=";
/// On the kernel's command line: the machine's host name.
pub(crate) const NAME_PARAMETER: &str = "testbed.name=";
/// The name by which the guest mounts the host's files.
pub(crate) const ROOT_TAG: &str = "root";
