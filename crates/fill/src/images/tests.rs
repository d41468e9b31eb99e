use super::*;

/// A page map: its head, 3 pages that are left for later, 2 that are in the images, 1 left, and one behind it in its old form.
fn page_map() -> Vec<u8> {
    let mut bytes = [COMMON_MAGIC, PAGEMAP_MAGIC].map(u32::to_le_bytes).concat();
    let entry = |page: u64, pages: u64, flags: u32, old: bool| {
        let entry = PagemapEntry {
            vaddr: page * page_bytes(),
            compat_nr_pages: Some(if old { pages as u32 } else { 0 }),
            flags: Some(flags),
            nr_pages: (!old).then_some(pages),
        };
        entry.encode_to_vec()
    };
    let entries = [
        entry(10, 3, PE_LAZY, false),
        entry(13, 2, PE_LAZY | PE_PRESENT, false),
        entry(20, 1, PE_LAZY, false),
        entry(21, 2, PE_LAZY, true),
        entry(30, 2, PE_PRESENT, false),
    ];
    for record in [vec![8, 1]].into_iter().chain(entries) {
        bytes.extend((record.len() as u32).to_le_bytes());
        bytes.extend(record);
    }
    bytes
}

#[test]
fn lazy_pages_are_found_and_neighbours_joined() {
    let page = page_bytes();
    let lazy = lazy_pages(Path::new("x"), &page_map()).unwrap();
    assert_eq!(lazy, [10 * page..13 * page, 20 * page..23 * page]);
}

#[test]
fn what_is_cut_off_is_an_error_that_says_where() {
    let whole = page_map();
    let mut at_a_border = 0;
    for length in 0..whole.len() {
        match lazy_pages(Path::new("some/file"), &whole[..length]) {
            Ok(_) => at_a_border += 1,
            Err(error) => {
                let text = error.to_string();
                assert!(
                    text.starts_with("some/file, offset ") && text.contains("cut off"),
                    "{text}"
                );
                assert!(error.offset <= length as u64);
            }
        }
    }
    // Between two records: nothing in the file tells that one is missing.
    assert_eq!(at_a_border, 5);
}

#[test]
fn what_is_no_image_or_has_wrong_ranges_is_refused() {
    let mut other = page_map();
    other[4] ^= 1;
    let error = lazy_pages(Path::new("x"), &other).unwrap_err().to_string();
    assert!(error.contains("offset 4: the magic number"), "{error}");
    for entries in [[(5, 2), (6, 1)], [(5, 0), (6, 1)], [(5, 1), (6, u64::MAX / 2)]] {
        let mut bytes = [COMMON_MAGIC, PAGEMAP_MAGIC].map(u32::to_le_bytes).concat();
        bytes.extend([2, 0, 0, 0, 8, 1]);
        for (page, pages) in entries {
            let entry = PagemapEntry {
                vaddr: page * page_bytes(),
                compat_nr_pages: None,
                flags: Some(PE_LAZY),
                nr_pages: Some(pages),
            };
            bytes.extend((entry.encoded_len() as u32).to_le_bytes());
            bytes.extend(entry.encode_to_vec());
        }
        assert!(lazy_pages(Path::new("x"), &bytes).is_err(), "{entries:?}");
    }
}

/// An image of mappings, each from one page to another, with a status.
fn mappings_image(entries: &[(u64, u64, u32)]) -> Vec<u8> {
    let vmas = entries.iter().map(|(start, end, status)| VmaEntry {
        start: start * page_bytes(),
        end: end * page_bytes(),
        status: Some(*status),
        madv: None,
    });
    let mm = MmEntry { vmas: vmas.collect() };
    let mut bytes = [COMMON_MAGIC, MM_MAGIC].map(u32::to_le_bytes).concat();
    bytes.extend((mm.encoded_len() as u32).to_le_bytes());
    bytes.extend(mm.encode_to_vec());
    bytes
}

#[test]
fn guard_regions_follow_the_mappings_and_are_none() {
    const ANONYMOUS: u32 = 1 << 9 | 1;
    let mappings = [(10, 20, ANONYMOUS), (20, 24, ANONYMOUS), (40, 50, ANONYMOUS)];
    let plain = mappings_of(Path::new("x"), &mappings_image(&mappings)).unwrap();
    let with = |guards: &[(u64, u64)]| {
        let guards = guards.iter().map(|(start, end)| (*start, *end, VMA_AREA_GUARD));
        let all: Vec<_> = mappings.into_iter().chain(guards).collect();
        mappings_of(Path::new("x"), &mappings_image(&all))
    };
    assert_eq!(with(&[(11, 12), (18, 22), (40, 50)]).unwrap(), plain);
    for wrong in [
        (12, 11),
        (5, 6),
        (23, 25),
        (30, 41),
        (49, 51),
        (1 << 50, (1 << 50) + 1),
    ] {
        assert!(with(&[wrong]).is_err(), "{wrong:?}");
    }
    // What is no guard region is still in order.
    assert!(mappings_of(Path::new("x"), &mappings_image(&[(10, 20, 1), (11, 12, 1)])).is_err());
}
