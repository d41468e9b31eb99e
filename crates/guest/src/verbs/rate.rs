//! `enum ibv_rate`: as megabits in a second, and as multiples of 2.5 Gbit/s.

use std::ffi::c_int;

/// What is none of them.
const NONE: c_int = -1;
const IBV_RATE_MAX: c_int = 0;

/// The number of each rate, what it is in Mbit/s, and the multiple, if it has one.
const RATES: [(c_int, c_int, Option<c_int>); 23] = [
    (2, 2_500, Some(1)),
    (5, 5_000, Some(2)),
    (3, 10_000, Some(4)),
    (6, 20_000, Some(8)),
    (4, 30_000, Some(12)),
    (7, 40_000, Some(16)),
    (8, 60_000, Some(24)),
    (9, 80_000, Some(32)),
    (10, 120_000, Some(48)),
    (11, 14_062, None),
    (12, 56_250, None),
    (13, 112_500, None),
    (14, 168_750, None),
    (15, 25_781, None),
    (16, 103_125, None),
    (17, 206_250, None),
    (18, 309_375, None),
    (19, 28_125, Some(11)),
    (20, 53_125, Some(20)),
    (21, 425_000, Some(160)),
    (22, 637_500, Some(240)),
    (23, 850_000, Some(320)),
    (24, 1_275_000, Some(480)),
];

/// `ibv_rate_to_mbps`(3)
#[unsafe(no_mangle)]
pub extern "C" fn ibv_rate_to_mbps(rate: c_int) -> c_int {
    let found = RATES.iter().find(|(number, _, _)| *number == rate);
    found.map_or(NONE, |(_, mbps, _)| *mbps)
}

/// `mbps_to_ibv_rate`(3)
#[unsafe(no_mangle)]
pub extern "C" fn mbps_to_ibv_rate(mbps: c_int) -> c_int {
    let found = RATES.iter().find(|(_, theirs, _)| *theirs == mbps);
    found.map_or(IBV_RATE_MAX, |(number, _, _)| *number)
}

/// `ibv_rate_to_mult`(3)
#[unsafe(no_mangle)]
pub extern "C" fn ibv_rate_to_mult(rate: c_int) -> c_int {
    let found = RATES.iter().find(|(number, _, _)| *number == rate);
    found.and_then(|(_, _, multiple)| *multiple).unwrap_or(NONE)
}

/// `mult_to_ibv_rate`(3)
#[unsafe(no_mangle)]
pub extern "C" fn mult_to_ibv_rate(multiple: c_int) -> c_int {
    let found = RATES.iter().find(|(_, _, theirs)| *theirs == Some(multiple));
    found.map_or(IBV_RATE_MAX, |(number, _, _)| *number)
}
