//! An agent, as far as it answers whether other ends of connections name those of its RNIC.

use verbatim_device::control::{
    PeerAnswer, PeerNews, PeerPair, PeerQuestion, PeerStanding, PeerVerdict, Reply, Request,
};
use verbatim_seqpacket::Socket;

use super::{PATIENCE, Server};

pub struct PeerAgent {
    questions: Socket,
    socket: Socket,
}

impl PeerAgent {
    /// Takes the questions of an RNIC.
    pub fn of(server: &Server) -> Self {
        let questions = Socket::connect(&server.socket()).expect("the RNIC listens");
        let taken = questions.call::<_, Reply>(&Request::TakePeerQuestions, &[]);
        assert!(matches!(taken.expect("an answer").message, Reply::Done));
        questions.limit(PATIENCE).expect("a limit");
        Self {
            questions,
            socket: Socket::connect(&server.socket()).expect("the RNIC listens"),
        }
    }

    /// What the RNIC says next.
    pub fn news(&self) -> PeerNews {
        self.questions.recv().expect("news").message
    }

    /// The next question.
    pub fn question(&self) -> PeerQuestion {
        match self.news() {
            PeerNews::Question(question) => question,
            other => panic!("{other:?}"),
        }
    }

    /// The next pair that is none any more.
    pub fn gone(&self) -> PeerPair {
        match self.news() {
            PeerNews::Gone(pair) => pair,
            other => panic!("{other:?}"),
        }
    }

    pub fn answer(&self, question: &PeerQuestion, verdict: PeerVerdict) {
        let PeerQuestion { number, pair, .. } = *question;
        self.tell(Request::AnswerPeerQuestions {
            answers: vec![PeerAnswer {
                number,
                pair,
                verdict,
            }],
        });
    }

    /// Says that the other ends name these of its RNIC no more.
    pub fn peers_gone(&self, pairs: Vec<PeerPair>) {
        self.tell(Request::PeersGone { pairs });
    }

    /// Says that the RNICs of the other ends know that these name theirs no more.
    pub fn peers_heard(&self, pairs: Vec<PeerPair>) {
        self.tell(Request::PeersHeard { pairs });
    }

    fn tell(&self, request: Request) {
        let reply = self.socket.call::<_, Reply>(&request, &[]);
        assert!(matches!(reply.expect("an answer").message, Reply::Done));
    }

    /// How queue pairs of its RNIC stand to those of another host that name them.
    pub fn meet(&self, pairs: Vec<PeerPair>) -> Vec<PeerStanding> {
        let request = Request::MeetPeers { pairs };
        match self
            .socket
            .call::<_, Reply>(&request, &[])
            .expect("an answer")
            .message
        {
            Reply::PeerStandings(standings) => standings,
            other => panic!("{other:?}"),
        }
    }
}
