//! Messages of runc and CRIU, for the fuzz targets.

use super::{request, wire};

/// Reads a message in every way that the proxy does.
pub fn criu_messages(message: &[u8]) {
    let fields: Result<Vec<_>, _> = wire::fields(message).collect();
    if let Ok(fields) = &fields {
        let whole: Vec<u8> = fields.iter().flat_map(|field| field.raw).copied().collect();
        assert_eq!(whole, message, "fields are cut without a gap");
        assert_eq!(wire::without(message, |_| false).as_deref(), Ok(message));
        for number in fields.iter().map(|field| field.number) {
            let without = wire::without(message, |other| other == number).expect("it was read before");
            assert_eq!(wire::find(&without, number), Ok(None));
            let mut again = without;
            wire::put_varint(&mut again, number & 0x1fff_ffff, 7);
            let found = wire::find_varint(&again, number & 0x1fff_ffff);
            assert_eq!(found, Ok(Some(7)), "the last value counts");
        }
    }
    let _ = request::operation(message);
    let _ = request::response(message);
    // Of no process: its descriptors cannot be opened.
    if let Ok(adapted) = request::adapt(message, i32::MAX, &request::Private::InImages, &[], &[]) {
        let again: Result<Vec<_>, _> = wire::fields(&adapted.message).collect();
        assert!(again.is_ok(), "what goes to CRIU is well formed");
    }
}
