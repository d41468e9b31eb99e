//! Which of the machine's cores a host's RNIC should keep to.

use rustix::thread::{CpuSet, sched_getaffinity};

/// The core for the host at `index` of `hosts`, by its number.
pub fn of_host(index: usize, hosts: usize) -> usize {
    let set = sched_getaffinity(None).unwrap_or_default();
    let own: Vec<_> = (0..CpuSet::MAX_CPU).filter(|core| set.is_set(*core)).collect();
    share(index, hosts, &own)
}

/// Neighbours share where there are too few: the first host and the last have the most to say to each other.
fn share(index: usize, hosts: usize, cores: &[usize]) -> usize {
    cores.get(index * cores.len() / hosts).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_share_the_cores_evenly() {
        let shares = |hosts, cores: &[usize]| {
            (0..hosts)
                .map(|index| share(index, hosts, cores))
                .collect::<Vec<_>>()
        };
        assert_eq!(shares(2, &[0, 1]), [0, 1]);
        assert_eq!(shares(3, &[0, 1]), [0, 0, 1]);
        assert_eq!(shares(2, &[3, 5, 8, 9]), [3, 8]);
        assert_eq!(shares(5, &[7]), [7; 5]);
        assert_eq!(shares(1, &[]), [0]);
    }
}
