//! What the lab's tests share: labs that go away, services that are none, and what a machine shows of a lab.

pub mod container;

use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use std::io::Read;
use std::ops::Deref;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{Command, ExitStatus};
use verbatim_lab::{Lab, LabConfig, Service};

/// A lab whose services are this program in the role of a stand-in.
pub fn config(test: &str) -> LabConfig {
    let program = std::env::current_exe().unwrap();
    let services = ["nic", "agent"]
        .into_iter()
        .zip(["/run/verbatim/nic.sock", "/run/verbatim/api.sock"])
        .map(|(name, socket)| Service::new(name, &program, ["stand-in", "serve", socket]).socket(socket));
    LabConfig::new(format!("test-{test}-{}", std::process::id()), services.collect()).unwrap()
}

/// If this process was started as a service: plays it.
pub fn stand_in() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["stand-in", "serve", socket] => {
            let listener = UnixListener::bind(socket).unwrap();
            while listener.accept().is_ok() {}
        }
        ["stand-in", "fail"] => {
            eprintln!("the stand-in fails as told");
            std::process::exit(3);
        }
        ["stand-in", "hang"] => loop {
            std::thread::park();
        },
        _ => return,
    }
    std::process::exit(0);
}

/// A lab that is taken down with its test, whatever becomes of that.
pub struct Scratch(Option<Lab>);

impl Scratch {
    pub fn up(config: LabConfig) -> Self {
        Self(Some(Lab::up(config).unwrap_or_else(|error| {
            panic!("{error}: {:?}", std::error::Error::source(&error))
        })))
    }

    pub fn down(mut self) {
        self.0.take().unwrap().down().unwrap();
    }
}

impl Deref for Scratch {
    type Target = Lab;

    fn deref(&self) -> &Lab {
        self.0.as_ref().unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Some(lab) = self.0.take() {
            let result = lab.down();
            assert!(result.is_ok() || std::thread::panicking(), "{result:?}");
        }
    }
}

/// Runs a command in a host; its status, and all that it wrote.
pub fn output(lab: &Lab, host: &str, argv: &[&str]) -> (ExitStatus, String) {
    let output = lab
        .command(host, argv[0])
        .unwrap()
        .args(&argv[1..])
        .output()
        .unwrap();
    let text = [output.stdout, output.stderr]
        .map(|text| String::from_utf8_lossy(&text).into_owned())
        .concat();
    (output.status, text)
}

/// What a lab could leave on the machine outside its directory and cgroups.
#[derive(Debug, PartialEq, Eq)]
pub struct Footprint {
    mounts: String,
    links: String,
    named_namespaces: Vec<PathBuf>,
}

impl Footprint {
    pub fn take() -> Self {
        let links = Command::new("ip").args(["-o", "link"]).output().unwrap().stdout;
        let names = std::fs::read_dir("/run/netns").into_iter().flatten();
        let mut named_namespaces: Vec<PathBuf> = names.map(|entry| entry.unwrap().path()).collect();
        named_namespaces.sort();
        Self {
            mounts: std::fs::read_to_string("/proc/self/mountinfo").unwrap(),
            links: String::from_utf8(links).unwrap(),
            named_namespaces,
        }
    }
}

/// How many cgroup hierarchies know the lab.
pub fn cgroups_of(lab: &str) -> usize {
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap();
    let points = mounts.lines().filter_map(|line| {
        let mut fields = line.split(' ');
        let point = fields.nth(1)?;
        fields.next()?.starts_with("cgroup").then_some(point)
    });
    points
        .filter(|point| PathBuf::from(point).join("verbatim").join(lab).exists())
        .count()
}

/// The pid on the machine of a process in a host: the last number of NSpid is the one inside.
pub fn outside_pid(lab: &Lab, host: &str, inside: u32) -> u32 {
    let init = lab.status().unwrap().host(host).unwrap().pid;
    let namespace = std::fs::read_link(format!("/proc/{init}/ns/pid")).unwrap();
    let pids = std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let mut matching = pids.filter(|pid: &u32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let numbers = status
            .lines()
            .find(|line| line.starts_with("NSpid:"))
            .unwrap_or_default();
        numbers.split_ascii_whitespace().last() == Some(&inside.to_string())
            && std::fs::read_link(format!("/proc/{pid}/ns/pid")).is_ok_and(|own| own == namespace)
    });
    matching.next().expect("the process is in the host")
}

/// Whether a process is there and not just a zombie.
pub fn runs(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')')
        .is_some_and(|(_, rest)| !rest.trim_start().starts_with(['Z', 'X']))
}

/// Waits until a process has ended.
pub fn wait_for_end(pid: u32) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let Ok(pidfd) = pidfd_open(pid_of(pid), PidfdFlags::empty()) else {
        return;
    };
    let timeout = Timespec {
        tv_sec: 10,
        tv_nsec: 0,
    };
    let ended = poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&timeout)).unwrap();
    assert_eq!(ended, 1, "process {pid} lives on");
}

pub fn signal(pid: u32, signal: Signal) {
    kill_process(pid_of(pid), signal).unwrap();
}

fn pid_of(pid: u32) -> Pid {
    Pid::from_raw(pid.cast_signed()).unwrap()
}

/// Waits for a line from a command.
pub fn read_line(from: &mut impl Read) {
    let mut byte = [0];
    while from.read(&mut byte).unwrap() == 1 && byte[0] != b'\n' {}
}
