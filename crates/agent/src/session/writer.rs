//! Writes a session's decisions down, one after the other, while the agent goes on.

use std::sync::Arc;

use tokio::task::JoinHandle;
use verbatim_session::Role;
use verbatim_session::decision::Written;
use verbatim_session::record::What;

use crate::journal::Journal;

/// The journal, for one host's part in one session.
pub struct Writer {
    journal: Arc<Journal>,
    session: u64,
    role: Role,
    under_way: Option<JoinHandle<Written>>,
}

impl Writer {
    /// For this part in this session.
    pub fn new(journal: &Arc<Journal>, session: u64, role: Role) -> Self {
        Self {
            journal: Arc::clone(journal),
            session,
            role,
            under_way: None,
        }
    }

    /// Begins to write; behind what was begun before.
    pub async fn begin(&mut self, what: impl Into<What>) {
        self.begin_or(what, || {}).await;
    }

    /// The same; `failed` hears it if the record is not in the journal.
    pub async fn begin_or(&mut self, what: impl Into<What>, failed: impl FnOnce() + Send + 'static) {
        self.finish().await;
        let (journal, session, role) = (Arc::clone(&self.journal), self.session, self.role);
        let what = what.into();
        let said = format!("{what:?}");
        let write = move || match journal.write(session, role, what) {
            Ok(()) => Written::Durable,
            Err(error) => {
                tracing::error!(
                    session = format!("{session:016x}"),
                    %role,
                    %error,
                    "{said} cannot be written down; look after the disk of the journal"
                );
                failed();
                Written::Failed
            }
        };
        self.under_way = Some(tokio::task::spawn_blocking(write));
    }

    /// Waits for what was begun last.
    pub async fn finish(&mut self) -> Option<Written> {
        let written = self.under_way.take()?.await;
        Some(written.unwrap_or(Written::Failed))
    }

    /// Writes; it is on disk when this returns.
    pub async fn write(&mut self, what: impl Into<What>) -> Written {
        self.begin(what).await;
        self.finish().await.unwrap_or(Written::Failed)
    }
}
