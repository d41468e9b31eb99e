//! An agent, as far as it answers whether other ends of connections name those of its RNIC.

use verbatim_device::control::{
    PeerAnswer, PeerPair, PeerQuestion, PeerStanding, PeerVerdict, Reply, Request,
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

    /// The next question.
    pub fn question(&self) -> PeerQuestion {
        self.questions.recv().expect("a question").message
    }

    pub fn answer(&self, pair: PeerPair, verdict: PeerVerdict) {
        let answers = vec![PeerAnswer { pair, verdict }];
        let request = Request::AnswerPeerQuestions { answers };
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
