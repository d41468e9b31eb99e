//! What programs answer takes as much of the agent's memory as it is worth, and keys are told to those who may know them.

use std::os::fd::OwnedFd;

use verbatim_channel::RoadMap;
use verbatim_seqpacket::Carried;

use super::*;

/// A road map of empty texts, one byte each here and 24 in memory: as long as an answer may be, in a file that has hardly a page.
fn zeroes() -> (Carried, OwnedFd) {
    let mut begins = postcard::to_stdvec(&Answer::Described(RoadMap::default())).unwrap();
    assert_eq!(begins.pop(), Some(0), "no blockers");
    let blockers = quotas::ANSWER_BYTES - 16;
    begins.extend(postcard::to_stdvec(&blockers).unwrap());
    let length = begins.len() as u64 + blockers;
    assert!(length <= quotas::ANSWER_BYTES && blockers * size_of::<String>() as u64 > 1 << 30);
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let memory = rustix::fs::memfd_create("zeroes", flags).unwrap();
    rustix::fs::ftruncate(&memory, length).unwrap();
    rustix::io::pwrite(&memory, &begins, 0).unwrap();
    (Carried::InMemfd(length), memory)
}

/// The guest of this process in an instance.
async fn present(site: &Site, instance: &str) -> Guest {
    let present = site.guests.present(Some(instance), std::process::id());
    tokio::time::timeout(LIMIT, present).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_of_nothing_but_zeroes_is_not_gigabytes_here() {
    let site = Site::new();
    let mut hostile = Vec::new();
    for tenant in 0..10 {
        let name = format!("hostile-{tenant}");
        let socket = greet(&site.instance(&name), VERSION).await;
        let guest = present(&site, &name).await;
        hostile.push(tokio::spawn(async move {
            let lies = async {
                socket.recv::<Order>(1 << 20).await.unwrap();
                let (carried, memory) = zeroes();
                let sends = |socket: &Socket| socket.send(&carried, &[memory.as_fd()]);
                socket.when_writable(sends).await.unwrap();
            };
            let (described, ()) = tokio::join!(guest.describe(), lies);
            described.expect_err("it lies")
        }));
    }
    // Meanwhile an honest one is heard.
    let socket = greet(&site.instance("honest"), VERSION).await;
    let guest = present(&site, "honest").await;
    for version in 0..100 {
        let answers = async {
            socket.recv::<Order>(1 << 20).await.unwrap();
            let road_map = RoadMap {
                version,
                ..RoadMap::default()
            };
            socket.send(&Answer::Described(road_map), &[]).await.unwrap();
        };
        let (described, ()) = tokio::join!(guest.describe(), answers);
        assert_eq!(described.unwrap().version, version);
    }
    for refused in hostile {
        let refused = format!("{:#}", refused.await.unwrap());
        assert!(refused.contains("memory"), "{refused}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_counts_until_nobody_holds_it() {
    let site = Site::new();
    let socket = greet(&site.instance("a"), VERSION).await;
    let guest = present(&site, "a").await;
    let most = quotas::ANSWERS_HELD_OF_ONE / quotas::ANSWER_BYTES as usize + 1;
    let road_map = RoadMap {
        blockers: vec!["x".repeat(1 << 20); (quotas::ANSWER_BYTES >> 20) as usize - 1],
        ..RoadMap::default()
    };
    let answer = Answer::Described(road_map);
    let describe = || async {
        let answers = async {
            socket.recv::<Order>(1 << 20).await.unwrap();
            socket.send(&answer, &[]).await.unwrap();
        };
        tokio::join!(guest.describe_held(), answers).0
    };
    let mut held = Vec::new();
    let refused = loop {
        match describe().await {
            Ok((_, place)) => held.push(place),
            Err(error) => break format!("{error:#}"),
        }
        assert!(held.len() <= most, "{} are held", held.len());
    };
    assert!(refused.contains("more than 256 MiB at once"), "{refused}");
    // It is still there, and heard again once there is room.
    drop(held);
    describe().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_greets_again_is_one_guest() {
    let site = Site::new();
    let (path, other) = (site.instance("a"), site.instance("b"));
    let mut before = greet(&path, VERSION).await;
    let mut guest = present(&site, "a").await;
    let _of_b = greet(&other, VERSION).await;
    present(&site, "b").await;
    for _ in 0..10 {
        let again = greet(&path, VERSION).await;
        let closed = tokio::time::timeout(LIMIT, before.recv::<Order>(1 << 20)).await;
        closed.unwrap().expect_err("the earlier one is closed");
        tokio::time::timeout(LIMIT, site.guests.gone(&guest))
            .await
            .unwrap();
        before = again;
        guest = present(&site, "a").await;
        assert_eq!(site.guests.of_instance("a").len(), 1);
    }
    // What waits for an answer of the earlier one is told.
    let asked = tokio::spawn({
        let guest = guest.clone();
        async move { guest.order(Order::Describe, Vec::new()).await }
    });
    before.recv::<Order>(1 << 20).await.unwrap();
    let _again = greet(&path, VERSION).await;
    let told = tokio::time::timeout(LIMIT, asked).await.unwrap().unwrap();
    told.expect_err("its channel is closed");
    assert_eq!(site.guests.of_instance("b").len(), 1, "another instance's");
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_are_told_to_those_who_connect() {
    let site = Site::new();
    let path = site.instance("a");
    let stranger: Resolved = ask(&path, &resolve()).await.unwrap();
    assert_eq!((stranger.endpoint.qpn, stranger.keys.len()), (7, 0));
    site.resolver.1.store(true, Ordering::Relaxed);
    let partner: Resolved = ask(&path, &resolve()).await.unwrap();
    assert_eq!((partner.endpoint.qpn, partner.keys.len()), (7, 1));
}

#[test]
fn long_texts_are_cut_off_between_characters() {
    assert_eq!(short("web".to_owned(), 3), "web");
    assert_eq!(short("web server".to_owned(), 3), "web");
    assert_eq!(short("aé".to_owned(), 2), "a");
    assert_eq!(short(String::new(), 2), "");
}

#[test]
fn an_answer_that_was_not_due_is_named_and_not_told() {
    assert_eq!(name_of(&Answer::Done), "Done");
    assert_eq!(name_of(&Answer::Described(RoadMap::default())), "Described");
    let message = "long".repeat(1000);
    let error = unexpected(&Answer::Error { message }, "Done").to_string();
    assert_eq!(error, "the guest library answered Error where Done was due");
}
