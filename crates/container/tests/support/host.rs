//! Two hosts and a bridge between them, and a container that can be on one or the other.

use std::io::{BufRead, BufReader};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use verbatim_container::{
    Bundle, BundleConfig, Checkpoint, CheckpointConfig, ContainerName, Error, Host, HostConfig, Link,
    Network, NetworkConfig, Restore, RestoreConfig, Tasks, Workload,
};

use super::workload::Board;

const PEER: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
const INSTANCE: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);

/// The bridge and the peer.
pub struct World {
    peer: Child,
    peer_network: Option<Network>,
}

impl World {
    pub fn new() -> Self {
        make_bridge();
        let network = Network::create(&network_config("/run/peer-net".into(), PEER), Link::Attached).unwrap();
        let mut peer = Command::new("nsenter")
            .arg(format!("--net={}", network.path().display()))
            .arg(std::env::current_exe().unwrap())
            .args(["peer", &PEER.to_string()])
            .stdout(Stdio::piped())
            .spawn()
            .expect("nsenter can be started");
        let mut line = String::new();
        BufReader::new(peer.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        assert_eq!(line, "listening\n");
        Self {
            peer,
            peer_network: Some(network),
        }
    }
}

/// Makes the bridge to which the containers' networks are attached.
pub fn make_bridge() {
    for arguments in ["link add br0 type bridge", "link set br0 up"] {
        let status = Command::new("ip")
            .args(arguments.split(' '))
            .status()
            .expect("ip can be started");
        assert!(status.success(), "ip {arguments}");
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = self.peer.kill();
        let _ = self.peer.wait();
        if let Some(network) = self.peer_network.take() {
            let _ = network.delete();
        }
    }
}

/// One host: a directory of its own, and the container's parts in it.
pub struct TestHost {
    pub host: Host,
    pub dir: PathBuf,
    /// Dumps leave private memory out of the images.
    pub lazy: std::cell::Cell<bool>,
    /// Dumps say nothing of the network namespace.
    pub apart: std::cell::Cell<bool>,
}

/// A container's parts on one host, whether it runs there or not.
pub struct Place {
    pub bundle: Bundle,
    pub network: Network,
    pub runtime: PathBuf,
}

impl TestHost {
    pub async fn new(name: &str) -> Self {
        let dir = PathBuf::from("/run").join(name);
        let config = HostConfig {
            state: dir.join("containers"),
            proxy: std::env::current_exe().unwrap(),
            descriptors: None,
            plugin: PathBuf::from("/nonexistent"),
        };
        Self {
            host: Host::open(config).await.unwrap(),
            dir,
            lazy: std::cell::Cell::new(false),
            apart: std::cell::Cell::new(true),
        }
    }

    /// Makes the container's place here.
    pub fn make_place(&self, name: &ContainerName, link: Link) -> Place {
        let workload = Workload::Command {
            args: program(),
            env: vec!["PATH=/usr/bin:/bin".into()],
            cwd: "/".into(),
            binds: Vec::new(),
        };
        self.make_place_for(name, link, &workload)
    }

    /// Makes a container's place here that runs `workload`.
    pub fn make_place_for(&self, name: &ContainerName, link: Link, workload: &Workload) -> Place {
        let runtime = self.dir.join("instances").join(name);
        std::fs::create_dir_all(&runtime).unwrap();
        let program = runtime.join("program");
        if !program.exists() {
            std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
        }
        let board = runtime.join("board");
        std::fs::write(&board, vec![0; std::mem::size_of::<Board>()]).unwrap();
        let config = network_config(self.network(name), INSTANCE);
        let network = Network::create(&config, link).unwrap();
        let bundle = BundleConfig {
            name: name.clone(),
            dir: self.dir.join("bundles").join(name),
            runtime: runtime.clone(),
            netns: network.path().to_owned(),
            cgroup_parent: self.cgroup_parent(),
            preload: None,
            rnics: Vec::new(),
            devices: Vec::new(),
            folders: Vec::new(),
        };
        let bundle = Bundle::create(&bundle, workload).unwrap();
        Place {
            bundle,
            network,
            runtime,
        }
    }

    /// Takes the container's place away; the container must be gone.
    pub fn clear_place(&self, place: Place) {
        place.network.delete().unwrap();
        place.bundle.remove().unwrap();
        std::fs::remove_dir_all(&place.runtime).unwrap();
        verbatim_container::remove_cgroup_parent(&self.cgroup_parent()).unwrap();
    }

    fn network(&self, name: &ContainerName) -> PathBuf {
        self.dir.join("net").join(name)
    }

    fn cgroup_parent(&self) -> PathBuf {
        let run = super::inside().expect("the hosts are inside the namespaces");
        format!("/{run}-{}", self.dir.file_name().unwrap().display()).into()
    }

    /// Where CRIU writes its logs, and the proxy its marker.
    pub fn work(&self) -> PathBuf {
        self.dir.join("work")
    }

    /// The tasks of the container here.
    pub fn tasks(&self, name: &ContainerName) -> Tasks {
        Tasks::of(&self.host, name, &self.work())
    }

    pub fn images(&self, name: &ContainerName) -> PathBuf {
        self.dir.join("images").join(name)
    }

    pub async fn checkpoint(&self, name: &ContainerName) -> Checkpoint {
        self.try_checkpoint(name).await.unwrap()
    }

    pub async fn try_checkpoint(&self, name: &ContainerName) -> Result<Checkpoint, Error> {
        let images = self.images(name);
        let _ = std::fs::remove_dir_all(&images);
        let work = self.work();
        let config = CheckpointConfig {
            name: name.clone(),
            images,
            work,
            parent: None,
            lazy: self.lazy.get(),
            network: self.apart.get().then(|| self.network(name)),
            rnics: false,
            terminals: true,
            stop_limit: None,
        };
        Checkpoint::prepare(&self.host, config).await
    }

    pub async fn restore(&self, name: &ContainerName, place: &Place) -> Restore {
        let images = self.images(name);
        let _ = std::fs::remove_dir_all(&images);
        let (bundle, work) = (place.bundle.path().to_owned(), self.work());
        let config = RestoreConfig {
            name: name.clone(),
            bundle,
            images,
            work,
            lazy: false,
            network: place.network.path().to_owned(),
            rnics: false,
        };
        Restore::prepare(&self.host, config).await.unwrap()
    }
}

impl Place {
    pub fn board(&self) -> &'static Board {
        Board::map(&self.runtime.join("board"))
    }

    /// Waits until the program has counted and talked on from where it is now.
    pub fn assert_alive(&self) {
        let board = self.board();
        let (ticks, echoes) = (board.ticks.load(SeqCst), board.echoes.load(SeqCst));
        let start = Instant::now();
        while board.ticks.load(SeqCst) < ticks + 10 || board.echoes.load(SeqCst) < echoes + 5 {
            assert!(
                start.elapsed() < Duration::from_secs(10),
                "the program stands still: {board:?}; it printed {:?}",
                std::fs::read_to_string(self.runtime.join("stdout"))
            );
            std::thread::yield_now();
        }
        assert_eq!(board.errors.load(SeqCst), 0, "{board:?}");
    }
}

/// The program in the container and its arguments.
pub fn program() -> Vec<String> {
    vec![
        "/run/verbatim/program".into(),
        "workload".into(),
        PEER.to_string(),
    ]
}

/// Copies what the agent would: the images, and what the program has changed in its runtime folder.
pub fn copy_images(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

pub fn copy_runtime(from: &Place, to: &Place) {
    for file in ["board", "stdout"] {
        std::fs::copy(from.runtime.join(file), to.runtime.join(file)).unwrap();
    }
}

fn network_config(path: PathBuf, address: Ipv4Addr) -> NetworkConfig {
    NetworkConfig {
        path,
        address,
        prefix: 24,
        gateway: None,
        bridge: "br0".to_owned(),
        mtu: None,
        tap: false,
        further: Some(Vec::new()),
    }
}
