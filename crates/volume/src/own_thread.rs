//! Threads with a runtime of their own, for connections between daemons.
//!
//! A write of the tenant passes a task at this host, two at the other, and one at this host again while its
//! volume moves. On a runtime of several threads each of these tasks is woken on another thread, which costs
//! more than all other work for the write. Each such connection therefore has one thread, which reads,
//! decrypts, encrypts and writes: messages that are there at the same time are handled together. Threads that
//! carry chunks have a lower priority ([`crate::background`]).

use std::convert::Infallible;
use std::io;

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// A thread that waits for its task.
pub struct OwnThread {
    runtime: Handle,
    /// The thread ends when this is dropped.
    lives: oneshot::Sender<Infallible>,
}

impl OwnThread {
    /// Starts the thread.
    pub fn start(name: &str) -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (lives, ends) = oneshot::channel();
        std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            // The type has no value: the wait ends when the other side is dropped.
            let _ = runtime.block_on(ends);
        })?;
        Ok(Self {
            runtime: handle,
            lives,
        })
    }

    /// Runs the future, and the tasks that it spawns. When it has ended or was aborted, the thread ends with
    /// all remaining tasks.
    pub fn spawn<T: Send + 'static>(self, future: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
        let Self { runtime, lives } = self;
        runtime.spawn(async move {
            let _lives = lives;
            future.await
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn name() -> Option<String> {
        std::thread::current().name().map(str::to_owned)
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_it_runs_and_what_that_spawns_are_on_that_thread() {
        let thread = OwnThread::start("one").expect("a thread");
        let names = thread.spawn(async {
            tokio::time::sleep(Duration::from_millis(1)).await;
            (
                name(),
                tokio::spawn(async { name() }).await.expect("it does not panic"),
            )
        });
        let one = Some("one".to_owned());
        assert_eq!(names.await.expect("it does not panic"), (one.clone(), one));
    }

    #[tokio::test]
    async fn one_that_is_aborted_takes_all_along() {
        let (alive, mut is_alive) = tokio::sync::mpsc::channel::<()>(1);
        let (begun, has_begun) = oneshot::channel();
        let thread = OwnThread::start("one").expect("a thread");
        let task = thread.spawn(async move {
            tokio::spawn(async move {
                let _alive = alive;
                let _ = begun.send(());
                std::future::pending::<()>().await;
            });
            std::future::pending::<()>().await;
        });
        has_begun.await.expect("it runs");
        task.abort();
        assert!(task.await.expect_err("it was aborted").is_cancelled());
        assert!(is_alive.recv().await.is_none());
    }
}
