//! A software RNIC in a process of its own, which can be killed: this test program again, with a test that
//! runs an RNIC.

use std::path::Path;
use std::process::{Child, Command, Stdio};

/// The name of the test, which calls [`run`].
const TEST: &str = "an_rnic";
const FOLDER: &str = "VERBATIM_TEST_RNIC";
const ADDRESS: &str = "VERBATIM_TEST_RNIC_ADDRESS";

/// The process, which is killed on drop.
pub struct Rnic(Child);

impl Rnic {
    /// Starts the RNIC, and waits until it answers.
    pub fn start(folder: &Path, address: &str) -> Self {
        std::fs::create_dir_all(folder.join("mem")).expect("a folder");
        let child = Command::new(std::env::current_exe().expect("it runs"))
            .args(["--ignored", "--exact", TEST])
            .env(FOLDER, folder)
            .env(ADDRESS, address)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .expect("it starts");
        let rnic = Self(child);
        super::until("the RNIC answers", || folder.join("nic.sock").exists());
        rnic
    }
}

impl Rnic {
    /// Stops the process, which answers nobody from now on.
    pub fn hang(&self) {
        let process = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(process, rustix::process::Signal::STOP).expect("it is ours");
    }
}

impl Drop for Rnic {
    fn drop(&mut self) {
        self.0.kill().expect("it is ours");
        self.0.wait().expect("it ends");
    }
}

/// Runs an RNIC until the process is killed, if the process was started for that.
pub fn run() {
    let (Some(folder), Ok(address)) = (std::env::var_os(FOLDER), std::env::var(ADDRESS)) else {
        return;
    };
    let mut config = verbatim_nic::NicConfig::new(Path::new(&folder));
    config.port = verbatim_nic::Port::Address(address.parse().expect("an address"));
    let stop = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).expect("an eventfd");
    let mut nic = verbatim_nic::Nic::new(config).expect("an RNIC");
    nic.run(&stop).expect("it runs until it is killed");
}
