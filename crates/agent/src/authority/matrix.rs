//! Every RPC, from every kind of caller, at every kind of host: who is admitted. Over TLS, against the services themselves.
//!
//! The lists of RPCs are the descriptors' own, and what is expected is in `matrix.txt` beside this file.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio_stream::wrappers::UnixListenerStream;
use tonic::Status;
use tonic::transport::{Channel, Endpoint as Address, Server};
use verbatim_channel::{Endpoint, MovedEndpoint};
use verbatim_container::Host;

use verbatim_session::Role;
use verbatim_session::record::{Note, Parties, What};

use crate::agent::Agent;
use crate::api::ControlService;
use crate::caller;
use crate::directory::Directory;
use crate::peers::{Credentials, Peers};
use crate::proto::control_client::ControlClient;
use crate::proto::control_server::ControlServer;
use crate::proto::peer_client::PeerClient;
use crate::proto::*;
use crate::rpcs::{ControlRpc, PeerRpc};
use crate::session::encode;
use crate::testing::{Authority, TestHost};

/// The hosts of the directory. The first three take part in the session, each as what it is called.
const HOSTS: [(&str, &str); 4] = [
    ("source", "10.9.0.1"),
    ("destination", "10.9.0.2"),
    ("partner", "10.9.0.3"),
    ("outsider", "10.9.0.4"),
];

/// Who calls, and by which letter the table calls it.
const CALLERS: [(char, Option<&str>); 6] = [
    ('S', Some("source")),
    ('D', Some("destination")),
    ('P', Some("partner")),
    ('O', Some("outsider")),
    // It has a certificate of the same authority, and is not in the directory.
    ('X', Some("stranger")),
    // It has none.
    ('N', None),
];

/// Who is asked, and how far the session has come there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scene {
    SourceOpen,
    DestinationOpen,
    /// The instance runs there, and the source is gone.
    DestinationAlone,
    PartnerOpen,
    /// The source is gone.
    PartnerAlone,
    /// Nobody has heard of the session.
    Unknown,
}

impl Scene {
    const ALL: [Self; 6] = [
        Self::SourceOpen,
        Self::DestinationOpen,
        Self::DestinationAlone,
        Self::PartnerOpen,
        Self::PartnerAlone,
        Self::Unknown,
    ];

    fn asked(self) -> &'static str {
        match self {
            Self::SourceOpen => "source",
            Self::DestinationOpen | Self::DestinationAlone => "destination",
            Self::PartnerOpen | Self::PartnerAlone | Self::Unknown => "partner",
        }
    }

    /// Brings a fresh session so far at the host that is asked.
    fn stage(self, agent: &Agent) -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let session = NEXT.fetch_add(1, Ordering::Relaxed);
        let opened = || {
            What::Opened(Parties {
                instance: "web".to_owned(),
                source: "source".to_owned(),
                destination: "destination".to_owned(),
            })
        };
        let partners = || {
            What::Note(Note {
                partners: vec!["partner".to_owned()],
                ..Note::default()
            })
        };
        let write = |role, what| agent.journal.write(session, role, what).unwrap();
        match self {
            Self::SourceOpen => {
                write(Role::Source, opened());
                write(Role::Source, partners());
            }
            Self::DestinationOpen => {
                write(Role::Destination, opened());
                write(Role::Destination, partners());
            }
            Self::DestinationAlone => {
                write(Role::Destination, opened());
                write(Role::Destination, partners());
                write(Role::Destination, What::Ran);
            }
            Self::PartnerOpen | Self::PartnerAlone => write(Role::Partner, opened()),
            Self::Unknown => {}
        }
        if matches!(self, Self::DestinationOpen | Self::PartnerOpen) {
            agent.watched.begin(session, "source").unwrap();
        }
        session
    }
}

async fn start(authority: &Authority, host: &str) -> TestHost {
    let anywhere = "127.0.0.1:0".parse().unwrap();
    TestHost::start(authority, &HOSTS, host, anywhere).await
}

/// A queue pair on a host; of one that is not in the directory, on none.
fn end(host: &str) -> Endpoint {
    let address = HOSTS
        .iter()
        .find(|(name, _)| *name == host)
        .map_or("10.9.9.9", |(_, a)| a);
    let address: std::net::Ipv4Addr = address.parse().unwrap();
    Endpoint {
        gid: address.to_ipv6_mapped().octets(),
        qpn: 17,
    }
}

/// What a host that calls itself `name` would ask in that session.
async fn ask(client: &mut PeerClient<Channel>, rpc: PeerRpc, session: u64, name: &str) -> Result<(), Status> {
    let own: crate::proto::Endpoint = end(name).into();
    let id = SessionId { session };
    let of_partner = PartnerPrepareRequest {
        session,
        source: name.to_owned(),
        instance: "web".to_owned(),
        connections: vec![PartnerConnection {
            moving: Some(own.clone()),
            partner: Some(end("partner").into()),
            ..PartnerConnection::default()
        }],
        destination: "destination".to_owned(),
        pauses: false,
        protocol: 0,
    };
    let open = OpenRequest {
        session,
        source: name.to_owned(),
        ..OpenRequest::default()
    };
    let links = LinksRequest {
        links: vec![links_request::Link {
            asker: Some(own.clone()),
            ..links_request::Link::default()
        }],
        ..LinksRequest::default()
    };
    match rpc {
        PeerRpc::Hello => client.hello(HelloRequest::default()).await.map(drop),
        PeerRpc::Gids => client.gids(GidsRequest::default()).await.map(drop),
        PeerRpc::Resolve => client.resolve(ResolveRequest::default()).await.map(drop),
        PeerRpc::Publish => {
            let keys = encode(&Vec::<verbatim_channel::KeyPair>::new());
            let now = Some(own);
            client.publish(PublishRequest { now, keys }).await.map(drop)
        }
        PeerRpc::Moved => {
            let moved = MovedEndpoint {
                known: end(name),
                now: end(name),
                moves: 1,
            };
            let endpoints = encode(&[moved].as_slice());
            client.moved(MovedRequest { endpoints }).await.map(drop)
        }
        PeerRpc::Watch => client.watch(id).await.map(drop),
        PeerRpc::Abort => client.abort(id).await.map(drop),
        PeerRpc::Outcome => client.outcome(id).await.map(drop),
        PeerRpc::CheckInstance => client.check_instance(open).await.map(drop),
        PeerRpc::Open => client.open(open).await.map(drop),
        PeerRpc::Place => {
            let part = FilePart {
                session,
                path: "f".into(),
                ..FilePart::default()
            };
            client.place(tokio_stream::once(part)).await.map(drop)
        }
        PeerRpc::OfferBulk => {
            let offer = OfferBulkRequest {
                session,
                ..OfferBulkRequest::default()
            };
            client.offer_bulk(offer).await.map(drop)
        }
        PeerRpc::PlaceLanded => {
            let part = FilePart {
                session,
                path: "f".into(),
                ..FilePart::default()
            };
            client.place_landed(tokio_stream::once(part)).await.map(drop)
        }
        PeerRpc::PreSetup => {
            let request = PreSetupRequest {
                session,
                ..PreSetupRequest::default()
            };
            client.pre_setup(request).await.map(drop)
        }
        PeerRpc::ConnectStandby => {
            let request = ConnectRequest {
                session,
                ..ConnectRequest::default()
            };
            client.connect_standby(request).await.map(drop)
        }
        PeerRpc::PrepareRestore => client.prepare_restore(id).await.map(drop),
        PeerRpc::Restore => client.restore(id).await.map(drop),
        PeerRpc::Commit => client.commit(id).await.map(drop),
        PeerRpc::Claim => client.claim(id).await.map(drop),
        PeerRpc::Resume => client.resume(id).await.map(drop),
        PeerRpc::CheckPartner => client.check_partner(of_partner).await.map(drop),
        PeerRpc::FindPartners => {
            let ends = vec![own];
            client.find_partners(FindPartnersRequest { ends }).await.map(drop)
        }
        PeerRpc::PartnerJoin => client.partner_join(of_partner).await.map(drop),
        PeerRpc::PartnerLeave => client.partner_leave(id).await.map(drop),
        PeerRpc::LetGo => {
            let instance = "other".to_owned();
            client.let_go(LetGoRequest { instance, session }).await.map(drop)
        }
        PeerRpc::MeasureDrain => {
            let request = MeasureDrainRequest {
                session: Some(of_partner),
                limit_ms: 1,
            };
            client.measure_drain(request).await.map(drop)
        }
        PeerRpc::PartnerPrepare => client.partner_prepare(of_partner).await.map(drop),
        PeerRpc::PartnerConnect => {
            let request = PartnerConnectRequest {
                session,
                ..PartnerConnectRequest::default()
            };
            client.partner_connect(request).await.map(drop)
        }
        PeerRpc::PartnerSuspend => client.partner_suspend(id).await.map(drop),
        PeerRpc::PartnerDrain => {
            let request = DrainRequest {
                session,
                ..DrainRequest::default()
            };
            client.partner_drain(request).await.map(drop)
        }
        PeerRpc::PartnerStop => {
            let request = StopRequest {
                session,
                ..StopRequest::default()
            };
            client.partner_stop(request).await.map(drop)
        }
        PeerRpc::PartnerSettle => {
            let request = SettleRequest {
                session,
                ..SettleRequest::default()
            };
            client.partner_settle(request).await.map(drop)
        }
        PeerRpc::PartnerSwitch => client.partner_switch(id).await.map(drop),
        PeerRpc::PartnerResume => client.partner_resume(id).await.map(drop),
        PeerRpc::ShareSecrets => client.share_secrets(links).await.map(drop),
        PeerRpc::PauseEnds => client.pause_ends(links).await.map(drop),
        PeerRpc::ConfirmPeers => client.confirm_peers(links).await.map(drop),
        PeerRpc::PeersGone => client.peers_gone(links).await.map(drop),
        PeerRpc::ResumeEnds => client.resume_ends(links).await.map(drop),
        PeerRpc::Lack => {
            let request = LackRequest {
                session,
                ..LackRequest::default()
            };
            client.lack(request).await.map(drop)
        }
        PeerRpc::ReadBehind => {
            let request = ReadBehindRequest {
                session,
                ..ReadBehindRequest::default()
            };
            client.read_behind(request).await.map(drop)
        }
        PeerRpc::LendBehind => {
            let request = LendBehindRequest {
                session,
                ..LendBehindRequest::default()
            };
            client.lend_behind(request).await.map(drop)
        }
        PeerRpc::Retarget => {
            let keys = encode(&Vec::<Vec<verbatim_channel::KeyPair>>::new());
            let moved = Vec::new();
            client.retarget(RetargetRequest { moved, keys }).await.map(drop)
        }
    }
}

/// Whether the handler got to see the request, whatever became of it there.
fn was_admitted(answer: &Result<(), Status>) -> bool {
    let Err(status) = answer else {
        return true;
    };
    let source = std::error::Error::source(status);
    let no_connection = source.is_some_and(|error| error.is::<tonic::transport::Error>());
    let refused = [
        tonic::Code::PermissionDenied,
        tonic::Code::Unauthenticated,
        tonic::Code::NotFound,
    ];
    !no_connection && !refused.contains(&status.code())
}

/// Who is admitted to each RPC, as `matrix.txt` has it.
async fn table() -> String {
    let authority = Authority::new();
    let mut table = format!("{:15}", "");
    for scene in Scene::ALL {
        write!(table, " {:16}", format!("{scene:?}")).unwrap();
    }
    let mut asked = Vec::new();
    for scene in Scene::ALL {
        let host = start(&authority, scene.asked()).await;
        let clients = CALLERS.map(|(letter, caller)| (letter, caller, host.client(&authority, caller)));
        asked.push((scene, host, clients));
    }
    for rpc in PeerRpc::ALL {
        write!(table, "\n{:15}", rpc.name()).unwrap();
        for (scene, host, clients) in &mut asked {
            let mut letters = String::new();
            for (letter, caller, client) in clients {
                let session = scene.stage(&host.agent);
                let name = caller.unwrap_or("source");
                let answer = ask(client, *rpc, session, name).await;
                letters.push(if was_admitted(&answer) { *letter } else { '-' });
            }
            write!(table, " {letters:16}").unwrap();
        }
    }
    let lines = table.lines().map(str::trim_end);
    lines.map(|line| format!("{line}\n")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn who_may_ask_another_agent_for_what() {
    let found = table().await;
    let due: String = include_str!("matrix.txt")
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| format!("{line}\n"))
        .collect();
    assert!(
        due == found,
        "matrix.txt has the upper one, the services do the lower one:\n\n{due}\n{found}"
    );
}

/// A host that names another one, or speaks for its queue pairs, is refused, whatever it asks.
#[tokio::test(flavor = "multi_thread")]
async fn nobody_speaks_in_anothers_name() {
    let authority = Authority::new();
    let host = start(&authority, "partner").await;
    let mut outsider = host.client(&authority, Some("outsider"));
    let named = [
        PeerRpc::CheckInstance,
        PeerRpc::Open,
        PeerRpc::CheckPartner,
        PeerRpc::PartnerJoin,
        PeerRpc::MeasureDrain,
        PeerRpc::PartnerPrepare,
        PeerRpc::Publish,
        PeerRpc::Moved,
        PeerRpc::FindPartners,
        PeerRpc::ShareSecrets,
        PeerRpc::PauseEnds,
        PeerRpc::ResumeEnds,
        PeerRpc::ConfirmPeers,
        PeerRpc::PeersGone,
    ];
    for rpc in named {
        let session = Scene::Unknown.stage(&host.agent);
        let error = ask(&mut outsider, rpc, session, "source").await.unwrap_err();
        assert_eq!(error.code(), tonic::Code::PermissionDenied, "{rpc:?}: {error}");
    }
}

/// What a host knows of a session's parties outlives its agent.
#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_comes_later_knows_who_may_ask() {
    let authority = Authority::new();
    let host = start(&authority, "destination").await;
    let session = Scene::DestinationOpen.stage(&host.agent);
    let mut config = host.agent.config.clone();
    // A journal is one agent's at a time: the later one gets a copy.
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (config.state_dir.join("journal"), folder.path().join("journal"));
    std::fs::create_dir(&to).unwrap();
    for entry in std::fs::read_dir(&from).unwrap() {
        let name = entry.unwrap().file_name();
        std::fs::copy(from.join(&name), to.join(&name)).unwrap();
    }
    config.state_dir = folder.path().to_owned();
    let directory = Directory::load(&config.hosts, "destination").unwrap();
    let credentials = Credentials::load(&config.tls).unwrap();
    let later = Agent::open(config, Peers::new(directory, credentials), Host::without_tools()).unwrap();
    let directory = later.peers.directory();
    let id = SessionId { session };
    for (caller, rpc, may) in [
        ("source", PeerRpc::Abort, true),
        ("partner", PeerRpc::Abort, false),
        ("outsider", PeerRpc::Watch, false),
        ("partner", PeerRpc::Outcome, true),
        ("outsider", PeerRpc::Outcome, false),
    ] {
        let permitted = later.permit(rpc, directory.host(caller).unwrap(), &id).await;
        assert_eq!(permitted.is_ok(), may, "{caller} {rpc:?}");
    }
}

/// One call of every RPC of the command line.
async fn command(client: &mut ControlClient<Channel>, rpc: ControlRpc) -> Result<(), Status> {
    match rpc {
        ControlRpc::Run => client.run(RunRequest::default()).await.map(drop),
        ControlRpc::Attach => client.attach(AttachRequest::default()).await.map(drop),
        ControlRpc::Detach => client.detach(DetachRequest::default()).await.map(drop),
        ControlRpc::List => client.list(ListRequest {}).await.map(drop),
        ControlRpc::Logs => client.logs(LogsRequest::default()).await.map(drop),
        ControlRpc::Exec => client.exec(ExecRequest::default()).await.map(drop),
        ControlRpc::Wait => client.wait(WaitRequest::default()).await.map(drop),
        ControlRpc::Remove => client.remove(RemoveRequest::default()).await.map(drop),
        ControlRpc::Migrate => client.migrate(MigrateRequest::default()).await.map(drop),
        ControlRpc::Check => client.check(CheckRequest::default()).await.map(drop),
        ControlRpc::Cancel => client.cancel(CancelRequest::default()).await.map(drop),
        ControlRpc::Sessions => client.sessions(SessionsRequest {}).await.map(drop),
        ControlRpc::Resolve => client.resolve(ResolveSessionRequest::default()).await.map(drop),
        ControlRpc::Forget => client.forget(ForgetSessionRequest::default()).await.map(drop),
        ControlRpc::Pause => client.pause(PauseRequest::default()).await.map(drop),
        ControlRpc::ResumePaused => client
            .resume_paused(ResumePausedRequest::default())
            .await
            .map(drop),
        ControlRpc::Version => client.version(VersionRequest::default()).await.map(drop),
    }
}

/// A connection to a Unix socket that a thread with another effective user makes.
fn connect_as(path: &std::path::Path, uid: Option<u32>) -> tokio::net::UnixStream {
    let path = path.to_owned();
    let connected = std::thread::spawn(move || {
        if let Some(uid) = uid {
            // The system call, not the library's function: of this thread alone, which ends here.
            // SAFETY: three numbers; it changes nothing but this thread's credentials.
            let changed = unsafe { libc::syscall(libc::SYS_setresuid, -1, uid, -1) };
            assert_eq!(changed, 0, "{}", std::io::Error::last_os_error());
        }
        std::os::unix::net::UnixStream::connect(path)
    });
    let stream = connected.join().unwrap().unwrap();
    stream.set_nonblocking(true).unwrap();
    tokio::net::UnixStream::from_std(stream).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn only_root_commands_an_agent() {
    use std::os::unix::fs::PermissionsExt;

    let authority = Authority::new();
    let host = start(&authority, "source").await;
    let path = host.agent.config.api_socket();
    let listener = tokio::net::UnixListener::bind(&path).unwrap();
    // As if somebody had been given a way to it: what is asked here is what the service does.
    for open in [host.agent.config.runtime_dir.as_path(), path.as_path()] {
        std::fs::set_permissions(open, std::fs::Permissions::from_mode(0o777)).unwrap();
    }
    let service = ControlServer::with_interceptor(ControlService(host.agent.clone()), caller::may_command);
    let server = Server::builder()
        .add_service(service)
        .serve_with_incoming(UnixListenerStream::new(listener));
    tokio::spawn(server);
    let is_root = rustix::process::geteuid().is_root();
    // Without root nobody else can be played.
    let others = if is_root { vec![1, 65_534] } else { Vec::new() };
    for uid in std::iter::once(None).chain(others.into_iter().map(Some)) {
        let stream = std::sync::Mutex::new(Some(connect_as(&path, uid)));
        let channel = Address::from_static("http://agent")
            .connect_with_connector(tower::service_fn(move |_| {
                let stream = stream.lock().unwrap().take();
                async move {
                    let stream = stream.ok_or_else(|| std::io::Error::other("only one connection"))?;
                    Ok::<_, std::io::Error>(hyper_util::rt::TokioIo::new(stream))
                }
            }))
            .await
            .unwrap();
        let mut client = ControlClient::new(channel);
        for rpc in ControlRpc::ALL {
            let answer = command(&mut client, *rpc).await;
            let denied = answer.is_err_and(|status| status.code() == tonic::Code::PermissionDenied);
            assert_eq!(denied, uid.is_some(), "{rpc:?} of {uid:?}");
        }
    }
}
