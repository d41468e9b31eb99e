//! Agents and commands of several releases, meeting.

use super::*;

/// An agent of this release, or of one to come.
fn range(oldest: u32, newest: u32) -> Versions {
    Versions::new(oldest, newest)
}

/// How an agent of the last release without ranges answers: it says its number, whatever it is asked.
fn silent_answer(number: u32, host: &str) -> HelloReply {
    HelloReply {
        protocol: number,
        host: host.to_owned(),
        version: "0.1.0".to_owned(),
        ..HelloReply::default()
    }
}

/// How it greets, and whether it takes the answer.
fn silent_greets(number: u32, own: Versions) -> (u32, bool) {
    let request = HelloRequest {
        protocol: number,
        host: "old".to_owned(),
        ..HelloRequest::default()
    };
    let (reply, _) = answer_hello(own, &request, "new");
    (reply.protocol, reply.protocol == number)
}

fn meets(own: Versions, other: Versions) -> Result<u32, String> {
    let (reply, agreed) = answer_hello(other, &hello(own, "src"), "dst");
    let read = read_hello(own, "src", &reply).map(|agreed| agreed.protocol);
    assert_eq!(read.as_ref().ok(), agreed.as_ref(), "both know the same");
    // Who compares the number itself comes to the same, too.
    assert!(agreed.is_none() || agreed == Some(reply.protocol));
    read.map_err(|mismatch| mismatch.to_string())
}

#[test]
fn the_newest_that_both_have_is_spoken() {
    assert_eq!(meets(range(10, 10), range(10, 10)), Ok(10));
    assert_eq!(meets(range(10, 11), range(10, 10)), Ok(10), "the other is older");
    assert_eq!(meets(range(10, 10), range(10, 11)), Ok(10), "the other is newer");
    assert_eq!(meets(range(10, 12), range(11, 13)), Ok(12));
}

#[test]
fn who_has_none_in_common_says_which_side_to_upgrade() {
    let refused = meets(range(10, 11), range(12, 13)).unwrap_err();
    assert_eq!(
        refused,
        "the agent of src speaks versions 10 to 11 of the agent contract and the agent of dst versions 12 to 13: upgrade the \
         agent of src"
    );
    let refused = meets(range(12, 13), range(10, 11)).unwrap_err();
    assert!(refused.ends_with("upgrade the agent of dst"), "{refused}");
}

#[test]
fn an_agent_that_demands_its_own_number_gets_it() {
    assert_eq!(silent_greets(10, range(10, 10)), (10, true));
    assert_eq!(silent_greets(10, range(10, 12)), (10, true), "it is an older one");
    assert_eq!(silent_greets(9, range(10, 12)), (12, false), "it is too old");
}

#[test]
fn an_agent_that_says_one_number_is_spoken_to_in_that() {
    let read = |own, number| read_hello(own, "src", &silent_answer(number, "dst"));
    let agreed = read(range(10, 12), 10).unwrap();
    assert_eq!(agreed.protocol, 10);
    assert_eq!(agreed.channel, SILENT_CHANNEL);
    assert!(agreed.capabilities.is_empty());
    let asked = hello(range(10, 12), "src");
    assert!(demands_its_own(&asked, &silent_answer(10, "dst"), &agreed));
    let again = hello(Versions::only(agreed.protocol), "src");
    assert!(!demands_its_own(&again, &silent_answer(10, "dst"), &agreed));
    let refused = read(range(10, 12), 9).unwrap_err().to_string();
    assert!(refused.ends_with("upgrade the agent of dst"), "{refused}");
    let refused = read(range(10, 12), 13).unwrap_err().to_string();
    assert!(refused.ends_with("upgrade the agent of src"), "{refused}");
}

#[test]
fn a_range_that_is_none_counts_as_one_number() {
    let request = HelloRequest {
        protocol: 10,
        oldest: 11,
        ..HelloRequest::default()
    };
    assert_eq!(answer_hello(range(10, 11), &request, "dst").1, Some(10));
}

#[test]
fn commands_and_agents_agree_likewise() {
    let meets = |own: Versions, other: Versions| {
        let request = VersionRequest {
            protocol: own.newest,
            oldest: own.oldest,
        };
        let (protocol, versions) = answer_version(other, &request);
        let reply = VersionReply {
            host: "src".to_owned(),
            protocol,
            oldest: versions.oldest,
            newest: versions.newest,
            ..VersionReply::default()
        };
        read_version(own, &reply).map_err(|mismatch| mismatch.to_string())
    };
    assert_eq!(meets(range(10, 10), range(10, 11)), Ok(10));
    assert_eq!(meets(range(10, 11), range(10, 10)), Ok(10));
    let refused = meets(range(11, 11), range(10, 10)).unwrap_err();
    assert!(refused.ends_with("upgrade the agent of src"), "{refused}");
    let refused = meets(range(10, 10), range(11, 11)).unwrap_err();
    assert!(refused.ends_with("upgrade this command"), "{refused}");
    // A command of the last release without ranges says nothing, and demands its number.
    assert_eq!(answer_version(range(10, 11), &VersionRequest::default()).0, 10);
    // An agent of that release says one number.
    let reply = VersionReply {
        protocol: 10,
        ..VersionReply::default()
    };
    assert_eq!(read_version(range(10, 11), &reply), Ok(10));
}

#[test]
fn a_session_is_of_a_version_that_is_spoken_here() {
    assert_eq!(pinned(0, "src").unwrap(), SILENT, "of a source that pins none");
    assert_eq!(pinned(PROTOCOL, "src").unwrap(), PROTOCOL);
    let refused = format!("{:#}", pinned(PROTOCOL + 1, "src").unwrap_err());
    assert!(refused.ends_with("upgrade this host's agent"), "{refused}");
}
