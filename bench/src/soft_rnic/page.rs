//! The page of `docs/` with the tables and plots.

use std::fmt::Write;
use std::path::Path;

use super::Report;
use super::plot::{Axes, Line, Scale, draw, size};

/// Writes `performance.md` and its plots into the folder.
pub fn write(report: &Report, docs: &Path) -> anyhow::Result<()> {
    let figures = docs.join("figures");
    std::fs::create_dir_all(&figures)?;
    plots(report, &figures)?;
    let path = docs.join("performance.md");
    std::fs::write(&path, page(report)?)?;
    println!("{}", path.display());
    Ok(())
}

fn plots(report: &Report, figures: &Path) -> anyhow::Result<()> {
    let mut lines: Vec<Line> = report
        .throughput
        .iter()
        .map(|series| Line {
            name: format!("{}, {} QPs", series.operation.to_uppercase(), series.queue_pairs),
            points: series
                .points
                .iter()
                .map(|point| (point.bytes as f64, point.gbit_s))
                .collect(),
            peer: false,
        })
        .collect();
    let tcp = report.throughput.iter().map(|series| series.tcp_gbit_s);
    let tcp = tcp.clone().sum::<f64>() / tcp.count().max(1) as f64;
    let ends = lines
        .first()
        .map(|line| [line.points.first(), line.points.last()]);
    let ends = ends
        .into_iter()
        .flatten()
        .flatten()
        .map(|(x, _)| (*x, tcp))
        .collect();
    lines.push(Line {
        name: "one TCP stream (mean)".to_owned(),
        points: ends,
        peer: true,
    });
    let axes = Axes {
        title: "Bandwidth of the software RNIC",
        x: "message size",
        y: "Gbit/s",
        scale: Scale::Sizes,
    };
    draw(&figures.join("throughput.svg"), &axes, &lines)?;

    let mut lines: Vec<Line> = report
        .latency
        .operations
        .iter()
        .map(|series| Line {
            name: series.operation.to_uppercase(),
            points: series
                .points
                .iter()
                .map(|point| (point.bytes as f64, point.median_us))
                .collect(),
            peer: false,
        })
        .collect();
    let udp = report
        .latency
        .udp
        .iter()
        .map(|point| (point.bytes as f64, point.median_us));
    lines.push(Line {
        name: "UDP ping-pong, polling".to_owned(),
        points: udp.collect(),
        peer: true,
    });
    let axes = Axes {
        title: "Latency: half a round trip (READ: a whole one)",
        x: "message size",
        y: "µs, median",
        scale: Scale::Sizes,
    };
    draw(&figures.join("latency.svg"), &axes, &lines)?;

    let points = report
        .loss
        .iter()
        .map(|goodput| (goodput.loss_percent, goodput.gbit_s))
        .collect();
    let line = Line {
        name: "WRITE, 64 KiB, 4 QPs".to_owned(),
        points,
        peer: false,
    };
    let axes = Axes {
        title: "Goodput against random loss of packets",
        x: "packets lost in each direction, %",
        y: "Gbit/s",
        scale: Scale::Linear,
    };
    draw(&figures.join("loss.svg"), &axes, &[line])
}

fn page(report: &Report) -> Result<String, std::fmt::Error> {
    let mut text = String::new();
    let context = &report.context;
    writeln!(
        text,
        "# What the software RNIC can do\n\nWritten by `bench/run soft-rnic --docs docs`. Two virtual hosts on one machine \
         with {} processors ({}, Linux {}), joined by veth pairs and a bridge; version {}. Every peer was measured between \
         the same hosts within the same run. Machines are noisy: the ratios say more than the numbers. The hypervisor gave \
         {:.0} % of the processors' time to others meanwhile.\n",
        context.processors,
        context.processor,
        context.kernel,
        context.commit.as_deref().unwrap_or("unknown"),
        report.stolen_percent,
    )?;
    writeln!(
        text,
        "## Bandwidth\n\n![Bandwidth by message size](figures/throughput.svg)\n"
    )?;
    writeln!(
        text,
        "Gbit/s; beside it, at 64 KiB, the part of one TCP stream (`iperf3 -C cubic`) that was measured right before.\n"
    )?;
    let sizes: Vec<u64> = report
        .throughput
        .first()
        .map(|series| series.points.iter().map(|point| point.bytes).collect())
        .unwrap_or_default();
    write!(text, "| | QPs |")?;
    for bytes in &sizes {
        write!(text, " {} |", size(*bytes as f64))?;
    }
    writeln!(
        text,
        " TCP | 64 KiB / TCP | CPU s/GB at 64 KiB | million messages/s at 8 B |"
    )?;
    writeln!(text, "|---|--:|{}--:|--:|--:|--:|", "--:|".repeat(sizes.len()))?;
    for series in &report.throughput {
        write!(
            text,
            "| {} | {} |",
            series.operation.to_uppercase(),
            series.queue_pairs
        )?;
        for point in &series.points {
            write!(text, " {:.2} |", point.gbit_s)?;
        }
        let at_64_kib = series.at(65_536);
        writeln!(
            text,
            " {:.1} | {:.2} | {:.2} | {:.2} |",
            series.tcp_gbit_s,
            at_64_kib.map_or(f64::NAN, |point| point.gbit_s / series.tcp_gbit_s),
            at_64_kib.map_or(f64::NAN, |point| point.cpu_s_per_gb),
            series.at(8).map_or(f64::NAN, |point| point.messages_per_s / 1e6),
        )?;
    }
    writeln!(
        text,
        "\n## Latency\n\n![Latency by message size](figures/latency.svg)\n"
    )?;
    writeln!(
        text,
        "8-byte WRITE takes {:.1} times half a round trip of a UDP ping-pong whose two ends poll; four processes share the \
         processors meanwhile.\n",
        report.latency.ratio().unwrap_or(f64::NAN)
    )?;
    latency_table(report, &mut text)?;
    writeln!(
        text,
        "\n## Connections and memory\n\n| QPs | created in s | connected in s | destroyed in s | bytes of the RNIC each |"
    )?;
    writeln!(text, "|--:|--:|--:|--:|--:|")?;
    for setup in &report.setup {
        writeln!(
            text,
            "| {} | {:.4} | {:.4} | {:.4} | {:.0} |",
            setup.queue_pairs, setup.create_s, setup.connect_s, setup.destroy_s, setup.bytes_per_queue_pair
        )?;
    }
    let per_second = report
        .setup
        .last()
        .map(|setup| f64::from(setup.queue_pairs) / (setup.create_s + setup.connect_s));
    writeln!(
        text,
        "\nThat is {:.0} connected queue pairs a second. {} memory regions of one page each: registered in {:.3} s, {:.0} bytes \
         of the RNIC each.\n",
        per_second.unwrap_or(f64::NAN),
        report.regions.regions,
        report.regions.register_s,
        report.regions.bytes_per_region
    )?;
    writeln!(
        text,
        "## Loss\n\n![Goodput against loss](figures/loss.svg)\n\n| packets lost | Gbit/s | part of that without loss |"
    )?;
    writeln!(text, "|--:|--:|--:|")?;
    for goodput in &report.loss {
        writeln!(
            text,
            "| {:.1} % | {:.2} | {:.2} |",
            goodput.loss_percent, goodput.gbit_s, goodput.ratio
        )?;
    }
    writeln!(
        text,
        "\nBatches are cut into single packets before the link here, so that each is lost by itself; that alone costs most of \
         the bandwidth above."
    )?;
    writeln!(
        text,
        "\n## Many to one\n\n64 KiB WRITEs from several hosts to one at the same time, 16 QPs each; all RNICs share the \
         machine's processors.\n\n| senders | all, Gbit/s | the slowest |"
    )?;
    writeln!(text, "|--:|--:|--:|")?;
    for overload in &report.many_to_one {
        writeln!(
            text,
            "| {} | {:.2} | {:.2} |",
            overload.senders, overload.gbit_s, overload.least_gbit_s
        )?;
    }
    Ok(text)
}

fn latency_table(report: &Report, text: &mut String) -> std::fmt::Result {
    let latency = &report.latency;
    write!(text, "| µs |")?;
    for point in latency
        .operations
        .first()
        .map(|series| &series.points[..])
        .unwrap_or_default()
    {
        write!(text, " {} |", size(point.bytes as f64))?;
    }
    let columns = latency.operations.first().map_or(0, |series| series.points.len());
    writeln!(text, "\n|---|{}", "--:|".repeat(columns))?;
    let udp = ("UDP ping-pong".to_owned(), &latency.udp);
    let rows = latency
        .operations
        .iter()
        .map(|series| (series.operation.to_uppercase(), &series.points));
    for (name, points) in std::iter::once(udp).chain(rows) {
        write!(text, "| {name} |")?;
        for index in 0..columns {
            match points.get(index) {
                Some(point) => write!(text, " {:.1} |", point.median_us)?,
                None => write!(text, " – |")?,
            }
        }
        writeln!(text)?;
    }
    Ok(())
}
