//! `verbatim nic stat`.

use std::collections::HashMap;
use std::io::IsTerminal;
use std::net::Ipv6Addr;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use serde_json::{Map, Value, json};
use verbatim_device::control::{QpStatistics, Reply, Request};

use crate::args::StatArguments;
use crate::output::table;

const INTERVAL: Duration = Duration::from_secs(1);

/// All that the RNIC tells.
struct Statistics {
    device: Vec<(String, u64)>,
    qps: Vec<QpStatistics>,
}

pub fn run(arguments: &StatArguments) -> anyhow::Result<ExitCode> {
    let mut statistics = query(arguments)?;
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&as_json(&statistics))?);
    } else if arguments.prometheus {
        print!("{}", as_prometheus(&statistics));
    } else if !arguments.watch {
        print!("{}", as_tables(&statistics, None, arguments.qp.is_some()));
    } else {
        let mut earlier = None;
        loop {
            // A terminal is cleared, so that the table stays in its place (ECMA-48: CUP, ED).
            if std::io::stdout().is_terminal() {
                print!("\x1b[H\x1b[2J");
            }
            println!(
                "{}",
                as_tables(&statistics, earlier.as_ref(), arguments.qp.is_some())
            );
            std::thread::sleep(INTERVAL);
            earlier = Some(std::mem::replace(&mut statistics, query(arguments)?));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn query(arguments: &StatArguments) -> anyhow::Result<Statistics> {
    let mut statistics = pages(&arguments.runtime_dir)?;
    if let Some(qpn) = arguments.qp {
        statistics.qps.retain(|qp| qp.qpn == qpn);
        if statistics.qps.is_empty() {
            bail!("there is no queue pair {qpn:#x}, or it belongs to another user");
        }
    }
    Ok(statistics)
}

fn pages(runtime_dir: &Path) -> anyhow::Result<Statistics> {
    let (socket, mut reply) = super::ask(runtime_dir, &Request::QueryStatistics { from_qpn: 0 })?;
    let mut all = Vec::new();
    loop {
        let Reply::Statistics { device, qps, next } = reply else {
            bail!("the software RNIC answers with something else: is it of another version?");
        };
        all.extend(qps);
        let Some(from_qpn) = next else {
            return Ok(Statistics { device, qps: all });
        };
        reply = socket.call(&Request::QueryStatistics { from_qpn }, &[])?.message;
    }
}

fn remote(qp: &QpStatistics) -> String {
    match qp.remote {
        Some((gid, qpn)) => format!("{} {qpn:#x}", Ipv6Addr::from(gid).to_canonical()),
        None => "-".to_owned(),
    }
}

fn value(counters: &[(String, u64)], name: &str) -> u64 {
    counters
        .iter()
        .find(|(known, _)| known == name)
        .map_or(0, |(_, value)| *value)
}

/// Counters that a table of queue pairs has room for, and their heads.
const COLUMNS: [(&str, &str); 7] = [
    ("sent_pkts", "SENT"),
    ("rcvd_pkts", "RCVD"),
    ("sent_bytes", "SENT BYTES"),
    ("rcvd_bytes", "RCVD BYTES"),
    ("completer_retry_err", "RETRANS"),
    ("out_of_seq_request", "OUT OF SEQ"),
    ("rcvd_rnr_err", "RNR"),
];

/// For people. Of the device, and of one queue pair, what is not zero; of many queue pairs one line each.
fn as_tables(now: &Statistics, earlier: Option<&Statistics>, one: bool) -> String {
    let before: HashMap<&str, u64> = earlier
        .map(|earlier| {
            earlier
                .device
                .iter()
                .map(|(name, value)| (name.as_str(), *value))
                .collect()
        })
        .unwrap_or_default();
    let counters = |list: &[(String, u64)], before: &HashMap<&str, u64>| {
        let rows: Vec<_> = list
            .iter()
            .filter(|(_, value)| *value > 0)
            .map(|(name, value)| {
                let mut row = vec![name.clone(), value.to_string()];
                if let Some(before) = before.get(name.as_str()) {
                    row.push(format!("{:+}", *value as i128 - i128::from(*before)));
                }
                row
            })
            .collect();
        match earlier {
            Some(_) => table(&["COUNTER", "VALUE", "CHANGE"], &rows),
            None => table(&["COUNTER", "VALUE"], &rows),
        }
    };
    if one {
        let head = now.qps.iter().map(|qp| {
            let before = earlier
                .and_then(|earlier| earlier.qps.iter().find(|known| known.qpn == qp.qpn))
                .map(|qp| {
                    qp.counters
                        .iter()
                        .map(|(name, value)| (name.as_str(), *value))
                        .collect()
                })
                .unwrap_or_default();
            format!(
                "queue pair {:#x}, {:?}, {:?}, of {} (pid {}), to {}\n\n{}",
                qp.qpn,
                qp.qp_type,
                qp.state,
                qp.context,
                qp.pid,
                remote(qp),
                counters(&qp.counters, &before)
            )
        });
        return head.collect();
    }
    let mut text = counters(&now.device, &before);
    if now.qps.is_empty() {
        return text;
    }
    let head: Vec<_> = ["QP", "TYPE", "STATE", "PROGRAM", "PID", "REMOTE"]
        .into_iter()
        .chain(COLUMNS.map(|(_, head)| head))
        .collect();
    let rows: Vec<_> = now
        .qps
        .iter()
        .map(|qp| {
            let mut row = vec![
                format!("{:#x}", qp.qpn),
                format!("{:?}", qp.qp_type).to_uppercase(),
                format!("{:?}", qp.state).to_uppercase(),
                qp.context.clone(),
                qp.pid.to_string(),
                remote(qp),
            ];
            row.extend(COLUMNS.map(|(name, _)| value(&qp.counters, name).to_string()));
            row
        })
        .collect();
    text += "\n";
    text + &table(&head, &rows)
}

fn as_map(counters: &[(String, u64)]) -> Map<String, Value> {
    counters
        .iter()
        .map(|(name, value)| (name.clone(), json!(value)))
        .collect()
}

fn as_json(statistics: &Statistics) -> Value {
    let qps: Vec<_> = statistics
        .qps
        .iter()
        .map(|qp| {
            let remote = qp
                .remote
                .map(|(gid, qpn)| json!({ "gid": Ipv6Addr::from(gid).to_string(), "qpn": qpn }));
            json!({
                "qpn": qp.qpn,
                "type": format!("{:?}", qp.qp_type).to_uppercase(),
                "state": format!("{:?}", qp.state).to_uppercase(),
                "program": qp.context,
                "pid": qp.pid,
                "remote": remote,
                "counters": as_map(&qp.counters),
            })
        })
        .collect();
    json!({ "device": as_map(&statistics.device), "qps": qps })
}

/// Whether a device counter is a number of things that there are now, and not of things that have happened.
fn is_gauge(name: &str) -> bool {
    matches!(
        name,
        "contexts" | "pds" | "mrs" | "mws" | "cqs" | "srqs" | "qps" | "ahs" | "mcast_groups"
    )
}

/// Prometheus' text format, version 0.0.4: one family per counter, its samples together.
fn as_prometheus(statistics: &Statistics) -> String {
    let mut text = String::new();
    for (name, value) in &statistics.device {
        if is_gauge(name) {
            text += &format!("# TYPE verbatim_nic_{name} gauge\nverbatim_nic_{name} {value}\n");
        } else {
            text += &format!("# TYPE verbatim_nic_{name}_total counter\nverbatim_nic_{name}_total {value}\n");
        }
    }
    let names = statistics.qps.first().map_or(&[][..], |qp| &qp.counters);
    for (index, (name, _)) in names.iter().enumerate() {
        text += &format!("# TYPE verbatim_nic_qp_{name}_total counter\n");
        for qp in &statistics.qps {
            let Some((_, value)) = qp.counters.get(index).filter(|(known, _)| known == name) else {
                continue;
            };
            let program = label(&qp.context);
            text += &format!(
                "verbatim_nic_qp_{name}_total{{qp=\"{:#x}\",program=\"{program}\",pid=\"{}\"}} {value}\n",
                qp.qpn, qp.pid
            );
        }
    }
    text
}

/// A label's value, with what would end it escaped.
fn label(text: &str) -> String {
    text.replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use verbatim_device::control::{QpState, QpType};

    fn statistics() -> Statistics {
        let counters = |sent| vec![("sent_pkts".to_owned(), sent), ("bad_pkey".to_owned(), 0)];
        let qp = |qpn, sent| QpStatistics {
            qpn,
            context: "a \"name\"".into(),
            pid: 7,
            qp_type: QpType::Rc,
            state: QpState::Rts,
            remote: Some((
                std::net::Ipv4Addr::new(10, 0, 0, 2).to_ipv6_mapped().octets(),
                0x22,
            )),
            counters: counters(sent),
        };
        Statistics {
            device: vec![
                ("sent_pkts".into(), 9),
                ("rcvd_pkts".into(), 0),
                ("qps".into(), 2),
            ],
            qps: vec![qp(0x11, 4), qp(0x12, 5)],
        }
    }

    #[test]
    fn tables_show_what_has_happened() {
        let text = as_tables(&statistics(), None, false);
        assert!(
            text.starts_with("COUNTER    VALUE\nsent_pkts  9\nqps        2\n\nQP"),
            "{text}"
        );
        assert!(
            text.contains("0x12  RC    RTS    a \"name\"  7    10.0.0.2 0x22  5"),
            "{text}"
        );
        let mut later = statistics();
        later.device[0].1 = 19;
        let text = as_tables(&later, Some(&statistics()), false);
        assert!(text.contains("sent_pkts  19     +10"), "{text}");
        later.qps.truncate(1);
        let text = as_tables(&later, None, true);
        assert!(
            text.starts_with("queue pair 0x11, Rc, Rts, of a \"name\" (pid 7), to 10.0.0.2 0x22"),
            "{text}"
        );
    }

    #[test]
    fn prometheus_gets_families_with_escaped_labels() {
        let text = as_prometheus(&statistics());
        for line in [
            "# TYPE verbatim_nic_sent_pkts_total counter",
            "verbatim_nic_sent_pkts_total 9",
            "verbatim_nic_qps 2",
            "verbatim_nic_qp_sent_pkts_total{qp=\"0x12\",program=\"a \\\"name\\\"\",pid=\"7\"} 5",
        ] {
            assert!(text.lines().any(|known| known == line), "{line} in\n{text}");
        }
        assert_eq!(text.matches("# TYPE verbatim_nic_qp_sent_pkts_total").count(), 1);
    }

    #[test]
    fn json_names_each_counter() {
        let value = as_json(&statistics());
        assert_eq!(value["device"]["sent_pkts"], 9);
        assert_eq!(value["qps"][1]["counters"]["sent_pkts"], 5);
        assert_eq!(value["qps"][0]["remote"]["gid"], "::ffff:10.0.0.2");
    }
}
